"""Loaders of every kind: a run that is resumed gets the batches and the draws of one that never stopped."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError, MismatchError
from varvite.training import rng
from varvite.training.loader import ResumableLoader
from varvite.training.sampler import ResumableSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH = 23
BATCHES = 8
WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}
PERSISTENT = {**WORKERS, "persistent_workers": True}


@pytest.fixture(autouse=True)
def _global_streams_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rng, "_registered", {})
    before = rng.capture()
    yield
    rng.restore(before)


def with_sampler(**options: Any) -> DataLoader:
    return plain(sampler=ResumableSampler(LENGTH), **options)


def plain(**options: Any) -> DataLoader:
    return DataLoader(range(LENGTH), **{"batch_size": 3, "collate_fn": list, **options})


def shuffled(**options: Any) -> DataLoader:
    return plain(shuffle=True, **options)


def of_torchdata(**options: Any) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls a function that newer versions of torch deprecate
        return stateful.StatefulDataLoader(
            range(LENGTH), **{"batch_size": 3, "collate_fn": list, "shuffle": True, **options}
        )


class OwnLoader:
    """A loader that is none of torch's, with a state. It draws when it is iterated over."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[list[int]]:
        torch.rand(())
        return self._run()

    def _run(self) -> Iterator[list[int]]:
        while self.at < LENGTH:
            batch = list(range(self.at, min(self.at + 3, LENGTH)))
            self.at += len(batch)
            yield batch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def train(data: ResumableLoader, rows: list[Any], *, until: int) -> None:
    """Draws once a step, as dropout does, up to a number of steps in all."""
    while len(rows) < until:
        for batch in data:
            rows.append((batch, torch.rand(()).item(), data.epoch))
            if len(rows) == until:
                return


CASES = {
    "sampler": (with_sampler, {}),
    "sampler, workers": (with_sampler, WORKERS),
    "sampler, persistent workers": (with_sampler, PERSISTENT),
    "torchdata": (of_torchdata, {}),
    "torchdata, workers": (of_torchdata, WORKERS),
    "torchdata, persistent workers": (of_torchdata, PERSISTENT),
    "own": (OwnLoader, {}),
    "plain": (shuffled, {}),
    "plain, workers": (shuffled, WORKERS),
    "plain, persistent workers": (shuffled, PERSISTENT),
}


@pytest.mark.parametrize("case", CASES)
def test_two_resumes_through_a_manager_equal_the_run_that_never_stopped(tmp_path, case):
    make, options = CASES[case]
    torch.manual_seed(4)
    expected: list[Any] = []
    train(ResumableLoader(make(**options)), expected, until=28)
    within = [] if case.startswith("plain") else [(3, 5), (12, 13)]
    for stops in [*within, (8, 16)]:
        rows: list[Any] = []
        torch.manual_seed(4)
        for number, until in enumerate((*stops, 28)):
            with CheckpointManager(tmp_path / f"run {stops[0]}", fsync=False) as manager:
                data = ResumableLoader()
                report = manager.resume(data=data)
                assert (int(report), report.loader) == (
                    (0, "absent") if number == 0 else (stops[number - 1] + 1, "restored")
                )
                with rng.unmoved() if number else contextlib.nullcontext():
                    loader = make(**options)
                data.attach(loader)
                train(data, rows, until=until)
                if until < 28:
                    manager.save(until, data=data)
        assert rows == expected, stops


@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_between_two_epochs_goes_on_with_the_next(case):
    make, options = CASES[case]
    rows: list[Any] = []
    torch.manual_seed(4)
    data = ResumableLoader(make(**options))
    assert len(list(data)) == BATCHES
    state, generators = data.state_dict(), rng.capture()
    train(data, rows, until=12)
    again: list[Any] = []
    data = ResumableLoader(make(**options))
    data.load_state_dict(state)
    rng.restore(generators)
    assert data.epoch == 1
    assert data.state_dict() == state
    train(data, again, until=12)
    assert again == rows


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("plain")])
def test_a_loop_that_broke_off_goes_on_and_moves_no_generator(case):
    make, options = CASES[case]
    data = ResumableLoader(make(**options))
    whole = list(ResumableLoader(with_copied_state(data, make, options)))
    first: list[Any] = []
    for batch in data:
        first.append(batch)
        if len(first) == 7:
            break
    before = torch.get_rng_state()
    iterator = iter(data)
    rest = [next(iterator)]
    assert torch.equal(torch.get_rng_state(), before)
    assert first + rest == whole
    assert list(iterator) == []
    assert data.epoch == 1


