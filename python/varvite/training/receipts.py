"""Receipts: what a run was restored from, what was verified, and how it went on.

A receipt is written into the repository when a run has been restored, and completed once it is known
whether the run went on as before. It outlives the run's log and the snapshot that it is about.

Example:
    >>> import tempfile
    >>> from varvite import CheckpointManager
    >>> folder = tempfile.mkdtemp()
    >>> with CheckpointManager(folder) as manager:
    ...     info = manager.save_sync(7, settings={"width": 64})
    >>> with CheckpointManager(folder) as manager:
    ...     start = manager.resume(settings={"width": 0})
    ...     receipt = manager.record_verdict("continuous", "loss and gradients lie where they lay")
    ...     print([(one.number, one.seq, one.next_step, one.verdict) for one in manager.receipts()])
    [(1, 1, 8, 'continuous')]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from varvite.errors import CheckpointError, InvalidInputError, too_new
from varvite.notices import warn
from varvite.objects import kind_of
from varvite.plain import Json, corrupt, short
from varvite.records import format_bytes
from varvite.state import flatten, from_text, to_text, unflatten
from varvite.training.checks import check_choice, is_count
from varvite.training.environment import describe_environment
from varvite.training.verdicts import Verdict

if TYPE_CHECKING:
    from varvite._native import Engine
    from varvite.records import ResumeReport

__all__ = [
    "VERBS",
    "VERDICTS",
    "Names",
    "Receipt",
    "conclude",
    "read_receipts",
    "scan_receipts",
    "write_receipt",
]

VERBS: Final = ("resume", "rollback", "warm_start", "fork")
"""What can have been done."""
VERDICTS: Final = tuple(verdict.value for verdict in Verdict)
"""How a run can have gone on."""

_CONTENT_VERSION: Final = 1
_NAME_LIMIT: Final = 20
"""Most names that are kept of a list; a receipt has to stay small whatever the model."""
_TEXT_LIMIT: Final = 300
"""Longest name or reason of a list that is kept, in characters."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Names:
    """A list of which a receipt keeps only the start.

    Attributes:
        count: Length of the whole list.
        first: The first of them.

    Example:
        >>> print(Names(3, ["model.weight"]))
        3: model.weight, ...
    """

    count: int = 0
    first: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Returns the count and the names."""
        if not self.count:
            return "none"
        rest = ", ..." if self.count > len(self.first) else ""
        return f"{self.count}: {', '.join(self.first)}{rest}"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a resume, a warm start or a fork has restored.

    Attributes:
        number: Number in the repository, from 1 in the order of writing: `receipts/<number>.json`.
        created_at: When it was written first, in UTC: a label.
        verb: `resume`, `rollback`, `warm_start` or `fork`.
        source: The other repository that the state came from; `None` where it came from this one.
        seq: Commit number of the snapshot, in the repository it came from.
        step: Step of the snapshot.
        digest: State digest of the snapshot.
        saved_world_size: Ranks that saved it.
        world_size: Ranks of the run that was restored.
        next_step: First step that was done afterwards.
        verified_bytes: Bytes whose digest was checked.
        restored: Keywords of the objects that were restored.
        missing: Names that the objects have and the snapshot lacks.
        unexpected: Names that the snapshot has and the objects lack.
        mismatched: Names of what differs.
        defaulted: Names of what kept its live value.
        skipped: A line for each newer snapshot that could not be used.
        rng: `restored`, `derived` or `absent`; `untouched` by a warm start or a fork.
        rng_skipped: A line for each generator that was not restored.
        loader: What became of the data loader's position.
        cursors: Position in the data of each object that has one, by keyword, as plain data.
        environment: What the run was made of (`varvite.training.environment`).
        verdict: `continuous`, `discontinuous` or `not evaluated`; `None` until it is known.
        reason: Why, in words.
        evidence: The figures behind the verdict, as plain data.
    """

    number: int
    created_at: datetime
    verb: str = "resume"
    source: str | None = None
    seq: int | None = None
    step: int | None = None
    digest: str | None = None
    saved_world_size: int | None = None
    world_size: int = 1
    next_step: int = 0
    verified_bytes: int = 0
    restored: Names = field(default_factory=Names)
    missing: Names = field(default_factory=Names)
    unexpected: Names = field(default_factory=Names)
    mismatched: Names = field(default_factory=Names)
    defaulted: Names = field(default_factory=Names)
    skipped: Names = field(default_factory=Names)
    rng: str = "absent"
    rng_skipped: Names = field(default_factory=Names)
    loader: str = "absent"
    cursors: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    verdict: str | None = None
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the content as JSON on one line; number and time are not part of it.

        Raises:
            InvalidInputError: Cursors, environment or evidence hold a tensor or what is no plain data.
        """
        content: dict[str, Json] = {"version": _CONTENT_VERSION}
        for name, kind in _FORM.items():
            content[name] = kind.encode(name, getattr(self, name))
        return to_text(content)

    @classmethod
    def from_json(cls, text: str, *, number: int, created_at_unix_ms: int) -> Receipt:
        """Reads the content of a receipt. Fields that a later version has added are left out.

        Args:
            text: What `to_json` returned.
            number: Number of the receipt.
            created_at_unix_ms: When it was written, in milliseconds since 1970 UTC.

        Raises:
            CorruptionError: No `to_json` wrote this.
            UnsupportedFormatError: A newer version wrote it, or a library that a value needs is missing.
        """
        content = from_text(text)
        if not isinstance(content, dict):
            raise corrupt("receipt", "an object", content)
        _check_version(content.get("version"))
        values: dict[str, Any] = {}
        for name, kind in _FORM.items():
            value = content.get(name)
            if name not in content or not kind.is_legal(value):
                raise corrupt(f"`{name}` of a receipt", kind.expected, value)
            values[name] = kind.decode(value)
        try:
            created_at = _EPOCH + timedelta(milliseconds=created_at_unix_ms)
        except OverflowError:
            raise corrupt("time of a receipt", "a time before the year 10000", created_at_unix_ms) from None
        return cls(number=number, created_at=created_at, **values)

    def __str__(self) -> str:
        """Returns one line.

        Example:
            >>> moment = datetime(2026, 1, 1, tzinfo=UTC)
            >>> print(Receipt(number=3, created_at=moment, seq=7, step=4, next_step=5, verdict="continuous"))
            receipt 3: resume from step 4 (seq 7), next step 5, 0 B verified, rng absent: continuous
        """
        source = "" if self.source is None else f" of {self.source}"
        return (
            f"receipt {self.number}: {self.verb} from step {self.step} (seq {self.seq}){source}, next step "
            f"{self.next_step}, {format_bytes(self.verified_bytes)} verified, rng {self.rng}: "
            f"{self.verdict or 'no verdict yet'}"
        )

    def summary(self) -> str:
        """Returns the line of `str()`, and one more for each thing that a reader may want to know.

        Example:
            >>> moment = datetime(2026, 1, 1, tzinfo=UTC)
            >>> receipt = Receipt(number=3, created_at=moment, restored=Names(1, ["model"]), world_size=2)
            >>> print(receipt.summary().partition("2026")[2])
            -01-01T00:00:00+00:00
              restored: 1: model
              ranks: saved by None, restored by 2
              loader: absent
        """
        lines = [str(self), f"  written: {self.created_at.isoformat(timespec='seconds')}"]
        names = ("restored", "missing", "unexpected", "mismatched", "defaulted", "skipped", "rng_skipped")
        for name in names:
            listed: Names = getattr(self, name)
            if listed.count:
                lines.append(f"  {name.replace('_', ' ')}: {listed}")
        lines.append(f"  ranks: saved by {self.saved_world_size}, restored by {self.world_size}")
        lines.append(f"  loader: {self.loader}")
        lines += [f"  cursor of {keyword}: {_facts(cursor)}" for keyword, cursor in self.cursors.items()]
        git = self.environment.get("git")
        if isinstance(git, dict):
            lines.append(f"  source: commit {git.get('commit')}{', changed' if git.get('dirty') else ''}")
        if self.reason:
            lines.append(f"  reason: {self.reason}")
        if self.evidence:
            lines.append(f"  evidence: {_facts(self.evidence)}")
        return "\n".join(lines)


def write_receipt(
    engine: Engine, report: ResumeReport, *, objects: Mapping[str, Any] | None = None, world_size: int = 1
) -> Receipt:
    """Writes a receipt of what a report says, durably. To be called by the coordinator, after the restore.

    Args:
        engine: A repository that is open for writing.
        report: What was restored.
        objects: The objects that were restored, by keyword. One with a `cursor`, a dict or dataclass of plain
            values or a method that returns one, has it recorded.
        world_size: Ranks of this run.

    Returns:
        The receipt, without a verdict.

    Raises:
        StoreError: It can't be written.
        InvalidInputError: The repository is read-only, or the receipt would be too long.
    """
    info = report.snapshot
    draft = Receipt(
        number=0,
        created_at=_EPOCH,
        verb=report.verb,
        source=None if report.source is None else report.source[:_TEXT_LIMIT],
        seq=None if info is None else info.seq,
        step=None if info is None else info.step,
        digest=None if info is None else info.digest,
        saved_world_size=None if info is None else info.world_size,
        world_size=world_size,
        next_step=report.next_step,
        verified_bytes=report.verified_bytes,
        restored=_start_of(report.restored),
        missing=_start_of(report.missing),
        unexpected=_start_of(report.unexpected),
        mismatched=_start_of(one.name for one in report.mismatched),
        defaulted=_start_of(report.defaulted),
        skipped=_start_of(f"snapshot {seq}: {why}" for seq, why in report.skipped_snapshots),
        rng=report.rng,
        rng_skipped=_start_of(report.rng_skipped),
        loader=report.loader[:_TEXT_LIMIT],
        cursors=_cursors_of(objects or {}),
        environment=describe_environment(),
    )
    number, created_at_unix_ms = engine.write_receipt(
        draft.seq if draft.source is None else None, draft.to_json()
    )
    created_at = _EPOCH + timedelta(milliseconds=created_at_unix_ms)
    return dataclasses.replace(draft, number=number, created_at=created_at)


def conclude(
    engine: Engine,
    receipt: Receipt,
    verdict: str,
    reason: str = "",
    evidence: Mapping[str, Any] | None = None,
) -> Receipt:
    """Puts a verdict in a receipt, durably and in one step. To be called by the coordinator.

    Args:
        engine: The repository that it lies in, open for writing.
        receipt: The receipt. An earlier verdict of it is replaced.
        verdict: `continuous`, `discontinuous` or `not evaluated`.
        reason: Why, in words.
        evidence: Figures behind it, as plain data.

    Returns:
        The receipt with the verdict.

    Raises:
        InvalidInputError: There is no such verdict, or the evidence holds what is no plain data.
        StoreError: It can't be written; the receipt is as it was.
    """
    check_choice("verdict", verdict, VERDICTS)
    concluded = dataclasses.replace(receipt, verdict=verdict, reason=reason, evidence=dict(evidence or {}))
    engine.replace_receipt(receipt.number, concluded.to_json())
    return concluded


def read_receipts(engine: Engine, newest: int | None = None) -> list[Receipt]:
    """Reads receipts, oldest first. A damaged one is left out, with a warning. Any rank may call it.

    Args:
        engine: An open repository.
        newest: Read only the last so many.
    """
    receipts, damaged = scan_receipts(engine, newest)
    for number, why in damaged:
        warn(f"receipt {number} can't be read: {why}")
    return receipts


def scan_receipts(engine: Engine, newest: int | None = None) -> tuple[list[Receipt], list[tuple[int, str]]]:
    """Reads receipts, oldest first, and says which can't be read. Any rank may call it.

    Args:
        engine: An open repository.
        newest: Read only the last so many.

    Returns:
        The receipts, and `(number, why)` of the damaged ones.
    """
    rows, damaged = engine.receipts(newest)
    receipts = []
    for number, _, created_at_unix_ms, content in rows:
        try:
            receipts.append(Receipt.from_json(content, number=number, created_at_unix_ms=created_at_unix_ms))
        except CheckpointError as error:
            damaged.append((number, error.message))
    return receipts, sorted(damaged)


def _start_of(lines: Iterable[str]) -> Names:
    listed = list(lines)
    return Names(len(listed), [line[:_TEXT_LIMIT] for line in listed[:_NAME_LIMIT]])


def _cursors_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the position in the data of each object that knows one."""
    cursors: dict[str, Any] = {}
    for keyword, value in objects.items():
        cursor = getattr(value, "cursor", None) if kind_of(value) == "stateful" else None
        try:
            cursor = cursor() if callable(cursor) else cursor
            if dataclasses.is_dataclass(cursor) and not isinstance(cursor, type):
                cursor = dataclasses.asdict(cursor)
            if isinstance(cursor, Mapping):
                cursors[keyword] = _decode_nest(_encode_nest("cursor", dict(cursor)))
        except CheckpointError:
            # It does not know where it is, or says so in values that are not for a receipt.
            continue
    return cursors


