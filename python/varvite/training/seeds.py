"""Seeds made of several numbers by a hash, so that no two combinations share one.

A sum would: seed 0 in epoch 1 must not be seed 1 in epoch 0.
"""

from __future__ import annotations

import functools
import hashlib

__all__ = ["hashed"]


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
