"""Processes that are killed, interrupted and forked: what was durable is whole, and nobody is locked out."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest
from support import assert_same, child, packs, run_child

from varvite import CheckpointManager, keep

if TYPE_CHECKING:
    from pathlib import Path


from processes.states import state_of

KILLS = 50


def acknowledged(log: Path) -> list[int]:
    """Returns the steps that a process has said are durable; a last line may be cut off."""
    text = log.read_text() if log.exists() else ""
    return [int(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def check(folder: Path, steps: list[int], kept: int) -> None:
    """Opens a repository as the next run does, and checks that everything acknowledged is there and right."""
    with CheckpointManager(folder) as manager:
        listed = [info.step for info in manager.snapshots()]
        assert listed == sorted(set(listed))
        # More than acknowledged may be there: a kill may come between the commit and the word of it.
        if kept:
            # Nor may retention have come to its turn.
            assert len(listed) >= min(kept, listed[-1] + 1 if listed else 0)
            assert max(steps, default=-1) <= max(listed, default=-1)
        else:
            assert listed == list(range(len(listed)))
            assert set(steps) <= set(listed)
        for step in listed[-2:]:
            assert_same(dict(manager.load(step)), state_of(step))
        seqs = {pack.name.split("-")[0] for pack in packs(folder)}
        assert seqs <= {str(seq) for seq in range(1, 10_000)}
        assert list((folder / "tmp").iterdir()) == []


@pytest.mark.parametrize(("how", "kept"), [("wait", 0), ("sync", 3)])
def test_random_kills_lose_nothing_that_was_durable(tmp_path, how, kept):
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder, log = tmp_path / "run", tmp_path / "acknowledged"
    for _ in range(KILLS // 2):
        with child("saves", folder, log, how, kept) as process:
            assert process.stdout.readline() == "running\n", process.stderr.read()
            target = len(acknowledged(log)) + rng.randrange(4)
            while len(acknowledged(log)) < target:
                assert process.poll() is None
            # Not a wait for something to happen, but the random moment of the kill.
            time.sleep(rng.uniform(0, 0.03))
            process.kill()
            process.wait(30)
        check(folder, acknowledged(log), kept)
    steps = acknowledged(log)
    assert steps == sorted(set(steps))
    with CheckpointManager(folder) as manager:
        for info in manager.snapshots():
            assert_same(dict(manager.load(info.step)), state_of(info.step))
        assert manager.verify().ok
    if kept:
        with CheckpointManager(folder, keep=keep.last(kept)) as manager:
            manager.prune()
            assert len(manager.snapshots()) == kept
            assert manager.verify().ok


def test_kills_while_a_process_opens_and_recovers(tmp_path):
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder, log = tmp_path / "run", tmp_path / "acknowledged"
    for _ in range(10):
        with child("saves", folder, log, "wait", 2) as process:
            time.sleep(rng.uniform(0.1, 0.4))
            process.kill()
            process.wait(30)
    if (folder / "varvite.json").exists():
        check(folder, acknowledged(log), 2)


def test_sigterm_ends_a_process_as_it_always_does_and_committed_snapshots_are_whole(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "acknowledged"
    with child("saves", folder, log, "wait", 0) as process:
        assert process.stdout.readline() == "running\n"
        while len(acknowledged(log)) < 3:
            assert process.poll() is None
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
    check(folder, acknowledged(log), 0)


@pytest.mark.parametrize(
    ("how", "saved", "steps"), [("sync", "True", [1, 3]), ("wait", "2", [1, 2]), ("flush", "2", [1, 2])]
)
def test_ctrl_c_in_a_long_save(tmp_path, how, saved, steps):
    with child("interrupted", tmp_path, how) as process:
        assert process.stdout.readline() == "saving\n", process.stderr.read()
        while not any(path.stat().st_size > 1 << 20 for path in staged(tmp_path)):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert (errors, process.returncode) == ("", 0)
    assert output.splitlines() == ["interrupted", f"saved {saved}", f"snapshots {steps}"]
    with CheckpointManager(tmp_path) as manager:
        assert [info.step for info in manager.snapshots()] == steps
        assert manager.verify().ok
        assert len(packs(tmp_path)) == 2
        assert staged(tmp_path) == []


def staged(folder: Path) -> list[Path]:
    return [path for path in (folder / "tmp").iterdir() if path.exists()]


def test_a_forked_child_is_refused_and_its_end_is_not_the_parents(tmp_path):
    done = run_child("forks", tmp_path / "run", tmp_path / "other")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "child save refused: True",
        "child load refused: True",
        "child flush refused: True",
        "child snapshots refused: True",
        "child saves elsewhere 7",
        "child ended 0",
        "others find it locked",
        "parent committed 1",
        "parent saves on 2",
        "others find it opened",
    ]


def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with child("orphans", tmp_path / "run", pipe) as process:
        orphan = int(process.stdout.readline())
        process.kill()
        process.wait(30)
        try:
            os.kill(orphan, 0)  # it lives
            with CheckpointManager(tmp_path / "run") as manager:
                assert manager.load() == {"v": 1}
        finally:
            pipe.open("wb").close()


def test_a_data_loader_with_workers_beside_a_running_save(tmp_path):
    done = run_child("loads_data", tmp_path)
    assert done.stderr == ""
    assert done.stdout == "samples 64\nsnapshots [1, 2]\n"
