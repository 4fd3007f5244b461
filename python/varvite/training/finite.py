"""What to do about a loss or a gradient that is not finite: go on, skip the step, stop, or roll back.

The check comes after the backward pass and before the optimizer's step, so that a step that is skipped
leaves the weights as they were. A finite loss does not tell that its gradients are: both are looked at.
"""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from varvite.errors import InvalidInputError
from varvite.notices import warn
from varvite.objects import kind_of
from varvite.plain import loaded
from varvite.training.checks import check_choice, check_count, check_counts

if TYPE_CHECKING:
    import torch

    from varvite import CheckpointManager
    from varvite.records import ResumeReport

__all__ = ["Action", "NonFiniteGuard", "roll_back"]

_TOLERATED: Final = {"warn": 10, "skip": 10, "stop": 0, "rollback": 0}
"""Policies, and how many failures in a row each tolerates if nothing else is said."""


class Action(enum.Enum):
    """What the training loop does with the step that was checked."""

    PROCEED = "proceed"
    SKIP = "skip"
    STOP = "stop"
    ROLL_BACK = "roll back"


class NonFiniteGuard:
    """Finds a loss or gradients that are not finite, and says what to do about them.

    Up to `max_consecutive` failures in a row the policy is mild: `warn` goes on with a warning, `skip` and
    `rollback` skip the step. The next failure in a row is too much: `warn`, `skip` and `stop` stop,
    `rollback` rolls back to the newest healthy snapshot, and stops once it has done so `max_rollbacks`
    times. The counts are training state: save the guard with the run.

    Call it on every rank.

    Args:
        policy: `warn`, `skip`, `stop` or `rollback`. With `warn` a gradient that is not finite reaches the
            weights.
        max_consecutive: How many failures in a row are tolerated; by default 10 for `warn` and `skip`, and
            0 for `stop` and `rollback`.
        max_rollbacks: How many times a run may roll back.
        agree: Takes a list of whole numbers and returns their maxima over all ranks, one by one. Without it
            each rank decides for itself, which is right only where all ranks see the same values.

    Raises:
        InvalidInputError: A value is not legal.

    Example:
        >>> guard = NonFiniteGuard("skip", max_consecutive=1)
        >>> [guard.check(loss).value for loss in (1.5, float("nan"), float("nan"))]
        ['proceed', 'skip', 'stop']
        >>> guard.reason
        'the loss is not finite, 2 steps in a row'
    """

    def __init__(
        self,
        policy: str = "skip",
        *,
        max_consecutive: int | None = None,
        max_rollbacks: int = 3,
        agree: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        """Makes a guard that has seen no failure."""
        check_choice("policy", policy, _TOLERATED)
        tolerated = _TOLERATED[policy] if max_consecutive is None else max_consecutive
        check_count("max_consecutive", tolerated)
        if policy == "stop" and tolerated:
            reason = "`stop` tolerates no failure; to skip some before it stops, choose `skip`"
            message = f"invalid max_consecutive `{tolerated}`: {reason}"
            raise InvalidInputError(message, what="max_consecutive", reason=reason)
        check_count("max_rollbacks", max_rollbacks)
        self._policy = policy
        self._max_consecutive = tolerated
        self._max_rollbacks = max_rollbacks
        self._agree = agree
        self.consecutive = 0
        self.failures = 0
        self.rollbacks = 0
        self.reason: str | None = None

    consecutive: int
    """Failures in a row, up to the last check."""

    failures: int
    """Failures of the run."""

    rollbacks: int
    """How many times the guard has asked to roll back."""

    reason: str | None
    """What was wrong at the last check, or `None`."""

    def check(
        self,
        loss: Any,
        *,
        grad_norm: Any | None = None,
        parameters: Iterable[torch.Tensor] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Action:
        """Judges a step after its backward pass.

        What lies on a device is read in one transfer. Gradients are judged by `grad_norm` where it is
        given, else by those of `parameters`.

        Args:
            loss: The loss: a number, or a tensor with one element.
            grad_norm: Norm of the gradients, as `torch.nn.utils.clip_grad_norm_` returns it.
            parameters: Parameters whose gradients are looked at. Of sharded ones each rank looks at its
                own part, so give `agree` too.
            scaler: The gradient scaler, where there is one. Gradients that overflow under a scale above 1
                are its business: its `step` leaves the update out and its `update` lowers the scale, so
                the action is to proceed, and no failure is counted.

        Returns:
            What to do, the same on all ranks with `agree`. After `SKIP`, drop the gradients, and call
            `scaler.update()` where `scaler.unscale_` was called.

        Raises:
            InvalidInputError: The loss or the norm is no number.
        """
        found = _find_nonfinite(loss, grad_norm, parameters)
        if self._agree is not None:
            found = [bool(flag) for flag in self._agree([int(flag) for flag in found])]
        loss_failed, gradients_failed = found
        if gradients_failed and not loss_failed and _is_overflow(scaler):
            self.reason = None
            return Action.PROCEED
        if not loss_failed and not gradients_failed:
            self.consecutive, self.reason = 0, None
            return Action.PROCEED
        self.consecutive += 1
        self.failures += 1
        what = "the loss is" if loss_failed else "the loss is finite and its gradients are"
        steps = "1 step" if self.consecutive == 1 else f"{self.consecutive} steps in a row"
        self.reason = f"{what} not finite, {steps}"
        return self._choose()

    def _choose(self) -> Action:
        if self.consecutive <= self._max_consecutive:
            if self._policy != "warn":
                return Action.SKIP
            warn(f"training goes on, though {self.reason}")
            return Action.PROCEED
        if self._policy == "rollback" and self.rollbacks < self._max_rollbacks:
            self.rollbacks += 1
            self.consecutive = 0
            return Action.ROLL_BACK
        if self._policy == "rollback":
            self.reason = f"{self.reason}, after {self.rollbacks} rollbacks"
        return Action.STOP

    def state_dict(self) -> dict[str, int]:
        """Returns the counts."""
        return {"consecutive": self.consecutive, "failures": self.failures, "rollbacks": self.rollbacks}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks a state without taking it.

        Raises:
            CorruptionError: No `state_dict` gave it.
        """
        check_counts("guard", state, {"consecutive": 0, "failures": 0, "rollbacks": 0})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the counts back.

        Raises:
            CorruptionError: No `state_dict` gave them; nothing was changed.
        """
        self.check_state_dict(state)
        self.consecutive, self.failures = state["consecutive"], state["failures"]
        self.rollbacks = state["rollbacks"]
        self.reason = None


def roll_back(
    manager: CheckpointManager,
    objects: Mapping[str, Any],
    *,
    keep_position: Collection[str] = (),
    override: dict[str, Any] | None = None,
) -> ResumeReport:
    """Takes the run back to its newest healthy snapshot, but for its position in the data.

    Weights, optimizer, scheduler, counters and random number generators go back together. The objects named
    by `keep_position` stay where they are: with its old position a loader would give the batches again that
    led here. A `NonFiniteGuard` among the objects keeps its counts, or it would never reach its limit.
    Gradients are dropped. What the run is then is saved at once, so that a restart finds it as the latest,
    and not the snapshot that was given up.

    Call it on every rank, between the check and the next step.

    Args:
        manager: The manager of the run.
        objects: All objects of the run by the keyword they are saved under.
        keep_position: Keywords of the objects that stay, such as `["data"]`.
        override: Hyper-parameters to set afterwards, as for `CheckpointManager.resume`.

    Returns:
        The report of the restore; its `next_step` is the step to go on with.

    Raises:
        SnapshotNotFoundError: No snapshot is healthy; nothing was changed.
        InvalidInputError: A keyword of `keep_position` is unknown, or names a module or an optimizer.
        MismatchError: The objects are not those that were saved; nothing was changed.

    Example:
        >>> import tempfile, torch
        >>> from varvite import CheckpointManager
        >>> model, progress = torch.nn.Linear(1, 1), {"samples": 10}
        >>> with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as manager:
        ...     info = manager.save_sync(4, model=model, progress=progress)
        ...     progress["samples"] = 20
        ...     with torch.no_grad():
        ...         filled = model.weight.fill_(float("nan"))
        ...     objects = {"model": model, "progress": progress}
        ...     report = roll_back(manager, objects, keep_position=["progress"])
        ...     int(report), bool(model.weight.isfinite().all()), progress
        (5, True, {'samples': 20})
    """
    restored = dict(objects)
    for keyword in keep_position:
        _check_kept(keyword, objects)
    for keyword, value in objects.items():
        if keyword in keep_position or isinstance(value, NonFiniteGuard):
            restored[keyword] = copy.deepcopy(value) if kind_of(value) == "nest" else _StandIn()
    report = manager._resume(  # noqa: SLF001 - a resume that its receipt calls by another name
        "healthy", restored, require=True, override=override, verb="rollback"
    )
    for value in objects.values():
        if kind_of(value) == "optimizer":
            value.zero_grad(set_to_none=True)
    if report.snapshot is not None:
        metadata = {**report.snapshot.metadata, "rolled_back_to": report.snapshot.seq}
        manager.save_sync(report.snapshot.step, metrics=report.snapshot.metrics, metadata=metadata, **objects)
    return report


class _StandIn:
    """Takes the state that an object is to be spared, that of one rank or those of all."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes nothing of it."""

    def load_rank_states(self, states: Collection[Any], *, rank: int, world_size: int) -> None:
        """Takes nothing of them."""


def _check_kept(keyword: str, objects: Mapping[str, Any]) -> None:
    if keyword not in objects:
        reason = f"the objects are {', '.join(objects) or 'none'}"
    elif kind_of(objects[keyword]) in ("module", "optimizer"):
        reason = f"it names a {kind_of(objects[keyword])}, which has no position"
    else:
        return
    message = f"invalid keep_position `{keyword}`: {reason}"
    raise InvalidInputError(message, what="keep_position", reason=reason)


def _is_overflow(scaler: torch.amp.GradScaler | None) -> bool:
    """True where a scale above 1 may be why gradients are not finite: the scaler can still lower it."""
    return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1.0


def _find_nonfinite(loss: Any, grad_norm: Any, parameters: Iterable[torch.Tensor] | None) -> list[bool]:
    """Tells of the loss and of the gradients whether they are not finite."""
    gradients = []
    if grad_norm is None and parameters is not None:
        gradients = _gradients(parameters)
        grad_norm = _norm(gradients) if gradients else None
    loss_finite, norm_finite = _are_finite(
        {"loss": loss, "grad_norm": 0.0 if grad_norm is None else grad_norm}
    )
    if gradients and not norm_finite:
        # The norm of finite gradients may overflow; their largest element does not.
        (norm_finite,) = _are_finite({"grad_norm": _norm(gradients, math.inf)})
    return [not loss_finite, not norm_finite]


def _are_finite(values: Mapping[str, Any]) -> list[bool]:
    """Tells which values are finite, with one transfer for all that lie on a device."""
    library = loaded("torch")
    results: dict[str, bool] = {}
    flags: dict[str, torch.Tensor] = {}
    for what, value in values.items():
        if library is not None and isinstance(value, library.Tensor):
            if _is_number_here(value):
                results[what] = math.isfinite(value.item())
            else:
                flags[what] = library.isfinite(value.detach()).all()
            continue
        try:
            results[what] = math.isfinite(value)
        except (TypeError, ValueError, OverflowError) as error:
            reason = f"must be a number or a tensor ({error})"
            message = f"invalid {what} of type `{type(value).__qualname__}`: {reason}"
            raise InvalidInputError(message, what=what, reason=reason) from error
    if library is not None and flags:
        device = next(iter(flags.values())).device
        read = library.stack([flag.to(device) for flag in flags.values()]).tolist()
        results.update(zip(flags, read, strict=True))
    return [results[what] for what in values]


def _is_number_here(value: torch.Tensor) -> bool:
    """True for one real number in this machine's memory: to read it takes less than one operation on it."""
    return value.device.type == "cpu" and value.numel() == 1 and not value.is_complex()


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns this rank's part of the gradients that there are."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "to_local"):
            gradient = gradient.to_local()
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient.numel() > 0:
            found.append(gradient.detach())
    return found


def _norm(gradients: list[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    import torch

    return torch.nn.utils.get_total_norm(gradients, order)
