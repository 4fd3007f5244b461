"""Saves under a limit on the size of files, in the background and not, then raises the limit."""

import os
import resource
import sys

import numpy as np

from varvite import CheckpointManager
from varvite.errors import StoreError

folder = sys.argv[1]


def used_bytes() -> int:
    return sum(
        os.stat(os.path.join(path, name)).st_size for path, _, names in os.walk(folder) for name in names
    )


with CheckpointManager(folder) as manager:
    manager.save_sync(1, {"w": np.ones(1000)})
    before = used_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    for how in ("sync", "background"):
        try:
            if how == "sync":
                manager.save_sync(2, {"w": np.ones(1_000_000)})
            else:
                manager.save(2, {"w": np.ones(1_000_000)})
                manager.flush()
        except StoreError as error:
            print(how, error.errno, error.hint)
        print("left over", used_bytes() - before)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print("old one", float(manager.load(1)["w"].sum()))
    print("saved", manager.save_sync(3, {"w": np.ones(1_000_000)}).step)
    print("verified", manager.verify().ok)
