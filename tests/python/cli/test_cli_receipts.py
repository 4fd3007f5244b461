"""`varvite receipts`: a table for people, one object for programs, and damage that stops nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from commands import damage, document, varvite

from varvite import CheckpointManager

TITLES = [
    "number",
    "written",
    "verb",
    "seq",
    "step",
    "next step",
    "verified",
    "rng",
    "loader",
    "ranks",
    "verdict",
]


@pytest.fixture
def resumed(run: Path) -> Path:
    """A repository with three receipts: continuous, discontinuous, and without a verdict."""
    verdicts = (("continuous", "as before", {"loss": 0.5}), ("discontinuous", "the \x1b[31mloss", {}))
    for index, ref in enumerate((10, 20, 30)):
        model = torch.nn.Linear(3, 2)
        with CheckpointManager(run, fsync=False) as manager:
            manager.resume(ref, strict=False, model=model)
            if index < len(verdicts):
                manager.record_verdict(*verdicts[index])
    return run


def test_json_has_everything_that_a_receipt_holds(resumed: Path) -> None:
    found = document("receipts", resumed)
    assert found["repository"]["path"] == str(resumed)
    assert found["damaged"] == []
    rows = found["receipts"]
    assert [(row["number"], row["seq"], row["step"], row["next_step"]) for row in rows] == [
        (1, 1, 10, 11),
        (2, 3, 20, 21),
        (3, 4, 30, 31),
    ]
    with CheckpointManager(resumed, read_only=True) as manager:
        first = manager.receipts()[0]
    assert rows[0] == {
        "number": 1,
        "created_at": first.created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "verb": "resume",
        "source": None,
        "seq": 1,
        "step": 10,
        "digest": first.digest,
        "saved_world_size": 1,
        "world_size": 1,
        "next_step": 11,
        "verified_bytes": first.verified_bytes,
        "restored": {"count": 1, "first": ["model"]},
        "missing": {"count": 0, "first": []},
        "unexpected": {"count": first.unexpected.count, "first": first.unexpected.first},
        "mismatched": {"count": 0, "first": []},
        "defaulted": {"count": 0, "first": []},
        "skipped": {"count": 0, "first": []},
        "rng": "restored",
        "rng_skipped": {"count": 0, "first": []},
        "loader": "absent",
        "cursors": {},
        "environment": first.environment,
        "verdict": "continuous",
        "reason": "as before",
        "evidence": {"loss": 0.5},
    }
    assert rows[2]["verdict"] is None


def test_figures_that_json_lacks_are_written_all_the_same(run: Path) -> None:
    with CheckpointManager(run, fsync=False) as manager:
        manager.resume(10, strict=False, model=torch.nn.Linear(3, 2))
        manager.record_verdict("discontinuous", "", {"loss": math.nan, "seen": (1, 2)})
    (row,) = document("receipts", run)["receipts"]
    assert row["evidence"]["seen"] == [1, 2]
    assert "nan" in str(row["evidence"]["loss"])


def test_the_table_has_a_line_for_each_receipt_and_says_what_went_wrong_last(resumed: Path) -> None:
    result = varvite("receipts", resumed, "--iso", "--bytes")
    lines = result.stdout.splitlines()
    assert [title for title in TITLES if title in lines[0]] == TITLES
    rows = document("receipts", resumed)["receipts"]
    for line, row in zip(lines[1:], rows, strict=True):
        facts = f"{row['number']} {row['created_at']} resume {row['seq']} {row['step']} {row['next_step']} "
        facts += f"{row['verified_bytes']} restored absent 1 {row['verdict'] or 'none yet'}"
        assert line.split() == facts.split()
    assert result.stderr == ""
    assert varvite("receipts", resumed, "-n", "1").stdout.splitlines()[1].split()[0] == "3"
    assert " ago " in varvite("receipts", resumed).stdout or " now " in varvite("receipts", resumed).stdout


def test_the_reason_of_a_last_run_that_did_not_go_on_is_told_and_escaped(run: Path) -> None:
    with CheckpointManager(run, fsync=False) as manager:
        manager.resume(10, strict=False, model=torch.nn.Linear(3, 2))
        manager.record_verdict("not evaluated", "too few steps")
        assert varvite("receipts", run).stderr == "receipt 1: too few steps\n"
        manager.record_verdict("discontinuous", "the \x1b[31mloss")
    assert varvite("receipts", run).stderr == "receipt 1: the \\x1b[31mloss\n"
    assert varvite("receipts", run, "-q").stdout == "1\n"
    assert varvite("receipts", run, "-q").stderr == ""


def test_the_newest_can_be_asked_for_and_none_is_said(resumed: Path, tmp_path: Path) -> None:
    assert [row["number"] for row in document("receipts", resumed, "-n", "2")["receipts"]] == [2, 3]
    assert varvite("receipts", resumed, "-n", "0").exit_code == 2
    CheckpointManager(tmp_path / "empty").close()
    result = varvite("receipts", tmp_path / "empty")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no receipts yet\n")
    assert varvite("receipts", tmp_path / "absent").exit_code == 10


def test_a_damaged_receipt_is_a_line_and_a_warning(resumed: Path) -> None:
    damage(resumed / "receipts" / "2.json", 40)
    result = varvite("receipts", resumed)
    assert result.exit_code == 0
    assert [line.split()[:3] for line in result.stdout.splitlines()[2:3]] == [["2", "?", "damaged"]]
    assert result.stderr.startswith("warning: receipt 2 is damaged: corrupt digest")
    found = document("receipts", resumed)
    assert [row["number"] for row in found["receipts"]] == [1, 3]
    assert [row["number"] for row in found["damaged"]] == [2]


def test_verify_and_doctor_find_a_damaged_receipt(resumed: Path) -> None:
    checks = {check["name"]: check for check in document("doctor", resumed)["checks"]}
    assert (checks["receipts"]["verdict"], checks["receipts"]["value"]) == ("ok", "3, all readable")
    damage(resumed / "receipts" / "2.json", 40)
    checks = {check["name"]: check for check in document("doctor", resumed)["checks"]}
    assert (checks["receipts"]["verdict"], checks["receipts"]["value"]) == ("warn", "2 readable, 1 damaged")
    assert [row["number"] for row in checks["receipts"]["facts"]["damaged"]] == [2]
    findings = document("verify", resumed, code=3)["findings"]
    assert [finding["object"] for finding in findings] == ["receipts/2.json"]
