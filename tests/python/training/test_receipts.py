"""Receipts: written by every restore, completed by a verdict, and never in anybody's way."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_same, flip

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError, StoreError, UnsupportedFormatError
from varvite.records import ResumeReport
from varvite.training import rng
from varvite.training.environment import describe_environment
from varvite.training.receipts import Names, Receipt

MOMENT = datetime(2026, 3, 1, 12, tzinfo=UTC)
FULL = Receipt(
    number=7,
    created_at=MOMENT,
    verb="fork",
    source="runs/parent",
    seq=3,
    step=40,
    digest="ab" * 32,
    saved_world_size=2,
    world_size=4,
    next_step=41,
    verified_bytes=1 << 40,
    restored=Names(2, ["model", "optimizer"]),
    missing=Names(30, ["a", "é"]),
    rng="derived",
    loader="restored",
    cursors={"data": {"seed": 1, "position": 2**70, "shape": (1, 2)}},
    environment={"versions": {"python": "3"}, "git": None},
    verdict="discontinuous",
    reason="the loss is 3 times what it was",
    evidence={"loss": math.inf, "baseline": [1.0, -0.0], "raw": b"\x00"},
)


@dataclasses.dataclass
class Position:
    epoch: int
    position: int


class Data:
    """A data source that knows where it is, in one of several ways."""

    def __init__(self, cursor: Any) -> None:
        self.cursor = cursor

    def state_dict(self) -> dict[str, Any]:
        return {"position": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def unsure() -> Any:
    raise InvalidInputError("cannot tell how many samples the loop was given")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with snapshots of steps 4 and 9."""
    path = tmp_path / "run"
    with CheckpointManager(path, fsync=False) as manager:
        for step in (4, 9):
            manager.save_sync(step, weights=torch.full((3,), float(step)))
    return path


def opened(path: Path, **arguments: Any) -> CheckpointManager:
    return CheckpointManager(path, fsync=False, **arguments)


def resume(manager: CheckpointManager, ref: int | str = "latest") -> ResumeReport:
    return manager.resume(ref, weights=torch.zeros(3))


