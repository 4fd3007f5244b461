"""The monitor of loss and gradient norm: what it flags, what it lets pass, and its verdict on a restart."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError
from varvite.training.health import Continuity, HealthMonitor, Verdict

if TYPE_CHECKING:
    from pathlib import Path


def warm(monitor: HealthMonitor, *, loss: float = 1.0, steps: int = 30) -> HealthMonitor:
    """Fills the baseline with values that vary by a few per cent."""
    for step in range(steps):
        spread = 1 + 0.02 * (step % 5 - 2)
        assert monitor.observe(step, loss=loss * spread, grad_norm=3 * loss * spread) == []
    return monitor


def kinds(found: list[Any]) -> list[tuple[str, str]]:
    return [(anomaly.metric, anomaly.kind) for anomaly in found]


# Single values


@pytest.mark.parametrize(
    ("loss", "found"),
    [(1 + 1e-6, []), (1.1, []), (0.1, ["drop"]), (1000.0, ["spike"]), (-5.0, ["drop"])],
)
def test_a_constant_loss_flags_what_moves_and_no_rounding(loss, found):
    """Trap M8: a constant has no deviation, and a fall went unseen."""
    monitor = HealthMonitor()
    for step in range(30):
        monitor.observe(step, loss=1.0)
    assert [anomaly.kind for anomaly in monitor.observe(30, loss=loss)] == found


def test_a_loss_of_zeros_flags_what_is_not():
    monitor = HealthMonitor()
    for step in range(30):
        assert monitor.observe(step, loss=0) == []
    assert kinds(monitor.observe(30, loss=1e-3)) == [("loss", "spike")]


def test_an_anomaly_says_what_was_expected():
    (found,) = warm(HealthMonitor()).observe(30, loss=9.0, grad_norm=3.0)
    assert (found.step, found.metric, found.value) == (30, "loss", 9.0)
    assert found.expected == pytest.approx(1.0, abs=0.05)
    assert found.score > 100
    assert str(found).startswith("step 30: spike of loss, 9 where 1 was")


def test_a_value_is_judged_before_it_joins_the_baseline():
    monitor = HealthMonitor(window=20, warm_up=20)
    for step in range(20):
        monitor.observe(step, loss=1.0 if step < 10 else 1.01)
    # With itself among them, a twentieth value of a window of twenty would still be judged by the others.
    assert kinds(monitor.observe(20, loss=50.0)) == [("loss", "spike")]
    assert monitor.state_dict()["loss"]["values"][-1] == 50.0


def test_nothing_is_judged_before_the_baseline_is_warm_but_values_that_are_not_finite():
    monitor = HealthMonitor(warm_up=20)
    for step in range(20):
        assert monitor.observe(step, loss=1.0 if step % 2 else 1000.0) == []
    fresh = HealthMonitor()
    assert kinds(fresh.observe(0, loss=math.nan, grad_norm=math.inf)) == [
        ("loss", "nonfinite"),
        ("grad_norm", "nonfinite"),
    ]
    assert fresh.state_dict()["loss"] == {"steps": [], "values": []}


def test_values_that_are_not_finite_never_join_the_baseline():
    monitor = warm(HealthMonitor())
    before = monitor.state_dict()
    (found,) = monitor.observe(30, loss=-math.inf)
    assert (found.kind, found.score, str(found)) == ("nonfinite", math.inf, "step 30: loss is -inf")
    assert monitor.state_dict() == before


def test_the_same_is_found_while_a_restart_is_judged():
    """Only then is the line tried for values that their level explains."""
    draw = random.Random(1)
    usual, judging = HealthMonitor(threshold=4.0), HealthMonitor(threshold=4.0, verdict_steps=1000)
    judging.after_resume()
    found = []
    for step in range(500):
        loss = 5.0 - 0.02 * (step % 150) + draw.gauss(0.0, 0.05) + draw.choice([0.0] * 8 + [0.4, -0.6])
        found.append(usual.observe(step, loss=loss, grad_norm=loss / 3))
        assert judging.observe(step, loss=loss, grad_norm=loss / 3) == found[-1]
    assert 10 < sum(map(bool, found)) < 200


def test_a_rewind_takes_later_values_out():
    """Trap M8: a rollback raised."""
    monitor = warm(HealthMonitor())
    assert monitor.observe(12, loss=1.0) == []
    assert monitor.state_dict()["loss"]["steps"] == list(range(13))
    assert monitor.state_dict()["grad_norm"]["steps"] == list(range(12))


def test_tensors_are_values_and_others_are_refused():
    monitor = HealthMonitor()
    monitor.observe(0, loss=torch.tensor(1.5), grad_norm=torch.tensor([2.5]))
    assert [one["values"] for one in monitor.state_dict().values()] == [[1.5], [2.5]]
    with pytest.raises(InvalidInputError, match="invalid loss of type `Tensor`: must be a number"):
        monitor.observe(1, loss=torch.zeros(2))
    with pytest.raises(InvalidInputError, match="invalid step `-1`"):
        monitor.observe(-1, loss=1.0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"window": 10},
        {"warm_up": 1},
        {"warm_up": True},
        {"threshold": 0},
        {"threshold": math.inf},
        {"floor": -0.1},
        {"verdict_steps": 0},
    ],
)
def test_settings_that_mean_nothing_are_refused(arguments):
    with pytest.raises(InvalidInputError, match=f"invalid {next(iter(arguments))} "):
        HealthMonitor(**arguments)


@pytest.mark.parametrize(
    ("loss", "found"), [(5.5, []), (5.6, []), (7.0, []), (20.0, ["spike"]), (-4.0, ["drop"])]
)
def test_a_loss_that_fell_steadily_may_go_on_or_stop(loss, found):
    """On: 5.5; a stop: 5.6; 7 is where it was half a window ago."""
    monitor = HealthMonitor()
    for step in range(30):
        assert monitor.observe(step, loss=8.5 - 0.1 * step) == []
    assert [anomaly.kind for anomaly in monitor.observe(30, loss=loss)] == found


# Real curves


class Run:
    """A small training run, with much noise or none."""

    def __init__(self, *, noisy: bool, rate: float = 3e-3) -> None:
        torch.manual_seed(3)
        self.noisy = noisy
        self.data = torch.randn(128, 10)
        self.model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.monitor = HealthMonitor()

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "health": self.monitor}

    def train(self, steps: range) -> list[Any]:
        found = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(16, 10, generator=generator) if self.noisy else self.data
            targets = inputs.sum(1, keepdim=True)
            noise = torch.randn(targets.shape, generator=generator) / 3
            targets = targets / 3 + noise if self.noisy else targets.sin()
            loss = (self.model(inputs) - targets).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found += self.monitor.observe(step, loss=loss, grad_norm=norm)
        return found


@pytest.mark.parametrize("noisy", [True, False])
def test_a_loss_that_falls_as_it_should_is_no_anomaly(noisy):
    run = Run(noisy=noisy)
    assert run.train(range(300)) == []
    values = run.monitor.state_dict()["loss"]["values"]
    assert sum(values) / len(values) < 0.45


@pytest.fixture
def saved(tmp_path: Path) -> CheckpointManager:
    """A run of 200 steps without noise."""
    manager = CheckpointManager(tmp_path / "run")
    run = Run(noisy=False)
    run.train(range(200))
    manager.save_sync(199, **run.objects())
    return manager


def test_a_proper_resume_is_continuous(saved):
    run = Run(noisy=False)
    assert run.monitor.verdict is Verdict.NOT_EVALUATED
    report = saved.resume(**run.objects())
    heard: list[Continuity] = []
    run.monitor.after_resume(heard.append)
    run.train(range(report.next_step, report.next_step + 4))
    assert (run.monitor.verdict, heard) == (Verdict.NOT_EVALUATED, [])
    assert run.monitor.continuity.reason == "4 of 5 steps were observed since"
    run.train(range(204, 230))
    assert run.monitor.verdict is Verdict.CONTINUOUS
    assert heard == [run.monitor.continuity]
    assert str(heard[0]) == "continuous: loss and grad_norm as before over 5 steps"
    assert heard[0].steps == (200, 201, 202, 203, 204)


def test_moments_that_were_dropped_are_found(saved):
    run = Run(noisy=False)
    report = saved.resume(**run.objects())
    run.optimizer.state.clear()
    run.train(range(report.next_step, report.next_step + 5))
    found = run.monitor.continuity
    assert found.verdict is Verdict.DISCONTINUOUS
    assert found.scores["grad_norm"] > 4
    assert "grad_norm lies" in found.reason


def test_a_fresh_model_is_found_where_the_loss_has_noise(tmp_path):
    run = Run(noisy=True, rate=1e-2)
    run.train(range(300))
    state = run.monitor.state_dict()
    for model, verdict in ((run, Verdict.CONTINUOUS), (Run(noisy=True, rate=1e-2), Verdict.DISCONTINUOUS)):
        model.monitor = HealthMonitor()
        model.monitor.load_state_dict(state)
        model.train(range(300, 305))
        assert model.monitor.verdict is verdict


# The verdict


def restarted(**settings: Any) -> HealthMonitor:
    monitor = HealthMonitor(**settings)
    monitor.load_state_dict(warm(HealthMonitor()).state_dict())
    return monitor


@pytest.mark.parametrize("loss", [1000.0, 0.1])
def test_a_loss_on_either_side_of_the_baseline_is_discontinuous(loss):
    monitor = restarted()
    for step in range(30, 35):
        monitor.observe(step, loss=loss)
    assert monitor.verdict is Verdict.DISCONTINUOUS
    assert ("above" if loss > 1 else "below") in monitor.continuity.reason


def test_a_fresh_baseline_is_not_evaluated_and_says_why():
    """Trap M8: a fresh process took a loss of 1000 for continuity."""
    monitor = HealthMonitor()
    monitor.after_resume()
    for step in range(100, 105):
        assert monitor.observe(step, loss=1000.0) == []
    assert monitor.verdict is Verdict.NOT_EVALUATED
    assert monitor.continuity.reason == "the restored baseline has fewer than 20 values"


def test_one_odd_batch_does_not_decide():
    monitor = restarted()
    for step, loss in enumerate((1.0, 50.0, 1.0, 1.0, 1.0), 30):
        monitor.observe(step, loss=loss, grad_norm=3.0)
    assert monitor.verdict is Verdict.CONTINUOUS


def test_a_loss_that_is_not_finite_after_a_restart_is_discontinuous():
    monitor = restarted()
    for step in range(30, 35):
        monitor.observe(step, loss=math.nan, grad_norm=3.0)
    assert monitor.verdict is Verdict.DISCONTINUOUS


def test_a_flag_begins_a_restart_too():
    monitor = warm(HealthMonitor())
    assert monitor.continuity.reason == "no restart"
    for step in range(30, 35):
        monitor.observe(step, loss=1.0, grad_norm=3.0, restarted=step == 30)
    assert monitor.verdict is Verdict.CONTINUOUS


# State


def test_a_smaller_window_takes_the_newest_values():
    monitor = HealthMonitor(window=20)
    monitor.load_state_dict(warm(HealthMonitor()).state_dict())
    assert monitor.state_dict()["loss"]["steps"] == list(range(10, 30))


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"loss": {"steps": [], "values": []}},
        {"loss": {"steps": [1], "values": []}},
        {"loss": {"steps": [1, 1], "values": [1.0, 1.0]}},
        {"loss": {"steps": [-1], "values": [1.0]}},
        {"loss": {"steps": [True], "values": [1.0]}},
        {"loss": {"steps": [1], "values": [math.nan]}},
        {"loss": {"steps": [1], "values": [1]}},
        {"loss": [1.0]},
    ],
)
def test_a_state_that_is_none_is_corrupt_and_changes_nothing(state):
    if state and "grad_norm" not in state and state != {"loss": {"steps": [], "values": []}}:
        state = {**state, "grad_norm": {"steps": [], "values": []}}
    monitor = warm(HealthMonitor())
    before = monitor.state_dict()
    for take in (monitor.check_state_dict, monitor.load_state_dict):
        with pytest.raises(CorruptionError, match="corrupt baseline"):
            take(state)
    assert monitor.state_dict() == before
    assert monitor.continuity.reason == "no restart"
