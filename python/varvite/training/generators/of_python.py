"""Generators of Python's `random`."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

from varvite.training.generators.states import WORD_COUNT, Restore, refuse

__all__ = ["capture_python", "global_python", "plan_python"]


def global_python() -> random.Random:
    """Returns the generator behind the functions of `random`."""
    generator: random.Random = random.seed.__self__  # type: ignore[attr-defined,unused-ignore]
    return generator


def capture_python(generator: random.Random) -> dict[str, Any]:
    """Returns the state of a generator; nothing is drawn."""
    version, words, gauss = generator.getstate()
    return {"version": version, "words": struct.pack(f"<{len(words)}I", *words), "gauss": gauss}


def plan_python(what: str, generator: random.Random, saved: Any) -> Restore:
    """Checks a saved state, and returns what sets the generator to it.

    Raises:
        CorruptionError: It is none.
    """
    if not isinstance(saved, Mapping) or saved.keys() != {"version", "words", "gauss"}:
        refuse(what, "`version`, `words` and `gauss`", saved)
    words, gauss = saved["words"], saved["gauss"]
    if type(words) is not bytes or len(words) != 4 * (WORD_COUNT + 1):
        refuse(what, f"{WORD_COUNT + 1} words of 4 bytes", words)
    if gauss is not None and type(gauss) is not float:
        refuse(what, "a float or `None`", gauss)
    state = (saved["version"], struct.unpack(f"<{WORD_COUNT + 1}I", words), gauss)
    try:
        random.Random().setstate(state)  # noqa: S311 - checks the state, draws nothing
    except (ValueError, TypeError) as error:
        refuse(what, f"a state of `random.Random` ({error})", saved["version"])
    return lambda: generator.setstate(state)
