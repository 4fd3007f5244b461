"""The background of a save of several ranks: each writes its pack, the coordinator commits, all end alike."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from varvite.errors import CheckpointError
from varvite.notices import warn
from varvite.visibility import when_visible

if TYPE_CHECKING:
    from varvite._native import Engine, SaveJob
    from varvite.distributed.meeting import Meeting
    from varvite.native_types import PartReport, Report
    from varvite.saving import Payload

__all__ = ["Leading", "RankSave", "take_back"]

_BEAT_SECONDS = 1.0
_POLL_SECONDS = (0.001, 0.05)
"""The first and the longest pause between two looks at what the others have told."""


class RankSave:
    """One rank's side of a save; has what a handle asks of a job. Ends alike on all ranks."""

    def __init__(self, engine: Engine, meeting: Meeting, ticket: str, rank: int, step: int) -> None:
        """Knows the session; nothing is written yet."""
        self._engine = engine
        self._meeting = meeting
        self._ticket = ticket
        self._rank = rank
        self._step = step
        self._native: SaveJob | None = None
        self._report: Report | None = None
        self._error: BaseException | None = None
        self._is_started = False
        self._is_interrupted = False
        self._ended = threading.Event()

    def follow(self, native: SaveJob) -> None:
        """Takes over the pack that the engine writes."""
        self._native = native
        self._start(native.wait)

    def write_from(self, payload: Payload) -> None:
        """Writes the pack straight from the tensors; who calls waits, and changes nothing meanwhile."""
        self._start(
            lambda: self._engine.write_part(self._ticket, self._rank, payload.tensors, **payload.structures)
        )

    def give_up(self, error: BaseException) -> None:
        """Ends the save of all, because of what happened to the caller.

        When it returns, this rank reads no tensor any more. Where all was committed by then, it stays so.
        """
        if not self._is_started:
            self._start(_raising(error))
            return
        self._is_interrupted = True
        self.cancel()
        while not self.done:
            # Another Ctrl-C must not let the caller change what is being written.
            with contextlib.suppress(KeyboardInterrupt):
                self._ended.wait()

    def _start(self, write: Callable[[], PartReport]) -> None:
        self._is_started = True
        # No daemon: the interpreter waits for it, and it ends by itself when others are lost.
        threading.Thread(target=self._run, args=(write,), name=f"varvite-rank-{self._rank}").start()

    def _run(self, write: Callable[[], PartReport]) -> None:
        try:
            part: PartReport | None = None
            try:
                with _living(self._meeting, self._look):
                    part = write()
                self._refuse_interrupted()
            except BaseException as error:  # noqa: BLE001 - told to all, and raised by the handle of each
                # Else another rank has failed, and this one was told to stop.
                if self._error is None:
                    self._error = error
                    self._meeting.report(error)
            else:
                self._meeting.report(json.dumps(part).encode())
            committed = self._conclude()
            if part is not None:
                self._engine.settle_part(self._ticket, self._rank, committed=True)
                self._report = _joined(part, committed)
        except BaseException as error:  # noqa: BLE001 - raised by the handle
            self._error = self._error or error
            self._engine.settle_part(self._ticket, self._rank, committed=False)
        finally:
            self._ended.set()
        self._stay()

    def _stay(self) -> None:
        """Keeps this process here for as long as others need it; its own save has ended."""

    def _refuse_interrupted(self) -> None:
        if self._is_interrupted:
            raise CheckpointError(f"the save of step {self._step} was interrupted")

    def _look(self) -> None:
        """Looks at the others while this rank writes."""

    def _conclude(self) -> dict[str, Any]:
        """Waits until it is known what becomes of all packs; returns the facts of the snapshot."""
        try:
            told: dict[str, Any] = json.loads(_poll(self._meeting.conclusion))
        except CheckpointError as error:
            if not self._meeting.is_concluded:
                error.add_note("the snapshot may be committed all the same: snapshots() tells")
            raise
        return told

    # ---- what a handle asks --------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True when it has ended on this rank, either way."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """True when it has ended without a snapshot."""
        return self.done and self._report is None

    @property
    def copied(self) -> bool:
        """True when no tensor of the program is read any more."""
        return self._native.copied if self._native is not None else self.done

    def wait_copied(self, timeout: float | None = None) -> None:
        """Waits until `copied`."""
        if self._native is not None:
            self._native.wait_copied(timeout)

    def wait(self, timeout: float | None = None) -> Report:
        """Waits for the end; returns the report or raises the failure, the same on all ranks.

        Raises:
            TimeoutError: It is still running.
            CheckpointError: It failed, here or on another rank; names that rank and why.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError("the save is still running")
        if self._report is None:
            assert self._error is not None  # noqa: S101 - it has ended in one of two ways
            raise self._error
        return self._report

    def cancel(self) -> None:
        """Asks this rank to end without its pack, and by that all to end without a snapshot."""
        if self._native is not None:
            self._native.cancel()


class Leading(RankSave):
    """The coordinator's side: it joins the parts and publishes the snapshot."""

    _failure: CheckpointError | None = None
    """What another rank has reported while this one wrote."""

    def _conclude(self) -> dict[str, Any]:
        try:
            parts = self._parts()
            with _living(self._meeting):
                packs = [part["pack"] for part in parts]
                committed = dict(when_visible(lambda: self._engine.commit_session(self._ticket, packs)))
        except Exception as error:
            take_back(self._engine, self._ticket, error)
            self._meeting.conclude(error)
            raise
        try:
            # Retention is the coordinator's alone, and so is what it has to say.
            self._meeting.conclude(json.dumps({**committed, "retention_error": None}).encode())
        except CheckpointError as error:
            warn(f"step {self._step} is saved, but the other ranks can't be told: {error}")
        return committed

    def _parts(self) -> list[dict[str, Any]]:
        """Waits for the packs of all ranks."""
        if self._failure is not None:
            raise self._failure
        return [json.loads(told) for told in _poll(self._meeting.collect)]

    def _look(self) -> None:
        # A pack that can't be committed any more need not be written to its end.
        if self._failure is None:
            try:
                self._meeting.collect()
            except CheckpointError as error:
                self._failure = self._error = error
                self.cancel()

    def _stay(self) -> None:
        # The store may live in this process: it must not end before all have heard how the save did.
        with contextlib.suppress(CheckpointError):
            until = time.monotonic() + self._meeting.LOST_SECONDS
            while not self._meeting.is_heard() and time.monotonic() < until:
                time.sleep(_POLL_SECONDS[1])


