"""What calls of a manager report: plain, frozen records.

Sizes are in bytes and times in seconds, but where a field says otherwise. Lists of a record are its
own: changing one changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from datetime import datetime

    from varvite.training.receipts import Receipt

__all__ = [
    "EntryInfo",
    "Finding",
    "Kept",
    "LoadReport",
    "Loaded",
    "MergeReport",
    "Mismatched",
    "Removed",
    "ResumeReport",
    "RetentionPlan",
    "SaveTimings",
    "SnapshotInfo",
    "SyncReport",
    "VerifyReport",
    "format_bytes",
]


_UNITS = ("kB", "MB", "GB", "TB")


class Mismatched(NamedTuple):
    """A saved entry and the caller's object differ.

    Attributes:
        name: Name of the entry.
        field: What differs: `dtype`, `shape`, ...
        expected: What the caller's object has.
        found: What the snapshot has.
    """

    name: str
    field: str
    expected: Any
    found: Any


class Kept(NamedTuple):
    """A snapshot that a retention plan keeps.

    Attributes:
        seq: Commit number.
        step: Training step.
        reasons: Why, each a rule or one of the things always kept.
    """

    seq: int
    step: int
    reasons: list[str]


class Removed(NamedTuple):
    """A snapshot that a retention plan removes.

    Attributes:
        seq: Commit number.
        step: Training step.
        reason: Why.
    """

    seq: int
    step: int
    reason: str


class Finding(NamedTuple):
    """Damage that a verification found.

    Attributes:
        object: Key of the object.
        offset_bytes: Offset from the first byte of the object.
        what: What is wrong there.
        steps: Steps of the snapshots that need these bytes.
    """

    object: str
    offset_bytes: int
    what: str
    steps: list[int]


@dataclass(frozen=True, kw_only=True)
class SaveTimings:
    """Where the time of one save went, in seconds.

    Attributes:
        blocked: From the call of `save` to its return.
        copy: Copying tensors to memory that training does not touch; with `staging="copy"` part of
            `blocked`.
        queue: Waiting for the save before it; part of `blocked`.
        encode: Digesting and coding chunks, in the background, summed over threads.
        write: Writing packs.
        sync: Waiting for the medium.
        commit: Publishing the manifest.
    """

    blocked: float = 0.0
    copy: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    write: float = 0.0
    sync: float = 0.0
    commit: float = 0.0

    def __str__(self) -> str:
        """Returns the times in milliseconds on one line."""
        names = ("blocked", "copy", "queue", "encode", "write", "sync", "commit")
        return ", ".join(f"{name} {getattr(self, name) * 1000:.1f} ms" for name in names)


@dataclass(frozen=True, kw_only=True)
class SnapshotInfo:
    """A committed snapshot.

    Attributes:
        seq: Commit number in the repository, from 1, strictly increasing.
        step: Training step that the caller gave; may repeat.
        parent: Seq of the snapshot the run was at when it saved, `None` for the first.
        created_at: When it was committed, by the writer's clock, with a time zone.
        world_size: Number of ranks that saved it.
        metrics: The caller's metrics.
        metadata: The caller's metadata.
        kind: `base` if all its chunks lie in its own packs, else `delta`.
        raw_bytes: Bytes of all its tensors, ties counted once.
        stored_bytes: Bytes this save added to the repository.
        healthy: True if no tensor holds NaN or infinity.
        nonfinite: Number of NaN and infinite elements, by name of the tensors that have some.
        tags: Names of its pins and tags.
        digest: BLAKE3 of the whole state in hex, equal for equal states however they are packed.
    """

    seq: int
    step: int
    parent: int | None
    created_at: datetime
    world_size: int
    metrics: dict[str, float]
    metadata: dict[str, Any]
    kind: str
    raw_bytes: int
    stored_bytes: int
    healthy: bool
    nonfinite: dict[str, int]
    tags: list[str]
    digest: str

    def __str__(self) -> str:
        """Returns what a list of snapshots would show, on one line."""
        health = "" if self.healthy else f", not finite: {sum(self.nonfinite.values())} elements"
        tags = f", tagged {', '.join(self.tags)}" if self.tags else ""
        metrics = "".join(f", {name} {value:g}" for name, value in self.metrics.items())
        return (
            f"step {self.step} (seq {self.seq}, {self.kind}, {format_bytes(self.raw_bytes)}, "
            f"stored {format_bytes(self.stored_bytes)}{metrics}{tags}{health})"
        )


@dataclass(frozen=True, kw_only=True)
class ResumeReport:
    """What a resume, a warm start or a fork restored. It stands where an int is wanted: the next step.

    Attributes:
        step: Step of the snapshot, the last one that was finished; `None` on a fresh start and after a warm
            start.
        next_step: First step to do: `step + 1`, or 0 on a fresh start and after a warm start.
        fresh: True if there was nothing to resume from, and nothing was touched.
        verb: `resume`, `rollback`, `warm_start` or `fork`.
        source: The other repository that a warm start or a fork read, as it was given; `None` for a resume.
        snapshot: The snapshot that was restored, of the other repository where there is one; `None` on a
            fresh start.
        restored: Keywords of the objects that were restored.
        matched: Names of the entries that were restored.
        missing: Names that the objects have and the snapshot lacks.
        unexpected: Names that the snapshot has and the objects lack.
        mismatched: What differs, by name.
        defaulted: What the snapshot lacks and kept its live value, and what an override changed.
        never_stepped: Parameters whose optimizer state was absent when they were saved.
        overridden: A line for each hyper-parameter that `override` set after the restore, or that a fork
            kept although the parent's differs.
        dropped: Names that a rule of a warm start left out.
        skipped_snapshots: `(seq, why)` of newer snapshots that can't be used.
        rng: `restored`, `derived` or `absent`; `untouched` by a warm start or a fork.
        rng_skipped: A line for each generator that was not restored, and why.
        loader: What became of the data loader's position.
        verified_bytes: Bytes whose digest was checked.
        digest: Digest of the restored state.
        receipt: What was written into the repository about it; `None` where nothing was restored or the
            repository is read-only.

    Example:
        >>> report = ResumeReport(step=41, next_step=42, fresh=False)
        >>> list(range(report, 45))
        [42, 43, 44]
    """

    step: int | None
    next_step: int
    fresh: bool
    verb: str = "resume"
    source: str | None = None
    snapshot: SnapshotInfo | None = None
    restored: list[str] = field(default_factory=list)
    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatched] = field(default_factory=list)
    defaulted: list[str] = field(default_factory=list)
    never_stepped: list[str] = field(default_factory=list)
    overridden: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    skipped_snapshots: list[tuple[int, str]] = field(default_factory=list)
    rng: str = "absent"
    rng_skipped: list[str] = field(default_factory=list)
    loader: str = "absent"
    verified_bytes: int = 0
    digest: str | None = None
    receipt: Receipt | None = None

    def __index__(self) -> int:
        """Returns the next step, so that `range(report, total)` works."""
        return self.next_step

    def __int__(self) -> int:
        """Returns the next step."""
        return self.next_step

    def __str__(self) -> str:
        """Returns the summary."""
        return self.summary()

    def summary(self) -> str:
        """Returns what to print after a resume: a line, and one more for each thing to look at.

        Example:
            >>> print(ResumeReport(step=None, next_step=0, fresh=True).summary())
            fresh start: nothing to resume from
        """
        if self.fresh:
            return "fresh start: nothing to resume from"
        objects = f": {', '.join(self.restored)}" if self.restored else ""
        facts = f"{len(self.matched)} entries, {format_bytes(self.verified_bytes)} verified, rng {self.rng}"
        lines = [f"{self._what_was_done()}{objects} ({facts})"]
        lines += [f"  skipped snapshot {seq}: {why}" for seq, why in self.skipped_snapshots]
        lines += [f"  generator not restored: {line}" for line in self.rng_skipped]
        if self.dropped:
            lines.append(f"  dropped by rules: {len(self.dropped)} names")
        lines += _differences(self.missing, self.unexpected, self.mismatched, self.defaulted)
        return "\n".join(lines)

    def _what_was_done(self) -> str:
        if self.source is None or self.snapshot is None:
            return f"{'rolled back to' if self.verb == 'rollback' else 'resumed after'} step {self.step}"
        where = f"step {self.snapshot.step} (seq {self.snapshot.seq}) of {self.source}"
        return f"{'forked after' if self.verb == 'fork' else 'warm start from'} {where}"


class Loaded(dict[str, Any]):
    """The nest of a snapshot, and which snapshot it is.

    Attributes:
        step: Step of the snapshot.
        snapshot: The snapshot.
        rng: State of the random number generators of this rank, as `varvite.training.rng.restore` takes
            it; `None` where the snapshot has none or where only some names were asked for.
    """

    step: int
    snapshot: SnapshotInfo
    rng: dict[str, Any] | None

    def __init__(
        self, nest: dict[str, Any], snapshot: SnapshotInfo, rng: dict[str, Any] | None = None
    ) -> None:
        """Takes the items of a nest, its snapshot, and the generators' state."""
        super().__init__(nest)
        self.step = snapshot.step
        self.snapshot = snapshot
        self.rng = rng

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the nest, the snapshot, and the generators' state."""
        return Loaded, (dict(self), self.snapshot, self.rng)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load into tensors filled.

    Attributes:
        matched: Names that were filled.
        missing: Names that the caller has and the snapshot lacks.
        unexpected: Names that the snapshot has and the caller lacks.
        mismatched: What differs, by name.
        defaulted: What the snapshot lacks and kept its live value.
    """

    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatched] = field(default_factory=list)
    defaulted: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Returns a line, and one more for each thing to look at."""
        lines = [f"filled {len(self.matched)} entries"]
        lines += _differences(self.missing, self.unexpected, self.mismatched, self.defaulted)
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class RetentionPlan:
    """What retention keeps and removes.

    Attributes:
        kept: Snapshots that stay, in commit order.
        removed: Snapshots that go, in commit order.
        freed_bytes: Bytes of the packs that go with them.
    """

    kept: list[Kept] = field(default_factory=list)
    removed: list[Removed] = field(default_factory=list)
    freed_bytes: int = 0

    def __str__(self) -> str:
        """Returns a line for each snapshot, with why it stays or goes."""
        rows = [
            *((kept.seq, f"keep   step {kept.step}: {', '.join(kept.reasons)}") for kept in self.kept),
            *((removed.seq, f"remove step {removed.step}: {removed.reason}") for removed in self.removed),
        ]
        lines = [text for _, text in sorted(rows)]
        return "\n".join([*lines, f"frees {format_bytes(self.freed_bytes)}"])


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        ok: True if nothing is damaged.
        checked_bytes: Bytes that were read and checked.
        findings: The damage.
    """

    ok: bool
    checked_bytes: int
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        """Returns a line, and one more for each finding."""
        verdict = "no damage found" if self.ok else f"damage found: {len(self.findings)} places"
        lines = [f"{verdict}, {format_bytes(self.checked_bytes)} checked"]
        lines += [f"  {line}" for line in map(_finding_line, self.findings)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What a merge of old packs did.

    Attributes:
        merged_packs: Number of packs that were rewritten.
        written_bytes: Bytes written.
        freed_bytes: Bytes of packs that went. A pack that a reader or a save holds goes later.
        stood_down: Why the merge, or a part of it, was not done, or `None`. Where nothing is to be gained, it
            is `None`, and the numbers are 0.
        findings: Damage that was met; the snapshots concerned are left as they are.
    """

    merged_packs: int = 0
    written_bytes: int = 0
    freed_bytes: int = 0
    stood_down: str | None = None
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        """Returns one line, and one more for each finding."""
        lines = []
        if self.stood_down is None or self.merged_packs:
            lines.append(
                f"merged {self.merged_packs} packs: wrote {format_bytes(self.written_bytes)}, "
                f"freed {format_bytes(self.freed_bytes)}"
            )
        if self.stood_down is not None:
            lines.append(f"no merge: {self.stood_down}")
        lines += [f"  {line}" for line in map(_finding_line, self.findings)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What a push to the remote place did.

    Attributes:
        pushed_objects: Number of objects pushed.
        pushed_bytes: Bytes pushed.
        removed_objects: Number of objects removed there.
        pending_objects: Number of objects that still have to be pushed.
    """

    pushed_objects: int = 0
    pushed_bytes: int = 0
    removed_objects: int = 0
    pending_objects: int = 0

    def __str__(self) -> str:
        """Returns one line."""
        return (
            f"pushed {self.pushed_objects} objects ({format_bytes(self.pushed_bytes)}), "
            f"removed {self.removed_objects}, pending {self.pending_objects}"
        )


@dataclass(frozen=True, kw_only=True)
class EntryInfo:
    """A saved tensor, from the manifest alone.

    Attributes:
        name: Name of the entry.
        dtype: Dtype of the caller's tensor, by its torch name.
        stored_dtype: Dtype of the bytes; differs from `dtype` after a cast.
        shape: Length of each dimension, in elements.
        raw_bytes: Bytes before coding; 0 for a tensor that is tied to one before it.
        stored_bytes: Bytes of its chunks, wherever they lie.
        nonfinite: Number of NaN and infinite elements, `None` where not counted.
        abs_max: Largest magnitude of the finite elements, `None` for what is no float.
        l2_norm: Euclidean norm of the finite elements, `None` for what is no float.
        rank: The rank whose own state it is, such as that of its random number generators; `None` for what
            all share. Names differ among the entries of one rank.
    """

    name: str
    dtype: str
    stored_dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    nonfinite: int | None = None
    abs_max: float | None = None
    l2_norm: float | None = None
    rank: int | None = None

    def __str__(self) -> str:
        """Returns one line."""
        return f"{self.name} {self.dtype} {list(self.shape)} {format_bytes(self.raw_bytes)}"


def format_bytes(length_bytes: int) -> str:
    """Returns a number of bytes for people: three digits and a decimal unit.

    Example:
        >>> format_bytes(999), format_bytes(1_234_567), format_bytes(-20_000)
        ('999 B', '1.23 MB', '-20.0 kB')
    """
    if abs(length_bytes) < 1000:
        return f"{length_bytes} B"
    size, power = length_bytes / 1000, 0
    # Three digits of 999.9 would round up to a fourth one.
    while abs(size) >= 999.5 and power < len(_UNITS) - 1:
        size, power = size / 1000, power + 1
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:.{digits}f} {_UNITS[power]}"


def _finding_line(finding: Finding) -> str:
    steps = ", ".join(map(str, finding.steps)) or "none"
    where = f"`{finding.object}` at byte {finding.offset_bytes}"
    return f"{where}: {finding.what}; snapshots of steps: {steps}"


def _differences(
    missing: list[str], unexpected: list[str], mismatched: list[Mismatched], defaulted: list[str]
) -> list[str]:
    lines = [
        f"  {label}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("defaulted", defaulted))
        if names
    ]
    lines += [f"  {one.name}: {one.field} {one.expected}, in the snapshot: {one.found}" for one in mismatched]
    return lines
