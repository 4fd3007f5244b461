"""Optimizers that hold other weights for training than for evaluation, such as the schedule-free ones.

Their `train()` and `eval()` change the parameters between two sequences, so which mode they are in belongs
to the weights. Those that keep `train_mode` in their parameter groups are saved whole, and take the saved
mode at a resume. Those that wrap another optimizer keep it as an attribute of their own: save the wrapped
one, and beside it an `OptimizerMode` of the wrapper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from varvite.errors import InvalidInputError
from varvite.plain import corrupt, type_name

__all__ = ["OptimizerMode", "evaluating"]


class OptimizerMode:
    """Saves the mode of an optimizer that keeps it as its attribute `train_mode`.

    Without it, a wrapper that is new at a resume takes weights of the training sequence for those of the
    other one, and its `train()` moves them a second time.

    Args:
        optimizer: The wrapper.

    Raises:
        InvalidInputError: It has no such attribute.

    Example:
        >>> from types import SimpleNamespace
        >>> wrapper = SimpleNamespace(train_mode=True)
        >>> mode = OptimizerMode(wrapper)
        >>> saved, wrapper.train_mode = mode.state_dict(), False
        >>> mode.load_state_dict(saved)
        >>> wrapper.train_mode
        True
    """

    def __init__(self, optimizer: Any) -> None:
        """Makes the keeper of an optimizer's mode."""
        if type(getattr(optimizer, "train_mode", None)) is not bool:
            reason = "it has no attribute `train_mode` that is True or False"
            raise InvalidInputError(
                f"invalid optimizer of type `{type_name(optimizer)}`: {reason}",
                hint="an optimizer that keeps its mode in its parameter groups needs no OptimizerMode",
                what="optimizer",
                reason=reason,
            )
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, bool]:
        """Returns the mode."""
        return {"train_mode": self._optimizer.train_mode}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks a state without taking it.

        Raises:
            CorruptionError: No `state_dict` gave it.
        """
        if (
            not isinstance(state, Mapping)
            or set(state) != {"train_mode"}
            or type(state["train_mode"]) is not bool
        ):
            raise corrupt("mode of an optimizer", "`train_mode`, True or False", state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the mode; the weights are left alone, as they are restored in this mode.

        Raises:
            CorruptionError: No `state_dict` gave it; nothing was changed.
        """
        self.check_state_dict(state)
        self._optimizer.train_mode = state["train_mode"]


@contextlib.contextmanager
def evaluating(*parts: Any) -> Iterator[None]:
    """Puts modules and optimizers into evaluation mode for a block, then back as they were.

    A part of a module that was in evaluation mode before stays there: a frozen BatchNorm does not begin to
    learn. An optimizer without modes is left alone. A save within the block holds the weights of evaluation
    together with the mode.

    Args:
        *parts: Modules, and optimizers with `train()` and `eval()`.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(1).eval(), torch.nn.Dropout())
        >>> with evaluating(model):
        ...     model[1].training
        False
        >>> [part.training for part in model]
        [False, True]
    """
    with contextlib.ExitStack() as undo:
        # Weights move before a module's mode and back after it, in the order given and the reverse.
        for part in parts:
            if callable(getattr(part, "modules", None)):
                training = [module for module in part.modules() if module.training]
                undo.callback(_set_training, training)
                part.eval()
            elif callable(getattr(part, "eval", None)) and _is_training(part):
                undo.callback(part.train)
                part.eval()
        yield


def _set_training(modules: list[Any]) -> None:
    for module in modules:
        module.training = True


def _is_training(optimizer: Any) -> bool:
    """Tells the mode of an optimizer by its own attribute, or by its first group."""
    own = getattr(optimizer, "train_mode", None)
    groups = getattr(optimizer, "param_groups", None)
    if own is None and groups:
        own = groups[0].get("train_mode")
    return bool(own)
