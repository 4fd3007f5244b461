"""The loop of a run: steps, and at each step boundary what is due there, in one order.

Step, counters, metrics, hooks, evaluation, save, stop. Everything is decided at the boundary and agreed by
all ranks, and a save sees neither half a step nor the batch of the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from varvite.errors import InvalidInputError
from varvite.training.boundary import Boundary
from varvite.training.exits import ExitCode
from varvite.training.finite import Action, roll_back
from varvite.training.run.context import Ending
from varvite.training.run.saving import note_durable, save_and_wait, save_in_background
from varvite.training.run.verdict import watch_for_verdict

if TYPE_CHECKING:
    from varvite.training.run.context import Run, StepOutcome

__all__ = ["run_loop"]


def run_loop(run: Run) -> Ending:
    """Trains until all steps are done or something says stop."""
    if run.progress.next_step >= run.until:
        return Ending(ExitCode.FINISHED)
    boundary = Boundary(run.stop, run.autosave, run.agreement)
    _set_mode(run, training=True)
    windows = _windows(run)
    while True:
        batches = next(windows)
        outcome = run.step_function(run, batches)
        if outcome.action is Action.STOP:
            return Ending(ExitCode.NOT_FINITE, run.guard.reason)
        if outcome.action is Action.ROLL_BACK:
            _roll_back(run)
            continue
        run.progress.advance(batches=len(batches), updated=outcome.updated)
        _observe(run, outcome)
        _evaluate(run)
        note_durable(run)
        decision = boundary.decide(run.progress.step)
        if run.progress.next_step >= run.until:
            save_and_wait(run)
            return Ending(ExitCode.FINISHED)
        if decision.stop is not None:
            save_and_wait(run)
            return Ending(decision.stop.exit_code, str(decision.stop))
        if decision.save:
            save_in_background(run)


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

    _set_mode(run, training=False)
    with torch.no_grad():
        measured = {name: float(value) for name, value in job.evaluate(run).items()}
    _set_mode(run, training=True)
    run.metrics = {**run.metrics, **measured}
    run.tracker.log(run.progress.step, measured)


def _set_mode(run: Run, *, training: bool) -> None:
    """Puts the model into train or eval mode, and an optimizer that has such modes with it."""
    run.model.train(training)
    switch = getattr(run.optimizer, "train" if training else "eval", None)
    if callable(switch):
        switch()


def _roll_back(run: Run) -> None:
    """Goes back to the newest healthy snapshot, but for the data: the same batch would do the same again."""
    note_durable(run, wait=True)
    report = roll_back(run.manager, run.objects(), keep_position=["data", "run"])
    run.committed_step = report.step
    watch_for_verdict(run, report)
    # What it has logged of the steps that are given up goes with them.
    run.tracker.close()
    run.tracker = run.phases.make_tracker(run)
    run.tell("restored", report)
