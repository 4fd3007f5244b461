"""What systems before us got wrong, measured on them, and the tests that show us right.

| trap | what went wrong |
|---|---|
| M1 | the iterator of a resumed loader moves the generators |
| M2 | generators saved by more ranks than there are now make a resume fail, or go to other ranks |
| M3 | what a snapshot lacks keeps its live value without a word |
| M4 | the shard of one rank is saved as if it were the whole tensor |
| M5 | a kill between data and metadata leaves new weights with the old position |
| M6 | saving or restoring a new optimizer makes it step |
| M7 | ranks that see the stop at different steps hang, and nothing is saved |
| M8 | the health baseline is lost at a restart, flags rounding, and sees nothing that falls |
| M9 | a signal to the job ends the loader's workers, and those the trainer |
| M10 | rules for names match parts of words, and let two names fall on one |
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import traceback
from pathlib import Path

import pytest
import torch
from support import run_child

from varvite import CheckpointManager, _native

TESTS = Path(__file__).parents[1]

TABLE = {
    "M1": [
        "training/test_sampler.py::test_draws_after_two_resumes_are_those_of_the_run_that_never_stopped",
        "training/test_sampler.py::test_only_the_iterators_own_draw_is_taken_back",
        "training/test_loader.py::test_two_resumes_through_a_manager_equal_the_run_that_never_stopped",
        "training/test_loader.py::test_what_is_saved_between_two_epochs_goes_on_with_the_next",
    ],
    "M2": [
        "training/test_traps.py::test_a_rank_that_the_snapshot_does_not_know_gets_streams_of_its_own",
        "training/test_sampler.py::test_on_any_sequence_of_world_sizes_each_sample_comes_once",
    ],
    "M3": [
        (
            "training/test_no_effect.py::"
            "test_a_leaf_that_the_snapshot_lacks_is_an_error_and_keeps_nothing_in_silence"
        ),
        "training/test_no_effect.py::test_without_strict_such_a_leaf_is_in_the_report",
    ],
    "M4": ["training/test_traps.py::test_a_shard_is_not_saved_as_if_it_were_the_whole"],
    "M5": [
        "training/test_traps.py::test_a_kill_between_data_and_metadata_leaves_one_state_whole",
        "training/test_exact_resume.py::test_a_run_killed_twice_is_equal_to_one_left_alone",
    ],
    "M6": [
        "training/test_no_effect.py::test_a_save_has_no_effect_on_training",
        (
            "training/test_no_effect.py::"
            "test_a_resume_brings_no_state_step_or_hook_and_leaves_gradients_flags_and_modes"
        ),
    ],
    "M7": [
        (
            "training/test_agreement.py::"
            "test_a_signal_that_ranks_see_at_different_steps_stops_them_at_the_same_one"
        ),
    ],
    "M8": [
        "training/test_health.py::test_a_constant_loss_flags_what_moves_and_no_rounding",
        "training/test_health.py::test_a_fresh_baseline_is_not_evaluated_and_says_why",
        "training/test_health.py::test_moments_that_were_dropped_are_found",
        "training/test_health.py::test_a_loss_on_either_side_of_the_baseline_is_discontinuous",
        "training/test_health.py::test_a_rewind_takes_later_values_out",
    ],
    "M9": [
        "training/test_stopping.py::test_sigterm_with_loader_workers",
        "training/test_stopping.py::test_without_the_shield_the_last_save_is_lost",
        (
            "training/test_run_signals.py::"
            "test_a_run_is_saved_once_at_the_next_boundary_and_goes_on_as_if_untouched"
        ),
    ],
    "M10": [
        "weights/test_rules.py::test_the_empty_prefix_adds_a_prefix_to_every_name",
        "weights/test_rules.py::test_a_prefix_fits_whole_parts_of_a_path_only",
        "weights/test_rules.py::test_two_names_for_one_place_are_an_error_that_names_both",
    ],
}


@pytest.mark.parametrize("trap", TABLE)
def test_each_trap_has_tests(trap):
    for place in TABLE[trap]:
        file, _, name = place.partition("::")
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), place
    assert f"| {trap} |" in __doc__


def test_a_rank_that_the_snapshot_does_not_know_gets_streams_of_its_own(tmp_path):
    """What a manager of more ranks does; until there are such, one is told that it is the second."""
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(3, {"weight": torch.ones(2)})
        report = manager.resume(weight=torch.zeros(2))
        assert report.rng == "restored"
        first = torch.rand(3).tolist(), random.random()
        manager._settings = dataclasses.replace(manager._settings, rank=1, world_size=2)
        draws = []
        for _ in range(2):
            report = manager.resume(weight=torch.zeros(2))
            assert (report.rng, manager.last_receipt.rng) == ("derived", "derived")
            draws.append((torch.rand(3).tolist(), random.random()))
    assert draws[0] == draws[1]
    assert draws[0] != first


def test_a_shard_is_not_saved_as_if_it_were_the_whole(tmp_path):
    done = run_child("shards", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["local"] == [2, 3]
    assert "`model.weight`" in found["said"]
    assert "has another set of regions: expected each element of it in exactly one" in found["said"]
    assert found["snapshots"] == 0
    assert found["whole"] == torch.arange(12.0).reshape(4, 3).tolist()


@pytest.mark.parametrize(
    ("point", "is_committed"),
    [("save.first_chunk", False), ("save.footer", False), ("commit.pack_durable", True)],
)
def test_a_kill_between_data_and_metadata_leaves_one_state_whole(tmp_path, point, is_committed):
    states = {1: (1.0, 5), 2: (2.0, 10)}

    def save(step: int) -> None:
        weight, position = states[step]
        with CheckpointManager(tmp_path, threads=1) as manager:
            manager.save_sync(step, {"weight": torch.full((4,), weight)}, data={"position": position})

    save(1)
    process = os.fork()
    if process == 0:
        try:
            _native.kill_at(point, 1)
            save(2)
        finally:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    # A pack that is whole holds the whole state, and is committed by the next open.
    with CheckpointManager(tmp_path) as manager:
        found = manager.load()
        assert (found["weight"].tolist(), found["data"]["position"]) == (
            [states[1 + is_committed][0]] * 4,
            states[1 + is_committed][1],
        )
