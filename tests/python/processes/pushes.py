"""Lives of machines with a bucket: a process that forks one for each line, and says how each ended.

A line is JSON: the folder, the url, the options, the file for the process id, what to do (`push` what is
there, `train` on for ever, `load` what is in the bucket), the file for the steps that are known to be in the
bucket, and the point of the engine to be killed at with the number of its passage, if any.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lives import serve
from states import state_of

from varvite import CheckpointManager, _native


def live(case: dict[str, Any]) -> int:
    """Lives one life; returns its exit code."""
    Path(case["process"]).write_text(str(os.getpid()))
    if case.get("point"):
        _native.kill_at(case["point"], case["nth"])
    with CheckpointManager(
        case["folder"], remote=case["url"], remote_options=case["options"], sync_every=case["sync_every"]
    ) as manager:
        if case["what"] == "push":
            manager.sync_now()
        elif case["what"] == "load":
            manager.load()
        else:
            train(manager, case["log"])
    return 0


def train(manager: CheckpointManager, path: str) -> None:
    """Saves step after step, and notes each that is in the bucket for sure."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    newest = manager.load_latest()
    step = 0 if newest is None else newest.step + 1
    while True:
        manager.save_sync(step, state_of(step, 2_000), rng=False)
        if step % 3 == 2:
            manager.sync_now()
            os.write(log, f"{step}\n".encode())
        step += 1


if __name__ == "__main__":
    serve(live)
