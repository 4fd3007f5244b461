"""A sampler in plain data loaders: it goes on behind what the loop was given, wherever that was."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError, MismatchError
from varvite.training import rng
from varvite.training.cursor import epoch_order
from varvite.training.sampler import ResumableSampler, sampler_of

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH = 23
WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}
KINDS = {
    "in the process": {},
    "workers": WORKERS,
    "persistent workers": {**WORKERS, "persistent_workers": True},
    "far ahead": {**WORKERS, "prefetch_factor": 7},
}


@pytest.fixture(autouse=True)
def _global_streams_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rng, "_registered", {})
    before = rng.capture()
    yield
    rng.restore(before)


def make(sampler: ResumableSampler, **options: Any) -> DataLoader:
    # Lists, not tensors: to send a tensor, each worker imports a second's worth of torch.
    return DataLoader(range(LENGTH), sampler=sampler, **{"batch_size": 3, "collate_fn": list, **options})


def epochs(loader: Any, count: int) -> list[list[int]]:
    """Returns the batches of so many iterations."""
    return [list(loader) for _ in range(count)]


def cut(loader: Any, batches: int, holder: Any) -> tuple[list[Any], Any]:
    """Takes so many batches and returns them, with what `holder` saves in the body of the last."""
    taken = []
    for batch in loader:
        taken.append(batch)
        if len(taken) == batches:
            return taken, holder.state_dict()
    raise AssertionError(f"the loader has no {batches} batches")


def resumed(state: Any, **options: Any) -> ResumableSampler:
    sampler = ResumableSampler(LENGTH, **options)
    sampler.load_state_dict(state)
    return sampler


# Going on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_two_resumes_give_the_batches_of_the_run_that_never_stopped(kind, drop_last, shuffle):
    options = {**KINDS[kind], "drop_last": drop_last}
    settings_ = {"shuffle": shuffle, "seed": 5}
    whole = list(itertools.chain(*epochs(make(ResumableSampler(LENGTH, **settings_), **options), 3)))
    per_epoch = LENGTH // 3 if drop_last else -(-LENGTH // 3)
    for first in (1, per_epoch - 1, per_epoch):
        sampler = ResumableSampler(LENGTH, **settings_)
        taken, state = cut(make(sampler, **options), first, sampler)
        for batches in (1, 2):
            sampler = resumed(state, **settings_)
            more, state = cut(make(sampler, **options), min(batches, per_epoch - first % per_epoch), sampler)
            taken += more
        sampler = resumed(state, **settings_)
        taken += itertools.chain(*epochs(make(sampler, **options), 2))
        assert taken == whole[: len(taken)]
        assert len(taken) >= 2 * per_epoch


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_in_the_body_of_the_last_batch_is_the_start_of_the_next_epoch(kind):
    sampler = ResumableSampler(LENGTH)
    _, state = cut(make(sampler, **KINDS[kind]), 8, sampler)
    assert (state["epoch"], state["position"]) == (1, 0)
    assert (sampler.epoch, sampler.position, sampler.remaining) == (1, 0, LENGTH)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    batch_sizes=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    cuts=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    drop_last=st.booleans(),
    loader_drops=st.booleans(),
)
def test_on_any_sequence_of_world_sizes_each_sample_comes_once(
    length, sizes, batch_sizes, cuts, drop_last, loader_drops
):
    """Loaders of all ranks run in step; each run is killed after so many steps, and the next one goes on."""
    state: Any = None
    taken: list[int] = []
    order = None
    for world_size, batch_size, steps in zip(sizes, batch_sizes, cuts, strict=False):
        left = (length - len(taken)) // world_size
        if length // world_size < batch_size or left < (batch_size if loader_drops else 1):
            continue  # it would leave the rest out: tested below
        samplers = [
            ResumableSampler(length, drop_last=drop_last, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        if order is None:
            order = epoch_order(samplers[0]._cursor, shuffle=True).tolist()
        for sampler in samplers if state else ():
            sampler.load_state_dict(state)
        loaders = [
            DataLoader(
                range(length),
                batch_size=batch_size,
                sampler=sampler,
                drop_last=loader_drops,
                collate_fn=list,
            )
            for sampler in samplers
        ]
        given_out: list[int] = []
        iterators = [iter(loader) for loader in loaders]
        for _ in range(steps):
            batches = [next(iterator, None) for iterator in iterators]
            assert len({None if batch is None else len(batch) for batch in batches}) == 1
            if batches[0] is None:
                break
            given_out += [sample for row in zip(*batches, strict=True) for sample in row]
        states = [sampler.state_dict() for sampler in samplers]
        assert all(one == states[0] for one in states)
        if (
            samplers[0].epoch > 0
        ):  # the epoch has ended: what is left out or given twice is what was asked for
            tail = order[len(taken) :]
            assert given_out[: len(tail)] == tail[: len(given_out)]
            return
        taken += given_out
        state = states[0]
        assert taken == order[: state["position"]]
    rest = ResumableSampler(length, drop_last=drop_last, rank=0, world_size=1)
    if state:
        rest.load_state_dict(state)
    taken += list(rest)
    assert Counter(taken) == Counter(range(length))


def test_padding_and_dropping_share_an_epoch_evenly():
    padded = [list(ResumableSampler(10, shuffle=False, rank=rank, world_size=4)) for rank in range(4)]
    assert padded == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    dropped = [
        ResumableSampler(10, shuffle=False, drop_last=True, rank=rank, world_size=4) for rank in range(4)
    ]
    assert [list(one) for one in dropped] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [len(one) for one in dropped] == [2, 2, 2, 2]
    assert [one.epoch for one in dropped] == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_no_pass_is_empty_where_less_than_a_batch_is_left(kind):
    options = {**KINDS[kind], "drop_last": True}
    sampler = ResumableSampler(LENGTH, shuffle=False)
    _, state = cut(make(sampler, batch_size=7, **options), 2, sampler)
    assert state["position"] == 14
    sampler = resumed(state, shuffle=False)
    ((first, *_),) = epochs(make(sampler, batch_size=10, **options), 1)
    assert (first, sampler.epoch) == (list(range(10)), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_more_than_an_epoch_is_refused(kind):
    with pytest.raises(InvalidInputError, match="a pass needs at least: 24"):
        epochs(make(ResumableSampler(LENGTH), batch_size=24, drop_last=True, **KINDS[kind]), 1)


# What the loop was given


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", [1, 7])
def test_a_loop_that_broke_off_goes_on_behind_what_it_was_given(kind, batches):
    """With 7 of 8 batches given, workers have asked for every index of the pass."""
    sampler = ResumableSampler(LENGTH, shuffle=False)
    loader = make(sampler, **KINDS[kind])
    cut(loader, batches, sampler)
    assert sampler.position == 3 * batches
    assert epochs(loader, 2)[0] == [list(range(at, min(at + 3, 23))) for at in range(3 * batches, 23, 3)]
    assert sampler.epoch == 2


@pytest.mark.parametrize("kind", ["in the process", "workers"])
def test_the_iterator_and_its_workers_end_with_the_loop(kind):
    """Not when the garbage is collected: then forked children would find them, and wait for them."""
    gc.collect()
    gc.disable()
    try:
        iterator = iter(make(ResumableSampler(LENGTH), **KINDS[kind]))
        next(iterator)
        gone = weakref.ref(iterator)
        del iterator
        assert gone() is None
    finally:
        gc.enable()


def test_rewind_goes_back_to_the_start_of_the_epoch():
    sampler = ResumableSampler(LENGTH, shuffle=False)
    loader = make(sampler)
    epochs(loader, 1)
    cut(loader, 2, sampler)
    sampler.rewind()
    assert (sampler.epoch, sampler.position) == (1, 0)
    assert len(epochs(loader, 1)[0]) == 8


@pytest.mark.parametrize("options", [{}, WORKERS])
def test_a_loader_without_batches_counts_samples(options):
    sampler = ResumableSampler(LENGTH, shuffle=False)
    loader = DataLoader(range(LENGTH), batch_size=None, sampler=sampler, **options)
    for sample in loader:
        assert sampler.position == (sample + 1) % LENGTH
    assert sampler.epoch == 1


@pytest.mark.parametrize("options", [{}, WORKERS])
def test_pinning_changes_nothing(options):
    """Without an accelerator torch warns and does not pin; with one, a thread stands between."""
    sampler = ResumableSampler(LENGTH, shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, state = cut(make(sampler, pin_memory=True, **options), 3, sampler)
    assert state["position"] == 9


def test_iterated_by_itself_what_was_yielded_counts():
    sampler = ResumableSampler(LENGTH, shuffle=False, rank=1, world_size=2)
    for index in sampler:
        assert sampler.position == (0 if index >= 22 or index == 0 else index + 1)
    assert sampler.epoch == 1


class Failing:
    """Gives each sample but one."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise ValueError("a bad sample")
        return index


