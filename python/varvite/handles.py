"""The handle of a save that was started."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from varvite.errors import InternalError
from varvite.records import SaveTimings, SnapshotInfo

if TYPE_CHECKING:
    from varvite._native import SaveJob
    from varvite.native_types import Report

__all__ = ["SaveHandle"]


class SaveHandle:
    """One save, from `CheckpointManager.save`.

    Attributes:
        step: The step that was given.

    Example:
        >>> import tempfile
        >>> from varvite import CheckpointManager
        >>> with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as manager:
        ...     handle = manager.save(7, {"loss": 0.5})
        ...     info = handle.wait()
        ...     info.step, handle.done, handle.durable
        (7, True, True)
    """

    def __init__(
        self,
        step: int,
        job: SaveJob | None,
        started: SaveTimings,
        make_info: Callable[[Report], SnapshotInfo],
        report: Report | None = None,
    ) -> None:
        """Made by the manager: for a job that runs, or with the report of a save that has ended."""
        self.step = step
        self._job = job
        self._started = started
        self._make_info = make_info
        self._report = report

    @property
    def done(self) -> bool:
        """True when the save has ended, either way."""
        return self._job is None or self._job.done

    @property
    def durable(self) -> bool:
        """True when the snapshot is committed: it survives whatever happens now."""
        return self._job is None or (self._job.done and not self._job.failed)

    @property
    def copied(self) -> bool:
        """True when the save reads no tensor of the program any more: all is copied, or the save failed.

        Always true with `staging="copy"`.
        """
        return self._job is None or self._job.copied

    def wait_copied(self, timeout: float | None = None) -> None:
        """Waits until `copied`. A failure of the save ends the wait and is not raised here.

        Args:
            timeout: Seconds to wait at most; `None` for as long as it takes.

        Raises:
            TimeoutError: It is still copying.
        """
        if self._job is not None:
            self._job.wait_copied(timeout)

    @property
    def timings(self) -> SaveTimings:
        """Seconds of each part. Before the save has ended only `blocked` and `queue` are known."""
        if not self.durable:
            return self._started
        report = self.report()
        return dataclasses.replace(
            self._started,
            copy=report["copy_seconds"],
            encode=report["encode_seconds"],
            write=report["write_seconds"],
            sync=report["sync_seconds"],
            commit=report["commit_seconds"],
        )

    def wait(self, timeout: float | None = None) -> SnapshotInfo:
        """Waits until the snapshot is durable. Ctrl-C ends the wait, not the save.

        Args:
            timeout: Seconds to wait at most; `None` for as long as it takes.

        Raises:
            TimeoutError: It is still running.
            CheckpointError: The save failed, each time it is asked.
        """
        return self._make_info(self.report(timeout))

    def report(self, timeout: float | None = None) -> Report:
        """Waits like `wait`; returns the figures of the engine."""
        if self._report is None and self._job is not None:
            self._report = self._job.wait(timeout)
        if self._report is None:
            raise InternalError(
                "internal error: a save without a job has no report", what="a save has a report"
            )
        return self._report

    def __repr__(self) -> str:
        state = "durable" if self.durable else "failed" if self.done else "running"
        return f"<SaveHandle of step {self.step}: {state}>"
