"""Optimizers with a mode of training and one of evaluation: weights and mode stay together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import assert_same
from torch import nn

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError
from varvite.training.modes import OptimizerMode, evaluating

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run") as manager:
        yield manager


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: parameters are `y` in training and `x`, the average, in evaluation."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "count": 0, "train_mode": False})

    @torch.no_grad()
    def _move(self, *, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                for one in group["params"]:
                    if "z" in self.state[one]:
                        one.lerp_(self.state[one]["z"], weight)
                group["train_mode"] = train

    def train(self) -> None:
        self._move(train=True)

    def eval(self) -> None:
        self._move(train=False)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            share = 1 / (group["count"] + 1)
            for one in group["params"]:
                z = self.state[one].setdefault("z", one.clone())
                one.lerp_(z, share).add_(one.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(one.grad, alpha=group["lr"])
            group["count"] += 1


class Wrapper:
    """Keeps its mode as an attribute, not in the groups of the optimizer it wraps."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.train_mode = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @torch.no_grad()
    def _move(self, *, train: bool) -> None:
        if self.train_mode is not train:
            for group in self.base.param_groups:
                for one in group["params"]:
                    if "z" in self.base.state[one]:
                        one.lerp_(self.base.state[one]["z"], 0.1 if train else 1 - 1 / 0.9)
            self.train_mode = train

    def train(self) -> None:
        self._move(train=True)

    def eval(self) -> None:
        self._move(train=False)

    @torch.no_grad()
    def step(self) -> None:
        assert self.train_mode
        for group in self.base.param_groups:
            for one in group["params"]:
                self.base.state[one].setdefault("z", one.clone()).sub_(one.grad, alpha=0.1)
        self.base.step()


def build(kind: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model, its optimizer, and the objects to save."""
    torch.manual_seed(4)
    model = nn.Linear(3, 1)
    if kind == "groups":
        optimizer: Any = ScheduleFree(model.parameters())
        return model, optimizer, {"model": model, "optimizer": optimizer}
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    objects = {"model": model, "optimizer": optimizer.base, "mode": OptimizerMode(optimizer)}
    return model, optimizer, objects


def step(model: nn.Module, optimizer: Any, number: int) -> float:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
    loss = (model(inputs) - 1).square().mean()
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss.item()


@pytest.mark.parametrize("kind", ["groups", "wrapper"])
@pytest.mark.parametrize("saved_in", ["train", "eval"])
@pytest.mark.parametrize("live_in", ["train", "eval"])
def test_a_resume_into_the_other_mode_equals_a_run_that_never_stopped(manager, kind, saved_in, live_in):
    model, optimizer, objects = build(kind)
    optimizer.train()
    for number in range(3):
        step(model, optimizer, number)
    getattr(optimizer, saved_in)()
    manager.save_sync(2, **objects)
    optimizer.train()
    expected = [step(model, optimizer, number) for number in range(3, 8)]

    other, restored, others = build(kind)
    restored.train()
    step(other, restored, 99)
    getattr(restored, live_in)()
    manager.resume(**others)
    restored.train()
    assert [step(other, restored, number) for number in range(3, 8)] == expected
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_a_wrapper_without_its_mode_would_move_the_weights_twice(manager):
    model, optimizer, objects = build("wrapper")
    optimizer.train()
    for number in range(3):
        step(model, optimizer, number)
    del objects["mode"]
    manager.save_sync(2, **objects)
    other, restored, others = build("wrapper")
    del others["mode"]
    manager.resume(**others)
    restored.train()
    assert not torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("kind", ["groups", "wrapper"])
def test_an_evaluation_uses_the_other_weights_and_gives_the_first_back(manager, kind):
    model, optimizer, objects = build(kind)
    optimizer.train()
    for number in range(3):
        step(model, optimizer, number)
    training = model.weight.detach().clone()
    with evaluating(optimizer, model):
        assert not model.training
        averaged = model.weight.detach().clone()
        assert not torch.equal(averaged, training)
        manager.save_sync(2, **objects)
    assert model.training
    torch.testing.assert_close(model.weight.detach(), training)
    loaded = manager.load()
    assert_same(loaded["model"]["weight"], averaged)
    step(model, optimizer, 3)


def test_an_evaluation_puts_everything_back_after_an_error_and_leaves_what_was_in_evaluation():
    model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Dropout())
    optimizer = ScheduleFree(model.parameters())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="stop"), evaluating(model, optimizer, plain):
        raise RuntimeError("stop")
    assert [part.training for part in (model, *model)] == [True, False, True]
    assert optimizer.param_groups[0]["train_mode"] is False


def test_an_optimizer_without_a_mode_is_refused():
    with pytest.raises(InvalidInputError, match="has no attribute `train_mode`"):
        OptimizerMode(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


@pytest.mark.parametrize("state", [None, {}, {"train_mode": 1}, {"train_mode": True, "more": 1}])
def test_a_state_that_is_none_is_corrupt_and_changes_nothing(state):
    optimizer = build("wrapper")[1]
    with pytest.raises(CorruptionError, match="mode of an optimizer"):
        OptimizerMode(optimizer).load_state_dict(state)
    assert optimizer.train_mode is False


@pytest.mark.parametrize("live_in", ["train", "eval"])
def test_the_published_schedule_free_optimizers(manager, live_in):
    schedulefree = pytest.importorskip("schedulefree")
    runs = []
    for resumes in (False, True):
        torch.manual_seed(4)
        model = nn.Linear(3, 1)
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05, warmup_steps=2)
        optimizer.train()
        if resumes:
            getattr(optimizer, live_in)()
            manager.resume(model=model, optimizer=optimizer)
            optimizer.train()
        else:
            for number in range(3):
                step(model, optimizer, number)
            manager.save_sync(2, model=model, optimizer=optimizer)
        losses = [step(model, optimizer, number) for number in range(3, 8)]
        optimizer.eval()
        runs.append((losses, dict(model.state_dict())))
    assert_same(runs[1], runs[0])