@pytest.mark.parametrize("options", [{}, WORKERS])
def test_a_batch_that_failed_counts_once_the_loop_went_past_it(options):
    sampler = ResumableSampler(LENGTH, shuffle=False)
    iterator = iter(DataLoader(Failing(4), batch_size=3, sampler=sampler, collate_fn=list, **options))
    assert next(iterator) == [0, 1, 2]
    with pytest.raises(ValueError, match="a bad sample"):
        next(iterator)
    assert sampler.position == 3
    assert next(iterator) == [6, 7, 8]
    assert sampler.position == 9
    # The error of a worker holds the iterator in a cycle, and torch ends that one's workers only by force.
    getattr(iterator, "_shutdown_workers", bool)()


def refusal(sampler: ResumableSampler) -> str:
    """Returns why a sampler does not tell its state; nothing of the error is kept."""
    try:
        sampler.state_dict()
    except InvalidInputError as error:
        return str(error)
    return "it tells"


def test_batches_out_of_order_can_only_be_saved_between_epochs():
    sampler = ResumableSampler(LENGTH)
    loader = make(sampler, in_order=False, **WORKERS)
    refusals = [refusal(sampler) for _ in loader]
    assert refusals.pop() == "it tells"
    assert all("in_order=False" in text and "advance" in text for text in refusals)
    assert sampler.epoch == 1
    for _ in loader:
        break
    assert "in_order=False" in refusal(sampler)
    with pytest.raises(InvalidInputError, match="in_order=False"):
        next(iter(sampler))
    sampler.set_epoch(3)
    assert len(epochs(loader, 1)[0]) == 8


