"""Patience with network file systems that show a new name to other machines late."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from varvite.errors import CheckpointError

__all__ = ["VISIBLE_SECONDS", "when_visible"]

VISIBLE_SECONDS = 20.0
"""How long what one rank has written or seen may stay unseen by another."""

_PAUSE_SECONDS = 0.05

Found = TypeVar("Found")


def when_visible(look: Callable[[], Found], seconds: float | None = None) -> Found:
    """Looks again and again for what is known to exist.

    Args:
        look: Returns what it finds; an error with `errno` `ENOENT` says that it is not there.
        seconds: How long to look; by default `VISIBLE_SECONDS`.

    Returns:
        What `look` returned.

    Raises:
        CheckpointError: What `look` raised last, or another error that it raised.

    Example:
        >>> when_visible(lambda: 7)
        7
    """
    until = time.monotonic() + (VISIBLE_SECONDS if seconds is None else seconds)
    while True:
        try:
            return look()
        except CheckpointError as error:
            if getattr(error, "errno", None) != errno.ENOENT or time.monotonic() >= until:
                raise
        time.sleep(_PAUSE_SECONDS)
