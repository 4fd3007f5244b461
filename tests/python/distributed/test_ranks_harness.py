"""The harness of all tests with several ranks: `tests/python/ranks.py`."""

from __future__ import annotations

import os
import time

import pytest
import ranks
import torch
import torch.distributed as dist

from varvite.errors import TensorNotFoundError


def sums(addend):
    values = torch.tensor([dist.get_rank() + addend])
    dist.all_reduce(values)
    return values.item(), dist.get_world_size(), os.environ["RANK"]


def raises_on(number):
    if dist.get_rank() == number:
        raise TensorNotFoundError("no tensor `w`", name="w")
    return "well"


def comes_to_places(folder):
    ranks.at("first")
    (folder / f"{dist.get_rank()}").touch()
    ranks.at("second")
    return "through"


def without_torch():
    return dist.is_initialized(), os.environ["RANK"], os.environ["WORLD_SIZE"]


def hangs():
    time.sleep(100)


@pytest.mark.parametrize("size", [1, 2, 6])
def test_each_rank_gives_its_result(size):
    total = sum(range(size)) + 10 * size
    assert ranks.run(size, sums, 10) == [(total, size, str(rank)) for rank in range(size)]


@pytest.mark.parametrize("store", ["launcher", "rank 0", "file"])
def test_any_store(store):
    assert [one[0] for one in ranks.run(2, sums, 0, store=store)] == [1, 1]


def test_an_exception_comes_back_with_its_attributes():
    good, bad, _ = ranks.outcomes(3, raises_on, 1)
    assert (good.value, good.error, bad.error.name) == ("well", None, "w")
    assert "in raises_on" in bad.traceback
    with pytest.raises(AssertionError, match=r"rank 1:\nTraceback(.|\n)*no tensor `w`"):
        ranks.run(2, raises_on, 1)


def test_a_rank_is_killed_at_a_place(tmp_path):
    with ranks.start(3, comes_to_places, tmp_path) as group:
        group.wait_for("first")
        assert list(tmp_path.iterdir()) == []
        group.kill(1)
        group.go(0)
        group.wait_for("second", 0)
        assert [path.name for path in tmp_path.iterdir()] == ["0"]
        group.stop(2)
        group.resume(2)
        outcomes = group.outcomes()
    assert [(one.value, one.exit_code) for one in outcomes] == [("through", 0), (None, -9), ("through", 0)]


def test_ranks_without_torch_distributed():
    assert ranks.run(2, without_torch, backend=None) == [(False, "0", "2"), (False, "1", "2")]


def test_what_does_not_end_is_killed_and_shows_its_stacks():
    with pytest.raises(AssertionError, match=r"not done in time(.|\n)*in hangs"):
        ranks.run(1, hangs, seconds=1)
