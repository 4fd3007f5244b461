"""Saves of this process as their coordinator: one at a time for each repository, and none left behind.

PyTorch calls `finish` only where every rank has come that far. Where one did not, the coordinator's writer
hears nothing of it; so a session belongs to the thread that began it, in which PyTorch runs one save after
the other: when that thread begins another one, or has ended, the session is over.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from varvite._native import Engine
from varvite.errors import CheckpointError
from varvite.lifecycle import track
from varvite.manager import CheckpointManager
from varvite.settings import Settings, open_engine, read_settings
from varvite.visibility import when_visible

if TYPE_CHECKING:
    from varvite.native_types import Committed

__all__ = ["Position", "Session", "begin", "note_position", "position", "read_options"]

_POLL_SECONDS = 0.1
"""How often a save looks whether the thread of the one before it still lives."""

_running: dict[Path, Session] = {}
_changed = threading.Condition()
_positions: dict[Path, Position] = {}


class Position(NamedTuple):
    """The snapshot that this process has saved or loaded last: the parent of its next one.

    Attributes:
        repository_id: The repository; its folder may hold another one by now.
        seq: Commit number.
        is_saved: True where it was saved: retention may take it then, but not what a run began from.
    """

    repository_id: str
    seq: int
    is_saved: bool = False


class Session:
    """A snapshot in progress, on the coordinator. `begin` makes it.

    Attributes:
        ticket: What the ranks write for.
        world_size: Number of ranks.
    """

    engine: Engine

    def __init__(self, path: Path, world_size: int) -> None:
        """Belongs to the current thread; nothing is open yet."""
        self.world_size = world_size
        self.ticket = ""
        self._path = path
        self._thread = threading.current_thread()

    @property
    def is_over(self) -> bool:
        """True where nobody can finish it any more: its thread has ended, or begins another one now."""
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def open(self, settings: Settings) -> None:
        """Opens the repository for writing, as the run that is at the snapshot it saved or loaded last."""
        self.engine = open_engine(settings, "write", rank=0, world_size=self.world_size)
        track(self)
        at = position(self._path)
        if at is not None and at.repository_id == self.engine.repository_id:
            # One that is gone or damaged is no parent, and nothing to build on.
            with contextlib.suppress(CheckpointError):
                reader = self.engine.open(at.seq)
                if at.is_saved:
                    self.engine.follow(reader)
                else:
                    self.engine.adopt(reader, False)

    def commit(self, packs: Sequence[str]) -> Committed:
        """Publishes the snapshot of these packs, and ends the session either way."""
        try:
            report = when_visible(lambda: self.engine.commit_session(self.ticket, list(packs)))
        except BaseException as error:
            self.abort(error)
            raise
        at = Position(self.engine.repository_id, report["header"]["seq"], is_saved=True)
        note_position(self._path, at)
        return report

    def abort(self, cause: BaseException) -> None:
        """Ends the session; nothing of it is ever published.

        Args:
            cause: Why; it gets a note where that can't be made sure.
        """
        try:
            if self.ticket:
                self.engine.abort_session(self.ticket)
        except CheckpointError as error:
            cause.add_note(f"the parts that were written may still be published: {error}")
        finally:
            self.close()

    def close(self) -> None:
        """Releases the lock, and lets the next save of this process begin."""
        if hasattr(self, "engine"):
            self.engine.close()
        with _changed:
            if _running.get(self._path) is self:
                del _running[self._path]
            _changed.notify_all()

    def _abandon(self) -> None:
        self.engine.abandon()
        _running.pop(self._path, None)


def begin(
    settings: Settings,
    step: int | None,
    world_size: int,
    *,
    metrics: Mapping[str, float],
    metadata: str,
) -> Session:
    """Begins a snapshot, after the one that this process writes to the same repository.

    Args:
        settings: The repository and how to write it.
        step: The training step; `None` for the one after the newest snapshot's.
        world_size: Number of ranks.
        metrics: Numbers by name.
        metadata: Typed tree of plain values.

    Raises:
        RepositoryLockedError: Another process, or a manager of this one, writes here.
    """
    session = Session(settings.path, world_size)
    with _changed:
        while (before := _running.get(settings.path)) is not None and not before.is_over:
            _changed.wait(_POLL_SECONDS)
        _running[settings.path] = session
    try:
        if before is not None:
            before.abort(CheckpointError("left behind"))
        session.open(settings)
        session.ticket = session.engine.begin_session(
            _next_step(session.engine) if step is None else step,
            world_size=world_size,
            metrics=dict(metrics),
            metadata=metadata,
        )
    except BaseException:
        session.close()
        raise
    return session


def read_options(path: str | os.PathLike[str], **given: Any) -> Settings:
    """Checks options of a writer or reader, as those of a manager; what is left out has the same default.

    Args:
        path: Folder or url.
        **given: Keyword arguments of `CheckpointManager`.

    Raises:
        InvalidInputError: A value is not legal; the message lists what is.
    """
    parameters = inspect.signature(CheckpointManager.__init__).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    # Which rank this is PyTorch says, save by save.
    return read_settings(path, {**defaults, "rank": 0, "world_size": 1, **given})


def note_position(path: Path, at: Position) -> None:
    """Notes where this process is in the repository of a folder."""
    _positions[path] = at


def position(path: Path) -> Position | None:
    """Returns where this process is in the repository of a folder; `None` where it has not been there."""
    return _positions.get(path)


def _next_step(engine: Engine) -> int:
    headers, _damaged = engine.snapshots()
    return headers[-1]["step"] + 1 if headers else 0
