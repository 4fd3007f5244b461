"""Random augmentation by sample: the same whatever workers, restarts and neighbours there are."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from varvite.errors import InvalidInputError
from varvite.training import rng
from varvite.training.sampler import ResumableSampler
from varvite.training.samples import EpochIndex, PerSampleRandom

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}


@pytest.fixture(autouse=True)
def _global_streams_stay() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


class Noise:
    """Draws from every global generator for each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        assert type(index) is int
        numbers = random.random(), random.gauss(0, 1), np.random.random(), np.random.standard_normal()
        return (index, *numbers, torch.rand(()).item())


def drawn(loader: Any) -> dict[int, tuple[float, ...]]:
    return {sample[0]: sample[1:] for batch in loader for sample in batch}


def loader_of(sampler: ResumableSampler, **options: Any) -> DataLoader:
    return DataLoader(
        PerSampleRandom(Noise(), seed=3), sampler=sampler, batch_size=4, collate_fn=list, **options
    )


@pytest.mark.parametrize("options", [WORKERS, {**WORKERS, "persistent_workers": True}])
def test_workers_draw_what_the_main_process_draws_in_every_epoch(options):
    here = loader_of(ResumableSampler(12))
    expected = [drawn(here) for _ in range(2)]
    assert set(expected[0]) == set(range(12))
    assert expected[0] != expected[1]
    there = loader_of(ResumableSampler(12), **options)
    assert [drawn(there) for _ in range(2)] == expected
    sampler = ResumableSampler(12)
    resumed = loader_of(sampler, **options)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 1, "position": 4})
    rest = drawn(resumed)
    assert len(rest) == 8
    assert rest.items() <= expected[1].items()


def test_numpy_is_seeded_before_its_first_use(monkeypatch):
    """NumPy imports its `random` on first use, which may be that of the first sample."""
    noise = PerSampleRandom(Noise(), seed=3)
    noise.set_epoch(0)
    expected = noise[5]
    monkeypatch.delitem(sys.modules, "numpy.random")
    assert noise[5] == expected


def test_the_training_streams_are_where_they_were():
    random.gauss(0, 1)
    np.random.standard_normal()  # each keeps half a pair for the next call
    before = rng.capture()
    expected = random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist()
    rng.restore(before)
    noise = PerSampleRandom(Noise())
    noise.set_epoch(0)
    noise[5]
    with pytest.raises(AssertionError):
        PerSampleRandom(FailsOn(5))[EpochIndex(5, epoch=0)]
    assert (random.gauss(0, 1), np.random.standard_normal(), torch.rand(3).tolist()) == expected


class FailsOn:
    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __getitem__(self, index: int) -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        assert index != self.bad


def test_seed_epoch_and_index_each_change_the_draws():
    samples = {
        PerSampleRandom(Noise(), seed=seed)[EpochIndex(index, epoch=epoch)][1:]
        for seed in (0, 1)
        for epoch in (0, 1)
        for index in (0, 1)
    }
    assert len(samples) == 8


def test_set_epoch_reaches_workers_that_run_already():
    noise = PerSampleRandom(Noise())
    loader = DataLoader(noise, batch_size=4, collate_fn=list, persistent_workers=True, **WORKERS)
    noise.set_epoch(0)
    first = drawn(loader)
    noise.set_epoch(1)
    second = drawn(loader)
    noise.set_epoch(0)
    assert second != first
    assert drawn(loader) == first


def test_without_an_epoch_a_sample_is_not_drawn():
    noise = PerSampleRandom(Noise())
    with pytest.raises(InvalidInputError, match="cannot draw sample 2") as caught:
        noise[2]
    assert "set_epoch" in caught.value.hint
    lost = Subset(noise, range(4))  # passes plain indices on
    with pytest.raises(InvalidInputError, match="cannot draw sample"):
        drawn(DataLoader(lost, sampler=ResumableSampler(4), batch_size=2))
    for seed in (-1, 1.5, True):
        with pytest.raises(InvalidInputError):
            PerSampleRandom(Noise(), seed=seed)


def test_an_index_keeps_its_epoch_on_its_way_to_a_worker():
    index = EpochIndex(7, epoch=2)
    for other in (pickle.loads(pickle.dumps(index)), copy.copy(index)):
        assert (other, other.epoch, type(other)) == (7, 2, EpochIndex)


def test_other_datasets_get_plain_indices():
    assert {type(index) for index in ResumableSampler(range(5))} == {int}
    assert {type(index) for index in ResumableSampler(PerSampleRandom(Noise()))} == {EpochIndex}


def test_no_module_but_the_samplers_imports_torch_or_numpy(run_python):
    names = ", ".join(
        f"varvite.training.{name}" for name in ("cursor", "loader", "positions", "samples", "rng")
    )
    assert run_python(f"import sys, {names}; print({{'torch', 'numpy'}} & set(sys.modules))") == "set()"
