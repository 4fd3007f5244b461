"""Who a run is: an id that a resume keeps and that a new run never takes over.

The identity is saved with the run, under a keyword such as `run`. A resume restores it and counts a
restart; a warm start and a fork make a new one and note where the run began. What a metrics service knows
a run by is kept here too, since it has to be known before the first metric is logged.

Example:
    >>> import tempfile
    >>> from varvite import CheckpointManager
    >>> first, second = RunIdentity("baseline"), RunIdentity()
    >>> with CheckpointManager(tempfile.mkdtemp()) as manager:
    ...     info = manager.save_sync(0, run=first)
    ...     report = manager.resume(run=second)
    >>> second.run_id == first.run_id, second.name, second.restart_count
    (True, 'baseline', 1)
"""

from __future__ import annotations

import re
import secrets
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from varvite.errors import InvalidInputError, SnapshotNotFoundError, TensorNotFoundError, too_new
from varvite.plain import corrupt
from varvite.training.checks import is_count

if TYPE_CHECKING:
    from varvite.repository import Ref, Repository

__all__ = ["Origin", "Recorded", "RunIdentity", "TrackerRecord", "read_run"]

TrackerRecord = dict[str, Any]
"""What a tracker is known by: plain values by name, `backend` and `last_step` among them."""

_VERSION = 1
"""Of the saved form."""

_KEYS = {"version", "run_id", "name", "started_at", "restart_count", "origin", "trackers"}
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{1,128}")


class Recorded(Protocol):
    """What an identity asks for the record to save: a tracker."""

    def record(self) -> TrackerRecord:
        """Returns what a later run needs to go on, as plain data."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The snapshot of another run that a run began from.

    Attributes:
        verb: `warm_start` or `fork`.
        path: The other repository, as it was given.
        repository_id: Its identity, 32 hex digits, wherever it is moved.
        seq: Commit number of the snapshot there.
        step: Training step of the snapshot.
        digest: State digest of the snapshot, in hex.
        run_id: Id of the other run; `None` after a warm start, and where it was not saved.
        trackers: What the other run's trackers are known by, by backend; empty after a warm start.
    """

    verb: str
    path: str
    repository_id: str
    seq: int
    step: int
    digest: str
    run_id: str | None = None
    trackers: dict[str, TrackerRecord] = field(default_factory=dict)


