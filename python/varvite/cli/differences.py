"""What differs between two snapshots: by digests first, by bytes only where digests say so."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from varvite.cli.outline import plain_values
from varvite.reading import EntryRow, entries_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from varvite._native import SnapshotReader
    from varvite.cli.arithmetic import Distance
    from varvite.cli.progress import Bar
    from varvite.plain import Json

__all__ = ["Changed", "Differences", "Redescribed", "compare"]


class Changed(NamedTuple):
    """A tensor with other values.

    Attributes:
        entry: The tensor, in the first snapshot.
        changed_bytes: Raw bytes of its chunks whose digests differ: what a save of the change has to
            write. All bytes, where the two snapshots cut it into other chunks.
        distance: How far the values lie apart; `None` without numpy.
    """

    entry: EntryRow
    changed_bytes: int
    distance: Distance | None


class Redescribed(NamedTuple):
    """A tensor that is another kind of tensor.

    Attributes:
        name: Its name.
        field: `dtype`, `shape` or `tied_to`.
        first: What it is in the first snapshot.
        second: What it is in the second.
    """

    name: str
    field: str
    first: Any
    second: Any


@dataclass
class Differences:
    """Everything that differs.

    Attributes:
        changed: Tensors with other values, the largest relative change first.
        redescribed: Tensors of another dtype, shape or tie.
        added: Tensors that only the second snapshot has.
        removed: Tensors that only the first one has.
        values: Plain values that differ: name, and the encoded value in each; `None` where there is none.
        unchanged_count: Number of tensors that are equal in everything.
    """

    changed: list[Changed] = field(default_factory=list)
    redescribed: list[Redescribed] = field(default_factory=list)
    added: list[EntryRow] = field(default_factory=list)
    removed: list[EntryRow] = field(default_factory=list)
    values: list[tuple[str, list[Json], list[Json]]] = field(default_factory=list)
    unchanged_count: int = 0

    @property
    def is_empty(self) -> bool:
        """True where the snapshots are equal."""
        return not (self.changed or self.redescribed or self.added or self.removed or self.values)


class _Pair(NamedTuple):
    """A tensor of both snapshots whose digests differ."""

    first: EntryRow
    second: EntryRow
    changed_bytes: int


def compare(first: SnapshotReader, second: SnapshotReader, start_bar: Callable[[int], Any]) -> Differences:
    """Compares two snapshots of one repository.

    Args:
        first: One.
        second: The other.
        start_bar: Returns a context manager of a bar over so many bytes; called only where bytes are read.

    Raises:
        CorruptionError: Bytes that had to be read differ from what was written.
    """
    found = Differences()
    pairs = _pairs(first, second, found)
    found.values = _changed_values(first, second)
    if not pairs:
        return found
    if importlib.util.find_spec("numpy") is None:
        found.changed = [Changed(pair.first, pair.changed_bytes, None) for pair in pairs]
    else:
        with start_bar(sum(pair.first.raw_bytes for pair in pairs)) as bar:
            _measure(first, second, pairs, found, bar)
    found.changed.sort(key=_rank)
    return found


def _pairs(first: SnapshotReader, second: SnapshotReader, found: Differences) -> list[_Pair]:
    """Sorts tensors into those that differ by digest and all others, which it counts."""
    left = {(entry.name, entry.rank): entry for entry in entries_of(first)}
    right = {(entry.name, entry.rank): entry for entry in entries_of(second)}
    found.removed = [entry for key, entry in left.items() if key not in right]
    found.added = [entry for key, entry in right.items() if key not in left]
    pairs = []
    for key, before in left.items():
        after = right.get(key)
        if after is None:
            continue
        redescribed = _redescribed(before, after)
        found.redescribed += redescribed
        if any(one.field != "tied_to" for one in redescribed):
            continue
        # A tie has the values of the tensor that it is tied to, and that one is compared.
        if before.tied_to is not None and before.tied_to == after.tied_to:
            continue
        changed_bytes = _changed_bytes(first.chunk_digests(before.index), second.chunk_digests(after.index))
        if changed_bytes:
            pairs.append(_Pair(before, after, changed_bytes))
        elif not redescribed:
            found.unchanged_count += 1
    return pairs


def _redescribed(before: EntryRow, after: EntryRow) -> list[Redescribed]:
    fields = ("dtype", "stored_dtype", "shape", "tied_to")
    return [
        Redescribed(before.shown_name, name, getattr(before, name), getattr(after, name))
        for name in fields
        if getattr(before, name) != getattr(after, name)
    ]


def _changed_bytes(before: list[tuple[str, int]], after: list[tuple[str, int]]) -> int:
    """Raw bytes of chunks that differ; all, where the tensor is cut into other chunks."""
    if [length for _, length in before] != [length for _, length in after]:
        return sum(length for _, length in before)
    return sum(left[1] for left, right in zip(before, after, strict=True) if left != right)


def _measure(
    first: SnapshotReader, second: SnapshotReader, pairs: list[_Pair], found: Differences, bar: Bar
) -> None:
    """Reads pairs one at a time, so that memory for two tensors is enough."""
    import numpy as np

    from varvite.cli.arithmetic import distance

    for pair in pairs:
        left: NDArray[Any] = np.empty(pair.first.raw_bytes, dtype=np.uint8)
        right: NDArray[Any] = np.empty(pair.second.raw_bytes, dtype=np.uint8)
        first.read([pair.first.index], [left])
        second.read([pair.second.index], [right])
        measured = distance(pair.first.stored_dtype, left, right)
        if measured.changed_elements:
            found.changed.append(Changed(pair.first, pair.changed_bytes, measured))
        else:
            found.unchanged_count += 1
        bar.advance(pair.first.raw_bytes)


def _rank(changed: Changed) -> tuple[float, int, str]:
    """Sorts what has no number, since it left zero or the finite numbers, before everything that has."""
    relative = changed.distance.relative_change if changed.distance is not None else 0.0
    return (-math.inf if relative is None else -relative, -changed.changed_bytes, changed.entry.shown_name)


def _changed_values(
    first: SnapshotReader, second: SnapshotReader
) -> list[tuple[str, list[Json], list[Json]]]:
    before = plain_values(first.structure(), first.rank_structures())
    after = plain_values(second.structure(), second.rank_structures())
    return [
        (name, [before[name]] if name in before else [], [after[name]] if name in after else [])
        for name in dict.fromkeys([*before, *after])
        # `1`, `1.0` and `True` are equal in Python and are not the same value here.
        if name not in before or name not in after or _text(before[name]) != _text(after[name])
    ]


def _text(node: Json) -> str:
    from varvite.plain import canonical_text

    return canonical_text(node)
