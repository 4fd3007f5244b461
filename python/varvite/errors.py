"""Errors of Varvite: one class for each thing the caller can do about it.

Every class is a `CheckpointError`, and has a builtin second parent where one fits, so that
`except ValueError` or `except FileNotFoundError` work as a reader expects. An error carries its facts
as attributes (listed in each class and in its `FACTS`), survives pickling with all of them, and says
in its `hint` what to do next.

Messages are a lower-case verb phrase with literals in backticks and one value last after a colon.
The engine raises these classes through `build`; the hints for its errors stand in this file alone.

Example:
    >>> from varvite.errors import TensorNotFoundError
    >>> error = TensorNotFoundError("no tensor `w` in snapshot 3", name="w", seq=3, nearest=["model.w"])
    >>> error.nearest
    ['model.w']
    >>> isinstance(error, KeyError)
    True
"""

from __future__ import annotations

import errno as errno_codes
import os
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "BY_KIND",
    "CheckpointError",
    "CommitConflictError",
    "CorruptionError",
    "EncryptionKeyError",
    "IncompleteSaveError",
    "InternalError",
    "InvalidInputError",
    "MismatchError",
    "NotARepositoryError",
    "RepositoryLockedError",
    "SessionPoisonedError",
    "SnapshotNotFoundError",
    "StoreError",
    "TensorNotFoundError",
    "UnsupportedFormatError",
    "build",
    "first_lines",
    "hint_for",
    "too_new",
]


class CheckpointError(Exception):
    """Root of all errors that Varvite raises by itself.

    A fact that a class lists and the raiser did not know is `None`.

    Attributes:
        message: What happened, without the hint.
        hint: What to do next, or `None`.
        facts: The facts given, by name; each is an attribute too.

    Example:
        >>> print(CheckpointError("cannot go on: 3", hint="go back", step=3))
        cannot go on: 3
        hint: go back
    """

    FACTS: ClassVar[tuple[str, ...]] = ()

    message: str
    hint: str | None
    facts: dict[str, Any]

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        """Makes an error of a message, a hint and any facts."""
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        """Returns the message, and the hint on a line of its own where there is one."""
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the message, the hint, the facts and the notes."""
        notes = getattr(self, "__notes__", None)
        return _rebuild, (type(self), self.message, self.hint, self.facts, notes)


def _rebuild(
    kind: type[CheckpointError],
    message: str,
    hint: str | None,
    facts: dict[str, Any],
    notes: list[str] | None,
) -> CheckpointError:
    error = kind(message, hint=hint, **facts)
    for note in notes or ():
        error.add_note(note)
    return error


class InvalidInputError(CheckpointError, ValueError):
    """The call was wrong: fix the call.

    Attributes:
        what: The argument or key that was refused.
        reason: Why, and what is legal.
        name: Name of the leaf of the state concerned, for a refusal by a save.
        type: Qualified name of the Python type that was refused, for a refusal by a save.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("what", "reason", "name", "type")
    what: str | None = None
    reason: str | None = None
    name: str | None = None
    type: str | None = None


class MismatchError(CheckpointError, ValueError):
    """What is saved and what was asked for disagree: fix the model or the request.

    One entry is described by the first four facts, several by the three lists.

    Attributes:
        name: Name of the entry.
        field: What differs: `dtype`, `shape`, ...
        expected: What the caller's object has.
        found: What the snapshot has.
        missing: Names the caller has and the snapshot lacks.
        unexpected: Names the snapshot has and the caller lacks.
        mismatched: `(name, field, expected, found)` of each entry that differs.
        ranks: Two ranks that save together and disagree: the first has what is `expected`.
    """

    FACTS: ClassVar[tuple[str, ...]] = (
        "name",
        "field",
        "expected",
        "found",
        "missing",
        "unexpected",
        "mismatched",
        "ranks",
    )
    name: str | None = None
    field: str | None = None
    expected: Any = None
    found: Any = None
    missing: list[str] | None = None
    unexpected: list[str] | None = None
    mismatched: list[tuple[str, str, Any, Any]] | None = None
    ranks: list[int] | None = None


