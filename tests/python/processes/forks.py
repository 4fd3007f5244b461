"""Forks while a save runs. The child tries everything; the parent goes on as if nothing had happened."""

import os
import subprocess
import sys

import numpy as np

from varvite import CheckpointManager
from varvite.errors import InvalidInputError

folder, other = sys.argv[1:]
opens = [sys.executable, os.path.join(os.path.dirname(__file__), "opens.py")]


def who_can_open() -> str:
    return (
        subprocess.run([*opens, folder], capture_output=True, text=True, check=True)
        .stdout.split(" ")[0]
        .strip()
    )


manager = CheckpointManager(folder)
handle = manager.save(1, {"w": np.ones(5_000_000)})
sys.stdout.flush()
child = os.fork()
if child == 0:
    for name, call in {
        "save": lambda: manager.save(2, {"v": 2}),
        "load": manager.load,
        "flush": manager.flush,
        "snapshots": manager.snapshots,
    }.items():
        try:
            call()
        except InvalidInputError as error:
            print("child", name, "refused:", "and this is a fork of it" in str(error))
    manager.close()
    with CheckpointManager(other) as mine:
        print("child saves elsewhere", mine.save_sync(7, {"v": 7}).step)
    sys.exit()  # an ordinary end, with all exit functions

_, status = os.waitpid(child, 0)
print("child ended", os.waitstatus_to_exitcode(status), flush=True)
print("others find it", who_can_open(), flush=True)
print("parent committed", handle.wait().step)
print("parent saves on", manager.save_sync(2, {"v": 2}).step)
manager.close()
print("others find it", who_can_open())