class RunIdentity:
    """The identity of a training run, saved under a keyword of its own.

    It is a label: kept with the header, and no part of the state digest.

    Each rank makes one; only what the coordinator's holds is saved.

    Args:
        name: A name for people. One that is given here wins over a saved one.

    Attributes:
        run_id: 128 random bits as 32 hex digits. A resume restores it.
        name: The name, or `None`.
        started_at: When the run was begun, by the clock of its machine.
        restart_count: How many times it was resumed.
        origin: Where it began, if by a warm start or a fork.

    Raises:
        InvalidInputError: The name is no text, or empty.

    Example:
        >>> run = RunIdentity("baseline")
        >>> len(run.run_id), run.restart_count, run.origin
        (32, 0, None)
    """

    is_label = True

    def __init__(self, name: str | None = None) -> None:
        """Makes the identity of a new run."""
        if name is not None and (not isinstance(name, str) or not name):
            reason = "must be a text that is not empty, or None"
            raise InvalidInputError(f"invalid run name: {reason}", what="name", reason=reason)
        self.name = name
        self._given_name = name
        self._trackers: dict[str, Recorded] = {}
        self.begin(None)

    def begin(self, origin: Origin | None) -> None:
        """Makes this the identity of a new run: a new id, no restart, nothing of an earlier tracker.

        A manager's `warm_start` and `fork` call it.

        Args:
            origin: The snapshot of another run that this one begins from.

        Raises:
            InvalidInputError: A tracker is open: it knows the run by an id that it would no longer have.

        Example:
            >>> run = RunIdentity()
            >>> before = run.run_id
            >>> run.begin(None)
            >>> run.run_id == before
            False
        """
        self.must_be_untracked()
        # Not of `random`: an id must draw nothing from the streams of the training.
        self.run_id = secrets.token_hex(16)
        self.started_at = datetime.now(UTC)
        self.restart_count = 0
        self.origin = origin
        self._saved_trackers: dict[str, TrackerRecord] = {}

    def must_be_untracked(self) -> None:
        """Refuses to become another run while a tracker is open, except one that tracks nothing.

        Raises:
            InvalidInputError: One is open.

        Example:
            >>> RunIdentity().must_be_untracked()
        """
        open_now = [backend for backend in self._trackers if backend != "null"]
        if open_now:
            reason = f"a tracker is open under the id it has: `{open_now[0]}`"
            raise InvalidInputError(
                f"cannot make an identity that of another run: {reason}",
                hint="open trackers after resume, warm_start or fork",
                what="identity",
                reason=reason,
            )

    def attach(self, backend: str, tracker: Recorded) -> None:
        """Has a tracker asked for its record at each save. `open_tracker` calls it.

        Args:
            backend: What the record is kept under.
            tracker: The tracker.

        Example:
            >>> from varvite.training.tracking import NullTracker
            >>> run = RunIdentity()
            >>> run.attach("null", NullTracker())
            >>> run.trackers
            {'null': {'backend': 'null', 'last_step': None}}
        """
        self._trackers[backend] = tracker

    @property
    def trackers(self) -> dict[str, TrackerRecord]:
        """What the trackers of this run are known by, by backend: open ones, and those of the snapshot."""
        return {**self._saved_trackers, **{name: one.record() for name, one in self._trackers.items()}}

    def state_dict(self) -> dict[str, Any]:
        """Returns the identity as plain data.

        Example:
            >>> sorted(RunIdentity().state_dict())
            ['name', 'origin', 'restart_count', 'run_id', 'started_at', 'trackers', 'version']
        """
        return {
            "version": _VERSION,
            "run_id": self.run_id,
            "name": self.name,
            "started_at": self.started_at.isoformat(),
            "restart_count": self.restart_count,
            "origin": None if self.origin is None else asdict(self.origin),
            "trackers": self.trackers,
        }

    def check_state_dict(self, state: Any) -> None:
        """Checks a saved identity without taking it.

        Raises:
            CorruptionError: No `state_dict` gave it.
            UnsupportedFormatError: A newer version of Varvite gave it.
            InvalidInputError: A tracker is open, and the saved run is another one.

        Example:
            >>> state = RunIdentity().state_dict()
            >>> RunIdentity().check_state_dict({**state, "restart_count": -1})
            Traceback (most recent call last):
                ...
            varvite.errors.CorruptionError: corrupt restart_count in `structure`: expected a whole number \
            from 0, found: -1
        """
        if _read(state).run_id != self.run_id:
            self.must_be_untracked()

    def load_state_dict(self, state: Any) -> None:
        """Becomes the run that was saved, restarted once more; errors as `check_state_dict`.

        Going back within the run leaves its trackers open.
        """
        self.check_state_dict(state)
        self._take(_read(state))
        self.restart_count += 1

    def _take(self, saved: _Saved) -> None:
        self.run_id = saved.run_id
        self.name = self._given_name if self._given_name is not None else saved.name
        self.started_at = saved.started_at
        self.restart_count = saved.restart_count
        self.origin = saved.origin
        self._saved_trackers = saved.trackers

    @classmethod
    def peek(cls, manager: Repository, ref: Ref = "latest", *, keyword: str = "run") -> RunIdentity | None:
        """Reads the identity that a snapshot holds, and no tensor: before a tracker or a model is built.

        Args:
            manager: The open repository. Nothing of it is changed.
            ref: Which snapshot. With `latest`, damaged ones are passed over with a warning.
            keyword: The keyword it was saved under.

        Returns:
            The identity as it was saved, its restarts not counted up; `None` where the repository holds no
            snapshot, or the snapshot no identity.

        Raises:
            SnapshotNotFoundError: The reference names none.
            CorruptionError: What lies under the keyword is no identity.

        Example:
            >>> import tempfile
            >>> from varvite import CheckpointManager
            >>> with CheckpointManager(tempfile.mkdtemp()) as manager:
            ...     nobody = RunIdentity.peek(manager)
            ...     info = manager.save_sync(0, run=RunIdentity("baseline"))
            ...     RunIdentity.peek(manager).name
            'baseline'
        """
        try:
            state = manager.load(ref, objects=[keyword])[keyword]
        except TensorNotFoundError:
            return None
        except SnapshotNotFoundError:
            if ref != "latest":
                raise
            return None
        identity = cls()
        identity._take(_read(state))
        return identity

    def __repr__(self) -> str:
        return f"RunIdentity({self.run_id[:8]}, name={self.name!r}, restarts={self.restart_count})"


