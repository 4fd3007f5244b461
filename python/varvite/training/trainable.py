"""Which parameters are trained: saved, compared before a load, and set again after it.

A state dict does not say `requires_grad`. A run that freezes other parameters than the one that saved would
resume without an error, and train something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from varvite.errors import MismatchError, first_lines
from varvite.modules import parameter_names
from varvite.plain import corrupt
from varvite.training.checks import check_choice

if TYPE_CHECKING:
    import torch

__all__ = ["TrainableMask"]

_POLICIES: Final = ("raise", "apply")


class TrainableMask:
    """Saves `requires_grad` of each parameter by its name.

    Compared and set are the parameters that both sides have; that names differ, the restore of the module
    reports.

    Args:
        modules: A module, or modules by the keyword they are saved under.
        on_mismatch: What a load does where the live parameters differ from the saved ones: `raise`, or
            `apply` the saved values.

    Raises:
        InvalidInputError: A value is not legal.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> saved = TrainableMask(model).state_dict()
        >>> model.bias.requires_grad = False
        >>> TrainableMask(model).check_state_dict(saved)
        Traceback (most recent call last):
            ...
        varvite.errors.MismatchError: other parameters are trained than were saved:
          `bias` is frozen, but the snapshot has: trained
        hint: freeze what was frozen before the resume, or pass on_mismatch="apply"
        >>> TrainableMask(model, on_mismatch="apply").load_state_dict(saved)
        >>> model.bias.requires_grad
        True
    """

    def __init__(
        self, modules: torch.nn.Module | Mapping[str, torch.nn.Module], *, on_mismatch: str = "raise"
    ) -> None:
        """Makes a mask of modules; their parameters are looked at when it is used."""
        check_choice("on_mismatch", on_mismatch, _POLICIES)
        self._modules = dict(modules) if isinstance(modules, Mapping) else {"model": modules}
        self._on_mismatch = on_mismatch

    def state_dict(self) -> dict[str, Any]:
        """Returns `requires_grad` by name of the parameter, a tied one by its first name."""
        return {"requires_grad": {name: one.requires_grad for name, one in self._parameters().items()}}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compares a saved mask with the live one; nothing is changed.

        Raises:
            MismatchError: They differ, and the policy is to raise; lists all names.
            CorruptionError: No `state_dict` gave it.
        """
        differing = self._differing(state)
        if not differing or self._on_mismatch == "apply":
            return
        rows = [(name, "requires_grad", not saved, saved) for name, saved in differing.items()]
        lines = [
            f"`{name}` is {_word(live)}, but the snapshot has: {_word(saved)}"
            for name, _, live, saved in rows
        ]
        raise MismatchError(
            "\n  ".join(["other parameters are trained than were saved:", *first_lines(lines, 12)]),
            hint='freeze what was frozen before the resume, or pass on_mismatch="apply"',
            field="requires_grad",
            mismatched=rows,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets `requires_grad` as it was saved, once `check_state_dict` has nothing against it.

        Raises:
            MismatchError: They differ, and the policy is to raise; nothing was changed.
            CorruptionError: No `state_dict` gave it; nothing was changed.
        """
        self.check_state_dict(state)
        parameters = self._parameters()
        for name, saved in self._differing(state).items():
            parameters[name].requires_grad_(saved)

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter for parameter, name in parameter_names(self._modules).items()}

    def _differing(self, state: Mapping[str, Any]) -> dict[str, bool]:
        """Returns the saved values of the parameters that have another one."""
        match state:
            case {"requires_grad": dict(saved)} if len(state) == 1:
                pass
            case _:
                raise corrupt("mask", "`requires_grad` by name", state)
        for name, value in saved.items():
            if type(name) is not str or type(value) is not bool:
                raise corrupt("mask", "True or False by name", (name, value))
        live = self._parameters()
        return {
            name: value
            for name, value in saved.items()
            if name in live and live[name].requires_grad is not value
        }


def _word(is_trained: bool) -> str:
    return "trained" if is_trained else "frozen"
