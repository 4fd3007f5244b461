"""Trains until a signal stops it, saves at the end of that step, and ends with the code for a scheduler.

Arguments: the repository, and where the signal is to meet the run. It leads a process group of its own.
"""

import os
import sys
import threading

import numpy as np

from varvite import CheckpointManager
from varvite.training.autosave import Autosave
from varvite.training.boundary import Boundary
from varvite.training.stop import StopSignal

folder, where = sys.argv[1:]
SAMPLES = 1 << 20


def say(text):
    print(text, flush=True)


def state_of(step):
    # Noise: equal chunks would be written once, and the save be over in no time.
    length = 200_000_000 if where in ("save", "save_sync") else 1000
    return {"step": step, "noise": np.frombuffer(np.random.default_rng(step).bytes(length), np.uint8)}


def plain_step(step, stop, manager, autosave):
    sum(range(2000))
    if step == 3:
        say("running")


def evaluation(step, stop, manager, autosave):
    if step == 1:
        say("running")
        while not stop.requested:
            sum(range(2000))


def running_save(step, stop, manager, autosave):
    if step == 0:
        manager.save(step, state_of(step))
        say("running")
        while not stop.requested:
            pass


def save_sync(step, stop, manager, autosave):
    if step == 0:
        state = state_of(step)
        say("running")
        manager.save_sync(step, state)
        autosave.saved(step, 0.1)


def hangs(step, stop, manager, autosave):
    if step == 1:
        say("running")
        threading.Event().wait()


def waits(step, stop, manager, autosave):
    say("running")
    while not stop.requested:
        pass
    say("asked")
    # A wait without an end sleeps through a signal that comes right before it.
    while True:
        threading.Event().wait(0.05)


STEPS = {
    "step": plain_step,
    "eval": evaluation,
    "save": running_save,
    "save_sync": save_sync,
    "hangs": hangs,
    "waits": waits,
}


class Numbers:
    """A data set of which a worker that is not shielded gives four batches, and waits."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index >= 16 and where.endswith("unshielded"):
            threading.Event().wait()
        return index


def batches(stop):
    """Yields batches of a loader with two workers, or nothing but steps."""
    if where in STEPS:
        yield from range(SAMPLES)
        return
    import torch

    method, _, is_shielded = where.partition("-")
    loader = torch.utils.data.DataLoader(
        Numbers(),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    if is_shielded != "unshielded":
        stop.shield(loader)
    # Something that outlives the loop holds the workers, as it is with a loader at the top of a module.
    sys.modules["__main__"].held = loader
    for count, batch in enumerate(loader):
        yield int(batch[0])
        if count == 3:  # the boundary of this step is over: without a shield, the next batch never comes
            say("running")


def train():
    with (
        StopSignal(slurm=False, hard_timeout_seconds=0.2 if where == "hangs" else 60) as stop,
        CheckpointManager(folder, delta=False) as manager,
    ):
        autosave = Autosave(every_steps=SAMPLES)
        boundary = Boundary(stop, autosave)
        for step, _batch in enumerate(batches(stop)):
            STEPS.get(where, lambda *_: None)(step, stop, manager, autosave)
            decision = boundary.decide(step)
            if decision.save:
                handle = manager.save(step, state_of(step))
                autosave.saved(step, handle.timings.blocked)
                handle.wait()
            if decision.stop is not None:
                stop.done()
                say(f"stopped after {step}: {decision.stop}")
                return decision.stop.exit_code
    return 0


if __name__ == "__main__":
    os.setsid()
    sys.exit(train())
