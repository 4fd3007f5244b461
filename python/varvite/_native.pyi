"""The engine: classes of the Rust core, used through `varvite.CheckpointManager`."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from varvite.native_types import (
    Clear,
    Committed,
    Header,
    Merged,
    PartReport,
    Plan,
    Pulled,
    Report,
    Synced,
    SyncFigures,
    Verification,
)

__all__ = [
    "Engine",
    "MappedPack",
    "SaveJob",
    "SaveTensors",
    "SnapshotReader",
    "Walk",
    "Watchdog",
    "__version__",
    "connection",
    "describe_dense",
    "plan_writers",
    "probe",
    "pull",
    "read_clear",
]

__version__: str

def connection(remote: str, credentials: Callable[[], Mapping[str, Any]] | None) -> dict[str, str | None]:
    """What a connection to a bucket goes by; sends nothing.

    Returns:
        `endpoint`, `region`, `credentials` (where they come from) and `certificates` (a file). What is
        `None` was not named, and is the provider's own.

    Raises:
        InvalidInputError: The options mean nothing.
    """

def describe_dense(value: Any) -> tuple[str, list[int], int] | None:
    """Dtype, shape and address of the first element of a plain tensor, dense and row-major in CPU memory.

    `None` for any other value. A copy-on-write clone stays one.
    """

def plan_writers(holdings: Sequence[bytes]) -> list[bytes]:
    """Who writes what of the state that several ranks hold.

    Args:
        holdings: By rank, what `SaveTensors.holdings` gives there.

    Returns:
        By rank, the mask for `SaveTensors.write_only`.

    Raises:
        MismatchError: Ranks describe a tensor in different ways; names it and the ranks.
    """

def pull(
    folder: str | os.PathLike[str],
    remote: str,
    credentials: Callable[[], Mapping[str, Any]] | None,
    seqs: Sequence[int],
    moved: Callable[[int], None] | None = None,
    key: bytes | None = None,
) -> Pulled:
    """Copies snapshots of a bucket into a folder that is empty or of the same repository, newest first.

    Args:
        folder: The folder.
        remote: What `varvite.buckets.read_remote` made of the bucket.
        credentials: As of `Engine`.
        seqs: Commit numbers; what is there already is not read again.
        moved: Told now and then how many bytes have come so far.
        key: Key of an encrypted repository.
    """

def read_clear(
    path: str | os.PathLike[str] | None,
    remote: str | None = None,
    credentials: Callable[[], Mapping[str, Any]] | None = None,
) -> Clear | None:
    """What an encrypted repository shows without its key; `None` where it is not encrypted.

    Nothing of it is verified: only the key tells whether it is true.

    Args:
        path: The folder; `None` for a bucket alone.
        remote: What `varvite.buckets.read_remote` made of the bucket.
        credentials: As of `Engine`.

    Raises:
        NotARepositoryError: There is none.
    """

def probe(remote: str, credentials: Callable[[], Mapping[str, Any]] | None) -> dict[str, Any]:
    """What a bucket was seen to do, and how fast it is; it needs to hold no repository.

    Raises:
        StoreError: It can't be reached, or lacks what a run needs of it.
    """

@final
class Walk:
    """Takes nests apart and collects their tensors and arrays."""

    def __new__(cls) -> Walk: ...
    def flatten(self, value: Any, name: str) -> str:
        """Takes a nest apart: returns its structure as JSON text and keeps its leaves.

        Their names start with `name`, the empty one for the root.

        Raises:
            InvalidInputError: A value can't come back as it is. The message names its path.
        """
    def leaves(self) -> list[tuple[str, Any]]:
        """The leaves so far, as (name, value), in the order of the walk."""

@final
class SaveTensors:
    """The tensors of one save, in the order of its walks.

    The tensors themselves are referenced until the save has taken their bytes.
    """

    def __new__(
        cls,
        describe_other: Callable[[str, Any], Any] | None = None,
        arrival: Callable[[], None] | None = None,
    ) -> SaveTensors:
        """Starts with no tensor.

        Args:
            describe_other: Describes what is no plain, dense tensor in CPU memory; by default the one of
                `varvite.tensors`.
            arrival: Waits until the memory that it keeps holds its bytes; called by the save's thread.
        """
    def add(self, walk: Walk, rank: int | None = None) -> None:
        """Describes the leaves that a walk has found and takes them from it.

        Leaves of one call that are the same memory are tied, unless they belong to a rank.

        Raises:
            InvalidInputError: A tensor would not come back equal.
        """
    def names(self) -> list[str]:
        """Names of what was described, in order."""
    def store_as(self, wishes: list[str | None]) -> None:
        """Has tensors stored in other dtypes: one wish for each, in the order of `names`.

        Only floats that are narrowed by it, of at least one dimension, are cast; a wish for any other tensor
        changes nothing.

        Raises:
            InvalidInputError: There is no such dtype.
        """
    def clone_lazily(self, least_bytes: int) -> int:
        """Replaces the plain, dense tensors of at least so many bytes by clones, and returns how many.

        The clones share memory until the caller writes; the save's thread copies them. A tensor whose
        storage knows no such clones stays as it is. To be called without gradients.
        """
    def promise(self, tensors: Sequence[Any], least_bytes: int) -> int:
        """Has the save's thread copy what lies in the memory of these tensors; returns how many that are.

        Who calls promises that nobody writes them until the copy is done. Tensors of fewer bytes, and
        those that do not start where one of the given ones does, stay as they are.
        """
    def holdings(self) -> bytes:
        """Describes what this rank holds of state that is no rank's own, for `plan_writers`."""
    def write_only(self, mask: bytes) -> None:
        """Has this rank write some of what `holdings` has described, and tell the digests of the rest.

        To be called before anything is marked to be copied later, with one byte for each tensor: 0 tells,
        1 writes, 2 writes what others hold too.
        """
    def later_bytes(self) -> int:
        """Bytes that the save's thread takes, after the call of `save` has returned."""
    def rows(self) -> list[tuple[str, int | None, str, list[int], str | None]]:
        """What was described: name, rank, dtype, shape, and the name it is tied to, of each."""