def read_back(receipt: Receipt) -> Receipt:
    milliseconds = (receipt.created_at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    return Receipt.from_json(receipt.to_json(), number=receipt.number, created_at_unix_ms=milliseconds)


# ---- what a resume writes -------------------------------------------------------------------------


def test_a_resume_writes_what_it_restored(folder: Path) -> None:
    with opened(folder) as manager:
        report = manager.resume(4, strict=False, weights=torch.zeros(3), more=torch.zeros(3))
        (receipt,) = manager.receipts()
        info = manager.info(4)
    assert receipt == report.receipt
    assert (receipt.number, receipt.verb, receipt.source) == (1, "resume", None)
    assert (receipt.seq, receipt.step, receipt.digest) == (info.seq, 4, info.digest)
    assert (receipt.next_step, receipt.verified_bytes) == (5, report.verified_bytes)
    assert receipt.verified_bytes > 12
    assert (receipt.saved_world_size, receipt.world_size) == (1, 1)
    assert receipt.restored == Names(1, ["weights"])
    assert receipt.missing == Names(1, ["more"])
    assert (receipt.rng, receipt.loader, receipt.verdict) == ("restored", "absent", None)
    assert receipt.environment == describe_environment()
    assert abs(datetime.now(UTC) - receipt.created_at) < timedelta(minutes=5)


def test_the_object_names_the_snapshot_and_holds_plain_json(folder: Path) -> None:
    with opened(folder) as manager:
        resume(manager)
    fields = json.loads((folder / "receipts" / "1.json").read_text())
    assert [fields[name] for name in ("magic", "format_version", "number", "seq")] == [
        "varvite-receipt",
        1,
        1,
        2,
    ]
    content = fields["content"]
    assert (content["verb"], content["step"], content["next_step"], content["verdict"]) == (
        "resume",
        9,
        10,
        None,
    )


def test_snapshots_that_were_passed_over_are_named(folder: Path) -> None:
    flip(folder / "snapshots" / "2.json", 40)
    with opened(folder) as manager, pytest.warns(RuntimeWarning, match="snapshot 2 can't be used"):
        receipt = resume(manager).receipt
    assert receipt is not None
    assert (receipt.seq, receipt.skipped.count) == (1, 1)
    assert receipt.skipped.first[0].startswith("snapshot 2: corrupt ")


@pytest.mark.parametrize(
    ("cursor", "expected"),
    [
        ({"epoch": 2, "position": 640}, {"epoch": 2, "position": 640}),
        (Position(2, 640), {"epoch": 2, "position": 640}),
        (lambda: Position(2, 640), {"epoch": 2, "position": 640}),
        (None, None),
        ("here", None),
        ({"at": torch.zeros(2)}, None),
        ({"at": object()}, None),
        (unsure, None),
        (Position, None),
    ],
)
def test_the_cursor_of_an_object_is_recorded_where_it_is_plain(
    tmp_path: Path, cursor: Any, expected: Any
) -> None:
    if cursor is Position:
        cursor = [Position(1, 2)]
    with opened(tmp_path / "run") as manager:
        manager.save_sync(1, data=Data(None))
        receipt = manager.resume(data=Data(cursor)).receipt
    assert receipt is not None
    assert receipt.cursors == ({} if expected is None else {"data": expected})


def test_receipts_are_numbered_over_restarts_and_the_newest_can_be_asked_for(folder: Path) -> None:
    for ref in (4, 9, 4):
        with opened(folder) as manager:
            resume(manager, ref)
    with opened(folder, read_only=True) as manager:
        assert [(one.number, one.step) for one in manager.receipts()] == [(1, 4), (2, 9), (3, 4)]
        assert [one.number for one in manager.receipts(2)] == [2, 3]
        assert manager.receipts(0) == []
        with pytest.raises(InvalidInputError, match="invalid newest `-1`"):
            manager.receipts(-1)


def test_neither_a_fresh_start_nor_a_load_nor_a_reader_writes_one(folder: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "empty") as manager:
        assert manager.resume().receipt is None
        assert manager.receipts() == []
    with opened(folder) as manager:
        manager.load()
        assert manager.receipts() == []
    with opened(folder, read_only=True) as manager:
        assert manager.resume(weights=torch.zeros(3)).receipt is None
        assert manager.receipts() == []


def test_a_resume_that_failed_writes_none(folder: Path) -> None:
    with opened(folder) as manager:
        with pytest.raises(ValueError, match="shape"):
            manager.resume(weights=torch.zeros(4))
        assert manager.receipts() == []


def test_no_generator_moves_because_of_a_receipt(folder: Path) -> None:
    with opened(folder) as manager:
        resume(manager)
        after = rng.capture()
        saved = manager.load().rng
    assert_same(after, saved)


# ---- verdicts -------------------------------------------------------------------------------------


def test_a_verdict_completes_the_receipt_and_changes_nothing_else(folder: Path) -> None:
    with opened(folder) as manager:
        before = resume(manager).receipt
        evidence = {"loss": math.nan, "ratio": (1, 2.5)}
        receipt = manager.record_verdict("discontinuous", "loss too high", evidence)
        evidence["loss"] = 0.0
        (found,) = manager.receipts()
        assert manager.last_receipt is receipt
    assert before is not None
    assert found.evidence.keys() == {"loss", "ratio"}
    assert math.isnan(found.evidence["loss"])
    assert found.evidence["ratio"] == (1, 2.5)
    assert (receipt.verdict, receipt.reason) == ("discontinuous", "loss too high")
    open_again = dataclasses.replace(found, verdict=None, reason="", evidence={})
    assert open_again == before


def test_a_later_verdict_replaces_an_earlier_one_of_the_same_resume(folder: Path) -> None:
    with opened(folder) as manager:
        resume(manager, 4)
        manager.record_verdict("not evaluated", "too few steps")
        resume(manager, 9)
        manager.record_verdict("not evaluated")
        manager.record_verdict("continuous")
        found = [(one.number, one.step, one.verdict, one.reason) for one in manager.receipts()]
    assert found == [(1, 4, "not evaluated", "too few steps"), (2, 9, "continuous", "")]


def test_a_verdict_needs_a_receipt_of_this_manager(folder: Path) -> None:
    with opened(folder) as manager:
        assert manager.last_receipt is None
        with pytest.raises(InvalidInputError, match="restored nothing") as error:
            manager.record_verdict("continuous")
        assert "resume" in (error.value.hint or "")
        assert resume(manager).receipt is manager.last_receipt
        with pytest.raises(ValueError, match="shape"):
            manager.resume(weights=torch.zeros(4))
        with pytest.raises(InvalidInputError, match="restored nothing"):
            manager.record_verdict("continuous")


def test_what_is_no_verdict_or_no_plain_evidence_is_refused(folder: Path) -> None:
    with opened(folder) as manager:
        resume(manager)
        with pytest.raises(InvalidInputError, match=r"invalid verdict `ok`.*`continuous`"):
            manager.record_verdict("ok")
        with pytest.raises(InvalidInputError, match=r"cannot write `evidence.loss`") as error:
            manager.record_verdict("continuous", "", {"loss": torch.zeros(1)})
        assert (error.value.what, error.value.name) == ("evidence", "evidence.loss")
        with pytest.raises(InvalidInputError, match=r"evidence.model"):
            manager.record_verdict("continuous", "", {"model": object()})
        with pytest.raises(InvalidInputError, match="length of a receipt"):
            manager.record_verdict("continuous", "x" * (64 << 10))
        assert [one.verdict for one in manager.receipts()] == [None]


# ---- nothing is stopped by a receipt --------------------------------------------------------------


def test_a_resume_stands_where_no_receipt_can_be_written(folder: Path) -> None:
    (folder / "receipts").rmdir()
    weights = torch.zeros(3)
    with opened(folder) as manager:
        (folder / "receipts").rmdir()
        with pytest.warns(RuntimeWarning, match="no receipt of the resume can be written: cannot ") as caught:
            report = manager.resume(weights=weights)
        assert caught[0].filename == __file__
        assert report.receipt is None
        assert (report.next_step, weights.tolist()) == (10, [9.0, 9.0, 9.0])
        assert manager.receipts() == []
        with pytest.raises(InvalidInputError, match="could not write"):
            manager.record_verdict("continuous")


def test_a_verdict_that_can_not_be_written_is_an_error_and_can_be_tried_again(folder: Path) -> None:
    with opened(folder) as manager:
        resume(manager)
        staged = folder / "tmp"
        staged.rmdir()
        with pytest.raises(StoreError):
            manager.record_verdict("continuous")
        assert [one.verdict for one in manager.receipts()] == [None]
        staged.mkdir()
        manager.record_verdict("continuous")
        assert [one.verdict for one in manager.receipts()] == ["continuous"]


def test_a_damaged_receipt_is_left_out_with_a_warning_and_found_by_verify(folder: Path) -> None:
    for _ in range(3):
        with opened(folder) as manager:
            resume(manager)
    flip(folder / "receipts" / "2.json", 60)
    with opened(folder) as manager:
        with pytest.warns(RuntimeWarning, match="receipt 2 can't be read: corrupt digest"):
            assert [one.number for one in manager.receipts()] == [1, 3]
        assert [finding.object for finding in manager.verify().findings] == ["receipts/2.json"]
        assert resume(manager).receipt.number == 4  # type: ignore[union-attr]


def test_content_that_no_version_of_ours_wrote_is_damage_too(folder: Path) -> None:
    with opened(folder) as manager:
        manager._engine.write_receipt(1, '{"version":2}')
        manager._engine.write_receipt(None, "[]")
        resume(manager)
        with pytest.warns(RuntimeWarning, match="receipt [12] can't be read") as caught:
            assert [one.number for one in manager.receipts()] == [3]
    assert [str(warning.message).split(":")[1].strip().split(" ")[0] for warning in caught] == [
        "unsupported",
        "corrupt",
    ]


def test_a_repository_of_before_receipts_is_legal(folder: Path) -> None:
    (folder / "receipts").rmdir()
    with opened(folder, read_only=True) as manager:
        assert manager.receipts() == []
        assert manager.verify().ok
    with opened(folder) as manager:
        assert resume(manager).receipt.number == 1  # type: ignore[union-attr]


# ---- the content ----------------------------------------------------------------------------------


def test_every_field_comes_back_in_type_and_value() -> None:
    for receipt in (FULL, Receipt(number=1, created_at=MOMENT)):
        found = read_back(receipt)
        for field in dataclasses.fields(Receipt):
            assert_same(getattr(found, field.name), getattr(receipt, field.name), field.name)


def test_a_field_that_a_later_version_adds_is_left_out() -> None:
    content = json.loads(FULL.to_json())
    text = json.dumps({**content, "weather": "fine"})
    assert Receipt.from_json(text, number=7, created_at_unix_ms=0).reason == FULL.reason


@pytest.mark.parametrize("name", list(json.loads(FULL.to_json())))
def test_a_missing_field_is_corrupt(name: str) -> None:
    content = json.loads(FULL.to_json())
    del content[name]
    with pytest.raises(CorruptionError, match=name):
        Receipt.from_json(json.dumps(content), number=7, created_at_unix_ms=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 0),
        ("version", True),
        ("version", "1"),
        ("verb", "load"),
        ("verb", ["resume"]),
        ("source", 3),
        ("seq", -1),
        ("seq", True),
        ("seq", 1.0),
        ("step", 1 << 64),
        ("digest", {}),
        ("world_size", None),
        ("restored", ["model"]),
        ("restored", {"count": 1}),
        ("restored", {"count": 0, "first": ["model"]}),
        ("restored", {"count": 1, "first": [1]}),
        ("restored", {"count": 1, "first": "m"}),
        ("restored", {"count": 1, "first": [], "more": 1}),
        ("rng", None),
        ("verdict", "fine"),
        ("reason", None),
        ("cursors", {}),
        ("cursors", [1]),
        ("cursors", {"dict": [["a"]]}),
        ("cursors", {"dict": [["a", {"tensor": "a"}]]}),
        ("environment", {"dict": 3}),
        ("evidence", {"dict": [["a", {"float": "x"}]]}),
        ("evidence", {"list": []}),
        ("evidence", {"tuple": [1]}),
        ("cursors", {"float": "nan"}),
    ],
)
def test_a_value_that_can_not_be_is_corrupt(name: str, value: Any) -> None:
    text = json.dumps({**json.loads(FULL.to_json()), name: value})
    with pytest.raises(CorruptionError):
        Receipt.from_json(text, number=7, created_at_unix_ms=0)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version":1,"version":1}', "[" * 100_000])
def test_what_is_no_object_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptionError):
        Receipt.from_json(text, number=7, created_at_unix_ms=0)