@pytest.mark.parametrize("case", CASES)
def test_a_loop_that_broke_off_behind_the_last_batch_goes_on_with_the_next_epoch(case):
    make, options = CASES[case]
    data = ResumableLoader(make(**options))
    for number, _ in enumerate(data, start=1):
        if number == BATCHES:
            break
    assert data.epoch == (0 if case == "own" else 1)  # that one has no length
    assert len(list(data)) == BATCHES
    assert data.epoch == 2


@pytest.mark.parametrize("case", CASES)
def test_saving_before_the_first_batch_changes_nothing(case):
    make, options = CASES[case]
    rows: list[list[Any]] = [[], []]
    for is_saved in (0, 1):
        torch.manual_seed(4)
        data = ResumableLoader(make(**options))
        if is_saved:
            before = torch.get_rng_state()
            data.state_dict()
            assert torch.equal(torch.get_rng_state(), before)
        train(data, rows[is_saved], until=2)
    assert rows[0] == rows[1]


def with_copied_state(data: ResumableLoader, make: Any, options: Any) -> Any:
    """Returns a loader that shuffles as that of `data` does."""
    loader = make(**options)
    own = getattr(loader.sampler, "generator", None) if hasattr(loader, "sampler") else None
    if own is not None:
        own.set_state(data._position.loader.sampler.generator.get_state())
    return loader


def test_a_loader_without_state_is_refused_within_an_epoch_only():
    data = ResumableLoader(plain())
    assert data.state_dict() == {"kind": "epoch", "epoch": 0, "keeps_iterator": False}
    for number, _ in enumerate(data, start=1):
        if number == BATCHES:
            assert data.state_dict()["epoch"] == data.epoch == 1
        else:
            with pytest.raises(InvalidInputError, match=f"middle of an epoch: .*given: {number}") as caught:
                data.state_dict()
    assert "ResumableSampler" in caught.value.hint
    assert data.state_dict()["epoch"] == 1
    for _ in data:
        break
    with pytest.raises(InvalidInputError, match="in the middle of an epoch"):
        data.state_dict()
    assert len(list(data)) == BATCHES  # begins the epoch anew, as the loader does


def test_a_plain_iterable_without_length_is_a_loader_too():
    data = ResumableLoader(iter_of([1, 2]))
    for _ in data:
        with pytest.raises(InvalidInputError, match="in the middle"):
            data.state_dict()
    assert data.state_dict()["epoch"] == 1
    with pytest.raises(InvalidInputError, match="no iterable"):
        ResumableLoader(3)


class iter_of:  # noqa: N801
    def __init__(self, batches: list[int]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        return iter(self.batches)


# State that arrives before the loader


def test_state_waits_for_the_loader_and_is_applied_once():
    source = ResumableLoader(with_sampler())
    whole = list(ResumableLoader(with_sampler()))
    for _ in source:
        saved = source.state_dict()
        break
    data = ResumableLoader()
    data.load_state_dict(saved)
    assert (data.epoch, data.state_dict()) == (0, saved)
    seen: list[Any] = []
    loader = with_sampler()
    assert list(data.attach(loader, shield=seen.append)) == whole[1:]
    assert seen == [loader]
    assert list(data) != whole[1:]
    with pytest.raises(InvalidInputError, match="there is a loader already"):
        data.attach(with_sampler())


def test_state_that_a_loader_refuses_is_not_given_to_another():
    saved = ResumableLoader(with_sampler()).state_dict()
    data = ResumableLoader()
    data.load_state_dict({**saved, "epoch": 3})
    with pytest.raises(
        MismatchError, match="`kind`: expected epoch, but the snapshot has: sampler"
    ) as caught:
        data.attach(plain())
    assert (caught.value.field, caught.value.expected, caught.value.found) == ("kind", "epoch", "sampler")
    assert data.attach(with_sampler()).epoch == 0


def test_without_a_loader_or_a_state_there_is_nothing_to_do():
    data = ResumableLoader()
    assert data.epoch == 0
    for use in (data.state_dict, lambda: list(data), lambda: len(data), lambda: data.set_epoch(1)):
        with pytest.raises(InvalidInputError, match="no loader is attached"):
            use()


@pytest.mark.parametrize(
    "record",
    [
        None,
        {},
        {"kind": "other"},
        {"kind": ["epoch"]},
        {"kind": "sampler", "epoch": 0},
        {"kind": "epoch", "epoch": 0},
        {"kind": "epoch", "epoch": -1, "keeps_iterator": False},
        {"kind": "epoch", "epoch": True, "keeps_iterator": False},
        {"kind": "epoch", "epoch": 0, "keeps_iterator": 0},
        {"kind": "epoch", "epoch": 0, "keeps_iterator": False, "state": None},
    ],
)
def test_a_damaged_record_changes_nothing(record):
    for data in (ResumableLoader(), ResumableLoader(plain())):
        for take in (data.check_state_dict, data.load_state_dict):
            with pytest.raises(CorruptionError, match=r"loader position|data position"):
                take(record)
        assert data.epoch == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"phase": "begin"},
        {"phase": "within"},
        {"batches": -1},
        {"num_workers": True},
        {"num_workers": "2"},
    ],
)
def test_a_damaged_record_of_a_loader_with_state_changes_nothing(damage):
    data = ResumableLoader(OwnLoader())
    record = {**data.state_dict(), "state": None, **damage}
    with pytest.raises(CorruptionError, match="loader position"):
        data.load_state_dict(record)
    assert data.epoch == 0


