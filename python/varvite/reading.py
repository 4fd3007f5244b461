"""A snapshot that is open for reading: descriptions, memory for tensors, and the crossing that fills it."""

from __future__ import annotations

import copy
import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from varvite.errors import CorruptionError, TensorNotFoundError
from varvite.objects import SavedObject, positional_objects, read_tree
from varvite.state import Json, LeafReference, from_text, structure_leaves
from varvite.targets import Target
from varvite.tensors import allocate, allocate_array

if TYPE_CHECKING:
    from varvite._native import Engine, SnapshotReader

__all__ = ["EntryRow", "SnapshotView", "entries_of"]


@dataclass(frozen=True, slots=True)
class EntryRow:
    """An entry as the manifest describes it.

    Attributes:
        index: Its place, by which the engine counts.
        name: Its name.
        rank: The rank it is local to, if it is.
        dtype: Element type of what a load gives.
        stored_dtype: Element type of what lies in the pack.
        shape: Global shape, in elements.
        tied_to: Name of the entry whose memory it shared.
        nonfinite: Number of NaN and infinite elements, where there are some.
        abs_max: Largest magnitude of the finite elements; `None` for what is no float.
        l2_norm: Euclidean norm of the finite elements; `None` for what is no float.
        raw_bytes: Length of its raw bytes.
        stored_bytes: Length of what lies in packs for it.
    """

    index: int
    name: str
    rank: int | None
    dtype: str
    stored_dtype: str
    shape: list[int]
    tied_to: str | None
    nonfinite: int | None
    abs_max: float | None
    l2_norm: float | None
    raw_bytes: int
    stored_bytes: int

    @property
    def own_raw_bytes(self) -> int:
        """Raw bytes, where a tie counts once: at the entry that the others are tied to."""
        return 0 if self.tied_to is not None else self.raw_bytes

    @property
    def own_stored_bytes(self) -> int:
        """Stored bytes, where a tie counts once."""
        return 0 if self.tied_to is not None else self.stored_bytes

    @property
    def shown_name(self) -> str:
        """Its name, and its rank where it is local to one."""
        return self.name if self.rank is None else f"{self.name} (rank {self.rank})"


def entries_of(reader: SnapshotReader) -> list[EntryRow]:
    """Returns the entries of a snapshot in the order the reader counts them."""
    return [EntryRow(index, *row) for index, row in enumerate(reader.entries())]