def take_back(engine: Engine, ticket: str, cause: BaseException) -> None:
    """Ends a session that has failed: nothing of it is published. For the coordinator.

    Args:
        engine: Its engine.
        ticket: The session.
        cause: Why; it gets a note where that can't be made sure.
    """
    try:
        engine.abort_session(ticket)
    except CheckpointError as failure:
        cause.add_note(f"and what was written of it can't be taken back: {failure}")


@contextlib.contextmanager
def _living(meeting: Meeting, look: Callable[[], None] | None = None) -> Iterator[None]:
    """Shows the others that this rank lives, while its thread is busy elsewhere; and looks at them."""
    done = threading.Event()

    def beat() -> None:
        with contextlib.suppress(CheckpointError):  # the store is gone: the next question to it says so
            while not done.wait(_BEAT_SECONDS):
                meeting.beat()
                if look is not None:
                    look()

    pulse = threading.Thread(target=beat, name="varvite-pulse", daemon=True)
    pulse.start()
    try:
        yield
    finally:
        done.set()
        pulse.join()


def _poll(look: Callable[[], bytes | list[bytes] | None]) -> Any:
    """Looks until something is there, at growing distances."""
    pause, longest = _POLL_SECONDS
    while True:
        found = look()
        if found is not None:
            return found
        time.sleep(pause)
        pause = min(pause * 1.5, longest)


def _raising(error: BaseException) -> Callable[[], PartReport]:
    def write() -> PartReport:
        raise error

    return write


def _joined(part: PartReport, committed: dict[str, Any]) -> Report:
    """Returns the report of a save: figures of this rank, and the snapshot of all."""
    own = ("rank", "pack", "length_bytes")
    report: Any = {key: value for key, value in part.items() if key not in own} | committed
    return cast("Report", report)
