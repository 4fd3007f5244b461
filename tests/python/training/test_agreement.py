"""Decisions that all ranks take alike. The ranks are those of `processes/agrees.py`."""

from __future__ import annotations

import json
import signal

import pytest
from support import run_child

from varvite.errors import InvalidInputError
from varvite.training.agreement import Agreement
from varvite.training.autosave import Autosave
from varvite.training.boundary import Boundary, Decision
from varvite.training.stop import StopSignal


@pytest.fixture(scope="module")
def seen():
    done = run_child("agrees", GLOO_SOCKET_IFNAME="lo")
    assert (done.stderr, done.returncode) == ("", 0)
    return json.loads(done.stdout)


def test_the_largest_of_each_value(seen):
    agreed = [[1, 0, 7], 100, []]
    assert seen["largest_of_each"] == [[*agreed, [0, 2]], [*agreed, [1, 2]]]


def test_a_signal_that_ranks_see_at_different_steps_stops_them_at_the_same_one(seen):
    """Trap M7: with a flag for each rank, both would wait for each other until they are killed."""
    reason = "SIGTERM came to rank 0"
    assert seen["signal_at_different_steps"] == [[2, reason, 75, reason]] * 2


def test_what_one_rank_asks_for_all_do(seen):
    reason = "SIGTERM came to rank 1"
    decisions = [[False, "None", [0]], [True, "None", [1]], [True, reason, [2]], [True, reason, [3]]]
    assert seen["one_rank_alone_sees_it"] == [decisions, decisions]


def test_ranks_whose_clocks_differ_save_together(seen):
    assert seen["clocks_differ"] == [[True] * 3] * 2


def test_only_the_first_rank_looks_for_the_stop_file(seen):
    assert seen["stop_file_is_the_first_ranks"] == [["None", "None", "the stop file is there (rank 0)"]] * 2


def test_ranks_at_different_steps_are_refused(seen):
    message = "ranks are at different steps: 5 to 6, this one at"
    assert seen["steps_differ"] == [[5, 6, f"{message} 5"], [6, 5, f"{message} 6"]]


def test_ranks_that_ask_for_different_things_are_refused(seen):
    assert seen["lengths_differ"] == [[1, 2], [2, 1]]


def test_collectives_of_training_are_not_mixed_up_with_ours(seen):
    assert seen["training_group_is_not_used"] == [[[6], [1.0] * 4]] * 2


def test_a_part_of_the_ranks_agrees(seen):
    assert seen["part_of_the_ranks"] == [[[2], 0, 2, 0], "process_group", [[2], 1, 2, 0]]


def test_a_rank_that_does_not_come_is_named_and_nothing_is_agreed_after_it(seen):
    told = [[2], "cannot agree with the other ranks within 0.5 s; missing ranks: 2"]
    assert seen["a_rank_is_missing"] == [[told, told], [told, told], "absent"]


def test_torch_distributed_may_be_set_up_anew(seen):
    assert seen["set_up_anew"] == [[[1], [0], [11]], [[1], [1], [11]]]


def test_alone_it_is_the_identity():
    agreement = Agreement()
    assert agreement.maximum([5, -(2**63), 2**63 - 1, True]) == [5, -(2**63), 2**63 - 1, 1]
    assert (agreement.from_first(4), agreement.rank, agreement.world_size) == (4, 0, 1)


@pytest.mark.parametrize("values", [[2**63], [-(2**63) - 1], [1.0], ["1"], [0] * 15])
def test_what_can_not_be_agreed_on(values):
    with pytest.raises(InvalidInputError) as caught:
        Agreement().maximum(values)
    assert caught.value.what == "values"


@pytest.mark.parametrize("seconds", [0, -1, float("inf")])
def test_a_timeout_that_is_no_time(seconds):
    with pytest.raises(InvalidInputError):
        Agreement(timeout_seconds=seconds)


def test_nothing_heavy_is_imported_and_no_thread_started(run_python):
    program = """
import sys, threading
from varvite.training.boundary import Boundary
from varvite.training.stop import StopSignal
with StopSignal() as stop:
    assert Boundary(stop).decide(0).stop is None
    stop.done()
heavy = {"torch", "numpy", "multiprocessing", "http.client"}
print(sorted(heavy & set(sys.modules)), threading.active_count())
"""
    assert run_python(program) == "[] 1"


def test_a_boundary_without_anything_decides_nothing():
    assert Boundary().decide(3, votes=[7]) == Decision(votes=(7,))


def test_a_step_that_is_saved_is_not_saved_again_for_the_stop():
    stop = StopSignal((), slurm=False)
    autosave = Autosave(every_steps=2)
    boundary = Boundary(stop, autosave)
    assert boundary.decide(1).save
    autosave.saved(1, 0.1)
    stop._signal = signal.SIGTERM
    decision = boundary.decide(1)
    assert (str(decision.stop), decision.save) == ("SIGTERM came to rank 0", False)
    assert boundary.decide(2).save


def test_a_save_asked_for_is_counted_as_a_step():
    autosave = Autosave(every_steps=10)
    boundary = Boundary(autosave=autosave)
    for step in range(3):
        assert boundary.decide(step, save=True).save
    assert autosave._boundary_count == 3
