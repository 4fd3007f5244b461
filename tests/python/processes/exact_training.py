"""Lives of training runs: a process that forks one for each line it reads, and says how each ended.

A line is JSON: the folder, the kind of training, the number of workers, how often to save, and where to
die. What a life does is logged step by step: the samples it was given, a draw of each generator, the loss.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from pathlib import Path

import numpy as np
import torch
from lives import serve
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, Dataset

from varvite import _native, keep
from varvite.training import Hook, Job, PerSampleRandom, ResumableSampler, run_training

SAMPLES, BATCH, WIDTH = 20, 3, 6


class Numbers(Dataset):
    """Samples that know their index, with noise from the global generator of whoever reads them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return int(index), torch.full((WIDTH,), index / SAMPLES) + 0.1 * torch.randn(WIDTH)


class WideMoments(torch.optim.Optimizer):
    """Adam whose moments are fp32 beside bf16 weights."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter]
                if not own:
                    own["step"] = 0
                    own["first"] = torch.zeros_like(parameter, dtype=torch.float32)
                    own["second"] = torch.zeros_like(parameter, dtype=torch.float32)
                own["step"] += 1
                gradient = parameter.grad.float()
                own["first"].lerp_(gradient, 0.1)
                own["second"].lerp_(gradient.square(), 0.01)
                change = own["first"] / (own["second"].sqrt() + 1e-6)
                parameter.copy_(parameter.float() - group["lr"] * change)


def build_model(kind: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, WIDTH))
    return model.bfloat16() if kind == "bf16" else model


def build_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    match kind:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)
        case "bf16":
            return WideMoments(parameters)
        case "fused":
            return torch.optim.AdamW(parameters, lr=0.01, fused=True)
        case _:
            return torch.optim.AdamW(parameters, lr=0.01, foreach=True, amsgrad=True)


def build_scheduler(kind: str, optimizer: torch.optim.Optimizer):
    return StepLR(optimizer, 3, 0.7) if kind == "step_lr" else CosineAnnealingLR(optimizer, 9)


class Life(Hook):
    """Logs every step, and dies where it is told to."""

    def __init__(self, case: dict, log: Path) -> None:
        self.case, self.log, self.saves = case, log.open("a"), 0
        self.seen: dict = {}

    def loss(self, model: nn.Module, batch: tuple) -> torch.Tensor:
        indices, numbers = batch
        draws = [torch.rand(()).item(), random.random(), float(np.random.random())]
        self.seen = {"samples": indices.tolist(), "draws": [draw.hex() for draw in draws]}
        dtype = next(model.parameters()).dtype
        loss = (model(numbers.to(dtype)).float() - numbers).square().mean()
        if self.case["kind"] == "scaler" and 4 in self.seen["samples"]:
            loss = loss * torch.finfo(torch.float32).max  # now and then the scaled loss overflows
        return loss

    def restoring(self, run) -> None:
        run.optimizer.register_step_pre_hook(lambda *_: self.pass_point("update.before"))
        run.optimizer.register_step_post_hook(lambda *_: self.pass_point("update.after"))

    def restored(self, run, report) -> None:
        self.pass_point("resume.restored")

    def stepped(self, run, outcome) -> None:
        line = {
            "step": run.progress.step,
            "loss": outcome.loss.hex(),
            "updated": outcome.updated,
            **self.seen,
        }
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()
        self.pass_point("step.done")

    def saving(self, run, step: int) -> None:
        self.saves += 1
        point = self.case["point"]
        if self.is_time and point in self.case["native"]:
            _native.kill_at(point, 1)
        self.pass_point("save.before")

    def staged(self, run, handle) -> None:
        self.pass_point("save.staged_in_python")

    def saved(self, run, info) -> None:
        self.pass_point("save.heard_of")

    @property
    def is_time(self) -> bool:
        """The second save of a life, and what comes after the first."""
        return self.saves >= (2 if self.case["point"].startswith(("save", "publish", "commit", "put")) else 1)

    def pass_point(self, name: str) -> None:
        due = self.case["point"] == name and (self.is_time or name.startswith("resume"))
        if due:
            os.kill(os.getpid(), signal.SIGKILL)


def live(case: dict) -> int:
    """Goes on with a run; returns its exit code."""
    folder, kind = Path(case["folder"]), case["kind"]
    folder.mkdir(parents=True, exist_ok=True)
    life = Life(case, folder / "log.jsonl")
    if case["point"].startswith("recover"):
        _native.kill_at(case["point"], 1)
    numbers = PerSampleRandom(Numbers(), seed=5)
    job = Job(
        folder=folder / "checkpoints",
        steps=5 * case["every"],
        seed=11,
        model=lambda: build_model(kind),
        optimizer=lambda model: build_optimizer(kind, model),
        scheduler=(lambda optimizer: build_scheduler(kind, optimizer))
        if kind in ("step_lr", "cosine")
        else None,
        scaler=(lambda: torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3))
        if kind == "scaler"
        else None,
        data=lambda: DataLoader(
            numbers,
            batch_size=BATCH,
            sampler=ResumableSampler(numbers, seed=3),
            num_workers=case["workers"],
            multiprocessing_context="fork" if case["workers"] else None,
        ),
        loss=life.loss,
        autosave={"every_steps": case["every"]},
        manager={"keep": keep.last(1), "threads": 1, "fsync": False},
    )
    with life.log:
        return int(run_training(job, hooks=[life]).exit_code)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        # Once here, so that what is imported on the way is there in each fork.
        live({"folder": folder, "kind": "cosine", "every": 1, "workers": 0, "point": "", "native": []})
    serve(live)


if __name__ == "__main__":
    main()
