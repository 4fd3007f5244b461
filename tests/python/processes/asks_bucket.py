"""Asks a bucket that stops answering, so that Ctrl-C arrives in the middle of a wait for it.

Arguments: a folder, the url of the bucket, its options as JSON, and what is asked: `open`, `list`, `load` or
`sync`. Says `ready`, and goes on when a line has come.
"""

import json
import signal
import sys

from varvite import CheckpointManager

folder, url, options, what = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)
kind = {"read_only": True} if what in ("list", "load") else {}
place = {"path": url, **kind} if kind else {"path": folder, "remote": url}


def opened() -> CheckpointManager:
    return CheckpointManager(**place, remote_options=json.loads(options))


manager = None if what == "open" else opened()
if what == "sync":
    manager.save_sync(1, {"v": 1})
    manager.sync_now()
    manager.save_sync(2, {"v": 2})
print("ready", flush=True)
sys.stdin.readline()
try:
    if what == "open":
        manager = opened()
    elif what == "list":
        manager.snapshots()
    elif what == "load":
        manager.load()
    else:
        manager.sync_now()
except KeyboardInterrupt:
    print("interrupted", flush=True)