def _facts(values: Any) -> str:
    if not isinstance(values, Mapping):
        return short(values)
    return ", ".join(f"{name} {short(value)}" for name, value in values.items())


# The form of the content


class _Kind(NamedTuple):
    """What a field of the content is.

    Attributes:
        expected: What it must be, for messages.
        is_legal: Tells whether a JSON value is that.
        encode: Makes the JSON value of a field's name and value.
        decode: Makes the value of the JSON value.
    """

    expected: str
    is_legal: Callable[[Any], bool]
    encode: Callable[[str, Any], Json] = lambda _name, value: value
    decode: Callable[[Any], Any] = lambda value: value


def _is_count(value: Any) -> bool:
    return is_count(value, limit=1 << 64)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_names(value: Any) -> bool:
    match value:
        case {"count": count, "first": list(first)} if len(value) == 2:
            return _is_count(count) and len(first) <= count and all(map(_is_text, first))
    return False


def _is_nest(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["dict"]


def _or_none(is_legal: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_legal(value)


def _among(known: tuple[str, ...]) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and value in known


def _encode_nest(name: str, value: dict[str, Any]) -> Json:
    flat = flatten(value, prefix=(name,))
    if flat.leaves:
        leaf, reason = flat.leaves[0].name, "a receipt holds plain data, no tensors or arrays"
        raise InvalidInputError(f"cannot write `{leaf}`: {reason}", what=name, name=leaf, reason=reason)
    return flat.structure


def _decode_nest(structure: Json) -> Any:
    return unflatten(structure, _refuse_leaf)


def _refuse_leaf(name: str) -> NoReturn:
    raise corrupt("receipt", "plain data", name)


_COUNT: Final = _Kind("a count", _is_count)
_COUNT_OR_NONE: Final = _Kind("a count or null", _or_none(_is_count))
_TEXT: Final = _Kind("a text", _is_text)
_TEXT_OR_NONE: Final = _Kind("a text or null", _or_none(_is_text))
_NAMES: Final = _Kind(
    "a count and names",
    _is_names,
    lambda _name, value: dataclasses.asdict(value),
    lambda value: Names(**value),
)
_NEST: Final = _Kind("a typed dict", _is_nest, _encode_nest, _decode_nest)

_FORM: Final[dict[str, _Kind]] = {
    "verb": _Kind(" or ".join(VERBS), _among(VERBS)),
    "source": _TEXT_OR_NONE,
    "seq": _COUNT_OR_NONE,
    "step": _COUNT_OR_NONE,
    "digest": _TEXT_OR_NONE,
    "saved_world_size": _COUNT_OR_NONE,
    "world_size": _COUNT,
    "next_step": _COUNT,
    "verified_bytes": _COUNT,
    "restored": _NAMES,
    "missing": _NAMES,
    "unexpected": _NAMES,
    "mismatched": _NAMES,
    "defaulted": _NAMES,
    "skipped": _NAMES,
    "rng": _TEXT,
    "rng_skipped": _NAMES,
    "loader": _TEXT,
    "cursors": _NEST,
    "environment": _NEST,
    "verdict": _Kind(f"null or {' or '.join(VERDICTS)}", _or_none(_among(VERDICTS))),
    "reason": _TEXT,
    "evidence": _NEST,
}
"""The fields of the content in their order."""


def _check_version(version: Json) -> None:
    if type(version) is not int or version < 1:
        raise corrupt("version of a receipt", "at least 1", version)
    if version > _CONTENT_VERSION:
        raise too_new("a receipt", version, _CONTENT_VERSION)
