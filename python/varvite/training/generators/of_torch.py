"""Generators of torch: on the CPU, and the default ones of accelerators."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from varvite.plain import loaded
from varvite.training.generators.states import Restore, refuse

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Device", "devices_of", "forget_restored", "plan_devices", "plan_torch", "take_back_draw"]

_restored: dict[str, tuple[Any, Any]] = {}
"""Generators of the CPU that the last restore set, each with the state that it was given."""


class Device:
    """The default generator of one accelerator device."""

    def __init__(self, module: Any, index: int | None) -> None:
        """Makes it of the module of its kind, and of its index where there are several."""
        self._module = module
        self._arguments = () if index is None else (index,)

    def get_state(self) -> Any:
        """Returns its state."""
        return self._module.get_rng_state(*self._arguments)

    def set_state(self, state: Any) -> None:
        """Sets its state."""
        self._module.set_rng_state(state, *self._arguments)


def devices_of(torch: ModuleType, *, only_used: bool = True) -> Iterator[tuple[str, Device]]:
    """Yields the accelerator devices by name.

    Args:
        torch: The library.
        only_used: Leave out kinds that the process has not used yet: reading their state would set
            them up, and a process that did can't fork workers that use them.
    """
    for kind in ("cuda", "xpu", "npu", "hpu", "mps"):
        module = getattr(torch, kind, None)
        if module is None or not getattr(module, "is_available", bool)():
            continue
        if only_used and not getattr(module, "is_initialized", lambda: True)():
            continue
        if kind == "mps":
            yield kind, Device(module, None)
            continue
        for index in range(module.device_count()):
            yield f"{kind}:{index}", Device(module, index)


def plan_devices(torch: Any, saved: Any, steps: list[Restore], skipped: list[str]) -> None:
    """Plans the restore of the accelerators.

    Args:
        torch: The library, `None` where it is not installed.
        saved: Saved states by device.
        steps: Gets what sets them.
        skipped: Gets a line for each that can't be set, or is not in the snapshot.

    Raises:
        CorruptionError: One is no state.
    """
    if not isinstance(saved, Mapping):
        refuse("devices", "states by device", saved)
    if torch is None:
        skipped.extend(f"{name}: torch is not installed" for name in saved)
        return
    present = dict(devices_of(torch, only_used=False)) if saved else {}
    for name, state in saved.items():
        if name not in present:
            skipped.append(f"{name}: no such device here")
            continue
        _check_bytes(torch, name, state)
        length_bytes = present[name].get_state().numel()
        if state.numel() != length_bytes:
            refuse(name, f"{length_bytes} bytes", state.numel())
        steps.append(functools.partial(present[name].set_state, state))
    skipped.extend(
        f"{name}: the snapshot has no state of it" for name, _ in devices_of(torch) if name not in saved
    )


def _check_bytes(torch: Any, what: str, state: Any) -> None:
    is_tensor = isinstance(state, torch.Tensor)
    if not is_tensor or state.dtype is not torch.uint8 or state.dim() != 1 or state.device.type != "cpu":
        refuse(what, "a CPU tensor of bytes", type(state))


def plan_torch(what: str, generator: Any, state: Any) -> Restore:
    """Checks a saved state, and returns what sets the generator to it.

    Raises:
        CorruptionError: It is none.
    """
    import torch

    _check_bytes(torch, what, state)
    try:
        torch.Generator(device=generator.device).set_state(state)
    except (RuntimeError, TypeError) as error:
        refuse(what, f"a state of a generator on `{generator.device}` ({error})", tuple(state.shape))
    state = state.clone()

    def put() -> None:
        generator.set_state(state)
        if generator.device.type == "cpu":
            _restored[what] = (generator, state)

    return put


def forget_restored(what: str | None = None) -> None:
    """Forgets what the last restore gave a generator, or all of them: there is nothing to take back."""
    if what is None:
        _restored.clear()
    else:
        _restored.pop(what, None)


def take_back_draw(value: int) -> bool:
    """Takes back the draw of an int64 of torch, if it was the first and only one since the last restore.

    An iterator over a data loader begins with such a draw. One that goes on in the middle of an epoch
    makes it anew, where the run that never stopped made none.

    Args:
        value: What was drawn: it tells which generator was.

    Returns:
        Whether a generator was set back to what the last `restore` gave it.
    """
    torch = loaded("torch")
    for generator, state in _restored.values():
        trial = torch.Generator()  # type: ignore[union-attr]
        trial.set_state(state)
        drawn = torch.empty((), dtype=torch.int64).random_(generator=trial).item()  # type: ignore[union-attr]
        if drawn == value and torch.equal(generator.get_state(), trial.get_state()):  # type: ignore[union-attr]
            generator.set_state(state)
            return True
    return False
