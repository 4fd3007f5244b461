"""One rank is killed at each point of a save of all: the others raise, and what is committed is whole on all.

Every case is a crash in the middle, then another run, on as many ranks or on others.
"""

from __future__ import annotations

import os

import pytest
import ranks
import torch
import torch.distributed as dist

import varvite
from varvite import _native
from varvite.errors import CheckpointError

SAVED = [point for point in _native.KILL_POINTS if not point.startswith(("merge", "recover", "sync"))]
# The save of small tensors copies nothing later.
OF_ALL = [point for point in SAVED if point.startswith(("save", "publish")) and point != "save.copied"]
OF_THE_COORDINATOR = [point for point in SAVED if point.startswith(("commit", "put", "sweep", "delete"))]
ALL = [(0, point) for point in OF_ALL + OF_THE_COORDINATOR] + [(1, point) for point in OF_ALL]
FEW = [
    (0, "save.footer"),
    (0, "commit.pack_durable"),
    (0, "put.renamed"),
    (0, "commit.published"),
    (1, "save.staged"),
    (1, "publish.renamed"),
    (1, "publish.folder_synced"),
]
CASES = ALL if os.environ.get("VARVITE_TEST_EVERYTHING") else FEW


def state_at(step):
    """What several ranks hold and one writes, and what each has for itself."""
    shared = {f"layer{number}": torch.full((3000,), float(step * 10 + number)) for number in range(4)}
    return {"shared": shared, "own": {"rank": dist.get_rank(), "step": step}}


def save(manager, step):
    return manager.save(step, **state_at(step), rank_local=["own"])


def is_killed(folder, victim, point):
    from varvite.distributed.meeting import Meeting

    Meeting.LOST_SECONDS = 1.5
    Meeting.LOOK_SECONDS = 0.2
    manager = varvite.CheckpointManager(folder, keep=varvite.keep.last(1))
    save(manager, 1).wait()
    if dist.get_rank() == victim:
        _native.kill_at(point, 1)
    try:
        save(manager, 2).wait()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def goes_on(folder):
    rank = dist.get_rank()
    with varvite.CheckpointManager(folder) as manager:
        shared, own = state_at(0)["shared"], {"rank": -1, "step": -1}
        same = manager.info().world_size == dist.get_world_size()
        report = manager.resume(shared=shared, strict=False, **({"own": own} if same else {}))
        step = report.step
        for name, value in state_at(step)["shared"].items():
            assert torch.equal(shared[name], value), name
        if same:
            assert own == {"rank": rank, "step": step}
        save(manager, step + 1).wait()
        assert manager.verify("latest").ok
        assert manager.load()["shared"]["layer3"][0].item() == (step + 1) * 10 + 3
    return step, report.digest


@pytest.mark.parametrize(("victim", "point"), CASES)
def test_a_rank_that_is_killed_in_a_save(tmp_path, victim, point):
    with ranks.start(2, is_killed, tmp_path, victim, point) as group:
        outcomes = group.outcomes()
    assert outcomes[victim].exit_code == -9, outcomes[victim]
    other = outcomes[1 - victim]
    # At the last points the coordinator dies after it has told how the save ended, or before.
    assert other.value is not None, other.traceback
    if other.value != "saved":
        assert f"{victim}" in other.value
    else:
        assert victim == 0
    size = 2 if point.startswith(("save", "put")) else 3
    (step, digest), *others = ranks.run(size, goes_on, tmp_path)
    assert all(one == (step, digest) for one in others)
    is_before = point in OF_ALL or point in ("commit.pack_durable", "put.written", "put.synced")
    if victim == 1 and point != "publish.folder_synced":
        assert step == 1
    elif not is_before:
        assert step == 2
    else:
        assert step in (1, 2)
