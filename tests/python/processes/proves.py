"""Proves a run whose fresh process says which one it is, and then waits for ever.

Usage: proves.py FOLDER
"""

from __future__ import annotations

import sys
import threading

from processes import jobs

from varvite.training import prove_resume


def waiting_loss(module, batch):
    print("running", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    prove_resume(jobs.job(sys.argv[1], loss=waiting_loss))
