"""Averages of weights: torch's own `AveragedModel` beside the model it averages, and the scheduler for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import assert_same, copy_of
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from varvite import CheckpointManager
from varvite.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run") as manager:
        yield manager


class Run:
    """A model with tied weights and buffers, and an average of it."""

    def __init__(self, average: dict[str, Any], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
        )
        self.model[2].weight = self.model[0].weight
        self.ema = AveragedModel(self.model, **average)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = SWALR(self.optimizer, swa_lr=0.01, anneal_epochs=6)

    def objects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "ema", "optimizer", "scheduler")}

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            loss = (self.model(inputs) - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.ema.update_parameters(self.model)
            losses.append(loss.item())
        return losses


AVERAGES = {
    "swa": dict,
    "ema": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema_of_buffers": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("saved_at", [0, 4])
def test_raw_and_averaged_weights_go_on_as_if_never_stopped(manager, kind, saved_at):
    whole = Run(AVERAGES[kind]())
    whole.train(range(saved_at))
    manager.save_sync(max(saved_at - 1, 0), **whole.objects())
    expected = whole.train(range(saved_at, 10))

    resumed = Run(AVERAGES[kind](), seed=9)
    resumed.train(range(50, 53))
    manager.resume(**resumed.objects())
    assert resumed.ema.n_averaged.item() == saved_at
    assert resumed.train(range(saved_at, 10)) == expected
    assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    assert_same(dict(resumed.ema.state_dict()), dict(whole.ema.state_dict()))
    assert resumed.ema.module[2].weight is resumed.ema.module[0].weight
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_they_are_two_entries_with_the_count_and_the_average_is_no_wrapper(manager):
    run = Run({})
    run.train(range(3))
    manager.save_sync(2, **run.objects())
    names = {entry.name for entry in manager.entries()}
    assert {"model.0.weight", "ema.module.0.weight", "ema.n_averaged"} <= names
    assert "ema.0.weight" not in names
    # Parameters of the optimizer are those of the model, whatever stands beside it.
    assert "optimizer.state.model.0.weight.exp_avg" in names
    assert not any(name.startswith("optimizer.state.ema") for name in names)


def test_the_average_alone_fills_a_plain_model(manager):
    run = Run({})
    run.train(range(4))
    manager.save_sync(3, **run.objects())
    plain = copy_of(run.model.state_dict())
    report = manager.load_into(plain, prefix="ema.module")
    assert (report.missing, report.mismatched) == ([], [])
    assert_same(dict(plain), dict(run.ema.module.state_dict()))
    assert not torch.equal(plain["0.weight"], run.model[0].weight)


def test_an_average_that_one_side_lacks_is_an_error(manager):
    run = Run({})
    objects = run.objects()
    manager.save_sync(0, **objects)
    del objects["ema"]
    with pytest.raises(MismatchError, match="only the snapshot has `ema`"):
        manager.resume(**objects)
    manager.save_sync(1, **objects)
    with pytest.raises(MismatchError, match="the snapshot lacks `ema`"):
        manager.resume(**run.objects())
