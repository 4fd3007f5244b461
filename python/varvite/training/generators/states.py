"""What the states of all libraries have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from varvite.plain import corrupt

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["WORD_COUNT", "Restore", "installed", "refuse"]

WORD_COUNT = 624
"""Words of the Mersenne Twister."""

Restore = Callable[[], None]
"""Sets a generator to a state that was checked."""


def refuse(what: str, expected: str, found: object) -> NoReturn:
    """Raises the error for what is no state of a generator.

    Raises:
        CorruptionError: Always.
    """
    raise corrupt(f"rng state of {what}", expected, found)


def installed(name: str) -> ModuleType | None:
    """Imports a library that the saved run had in use, if it is installed here.

    Example:
        >>> installed("random").__name__
        'random'
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        return None
