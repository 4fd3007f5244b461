"""Sizes as a caller writes them: whole numbers of bytes, and texts with a unit."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["parse_bytes"]

_BYTES_LIMIT: Final = 1 << 62
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgtp])(i?))?b?\s*", re.IGNORECASE)


def parse_bytes(size: object) -> int | None:
    """Returns a size in bytes, or `None` for what is no size of at least one byte.

    Args:
        size: A whole number, or a text: `200GB` is 200 * 10**9 bytes, `200GiB` is 200 * 2**30.

    Example:
        >>> parse_bytes("1.5GB"), parse_bytes("64 KiB"), parse_bytes("much")
        (1500000000, 65536, None)
    """
    length_bytes = size
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None:
            return None
        number, unit, binary = match.groups()
        factor = (1024 if binary else 1000) ** (" kmgtp".index(unit.lower()) if unit else 0)
        whole, _, fraction = number.partition(".")
        length_bytes = int(whole) * factor + int(fraction or 0) * factor // 10 ** len(fraction)
    if not isinstance(length_bytes, int) or isinstance(length_bytes, bool):
        return None
    return length_bytes if 1 <= length_bytes < _BYTES_LIMIT else None
