"""One training step: forward, backward, the guard, the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from varvite.training.accumulation import exchanging
from varvite.training.finite import Action
from varvite.training.run.context import StepOutcome
from varvite.training.run.gradients import clip_gradients

if TYPE_CHECKING:
    import torch

    from varvite.training.run.context import Run

__all__ = ["training_step"]


def training_step(run: Run, batches: Sequence[Any]) -> StepOutcome:
    """Averages the gradients of some batches, and updates unless they are not finite.

    Under several ranks the model averages gradients over them itself, as `DistributedDataParallel` and
    `fully_shard` do. The loss is this rank's; the loop takes the mean over all of them.

    With a scaler, gradients that overflow are its business: it skips the update and lowers its scale. The
    scheduler and the average of the weights step once for each update, never for a skipped one.

    Args:
        run: The run; its model is in train mode, its gradients are empty.
        batches: The micro-batches of the step.
    """
    summed = _accumulate(run, batches)
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    # Read before the update: whoever reads after it waits on the device for the update too.
    loss, norm = _read(summed, clip_gradients(run.model, run.job.clip_grad_norm))
    action = run.guard.check(loss, grad_norm=norm, scaler=run.scaler)
    updated = action is Action.PROCEED and _update(run)
    if action is not Action.PROCEED and run.scaler is not None:
        run.scaler.update()  # it must hear of the gradients that it has unscaled, or it refuses the next ones
    run.optimizer.zero_grad()
    return StepOutcome(loss=loss, grad_norm=norm, action=action, updated=updated)


def _accumulate(run: Run, batches: Sequence[Any]) -> torch.Tensor:
    """Adds up the gradients of all batches, each divided by their number, and returns the mean loss."""
    losses = []
    for number, batch in enumerate(batches, start=1):
        with exchanging(run.model, number == len(batches)):
            loss = run.loss(run.model, batch)
            if len(batches) > 1:
                loss = loss / len(batches)
            (loss if run.scaler is None else run.scaler.scale(loss)).backward()
            losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def _read(loss: torch.Tensor, norm: torch.Tensor) -> tuple[float, float]:
    """Reads both numbers, with one transfer where they lie on a device together."""
    import torch

    if loss.device.type == "cpu" or loss.device != norm.device or type(norm) is not torch.Tensor:
        return float(loss), float(norm)
    # In the wider of two dtypes, so that no number changes.
    loss_value, norm_value = torch.stack([loss.reshape(()), norm]).tolist()
    return loss_value, norm_value


def _update(run: Run) -> bool:
    """Updates the weights and what follows them; returns whether the optimizer did."""
    if run.scaler is None:
        run.optimizer.step()
    else:
        scale = run.scaler.get_scale()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        if run.scaler.get_scale() < scale:
            return False
    if run.scheduler is not None:
        run.scheduler.step()
    if run.average is not None:
        run.average.update_parameters(run.model)
    return True
