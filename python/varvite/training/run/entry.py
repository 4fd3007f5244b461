"""The entry point: phases one after the other, and the tear-down whatever happens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from varvite.training import rng
from varvite.training.run.context import Run, RunResult, StepFunction
from varvite.training.run.phases import Phases
from varvite.training.run.saving import note_durable
from varvite.training.run.step import training_step
from varvite.training.run.verdict import conclude

if TYPE_CHECKING:
    from varvite.training.run.context import Ending
    from varvite.training.run.hooks import Hook
    from varvite.training.run.job import Job

__all__ = ["run_training"]


def run_training(
    job: Job,
    *,
    step_fn: StepFunction | None = None,
    hooks: Sequence[Hook] = (),
    phases: Phases | None = None,
) -> RunResult:
    """Trains, from wherever the newest snapshot stands, to the end or until it has to stop.

    Called by every rank. On a stop signal the step in hand is finished and saved before it returns. After an
    error of any phase, saves in the background are still waited for, and the tracker is closed.

    Args:
        job: What to do.
        step_fn: Does one step instead of `training_step`: gets the run and the list of micro-batches,
            returns a `StepOutcome`.
        hooks: Told of the events of the run.
        phases: Functions instead of those of `varvite.training.run.phases`.

    Returns:
        How it ended; `result.exit()` ends the process with the right exit code.

    Raises:
        CheckpointError: A save or the restore failed.

    Example:
        >>> import tempfile, torch
        >>> from torch.utils.data import DataLoader
        >>> from varvite.training import Job, ResumableSampler, run_training
        >>> numbers = torch.arange(16.0).unsqueeze(1)
        >>> job = Job(
        ...     folder=tempfile.mkdtemp(),
        ...     steps=6,
        ...     model=lambda: torch.nn.Linear(1, 1),
        ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
        ...     data=lambda: DataLoader(numbers, batch_size=4, sampler=ResumableSampler(numbers)),
        ...     loss=lambda model, batch: (model(batch) - batch).square().mean(),
        ... )
        >>> result = run_training(job)
        >>> result.exit_code.name, result.step, result.snapshot.step
        ('FINISHED', 5, 5)
    """
    phases = Phases() if phases is None else phases
    run = Run(job, tuple(hooks), training_step if step_fn is None else step_fn, phases)
    try:
        run.agreement = phases.set_up_ranks(run)
        run.stop = phases.make_stop_signal(run)
        run.guard = phases.make_guard(run)
        run.loss = phases.make_loss(run)
        run.model = phases.make_model(run)
        run.optimizer = phases.make_optimizer(run)
        run.scheduler = phases.make_scheduler(run)
        run.manager = phases.make_manager(run)
        run.report = phases.restore(run)
        run.tell("restored", run.report)
        # Making them may draw, and on a resume the generators are where the run left them.
        with rng.unmoved():
            run.tracker = phases.make_tracker(run)
            run.data = phases.make_data(run)
        result = _conclude(run, phases.run_loop(run))
    finally:
        phases.tear_down(run, sys.exception())
    return result


def _conclude(run: Run, ending: Ending) -> RunResult:
    """Makes all saves durable, and says what came of the run."""
    note_durable(run)
    run.stop.done()
    infos = run.manager.snapshots()
    result = RunResult(
        exit_code=ending.exit_code,
        reason=ending.reason,
        step=run.progress.step,
        report=run.report,
        snapshot=infos[-1] if infos else None,
        verdict=conclude(run),
    )
    run.tell("ended", result)
    return result
