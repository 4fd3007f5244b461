"""What a manager has done so far, in figures: frozen records, sizes in bytes and times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from varvite.records import SaveTimings, format_bytes

__all__ = ["SaveStats", "Stats", "SyncState"]


@dataclass(frozen=True, kw_only=True)
class SaveStats:
    """Facts of one save that is durable.

    Attributes:
        step: Training step.
        seq: Commit number.
        timings: Where its time went.
        raw_bytes: Bytes of the state.
        stored_bytes: Bytes written.
        chunk_count: Number of chunks of the state.
        reused_chunk_count: How many of them lay in the repository already.
    """

    step: int
    seq: int
    timings: SaveTimings
    raw_bytes: int
    stored_bytes: int
    chunk_count: int
    reused_chunk_count: int

    def __str__(self) -> str:
        """Returns one line."""
        return (
            f"step {self.step}: {format_bytes(self.raw_bytes)}, stored {format_bytes(self.stored_bytes)}, "
            f"reused {self.reused_chunk_count} of {self.chunk_count} chunks; {self.timings}"
        )


@dataclass(frozen=True, kw_only=True)
class SyncState:
    """What is known of a bucket at one moment.

    Attributes:
        url: The bucket.
        is_running: Whether a push runs.
        newest_pushed_seq: Commit number of the newest snapshot that is whole in the bucket, `None` for none.
        unpushed: Commit numbers of the snapshots that are only here, ascending.
        discarded: Commit numbers of snapshots that were dropped here when the manager was made, because
            another writer had used their numbers in the bucket.
        pending_objects: Number of objects that still have to be pushed.
        pending_bytes: Their bytes.
        moved_bytes: Bytes sent so far by this manager, also of objects that are not whole yet.
        pushed_objects: Number of objects pushed by this manager.
        pushed_bytes: Their bytes.
        removed_objects: Number of objects removed in the bucket by this manager.
        pending_removals: Number of objects that were deleted here and may still lie in the bucket.
        last_error: Text of what the last push failed of, `None` since one has succeeded.
        lease_epoch: How often the place in the bucket has changed hands, `None` where this manager does not
            hold it.
        fenced_by: The writer that has taken it over, `None` where nobody has.
    """

    url: str
    is_running: bool = False
    newest_pushed_seq: int | None = None
    unpushed: list[int]
    discarded: list[int] = field(default_factory=list)
    pending_objects: int = 0
    pending_bytes: int = 0
    moved_bytes: int = 0
    pushed_objects: int = 0
    pushed_bytes: int = 0
    removed_objects: int = 0
    pending_removals: int = 0
    last_error: str | None = None
    lease_epoch: int | None = None
    fenced_by: str | None = None

    def __str__(self) -> str:
        """Returns one line."""
        newest = "nothing" if self.newest_pushed_seq is None else f"snapshot {self.newest_pushed_seq}"
        text = (
            f"{self.url}: {newest} pushed, {len(self.unpushed)} to push "
            f"({self.pending_objects} objects, {format_bytes(self.pending_bytes)})"
        )
        if self.fenced_by is not None:
            return f"{text}; taken over by {self.fenced_by}"
        return text if self.last_error is None else f"{text}; failing: {self.last_error}"


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a manager has done since it was made.

    Attributes:
        saves: The saves that are durable, oldest first.
        save_count: Number of saves that are durable; more than `saves` lists if old ones were dropped.
        raw_bytes: Bytes of all their states.
        stored_bytes: Bytes written by them.
        blocked_seconds: Time the caller waited in `save`.
        queue_seconds: Part of it: waiting for an earlier save.
        errors: Texts of the saves that failed, oldest first, then those of merges in the background.
        sync: What is known of the bucket, `None` where there is none.
    """

    saves: list[SaveStats] = field(default_factory=list)
    save_count: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    blocked_seconds: float = 0.0
    queue_seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    sync: SyncState | None = None

    def __str__(self) -> str:
        """Returns the summary."""
        return self.summary()

    def summary(self) -> str:
        """Returns a line for each save, one of totals, one of the bucket, and one for each failure."""
        totals = (
            f"{self.save_count} saves: {format_bytes(self.raw_bytes)}, "
            f"stored {format_bytes(self.stored_bytes)}; blocked {self.blocked_seconds:.3f} s, "
            f"of which queue {self.queue_seconds:.3f} s"
        )
        bucket = [] if self.sync is None else [str(self.sync)]
        failures = [f"failed: {text}" for text in self.errors]
        return "\n".join([*map(str, self.saves), totals, *bucket, *failures])
