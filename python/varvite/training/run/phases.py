"""The phases of a run, each a function of the run that returns the part it makes.

Any of them can be swapped: `Phases(make_optimizer=mine)`. A phase finds in the run what the phases before it
have made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from varvite.notices import warn
from varvite.settings import joined_distributed
from varvite.training.run.context import Progress
from varvite.training.run.loop import run_loop
from varvite.training.run.verdict import watch_for_verdict

if TYPE_CHECKING:
    import torch

    from varvite import CheckpointManager
    from varvite.records import ResumeReport
    from varvite.training.agreement import Agreement
    from varvite.training.finite import NonFiniteGuard
    from varvite.training.loader import ResumableLoader
    from varvite.training.run.context import Ending, Run
    from varvite.training.stop import StopSignal
    from varvite.training.tracking import Tracker

__all__ = ["Phases"]

_AUTOSAVE = {"mean_time_between_failures_seconds": 86_400.0}
"""Where a job does not say when to save: as often as pays if something fails once a day."""


def set_up_ranks(run: Run) -> Agreement:
    """Calls the job's `set_up`, joins the ranks of the launcher, if any, and seeds the generators alike."""
    from varvite.training import rng
    from varvite.training.agreement import Agreement

    if run.job.set_up is not None:
        run.job.set_up()
    # With torchrun also where it starts one rank: a job that wraps its model needs a group then, too.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        import torch.distributed

        from varvite.distributed.joining import join_ranks

        if not torch.distributed.is_initialized():
            join_ranks()
            run.has_joined = True
    # The same on all ranks, for the model is to begin the same on all of them.
    rng.derive(run.job.seed, rank=0, step=0)
    return Agreement(run.job.manager.get("process_group"))


def make_stop_signal(run: Run) -> StopSignal:
    """Makes the stop signal and installs its handlers."""
    from varvite.training.stop import StopSignal

    return StopSignal(agreement=run.agreement, **run.job.stop).__enter__()


def make_guard(run: Run) -> NonFiniteGuard:
    """Makes the guard against NaN and infinity."""
    from varvite.training.finite import NonFiniteGuard

    return NonFiniteGuard(agree=run.agreement.maximum, **run.job.non_finite)


def make_loss(run: Run) -> Callable[[Any, Any], torch.Tensor]:
    """Returns the loss."""
    return run.job.loss


def make_model(run: Run) -> torch.nn.Module:
    """Makes the model."""
    return run.job.model()


def make_optimizer(run: Run) -> torch.optim.Optimizer:
    """Makes the optimizer."""
    return run.job.optimizer(run.model)


def make_scheduler(run: Run) -> Any:
    """Makes the scheduler, or returns `None`."""
    return None if run.job.scheduler is None else run.job.scheduler(run.optimizer)


def make_manager(run: Run) -> CheckpointManager:
    """Opens the repository."""
    from varvite import CheckpointManager

    return CheckpointManager(run.job.folder, **run.job.manager)


def restore(run: Run) -> ResumeReport:
    """Makes what else is saved, and restores everything from the newest snapshot, if there is one."""
    from varvite.training.autosave import Autosave
    from varvite.training.health import HealthMonitor
    from varvite.training.identity import RunIdentity
    from varvite.training.loader import ResumableLoader
    from varvite.training.trainable import TrainableMask

    job = run.job
    run.scaler = None if job.scaler is None else job.scaler()
    run.average = None if job.average is None else job.average(run.model)
    run.autosave = Autosave(**(job.autosave or _AUTOSAVE))
    run.monitor = HealthMonitor(**job.health)
    run.trainable = TrainableMask(run.model)
    run.progress = Progress()
    run.identity = RunIdentity(job.name)
    run.data = ResumableLoader()
    run.tell("restoring")
    report = run.manager.resume(**{"ref": "latest", **job.resume}, **run.objects())
    if report.fresh and job.begin is not None:
        report = job.begin(run) or report
    _part_streams(run, report)
    if "progress" not in report.restored:
        # A fork, or a snapshot of another program: the counters follow the report.
        run.progress.step = report.next_step - 1
    watch_for_verdict(run, report)
    if report.verb == "resume" and not report.fresh:
        run.committed_step = report.step
        run.autosave.restored(run.progress.step)
    return report


