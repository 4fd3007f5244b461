"""`run_training` where things go wrong or meet: nothing is lost, false or left behind."""

from __future__ import annotations

import gc
import multiprocessing
import random
import resource
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import jobs
from support import flip, packs
from torch import nn
from torch.utils.data import DataLoader

from varvite import CheckpointManager
from varvite.errors import CheckpointError, InvalidInputError, MismatchError
from varvite.training import ExitCode, Hook, ResumableSampler, run_training
from varvite.training.tracking import NullTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class At(Hook):
    """Acts after some steps, and notes all of them and all saves."""

    def __init__(self, **actions: Callable[[], Any]) -> None:
        self.actions, self.steps, self.saves = actions, [], []

    def stepped(self, run, outcome) -> None:
        self.steps.append(run.progress.step)
        self.actions.pop(f"step{run.progress.step}", lambda: None)()

    def saving(self, run, step) -> None:
        self.saves.append(step)
        self.actions.pop(f"save{step}", lambda: None)()


def poisoned(*calls: int) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Returns a loss that is NaN at some of its calls."""
    left = iter(range(1000))

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found = jobs.loss(module, batch)
        return found * float("nan") if next(left) in calls else found

    return loss


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=4.0)


# NaN


def test_a_rollback_with_a_scaler_goes_on(tmp_path):
    job = jobs.job(tmp_path, loss=poisoned(7), scaler=scaler, non_finite={"policy": "rollback"})
    hook = At()
    with pytest.warns(RuntimeWarning, match="rolled back to the state after step 4"):
        assert run_training(job, hooks=[hook]).exit_code == ExitCode.FINISHED
    assert hook.steps == [*range(7), *range(5, 12)]


def test_without_a_healthy_snapshot_a_rollback_stops_the_run_as_not_finite(tmp_path):
    result = run_training(jobs.job(tmp_path, loss=poisoned(2), non_finite={"policy": "rollback"}))
    assert (result.exit_code, result.step, result.snapshot) == (ExitCode.NOT_FINITE, 1, None)
    assert result.reason == "the loss is not finite, 1 step, and no snapshot is healthy"


def test_the_limit_of_rollbacks_holds_over_restarts(tmp_path):
    settings = {"non_finite": {"policy": "rollback", "max_rollbacks": 2}}
    first = At(step6=lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.warns(RuntimeWarning, match="rolled back"):
        assert run_training(jobs.job(tmp_path, loss=poisoned(5), **settings), hooks=[first]).step == 6
    with pytest.warns(RuntimeWarning, match="rolled back"):
        result = run_training(jobs.job(tmp_path, loss=poisoned(0, 1), **settings))
    assert (result.exit_code, result.step) == (ExitCode.NOT_FINITE, 6)
    assert result.reason == "the loss is not finite, 1 step, after 2 rollbacks"


def test_a_step_that_comes_again_after_a_rollback_is_saved_again(tmp_path):
    hook = At()

    class Spoil(Hook):
        """Makes the weights of step 3 unhealthy, as an update that overflows does."""

        def stepped(self, run, outcome) -> None:
            if run.progress.step == 3 and not run.guard.rollbacks:
                with torch.no_grad():
                    run.model[0].bias.fill_(float("inf"))

    settings = {"autosave": {"every_steps": 1}, "non_finite": {"policy": "rollback"}}
    with pytest.warns(RuntimeWarning, match="rolled back to the state after step 2"):
        assert run_training(jobs.job(tmp_path, 6, **settings), hooks=[Spoil(), hook]).step == 5
    assert hook.steps == [0, 1, 2, 3, 3, 4, 5]
    assert hook.saves == hook.steps


# Failures of the store


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """Returns a function that fills the disk, in that no file can grow, and at the next call makes room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def turn() -> None:
        is_full = resource.getrlimit(resource.RLIMIT_FSIZE) != before
        resource.setrlimit(resource.RLIMIT_FSIZE, before if is_full else (100, before[1]))

    yield turn
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_where_a_failed_save_is_only_warned_of_the_run_goes_on_and_saves_later(tmp_path, full_disk):
    class Room(At):
        """Makes room once the save of step 4 has failed."""

        def staged(self, run, handle) -> None:
            if handle.step == 4:
                with pytest.raises(CheckpointError):
                    handle.wait()
                full_disk()

    hook = Room(save4=full_disk)
    job = jobs.job(tmp_path, manager={"on_error": "warn"})
    with pytest.warns(RuntimeWarning, match="the save of step 4 failed"):
        result = run_training(job, hooks=[hook])
    assert (result.exit_code, hook.saves) == (ExitCode.FINISHED, [4, 9, 11])
    with CheckpointManager(tmp_path) as manager:
        assert [info.step for info in manager.snapshots()] == [9, 11]


