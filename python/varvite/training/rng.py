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
import functools
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from varvite.errors import InvalidInputError
from varvite.plain import corrupt, loaded
from varvite.training.checks import check_count, is_count
from varvite.training.seeds import hashed

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["capture", "derive", "register", "restore", "take_back_draw", "unmoved", "unregister"]

_WORD_COUNT = 624
"""Words of the Mersenne Twister."""

_registered: dict[str, Any] = {}
_restored: dict[str, tuple[Any, Any]] = {}
"""CPU generators of torch that the last restore set, each with the state that it was given."""

Restore = Callable[[], None]


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
    _restored.pop(f"generators.{name}", None)


def unregister(name: str) -> None:
    """Leaves a generator out of every later capture and restore.

    Raises:
        InvalidInputError: No generator has this name.
    """
    if name not in _registered:
        reason = f"registered are {', '.join(_registered) or 'none'}"
        raise InvalidInputError(f"unknown generator `{name}`: {reason}", what="name", reason=reason)
    del _registered[name]
    _restored.pop(f"generators.{name}", None)


def capture() -> dict[str, Any]:
    """Returns the state of all generators as a nest of plain data, tensors and arrays.

    No number is drawn. An accelerator that the process has not used yet is left alone.

    Returns:
        `python`, and where they are in use `numpy`, `torch`, `devices` (by device, such as `cuda:0`) and
        `generators` (by registered name).
    """
    nest: dict[str, Any] = {"python": _capture_python(_global_python())}
    numpy_random = loaded("numpy.random")
    if numpy_random is not None:
        nest["numpy"] = numpy_random.get_state(legacy=False)
    torch = loaded("torch")
    if torch is not None:
        nest["torch"] = torch.get_rng_state()
        devices = {name: device.get_state() for name, device in _devices(torch)}
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
        _refuse("rng", f"entries among {', '.join(sorted(known))}", nest)
    steps: list[Restore] = []
    skipped: list[str] = []
    if "python" in nest:
        steps.append(_plan_python("python", _global_python(), nest["python"]))
    if "numpy" in nest:
        _plan_numpy_global(nest["numpy"], steps, skipped)
    torch = _library("torch") if {"torch", "devices"} & nest.keys() else None
    if "torch" in nest:
        if torch is None:
            skipped.append("torch: the library is not installed")
        else:
            steps.append(_plan_torch("torch", torch.default_generator, nest["torch"]))
    _plan_devices(torch, nest.get("devices", {}), steps, skipped)
    _plan_generators(nest.get("generators", {}), steps, skipped)
    _restored.clear()
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
    _global_python().seed(number("python"))
    # NumPy imports this part of itself on first use, and would then seed it from the machine's entropy.
    numpy_random = None if loaded("numpy") is None else _library("numpy.random")
    torch = loaded("torch")
    if numpy_random is not None:
        names.append("numpy")
        kind = numpy_random.get_state(legacy=False)["bit_generator"]
        fresh = getattr(numpy_random, kind)(number("numpy")).state
        numpy_random.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})
    if torch is not None:
        names.append("torch")
        torch.default_generator.manual_seed(number("torch"))
        for name, device in _devices(torch):
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


def _refuse(what: str, expected: str, found: object) -> NoReturn:
    raise corrupt(f"rng state of {what}", expected, found)


