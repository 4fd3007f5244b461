"""Schedulers and the gradient scaler go on as if never stopped, and follow an override of the rate."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import assert_same
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from varvite import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run") as manager:
        yield manager


class Cosine:
    """A factor with state of its own, which a scheduler saves."""

    def __init__(self, length: float) -> None:
        self.length = length

    def __call__(self, step: int) -> float:
        return 0.5 + step / self.length


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "multi_step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 9], 0.5),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 20),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "cosine_past_its_end": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "warm_restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 4),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "lambda_object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Cosine(20)),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.95),
    "swalr": lambda optimizer: SWALR(optimizer, 0.01, 20),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=9),
            lr_scheduler.CosineAnnealingLR(optimizer, 15),
        ],
        [9],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 9), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
}


class Run:
    def __init__(self, kind: str, *, seed: int = 0, rate: Any = 0.1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 1)
        groups = [{"params": [self.model.weight]}, {"params": [self.model.bias], "lr": rate / 2}]
        self.optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9)
        self.scheduler = SCHEDULERS[kind](self.optimizer)

    def objects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler")}

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def train(self, steps: range) -> list[Any]:
        found = []
        for step in steps:
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            loss = self.model(inputs).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            # A loss that rises, so that a plateau is met.
            is_plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([float(step)] if is_plateau else []))
            found.append((loss.item(), self.rates(), self.scheduler.get_last_lr()))
        return found


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_ten_more_steps_equal_those_of_a_run_that_never_stopped(manager, kind):
    whole = Run(kind)
    whole.train(range(7))
    manager.save_sync(6, **whole.objects())
    resumed = Run(kind, seed=9)
    report = manager.resume(**resumed.objects())
    assert (report.missing, report.unexpected, report.defaulted) == ([], [], [])
    assert_same(resumed.train(range(7, 17)), whole.train(range(7, 17)))
    assert_same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULERS if kind != "cyclic"])
def test_an_override_of_the_rate_scales_the_rest_of_the_schedule(manager, kind):
    """A scheduler that computes rates from the first one took the override back at its next step."""
    whole = Run(kind)
    whole.train(range(7))
    manager.save_sync(6, **whole.objects())
    before = whole.rates()
    expected = [
        [0.001 / first * rate for first, rate in zip(before, rates, strict=True)]
        for _, rates, _ in whole.train(range(7, 17))
    ]
    resumed = Run(kind, seed=9)
    report = manager.resume(**resumed.objects(), override={"lr": 0.001})
    assert resumed.rates() == resumed.scheduler.get_last_lr() == [0.001, 0.001]
    assert f"param_groups.0.lr: {before[0]} -> 0.001" in report.overridden
    for (_, rates, _), wanted in zip(resumed.train(range(7, 17)), expected, strict=True):
        assert rates == pytest.approx(wanted, rel=1e-6)


def test_an_overridden_schedule_is_in_the_report_and_in_the_next_snapshot(manager):
    run = Run("lambda")
    manager.save_sync(0, **run.objects())
    report = manager.resume(**run.objects(), override={"lr": 0.01})
    assert report.overridden[-1] == "LambdaLR.base_lrs: [0.1, 0.05] -> [0.01, 0.01]"
    run.train(range(1, 3))
    manager.save_sync(2, **run.objects())
    again = Run("lambda")
    manager.resume(**again.objects())
    assert_same(again.train(range(3, 6)), run.train(range(3, 6)))
    assert again.rates()[0] == pytest.approx(0.01 * 0.9**5)


def test_rates_that_are_tensors_follow_an_override_too(manager):
    run = Run("lambda", rate=torch.tensor(0.1))
    run.train(range(2))
    manager.save_sync(1, **run.objects())
    resumed = Run("lambda", rate=torch.tensor(0.1))
    manager.resume(**resumed.objects(), override={"lr": 0.01})
    resumed.train(range(2, 4))
    assert isinstance(resumed.optimizer.param_groups[0]["lr"], torch.Tensor)
    assert resumed.rates() == pytest.approx([0.01 * 0.81, 0.01 * 0.81])


def test_a_rate_of_zero_has_no_scale_and_that_is_said(manager):
    run = Run("lambda")
    run.scheduler = lr_scheduler.LambdaLR(run.optimizer, lambda step: step / 10)
    manager.save_sync(0, **run.objects())
    report = manager.resume(**run.objects(), override={"lr": 0.01})
    assert report.overridden[-1].startswith("a learning rate was 0")
    assert run.rates() == [0.01, 0.01]
    assert run.train(range(1, 2))[0][1] == pytest.approx([0.01, 0.005])


def test_other_overrides_leave_a_schedule_alone(manager):
    run = Run("one_cycle")
    run.train(range(3))
    manager.save_sync(2, **run.objects())
    expected = [rates for _, rates, _ in run.train(range(3, 6))]
    resumed = Run("one_cycle")
    report = manager.resume(**resumed.objects(), override={"weight_decay": 0.1})
    assert [line.split(":")[0] for line in report.overridden] == [
        "param_groups.0.weight_decay",
        "param_groups.1.weight_decay",
    ]
    assert [rates for _, rates, _ in resumed.train(range(3, 6))] == expected


def test_the_scheduler_of_another_optimizer_is_left_alone(manager):
    first, second = Run("lambda"), Run("lambda")
    objects = {"model": first.model, "optimizer": first.optimizer, "scheduler": second.scheduler}
    manager.save_sync(0, **objects)
    manager.resume(**objects, override={"lr": 0.01})
    assert second.scheduler.base_lrs == [0.1, 0.05]


# Gradient scaling


def test_a_scaler_that_overflows_and_grows_goes_on_as_if_never_stopped(manager):
    def build(scale: float) -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), scaler

    def train(model: nn.Module, optimizer: Any, scaler: Any, steps: range) -> list[Any]:
        found = []
        for step in steps:
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            factor = float("inf") if step in (3, 9) else 1.0
            loss = model(inputs).square().mean()
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((loss.item(), scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
        return found

    whole = build(512.0)
    train(*whole, range(6))
    manager.save_sync(5, model=whole[0], optimizer=whole[1], scaler=whole[2])
    resumed = build(2.0)
    manager.resume(model=resumed[0], optimizer=resumed[1], scaler=resumed[2])
    found = train(*resumed, range(6, 16))
    assert_same(found, train(*whole, range(6, 16)))
    assert len({scale for _, scale, _ in found}) > 1


def test_a_restored_scheduler_gives_no_warning_of_its_own(manager):
    """The warning on the order of two steps is for loops that have it wrong, not for a resume."""
    run = Run("step")
    run.train(range(2))
    manager.save_sync(1, **run.objects())
    resumed = Run("step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.resume(**resumed.objects())
        resumed.train(range(2, 4))
