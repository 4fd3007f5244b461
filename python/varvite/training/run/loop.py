"""The loop of a run: steps, and at each step boundary what is due there, in one order.

Step, counters, metrics, hooks, evaluation, save, stop. Everything is decided at the boundary and agreed by
all ranks, and a save sees neither half a step nor the batch of the next one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from varvite.errors import InvalidInputError, SnapshotNotFoundError
from varvite.notices import warn
from varvite.plain import type_name
from varvite.training import rng
from varvite.training.boundary import Boundary, Decision
from varvite.training.exits import ExitCode
from varvite.training.finite import Action, roll_back
from varvite.training.modes import evaluating
from varvite.training.run.context import Ending, StepOutcome
from varvite.training.run.saving import note_durable, save_and_wait, save_in_background
from varvite.training.run.verdict import watch_for_verdict

if TYPE_CHECKING:
    from varvite.training.run.context import Run

__all__ = ["run_loop"]


def run_loop(run: Run) -> Ending:
    """Trains until all steps are done or something says stop."""
    if run.progress.next_step >= run.until:
        return Ending(ExitCode.FINISHED)
    boundary = Boundary(run.stop, run.autosave, run.agreement)
    _begin_training(run)
    windows = _windows(run)
    while True:
        batches = next(windows)
        outcome = _do_step(run, batches)
        if outcome.action is Action.STOP:
            return Ending(ExitCode.NOT_FINITE, run.guard.reason)
        if outcome.action is Action.ROLL_BACK:
            if not _roll_back(run):
                return Ending(ExitCode.NOT_FINITE, f"{run.guard.reason}, and no snapshot is healthy")
            continue
        run.progress.advance(batches=len(batches), updated=outcome.updated)
        if outcome.action is Action.SKIP:
            _tell(run, f"step {run.progress.step} was skipped: {run.guard.reason}")
        _observe(run, outcome)
        _evaluate(run)
        decision = _decide(run, boundary)
        if run.progress.next_step >= run.until:
            save_and_wait(run)
            return Ending(ExitCode.FINISHED)
        if decision.stop is not None:
            save_and_wait(run)
            return Ending(decision.stop.exit_code, str(decision.stop))
        if decision.save:
            save_in_background(run)


def _do_step(run: Run, batches: list[Any]) -> StepOutcome:
    outcome: Any = run.step_function(run, batches)
    if not isinstance(outcome, StepOutcome):
        reason = f"it must return a StepOutcome, not {type_name(outcome)}"
        raise InvalidInputError(
            f"invalid step_fn: {reason}",
            hint="return what `varvite.training.training_step` does, or call it",
            what="step_fn",
            reason=reason,
        )
    return _over_ranks(run, outcome)


def _over_ranks(run: Run, outcome: StepOutcome) -> StepOutcome:
    """Returns the outcome with the mean loss and the largest norm of all ranks.

    They are the same bits on each rank, because what is judged by them and saved has to be equal.
    """
    if run.agreement.world_size == 1:
        return outcome
    norm = outcome.grad_norm
    rows = run.agreement.gather([outcome.loss, math.nan if norm is None else norm])
    losses, norms = [row[0] for row in rows], [row[1] for row in rows]
    largest = next((one for one in norms if not math.isfinite(one)), max(norms))
    mean = sum(losses) / len(losses)
    return dataclasses.replace(outcome, loss=mean, grad_norm=None if norm is None else largest)


def _decide(run: Run, boundary: Boundary) -> Decision:
    """Decides with all ranks what comes next, and hears of a save in the background that has ended.

    All hear of it at one step, for one that has failed ends the loop, and each rank may know it later.
    """
    is_open = run.pending is not None and not run.pending.done
    decision = boundary.decide(run.progress.step, votes=[int(is_open)])
    if not any(decision.votes):
        note_durable(run)
    return decision


def _tell(run: Run, message: str) -> None:
    """Warns on the first rank: the decision is that of all."""
    if run.agreement.rank == 0:
        warn(message)


def _windows(run: Run) -> Iterator[list[Any]]:
    """Yields the batches of one step after the other, over epochs; what an epoch leaves is a step too."""
    size = run.job.micro_batches
    while True:
        window: list[Any] = []
        is_empty = True
        for batch in run.data:
            is_empty = False
            window.append(batch)
            if len(window) == size:
                yield window
                window = []
        if window:
            yield window
        if is_empty:
            reason = "an epoch has no batch"
            raise InvalidInputError(f"invalid data: {reason}", what="data", reason=reason)


def _observe(run: Run, outcome: StepOutcome) -> None:
    """Shows a step to the monitor, the tracker and the hooks; writes the verdict down once it is known."""
    step = run.progress.step
    anomalies = run.monitor.observe(step, loss=outcome.loss, grad_norm=outcome.grad_norm)
    run.metrics = {"loss": outcome.loss, **outcome.metrics}
    norm = {} if outcome.grad_norm is None else {"grad_norm": outcome.grad_norm}
    run.tracker.log(step, {**run.metrics, **norm, "anomalies": len(anomalies)})
    run.tell("stepped", outcome)


def _evaluate(run: Run) -> None:
    """Evaluates where it is due; what it measures is saved with this step."""
    job = run.job
    if job.evaluate is None or not job.evaluate_every or run.progress.next_step % job.evaluate_every:
        return
    import torch

    before = run.data.iteration
    with evaluating(run.model, run.optimizer), torch.no_grad():
        measured = {name: float(value) for name, value in job.evaluate(run).items()}
    if run.data.iteration != before:
        reason = "it moved the position of the training data"
        raise InvalidInputError(
            f"invalid evaluate: {reason}",
            hint="evaluate on a loader, and a sampler, of its own",
            what="evaluate",
            reason=reason,
        )
    run.metrics = {**run.metrics, **measured}
    run.tracker.log(run.progress.step, measured)


def _begin_training(run: Run) -> None:
    """Puts the model into train mode unless it is in it, and an optimizer that has such modes too.

    What the job has put into eval mode within a model in train mode, such as a frozen BatchNorm, stays there.
    """
    if not run.model.training:
        run.model.train()
    switch = getattr(run.optimizer, "train", None)
    if callable(switch):
        switch()


def _roll_back(run: Run) -> bool:
    """Goes back to the newest healthy snapshot, but for the data: the same batch would do the same again.

    Returns:
        False where no snapshot is healthy; nothing was changed.
    """
    note_durable(run)
    reason = run.guard.reason
    try:
        report = roll_back(run.manager, run.objects(), keep_position=["data", "run"])
    except SnapshotNotFoundError:
        return False
    run.committed_step = report.step
    _tell(run, f"rolled back to the state after step {report.step}: {reason}")
    run.autosave.restored(run.progress.step)
    watch_for_verdict(run, report)
    # What it has logged of the steps that are given up goes with them.
    run.tracker.close()
    with rng.unmoved():
        run.tracker = run.phases.make_tracker(run)
    run.tell("restored", report)
    return True
