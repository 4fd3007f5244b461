"""Seeds made of several numbers by a hash, so that no two combinations share one.

A sum would: seed 0 in epoch 1 must not be seed 1 in epoch 0.
"""

from __future__ import annotations

import functools
import hashlib

from varvite.errors import InvalidInputError

__all__ = ["check_number", "hashed"]


def hashed(purpose: str, *numbers: int, length_bytes: int = 8) -> bytes:
    """Returns bytes that depend on a purpose and on every number and its place.

    The result is the same on every machine and in every version.

    Args:
        purpose: What the seed is for; other purposes give other bytes.
        *numbers: Integers from 0 below 2**64.
        length_bytes: How many bytes, up to 64.

    Example:
        >>> hashed("order", 0, 1) == hashed("order", 1, 0)
        False
        >>> hashed("order", 0, 1).hex()
        'c5dc8fc86b37b088'
    """
    encoded = b"".join(number.to_bytes(8, "little") for number in numbers)
    return hashlib.blake2b(encoded, digest_size=length_bytes, key=_key(purpose)).digest()


@functools.lru_cache(maxsize=64)
def _key(purpose: str) -> bytes:
    return hashlib.blake2b(purpose.encode()).digest()


def check_number(what: str, value: object, *, limit: int = 1 << 63, least: int = 0) -> int:
    """Returns a whole number that an argument must be.

    Args:
        what: Name of the argument.
        value: What was given; a bool is no number.
        limit: First number that is too large.
        least: Smallest legal number.

    Raises:
        InvalidInputError: It is something else, or out of range.

    Example:
        >>> check_number("epoch", 3)
        3
    """
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < limit:
        return value
    reason = f"must be a whole number from {least} below {limit}"
    raise InvalidInputError(f"invalid {what}: {reason}, not: {value!r}", what=what, reason=reason)
