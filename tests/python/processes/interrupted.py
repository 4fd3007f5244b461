"""Saves so much that Ctrl-C arrives in the middle, in `save_sync` or in `wait`, and goes on after it."""

import sys

import numpy as np

from varvite import CheckpointManager

folder, how = sys.argv[1:]
# Noise: equal chunks would be written once, and the save be over in no time.
state = {"w": np.frombuffer(np.random.default_rng(0).bytes(400_000_000), np.uint8)}
with CheckpointManager(folder) as manager:
    manager.save_sync(1, {"v": 1})
    try:
        if how == "sync":
            print("saving", flush=True)
            manager.save_sync(2, state)
        else:
            handle = manager.save(2, state)
            print("saving", flush=True)
            handle.wait() if how == "wait" else manager.flush()
        print("not interrupted")
    except KeyboardInterrupt:
        print("interrupted")
    if how == "sync":
        print("saved", manager.save_sync(3, {"v": 3}).seq > 1)
    else:
        print("saved", handle.wait().step)
    print("snapshots", [info.step for info in manager.snapshots()])