def test_a_signal_after_a_failed_save_does_not_hide_the_failure(tmp_path, full_disk):
    def fail_and_stop() -> None:
        full_disk()
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(CheckpointError, match="File too large"):
        run_training(jobs.job(tmp_path), hooks=[At(save4=fail_and_stop)])
    full_disk()
    with CheckpointManager(tmp_path) as manager:
        assert manager.snapshots() == []


def test_a_verdict_that_can_not_be_written_ends_no_run(tmp_path, full_disk):
    run_training(jobs.job(tmp_path, 30))
    hook = At(step33=full_disk, step35=full_disk)
    with pytest.warns(RuntimeWarning, match="the verdict `continuous` can't be written into its receipt"):
        result = run_training(jobs.job(tmp_path, 40, autosave={"every_steps": 100}), hooks=[hook])
    assert (result.exit_code, result.step, result.verdict) == (ExitCode.FINISHED, 39, "continuous")
    with CheckpointManager(tmp_path) as manager:
        assert [receipt.verdict for receipt in manager.receipts()] == [None]


@pytest.mark.parametrize(
    ("event", "steps"),
    [
        ("restoring", []),
        ("restored", []),
        ("stepped", []),
        ("saving", []),
        ("staged", [4]),
        ("saved", [4]),
        ("ended", [4, 5]),
    ],
)
def test_an_error_of_a_hook_loses_no_save_and_leaves_nothing_open(tmp_path, event, steps):
    def fail(self, *_: Any) -> None:
        raise RuntimeError(f"out of luck when {event}")

    failing = type("Failing", (Hook,), {event: fail})()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError, match=f"when {event}"):
        run_training(jobs.job(tmp_path, 6), hooks=[failing])
    assert signal.getsignal(signal.SIGTERM) is before
    with CheckpointManager(tmp_path) as manager:  # the lock is free
        assert [info.step for info in manager.snapshots()] == steps


class Unreachable(NullTracker):
    def close(self) -> None:
        raise OSError("no route to host")


