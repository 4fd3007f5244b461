"""`run_training` on several ranks: wrapped and sharded models, one decision for all, other world sizes."""

from __future__ import annotations

import signal
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from varvite import CheckpointManager
from varvite.errors import CheckpointError
from varvite.training import ExitCode, Hook, Job, ResumableSampler, run_training
from varvite.training.tracking import NullTracker

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES, BATCH = 24, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(1, 6), nn.Linear(6, 1), nn.Dropout(0.2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.tanh(self.up(values))))


def wrapped() -> nn.Module:
    return DistributedDataParallel(Net())


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(Net())


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))


def data() -> DataLoader:
    numbers = torch.arange(float(SAMPLES)).unsqueeze(1) / SAMPLES
    return DataLoader(numbers, batch_size=BATCH, sampler=ResumableSampler(numbers, seed=1))


class Record(Hook):
    """Notes the samples and losses of each step, and may act at one."""

    def __init__(self, action: Any = None, at: int = -1) -> None:
        self.action, self.at = action, at
        self.losses: dict[int, float] = {}
        self.samples: dict[int, tuple[int, list[int]]] = {}
        self.batch: list[int] = []
        self.first_draw = 0.0

    def restored(self, run, report) -> None:
        from varvite.training import rng

        with rng.unmoved():
            self.first_draw = torch.rand(()).item()

    def loss(self, module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.batch += [round(one * SAMPLES) for one in batch.flatten().tolist()]
        return (module(batch) - batch.square()).square().mean()

    def stepped(self, run, outcome) -> None:
        step = run.progress.step
        self.losses[step] = outcome.loss
        self.samples[step] = self.batch
        self.batch = []
        if step == self.at:
            self.action(run)


def job(folder: Path, record: Record, steps: int, **more: Any) -> Job:
    parts = {"model": wrapped, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    settings = {"autosave": {"every_steps": 3}, "stop": {"slurm": False}, "clip_grad_norm": 1.0}
    settings["health"] = {"window": 6, "warm_up": 6, "threshold": 50.0, "verdict_steps": 3}
    return Job(folder=folder, steps=steps, **{"loss": record.loss, **parts, **settings, **more})


def trains(folder: Path, steps: int, action: Any = None, at: int = -1, **more: Any) -> dict[str, Any]:
    """Trains on this rank; returns what it saw."""
    record = Record(action, at)
    result = run_training(job(folder, record, steps, **more), hooks=[record])
    report = result.report
    return {
        "losses": record.losses,
        "samples": record.samples,
        "exit_code": result.exit_code,
        "reason": result.reason,
        "next_step": report.next_step,
        "digest": result.snapshot.digest,
        "metrics": result.snapshot.metrics,
        "rng": report.rng,
        "verdict": result.verdict,
        "first_draw": record.first_draw,
    }


def signalled(by: int) -> Any:
    """Returns an action: the signal comes to one rank alone."""
    return lambda run: signal.raise_signal(signal.SIGTERM) if dist.get_rank() == by else None


def is_stopped_and_goes_on(folder: Path, model: Any) -> Any:
    untouched = trains(folder / "untouched", 14, model=model)
    stopped = trains(folder / "stopped", 14, signalled(1), 7, model=model)
    resumed = trains(folder / "stopped", 14, model=model)
    return untouched, stopped, resumed


@pytest.mark.parametrize("model", [wrapped, sharded])
def test_a_run_that_one_rank_is_told_to_stop_goes_on_as_if_it_had_not_been(tmp_path, model):
    ranks.preload("torch.distributed.fsdp")
    found = ranks.run(2, is_stopped_and_goes_on, tmp_path, model)
    for untouched, stopped, resumed in found:
        assert (stopped["exit_code"], stopped["reason"]) == (ExitCode.RESUMABLE, "SIGTERM came to rank 1")
        assert (resumed["exit_code"], resumed["next_step"]) == (ExitCode.FINISHED, 8)
        assert (resumed["rng"], resumed["verdict"]) == ("restored", "continuous")
        assert {**stopped["losses"], **resumed["losses"]} == untouched["losses"]
        assert resumed["digest"] == untouched["digest"]
    # One loss for all, though each has batches and generators of its own.
    first, second = (each[0] for each in found)
    assert first["losses"] == second["losses"]
    assert first["metrics"] == {"loss": first["losses"][13]}
    assert first["first_draw"] != second["first_draw"]
    assert first["samples"][0] != second["samples"][0]
    with CheckpointManager(tmp_path / "stopped") as manager:
        (receipt,) = manager.receipts()
        assert (receipt.verdict, receipt.saved_world_size, receipt.world_size) == ("continuous", 2, 2)
        saved = manager.load()
        assert saved["progress"] == {"step": 13, "updates": 14, "batches": 14}
        assert saved["scheduler"]["last_epoch"] == 14


def stops_at(folder: Path, at: int) -> Any:
    return trains(folder, 40, signalled(0), at)


def finishes(folder: Path, steps: int) -> Any:
    return trains(folder, steps)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1), (1, 2)])