class SnapshotNotFoundError(CheckpointError, FileNotFoundError):
    """The reference names no snapshot: choose another. `errno` is `ENOENT`.

    Attributes:
        reference: The reference as given.
        root: Root of the repository.
        reason: What there is instead.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("reference", "root", "reason")
    reference: str | None = None
    root: str | None = None
    reason: str | None = None

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        """Makes an error of a message, a hint and any facts."""
        super().__init__(message, hint=hint, **facts)
        self.errno = errno_codes.ENOENT


class NotARepositoryError(SnapshotNotFoundError, InvalidInputError):
    """No repository lies here: check the path.

    It is a `SnapshotNotFoundError` too, so that code that looks for a first snapshot needs one handler.

    Attributes:
        root: The root that was opened.
        reason: What was found instead.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("root", "reason")


class TensorNotFoundError(CheckpointError, KeyError):
    """The name or glob matches nothing in the snapshot: choose another.

    Attributes:
        name: The name or glob that matched nothing.
        seq: Commit number of the snapshot that was searched.
        nearest: Names that look alike, best first.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("name", "seq", "nearest")
    name: str | None = None
    seq: int | None = None
    nearest: list[str] | None = None


class CommitConflictError(CheckpointError):
    """Another writer published this snapshot first: reopen the repository.

    Attributes:
        object: Key of the object that exists already.
        by: What is known of the other writer.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("object", "by")
    object: str | None = None
    by: str | None = None


class IncompleteSaveError(CheckpointError):
    """A snapshot of several ranks lacks parts; it was never committed.

    Attributes:
        seq: Commit number that was to be published.
        missing_ranks: Ranks whose part is missing, ascending.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("seq", "missing_ranks")
    seq: int | None = None
    missing_ranks: list[int] | None = None


class EncryptionKeyError(CheckpointError, PermissionError):
    """The key does not fit the repository, or there is none: give the right one.

    Attributes:
        root: Root of the repository.
        problem: `missing` (it is encrypted, and no key is given), `wrong` (it is encrypted with another),
            `plain` (it is not encrypted, and was to be) or `unavailable` (the key can't be got where it
            was to come from).
        reason: For `unavailable`: why.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("root", "problem", "reason")
    root: str | None = None
    problem: str | None = None
    reason: str | None = None


class UnsupportedFormatError(CheckpointError, NotImplementedError):
    """The bytes need another version of Varvite or of a library: upgrade.

    Attributes:
        what: Format version, flag, codec or dtype.
        object: Key of the object.
        found: Value in the bytes.
        supported: What this build reads.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("what", "object", "found", "supported")
    what: str | None = None
    object: str | None = None
    found: str | None = None
    supported: str | None = None


class CorruptionError(CheckpointError):
    """The bytes are not those that were written: use another snapshot.

    Attributes:
        object: Key of the object.
        offset_bytes: Offset from the first byte of the object, `None` where the object is a decoded
            structure.
        what: The field, chunk or name concerned.
        expected: What should stand there.
        found: What stands there.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("object", "offset_bytes", "what", "expected", "found")
    object: str | None = None
    offset_bytes: int | None = None
    what: str | None = None
    expected: str | None = None
    found: str | None = None


class StoreError(CheckpointError, OSError):
    """The store failed: disk, permissions or network.

    Attributes:
        operation: What was tried, as a verb.
        object: Path or key.
        errno: Code of the operating system, or `None`.
        strerror: Text of that code.
        filename: Path concerned, where there is one.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("operation", "object", "errno", "strerror", "filename")
    operation: str | None = None
    object: str | None = None

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        """Makes an error of a message, a hint and any facts; `strerror` follows from `errno`."""
        super().__init__(message, hint=hint, **facts)
        if self.errno is not None and self.strerror is None:
            self.strerror = os.strerror(self.errno)


class RepositoryLockedError(CheckpointError):
    """Another process writes to the repository: wait, or open it read-only.

    Attributes:
        root: Root of the repository.
        holder: Process, host and start time of the holder, as it wrote them.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("root", "holder")
    root: str | None = None
    holder: str | None = None