def test_a_loader_of_another_kind_is_a_mismatch():
    epoch = ResumableLoader(plain()).state_dict()
    state = ResumableLoader(OwnLoader()).state_dict()
    for make, record in ((with_sampler, epoch), (with_sampler, state), (plain, state), (OwnLoader, epoch)):
        with pytest.raises(MismatchError, match="the loader has another `kind`"):
            ResumableLoader(make()).check_state_dict(record)


def test_another_number_of_workers_is_a_mismatch_for_a_loader_with_state():
    data = ResumableLoader(of_torchdata())
    for _ in data:
        break
    with pytest.raises(MismatchError, match="`num_workers`: expected 2, but the snapshot has: 0"):
        ResumableLoader(of_torchdata(**WORKERS)).check_state_dict(data.state_dict())


# Epochs


def test_set_epoch_keeps_the_position_of_its_epoch_and_drops_that_of_another():
    for make in (with_sampler, OwnLoader):
        data = ResumableLoader(make())
        for _ in data:
            break
        data.set_epoch(0)
        assert data.state_dict() != ResumableLoader(make()).state_dict()
    data = ResumableLoader(of_torchdata(shuffle=False))
    for _ in data:
        saved = data.state_dict()
        break
    data = ResumableLoader(of_torchdata(shuffle=False))
    data.load_state_dict(saved)
    data.set_epoch(4)
    assert next(iter(data)) == [0, 1, 2]
    assert data.epoch == 4


def test_a_distributed_sampler_is_told_the_epoch():
    def loader() -> DataLoader:
        sampler = DistributedSampler(range(LENGTH), num_replicas=2, rank=1, seed=5)
        return plain(sampler=sampler)

    data = ResumableLoader(loader())
    epochs = [list(data) for _ in range(2)]
    saved = data.state_dict()
    epochs.append(list(data))
    assert len({str(epoch) for epoch in epochs}) == 3
    data = ResumableLoader(loader())
    data.load_state_dict(saved)
    assert list(data) == epochs[2]


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def test_a_stream_saved_behind_its_last_batch_gives_no_empty_epoch():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return stateful.StatefulDataLoader(Stream(), batch_size=3, collate_fn=list)

    data = ResumableLoader(loader())
    for number, _ in enumerate(data, start=1):
        if number == BATCHES:
            saved = data.state_dict()
    data = ResumableLoader(loader())
    data.load_state_dict(saved)
    assert len(list(data)) == BATCHES
    assert data.epoch == 2


def test_a_sampler_inside_a_loader_with_state_decides():
    data = ResumableLoader(of_torchdata(shuffle=None, sampler=ResumableSampler(LENGTH)))
    whole = list(ResumableLoader(with_sampler()))
    for _ in data:
        saved = data.state_dict()
        break
    assert saved["kind"] == "sampler"
    data = ResumableLoader(with_sampler())
    data.load_state_dict(saved)
    assert list(data) == whole[1:]


def test_an_iteration_that_another_one_overtook_ends_with_an_error():
    data = ResumableLoader(with_sampler())
    first = iter(data)
    next(first)
    saved = data.state_dict()
    next(iter(data))
    with pytest.raises(InvalidInputError, match="cannot go on with this iteration"):
        next(first)
    second = iter(data)
    next(second)
    data.load_state_dict(saved)
    with pytest.raises(InvalidInputError, match="iterate again"):
        next(second)
    assert len(list(data)) == BATCHES - 1