@dataclass(frozen=True)
class _Saved:
    """A saved identity, checked."""

    run_id: str
    name: str | None
    started_at: datetime
    restart_count: int
    origin: Origin | None
    trackers: dict[str, TrackerRecord]


def _read(state: Any) -> _Saved:
    """Reads what `state_dict` gave, which may be damaged or of another program."""
    version = state.get("version") if isinstance(state, dict) else None
    if type(version) is int and version > _VERSION:
        raise too_new("a run identity", version, _VERSION)
    if not isinstance(state, dict) or state.keys() != _KEYS or version != _VERSION:
        _refuse("run identity", f"the keys {', '.join(sorted(_KEYS))}", state)
    return _Saved(
        run_id=_matching(state["run_id"], _RUN_ID, "run_id", "32 hex digits"),
        name=_optional_text(state["name"], "name"),
        started_at=_read_time(state["started_at"]),
        restart_count=_read_count(state["restart_count"], "restart_count"),
        origin=None if state["origin"] is None else _read_origin(state["origin"]),
        trackers=_read_trackers(state["trackers"]),
    )


def _read_origin(saved: Any) -> Origin:
    if not isinstance(saved, dict) or saved.keys() != {one.name for one in fields(Origin)}:
        _refuse("origin of a run", "the facts of a snapshot", saved)
    if saved["verb"] not in ("warm_start", "fork"):
        _refuse("verb of an origin", "`warm_start` or `fork`", saved["verb"])
    if type(saved["path"]) is not str:
        _refuse("path of an origin", "a text", saved["path"])
    run_id = saved["run_id"]
    return Origin(
        verb=saved["verb"],
        path=saved["path"],
        repository_id=_matching(saved["repository_id"], _RUN_ID, "repository_id", "32 hex digits"),
        seq=_read_count(saved["seq"], "seq"),
        step=_read_count(saved["step"], "step"),
        digest=_matching(saved["digest"], _DIGEST, "digest", "hex digits"),
        run_id=None if run_id is None else _matching(run_id, _RUN_ID, "run_id", "32 hex digits"),
        trackers=_read_trackers(saved["trackers"]),
    )


def _read_trackers(saved: Any) -> dict[str, TrackerRecord]:
    if not isinstance(saved, dict) or not all(
        type(backend) is str
        and isinstance(record, dict)
        and record.get("backend") == backend
        and all(type(key) is str and type(value) in _PLAIN for key, value in record.items())
        for backend, record in saved.items()
    ):
        _refuse("trackers of a run", "records of plain values by backend", saved)
    for record in saved.values():
        if record.get("last_step") is not None:
            _read_count(record["last_step"], "last_step")
    return {backend: dict(record) for backend, record in saved.items()}


_PLAIN = (type(None), bool, int, float, str)


def _read_time(saved: Any) -> datetime:
    try:
        time = datetime.fromisoformat(saved)
    except (TypeError, ValueError):
        _refuse("started_at", "a time", saved)
    if time.tzinfo is None:
        _refuse("started_at", "a time with its zone", saved)
    return time


def _read_count(saved: Any, what: str) -> int:
    if not is_count(saved):
        _refuse(what, "a whole number from 0", saved)
    return int(saved)


def _optional_text(saved: Any, what: str) -> str | None:
    if saved is not None and (type(saved) is not str or not saved):
        _refuse(what, "a text or `None`", saved)
    return saved


def _matching(saved: Any, pattern: re.Pattern[str], what: str, expected: str) -> str:
    if type(saved) is not str or pattern.fullmatch(saved) is None:
        _refuse(what, expected, saved)
    return saved


def _refuse(what: str, expected: str, found: object) -> NoReturn:
    raise corrupt(what, expected, found)


def read_run(state: Any) -> tuple[str, dict[str, TrackerRecord]]:
    """Returns the id of a saved run and what its trackers are known by; errors as `check_state_dict`.

    Example:
        >>> run = RunIdentity()
        >>> read_run(run.state_dict()) == (run.run_id, {})
        True
    """
    saved = _read(state)
    return saved.run_id, saved.trackers