class SessionPoisonedError(CheckpointError, RuntimeError):
    """This save already failed: drop it and save again.

    Attributes:
        first: Text of the first failure.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("first",)
    first: str | None = None


class InternalError(CheckpointError, RuntimeError):
    """A bug of Varvite: report it.

    Attributes:
        what: The invariant that did not hold.
    """

    FACTS: ClassVar[tuple[str, ...]] = ("what",)
    what: str | None = None


BY_KIND: dict[str, type[CheckpointError]] = {
    "InvalidInput": InvalidInputError,
    "Mismatch": MismatchError,
    "Disagreement": MismatchError,
    "NotARepository": NotARepositoryError,
    "SnapshotNotFound": SnapshotNotFoundError,
    "TensorNotFound": TensorNotFoundError,
    "Conflict": CommitConflictError,
    "Locked": RepositoryLockedError,
    "Key": EncryptionKeyError,
    "Unsupported": UnsupportedFormatError,
    "Corrupt": CorruptionError,
    "Incomplete": IncompleteSaveError,
    "Store": StoreError,
    "Poisoned": SessionPoisonedError,
    "Internal": InternalError,
}
"""The class of each error kind of the engine."""


def build(kind: str, message: str, facts: Mapping[str, Any]) -> CheckpointError:
    """Makes the error of an engine kind, with its hint.

    Args:
        kind: A key of `BY_KIND`.
        message: What happened.
        facts: Facts of the kind, by name.

    Returns:
        The error, not raised.

    Example:
        >>> build("Poisoned", "this save has failed before: disk full", {"first": "disk full"})
        SessionPoisonedError('this save has failed before: disk full')
    """
    return BY_KIND[kind](message, hint=hint_for(kind, facts), **facts)


def too_new(what: str, found: int, supported: int) -> CheckpointError:
    """Makes the error for a structure that a newer version of Varvite wrote.

    Args:
        what: The structure.
        found: Its version.
        supported: The newest version that this one reads.

    Example:
        >>> too_new("a receipt", 3, 1).message
        'unsupported version of a receipt: found 3, supported: version 1'
    """
    supports = f"version {supported}"
    message = f"unsupported version of {what}: found {found}, supported: {supports}"
    facts = {"what": f"version of {what}", "found": str(found), "supported": supports}
    return build("Unsupported", message, facts)


def first_lines(lines: Sequence[str], count: int) -> list[str]:
    """Returns the first lines of many, and one more that says how many are left out.

    Example:
        >>> first_lines(["a", "b", "c", "d"], 2)
        ['a', 'b', 'and 2 more']
    """
    left = len(lines) - count
    return [*lines[:count], f"and {left} more"] if left > 0 else list(lines)


def hint_for(kind: str, facts: Mapping[str, Any]) -> str | None:
    """Returns the sentence on what to do about an error of this kind, or `None`.

    Args:
        kind: A key of `BY_KIND`.
        facts: Facts of the error; a missing one only makes the hint less specific.

    Example:
        >>> hint_for("TensorNotFound", {"nearest": ["model.weight"]})
        'did you mean `model.weight`?'
    """
    find = _HINTS.get(kind)
    return None if find is None else find(facts)


def _hint_mismatch(facts: Mapping[str, Any]) -> str:
    if facts.get("field") == "dtype":
        return 'to round the values on load, pass override={"allow_narrowing": True}'
    if facts.get("field") == "set of regions":
        return "save on every rank that holds a part of it, or save `.full_tensor()` of it"
    if facts.get("field") == "shape":
        return "build the object as it was saved, or load only the names that fit"
    return "build the objects as they were saved, or pass strict=False to load what matches"


def _hint_disagreement(facts: Mapping[str, Any]) -> str:
    if facts.get("field") == "value":
        return (
            "give every rank the same, as a broadcast does, or name in rank_local=[...] what each rank has "
            "for itself"
        )
    return "build the objects alike on every rank"


def _hint_snapshot_not_found(_facts: Mapping[str, Any]) -> str:
    return "list what there is with `varvite ls` or `manager.snapshots()`"


def _hint_tensor_not_found(facts: Mapping[str, Any]) -> str:
    nearest = facts.get("nearest") or ()
    if nearest:
        return "did you mean " + " or ".join(f"`{name}`" for name in nearest[:3]) + "?"
    return "list the names with `varvite show` or `manager.entries()`"


def _hint_locked(facts: Mapping[str, Any]) -> str:
    here = f"process {os.getpid()} on {os.uname().nodename} "
    if str(facts.get("holder") or "").startswith(here):
        return "this process has a manager open here: use or close that one, or open with read_only=True"
    return "wait until the other process ends, or open with read_only=True"


_KEY_HINTS = {
    "missing": (
        "set VARVITE_KEY to the key, 64 hex digits or base64, or VARVITE_KEY_COMMAND to a command that "
        'prints it, or pass encryption={"command": [...]}'
    ),
    "wrong": "give the key it was made with: without that nothing in it can be read",
    "plain": (
        "leave encryption out to go on in the clear, or choose another place: a repository is encrypted from "
        "its making on, or never"
    ),
    "unavailable": "make the key available where this process runs, then open it again",
}


def _hint_key(facts: Mapping[str, Any]) -> str:
    return _KEY_HINTS[facts.get("problem") or "missing"]


def _hint_store(facts: Mapping[str, Any]) -> str | None:
    return _STORE_HINTS.get(facts.get("errno"))


_NO_SPACE = "free some space, or keep fewer snapshots (`keep=`), then save again; committed ones are whole"
_NO_ACCESS = "check the owner and the permissions of the folder, or open it with read_only=True"
_STORE_HINTS: dict[int | None, str] = {
    errno_codes.ENOSPC: _NO_SPACE,
    errno_codes.EDQUOT: _NO_SPACE,
    errno_codes.EFBIG: "raise the file-size limit of this process or file system, then save again",
    errno_codes.EACCES: _NO_ACCESS,
    errno_codes.EPERM: _NO_ACCESS,
    errno_codes.EROFS: "the file system is read-only: choose another folder, or pass read_only=True",
    errno_codes.EIO: "the device reports a failure: check it before you trust what lies there",
    errno_codes.EMFILE: "raise the limit of open files of this process (`ulimit -n`)",
    errno_codes.ENAMETOOLONG: "choose a shorter path for the repository",
}


def _always(text: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda _facts: text


_HINTS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "Mismatch": _hint_mismatch,
    "Disagreement": _hint_disagreement,
    "Key": _hint_key,
    "NotARepository": _always("check the path; the first save to an empty folder makes a repository"),
    "SnapshotNotFound": _hint_snapshot_not_found,
    "TensorNotFound": _hint_tensor_not_found,
    "Conflict": _always("another run writes here: give each run its own folder, then reopen this one"),
    "Locked": _hint_locked,
    "Unsupported": _always("upgrade Varvite: a newer version wrote this"),
    "Corrupt": _always("run `varvite verify` to see what is damaged, and use another snapshot"),
    "Incomplete": _always("save again on every rank; the snapshots before this one are whole"),
    "Store": _hint_store,
    "Poisoned": _always("save again; the snapshots before this one are whole"),
    "Internal": _always("this is a bug of Varvite: report it with this text and the traceback"),
}