def test_on_another_number_of_ranks_each_sample_of_an_epoch_is_seen_once(tmp_path, before, after):
    first = ranks.run(before, stops_at, tmp_path, 2)
    trained = 3 * before * BATCH
    # To the end of the first epoch, and one epoch more.
    left = -(-(SAMPLES - trained) // (after * BATCH))
    steps = 3 + left + SAMPLES // (after * BATCH)
    second = ranks.run(after, finishes, tmp_path, steps)
    epoch: Counter[int] = Counter()
    for one in first:
        epoch.update(sample for samples in one["samples"].values() for sample in samples)
    for one in second:
        epoch.update(sample for step in range(3, 3 + left) for sample in one["samples"][step])
    assert epoch == Counter(range(SAMPLES))
    after_it = Counter(
        sample for one in second for step in range(3 + left, steps) for sample in one["samples"][step]
    )
    assert after_it == Counter(range(SAMPLES))
    assert {one["rng"] for one in second} == {"derived"}
    assert len({one["first_draw"] for one in second}) == after
    with CheckpointManager(tmp_path, rank=0, world_size=1) as manager:
        saved = manager.load()
        assert saved["progress"]["updates"] == saved["scheduler"]["last_epoch"] == steps
        (receipt,) = manager.receipts()
        assert (receipt.saved_world_size, receipt.world_size, receipt.rng) == (before, after, "derived")
        assert receipt.cursors == {}


class Poisoned:
    """A loss that is NaN once, on one rank alone."""

    def __init__(self, record: Record) -> None:
        self.record, self.calls = record, 0

    def __call__(self, module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found = self.record.loss(module, batch)
        return found * float("nan") if dist.get_rank() == 1 and self.calls == 8 else found


def rolls_back(folder: Path) -> Any:
    record = Record()
    opened: list[int] = []

    def tracker(run: Any) -> NullTracker:
        opened.append(run.progress.next_step)
        return NullTracker()

    settings = {"loss": Poisoned(record), "non_finite": {"policy": "rollback"}, "tracker": tracker}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = run_training(job(folder, record, 12, **settings), hooks=[record])
    return result.exit_code, result.step, record.losses, opened, [str(one.message) for one in told]


def test_a_loss_that_is_not_finite_on_one_rank_rolls_all_back(tmp_path):
    first, second = ranks.run(2, rolls_back, tmp_path)
    assert first[:2] == (ExitCode.FINISHED, 11)
    assert first[:3] == second[:3]
    # Tracker and words are the first rank's alone.
    assert (first[3], second[3]) == ([0, 6], [])
    assert first[4] == ["rolled back to the state after step 5: the loss is not finite, 1 step"]
    assert second[4] == []


class Failing(Hook):
    """Breaks the folder of the repository on the way to a save."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def saving(self, run, step) -> None:
        if step == 5 and dist.get_rank() == 0:
            (self.folder / "packs").rename(self.folder / "packs-away")
            (self.folder / "packs").write_text("no folder")


def fails_to_save(folder: Path) -> Any:
    record = Record()
    with pytest.raises(CheckpointError) as caught:
        run_training(job(folder, record, 40), hooks=[record, Failing(folder)])
    return max(record.losses), str(caught.value)


def test_a_save_that_fails_ends_the_run_at_one_step_on_all_ranks(tmp_path):
    first, second = ranks.run(2, fails_to_save, tmp_path)
    assert first[0] == second[0] >= 5
    assert "packs" in first[1]
    assert "packs" in second[1]


def normalized() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))


def test_buffers_that_only_the_first_rank_keeps_are_saved_from_it(tmp_path):
    """Running statistics of a BatchNorm differ until the next forward pass, which sends the first rank's."""
    for untouched, stopped, resumed in ranks.run(2, is_stopped_and_goes_on, tmp_path, normalized):
        assert {**stopped["losses"], **resumed["losses"]} == untouched["losses"]
        assert resumed["digest"] == untouched["digest"]
    with CheckpointManager(tmp_path / "stopped") as manager:
        assert list(manager.load()["model"])[2:7] == [
            "1.weight",
            "1.bias",
            "1.running_mean",
            "1.running_var",
            "1.num_batches_tracked",
        ]
