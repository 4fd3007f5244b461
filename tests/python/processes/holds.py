"""Opens a repository for writing, says so, and holds it until its input ends."""

import sys

from varvite import CheckpointManager

with CheckpointManager(sys.argv[1]) as manager:
    manager.save_sync(1, {"v": 1})
    print("holding", flush=True)
    sys.stdin.read()
