"""State of the random number generators of a process: captured and restored, without a draw.

Covered are Python's `random`, NumPy's global generator, torch on the CPU and on every accelerator in
use, and generators that the program registers by name. Of the libraries, those that the program has
imported; nothing else is imported by a capture. The state is plain data, tensors and arrays.

It belongs to one rank. Restore it last: building a model or an iterator over a loader draws numbers.

Example:
    >>> import random
    >>> from varvite.training import rng
    >>> saved = rng.capture()
    >>> first = random.random()
    >>> skipped = rng.restore(saved)
    >>> random.random() == first
    True
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from varvite.errors import InvalidInputError
from varvite.plain import loaded
from varvite.training.checks import check_count
from varvite.training.generators.of_numpy import (
    check_numpy,
    numpy_in_use,
    plan_numpy_global,
    seed_numpy_global,
)
from varvite.training.generators.of_python import capture_python, global_python, plan_python
from varvite.training.generators.of_torch import (
    devices_of,
    forget_restored,
    plan_devices,
    plan_torch,
    take_back_draw,
)
from varvite.training.generators.states import Restore, installed, refuse
from varvite.training.seeds import hashed

__all__ = ["capture", "derive", "register", "restore", "take_back_draw", "unmoved", "unregister"]

_registered: dict[str, Any] = {}


def register(name: str, generator: Any) -> None:
    """Includes a generator in every later capture and restore.

    Args:
        name: Its name in snapshots. Registering a name again replaces the generator.
        generator: A `torch.Generator`, a `numpy.random.Generator` or a `random.Random`.

    Raises:
        InvalidInputError: It is none of these, or the name is empty.

    Example:
        >>> import random
        >>> register("augmentation", random.Random(7))
        >>> sorted(capture()["generators"])
        ['augmentation']
        >>> unregister("augmentation")
    """
    if not isinstance(name, str) or not name:
        reason = "must be a text that is not empty"
        raise InvalidInputError(f"invalid generator name `{name!r}`: {reason}", what="name", reason=reason)
    if _kind(generator) is None:
        reason = "must be a `torch.Generator`, a `numpy.random.Generator` or a `random.Random`"
        message = f"invalid generator `{name}` of type `{type(generator).__qualname__}`: {reason}"
        raise InvalidInputError(message, what="generator", reason=reason)
    _registered[name] = generator
    forget_restored(f"generators.{name}")


def unregister(name: str) -> None:
    """Leaves a generator out of every later capture and restore.

    Raises:
        InvalidInputError: No generator has this name.
    """
    if name not in _registered:
        reason = f"registered are {', '.join(_registered) or 'none'}"
        raise InvalidInputError(f"unknown generator `{name}`: {reason}", what="name", reason=reason)
    del _registered[name]
    forget_restored(f"generators.{name}")


def capture() -> dict[str, Any]:
    """Returns the state of all generators as a nest of plain data, tensors and arrays.

    No number is drawn. An accelerator that the process has not used yet is left alone.

    Returns:
        `python`, and where they are in use `numpy`, `torch`, `devices` (by device, such as `cuda:0`) and
        `generators` (by registered name).
    """
    nest: dict[str, Any] = {"python": capture_python(global_python())}
    numpy_random = loaded("numpy.random")
    if numpy_random is not None:
        nest["numpy"] = numpy_random.get_state(legacy=False)
    torch = loaded("torch")
    if torch is not None:
        nest["torch"] = torch.get_rng_state()
        devices = {name: device.get_state() for name, device in devices_of(torch)}
        if devices:
            nest["devices"] = devices
    if _registered:
        nest["generators"] = {name: _capture_generator(one) for name, one in _registered.items()}
    return nest


def restore(nest: Mapping[str, Any]) -> list[str]:
    """Restores what `capture` returned. Everything is checked before anything is changed.

    Args:
        nest: The captured state.

    Returns:
        A line for each generator that was not restored, and why; empty if all were.

    Raises:
        CorruptionError: An entry is not a state of its generator; nothing was changed.
    """
    known = {"python", "numpy", "torch", "devices", "generators"}
    if not isinstance(nest, Mapping) or not known.issuperset(nest):
        refuse("rng", f"entries among {', '.join(sorted(known))}", nest)
    steps: list[Restore] = []
    skipped: list[str] = []
    if "python" in nest:
        steps.append(plan_python("python", global_python(), nest["python"]))
    if "numpy" in nest:
        plan_numpy_global(nest["numpy"], steps, skipped)
    torch = installed("torch") if {"torch", "devices"} & nest.keys() else None
    if "torch" in nest:
        if torch is None:
            skipped.append("torch: the library is not installed")
        else:
            steps.append(plan_torch("torch", torch.default_generator, nest["torch"]))
    plan_devices(torch, nest.get("devices", {}), steps, skipped)
    _plan_generators(nest.get("generators", {}), steps, skipped)
    forget_restored()
    for step in steps:
        step()
    return skipped


def derive(seed: int, rank: int, step: int) -> list[str]:
    """Seeds every generator in use, for a rank of which a snapshot has no state.

    A run that goes on with more ranks has no state for the new ones. Each gets streams of its own: the
    seeds are hashes of the three numbers and the generator's name.

    Args:
        seed: The run's seed, from 0 below 2**64.
        rank: Rank of this process.
        step: The step that the run goes on from.

    Returns:
        The names of the generators, as in `capture`; those registered as `generators.NAME`.

    Raises:
        InvalidInputError: A number is none, or out of its range.

    Example:
        >>> import random
        >>> before = random.getstate()
        >>> names = derive(0, rank=1, step=100)
        >>> first = random.random()
        >>> names = derive(0, rank=1, step=100)
        >>> (names[0], random.random() == first)
        ('python', True)
        >>> random.setstate(before)
    """
    check_count("seed", seed, limit=1 << 64)
    check_count("rank", rank)
    check_count("step", step)

    def number(name: str) -> int:
        return int.from_bytes(hashed(f"varvite.rng.{name}", seed, rank, step), "little")

    names = ["python"]
    global_python().seed(number("python"))
    numpy_random, torch = numpy_in_use(), loaded("torch")
    if numpy_random is not None:
        names.append("numpy")
        seed_numpy_global(numpy_random, number("numpy"))
    if torch is not None:
        names.append("torch")
        torch.default_generator.manual_seed(number("torch"))
        for name, device in devices_of(torch):
            names.append(name)
            device.set_state(torch.Generator(device=name).manual_seed(number(name)).get_state())
    for name, generator in _registered.items():
        names.append(f"generators.{name}")
        _seed_generator(generator, number(names[-1]))
    return names


def _seed_generator(generator: Any, number: int) -> None:
    kind = _kind(generator)
    if kind == "torch":
        generator.manual_seed(number)
    elif kind == "numpy":
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    else:
        generator.seed(number)


@contextlib.contextmanager
def unmoved() -> Iterator[None]:
    """Gives every generator back the state it had, so that what is drawn inside leaves no trace.

    For what a resumed run has to build again and the run before had built before it trained: a data
    loader, a model that is filled from the snapshot.

    Example:
        >>> import random
        >>> before = random.getstate()
        >>> with unmoved():
        ...     number = random.random()
        >>> random.getstate() == before
        True
    """
    before = capture()
    try:
        yield
    finally:
        restore(before)


def _kind(generator: Any) -> str | None:
    """Returns which library a generator is of."""
    torch, numpy_random = loaded("torch"), loaded("numpy.random")
    if torch is not None and isinstance(generator, torch.Generator):
        return "torch"
    if numpy_random is not None and isinstance(generator, numpy_random.Generator):
        return "numpy"
    # A subclass may draw from elsewhere, as `random.SystemRandom` does.
    return "python" if type(generator) is random.Random else None


def _capture_generator(generator: Any) -> dict[str, Any]:
    kind = _kind(generator)
    if kind == "torch":
        return {"torch": generator.get_state()}
    if kind == "numpy":
        return {"numpy": generator.bit_generator.state}
    return {"python": capture_python(generator)}


def _plan_generators(saved: Any, steps: list[Restore], skipped: list[str]) -> None:
    if not isinstance(saved, Mapping) or not all(isinstance(one, Mapping) for one in saved.values()):
        refuse("generators", "states by registered name", saved)
    for name, state in saved.items():
        generator = _registered.get(name)
        kind = _kind(generator)
        if len(state) != 1 or not {"torch", "numpy", "python"}.issuperset(state):
            refuse(f"generators.{name}", "one state", state)
        if kind is None:
            skipped.append(f"generator `{name}`: not registered here")
        elif kind not in state:
            skipped.append(
                f"generator `{name}`: here it is one of {kind}, and was saved as one of {next(iter(state))}"
            )
        else:
            _plan_generator(name, kind, generator, state[kind], steps, skipped)
    skipped.extend(
        f"generator `{name}`: the snapshot has no state of it" for name in _registered if name not in saved
    )


def _plan_generator(
    name: str, kind: str, generator: Any, state: Any, steps: list[Restore], skipped: list[str]
) -> None:
    what = f"generators.{name}"
    if kind == "torch":
        steps.append(plan_torch(what, generator, state))
    elif kind == "python":
        steps.append(plan_python(what, generator, state))
    else:
        import numpy.random

        check_numpy(what, state, numpy.random)
        live = generator.bit_generator.state["bit_generator"]
        if live != state["bit_generator"]:
            skipped.append(f"generator `{name}`: here it is a `{live}`, and was a `{state['bit_generator']}`")
        else:
            steps.append(lambda: setattr(generator.bit_generator, "state", dict(state)))
