"""Ends while a save runs, or after one that failed and that nobody, or somebody, has heard of."""

import os
import sys

import numpy as np

from varvite import CheckpointManager
from varvite.errors import StoreError

folder, how = sys.argv[1:]
manager = CheckpointManager(folder)
if how == "running":
    manager.save(1, {"w": np.ones(3_000_000)})
    sys.exit()

os.rename(f"{folder}/packs", f"{folder}/hidden")
manager.save(1, {"w": np.ones(3)})
manager._background.wait()
os.rename(f"{folder}/hidden", f"{folder}/packs")
if how == "heard":
    try:
        manager.flush()
    except StoreError:
        sys.exit()
print("training is over")
if how == "dropped":
    del manager
if how == "raised":
    raise RuntimeError("of the training itself")
