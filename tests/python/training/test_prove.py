"""`prove_resume`: steps done again in a fresh process come to the recorded state, or it says what differs."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from processes import jobs
from support import PROCESSES, child, files_of

from varvite import CheckpointManager
from varvite.errors import CheckpointError, InvalidInputError, MismatchError, SnapshotNotFoundError
from varvite.training import Hook, prove_resume, run_training
from varvite.training.prove import _choose

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


def test_a_step_of_the_program_is_done_again(tmp_path):
    run_training(jobs.job(tmp_path), step_fn=jobs.doubling_step)
    assert prove_resume(jobs.job(tmp_path), step_fn=jobs.doubling_step).equal


def test_values_that_were_rounded_are_said_to_differ_by_choice(tmp_path):
    job = jobs.job(tmp_path, manager={"save_dtype": "bf16"})
    run_training(job)
    proof = prove_resume(job)
    assert (proof.equal, proof.narrowed) == (False, True)
    assert "state, as it must after `save_dtype` has rounded what it began with in: " in str(proof)


def test_what_a_rollback_saved_is_no_end_of_steps_and_steps_are_not_counted_over_it(tmp_path):
    calls = iter(range(100))

    def loss(module, batch):
        return (jobs.lost_loss if next(calls) == 10 else jobs.loss)(module, batch)

    saves = {"autosave": {"every_steps": 4}, "non_finite": {"policy": "rollback"}}
    with pytest.warns(RuntimeWarning, match="rolled back"):
        run_training(jobs.job(tmp_path, loss=loss, **saves))  # saves 3, 7, 7 rolled back to, and 11
    start, end = _choose(jobs.job(tmp_path), None)
    assert (start.step, start.metadata["rolled_back_to"], end.step) == (7, 2, 11)
    start, end = _choose(jobs.job(tmp_path), 8)
    assert (start.step, end) == (11, None)


def test_what_fails_in_the_fresh_process_is_told(trained):
    with pytest.raises(CheckpointError, match="the fresh process ended before it was done") as caught:
        prove_resume(jobs.job(trained, loss=jobs.deadly_loss))
    assert "error output" in caught.value.hint
    assert '`if __name__ == "__main__":`' in caught.value.hint
    stopping = jobs.job(trained, loss=jobs.lost_loss, non_finite={"policy": "stop"})
    with pytest.raises(CheckpointError, match=r"stopped after step 9: the loss is not finite"):
        prove_resume(stopping)
    with pytest.raises(MismatchError, match="the snapshot lacks `scaler`") as caught:
        prove_resume(jobs.job(trained, scaler=torch.amp.GradScaler))
    assert caught.value.missing == ["scaler"]


def test_the_fresh_process_ends_with_the_one_that_started_it(trained, tmp_path):
    paths = os.pathsep.join(filter(None, [str(PROCESSES.parent), os.environ.get("PYTHONPATH")]))
    with child("proves", trained, TMPDIR=str(tmp_path), PYTHONPATH=paths) as process:
        assert process.stdout.readline() == "running\n"
        process.kill()
        assert process.stdout.read() == ""  # what the fresh process holds open too
    assert list(tmp_path.iterdir()) == []


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
