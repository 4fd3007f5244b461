"""Generators of NumPy: the global one, and the bit generators of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from varvite.plain import loaded
from varvite.training.checks import is_count
from varvite.training.generators.states import WORD_COUNT, Restore, installed, refuse

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["check_numpy", "numpy_in_use", "plan_numpy_global", "seed_numpy_global"]


def numpy_in_use() -> ModuleType | None:
    """Returns `numpy.random` where the program has imported NumPy, else `None`.

    NumPy imports this part of itself on first use, and would then seed it from the machine's entropy: who
    seeds it has to come before.
    """
    if loaded("numpy") is None:
        return None
    return loaded("numpy.random") or installed("numpy.random")


def plan_numpy_global(saved: Any, steps: list[Restore], skipped: list[str]) -> None:
    """Plans the restore of the global generator.

    Args:
        saved: Its saved state.
        steps: Gets what sets it.
        skipped: Gets a line where it can't be set.

    Raises:
        CorruptionError: It is no state.
    """
    numpy_random = installed("numpy.random")
    if numpy_random is None:
        skipped.append("numpy: the library is not installed")
        return
    name = _bit_generator(saved)
    live = numpy_random.get_state(legacy=False)["bit_generator"]
    if name != live and name in _NUMPY_CHECKS:
        skipped.append(f"numpy: the global generator is `{live}`, and the saved one is `{name}`")
        return
    if not isinstance(saved, Mapping) or not {"has_gauss", "gauss"} <= saved.keys():
        refuse("numpy", "a state of the global generator", saved)
    if saved["has_gauss"] not in (0, 1) or type(saved["gauss"]) is not float:
        refuse("numpy", "`has_gauss` of 0 or 1 and `gauss`", saved["has_gauss"])
    core = {key: value for key, value in saved.items() if key not in ("has_gauss", "gauss")}
    check_numpy("numpy", core, numpy_random)
    steps.append(lambda: numpy_random.set_state(dict(saved)))


def seed_numpy_global(numpy_random: ModuleType, number: int) -> None:
    """Seeds the global generator, whose algorithm stays."""
    kind = numpy_random.get_state(legacy=False)["bit_generator"]
    fresh = getattr(numpy_random, kind)(number).state
    # Half of a pair of normal numbers may be kept from before.
    numpy_random.set_state({**fresh, "has_gauss": 0, "gauss": 0.0})


def _bit_generator(saved: Any) -> str:
    """Returns the name of the algorithm of a state, or an empty one where it has none."""
    name = saved.get("bit_generator") if isinstance(saved, Mapping) else None
    return name if isinstance(name, str) else ""


def check_numpy(what: str, saved: Any, numpy_random: ModuleType) -> None:
    """Checks the state of a bit generator: NumPy's own setters read out of bounds for some.

    Raises:
        CorruptionError: It is none.
    """
    check = _NUMPY_CHECKS.get(_bit_generator(saved))
    if check is None or not isinstance(saved.get("state"), Mapping):
        refuse(what, f"a state of one of {', '.join(_NUMPY_CHECKS)}", saved)
    if not check(saved):
        refuse(what, f"a state of `{saved['bit_generator']}`", saved)
    trial = getattr(numpy_random, saved["bit_generator"])(0)
    try:
        trial.state = dict(saved)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        refuse(what, f"a state of `{saved['bit_generator']}` ({error})", saved)


def _is_words(value: Any, count: int, dtype: str) -> bool:
    return getattr(value, "shape", None) == (count,) and str(value.dtype) == dtype


def _has_spare(saved: Mapping[str, Any]) -> bool:
    return is_count(saved.get("has_uint32"), limit=2) and is_count(saved.get("uinteger"), limit=1 << 32)


def _is_twister(saved: Mapping[str, Any]) -> bool:
    state = saved["state"]
    return _is_words(state.get("key"), WORD_COUNT, "uint32") and is_count(
        state.get("pos"), limit=WORD_COUNT + 1
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
