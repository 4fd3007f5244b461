"""Gradient accumulation: no save in the middle of a step, and what was deferred runs at its end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
from support import assert_same
from torch import nn

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError
from varvite.training.accumulation import GradientAccumulation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run") as manager:
        yield manager


def test_a_save_in_the_middle_of_a_step_is_refused_and_saves_nothing(manager):
    accumulation = GradientAccumulation(4)
    manager.save_sync(0, accumulation=accumulation)
    for _ in range(3):
        with accumulation.microbatch() as is_last:
            assert not is_last
    with pytest.raises(InvalidInputError, match="3 of 4 micro-batches are pending") as caught:
        manager.save(1, accumulation=accumulation)
    assert (caught.value.pending, "when_complete" in caught.value.hint) == (3, True)
    assert [info.step for info in manager.snapshots()] == [0]
    with accumulation.microbatch() as is_last:
        assert is_last
    assert manager.save_sync(1, accumulation=accumulation).step == 1


def test_what_is_deferred_runs_once_at_the_end_of_the_step_in_order(manager):
    accumulation = GradientAccumulation(3)
    ran: list[str] = []
    for index in range(6):
        with accumulation.microbatch() as is_last:
            if index == 0:
                accumulation.when_complete(lambda: ran.append("first"))
                accumulation.when_complete(lambda: manager.save(7, accumulation=accumulation))
            if is_last:
                ran.append("step")
        ran.append(f"{index}")
    assert ran == ["0", "1", "step", "first", "2", "3", "4", "step", "5"]
    assert [info.step for info in manager.snapshots()] == [7]
    accumulation.when_complete(lambda: ran.append("now"))
    assert ran[-1] == "now"


def test_a_run_resumed_at_a_steps_end_equals_one_that_never_stopped(manager):
    def build() -> tuple[nn.Module, torch.optim.Optimizer, GradientAccumulation]:
        torch.manual_seed(2)
        model = nn.Linear(3, 1)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1), GradientAccumulation(2)

    def train(objects, batches: range, save_at: int | None = None) -> None:
        model, optimizer, accumulation = objects
        named = {"model": model, "optimizer": optimizer, "accumulation": accumulation}
        for batch in batches:
            with accumulation.microbatch(model) as is_last:
                inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(batch))
                (model(inputs).square().mean() / accumulation.every).backward()
                if batch == save_at:
                    accumulation.when_complete(lambda: manager.save_sync(1, **named))
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()

    whole = build()
    train(whole, range(8), save_at=2)
    resumed = build()
    manager.resume(model=resumed[0], optimizer=resumed[1], accumulation=resumed[2])
    train(resumed, range(4, 8))
    assert_same(dict(resumed[0].state_dict()), dict(whole[0].state_dict()))


def test_ranks_exchange_gradients_only_at_the_last_micro_batch():
    class Parallel(nn.Linear):
        syncs = True

        @contextlib.contextmanager
        def no_sync(self):
            self.syncs = False
            yield
            self.syncs = True

    module, accumulation = Parallel(1, 1), GradientAccumulation(3)
    seen = []
    for _ in range(3):
        with accumulation.microbatch(module):
            seen.append(module.syncs)
    assert seen == [False, False, True]


def test_a_step_can_end_early_where_the_data_ends():
    accumulation = GradientAccumulation(4)
    with accumulation.microbatch():
        pass
    with accumulation.microbatch(is_last=True) as is_last:
        assert is_last
    assert accumulation.pending == 0


@pytest.mark.parametrize("discards", [False, True])
def test_a_micro_batch_that_raises_is_not_counted(discards):
    accumulation = GradientAccumulation(2)

    def fail() -> None:
        if discards:
            accumulation.discard()
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"), accumulation.microbatch():
        fail()
    assert accumulation.pending == 0


def test_a_step_whose_gradients_were_dropped_starts_again():
    accumulation = GradientAccumulation(3)
    ran: list[int] = []
    for _ in range(2):
        with accumulation.microbatch():
            pass
    accumulation.when_complete(lambda: ran.append(1))
    accumulation.discard()
    assert (accumulation.pending, ran) == (0, [1])


def test_a_load_starts_a_step_and_keeps_the_live_number():
    accumulation = GradientAccumulation(3)
    with accumulation.microbatch():
        pass
    accumulation.load_state_dict({"every": 2})
    assert (accumulation.pending, accumulation.every) == (0, 3)


@pytest.mark.parametrize("state", [None, {}, {"every": 0}, {"every": True}, {"every": 2, "pending": 1}])
def test_a_state_that_is_none_is_corrupt_and_changes_nothing(state):
    accumulation = GradientAccumulation(3)
    with accumulation.microbatch():
        pass
    with pytest.raises(CorruptionError, match="corrupt accumulation"):
        accumulation.load_state_dict(state)
    assert accumulation.pending == 1


@pytest.mark.parametrize("every", [0, 2.0, True])
def test_a_number_that_means_nothing_is_refused(every):
    with pytest.raises(InvalidInputError, match="invalid every"):
        GradientAccumulation(every)
