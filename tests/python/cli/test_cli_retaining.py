"""`varvite prune`, `pin` and `unpin`."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest
import torch
from commands import document, process, tree, varvite

from varvite import CheckpointManager
from varvite.cli import exits


def test_prune_shows_the_plan_and_changes_nothing_without_yes(run: Path) -> None:
    before = tree(run)
    result = varvite("prune", run, "--keep-last", 1)
    assert result.exit_code == exits.USAGE
    assert [line.split()[:3] for line in result.stdout.splitlines()[1:5]] == [
        ["keep", "1", "10"],
        ["remove", "2", "20"],
        ["keep", "3", "20"],
        ["keep", "4", "30"],
    ]
    assert result.stderr.startswith("error: nothing was removed: there is no terminal")
    dry = varvite("prune", run, "--keep-last", 1, "-n")
    assert dry.exit_code == 0
    assert dry.stdout.splitlines()[-1].startswith("would remove 1 snapshot and free ")
    assert tree(run) == before


def test_prune_removes_what_the_plan_says(run: Path) -> None:
    plan = document("prune", run, "--keep-best", "val_loss:max:1", "--dry-run")
    assert plan["policy"] == 'keep.best("val_loss", "max", n=1)'
    assert (plan["applied"], [row["seq"] for row in plan["removed"]]) == (False, [2])
    done = document("prune", run, "--keep-best", "val_loss:max:1", "--yes")
    assert (done["applied"], done["removed"], done["kept"]) == (True, plan["removed"], plan["kept"])
    assert done["freed_bytes"] == plan["freed_bytes"] > 0
    assert [row["seq"] for row in document("ls", run, "-a")["snapshots"]] == [1, 3, 4]
    again = varvite("prune", run, "--keep-best", "val_loss:max:1")
    assert (again.exit_code, again.stdout.splitlines()[-1]) == (0, "nothing to remove: 3 snapshots stay")


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (["--keep-last", "3", "--keep-every", "5000"], "keep.last(3) | keep.every(5000)"),
        (["--keep-best", "a:b"], 'keep.best("a:b", "min", n=1)'),
        (["--keep-best", "a:b:max"], 'keep.best("a:b", "max", n=1)'),
        (["--keep-best", "loss:min:2"], 'keep.best("loss", "min", n=2)'),
        (["--keep-within", "90m"], "keep.within(hours=1.5)"),
        (["--keep-within", "2d"], "keep.within(hours=48.0)"),
        (["--keep-hourly", "24", "--keep-daily", "7"], "keep.hourly(24) | keep.daily(7)"),
        (["--max-bytes", "200GB"], 'keep.max_bytes("200GB")'),
        (["--keep-tagged"], "keep.tagged()"),
    ],
)
def test_prune_reads_policies(run: Path, options: list[str], policy: str) -> None:
    assert document("prune", run, "-n", *options)["policy"] == policy


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--keep-last", "0"],
        ["--keep-last", "x"],
        ["--keep-best", "loss:3"],
        ["--keep-best", "loss:max:0"],
        ["--keep-within", "6"],
        ["--keep-within", "0h"],
        ["--max-bytes", "much"],
    ],
)
def test_prune_refuses_what_is_no_policy(run: Path, options: list[str]) -> None:
    result = varvite("prune", run, "--yes", *options)
    assert (result.exit_code, result.stdout) == (exits.USAGE, "")
    assert "hint: `varvite prune --help`" in result.stderr
    assert len(document("ls", run, "-a")["snapshots"]) == 4


def test_prune_of_a_locked_repository_is_refused_and_its_plan_is_not(run: Path) -> None:
    with CheckpointManager(run):
        assert varvite("prune", run, "--keep-last", 1, "-n").exit_code == 0
        result = varvite("prune", run, "--keep-last", 1, "--yes")
    assert result.exit_code == exits.LOCKED
    assert f"process {os.getpid()} on " in result.stderr
    assert len(document("ls", run, "-a")["snapshots"]) == 4


def test_prune_makes_no_repository(tmp_path: Path) -> None:
    assert varvite("prune", tmp_path / "new", "--keep-last", 1, "--yes").exit_code == exits.NO_REPOSITORY
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("answer", "code", "left"), [(b"y\n", 0, [1, 3, 4]), (b"n\n", 1, [1, 2, 3, 4])])
def test_prune_asks_on_a_terminal(run: Path, answer: bytes, code: int, left: list[int]) -> None:
    master, slave = pty.openpty()
    try:
        os.write(master, answer)
        done = process("prune", run, "--keep-last", 1, stdin=slave)
    finally:
        os.close(slave)
        os.close(master)
    assert (done.returncode, "Remove 1 snapshot?" in done.stderr) == (code, True)
    assert [row["seq"] for row in document("ls", run, "-a")["snapshots"]] == left


def test_pins_work_beside_a_running_writer(run: Path) -> None:
    with CheckpointManager(run):
        found = document("pin", run, "healthy", "good")
        assert (found["name"], found["snapshot"]["seq"], found["snapshot"]["tags"]) == ("good", 3, ["good"])
        assert document("show", run, "tag:good")["snapshot"]["seq"] == 3
        assert document("unpin", run, "good")["seq"] == 3
    result = varvite("unpin", run, "good")
    assert result.exit_code == exits.NOT_FOUND
    assert "tags: first" in result.stderr


def test_a_name_that_is_taken_or_not_legal_is_refused(run: Path) -> None:
    assert varvite("pin", run, 30, "first").exit_code == exits.USAGE
    assert varvite("pin", run, 30, "../first").exit_code == exits.USAGE
    assert document("show", run, "tag:first")["snapshot"]["seq"] == 1


def test_prune_removes_nothing_that_the_shown_plan_did_not(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saves_meanwhile(count: int, *, yes: bool) -> int:
        with CheckpointManager(run, fsync=False) as manager:
            manager.save_sync(40, {"w": torch.ones(1)}, rng=False)
        return exits.OK

    monkeypatch.setattr("varvite.cli.retaining._permission", saves_meanwhile)
    result = varvite("prune", run, "--keep-last", 1)
    assert result.exit_code == exits.FAILED
    assert "and now these would go too: 3, 4" in result.stderr
    assert [row["seq"] for row in document("ls", run, "-a")["snapshots"]] == [1, 2, 3, 4, 5]
