"""Checks that several modules of this package make of arguments and of saved state."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from varvite.errors import InvalidInputError
from varvite.plain import corrupt

__all__ = ["check_choice", "check_count", "check_counts", "check_positive", "is_count"]


def is_count(value: object, *, least: int = 0, limit: int | None = None) -> bool:
    """Tells whether a value is a whole number from `least` below `limit`; a bool is none.

    Example:
        >>> is_count(3), is_count(True), is_count(3, limit=3)
        (True, False, False)
    """
    return type(value) is int and value >= least and (limit is None or value < limit)


def check_count(what: str, value: Any, *, least: int = 0, limit: int | None = None) -> int:
    """Returns the whole number that an argument must be.

    Args:
        what: Name of the argument.
        value: What was given; a bool is no number.
        least: Smallest legal number.
        limit: First number that is too large, or `None`.

    Raises:
        InvalidInputError: It is something else, or out of range.

    Example:
        >>> check_count("every", 0, least=1)
        Traceback (most recent call last):
            ...
        varvite.errors.InvalidInputError: invalid every `0`: must be a whole number from 1
    """
    if not is_count(value, least=least, limit=limit):
        raise _invalid(
            what, value, f"a whole number from {least}{'' if limit is None else f' below {limit}'}"
        )
    return int(value)


def check_positive(what: str, value: Any, *, or_zero: bool = False) -> float:
    """Returns the finite number above 0 that an argument must be, such as a time in seconds.

    Args:
        what: Name of the argument.
        value: What was given; a bool is no number.
        or_zero: Whether 0 is legal.

    Raises:
        InvalidInputError: It is something else, not finite, or out of range.

    Example:
        >>> check_positive("budget_seconds", 60)
        60.0
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max or (value == 0 and not or_zero):
        raise _invalid(what, value, f"a finite number, {'0 or more' if or_zero else 'above 0'}")
    return float(value)


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Refuses an argument that is none of some texts.

    Raises:
        InvalidInputError: Names the argument and lists what is legal.

    Example:
        >>> check_choice("policy", "hope", ("skip", "stop"))
        Traceback (most recent call last):
            ...
        varvite.errors.InvalidInputError: invalid policy `hope`: must be one of `skip`, `stop`
    """
    known = list(choices)
    if value not in known:
        raise _invalid(what, value, f"one of {', '.join(f'`{choice}`' for choice in known)}")


def check_counts(what: str, state: Any, least: Mapping[str, int]) -> None:
    """Refuses a saved state that is not a dict of certain whole numbers.

    Args:
        what: What has the state, for the message.
        state: What was saved.
        least: The keys of the state, and the smallest legal number of each.

    Raises:
        CorruptionError: It is something else.

    Example:
        >>> check_counts("guard", {"failures": 2}, {"failures": 0})
    """
    if not isinstance(state, Mapping) or set(state) != set(least):
        raise corrupt(what, f"the keys {', '.join(f'`{key}`' for key in least)}", state)
    for key, number in least.items():
        if not is_count(state[key], least=number):
            raise corrupt(f"{what}, `{key}`", f"a whole number from {number}", state[key])


def _invalid(what: str, value: object, legal: str) -> InvalidInputError:
    reason = f"must be {legal}"
    return InvalidInputError(f"invalid {what} `{value}`: {reason}", what=what, reason=reason)
