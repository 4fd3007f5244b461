"""Saves and loads a state of plain values, and prints it with the heavy libraries that this needed."""

import sys

from varvite import CheckpointManager

with CheckpointManager(sys.argv[1]) as manager:
    manager.save_sync(1, {"epoch": 3, "seen": [1, 2]})
    loaded = dict(manager.load())
print(loaded, sorted({"torch", "numpy"} & set(sys.modules)))
