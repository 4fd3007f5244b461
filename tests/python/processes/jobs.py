"""Jobs whose parts a fresh process can import."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from varvite.training import Job, ResumableSampler


def set_up() -> None:
    torch.set_num_threads(1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Linear(4, 2))


def optimizer(module: nn.Module, *, rate: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=rate)


def data() -> DataLoader:
    numbers = torch.arange(40.0).reshape(20, 2) / 40
    return DataLoader(numbers, batch_size=4, sampler=ResumableSampler(numbers, seed=1))


def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (module(batch) - batch).square().mean()


def restless_loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss that is another one in each process: what no resume can make repeatable."""
    generator = torch.Generator()
    generator.seed()
    return loss(module, batch) * (1 + torch.rand((), generator=generator))


def job(folder: Any, steps: int = 12, **more: Any) -> Job:
    parts = {"set_up": set_up, "model": model, "optimizer": partial(optimizer), "data": data, "loss": loss}
    quiet = {"autosave": {"every_steps": 5}, "stop": {"slurm": False}}
    return Job(folder=folder, steps=steps, **{**parts, **quiet, **more})
