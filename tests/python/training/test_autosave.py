"""When a save is due."""

from __future__ import annotations

import math

import pytest

from varvite.errors import InvalidInputError
from varvite.training import autosave as module
from varvite.training.autosave import Autosave, best_interval_seconds, overhead_share


class Clock:
    """The clocks of a module, in the hands of the test."""

    def __init__(self, monotonic: float = 1000.0) -> None:
        self.now = monotonic

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def expected_run_seconds(interval: float, cost: float, failures: float) -> float:
    """Returns the run time for a second of work when failures come at random (Daly 2006, equation 20)."""
    return failures * math.expm1((interval + cost) / failures) / interval


@pytest.mark.parametrize("failures", [600.0, 86_400.0])
@pytest.mark.parametrize("share", [1e-6, 1e-4, 0.01, 0.1, 0.4])
def test_the_interval_loses_hardly_more_than_the_best_there_is(failures, share):
    cost = share * failures
    chosen = best_interval_seconds(cost, failures)
    assert chosen > 0
    tried = [chosen * 1.01**power for power in range(-400, 401)]
    best = min(expected_run_seconds(interval, cost, failures) for interval in tried)
    assert expected_run_seconds(chosen, cost, failures) < best * 1.002


def test_for_a_small_cost_it_is_youngs():
    young = math.sqrt(2 * 0.01 * 86_400)
    assert best_interval_seconds(0.01, 86_400) == pytest.approx(young, rel=1e-3)


def test_for_a_large_cost_youngs_would_be_far_off():
    assert best_interval_seconds(200.0, 600.0) == pytest.approx(365.6, abs=0.1)
    assert math.sqrt(2 * 200.0 * 600.0) == pytest.approx(489.9, abs=0.1)
    assert best_interval_seconds(1200.0, 600.0) == 600.0
    assert best_interval_seconds(0.0, 600.0) == 0.0


def test_the_share_of_saves():
    assert overhead_share(0.0, 0.0) == 0.0
    assert overhead_share(3.0, 1.0) == 0.25


def test_by_steps_a_resumed_run_saves_at_the_same_steps():
    whole = [step for step in range(40) if Autosave(every_steps=7).due(step)]
    assert whole == [6, 13, 20, 27, 34]
    autosave = Autosave(every_steps=7)
    autosave.saved(17, 0.1)  # the save of a stop in between
    assert [step for step in range(18, 40) if autosave.due(step)] == [20, 27, 34]


def test_a_step_that_is_saved_is_not_saved_again():
    autosave = Autosave(every_steps=5)
    assert autosave.due(4)
    autosave.saved(4, 0.1)
    assert autosave.is_saved(4)
    assert not autosave.due(4)
    assert not autosave.due(5)
    assert not autosave.is_saved(4)
    assert autosave.due(4)  # it came again after a rollback, with another state


def test_by_time(clock):
    autosave = Autosave(every_seconds=60)
    clock.now += 59.9
    assert not autosave.due(1)
    clock.now += 0.1
    assert autosave.due(2)
    assert autosave.due(3)  # until it is done
    autosave.saved(3, 1.0)
    clock.now += 59.9
    assert not autosave.due(4)
    clock.now += 0.1
    assert autosave.due(5)


def test_by_cost_the_first_save_measures_and_the_interval_follows(clock):
    autosave = Autosave(mean_time_between_failures_seconds=86_400)
    clock.now += 29
    assert not autosave.due(0)
    clock.now += 1
    assert autosave.due(1)
    autosave.saved(1, 2.0)
    assert autosave.interval_seconds == best_interval_seconds(2.0, 86_400)
    clock.now += 586
    assert not autosave.due(2)
    clock.now += 1
    assert autosave.due(3)


def test_one_slow_save_does_not_set_the_interval(clock):
    autosave = Autosave(mean_time_between_failures_seconds=86_400)
    for step, seconds in enumerate([90.0, 2.0, 2.0, 2.0]):
        autosave.saved(step, seconds)
    assert autosave.cost_seconds == 2.0


def test_the_cost_of_long_ago_is_forgotten(clock):
    autosave = Autosave(mean_time_between_failures_seconds=86_400)
    for step in range(20):
        autosave.saved(step, 50.0)
    for step in range(20, 28):
        autosave.saved(step, 1.0)
    assert autosave.cost_seconds == 1.0


@pytest.mark.parametrize(("cost", "interval"), [(0.0, 30.0), (1000.0, 3600.0)])
def test_the_interval_by_cost_is_bounded(clock, cost, interval):
    autosave = Autosave(mean_time_between_failures_seconds=86_400)
    autosave.saved(0, cost)
    assert autosave.interval_seconds == interval


def test_of_several_rules_the_first_decides(clock):
    autosave = Autosave(every_steps=100, every_seconds=60)
    assert autosave.due(99)
    clock.now += 60
    assert autosave.due(100)


def test_what_is_expected_to_be_lost(clock):
    by_steps = Autosave(every_steps=100)
    assert (by_steps.interval_seconds, by_steps.expected_lost_seconds) == (None, None)
    assert by_steps.describe() == "a save every 100 steps; no step is measured yet"
    for step in range(10):
        clock.now += 0.5
        by_steps.due(step)
    assert by_steps.interval_seconds == 50.0
    assert by_steps.expected_lost_seconds == 25.0
    assert by_steps.describe() == "a save every 50 s: expected loss 25 s a failure; no save is measured yet"
    by_steps.saved(9, 0.5)
    assert by_steps.describe() == (
        "a save every 50 s, which costs 0.500 s: overhead 0.99 %, expected loss 25 s a failure"
    )


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        ({}, "every_steps"),
        ({"every_steps": 0}, "every_steps"),
        ({"every_steps": True}, "every_steps"),
        ({"every_steps": 2.0}, "every_steps"),
        ({"every_seconds": 0}, "every_seconds"),
        ({"mean_time_between_failures_seconds": math.inf}, "mean_time_between_failures_seconds"),
        ({"every_steps": 1, "least_seconds": 10, "most_seconds": 9}, "most_seconds"),
    ],
)
def test_rules_that_mean_nothing(rules, what):
    with pytest.raises(InvalidInputError) as caught:
        Autosave(**rules)
    assert caught.value.what == what


@pytest.mark.parametrize("seconds", [-0.1, math.nan, None])
def test_a_cost_that_is_no_time(seconds):
    autosave = Autosave(every_steps=1)
    with pytest.raises(InvalidInputError) as caught:
        autosave.saved(0, seconds)
    assert caught.value.what == "blocked_seconds"
    assert not autosave.is_saved(0)
