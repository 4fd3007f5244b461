"""A timer that ends the process unless it is cancelled."""

from __future__ import annotations

import _thread
import os

__all__ = ["Watchdog"]


class Watchdog:
    """Ends the process with an exit code when its time is over, whatever the other threads wait for.

    It starts when it is made, and may be made in a signal handler: it takes no lock that the interrupted
    code could hold. Its end of the process runs no exit functions and flushes nothing.

    Args:
        seconds: Time until the end, above 0.
        exit_code: Exit code of the process then.
        message: A line for stderr then.

    Example:
        >>> watchdog = Watchdog(60.0, 77, "the last save was not durable in time")
        >>> watchdog.cancel()
    """

    def __init__(self, seconds: float, exit_code: int, message: str) -> None:
        """Starts the timer."""
        self._exit_code = int(exit_code)
        self._message = message
        self._cancelled = _thread.allocate_lock()
        self._cancelled.acquire()
        # Not a `threading.Timer`: its start takes locks that the code a signal interrupted may hold.
        _thread.start_new_thread(self._run, (min(seconds, _thread.TIMEOUT_MAX),))

    def _run(self, seconds: float) -> None:
        if not self._cancelled.acquire(timeout=seconds):
            os.write(2, f"{self._message}\n".encode())
            os._exit(self._exit_code)

    def cancel(self) -> None:
        """Stops the timer; again, or too late, it does nothing."""
        if self._cancelled.locked():
            self._cancelled.release()
