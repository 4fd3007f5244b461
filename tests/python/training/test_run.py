"""`run_training`: its phases, what it does at step boundaries, and how it ends."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import assert_same
from torch import nn
from torch.utils.data import DataLoader

from varvite import CheckpointManager, keep
from varvite.errors import InvalidInputError, StoreError
from varvite.training import ExitCode, Hook, Job, Phases, ResumableSampler, StepOutcome, run_training
from varvite.training.finite import Action
from varvite.training.tracking import NullTracker

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES, BATCH = 20, 4


def numbers() -> torch.Tensor:
    return torch.arange(float(SAMPLES)).unsqueeze(1) / SAMPLES


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.1), nn.Linear(4, 1))


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def data(*, batch_size: int = BATCH) -> DataLoader:
    samples = numbers()
    return DataLoader(samples, batch_size=batch_size, sampler=ResumableSampler(samples, seed=1))


def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (module(batch) - batch.square()).square().mean()


def job(folder: Path, steps: int = 12, **more: Any) -> Job:
    settings = {"model": model, "optimizer": optimizer, "data": data, "loss": loss}
    quiet = {"autosave": {"every_steps": 5}, "stop": {"slurm": False}}
    return Job(folder=folder / "run", steps=steps, **{**settings, **quiet, **more})


class Record(Hook):
    """Notes every event, and may act at one."""

    def __init__(self, **actions: Any) -> None:
        self.events: list[Any] = []
        self.losses: list[float] = []
        self.actions = actions

    def note(self, event: str, what: Any) -> None:
        self.events.append((event, what))
        if event in self.actions:
            self.actions[event](what)

    def restoring(self, run) -> None:
        self.note("restoring", None)

    def restored(self, run, report) -> None:
        self.note("restored", int(report))

    def stepped(self, run, outcome) -> None:
        self.losses.append(outcome.loss)
        self.note("stepped", run.progress.step)

    def saving(self, run, step) -> None:
        self.note("saving", step)

    def staged(self, run, handle) -> None:
        self.note("staged", handle.step)

    def saved(self, run, info) -> None:
        self.note("saved", info.step)

    def ended(self, run, result) -> None:
        self.note("ended", result.exit_code)


def at(step: int, action: Any) -> Any:
    """Returns an action for one step."""
    return lambda found: action() if found == step else None


def test_a_run_trains_saves_and_finishes(tmp_path):
    record = Record()
    result = run_training(job(tmp_path), hooks=[record])
    assert (result.exit_code, result.reason, result.step) == (ExitCode.FINISHED, None, 11)
    assert (result.report.fresh, result.verdict, result.snapshot.step) == (True, None, 11)
    assert [event for event in record.events if event[0] in ("saving", "staged")] == [
        ("saving", 4),
        ("staged", 4),
        ("saving", 9),
        ("staged", 9),
        ("saving", 11),
    ]
    assert [what for event, what in record.events if event == "saved"] == [4, 9, 11]
    assert record.events[:2] == [("restoring", None), ("restored", 0)]
    assert record.events[-1] == ("ended", ExitCode.FINISHED)
    with CheckpointManager(tmp_path / "run") as manager:
        saved = manager.load()
        assert list(saved) == [
            "model",
            "optimizer",
            "trainable",
            "health",
            "guard",
            "progress",
            "data",
        ]
        assert saved["progress"] == {"step": 11, "updates": 12, "batches": 12}
        assert saved.snapshot.metrics == {"loss": record.losses[-1]}


def test_a_run_stopped_by_a_signal_goes_on_as_if_it_had_not_been(tmp_path):
    untouched, first, second = Record(), None, Record()
    run_training(job(tmp_path / "untouched"), hooks=[untouched])
    first = Record(stepped=at(6, lambda: signal.raise_signal(signal.SIGTERM)))
    stopped = run_training(job(tmp_path / "stopped"), hooks=[first])
    assert stopped.exit_code == ExitCode.RESUMABLE
    assert stopped.reason == "SIGTERM came to rank 0"
    assert (stopped.step, stopped.snapshot.step) == (6, 6)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resumed = run_training(job(tmp_path / "stopped"), hooks=[second])
    assert resumed.exit_code == ExitCode.FINISHED
    assert resumed.report.next_step == 7
    assert first.losses + second.losses == untouched.losses
    with (
        CheckpointManager(tmp_path / "untouched" / "run") as left,
        CheckpointManager(tmp_path / "stopped" / "run") as right,
    ):
        assert_same(dict(left.load()), dict(right.load()))
        assert left.info().digest == right.info().digest


def test_a_step_that_is_committed_is_not_saved_again(tmp_path):
    record = Record(staged=at(4, lambda: signal.raise_signal(signal.SIGTERM)))
    result = run_training(job(tmp_path, manager={"async_save": False}), hooks=[record])
    assert (result.exit_code, result.step) == (ExitCode.RESUMABLE, 5)
    record = Record(stepped=at(9, lambda: signal.raise_signal(signal.SIGTERM)))
    run_training(job(tmp_path), hooks=[record])
    assert [what for event, what in record.events if event == "saving"] == [9]


def test_a_run_that_is_complete_does_nothing(tmp_path):
    run_training(job(tmp_path))
    with CheckpointManager(tmp_path / "run") as manager:
        before = [info.seq for info in manager.snapshots()]
    record = Record()
    result = run_training(job(tmp_path), hooks=[record])
    assert (result.exit_code, result.step, result.snapshot.seq) == (ExitCode.FINISHED, 11, before[-1])
    assert result.verdict == "not evaluated"
    assert [event for event, _ in record.events] == ["restoring", "restored", "ended"]
    with CheckpointManager(tmp_path / "run") as manager:
        assert [info.seq for info in manager.snapshots()] == before


def test_an_epoch_gives_its_rest_as_a_smaller_step(tmp_path):
    windows = []

    def step(run, batches) -> StepOutcome:
        windows.append([len(batch) for batch in batches])
        return StepOutcome(loss=1.0, grad_norm=None, action=Action.PROCEED, updated=False)

    result = run_training(job(tmp_path, 6, micro_batches=2), step_fn=step)
    assert windows == [[4, 4], [4, 4], [4]] * 2
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.load()["progress"] == {"step": 5, "updates": 0, "batches": 10}
        assert manager.load()["data"]["epoch"] == 2
    assert result.snapshot.metrics == {"loss": 1.0}


def test_micro_batches_are_averaged_to_one_update(tmp_path):
    whole = Record()
    run_training(
        job(tmp_path / "whole", 1, data=lambda: data(batch_size=20), model=lambda: nn.Linear(1, 1)),
        hooks=[whole],
    )
    parts = Record()
    run_training(job(tmp_path / "parts", 1, micro_batches=5, model=lambda: nn.Linear(1, 1)), hooks=[parts])
    assert parts.losses == pytest.approx(whole.losses, rel=1e-6)
    with (
        CheckpointManager(tmp_path / "whole" / "run") as left,
        CheckpointManager(tmp_path / "parts" / "run") as right,
    ):
        torch.testing.assert_close(
            left.load()["optimizer"]["state"]["weight"]["exp_avg"],
            right.load()["optimizer"]["state"]["weight"]["exp_avg"],
        )


def poisoned(steps: set[int]) -> Any:
    """Returns a loss that is NaN at its n-th calls."""
    calls = iter(range(1000))

    def poison(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found = loss(module, batch)
        return found * float("nan") if next(calls) in steps else found

    return poison


def test_a_loss_that_is_not_finite_stops_the_run_without_a_save(tmp_path):
    result = run_training(job(tmp_path, loss=poisoned({7}), non_finite={"policy": "stop"}))
    assert result.exit_code == ExitCode.NOT_FINITE
    assert result.reason == "the loss is not finite, 1 step"
    assert (result.step, result.snapshot.step) == (6, 4)


def test_a_skipped_step_is_a_step_without_an_update(tmp_path):
    with pytest.warns(RuntimeWarning) as told:
        result = run_training(job(tmp_path, loss=poisoned({7, 8}), non_finite={"policy": "skip"}))
    assert [str(one.message) for one in told] == [
        "step 7 was skipped: the loss is not finite, 1 step",
        "step 8 was skipped: the loss is not finite, 2 steps in a row",
    ]
    assert (result.exit_code, result.step) == (ExitCode.FINISHED, 11)
    with CheckpointManager(tmp_path / "run") as manager:
        saved = manager.load()
        assert saved["progress"] == {"step": 11, "updates": 10, "batches": 12}
        assert saved["guard"]["failures"] == 2
        assert saved.snapshot.healthy


def test_a_rollback_goes_back_in_everything_but_the_data_and_is_saved_at_once(tmp_path):
    record = Record()
    rolls_back = job(tmp_path, loss=poisoned({7}), non_finite={"policy": "rollback"})
    told = "^rolled back to the state after step 4: the loss is not finite, 1 step$"
    with pytest.warns(RuntimeWarning, match=told):
        result = run_training(rolls_back, hooks=[record])
    assert result.exit_code == ExitCode.FINISHED
    steps = [what for event, what in record.events if event == "stepped"]
    assert steps == [*range(7), *range(5, 12)]
    with CheckpointManager(tmp_path / "run") as manager:
        infos = {info.seq: info for info in manager.snapshots()}
        assert [info.step for info in infos.values()] == [4, 9, 11]
        # The batch of the NaN is behind: 7 steps, the one that failed, and 7 more.
        assert manager.load()["data"] != manager.load(4)["data"]
        assert manager.load()["guard"]["rollbacks"] == 1
        (receipt,) = manager.receipts()
        assert (receipt.verb, receipt.step, receipt.next_step) == ("rollback", 4, 5)
        rolled_back = [info for info in infos.values() if info.metadata.get("rolled_back_to") is not None]
        assert [info.step for info in rolled_back] == [4]


class Tracker(NullTracker):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []
        self.closed = False

    def log(self, step, metrics) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def test_metrics_go_to_the_tracker_and_evaluations_into_the_snapshot(tmp_path):
    tracker = Tracker()
    modes = []

    def evaluate(run) -> dict[str, float]:
        modes.append((run.model.training, torch.is_grad_enabled()))
        return {"accuracy": run.progress.step / 10}

    result = run_training(job(tmp_path, 6, tracker=lambda run: tracker, evaluate=evaluate, evaluate_every=3))
    assert modes == [(False, False), (False, False)]
    assert [step for step, _ in tracker.rows] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert set(tracker.rows[6][1]) == {"save_blocked_seconds", "expected_lost_seconds"}
    assert set(tracker.rows[0][1]) == {"loss", "grad_norm", "anomalies"}
    assert tracker.rows[3] == (2, {"accuracy": 0.2})
    assert tracker.closed
    assert result.snapshot.metrics["accuracy"] == 0.5


def test_after_an_error_saves_are_waited_for_and_everything_is_closed(tmp_path):
    tracker = Tracker()

    def fail() -> None:
        raise RuntimeError("out of luck")

    hook = Record(stepped=at(5, fail))
    with pytest.raises(RuntimeError, match="out of luck"):
        run_training(job(tmp_path, tracker=lambda run: tracker), hooks=[hook])
    assert tracker.closed
    assert ("ended", ExitCode.FINISHED) not in hook.events
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with CheckpointManager(tmp_path / "run") as manager:  # the lock is free, the save of step 4 is whole
        assert [info.step for info in manager.snapshots()] == [4]


@pytest.mark.parametrize(
    "phase", ["make_model", "make_optimizer", "make_manager", "restore", "make_tracker", "make_data"]
)
def test_an_error_of_any_phase_closes_what_was_opened(tmp_path, phase):
    def fail(run) -> None:
        raise StoreError(f"no {phase}")

    with pytest.raises(StoreError, match=phase):
        run_training(job(tmp_path), phases=Phases(**{phase: fail}))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.snapshots() == []


def test_a_failed_save_ends_the_run_with_its_error(tmp_path, monkeypatch):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))

    try:
        with pytest.raises(StoreError):
            run_training(job(tmp_path), hooks=[Record(saving=at(4, limit))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.snapshots() == []


def test_phases_can_be_swapped(tmp_path):
    phases = Phases(make_loss=lambda run: lambda module, batch: loss(module, batch) * 0 + 3.0)
    record = Record()
    run_training(job(tmp_path, 3), hooks=[record], phases=phases)
    assert record.losses == [3.0, 3.0, 3.0]


def test_a_fork_begins_a_run_behind_its_parent(tmp_path):
    run_training(job(tmp_path / "parent", 6))
    begun = []

    def begin(run):
        parts = {"model": run.model, "optimizer": run.optimizer}
        begun.append(run.manager.fork(tmp_path / "parent" / "run", **parts))
        return begun[0]

    result = run_training(job(tmp_path / "child", 9, begin=begin))
    assert (begun[0].next_step, result.report.verb) == (6, "fork")
    assert (result.step, result.snapshot.step) == (8, 8)
    again = run_training(job(tmp_path / "child", 9, begin=begin))
    assert (len(begun), again.report.verb) == (1, "resume")


def test_numbers_of_a_job_are_checked(tmp_path):
    for name, value in [("steps", -1), ("micro_batches", 0), ("evaluate_every", True), ("seed", 1.5)]:
        with pytest.raises(InvalidInputError) as caught:
            job(tmp_path, **({name: value} if name != "steps" else {}), steps=value if name == "steps" else 1)
        assert caught.value.what == name
    with pytest.raises(InvalidInputError, match="clip_grad_norm"):
        job(tmp_path, clip_grad_norm=0.0)


@pytest.mark.parametrize("name", ["model", "optimizer", "data", "loss", "scheduler"])
def test_a_job_takes_functions_and_not_what_they_make(tmp_path, name):
    objects = {"model": model(), "optimizer": optimizer(model()), "data": data(), "loss": 0.5, "scheduler": 1}
    with pytest.raises(InvalidInputError, match=f"invalid {name}: must be a function") as caught:
        job(tmp_path, **{name: objects[name]})
    assert caught.value.what == name
    job(tmp_path, loss=nn.MSELoss(), scaler=torch.amp.GradScaler)


def test_a_step_function_that_returns_no_outcome_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="step_fn: it must return a StepOutcome, not NoneType"):
        run_training(job(tmp_path), step_fn=lambda run, batches: None)


def test_a_result_prints_as_one_line(tmp_path):
    result = run_training(job(tmp_path))
    assert str(result) == f"finished (0) after step 11; newest snapshot: {result.snapshot}"
    stopping = Record(stepped=at(12, lambda: signal.raise_signal(signal.SIGTERM)))
    result = run_training(job(tmp_path, 15), hooks=[stopping])
    how = "resumable (75) after step 12, SIGTERM came to rank 0; restart not evaluated"
    assert str(result) == f"{how}; newest snapshot: {result.snapshot}"


def test_data_without_a_batch_is_an_error(tmp_path):
    with pytest.raises(InvalidInputError, match="no batch"):
        run_training(job(tmp_path, data=lambda: DataLoader([], batch_size=1)))


def test_batches_of_any_kind_are_trained_on_and_saved_between_epochs(tmp_path):
    batches = list(numbers().split(BATCH))
    settings = {"data": lambda: batches, "autosave": {"every_steps": len(batches)}}
    steps = 2 * len(batches)
    result = run_training(job(tmp_path, steps, **settings))
    assert (result.exit_code, result.snapshot.step) == (ExitCode.FINISHED, steps - 1)
    again = run_training(job(tmp_path, steps + len(batches), **settings))
    assert (again.report.next_step, again.step) == (steps, steps + len(batches) - 1)


def test_retention_and_metadata_go_to_the_manager(tmp_path):
    result = run_training(job(tmp_path, manager={"keep": keep.last(1)}, metadata={"team": "blue"}))
    assert result.snapshot.metadata["team"] == "blue"
    with CheckpointManager(tmp_path / "run") as manager:
        assert [info.step for info in manager.snapshots()] == [11]
