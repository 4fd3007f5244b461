"""The dicts that the engine gives; `facts.py` and `manager.py` make the public records of them."""

from __future__ import annotations

from typing import TypedDict

__all__ = [
    "Clear",
    "ClearSnapshot",
    "Committed",
    "Header",
    "Merged",
    "PackFigures",
    "PartReport",
    "Plan",
    "Pulled",
    "Report",
    "SyncFigures",
    "Synced",
    "Verification",
]


class Header(TypedDict):
    """Facts of a snapshot; sizes in bytes, the time in milliseconds since 1970 UTC."""

    seq: int
    step: int
    parent: int | None
    created_at_unix_ms: int
    world_size: int
    metrics: dict[str, float]
    metadata: str
    kind: str
    raw_bytes: int
    stored_bytes: int
    healthy: bool
    nonfinite: dict[str, int]
    digest: str


class PackFigures(TypedDict):
    """What writing one rank's pack took; times in seconds."""

    chunk_count: int
    reused_chunk_count: int
    copy_seconds: float
    encode_seconds: float
    write_seconds: float
    sync_seconds: float


class Committed(TypedDict):
    """Facts of a snapshot that was committed; the time in seconds."""

    header: Header
    commit_seconds: float
    retention_error: str | None


class Report(PackFigures, Committed):
    """Facts of a finished save."""


class PartReport(PackFigures):
    """Facts of a pack that a rank has written, durable but not committed."""

    rank: int
    pack: str
    length_bytes: int


class Plan(TypedDict):
    """A retention plan: (seq, step, reasons) kept, (seq, step, reason) removed, bytes freed."""

    kept: list[tuple[int, int, list[str]]]
    removed: list[tuple[int, int, str]]
    freed_bytes: int


class Verification(TypedDict):
    """What a scrub found: bytes checked, and (object, offset in bytes, what, steps) of each finding."""

    checked_bytes: int
    findings: list[tuple[str, int, str, list[int]]]


class Merged(TypedDict):
    """What a merge did: packs rewritten, bytes written and freed, why not, and findings as of a scrub."""

    merged_packs: int
    written_bytes: int
    freed_bytes: int
    stood_down: str | None
    findings: list[tuple[str, int, str, list[int]]]


class ClearSnapshot(TypedDict):
    """What an encrypted snapshot shows without the key."""

    seq: int
    step: int
    created_at_unix_ms: int
    world_size: int
    raw_bytes: int
    stored_bytes: int


class Clear(TypedDict):
    """What an encrypted repository shows without the key; `damaged` are commit numbers, and why."""

    snapshots: list[ClearSnapshot]
    damaged: list[tuple[int, str]]


class Synced(TypedDict):
    """What a push did."""

    pushed_objects: int
    pushed_bytes: int
    removed_objects: int
    pending_objects: int


class SyncFigures(TypedDict):
    """What is known of a bucket: the fields of `varvite.figures.SyncState`."""

    url: str
    is_running: bool
    newest_pushed_seq: int | None
    unpushed: list[int]
    discarded: list[int]
    pending_objects: int
    pending_bytes: int
    moved_bytes: int
    pushed_objects: int
    pushed_bytes: int
    removed_objects: int
    pending_removals: int
    last_error: str | None
    lease_epoch: int | None
    fenced_by: str | None


class Pulled(TypedDict):
    """What a pull did: commit numbers that came, and that were here, objects and bytes that came."""

    pulled: list[int]
    known: list[int]
    pulled_objects: int
    pulled_bytes: int
