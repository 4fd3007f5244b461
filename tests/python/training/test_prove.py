"""`prove_resume`: steps done again in a fresh process come to the recorded state, or it says what differs."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from processes import jobs
from support import files_of

from varvite import CheckpointManager
from varvite.errors import InvalidInputError, SnapshotNotFoundError
from varvite.training import Hook, prove_resume, run_training

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with snapshots of the steps 4, 9 and 11."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_training(jobs.job(folder))
    return folder


def test_steps_done_again_come_to_the_recorded_state_and_leave_no_trace(trained):
    files, streams = files_of(trained), (torch.get_rng_state().tolist(), random.getstate())
    proof = prove_resume(jobs.job(trained), steps=5)
    assert (proof.from_step, proof.to_step, proof.compared_with) == (4, 9, "recorded")
    assert proof.equal
    assert proof.different == []
    with CheckpointManager(trained, read_only=True) as manager:
        assert proof.found == manager.info(9).digest
    assert str(proof).startswith("steps 5 to 9 done again in a fresh process: equal to the recorded state")
    assert files_of(trained) == files
    assert (torch.get_rng_state().tolist(), random.getstate()) == streams


def test_another_setting_is_found_and_named(trained):
    other = jobs.job(trained, loss=jobs.restless_loss)
    proof = prove_resume(other)
    assert (proof.from_step, proof.to_step, proof.compared_with) == (9, 11, "recorded")
    assert not proof.equal
    assert {"model.0.weight", "optimizer.state.0.weight.exp_avg", "structure"} <= set(proof.different)
    assert "rng.torch of rank 0" not in proof.different
    assert "differs from the recorded state in: " in str(proof)


def test_without_a_recorded_state_two_fresh_processes_are_compared(trained):
    proof = prove_resume(jobs.job(trained), steps=3)
    assert (proof.from_step, proof.to_step, proof.compared_with) == (11, 14, "second run")
    assert proof.equal


def test_a_run_that_goes_on_may_be_proven_meanwhile(tmp_path):
    proofs = []
    job = jobs.job(tmp_path / "run", steps=11)

    class Prover(Hook):
        def stepped(self, run, outcome) -> None:
            if run.progress.step == 10:
                run.manager.flush()
                proofs.append(prove_resume(job))

    run_training(job, hooks=[Prover()])
    assert [(proof.from_step, proof.to_step, proof.equal) for proof in proofs] == [(4, 9, True)]


def test_what_can_not_be_proven_is_refused_before_a_process_is_started(trained, tmp_path):
    with pytest.raises(InvalidInputError, match="invalid steps") as caught:
        prove_resume(jobs.job(trained), steps=0)
    assert caught.value.what == "steps"
    rate = 0.1
    lambdas = jobs.job(trained, optimizer=lambda module: jobs.optimizer(module, rate=rate))
    with pytest.raises(InvalidInputError, match="can't import it") as caught:
        prove_resume(lambdas)
    assert caught.value.what == "optimizer"
    prepared = partial(jobs.job, tmp_path / "run")
    run_training(prepared(steps=0))
    with pytest.raises(SnapshotNotFoundError, match="no snapshot"):
        prove_resume(prepared())
    run_training(prepared(steps=1))
    with pytest.raises(SnapshotNotFoundError, match="no two snapshots"):
        prove_resume(prepared())
