"""Prints statistics that hold text the console can't show, to it and to one that is closed."""

import os
import sys

import numpy as np

from varvite import CheckpointManager
from varvite.errors import StoreError

folder = os.fsdecode(sys.argv[1])
manager = CheckpointManager(folder)
manager.save_sync(1, {"w": np.ones(10_000, np.float32)}, rng=False)
os.rename(f"{folder}/packs", f"{folder}/hidden")
manager.save(2, {"w": np.ones(3)})
try:
    manager.flush()
except StoreError as error:
    is_ascii = str(error).isascii()
os.rename(f"{folder}/hidden", f"{folder}/packs")
manager.print_stats()
print("the text is ascii:", is_ascii, flush=True)
with open(os.devnull, "w") as sys.stdout:
    pass
manager.print_stats()
sys.stdout = None
manager.print_stats()
manager.close()
