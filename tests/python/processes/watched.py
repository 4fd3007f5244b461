"""Waits for ever, with a hard timer that is cancelled and one that is not."""

import threading

from varvite.training.watchdog import Watchdog

cancelled = Watchdog(0.1, 77, "cancelled, and ended the process")
cancelled.cancel()
cancelled.cancel()
Watchdog(0.3, 5, "the second timer ended it")
print("waiting", flush=True)
threading.Event().wait()
