"""The engine: classes of the Rust core, used through `varvite.CheckpointManager`."""

import os
from collections.abc import Sequence
from typing import Any, final

from varvite.native_types import Header, Merged, Plan, Report, Verification

__all__ = ["Engine", "MappedPack", "SaveJob", "SnapshotReader", "__version__"]

__version__: str

@final
class Engine:
    """An open repository."""

    def __new__(
        cls,
        path: str | os.PathLike[str],
        *,
        access: str,
        chunk_bytes: int,
        threads: int,
        sync: bool,
        rules: str,
        merge: str,
        rank: int,
        world_size: int,
    ) -> Engine: ...
    @property
    def root(self) -> str:
        """The root, for messages."""
    @property
    def repository_id(self) -> str:
        """Identity of the repository: 32 hex digits."""
    def recovered(self) -> tuple[int, list[int], list[str]]:
        """What recovery did at open: (staged files removed, snapshots published, orphan packs removed)."""
    def free_bytes(self) -> int | None:
        """Bytes free where the objects lie."""
    def save(
        self,
        step: int,
        names: Sequence[str],
        ranks: Sequence[int | None],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        values: Sequence[Any | None],
        ties: Sequence[str | None],
        *,
        metrics: dict[str, float],
        metadata: str,
        structure: str,
        rank_structure: str | None,
    ) -> SaveJob:
        """Copies all values, then writes and commits in the background."""
    def save_sync(
        self,
        step: int,
        names: Sequence[str],
        ranks: Sequence[int | None],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        values: Sequence[Any | None],
        ties: Sequence[str | None],
        *,
        metrics: dict[str, float],
        metadata: str,
        structure: str,
        rank_structure: str | None,
    ) -> Report:
        """Writes and commits straight from the values while the caller waits; returns the report."""
    def candidates(self) -> list[int]:
        """Commit numbers, newest first."""
    def snapshots(self) -> tuple[list[Header], list[tuple[int, str]]]:
        """Headers of all readable snapshots by seq, and (seq, why) of damaged ones."""
    def header(self, seq: int) -> Header:
        """Header of one snapshot."""
    def resolve(self, reference: str) -> int:
        """Commit number that a reference means."""
    def open(self, seq: int) -> SnapshotReader:
        """Opens a snapshot for reading."""
    def adopt(self, reader: SnapshotReader, verified: bool) -> None:
        """Notes that this run continues from a snapshot."""
    def prune(self, dry_run: bool) -> Plan:
        """What retention keeps and removes, with reasons; does it unless `dry_run`."""
    def delete(self, seq: int) -> int:
        """Deletes a snapshot; returns the bytes freed."""
    def pin(self, seq: int, name: str) -> None:
        """Names a snapshot."""
    def unpin(self, name: str) -> None:
        """Removes a name."""
    def tags(self) -> dict[str, int]:
        """Names and the commit numbers they stand for."""
    def merge_now(self) -> Merged:
        """Waits for a merge that runs, then merges everything of which something is gained."""
    def wait_merge(self) -> None:
        """Waits until no merge runs in the background."""
    def stop_merge(self) -> None:
        """Ends a merge that runs in the background, and starts no more."""
    def raise_merge_failure(self) -> None:
        """Raises the oldest failure of a merge in the background that was not raised yet."""
    def take_merge_findings(self) -> list[tuple[str, int, str, list[int]]]:
        """Damage that merges in the background met: (object, offset in bytes, what, steps) of each, once."""
    def verify(self, seq: int | None, sample: float) -> Verification:
        """Checks one snapshot, or all."""
    def close(self) -> None:
        """Releases the writer lock."""
    def abandon(self) -> None:
        """In a forked child: lets go of the lock's file without releasing the parent's lock."""

@final
class SaveJob:
    """A save that runs in the background."""

    @property
    def done(self) -> bool:
        """True when the save has ended, either way."""
    @property
    def failed(self) -> bool:
        """True when it has ended without a snapshot."""
    def wait(self, timeout: float | None = None) -> Report:
        """Waits for the end; returns the report or raises the failure.

        A timeout in seconds that passes is a `TimeoutError`, and the save goes on.
        """
    def cancel(self) -> None:
        """Asks the save to end without a snapshot."""

@final
class SnapshotReader:
    """A snapshot that is open for reading; retention keeps it while this object lives."""

    def header(self) -> Header:
        """Header of the snapshot."""
    def entries(self) -> list[tuple[str, int | None, str, str, list[int], str | None, int | None, int, int]]:
        """Rows of all entries, in the order that `read` counts them by.

        Each is (name, rank, dtype, stored dtype, shape, tied to, non-finite elements, raw bytes, stored
        bytes).
        """
    def chunk_digests(self, index: int) -> list[tuple[str, int]]:
        """Digests of an entry's chunks in order, as 32 hex digits each, with their raw lengths in bytes."""
    def packs(self) -> list[tuple[str, int]]:
        """Names and lengths of the packs that the snapshot refers to."""
    def structure(self) -> str:
        """Typed tree of the state, as JSON text."""
    def rank_structures(self) -> dict[int, str]:
        """Typed trees of rank-local state, as JSON text by rank."""
    def read(self, indices: Sequence[int], values: Sequence[Any]) -> int:
        """Fills each value with the entry of the same position in `indices`; returns verified raw bytes."""
    def check(self, indices: Sequence[int]) -> int:
        """Verifies entries without keeping their bytes; returns verified raw bytes."""
    def mapped(self, index: int) -> tuple[MappedPack, int, int] | None:
        """An entry inside a mapped pack: (pack, offset in bytes from its start, length in bytes).

        `None` where it has to be read.
        """

@final
class MappedPack:
    """A pack mapped into memory, private to this process: writing to it never changes the file."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