class SnapshotView:
    """One open snapshot, as one rank sees it."""

    def __init__(self, engine: Engine, seq: int, rank: int) -> None:
        """Opens the snapshot with this commit number.

        Raises:
            SnapshotNotFoundError: It is not there.
            CorruptionError: Its manifest is damaged.
        """
        self.reader: SnapshotReader = engine.open(seq)
        self.rank = rank
        self.header = self.reader.header()
        self.rows = entries_of(self.reader)
        self.shared = {row.name: row for row in self.rows if row.rank is None}
        self.local = {row.name: row for row in self.rows if row.rank == rank}
        self.verified_bytes = 0
        self._visible = {**self.local, **self.shared}

    def of_rank(self, rank: int | None = None) -> SnapshotView:
        """Returns a view in which names are those of one rank's own state, by default of this one's.

        A caller's state may use the same names: `rng.torch`, for one. It counts its verified bytes itself.
        """
        view = copy.copy(self)
        rank = self.rank if rank is None else rank
        view._visible = {row.name: row for row in self.rows if row.rank == rank}  # noqa: SLF001 - a copy
        view.verified_bytes = 0
        return view

    def rank_objects(self, rank: int | None = None) -> dict[str, SavedObject]:
        """Returns the objects that belong to one rank, by default to this one, by keyword.

        The state of its generators is among them, under `rng`. Their names are those of `of_rank`.

        Raises:
            CorruptionError: The structure is none that a save writes.
        """
        text = self.reader.rank_structures().get(self.rank if rank is None else rank)
        tree = None if text is None else from_text(text)
        if text is None or (isinstance(tree, dict) and "dict" in tree):
            # Before there were other objects of a rank, their generators stood in a dict.
            return positional_objects(tree)
        return read_tree(text)[1]

    def renamed(self, sources: Mapping[str, str]) -> SnapshotView:
        """Returns a view in which entries have other names; it counts its verified bytes itself.

        Args:
            sources: The entry's own name by the one it is to have.
        """
        firsts: dict[str, str] = {}
        visible: dict[str, EntryRow] = {}
        for name, source in sources.items():
            row = self.row(source)
            first = firsts.setdefault(row.name if row.tied_to is None else row.tied_to, name)
            visible[name] = replace(row, name=name, tied_to=None if first == name else first)
        view = copy.copy(self)
        view._visible = visible  # noqa: SLF001 - a copy of its own kind
        view.verified_bytes = 0
        return view

    def row(self, name: str) -> EntryRow:
        """Returns the entry of a name that a structure refers to.

        Raises:
            CorruptionError: There is none: structure and entries of the manifest disagree.
        """
        row = self._visible.get(name)
        if row is None:
            raise CorruptionError(
                f"corrupt structure of snapshot {self.header['seq']}: it refers to an entry that is not "
                f"there: `{name}`",
                what="structure",
                name=name,
            )
        return row

    def description(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns dtype and shape of an entry."""
        row = self.row(name)
        return row.dtype, tuple(row.shape)

    def same_bytes(self, name: str, other: str) -> bool:
        """True where two entries have equal bytes, by their digests."""
        return self.reader.chunk_digests(self.row(name).index) == self.reader.chunk_digests(
            self.row(other).index
        )

    def allocate_for(self, structure: Json, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Makes memory for every leaf of a structure; tied entries share one object.

        Args:
            structure: The tree whose leaves need memory.
            known: Memory that is there already, by name.
        """
        return self.allocate(structure_leaves(structure), known)

    def allocate(
        self, references: Iterable[LeafReference], known: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Makes memory for some leaves, as `allocate_for` does for all of a structure."""
        made: dict[str, Any] = dict(known or {})
        # A tie may lead to a leaf of another object, whose name stays that object's to read.
        by_first: dict[str, Any] = dict(made)
        for reference in references:
            row = self.row(reference.name)
            first = row.tied_to if row.tied_to is not None else row.name
            if first not in by_first:
                make = allocate_array if reference.is_array else allocate
                by_first[first] = make(row.dtype, row.shape)
            made[row.name] = by_first[first]
        return made

    def unique(self, buffers: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves out names whose object another name has already: each is read once."""
        seen: set[int] = set()
        unique = {}
        for name, buffer in buffers.items():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                unique[name] = buffer
        return unique

    def read(self, destinations: Mapping[str, Any]) -> None:
        """Fills tensors and arrays with the entries of their names, each chunk verified first.

        Args:
            destinations: By name, a dense CPU tensor or array for all of it, or a `Target` for a region.

        Raises:
            CorruptionError: Bytes differ from what was written; names pack, offset and entry.
            StoreError: Reading failed.
        """
        indices = [self.row(name).index for name in destinations]
        values, regions = [], []
        for one in destinations.values():
            is_part = isinstance(one, Target)
            values.append(one.buffer if is_part else one)
            regions.append((one.region.offsets, one.region.lengths) if is_part else None)
        self.verified_bytes += self.reader.read(indices, values, regions)

    def map(self, name: str, *, is_array: bool) -> Any | None:
        """Returns an entry as a tensor over the mapped pack, or `None` where it has to be read.

        Its bytes were verified before; the mapping is private, so writing to it changes no file.
        """
        row = self.row(name)
        mapped = None if is_array or row.raw_bytes == 0 else self.reader.mapped(row.index)
        if mapped is None:
            return None
        import torch

        from varvite.tensors import torch_dtype

        pack, offset_bytes, length_bytes = mapped
        self.verified_bytes += self.reader.check([row.index])
        flat = torch.frombuffer(memoryview(pack), dtype=torch.uint8, count=length_bytes, offset=offset_bytes)
        return flat.view(torch_dtype(row.dtype)).reshape(row.shape)

    def select(self, patterns: Iterable[str]) -> list[EntryRow]:
        """Returns the entries whose names match any of the names or globs (`*` `?` `[...]`).

        Raises:
            TensorNotFoundError: One matches nothing; names what looks alike.
        """
        visible = self._visible
        chosen: dict[str, EntryRow] = {}
        for pattern in patterns:
            names = [pattern] if pattern in visible else fnmatch.filter(visible, pattern)
            if not names:
                nearest = difflib.get_close_matches(pattern, visible, n=3)
                raise TensorNotFoundError(
                    f"no tensor `{pattern}` in snapshot {self.header['seq']}",
                    hint="did you mean " + " or ".join(f"`{name}`" for name in nearest) + "?"
                    if nearest
                    else None,
                    name=pattern,
                    seq=self.header["seq"],
                    nearest=nearest,
                )
            chosen.update((name, visible[name]) for name in names)
        return list(chosen.values())
