"""Sums of entries by the segments of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from varvite.cli.outline import split_name
from varvite.reading import EntryRow

__all__ = ["Sums", "branches", "grouped"]


@dataclass
class Sums:
    """What entries are together; a tie counts once.

    Attributes:
        tensor_count: Number of entries, tied ones too.
        raw_bytes: Bytes of their tensors.
        stored_bytes: Bytes of their chunks in packs.
        nonfinite: Number of elements that are not finite.
    """

    tensor_count: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    nonfinite: int = 0

    def add(self, entry: EntryRow) -> None:
        """Counts an entry."""
        self.tensor_count += 1
        self.raw_bytes += entry.own_raw_bytes
        self.stored_bytes += entry.own_stored_bytes
        self.nonfinite += entry.nonfinite or 0


@dataclass
class _Node:
    sums: Sums = field(default_factory=Sums)
    children: dict[str, _Node] = field(default_factory=dict)


def branches(entries: Iterable[EntryRow], depth: int | None) -> list[tuple[int, str, str, Sums]]:
    """Returns the tree of names, a parent before its children: (level, segment, whole name, sums).

    Args:
        entries: The entries.
        depth: Levels to go down, `None` for all.
    """
    root = _Node()
    for entry in entries:
        node = root
        root.sums.add(entry)
        for segment in split_name(entry.name):
            node = node.children.setdefault(segment, _Node())
            node.sums.add(entry)
    rows: list[tuple[int, str, str, Sums]] = []
    pending = [(0, segment, segment, node) for segment, node in reversed(root.children.items())]
    while pending:
        level, segment, name, node = pending.pop()
        rows.append((level, segment, name, node.sums))
        if depth is None or level + 1 < depth:
            children = reversed(node.children.items())
            pending += [(level + 1, below, f"{name}.{below}", child) for below, child in children]
    return rows


def grouped(entries: Iterable[EntryRow], group_of: Callable[[EntryRow], str]) -> dict[str, Sums]:
    """Returns the sums of each group, in the order in which groups appear."""
    groups: dict[str, Sums] = {}
    for entry in entries:
        groups.setdefault(group_of(entry), Sums()).add(entry)
    return groups
