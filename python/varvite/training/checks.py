"""Checks of arguments that several modules of this package make."""

from __future__ import annotations

from varvite.errors import InvalidInputError

__all__ = ["check_count"]


def check_count(what: str, value: object, *, least: int) -> None:
    """Refuses what is no whole number from `least`; a bool is none.

    Raises:
        InvalidInputError: Names the argument and what is legal.

    Example:
        >>> check_count("every", 0, least=1)
        Traceback (most recent call last):
            ...
        varvite.errors.InvalidInputError: invalid every `0`: must be a whole number from 1
    """
    if type(value) is not int or value < least:
        reason = f"must be a whole number from {least}"
        raise InvalidInputError(f"invalid {what} `{value!r}`: {reason}", what=what, reason=reason)
