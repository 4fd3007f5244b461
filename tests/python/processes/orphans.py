"""Opens a repository, leaves a forked child that lives on, and waits to be killed."""

import os
import sys

from varvite import CheckpointManager

folder, pipe = sys.argv[1:]
manager = CheckpointManager(folder)
manager.save_sync(1, {"v": 1})
child = os.fork()
if child == 0:
    # A data-loader worker holds what its parent had open, until somebody writes to the pipe.
    with open(pipe, "rb") as file:
        file.read()
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
