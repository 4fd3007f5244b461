"""Runs of `run_training` that are signalled, with their workers, at a place in their life.

A process that forks a run for each line it reads, and says how each ended. A line is JSON: the folder, the
place, the signals to send there, the number of workers, and whether the loss is NaN in step 7.
"""

from __future__ import annotations

import os
import signal
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

from lives import serve
from processes import jobs
from torch.utils.data import DataLoader

from varvite.training import Hook, ResumableSampler, run_training
from varvite.training.tracking import NullTracker

if TYPE_CHECKING:
    import torch

STEPS = 12


class Life(Hook):
    """Signals its whole process group at one place, once."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.is_sent, self.step = case, False, -1

    def at(self, place: str) -> None:
        if place == self.case["place"] and not self.is_sent:
            self.is_sent = True
            for name in self.case["signals"]:
                os.killpg(0, signal.Signals[name])

    def restoring(self, run) -> None:
        self.at("restoring")

    def restored(self, run, report) -> None:
        self.at("rolled back" if self.step >= 0 else "restored")

    def stepped(self, run, outcome) -> None:
        self.step = run.progress.step
        self.at(f"stepped {self.step}")

    def saving(self, run, step) -> None:
        self.at(f"saving {step}")

    def staged(self, run, handle) -> None:
        self.at(f"staged {handle.step}")

    def saved(self, run, info) -> None:
        self.at(f"saved {info.step}")

    def ended(self, run, result) -> None:
        self.at("ended")

    def loss(self, module, batch) -> torch.Tensor:
        self.at(f"step {self.step + 1}")
        found = jobs.loss(module, batch)
        if self.case["poison"] and self.step == 6:
            self.case["poison"] = False
            return found * float("nan")
        return found

    def data(self) -> DataLoader:
        self.at("data")
        numbers, workers = jobs.numbers(), self.case["workers"]
        sampler = ResumableSampler(numbers, seed=1)
        return DataLoader(numbers, batch_size=4, sampler=sampler, num_workers=workers)

    def evaluate(self, run) -> dict[str, float]:
        loader = DataLoader(jobs.numbers(), batch_size=4, num_workers=self.case["workers"])
        seen = 0
        for batch in run.stop.shield(loader):
            self.at("evaluation")
            seen += len(batch)
        return {"seen": seen}


class Tracker(NullTracker):
    def __init__(self, life: Life) -> None:
        super().__init__()
        self.life = life

    def close(self) -> None:
        self.life.at("tear-down")


def live(case: dict[str, Any]) -> int:
    """Goes on with a run; returns its exit code."""
    os.setsid()
    life = Life(case)
    job = jobs.job(
        case["folder"],
        STEPS,
        data=life.data,
        loss=life.loss,
        evaluate=life.evaluate,
        evaluate_every=4,
        tracker=lambda run: Tracker(life),
        non_finite={"policy": "rollback"},
        manager={"threads": 1, "fsync": False},
    )
    return int(run_training(job, hooks=[life]).exit_code)


def main() -> None:
    # What is said on the error output is what must not be.
    warnings.filterwarnings("ignore", "rolled back to the state after step")
    with tempfile.TemporaryDirectory() as folder:
        # Once here, so that what is imported on the way is there in each fork.
        run_training(jobs.job(folder, 1))
    serve(live)


if __name__ == "__main__":
    main()