def test_a_tracker_that_can_not_be_closed_hides_neither_an_error_nor_the_exit_code(tmp_path):
    job = jobs.job(tmp_path, tracker=lambda run: Unreachable())
    stop = At(step3=lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.warns(RuntimeWarning, match="the tracker can't be closed: OSError: no route to host"):
        result = run_training(job, hooks=[stop])
    assert (result.exit_code, result.snapshot.step) == (ExitCode.RESUMABLE, 3)

    def fail() -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck") as caught:
        run_training(job, hooks=[At(step5=fail)])
    assert caught.value.__notes__ == ["the tracker can't be closed: OSError: no route to host"]


# What must not move the run


def test_what_a_tracker_draws_when_it_is_opened_changes_nothing(tmp_path):
    class Restless(NullTracker):
        def __init__(self) -> None:
            super().__init__()
            torch.rand(()), random.random()

    job = {"tracker": lambda run: Restless()}
    run_training(jobs.job(tmp_path / "untouched"))
    stop = At(step6=lambda: signal.raise_signal(signal.SIGTERM))
    run_training(jobs.job(tmp_path / "run", **job), hooks=[stop])
    run_training(jobs.job(tmp_path / "run", **job))
    with CheckpointManager(tmp_path / "untouched") as left, CheckpointManager(tmp_path / "run") as right:
        assert left.info().digest == right.info().digest


def over_the_loop(run) -> None:
    for _ in run.data:
        pass


def over_its_loader(run) -> None:
    next(iter(run.data._position.loader))


@pytest.mark.parametrize("evaluate", [over_the_loop, over_its_loader])
def test_an_evaluation_that_takes_the_training_data_is_refused_before_a_save(tmp_path, evaluate):
    job = jobs.job(tmp_path, evaluate=lambda run: evaluate(run) or {}, evaluate_every=5)
    with pytest.raises(InvalidInputError, match="it moved the position of the training data") as caught:
        run_training(job)
    assert caught.value.what == "evaluate"
    with CheckpointManager(tmp_path) as manager:
        assert manager.snapshots() == []


def test_parts_that_a_job_froze_in_eval_mode_stay_there_and_a_model_in_eval_mode_is_trained(tmp_path):
    modes = []

    def frozen() -> nn.Module:
        module = jobs.model()
        module[1].eval()
        return module

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        modes.append((module.training, module[1].training))
        return jobs.loss(module, batch)

    job = {"loss": loss, "evaluate": lambda run: {}, "evaluate_every": 1}
    run_training(jobs.job(tmp_path / "part", 2, model=frozen, **job))
    assert modes == [(True, False)] * 2
    modes.clear()
    run_training(jobs.job(tmp_path / "whole", 2, model=lambda: jobs.model().eval(), **job))
    assert modes == [(True, True)] * 2


# Restarts with something else


def test_a_run_that_is_complete_goes_on_with_more_steps(tmp_path):
    run_training(jobs.job(tmp_path / "once", 15))
    run_training(jobs.job(tmp_path / "twice", 8))
    result = run_training(jobs.job(tmp_path / "twice", 15))
    assert (result.exit_code, result.report.next_step, result.step) == (ExitCode.FINISHED, 8, 14)
    with CheckpointManager(tmp_path / "once") as left, CheckpointManager(tmp_path / "twice") as right:
        assert left.info().digest == right.info().digest


def test_a_run_whose_newest_snapshot_is_damaged_does_its_steps_again_and_comes_to_the_same(tmp_path):
    run_training(jobs.job(tmp_path / "untouched", 15))
    run_training(jobs.job(tmp_path / "run", 8))
    newest = packs(tmp_path / "run")[-1]
    flip(newest, newest.stat().st_size // 3)
    hook = At()
    with pytest.warns(RuntimeWarning, match="snapshot 2"):
        result = run_training(jobs.job(tmp_path / "run", 15), hooks=[hook])
    assert (result.report.next_step, result.report.skipped_snapshots[0][0]) == (5, 2)
    assert hook.steps == list(range(5, 15))
    with CheckpointManager(tmp_path / "untouched") as left, CheckpointManager(tmp_path / "run") as right:
        assert left.info().digest == right.info().digest
        assert [receipt.skipped.count for receipt in right.receipts()] == [1]


def test_another_job_is_refused_and_other_batches_are_not(tmp_path):
    run_training(jobs.job(tmp_path, 3))
    scheduled = jobs.job(tmp_path, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3))
    with pytest.raises(MismatchError, match="the snapshot lacks `scheduler`"):
        run_training(scheduled)
    longer = jobs.job(tmp_path, data=lambda: DataLoader(range(21), sampler=ResumableSampler(21, seed=1)))
    with pytest.raises(MismatchError, match="`length` is 21 and was 20"):
        run_training(longer)
    seen: list[int] = []

    def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(len(batch))
        return jobs.loss(module, batch)

    # 12 of 20 samples are done: two batches of five are one step at the epoch's edge.
    samples = jobs.numbers()
    by_five = {"data": lambda: DataLoader(samples, batch_size=5, sampler=ResumableSampler(samples, seed=1))}
    assert run_training(jobs.job(tmp_path, 5, micro_batches=3, loss=loss, **by_five)).step == 4
    assert seen == [5, 3, 5, 5, 5]


def test_counters_follow_a_snapshot_that_has_none(tmp_path):
    module = jobs.model()
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(7, model=module, optimizer=jobs.optimizer(module))
    hook = At()
    result = run_training(jobs.job(tmp_path, 10, resume={"strict": False}), hooks=[hook])
    assert (result.report.next_step, hook.steps) == (8, [8, 9])


def test_a_run_that_failed_before_its_first_save_begins_again(tmp_path):
    run_training(jobs.job(tmp_path / "parent", 6))

    def begin(run) -> Any:
        parts = {"run": run.identity, "model": run.model, "optimizer": run.optimizer}
        return run.manager.fork(tmp_path / "parent", name="child", **parts)

    def fail() -> None:
        raise RuntimeError("out of luck")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            run_training(jobs.job(tmp_path / "child", 9, begin=begin), hooks=[At(step6=fail)])
    hook = At()
    assert run_training(jobs.job(tmp_path / "child", 9, begin=begin), hooks=[hook]).step == 8
    assert hook.steps == [6, 7, 8]
    with CheckpointManager(tmp_path / "child") as manager:
        assert [receipt.verb for receipt in manager.receipts()] == ["fork"] * 3
        assert [receipt.verdict for receipt in manager.receipts()] == [None, None, "not evaluated"]


def test_a_clock_that_is_set_back_changes_nothing(tmp_path, monkeypatch):
    def set_back() -> None:
        monkeypatch.setattr("time.time", lambda: 1000.0)

    run_training(jobs.job(tmp_path / "untouched"))
    stop = At(step3=set_back, step6=lambda: signal.raise_signal(signal.SIGTERM))
    run_training(jobs.job(tmp_path / "run"), hooks=[stop])
    assert run_training(jobs.job(tmp_path / "run")).report.next_step == 7
    with CheckpointManager(tmp_path / "untouched") as left, CheckpointManager(tmp_path / "run") as right:
        assert left.info().digest == right.info().digest


def test_a_run_that_is_over_leaves_no_worker_behind(tmp_path):
    samples = jobs.numbers()

    def data() -> DataLoader:
        sampler = ResumableSampler(samples, seed=1)
        return DataLoader(samples, batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)

    gc.disable()
    try:
        for steps in (3, 6):
            assert run_training(jobs.job(tmp_path, steps, data=data)).step == steps - 1
            assert multiprocessing.active_children() == []
    finally:
        gc.enable()
