"""What a training job is: the functions that make its parts, and its settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from varvite.errors import InvalidInputError
from varvite.plain import type_name
from varvite.training.checks import check_count, check_positive

if TYPE_CHECKING:
    import torch

    from varvite.records import ResumeReport
    from varvite.training.run.context import Run

__all__ = ["Job"]


@dataclass(kw_only=True)
class Job:
    """A training job. Every rank makes the same one.

    Functions and not objects are given, so that each part is made in its phase: the model after the
    generators are seeded, the data after the restore. For `prove_resume` they must be functions of a module,
    because a fresh process imports them.

    Attributes:
        folder: Where the repository is.
        steps: Number of steps in all, over all restarts. A run that has done them does nothing.
        model: Makes the model, wrapped or sharded as the ranks need it (`DistributedDataParallel`,
            `fully_shard`): they have joined `torch.distributed` by then.
        optimizer: Makes the optimizer of a model.
        data: Makes the loader of batches: a `DataLoader` with a `ResumableSampler`, a loader with
            `state_dict()`, or any other, which can be saved at the edges of epochs alone.
        loss: Loss of a model on a batch: a scalar tensor, the mean over the batch.
        scheduler: Makes a scheduler of an optimizer. It steps once for each update. One that wants a metric,
            such as `ReduceLROnPlateau`, needs a `step_fn`, and so does an optimizer that wants a closure.
        scaler: Makes a `torch.amp.GradScaler`.
        average: Makes an average of a model's weights that has `update_parameters(model)`, such as
            `torch.optim.swa_utils.AveragedModel`.
        name: Name of the run, for people.
        set_up: Called first of all, in every process that runs the job: number of threads, deterministic
            kernels, default dtype, this rank's device. `prove_resume` needs the same there. The ranks of a
            launcher join `torch.distributed` after it, unless it has made them.
        seed: Seeds Python, NumPy and torch before the model is made, alike on all ranks. On a fresh start the
            generators of each rank go on apart after that; a resume restores them.
        micro_batches: Batches whose gradients are averaged to one step. The last step of an epoch may have
            fewer. A save never comes between them.
        clip_grad_norm: Largest norm of all gradients together; `None` leaves them alone.
        evaluate: Called every `evaluate_every` steps, with the model in eval mode and without gradients;
            returns metrics, which are saved with the snapshot of this step. It takes a loader of its own:
            `run.stop.shield(loader)`, if that has workers, or a stop signal to the whole job ends them. Under
            several ranks each calls it, and the metrics of the first are saved: it is to reduce them itself.
        evaluate_every: Steps between two evaluations, 0 for none.
        autosave: Arguments of `Autosave`; by default a save as often as its measured cost suggests.
        stop: Arguments of `StopSignal`.
        non_finite: Arguments of `NonFiniteGuard`, such as `{"policy": "rollback"}`.
        health: Arguments of `HealthMonitor`.
        manager: Arguments of `CheckpointManager`, such as `{"keep": keep.last(3)}`.
        resume: Arguments of `CheckpointManager.resume`, such as `{"strict": False}`.
        begin: Called on a fresh start to begin from another run: it calls `warm_start` or `fork` of
            `run.manager` with `run.identity` among the objects, and returns the report, or `None`.
        tracker: Makes a tracker of metrics, on the first rank, after the restore and each rollback, such as
            `open_tracker("tensorboard", run.identity, run.tracker_mode, next_step=run.progress.next_step,
            folder="metrics")`.
        metadata: Saved with each snapshot.
    """

    folder: str | os.PathLike[str]
    steps: int
    model: Callable[[], torch.nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    data: Callable[[], Iterable[Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    scheduler: Callable[[Any], Any] | None = None
    scaler: Callable[[], Any] | None = None
    average: Callable[[Any], Any] | None = None
    name: str | None = None
    set_up: Callable[[], None] | None = None
    seed: int = 0
    micro_batches: int = 1
    clip_grad_norm: float | None = None
    evaluate: Callable[[Run], Mapping[str, float]] | None = None
    evaluate_every: int = 0
    autosave: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, Any] = field(default_factory=dict)
    non_finite: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    manager: dict[str, Any] = field(default_factory=dict)
    resume: dict[str, Any] = field(default_factory=dict)
    begin: Callable[[Run], ResumeReport | None] | None = None
    tracker: Callable[[Run], Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks that numbers are in their range, and that functions are functions.

        Raises:
            InvalidInputError: One is not.
        """
        for name, least in (("steps", 0), ("micro_batches", 1), ("evaluate_every", 0), ("seed", 0)):
            check_count(name, getattr(self, name), least=least)
        if self.clip_grad_norm is not None:
            check_positive("clip_grad_norm", self.clip_grad_norm)
        for name in _FUNCTIONS:
            _check_function(name, getattr(self, name))


_FUNCTIONS = ("model", "optimizer", "data", "loss", "scheduler", "scaler", "average")
_NOT_NEEDED = ("scheduler", "scaler", "average")


def _check_function(name: str, value: Any) -> None:
    if value is None and name in _NOT_NEEDED:
        return
    # A module can be called too, and fails much later; as a loss it is what it should be.
    is_object = name != "loss" and hasattr(value, "state_dict") and not isinstance(value, type)
    if callable(value) and not is_object:
        return
    makes = "gives" if name == "loss" else "makes"
    reason = f"must be a function that {makes} the {name}, not {type_name(value)}"
    hint = None if name == "loss" else f"write a function that returns it: each process makes its own {name}"
    raise InvalidInputError(f"invalid {name}: {reason}", hint=hint, what=name, reason=reason)
