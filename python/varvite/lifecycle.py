"""The end of the process, and the birth of another one by fork.

At interpreter exit every open manager is flushed; a save that failed and that nobody heard of is
printed, and the process ends with status 1, so that a scheduler hears of it too. A forked child lets go
of the lock's file, so that a data-loader worker that outlives its parent does not keep it locked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
import weakref
from typing import Protocol

__all__ = ["Closable", "close_unheard", "track"]


class Closable(Protocol):
    """What is closed at exit and abandoned in a forked child."""

    def close(self) -> None:
        """Waits for saves, raises what failed, releases the lock."""

    def _abandon(self) -> None:
        """Forgets everything without touching the repository."""


_unheard_count = 0
_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_registered_in: int | None = None


def track(manager: Closable) -> None:
    """Closes a manager at exit, unless it was closed or collected before."""
    global _registered_in  # noqa: PLW0603 - the interpreter has one list of exit functions
    if _registered_in is None:
        atexit.register(_close_all)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_abandon_all)
    _registered_in = os.getpid()
    _open.add(manager)


def close_unheard(manager: Closable) -> None:
    """Closes a manager where nobody can catch what that raises: it is printed, and sets the exit status."""
    global _unheard_count  # noqa: PLW0603 - the process has one exit status
    try:
        manager.close()
    except BaseException:  # noqa: BLE001 - the last place where anybody can hear of it
        _unheard_count += 1
        sys.stderr.write("varvite: a save failed and was not waited for:\n")
        traceback.print_exc()


def _close_all() -> None:
    if os.getpid() != _registered_in:
        return
    for manager in list(_open):
        close_unheard(manager)
    if _unheard_count:
        logging = sys.modules.get("logging")
        if logging is not None:
            logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        # An exception in an exit function does not change the exit status, and this must.
        os._exit(1)


def _abandon_all() -> None:
    global _unheard_count  # noqa: PLW0603 - what the parent has not heard is the parent's
    _unheard_count = 0
    for manager in list(_open):
        manager._abandon()  # noqa: SLF001 - the other half of this module's protocol
    _open.clear()
