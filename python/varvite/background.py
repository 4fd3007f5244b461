"""The save that runs behind the training loop: waiting for it, hearing of its failure, its figures."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections import deque

from varvite.errors import CheckpointError
from varvite.figures import SaveStats, Stats
from varvite.handles import SaveHandle
from varvite.notices import warn

__all__ = ["BackgroundSave"]

_KEPT_FIGURES = 1000
"""Saves whose figures are kept one by one; older ones only count in the totals."""


class BackgroundSave:
    """The last save of a manager; at most one runs."""

    def __init__(self, *, on_error: str, profile: bool) -> None:
        """Starts with no save.

        Args:
            on_error: `raise` or `warn`: what the next call does with a failure.
            profile: Whether a line of timings is written to stderr for each save.
        """
        self._on_error = on_error
        self._profile = profile
        self._last: SaveHandle | None = None
        self._heard: SaveHandle | None = None
        self._counted: SaveHandle | None = None
        self._saves: deque[SaveStats] = deque(maxlen=_KEPT_FIGURES)
        self._errors: deque[str] = deque(maxlen=_KEPT_FIGURES)
        self._totals = Stats()

    def started(self, handle: SaveHandle) -> None:
        """Notes a save that was started, or done at once."""
        self._last = handle
        self._count()

    def wait(self, timeout: float | None = None) -> float:
        """Waits for the last save to end, either way; returns the seconds that took.

        Raises:
            TimeoutError: It still runs.
        """
        if self._last is None or self._last.done:
            self._count()
            return 0.0
        started = time.perf_counter()
        with contextlib.suppress(CheckpointError):  # kept for `raise_failure`
            self._last.wait(timeout)
        self._count()
        return time.perf_counter() - started

    def raise_failure(self) -> None:
        """Raises the failure of the last save, unless a call has raised it before."""
        handle = self._last
        if handle is None or not handle.done or handle.durable or self._heard is handle:
            return
        self._heard = handle
        try:
            handle.wait()
        except CheckpointError as error:
            if self._on_error == "raise":
                raise
            warn(f"the save of step {handle.step} failed: {error}")

    def stats(self) -> Stats:
        """Returns the figures of all saves that have ended."""
        self._count()
        return dataclasses.replace(self._totals, saves=list(self._saves), errors=list(self._errors))

    def _count(self) -> None:
        """Adds the last save to the figures, once it has ended."""
        handle = self._last
        if handle is None or not handle.done or self._counted is handle:
            return
        self._counted = handle
        try:
            report = handle.report()
        except CheckpointError as error:
            self._errors.append(f"step {handle.step}: {error}")
            return
        header = report["header"]
        figures = SaveStats(
            step=handle.step,
            seq=header["seq"],
            timings=handle.timings,
            raw_bytes=header["raw_bytes"],
            stored_bytes=header["stored_bytes"],
            chunk_count=report["chunk_count"],
            reused_chunk_count=report["reused_chunk_count"],
        )
        self._saves.append(figures)
        self._totals = dataclasses.replace(
            self._totals,
            save_count=self._totals.save_count + 1,
            raw_bytes=self._totals.raw_bytes + figures.raw_bytes,
            stored_bytes=self._totals.stored_bytes + figures.stored_bytes,
            blocked_seconds=self._totals.blocked_seconds + figures.timings.blocked,
            queue_seconds=self._totals.queue_seconds + figures.timings.queue,
        )
        if self._profile:
            sys.stderr.write(f"varvite: {figures}\n")
        if report["retention_error"] is not None:
            warn(f"retention failed after the save of step {handle.step}: {report['retention_error']}")
