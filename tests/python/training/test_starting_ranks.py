"""A warm start and a fork on several ranks: one decision for all, and an error of one is an error of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import ranks
import torch
import torch.distributed as dist

from varvite import CheckpointManager
from varvite.errors import CheckpointError, InvalidInputError, MismatchError, SnapshotNotFoundError
from varvite.training import RunIdentity

if TYPE_CHECKING:
    from pathlib import Path


def made(width: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def parent(tmp_path):
    model, optimizer = made()
    with CheckpointManager(tmp_path / "parent") as manager:
        manager.save_sync(7, model=model, optimizer=optimizer, run=RunIdentity("parent"))
    return tmp_path, model.weight.tolist()


def begins(folder: Path) -> Any:
    found = {}
    model, optimizer = made()
    with CheckpointManager(folder / "warm") as manager:
        report = manager.warm_start(folder / "parent", rules={"optimizer": None}, model=model)
        found["warm"] = report.next_step, model.weight.tolist()
    model, optimizer = made()
    with CheckpointManager(folder / "fork") as manager:
        run = RunIdentity("child")
        report = manager.fork(folder / "parent", model=model, optimizer=optimizer, run=run)
        found["fork"] = report.next_step, model.weight.tolist()
        manager.save_sync(8, model=model, optimizer=optimizer, run=run)
        with pytest.raises(InvalidInputError) as caught:
            manager.fork(folder / "parent", model=model)
        found["used"] = str(caught.value)
    return found


def test_all_ranks_begin_from_one_snapshot(parent):
    folder, weight = parent
    for found in ranks.run(2, begins, folder):
        assert found["warm"] == (0, weight)
        assert found["fork"] == (8, weight)
        assert "holds snapshots already" in found["used"]
    with CheckpointManager(folder / "fork") as manager:
        assert [receipt.verb for receipt in manager.receipts()] == ["fork"]
        assert manager.load()["model"]["weight"].tolist() == weight
    with CheckpointManager(folder / "parent") as manager:
        assert [tag.partition(".")[0] for tag in manager.info().tags] == ["fork"]


def fails(folder: Path) -> Any:
    """On one rank the model is another one, or the arguments are not legal."""
    is_odd = dist.get_rank() == 1
    texts = []
    with CheckpointManager(folder / "run") as manager:
        model, optimizer = made(5 if is_odd else 4)
        before = model.weight.tolist()
        with pytest.raises(MismatchError) as caught:
            manager.warm_start(folder / "parent", model=model)
        texts.append(str(caught.value))
        with pytest.raises(MismatchError) as caught:
            manager.fork(folder / "parent", model=model, optimizer=optimizer)
        texts.append(str(caught.value))
        with pytest.raises(CheckpointError) as error:
            manager.warm_start(folder / "parent", **({"model": 3} if is_odd else {"model": model}))
        texts.append(str(error.value))
        with pytest.raises(SnapshotNotFoundError) as absent:
            manager.fork(folder / "parent", "step:99", model=model)
        texts.append(str(absent.value))
        assert model.weight.tolist() == before
    return texts


def test_what_stands_against_it_on_one_rank_is_raised_by_all_and_nothing_changes(parent):
    folder, _ = parent
    first, second = ranks.run(2, fails, folder)
    for theirs, own, fact in zip(first, second, ["weight", "weight", "no module", "step:99"], strict=True):
        assert fact in own
        assert fact in theirs
    assert all("rank 1" in text for text in first[:3])
    with CheckpointManager(folder / "parent") as manager:
        assert manager.info().tags == []  # the pin of the fork that failed is taken back