class Pairs(BatchSampler):
    """Batches in a way of its own."""


def test_batches_of_another_sampler_are_not_guessed():
    sampler = ResumableSampler(LENGTH, shuffle=False)
    loader = DataLoader(range(LENGTH), batch_sampler=Pairs(sampler, 2, False), collate_fn=list)
    assert sampler_of(loader) is sampler
    for _ in loader:
        with pytest.raises(InvalidInputError, match="batch sampler of another kind"):
            sampler.state_dict()
        break
    with pytest.raises(InvalidInputError, match="batch sampler of another kind"):
        epochs(loader, 1)
    sampler.rewind()
    assert len(epochs(loader, 2)[1]) == 12
    sampler.set_epoch(5)
    for batch in loader:
        sampler.advance(len(batch))
        assert sampler.state_dict()["position"] == (batch[-1] + 1) % LENGTH
    assert sampler.epoch == 6


def test_a_sampler_around_it_is_not_guessed_either():
    class Around:
        def __init__(self, inner: ResumableSampler) -> None:
            self.inner = inner

        def __iter__(self) -> Iterator[int]:
            yield from list(self.inner)

        def __len__(self) -> int:
            return len(self.inner)

    sampler = ResumableSampler(LENGTH)
    for _ in make(Around(sampler)):
        with pytest.raises(InvalidInputError, match="cannot tell"):
            sampler.state_dict()
        break