def _library(name: str) -> ModuleType | None:
    """Imports a library that the saved run had in use, if it is installed here."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        return None


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
    return {"python": _capture_python(generator)}


# Python


def _global_python() -> random.Random:
    """Returns the generator behind the functions of `random`."""
    generator: random.Random = random.seed.__self__  # type: ignore[attr-defined,unused-ignore]
    return generator


def _capture_python(generator: random.Random) -> dict[str, Any]:
    version, words, gauss = generator.getstate()
    return {"version": version, "words": struct.pack(f"<{len(words)}I", *words), "gauss": gauss}


def _plan_python(what: str, generator: random.Random, saved: Any) -> Restore:
    if not isinstance(saved, Mapping) or saved.keys() != {"version", "words", "gauss"}:
        _refuse(what, "`version`, `words` and `gauss`", saved)
    words, gauss = saved["words"], saved["gauss"]
    if type(words) is not bytes or len(words) != 4 * (_WORD_COUNT + 1):
        _refuse(what, f"{_WORD_COUNT + 1} words of 4 bytes", words)
    if gauss is not None and type(gauss) is not float:
        _refuse(what, "a float or `None`", gauss)
    state = (saved["version"], struct.unpack(f"<{_WORD_COUNT + 1}I", words), gauss)
    try:
        random.Random().setstate(state)  # noqa: S311 - checks the state, draws nothing
    except (ValueError, TypeError) as error:
        _refuse(what, f"a state of `random.Random` ({error})", saved["version"])
    return lambda: generator.setstate(state)


# NumPy


def _plan_numpy_global(saved: Any, steps: list[Restore], skipped: list[str]) -> None:
    numpy_random = _library("numpy.random")
    if numpy_random is None:
        skipped.append("numpy: the library is not installed")
        return
    name = _bit_generator(saved)
    live = numpy_random.get_state(legacy=False)["bit_generator"]
    if name != live and name in _NUMPY_CHECKS:
        skipped.append(f"numpy: the global generator is `{live}`, and the saved one is `{name}`")
        return
    if not isinstance(saved, Mapping) or not {"has_gauss", "gauss"} <= saved.keys():
        _refuse("numpy", "a state of the global generator", saved)
    if saved["has_gauss"] not in (0, 1) or type(saved["gauss"]) is not float:
        _refuse("numpy", "`has_gauss` of 0 or 1 and `gauss`", saved["has_gauss"])
    core = {key: value for key, value in saved.items() if key not in ("has_gauss", "gauss")}
    _check_numpy("numpy", core, numpy_random)
    steps.append(lambda: numpy_random.set_state(dict(saved)))


def _bit_generator(saved: Any) -> str:
    """Returns the name of the algorithm of a state, or an empty one where it has none."""
    name = saved.get("bit_generator") if isinstance(saved, Mapping) else None
    return name if isinstance(name, str) else ""


def _check_numpy(what: str, saved: Any, numpy_random: ModuleType) -> None:
    """Checks the state of a bit generator: NumPy's own setters read out of bounds for some."""
    check = _NUMPY_CHECKS.get(_bit_generator(saved))
    if check is None or not isinstance(saved.get("state"), Mapping):
        _refuse(what, f"a state of one of {', '.join(_NUMPY_CHECKS)}", saved)
    if not check(saved):
        _refuse(what, f"a state of `{saved['bit_generator']}`", saved)
    trial = getattr(numpy_random, saved["bit_generator"])(0)
    try:
        trial.state = dict(saved)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        _refuse(what, f"a state of `{saved['bit_generator']}` ({error})", saved)


def _is_words(value: Any, count: int, dtype: str) -> bool:
    return getattr(value, "shape", None) == (count,) and str(value.dtype) == dtype


def _has_spare(saved: Mapping[str, Any]) -> bool:
    return is_count(saved.get("has_uint32"), limit=2) and is_count(saved.get("uinteger"), limit=1 << 32)


def _is_twister(saved: Mapping[str, Any]) -> bool:
    state = saved["state"]
    return _is_words(state.get("key"), _WORD_COUNT, "uint32") and is_count(
        state.get("pos"), limit=_WORD_COUNT + 1
    )


def _is_pcg(saved: Mapping[str, Any]) -> bool:
    state = saved["state"]
    return _has_spare(saved) and all(is_count(state.get(key), limit=1 << 128) for key in ("state", "inc"))


