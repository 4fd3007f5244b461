"""When a run saves, and who hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from varvite.errors import CheckpointError

if TYPE_CHECKING:
    from varvite.training.run.context import Run

__all__ = ["note_durable", "save_and_wait", "save_in_background"]


def save_in_background(run: Run) -> None:
    """Saves the step just done; training goes on once the state is copied."""
    note_durable(run)
    step = run.progress.step
    run.tell("saving", step)
    run.pending = run.manager.save(step, **_what(run))
    run.committed_step = step
    blocked_seconds = run.pending.timings.blocked
    run.autosave.saved(step, blocked_seconds=blocked_seconds)
    costs = {
        "save_blocked_seconds": blocked_seconds,
        "expected_lost_seconds": run.autosave.expected_lost_seconds,
    }
    run.tracker.log(step, {name: cost for name, cost in costs.items() if cost is not None})
    run.tell("staged", run.pending)


def save_and_wait(run: Run) -> None:
    """Saves the step just done, and returns when it is durable; a step is not saved twice."""
    note_durable(run)
    step = run.progress.step
    if step < 0 or run.committed_step == step:
        return
    run.tell("saving", step)
    info = run.manager.save_final(step, **_what(run))
    run.committed_step = step
    run.tell("saved", info)


def note_durable(run: Run) -> None:
    """Waits for the save in the background and tells the hooks; of a failure the manager raises or warns."""
    if run.pending is None:
        return
    handle, run.pending = run.pending, None
    try:
        info = handle.wait()
    except CheckpointError:
        run.committed_step = None
        run.manager.flush()  # raises it, or warns of it where the manager is to
        return
    timings = handle.timings
    # What a save before a deadline will take; digesting and writing overlap, so it is rather less.
    run.stop.saved_in(timings.blocked + timings.encode + timings.write + timings.sync + timings.commit)
    run.tell("saved", info)


def _what(run: Run) -> dict[str, Any]:
    return {"metrics": run.metrics, "metadata": run.job.metadata, **run.objects()}