def test_a_pass_that_another_one_overtook_ends_with_an_error():
    sampler = ResumableSampler(LENGTH, shuffle=False)
    loader = make(sampler)
    first = iter(loader)
    next(first)
    assert next(iter(loader)) == [3, 4, 5]
    with pytest.raises(InvalidInputError, match="cannot go on with this pass"):
        next(first)
    third = iter(loader)
    next(third)
    sampler.load_state_dict(ResumableSampler(LENGTH, shuffle=False).state_dict())
    with pytest.raises(InvalidInputError, match="iterate again"):
        next(third)


# Epochs and state


def test_set_epoch_keeps_the_position_of_its_epoch_and_drops_that_of_another():
    sampler = ResumableSampler(LENGTH, shuffle=False)
    cut(make(sampler), 2, sampler)
    sampler.set_epoch(0)
    assert sampler.position == 6
    sampler.set_epoch(4)
    assert (sampler.epoch, sampler.position) == (4, 0)


@pytest.mark.parametrize("epoch", [0, 3])
def test_to_give_up_a_restored_position_is_warned_of(epoch):
    sampler = ResumableSampler(LENGTH)
    sampler.set_epoch(2)
    _, state = cut(make(sampler), 1, sampler)
    sampler = resumed(state)
    sampler.set_epoch(2)
    with pytest.warns(RuntimeWarning, match=rf"epoch 2 at sample 3, .* start of epoch: {epoch}"):
        sampler.set_epoch(epoch)
    assert (sampler.epoch, sampler.position) == (epoch, 0)


@pytest.mark.parametrize(
    ("length", "options", "field"),
    [
        (LENGTH + 1, {}, "length"),
        (LENGTH, {"seed": 1}, "seed"),
        (LENGTH, {"shuffle": False}, "shuffle"),
        (LENGTH, {"drop_last": True}, "drop_last"),
    ],
)
def test_a_position_in_another_order_of_samples_is_refused_by_name(length, options, field):
    state = ResumableSampler(LENGTH).state_dict()
    sampler = ResumableSampler(length, **options)
    sampler.set_epoch(3)
    for take in (sampler.check_state_dict, sampler.load_state_dict):
        with pytest.raises(MismatchError, match=f"`{field}` is") as caught:
            take(state)
        assert (caught.value.field, caught.value.name) == (field, "sampler")
        assert caught.value.found == state[field]
    assert sampler.epoch == 3


def test_a_damaged_state_changes_nothing():
    sampler = ResumableSampler(LENGTH)
    sampler.set_epoch(3)
    for damage in ({"position": LENGTH}, {"epoch": "3"}, {"kind": 1}):
        with pytest.raises(CorruptionError):
            sampler.load_state_dict({**sampler.state_dict(), **damage})
    assert (sampler.epoch, sampler.position) == (3, 0)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"dataset": 0}, "length"),
        ({"dataset": []}, "length"),
        ({"seed": -1}, "seed"),
        ({"shuffle": 1}, "shuffle"),
        ({"drop_last": None}, "drop_last"),
        ({"rank": 0}, "rank"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"rank": 0, "world_size": 0}, "world_size"),
        ({"dataset": 3, "drop_last": True, "rank": 0, "world_size": 4}, "drop_last"),
    ],
)
def test_illegal_arguments_are_refused(arguments, what):
    with pytest.raises(InvalidInputError) as caught:
        ResumableSampler(**{"dataset": 10, **arguments})
    assert caught.value.what == what


def test_a_launchers_ranks_are_never_ignored(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidInputError, match="launched as one of 4"):
        ResumableSampler(10)
    assert len(ResumableSampler(10, rank=3, world_size=4)) == 3


# Random draws


