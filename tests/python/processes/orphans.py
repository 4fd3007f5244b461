"""Opens a repository, leaves a forked child that lives on, and waits to be killed."""

import os
import sys

from varvite import CheckpointManager

folder, pipe = sys.argv[1:]
manager = CheckpointManager(folder)
manager.save_sync(1, {"v": 1})
if os.fork() == 0:
    # By now it has let go of the lock's file; the parent can be back from the fork before that.
    print(os.getpid(), flush=True)
    # A data-loader worker holds what its parent had open, until somebody writes to the pipe.
    with open(pipe, "rb") as file:
        file.read()
    os._exit(0)
sys.stdin.read()
