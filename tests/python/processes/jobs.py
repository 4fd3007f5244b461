"""Jobs whose parts a fresh process can import."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from varvite.training import Job, ResumableSampler
from varvite.training.run.step import training_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from varvite.training import Run, StepOutcome


def set_up() -> None:
    torch.set_num_threads(1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Linear(4, 2))


def optimizer(module: nn.Module, *, rate: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=rate)


def numbers() -> torch.Tensor:
    return torch.arange(40.0).reshape(20, 2) / 40


def data() -> DataLoader:
    samples = numbers()
    return DataLoader(samples, batch_size=4, sampler=ResumableSampler(samples, seed=1))


def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (module(batch) - batch).square().mean()


def restless_loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss that is another one in each process: what no resume can make repeatable."""
    generator = torch.Generator()
    generator.seed()
    return loss(module, batch) * (1 + torch.rand((), generator=generator))


def deadly_loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss that ends the process, as the kernel does where memory is short."""
    os._exit(3)


def lost_loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return loss(module, batch) * float("nan")


def doubling_step(run: Run, batches: Sequence[Any]) -> StepOutcome:
    """A step of another kind than `training_step`."""
    return training_step(run, [2 * batch for batch in batches])


def job(folder: Any, steps: int = 12, **more: Any) -> Job:
    parts = {"set_up": set_up, "model": model, "optimizer": partial(optimizer), "data": data, "loss": loss}
    quiet = {"autosave": {"every_steps": 5}, "stop": {"slurm": False}}
    return Job(folder=folder, steps=steps, **{**parts, **quiet, **more})