def train(loader: Any, sampler: ResumableSampler, steps: int, *, stop: int | None = None) -> list[Any]:
    """Draws once a step, as dropout does, and returns batches and draws, and the state where it stops."""
    rows: list[Any] = []
    while True:
        for batch in loader:
            rows.append((batch, torch.rand(()).item()))
            if len(rows) == stop:
                return [*rows, (sampler.state_dict(), rng.capture())]
            if len(rows) == steps:
                return rows


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_after_two_resumes_are_those_of_the_run_that_never_stopped(kind, own_generator):
    """Trap M1: an iterator over a loader draws when it is made."""

    def start() -> tuple[DataLoader, ResumableSampler]:
        options = dict(KINDS[kind])
        if own_generator:
            options["generator"] = torch.Generator().manual_seed(3)
            rng.register("loader", options["generator"])
        sampler = ResumableSampler(LENGTH)
        return make(sampler, **options), sampler

    def generator_state(loader: DataLoader) -> list[int]:
        return [] if loader.generator is None else loader.generator.get_state().tolist()

    torch.manual_seed(11)
    loader, sampler = start()
    expected = train(loader, sampler, 30)
    last = generator_state(loader)
    for first in (3, 8, 12):  # within an epoch, at its edge, within the next
        torch.manual_seed(11)
        loader, sampler = start()
        rows = train(loader, sampler, 30, stop=first)
        for more in (2, 3):
            state, generators = rows.pop()
            loader, sampler = start()
            torch.manual_seed(99)
            sampler.load_state_dict(state)
            rng.restore(generators)
            rows += train(loader, sampler, 30, stop=more)
        state, generators = rows.pop()
        loader, sampler = start()
        sampler.load_state_dict(state)
        rng.restore(generators)
        rows += train(loader, sampler, 30 - len(rows))
        assert rows == expected
        assert generator_state(loader) == last


def test_only_the_iterators_own_draw_is_taken_back():
    sampler = ResumableSampler(LENGTH)
    _, state = cut(make(sampler), 2, sampler)
    generators = rng.capture()
    sampler = resumed(state)
    rng.restore(generators)
    torch.rand((), dtype=torch.float64)  # as many bits as the draw of an iterator
    moved = torch.get_rng_state()
    loader = make(sampler, generator=torch.Generator())
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), moved)


# With a manager


@pytest.mark.parametrize("kind", ["in the process", "workers"])
@pytest.mark.parametrize("as_loader", [False, True])
def test_a_manager_saves_and_resumes_the_sampler_or_its_loader(tmp_path, kind, as_loader):
    torch.manual_seed(1)
    sampler = ResumableSampler(LENGTH)
    expected = train(make(sampler, **KINDS[kind]), sampler, 20)
    torch.manual_seed(1)
    sampler = ResumableSampler(LENGTH)
    loader = make(sampler, **KINDS[kind])
    rows: list[Any] = []
    with CheckpointManager(tmp_path / "run") as manager:
        for batch in loader:
            rows.append((batch, torch.rand(()).item()))
            manager.save(len(rows), data=loader if as_loader else sampler)
            if len(rows) == 5:
                break
    torch.manual_seed(2)
    sampler = ResumableSampler(LENGTH)
    loader = make(sampler, **KINDS[kind])
    with CheckpointManager(tmp_path / "run") as manager:
        report = manager.resume(data=loader if as_loader else sampler)
        assert (report.step, report.loader, report.restored) == (5, "restored", ["data"])
    rows += train(loader, sampler, 15)
    assert rows == expected


def test_a_plain_loader_is_refused_by_save_and_resume(tmp_path):
    loader = DataLoader(range(4))
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(InvalidInputError, match="invalid loader `data`") as caught:
            manager.save(0, data=loader)
        assert "ResumableLoader" in caught.value.hint
        manager.save_sync(0, data=ResumableSampler(4))
        weights = torch.nn.Linear(1, 1)
        before = weights.weight.clone()
        with pytest.raises(InvalidInputError, match="invalid loader `data`"):
            manager.resume(data=loader, model=weights)
        assert torch.equal(weights.weight, before)


def test_a_loader_is_no_dataset():
    with pytest.raises(InvalidInputError, match="must be the dataset, not a loader of it"):
        ResumableSampler(DataLoader(range(8), batch_size=4))