def test_content_of_the_future_is_unsupported_and_a_time_beyond_the_calendar_corrupt() -> None:
    future = json.dumps({**json.loads(FULL.to_json()), "version": 2})
    with pytest.raises(UnsupportedFormatError, match="found 2, supported: version 1"):
        Receipt.from_json(future, number=7, created_at_unix_ms=0)
    with pytest.raises(CorruptionError, match="time of a receipt"):
        Receipt.from_json(FULL.to_json(), number=7, created_at_unix_ms=(1 << 64) - 1)


def test_a_large_model_makes_no_large_receipt(tmp_path: Path) -> None:
    names = [f"layers.{index}.{'x' * 400}" for index in range(2_000)]
    with opened(tmp_path / "run") as manager:
        manager.save_sync(1, weights={name: torch.zeros(1) for name in names[:1_000]}, other=1)
        live = {name: torch.ones(1) for name in names[500:]}
        report = manager.resume(strict=False, weights=live, absent=1, **dict.fromkeys(names[:600], 1))
    receipt = report.receipt
    assert receipt is not None
    assert receipt.missing.count == len(report.missing) > 600
    assert (len(receipt.missing.first), len(receipt.missing.first[1])) == (20, 300)
    assert (tmp_path / "run" / "receipts" / "1.json").stat().st_size < 64 << 10


def test_the_texts_say_what_a_reader_looks_for() -> None:
    assert str(FULL) == (
        "receipt 7: fork from step 40 (seq 3) of runs/parent, next step 41, 1.10 TB verified, rng derived: "
        "discontinuous"
    )
    assert FULL.summary().splitlines()[1:] == [
        "  written: 2026-03-01T12:00:00+00:00",
        "  restored: 2: model, optimizer",
        "  missing: 30: a, é, ...",
        "  ranks: saved by 2, restored by 4",
        "  loader: restored",
        "  cursor of data: seed 1, position 1180591620717411303424, shape (1, 2)",
        "  reason: the loss is 3 times what it was",
        "  evidence: loss inf, baseline [1.0, -0.0], raw b'\\x00'",
    ]
