"""The dicts that the engine gives; `facts.py` and `manager.py` make the public records of them."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["Committed", "Header", "Merged", "PackFigures", "PartReport", "Plan", "Report", "Verification"]


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
