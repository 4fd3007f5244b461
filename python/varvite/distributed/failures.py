"""A failure that travels from the rank that has it to the others, as JSON: never as a pickle.

Example:
    >>> from varvite.errors import StoreError
    >>> text = encode(StoreError("cannot write `a.pack`", errno=28, object="a.pack"), rank=2)
    >>> error = decode(text, "save")
    >>> print(type(error).__name__, error)
    StoreError rank 2 failed in `save`: cannot write `a.pack`
    >>> error.rank, error.errno, error.object
    (2, 28, 'a.pack')
"""

from __future__ import annotations

import json
from typing import Any

from varvite import errors
from varvite.errors import CheckpointError, first_lines

__all__ = ["decode", "encode", "joined"]

_NOTES = 3
"""Further ranks that are named where several have failed."""

_CLASSES: dict[str, type[CheckpointError]] = {
    name: found
    for name in errors.__all__
    if isinstance(found := getattr(errors, name), type) and issubclass(found, CheckpointError)
}


def encode(error: BaseException, *, rank: int | None = None, verb: str = "failed in") -> bytes:
    """Returns a failure as bytes.

    Args:
        error: The exception.
        rank: The rank that has it; `None` if it is no single rank's and reads alike everywhere.
        verb: What stands between the rank and the call in the text that others see.
    """
    record: dict[str, Any] = {"rank": rank, "verb": verb, "class": "CheckpointError", "facts": {}}
    if isinstance(error, CheckpointError):
        record["class"] = next(one.__name__ for one in type(error).__mro__ if one.__name__ in _CLASSES)
        record["message"], record["hint"] = error.message, error.hint
        record["facts"] = {name: value for name, value in error.facts.items() if _is_json(value)}
    else:
        text = str(error)
        record["message"] = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if not isinstance(error, Exception):
            record["verb"] = "was interrupted in"
        if isinstance(error, OSError) and error.errno is not None:
            record["facts"] = {"errno": error.errno}
    record["notes"] = [str(note) for note in getattr(error, "__notes__", ())]
    return json.dumps(record).encode()


def joined(encoded: list[bytes]) -> bytes:
    """Returns the first of several failures, with a note on each of the others."""
    first, *others = map(json.loads, encoded)
    lines = [f"rank {one['rank']} failed too: {one['message']}" for one in others]
    first["notes"] += first_lines(lines, _NOTES)
    return json.dumps(first).encode()


def decode(encoded: bytes, what: str) -> CheckpointError:
    """Returns the error that the other ranks raise: of the same class, naming rank and cause.

    Args:
        encoded: What `encode` gave.
        what: The call in which it happened.
    """
    record = json.loads(encoded)
    rank, message, facts = record["rank"], record["message"], record["facts"]
    if rank is not None:
        message, facts["rank"] = f"rank {rank} {record['verb']} `{what}`: {message}", rank
    error = _CLASSES[record["class"]](message, hint=record.get("hint"), **facts)
    for note in record["notes"]:
        error.add_note(note)
    return error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