def _part_streams(run: Run, report: ResumeReport) -> None:
    """Gives each rank generators of its own, where none were restored: up to here all have drawn the same.

    Those of the first rank go on as they are, as those of a lone process do.
    """
    from varvite.training import rng

    if report.rng not in ("restored", "derived") and run.agreement.rank:
        rng.derive(run.job.seed, run.agreement.rank, report.next_step)


def make_tracker(run: Run) -> Tracker:
    """Makes the tracker, on the first rank; it may ask the run which run it is. Others track nothing."""
    from varvite.training.tracking import NullTracker

    if run.job.tracker is None or run.agreement.rank:
        return NullTracker()
    tracker: Tracker = run.job.tracker(run)
    return tracker


def make_data(run: Run) -> ResumableLoader:
    """Makes the loader, shields its workers from the stop signal, and gives it the restored position."""
    loader = run.job.data()
    # A list of batches, or a generator, starts no workers that a signal could end.
    shield = run.stop.shield if hasattr(loader, "num_workers") else None
    return run.data.attach(loader, shield=shield)


def tear_down(run: Run, error: BaseException | None) -> None:
    """Closes what was opened, also after an error, in an order in which each can still do its work.

    Saves are waited for before the stop signal's hard timer is taken back: it covers what can hang. A
    process group that `set_up_ranks` has joined is left only after success, because leaving it waits for
    ranks that may have failed.
    """
    made = vars(run)
    try:
        if "tracker" in made:
            _close_tracker(run, error)
    finally:
        try:
            if "manager" in made:
                run.manager.__exit__(None if error is None else type(error), error, None)
        finally:
            if "stop" in made:
                run.stop.__exit__(None, None, None)
    if error is None and run.has_joined:
        _leave_ranks()


def _close_tracker(run: Run, error: BaseException | None) -> None:
    """Closes the tracker; where that fails it hides neither an error nor the exit code of a saved run."""
    try:
        run.tracker.close()
    except Exception as failure:  # noqa: BLE001 - a service may fail in any way of its own
        said = f"the tracker can't be closed: {type(failure).__name__}: {failure}"
        if error is None:
            warn(said)
        else:
            error.add_note(said)


def _leave_ranks() -> None:
    distributed = joined_distributed()
    if distributed is not None:
        distributed.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The phases in their order. Each gets the run; what it returns becomes the part of that name.

    Attributes:
        set_up_ranks: Makes `run.agreement`.
        make_stop_signal: Makes `run.stop`.
        make_guard: Makes `run.guard`.
        make_loss: Makes `run.loss`.
        make_model: Makes `run.model`.
        make_optimizer: Makes `run.optimizer`.
        make_scheduler: Makes `run.scheduler`.
        make_manager: Makes `run.manager`.
        restore: Makes `run.report`, and whatever else is saved.
        make_tracker: Makes `run.tracker`.
        make_data: Makes `run.data`.
        run_loop: Trains; returns how it ended.
        tear_down: Gets the run and the error that ended it, or `None`; parts may be missing.
    """

    set_up_ranks: Callable[[Run], Agreement] = set_up_ranks
    make_stop_signal: Callable[[Run], StopSignal] = make_stop_signal
    make_guard: Callable[[Run], NonFiniteGuard] = make_guard
    make_loss: Callable[[Run], Callable[[Any, Any], torch.Tensor]] = make_loss
    make_model: Callable[[Run], torch.nn.Module] = make_model
    make_optimizer: Callable[[Run], torch.optim.Optimizer] = make_optimizer
    make_scheduler: Callable[[Run], Any] = make_scheduler
    make_manager: Callable[[Run], CheckpointManager] = make_manager
    restore: Callable[[Run], ResumeReport] = restore
    make_tracker: Callable[[Run], Tracker] = make_tracker
    make_data: Callable[[Run], ResumableLoader] = make_data
    run_loop: Callable[[Run], Ending] = run_loop
    tear_down: Callable[[Run, BaseException | None], None] = tear_down
