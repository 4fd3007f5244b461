"""Fixtures of the tests of the command line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from varvite import CheckpointManager


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A repository: steps 10, 20, 20 again and 30; the last is not healthy; the first is tagged."""
    path = tmp_path / "run"
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with CheckpointManager(path, fsync=False) as manager:
        for step, loss in ((10, 3.0), (20, 1.0), (20, 2.0), (30, math.nan)):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if step == 30:
                with torch.no_grad():
                    model.bias[0] = math.nan
            manager.save_sync(
                step,
                {"config": {"width": 3, "betas": (0.9, None)}},
                metrics={"val_loss": loss},
                metadata={"commit": "abc", "dtype": torch.bfloat16},
                model=model,
                optimizer=optimizer,
            )
        manager.pin(10, "first")
    return path
