"""Saving and loading have no effect on training, and what a snapshot lacks is never kept in silence."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import assert_same, copy_of
from torch import nn

from varvite import CheckpointManager
from varvite.errors import MismatchError
from varvite.training.accumulation import GradientAccumulation
from varvite.training.finite import NonFiniteGuard
from varvite.training.health import HealthMonitor
from varvite.training.trainable import TrainableMask

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["copy", "cow", "overlap"])
def manager(tmp_path: Path, request: Any) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", staging=request.param) as manager:
        yield manager


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


class Run:
    """A run with all that a save could disturb: hooks, gradients, flags, modes, generators."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Dropout(), nn.Linear(4, 1))
        self.model[0].bias.requires_grad_(False)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler = torch.amp.GradScaler("cpu")
        self.health = HealthMonitor()
        self.guard = NonFiniteGuard()
        self.accumulation = GradientAccumulation(2)
        self.trainable = TrainableMask(self.model)
        self.fired: list[str] = []
        self._watch()

    def _watch(self) -> None:
        for when in ("pre", "post"):
            for what in ("step", "state_dict", "load_state_dict"):
                register = getattr(self.optimizer, f"register_{what}_{when}_hook")
                register(lambda *_, name=f"{what} {when}": self.fired.append(name))
        for part in self.model.modules():
            part.register_forward_hook(lambda *_: self.fired.append("forward"))
        self.model[3].weight.register_hook(lambda _: self.fired.append("gradient"))

    def objects(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "health", "guard", "accumulation", "trainable")
        return {name: getattr(self, name) for name in names}

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        self.model(torch.randn(8, 4)).square().mean().backward()

    def facts(self) -> dict[str, Any]:
        groups = [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups]
        return {
            "weights": dict(copy_of(self.model.state_dict(keep_vars=True))),
            "versions": [one._version for one in self.model.state_dict(keep_vars=True).values()],
            "gradients": [None if one.grad is None else copy_of(one.grad) for one in self.model.parameters()],
            "trained": [one.requires_grad for one in self.model.parameters()],
            "training": [part.training for part in self.model.modules()],
            "state": [copy_of(dict(self.optimizer.state.get(one, {}))) for one in self.model.parameters()],
            "state_count": len(self.optimizer.state),
            "groups": groups,
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "grad_mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "threads": torch.get_num_threads(),
            "draws": (random.getstate(), copy_of(np.random.get_state()), torch.get_rng_state()),
            "fired": list(self.fired),
        }


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_save_has_no_effect_on_training(manager, kind, steps):
    """Trap M6: the helpers of `torch.distributed.checkpoint` run a step on a fresh optimizer."""
    run = Run(kind)
    for _ in range(steps):
        run.step()
    run.backward()
    before = run.facts()
    for step in range(3):
        manager.save(step, **run.objects(), metrics={"loss": 1.0})
    manager.flush()
    manager.save_sync(3, **run.objects())
    assert_same(run.facts(), before)
    assert before["state_count"] == (0 if steps == 0 else 5)  # one is frozen


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_looking_and_loading_have_no_effect_on_training(manager, kind, tmp_path):
    run = Run(kind)
    run.step()
    manager.save_sync(0, **run.objects())
    run.step()
    run.backward()
    before = run.facts()
    manager.load()
    manager.load(names=["model.*"])
    manager.load_into(copy_of(run.model.state_dict()), prefix="model")
    manager.entries()
    manager.verify()
    manager.prune(dry_run=True)
    assert_same(run.facts(), before)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resume_brings_no_state_step_or_hook_and_leaves_gradients_flags_and_modes(manager, kind):
    saved = Run(kind)
    manager.save_sync(0, **saved.objects())
    run = Run(kind)
    run.backward()
    run.model[2].eval()
    before = run.facts()
    report = manager.resume(**run.objects())
    after = run.facts()
    assert report.never_stepped == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    for name in ("gradients", "trained", "training", "state", "state_count", "grad_mode", "threads", "fired"):
        assert_same(after[name], before[name], name)
    assert_same(after["weights"], saved.facts()["weights"])


def test_a_refused_resume_has_no_effect_on_training(manager):
    saved = Run("adamw")
    saved.step()
    manager.save_sync(0, **saved.objects(), more={"seen": 3})
    run = Run("adamw")
    run.step()
    run.backward()
    before = run.facts()
    with pytest.raises(MismatchError, match="only the snapshot has `more`"):
        manager.resume(**run.objects())
    assert_same(run.facts(), before)


def test_training_with_saves_equals_training_without(manager):
    with_saves, without = Run("adamw"), Run("adamw")
    torch.manual_seed(5)
    for step in range(4):
        with_saves.step()
        manager.save(step, **with_saves.objects())
    with_saves.fired.clear()
    torch.manual_seed(5)
    for _ in range(4):
        without.step()
    without.fired.clear()
    assert_same(with_saves.facts(), without.facts())


# Trap M3: a leaf that the snapshot lacks kept its live value without a word


def test_a_leaf_that_the_snapshot_lacks_is_an_error_and_keeps_nothing_in_silence(manager):
    saved = nn.Linear(2, 2, bias=False)
    manager.save_sync(0, model=saved, progress={"samples": 5})
    live, progress = nn.Linear(2, 2), {"samples": 0, "tokens": 123}
    before = copy_of(live.state_dict())
    with pytest.raises(MismatchError) as caught:
        manager.resume(model=live, progress=progress)
    assert caught.value.missing == ["model.bias", "progress.tokens"]
    assert_same(dict(live.state_dict()), dict(before))
    assert progress == {"samples": 0, "tokens": 123}


def test_without_strict_such_a_leaf_is_in_the_report(manager):
    manager.save_sync(0, model=nn.Linear(2, 2, bias=False), progress={"samples": 5})
    live, progress = nn.Linear(2, 2), {"samples": 0, "tokens": 123}
    report = manager.resume(model=live, progress=progress, strict=False)
    assert report.missing == ["model.bias", "progress.tokens"]
    assert progress == {"samples": 5, "tokens": 123}
    assert "progress.tokens" in str(report)


def test_moments_that_are_gone_from_a_snapshot_are_an_error(manager):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    manager.save_sync(0, model=model, optimizer=optimizer)
    more = nn.Linear(2, 1)
    more.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(MismatchError) as caught:
        manager.resume(model=more, optimizer=torch.optim.AdamW(more.parameters()))
    assert caught.value.missing == ["model.scale", "optimizer.state.scale"]