@final
class Engine:
    """An open repository."""

    def __new__(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        access: str,
        chunk_bytes: int,
        threads: int,
        sync: bool,
        rules: str,
        merge: str,
        rank: int,
        world_size: int,
        compression: str,
        delta: bool,
        remote: str | None = None,
        credentials: Callable[[], Mapping[str, Any]] | None = None,
        key: bytes | None = None,
        encrypt: bool = False,
    ) -> Engine:
        """Opens a repository in a folder, in a folder with a bucket behind it, or to read in a bucket.

        Args:
            path: The folder; `None` where the bucket is read without one.
            access: `write`, `rank`, `tag` or `read`.
            chunk_bytes: Unit of reuse and verification.
            threads: Threads that copy, digest and read.
            sync: Whether what is written is made durable.
            rules: Retention rules as JSON.
            merge: The merge policy as JSON.
            rank: This rank.
            world_size: Number of ranks.
            compression: How chunks are coded.
            delta: Whether a chunk may be a difference.
            remote: What `varvite.buckets.read_remote` made of the bucket.
            credentials: Gives `access_key_id`, `secret_access_key`, maybe `session_token`, `expires_at`.
            key: Key of an encrypted repository.
            encrypt: Makes a new repository an encrypted one, and refuses one that is not.
        """
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
        tensors: SaveTensors,
        *,
        metrics: dict[str, float],
        metadata: str,
        structure: str,
        rank_structure: str | None,
    ) -> SaveJob:
        """Copies the tensors but those marked to be copied later, and does the rest in the background."""
    def save_sync(
        self,
        step: int,
        tensors: SaveTensors,
        *,
        metrics: dict[str, float],
        metadata: str,
        structure: str,
        rank_structure: str | None,
    ) -> Report:
        """Writes and commits straight from the tensors while the caller waits; returns the report."""
    def begin_session(self, step: int, *, world_size: int, metrics: dict[str, float], metadata: str) -> str:
        """Begins a snapshot of several ranks and returns its ticket, to be handed to each rank."""
    def save_part(
        self,
        ticket: str,
        rank: int,
        tensors: SaveTensors,
        *,
        structure: str,
        rank_structure: str | None,
    ) -> SaveJob:
        """Copies the tensors of a rank and writes its pack in the background; `wait` gives a `PartReport`."""
    def write_part(
        self,
        ticket: str,
        rank: int,
        tensors: SaveTensors,
        *,
        structure: str,
        rank_structure: str | None,
    ) -> PartReport:
        """Writes the pack of a rank straight from the tensors while the caller waits."""
    def commit_session(self, ticket: str, packs: Sequence[str] | None = None) -> Committed:
        """Joins the parts of all ranks and publishes the snapshot.

        Args:
            ticket: The session.
            packs: Names of the packs that the ranks have reported; by default they are looked for.
        """
    def abort_session(self, ticket: str) -> None:
        """Ends a session without a snapshot: nothing of it is ever published. Again, it does nothing."""
    def settle_part(self, ticket: str, rank: int, committed: bool) -> None:
        """Tells the writer of a part what became of it: a committed one is the base of its next part."""
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
    def follow(self, reader: SnapshotReader) -> None:
        """Notes that this run has saved a snapshot by another engine: the parent of its next one."""
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
    def write_receipt(self, seq: int | None, content: str) -> tuple[int, int]:
        """Writes a receipt under the next number; returns (number, milliseconds since 1970 UTC)."""
    def replace_receipt(self, number: int, content: str) -> None:
        """Puts other content in a receipt, in one step."""
    def receipts(
        self, newest: int | None = None
    ) -> tuple[list[tuple[int, int | None, int, str]], list[tuple[int, str]]]:
        """The newest receipts or all, oldest first, and (number, why) of those that can't be read.

        Each is (number, seq, milliseconds since 1970 UTC, content).
        """
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
    def sync_now(self) -> Synced:
        """Waits for a push that runs, then pushes everything that the bucket lacks."""
    def sync_last(self) -> Synced:
        """The same, but what the push that runs fails of is not tried again."""
    def has_unsent(self) -> bool:
        """Whether the bucket has not been told of something that was put or removed here."""
    def sync_state(self) -> SyncFigures | None:
        """What is known of the bucket; `None` where there is none, or this engine doesn't write."""
    def take_sync_failure(self) -> str | None:
        """Text of what a push in the background failed of, once for each cause."""
    def raise_sync_failure(self) -> None:
        """Raises what the last push failed of, if it failed."""
    def stop_sync(self) -> None:
        """Ends the push that runs, starts no more, and lets go of the place in the bucket."""
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
    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the end; returns the `Report`, or `PartReport`, or raises the failure.

        A timeout in seconds that passes is a `TimeoutError`, and the save goes on.
        """
    @property
    def copied(self) -> bool:
        """True when the save reads no memory of the caller any more: all is copied, or the save failed."""
    def wait_copied(self, timeout: float | None = None) -> None:
        """Waits until all is copied, or the save has failed, which is not raised here.

        A timeout in seconds that passes is a `TimeoutError`.
        """
    def cancel(self) -> None:
        """Asks the save to end without a snapshot."""

@final
class SnapshotReader:
    """A snapshot that is open for reading; retention keeps it while this object lives."""

    def header(self) -> Header:
        """Header of the snapshot."""
    def entries(
        self,
    ) -> list[
        tuple[
            str,
            int | None,
            str,
            str,
            list[int],
            str | None,
            int | None,
            float | None,
            float | None,
            int,
            int,
        ]
    ]:
        """Rows of all entries, in the order that `read` counts them by.

        Each is (name, rank, dtype, stored dtype, shape, tied to, non-finite elements, largest magnitude,
        Euclidean norm, raw bytes, stored bytes).
        """
    def chunk_digests(self, index: int) -> list[tuple[str, int]]:
        """Digests of an entry's chunks in order, as 32 hex digits each, with their raw lengths in bytes."""
    def packs(self) -> list[tuple[str, int]]:
        """Names and lengths of the packs that the snapshot refers to."""
    def structure(self) -> str:
        """Typed tree of the state, as JSON text."""
    def rank_structures(self) -> dict[int, str]:
        """Typed trees of rank-local state, as JSON text by rank."""
    def shards(self, index: int) -> list[tuple[list[int], list[int]]]:
        """Regions of an entry's shards: (offsets, lengths), in elements."""
    def read(
        self,
        indices: Sequence[int],
        values: Sequence[Any],
        regions: Sequence[tuple[Sequence[int], Sequence[int]] | None] | None = None,
    ) -> int:
        """Fills each value with the entry of the same position in `indices`; returns verified raw bytes.

        Args:
            indices: Places of entries, as `entries` counts them.
            values: Dense tensors or arrays in CPU memory.
            regions: What of each entry: (offsets, lengths), in elements; `None` for all of it.
        """
    def check(self, indices: Sequence[int]) -> int:
        """Verifies entries without keeping their bytes; returns verified raw bytes."""
    def mapped(self, index: int) -> tuple[MappedPack, int, int] | None:
        """An entry inside a mapped pack: (pack, offset in bytes from its start, length in bytes).

        `None` where it has to be read.
        """

@final
class Watchdog:
    """Ends this process at a deadline, unless `cancel` comes before. Dropping it changes nothing.

    It needs no thread of Python and not the interpreter's lock. In a forked child it does nothing.
    """

    def __new__(cls, seconds: float, exit_code: int, message: str) -> Watchdog:
        """Starts to wait.

        Args:
            seconds: Time until the end; sleep of the machine does not count.
            exit_code: Exit code of the process then, 1 to 255. No handler or destructor is run.
            message: A line for stderr then.

        Raises:
            InvalidInputError: A number of seconds that no clock counts, or an exit code that means success.
            OverflowError: An exit code that none is.
            StoreError: The system refuses a thread.
        """
    def cancel(self) -> None:
        """Lets the process live: after this has returned the deadline has no effect."""

@final
class MappedPack:
    """A pack mapped into memory, private to this process: writing to it never changes the file."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
