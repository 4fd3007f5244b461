"""Runs of several ranks of which one is killed: all go on, on as many or on others, and nothing is lost.

Killed is a rank at a place of a step or of a save. What then holds: each sample of an epoch was trained on
once, over the steps that count; schedule and updates are at the same number; the receipt says who restored
what; and with as many ranks all values are, bit for bit, those of a run that was left alone.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_run_ranks import BATCH, SAMPLES, Record, job

from varvite import CheckpointManager, _native
from varvite.training import run_training

if TYPE_CHECKING:
    from pathlib import Path

EPOCHS, SIZE = 3, 2
STEPS = EPOCHS * SAMPLES // (BATCH * SIZE)
IN_A_STEP = ["forward", "backward", "update", "updated", "boundary"]
IN_A_SAVE = ["save.before", "save.staged_in_python"]
OF_THE_COORDINATOR = ["conclude.before", "commit.pack_durable", "put.renamed", "commit.published"]
NATIVE = ["save.staged", "save.first_chunk", "save.footer", "publish.renamed", "publish.folder_synced"]
ALL = [(victim, place) for victim in (0, 1) for place in (*IN_A_STEP, *IN_A_SAVE, *NATIVE)]
ALL += [(0, place) for place in OF_THE_COORDINATOR]
FEW = [(1, "backward"), (0, "updated"), (1, "save.footer"), (0, "conclude.before")]
EVERYTHING = os.environ.get("VARVITE_TEST_EVERYTHING") == "1"
CASES = [
    (victim, place, after)
    for number, (victim, place) in enumerate(ALL if EVERYTHING else FEW)
    for after in ((1, 2, 3) if EVERYTHING else (2,) if number % 2 else (3,))
]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Life(Record):
    """Notes each step in a file, and dies at a place in step 9 or in the save of step 8."""

    def __init__(self, path: Path, place: str = "") -> None:
        super().__init__()
        self.place = place
        self.file = path.open("w")
        self.calls = 0

    def is_at(self, place: str) -> bool:
        return place == self.place and self.calls == 10

    def restored(self, run, report) -> None:
        self.file.write(json.dumps(report.next_step) + "\n")
        left = EPOCHS * SAMPLES - report.next_step * BATCH * SIZE
        run.until = report.next_step + left // (BATCH * run.agreement.world_size)
        run.optimizer.register_step_pre_hook(lambda *_: die() if self.is_at("update") else None)
        run.optimizer.register_step_post_hook(lambda *_: die() if self.is_at("updated") else None)

    def loss(self, module, batch) -> Any:
        self.calls += 1
        if self.is_at("forward"):
            die()
        loss = super().loss(module, batch)
        if self.is_at("backward"):
            loss.register_hook(lambda _: die())
        return loss

    def stepped(self, run, outcome) -> None:
        super().stepped(run, outcome)
        step = run.progress.step
        self.file.write(json.dumps([step, self.samples[step]]) + "\n")
        self.file.flush()
        if self.is_at("boundary"):
            die()

    def saving(self, run, step) -> None:
        if step == 8 and self.place == "save.before":
            die()
        if step == 8 and self.place in _native.KILL_POINTS:
            _native.kill_at(self.place, 1)
        if step == 8 and self.place == "conclude.before":
            from varvite.distributed.meeting import Meeting

            Meeting.conclude = lambda *_: die()

    def staged(self, run, handle) -> None:
        if handle.step == 8 and self.place == "save.staged_in_python":
            die()


def lives(folder: Path, number: int, victim: int = -1, place: str = "") -> Any:
    """Is a rank of one life of the run; returns how it ended."""
    from varvite.distributed.meeting import Meeting

    torch.set_num_threads(1)
    Meeting.LOST_SECONDS, Meeting.LOOK_SECONDS = 1.5, 0.2
    rank = dist.get_rank()
    life = Life(folder / f"life{number}-{rank}.jsonl", place if rank == victim else "")
    try:
        result = run_training(job(folder / "run", life, STEPS), hooks=[life])
    except Exception as error:
        if victim < 0:
            raise
        return f"{type(error).__name__}: {error}"
    return result.snapshot.digest


def history(folder: Path, size: int, after: int) -> list[Counter[int]]:
    """Returns the samples of the steps that count, by epoch."""
    steps: dict[int, Counter[int]] = {}
    for number, ranks_of_life in ((1, size), (2, after)):
        files = [folder / f"life{number}-{rank}.jsonl" for rank in range(ranks_of_life)]
        (begin,) = {int(file.read_text().splitlines()[0]) for file in files if file.exists()}
        steps = {step: samples for step, samples in steps.items() if step < begin}
        for file in files:
            for line in file.read_text().splitlines()[1:]:
                step, samples = json.loads(line)
                steps.setdefault(step, Counter()).update(samples)
    assert sorted(steps) == list(range(len(steps)))
    epochs = [Counter[int]() for _ in range(EPOCHS)]
    seen = 0
    for step in sorted(steps):
        epochs[seen // SAMPLES].update(steps[step])
        seen += steps[step].total()
    return epochs


@pytest.fixture(scope="module")
def untouched(tmp_path_factory) -> str:
    """Returns the state digest at the end of a run that is left alone."""
    first, second = ranks.run(SIZE, lives, tmp_path_factory.mktemp("untouched"), 1)
    assert first == second
    return first


@pytest.mark.parametrize(("victim", "place", "after"), CASES)
def test_a_run_of_which_one_rank_is_killed_goes_on(tmp_path, untouched, victim, place, after):
    with ranks.start(SIZE, lives, tmp_path, 1, victim, place) as group:
        outcomes = group.outcomes()
    assert outcomes[victim].exit_code == -9, outcomes[victim]
    assert isinstance(outcomes[1 - victim].value, str), outcomes[1 - victim].traceback
    digests = set(ranks.run(after, lives, tmp_path, 2))
    assert len(digests) == 1
    if after == SIZE:
        assert digests == {untouched}
    assert history(tmp_path, SIZE, after) == [Counter(range(SAMPLES))] * EPOCHS
    with CheckpointManager(tmp_path / "run") as manager:
        saved = manager.load()
        (receipt,) = manager.receipts()
        run = manager.load(objects=["run"])["run"]
        assert manager.verify().ok
    assert saved["progress"]["updates"] == saved["progress"]["step"] + 1 == saved["scheduler"]["last_epoch"]
    assert receipt.step in (5, 8)
    assert (receipt.saved_world_size, receipt.world_size) == (SIZE, after)
    assert receipt.rng == ("restored" if after == SIZE else "derived")
    assert run["restart_count"] == 1