def _is_philox(saved: Mapping[str, Any]) -> bool:
    state = saved["state"]
    return (
        _has_spare(saved)
        and _is_words(state.get("counter"), 4, "uint64")
        and _is_words(state.get("key"), 2, "uint64")
        and _is_words(saved.get("buffer"), 4, "uint64")
        and is_count(saved.get("buffer_pos"), limit=5)
    )


def _is_sfc(saved: Mapping[str, Any]) -> bool:
    return _has_spare(saved) and _is_words(saved["state"].get("state"), 4, "uint64")


_NUMPY_CHECKS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "MT19937": _is_twister,
    "PCG64": _is_pcg,
    "PCG64DXSM": _is_pcg,
    "Philox": _is_philox,
    "SFC64": _is_sfc,
}


# torch


class _Device:
    """The default generator of one accelerator device."""

    def __init__(self, module: Any, index: int | None) -> None:
        self._module = module
        self._arguments = () if index is None else (index,)

    def get_state(self) -> Any:
        return self._module.get_rng_state(*self._arguments)

    def set_state(self, state: Any) -> None:
        self._module.set_rng_state(state, *self._arguments)


def _devices(torch: ModuleType, *, only_used: bool = True) -> Iterator[tuple[str, _Device]]:
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
            yield kind, _Device(module, None)
            continue
        for index in range(module.device_count()):
            yield f"{kind}:{index}", _Device(module, index)


def _plan_devices(torch: Any, saved: Any, steps: list[Restore], skipped: list[str]) -> None:
    if not isinstance(saved, Mapping):
        _refuse("devices", "states by device", saved)
    if torch is None:
        skipped.extend(f"{name}: torch is not installed" for name in saved)
        return
    present = dict(_devices(torch, only_used=False)) if saved else {}
    for name, state in saved.items():
        if name not in present:
            skipped.append(f"{name}: no such device here")
            continue
        _check_bytes(torch, name, state)
        length_bytes = present[name].get_state().numel()
        if state.numel() != length_bytes:
            _refuse(name, f"{length_bytes} bytes", state.numel())
        steps.append(functools.partial(present[name].set_state, state))
    skipped.extend(
        f"{name}: the snapshot has no state of it" for name, _ in _devices(torch) if name not in saved
    )


def _check_bytes(torch: Any, what: str, state: Any) -> None:
    is_tensor = isinstance(state, torch.Tensor)
    if not is_tensor or state.dtype is not torch.uint8 or state.dim() != 1 or state.device.type != "cpu":
        _refuse(what, "a CPU tensor of bytes", type(state))


def _plan_torch(what: str, generator: Any, state: Any) -> Restore:
    import torch

    _check_bytes(torch, what, state)
    try:
        torch.Generator(device=generator.device).set_state(state)
    except (RuntimeError, TypeError) as error:
        _refuse(what, f"a state of a generator on `{generator.device}` ({error})", tuple(state.shape))
    state = state.clone()

    def put() -> None:
        generator.set_state(state)
        if generator.device.type == "cpu":
            _restored[what] = (generator, state)

    return put


# Registered generators


def _plan_generators(saved: Any, steps: list[Restore], skipped: list[str]) -> None:
    if not isinstance(saved, Mapping) or not all(isinstance(one, Mapping) for one in saved.values()):
        _refuse("generators", "states by registered name", saved)
    for name, state in saved.items():
        generator = _registered.get(name)
        kind = _kind(generator)
        if len(state) != 1 or not {"torch", "numpy", "python"}.issuperset(state):
            _refuse(f"generators.{name}", "one state", state)
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
        steps.append(_plan_torch(what, generator, state))
    elif kind == "python":
        steps.append(_plan_python(what, generator, state))
    else:
        import numpy.random

        _check_numpy(what, state, numpy.random)
        live = generator.bit_generator.state["bit_generator"]
        if live != state["bit_generator"]:
            skipped.append(f"generator `{name}`: here it is a `{live}`, and was a `{state['bit_generator']}`")
        else:
            steps.append(lambda: setattr(generator.bit_generator, "state", dict(state)))
