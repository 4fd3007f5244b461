"""Warnings that point at the line of the program that called, however deep in Varvite they are given."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

__all__ = ["warn"]

_HERE = str(Path(__file__).parent)
_BETWEEN = ("contextlib",)
"""Modules of the standard library that may stand between the caller and Varvite."""


def warn(message: str) -> None:
    """Gives a `RuntimeWarning` at the innermost line outside of Varvite.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("snapshot 3 can't be used")
        >>> str(caught[0].message)
        "snapshot 3 can't be used"
    """
    level = 2
    frame = sys._getframe(1)  # noqa: SLF001 - the documented way to look at callers without reading sources
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename, frame.f_globals.get("__name__")):
        frame = frame.f_back
        level += 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_inside(filename: str, module: str | None) -> bool:
    return filename.startswith(_HERE) or module in _BETWEEN
