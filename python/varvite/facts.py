"""Facts of snapshots as public records, and the fall back from damaged ones."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from varvite.errors import CorruptionError, InvalidInputError, SnapshotNotFoundError, StoreError
from varvite.notices import warn
from varvite.objects import LABELS_KEY
from varvite.plain import type_name
from varvite.reading import SnapshotView
from varvite.records import SnapshotInfo
from varvite.state import from_text, unflatten

if TYPE_CHECKING:
    from varvite._native import Engine
    from varvite.native_types import Header, Report

__all__ = [
    "all_damaged",
    "choices",
    "falling_back",
    "info_reader",
    "make_info",
    "open_first",
    "read_tags",
    "reference_text",
    "tags_by_seq",
]


def reference_text(ref: int | str) -> str:
    """Returns a reference as the engine reads it; a number is a step.

    Raises:
        InvalidInputError: It is neither a number nor a text.

    Example:
        >>> reference_text(100)
        'step:100'
    """
    if isinstance(ref, str):
        return ref
    if isinstance(ref, bool) or not hasattr(ref, "__index__"):
        reason = f"must be a step or a text such as `latest`, not {type_name(ref)}"
        raise InvalidInputError(f"invalid reference `{ref}`: {reason}", what="ref", reason=reason)
    return f"step:{ref.__index__()}"


def tags_by_seq(tags: dict[str, int]) -> dict[int, list[str]]:
    """Returns the names of each commit number.

    Example:
        >>> tags_by_seq({"a": 1, "b": 1})
        {1: ['a', 'b']}
    """
    by_seq: dict[int, list[str]] = {}
    for name, seq in tags.items():
        by_seq.setdefault(seq, []).append(name)
    return by_seq


def read_tags(engine: Engine) -> dict[int, list[str]]:
    """Returns the names of each snapshot; a damaged one must not keep a snapshot from being read."""
    try:
        return tags_by_seq(engine.tags())
    except CorruptionError as error:
        warn(f"names of snapshots can't be read: {error}")
        return {}


def info_reader(engine: Engine) -> Callable[[Report], SnapshotInfo]:
    """Returns what makes the public record of a save's report, and holds no manager.

    A manager holds its last save; were it held by that in turn, dropping it would not close it.
    """
    return lambda report: make_info(report["header"], read_tags(engine))


def make_info(header: Header, tags: dict[int, list[str]]) -> SnapshotInfo:
    """Makes the public record of a snapshot's header."""
    tree = unflatten(from_text(header["metadata"]), _no_leaf)
    metadata = tree if isinstance(tree, dict) else {}
    return SnapshotInfo(
        seq=header["seq"],
        step=header["step"],
        parent=header["parent"],
        created_at=datetime.fromtimestamp(header["created_at_unix_ms"] / 1000, tz=UTC),
        world_size=header["world_size"],
        metrics=dict(header["metrics"]),
        metadata={key: value for key, value in metadata.items() if key != LABELS_KEY},
        kind=header["kind"],
        raw_bytes=header["raw_bytes"],
        stored_bytes=header["stored_bytes"],
        healthy=header["healthy"],
        nonfinite=dict(header["nonfinite"]),
        tags=tags.get(header["seq"], []),
        digest=header["digest"],
    )


def _no_leaf(name: str) -> None:
    raise CorruptionError(f"corrupt metadata: it refers to a tensor: `{name}`", what="metadata", name=name)


@contextmanager
def falling_back(ref: int | str, seq: int, skipped: list[tuple[int, str]]) -> Iterator[None]:
    """Notes a snapshot that turns out damaged, and goes on after the block; only `latest` allows that."""
    try:
        yield
    except SnapshotNotFoundError:
        # With `latest`, another process has removed it since it was listed.
        if ref != "latest":
            raise
    except (CorruptionError, StoreError) as error:
        gone = isinstance(error, StoreError) and error.errno == errno.ENOENT
        if ref != "latest" or not (gone or isinstance(error, CorruptionError)):
            raise
        skipped.append((seq, str(error)))
        warn(f"snapshot {seq} can't be used, going back to the one before: {error}")


def choices(engine: Engine, ref: int | str) -> list[int]:
    """Returns the commit numbers of the snapshots that a reference allows, best first.

    Raises:
        SnapshotNotFoundError: It names none; says what there is.
    """
    text = reference_text(ref)
    candidates = engine.candidates() if text == "latest" else []
    return candidates or [engine.resolve(text)]


def open_first(engine: Engine, ref: int | str, rank: int) -> SnapshotView:
    """Opens the best snapshot that a reference allows and that can be opened.

    Raises:
        SnapshotNotFoundError: There is none.
        CorruptionError: It, or with `latest` every one, is damaged.
    """
    skipped: list[tuple[int, str]] = []
    for seq in choices(engine, ref):
        with falling_back(ref, seq, skipped):
            return SnapshotView(engine, seq, rank)
    if not skipped:
        engine.resolve(reference_text(ref))  # raises: other processes have removed all
    raise all_damaged(skipped)


def all_damaged(skipped: list[tuple[int, str]]) -> CorruptionError:
    """Returns the error where every snapshot is damaged."""
    lines = "\n".join(f"  snapshot {seq}: {why}" for seq, why in skipped)
    return CorruptionError(
        f"every snapshot is damaged:\n{lines}",
        hint="check the device, and look with `varvite verify`; nothing was deleted",
        what="snapshots",
        skipped=skipped,
    )
