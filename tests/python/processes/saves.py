"""Saves step after step for ever, and writes each step that is durable to a file outside of the repository.

Arguments: the repository, the file, `wait` or `sync`, and how many snapshots to keep (0 for all).
"""

import os
import sys

from states import state_of

from varvite import CheckpointManager, keep

folder, acknowledged, how, kept = sys.argv[1:]
policy = keep.last(int(kept)) if int(kept) else None
log = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
with CheckpointManager(folder, keep=policy, threads=2, chunk_bytes=16_384) as manager:
    newest = manager.load_latest()
    step = 0 if newest is None else newest.step + 1
    print("running", flush=True)
    while True:
        if how == "sync":
            manager.save_sync(step, state_of(step))
        else:
            manager.save(step, state_of(step)).wait()
        os.write(log, f"{step}\n".encode())
        step += 1
