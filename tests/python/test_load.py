"""Loads without live objects: whole nests, chosen tensors, into tensors that are there, and mapped files."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, copy_of, files_of, packs
from torch import nn

from varvite import CheckpointManager
from varvite.errors import (
    CorruptionError,
    InvalidInputError,
    MismatchError,
    SnapshotNotFoundError,
    TensorNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", chunk_bytes=4096) as manager:
        yield manager


def model_and_more() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 2))
    return {"model": model, "progress": {"epoch": 3, "curve": np.arange(5.0), "a.b": torch.ones(2)}}


# Whole nests


def test_objects_come_under_their_keyword_beside_the_nest(manager):
    objects = model_and_more()
    manager.save_sync(4, {"w": torch.ones(3), 7: "seven"}, **objects)
    loaded = manager.load()
    assert list(loaded) == ["w", 7, "model", "progress"]
    assert_same(loaded["model"], dict(objects["model"].state_dict()))
    assert_same(loaded["progress"], objects["progress"])
    assert (loaded.step, loaded.snapshot.seq) == (4, 1)
    again = pickle.loads(pickle.dumps(loaded))
    assert_same(dict(again), dict(loaded))
    assert (again.step, again.snapshot) == (4, loaded.snapshot)


def test_load_latest_is_none_only_for_an_empty_repository(manager):
    assert manager.load_latest() is None
    manager.save_sync(0, {"v": 1})
    assert manager.load_latest() == {"v": 1}
    assert_same(manager.load_latest(names=[]), manager.load(names=[]))
    with pytest.raises(TensorNotFoundError):
        manager.load_latest(names=["w"])


def test_load_of_an_empty_repository_says_so(manager):
    with pytest.raises(SnapshotNotFoundError) as caught:
        manager.load()
    assert "it holds no snapshot" in caught.value.message
    assert isinstance(caught.value, FileNotFoundError)


def test_load_latest_raises_where_every_snapshot_is_damaged(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in range(2):
            manager.save_sync(step, {"w": torch.ones(10) * step})
        for pack in packs(tmp_path):
            pack.write_bytes(b"")
        with pytest.warns(RuntimeWarning) as warned, pytest.raises(CorruptionError) as caught:
            manager.load_latest()
        assert [seq for seq, _ in caught.value.skipped] == [2, 1]
        assert "every snapshot is damaged:" in caught.value.message
        assert len(warned) == 2


def test_loaded_tensors_are_new_each_time(manager):
    manager.save_sync(0, {"w": torch.ones(3)})
    first = manager.load()
    first["w"].zero_()
    assert_same(manager.load()["w"], torch.ones(3))


def test_nothing_is_pickled_or_unpickled(manager, monkeypatch):
    objects = model_and_more()
    optimizer = torch.optim.AdamW(objects["model"].parameters())

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle")

    for name in ("loads", "load", "Unpickler", "dumps", "dump", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    manager.save_sync(0, {"w": torch.ones(3)}, optimizer=optimizer, **objects)
    assert_same(manager.load()["progress"], objects["progress"])
    manager.resume(optimizer=optimizer, w=torch.zeros(3), **objects)


def test_a_device_moves_tensors_and_leaves_arrays_and_ties(manager):
    w = torch.ones(3)
    manager.save_sync(0, {"w": w, "tie": w, "a": np.ones(2)})
    loaded = manager.load(device="cpu")
    assert (loaded["w"] is loaded["tie"], type(loaded["a"])) == (True, np.ndarray)
    meta = manager.load(device="meta")
    assert (meta["w"].device.type, meta["w"] is meta["tie"], meta["w"].shape) == ("meta", True, (3,))
    assert manager.load(names=["w"], device="meta")["w"].device.type == "meta"


# Chosen tensors


def test_names_and_globs(manager):
    objects = model_and_more()
    manager.save_sync(0, **objects)
    weights = {f"model.{name}": value for name, value in objects["model"].state_dict().items()}
    assert_same(dict(manager.load(names=["model.1.bias"])), {"model.1.bias": weights["model.1.bias"]})
    assert_same(dict(manager.load(names="model.1.bias")), {"model.1.bias": weights["model.1.bias"]})
    assert set(manager.load(names=["model.*"])) == set(weights)
    assert set(manager.load(names=["*.weight", "progress.curve"])) == {
        "model.0.weight",
        "model.1.weight",
        "progress.curve",
    }
    assert set(manager.load(names=["model.[01].bias", "model.0.bias"])) == {"model.0.bias", "model.1.bias"}
    assert_same(dict(manager.load(names=['progress."a.b"'])), {'progress."a.b"': torch.ones(2)})
    assert manager.load(names=["model.?.bias"]).step == 0


def test_a_name_that_matches_nothing_is_an_error_with_what_looks_alike(manager):
    manager.save_sync(0, **model_and_more())
    with pytest.raises(TensorNotFoundError) as caught:
        manager.load(names=["model.0.bias", "model.0.wieght"])
    assert (caught.value.name, caught.value.seq) == ("model.0.wieght", 1)
    assert caught.value.nearest[0] == "model.0.weight"
    assert "did you mean `model.0.weight`" in str(caught.value)
    assert isinstance(caught.value, KeyError)
    with pytest.raises(TensorNotFoundError, match=r"no tensor `decoder.\*` in snapshot 1"):
        manager.load(names=["decoder.*"])


def test_chosen_objects_come_as_nests_and_cost_no_other_bytes(tmp_path):
    folder = tmp_path / "run"
    with CheckpointManager(folder, chunk_bytes=4096) as manager:
        state = model_and_more()
        manager.save_sync(1, {"seen": [1, 2]}, **state)
    (pack,) = packs(folder)
    start = state["model"][0].weight.detach().numpy().tobytes()[:64]
    pack.write_bytes(pack.read_bytes().replace(start, bytes(64)))
    with CheckpointManager(folder) as manager:
        found = manager.load(objects=["progress", "seen"])
        assert list(found) == ["progress", "seen"]
        assert_same(dict(found), {"progress": model_and_more()["progress"], "seen": [1, 2]})
        assert found.rng is None
        with pytest.raises(CorruptionError):
            manager.load("seq:1", objects=["model"])


def test_an_object_that_is_not_there_is_an_error_that_lists_what_is(manager):
    manager.save_sync(1, {"seen": 3}, **model_and_more())
    with pytest.raises(TensorNotFoundError) as caught:
        manager.load(objects=["progres"])
    assert caught.value.name == "progres"
    assert caught.value.nearest == ["seen", "model", "progress"]
    with pytest.raises(InvalidInputError, match="ask for one of them"):
        manager.load(names=["model.*"], objects=["progress"])


def test_chosen_tensors_cost_their_own_bytes_and_not_those_of_a_damaged_neighbour(tmp_path):
    with CheckpointManager(tmp_path, chunk_bytes=4096) as manager:
        manager.save_sync(0, {"good": torch.ones(1024), "bad": torch.full((1024,), 2.0)}, rng=False)
        [pack] = packs(tmp_path)
        data = pack.read_bytes()
        pack.write_bytes(
            data.replace(np.float32(2).tobytes() * 1024, np.float32(2).tobytes() * 1023 + b"\0\0\0\0")
        )
        assert_same(dict(manager.load(names=["good"])), {"good": torch.ones(1024)})
        with pytest.raises(CorruptionError):
            manager.load("seq:1", names=["bad"])


# Mapped files


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2]
)
def test_mapped_tensors_equal_those_that_were_read(manager, dtype):
    bits = torch.arange(20_000).remainder(2 if dtype is torch.bool else 120).to(torch.uint8)
    values = bits.view(dtype).reshape(5, -1) if dtype.itemsize <= 8 else bits
    manager.save_sync(
        0, {"w": values, "tie": values, "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 3)}
    )
    mapped, read = manager.load(mmap=True), manager.load()
    assert_same(dict(mapped), dict(read))
    assert_same(read["w"], values)
    assert mapped["tie"] is mapped["w"]
    assert_same(dict(manager.load(names=["w"], mmap=True)), {"w": values})


def test_writing_to_a_mapped_tensor_changes_no_file_and_no_other_load(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(0, {"w": torch.ones(300_000)})
        before = files_of(tmp_path)
        first, second = manager.load(mmap=True), manager.load(mmap=True)
        first["w"].mul_(5)
        assert_same(second["w"], torch.ones(300_000))
        assert_same(manager.load()["w"], torch.ones(300_000))
        assert files_of(tmp_path) == before


def test_mapped_tensors_outlive_their_snapshot_and_their_manager(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(0, {"w": torch.arange(300_000)}, rng=False)
        w = manager.load(mmap=True)["w"]
        manager.save_sync(1, {"w": torch.zeros(3)}, rng=False)
        manager.delete(0)
        assert len(packs(tmp_path)) == 1
    assert_same(w, torch.arange(300_000))


def test_a_mapped_tensor_with_a_damaged_byte_is_an_error(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(0, {"w": torch.ones(300_000)})
        [pack] = packs(tmp_path)
        with pack.open("r+b") as file:
            file.seek(500_000)
            file.write(b"\xff")
        with pytest.raises(CorruptionError) as caught:
            manager.load(0, mmap=True)
        assert caught.value.object == f"packs/{pack.name}"


def test_a_model_trains_on_mapped_weights(manager):
    model = nn.Linear(200, 200)
    manager.save_sync(0, model=model)
    other = nn.Linear(200, 200)
    other.load_state_dict(manager.load(mmap=True)["model"], assign=True)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    assert_same(manager.load()["model"], dict(model.state_dict()))
    assert not torch.equal(other.weight, model.weight)


# Into tensors that are there


def test_a_state_dict_is_filled_in_place_under_a_prefix(manager):
    model = model_and_more()["model"]
    manager.save_sync(0, model=model, other={"x": torch.ones(1)})
    other = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 2))
    state = other.state_dict()
    report = manager.load_into(state, prefix="model")
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert sorted(report.matched) == sorted(f"model.{name}" for name in state)
    assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])
    assert manager.load_into(state, prefix="model.").matched == report.matched
    part = manager.load_into(other[1].state_dict(), prefix="model.1")
    assert sorted(part.matched) == ["model.1.bias", "model.1.weight"]


def test_a_nest_is_filled_in_place(manager):
    nest = {"a": {"b": [torch.ones(2), (torch.full((1,), 3.0),)]}, "c.d": np.arange(3), 7: torch.ones(1)}
    manager.save_sync(0, nest)
    live = {"a": {"b": [torch.zeros(2), (torch.zeros(1),)]}, "c.d": np.zeros(3, np.int64), 7: torch.zeros(1)}
    report = manager.load_into(live)
    assert_same(live, nest)
    assert report.matched == ["a.b.0", "a.b.1.0", '"c.d"', "7"]
    assert str(report) == "filled 4 entries"


def test_what_does_not_match_is_reported_and_left_alone(manager):
    manager.save_sync(0, {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.ones(2)})
    live = {
        "a": torch.zeros(2),
        "b": torch.zeros(3),
        "c": torch.zeros(2, dtype=torch.float16),
        "e": torch.zeros(2),
    }
    before = copy_of(live)
    report = manager.load_into(live)
    assert (report.matched, report.missing, report.unexpected) == (["a"], ["e"], ["d"])
    assert report.mismatched == [("b", "shape", [3], [2]), ("c", "dtype", "float16", "float32")]
    assert report.mismatched[0].name == "b"
    assert_same(live, {**before, "a": torch.ones(2)})


def test_nothing_that_matches_is_an_error_that_says_why(manager):
    manager.save_sync(0, {"w": torch.ones(2)})
    with pytest.raises(MismatchError, match="no name of the snapshot matches"):
        manager.load_into({"v": torch.zeros(2)})
    with pytest.raises(MismatchError) as caught:
        manager.load_into({"w": torch.zeros(3)})
    assert caught.value.mismatched == [("w", "shape", [3], [2])]
    with pytest.raises(InvalidInputError, match="invalid state_dict: must be a dict of tensors"):
        manager.load_into([torch.zeros(2)])  # type: ignore[arg-type]


def test_exact_widenings_are_loaded_without_asking(manager):
    values = torch.tensor([1.0, -0.0, 65280.0]).to(torch.bfloat16)
    manager.save_sync(0, {"w": values, "n": torch.tensor([200], dtype=torch.uint8)})
    live = {"w": torch.zeros(3), "n": torch.zeros(1, dtype=torch.int64)}
    manager.load_into(live)
    assert_same(live, {"w": values.float(), "n": torch.tensor([200])})
    with pytest.raises(MismatchError):
        manager.load_into({"n": torch.zeros(1, dtype=torch.int8)})


def test_filling_strided_expanded_and_parameter_tensors(manager):
    manager.save_sync(0, {"t": torch.arange(6.0).reshape(2, 3), "p": torch.ones(2)})
    live = {"t": torch.zeros(3, 2).t(), "p": nn.Parameter(torch.zeros(2))}
    manager.load_into(live)
    assert live["t"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert live["p"].tolist() == [1, 1]


def test_tied_destinations_are_filled_through_one_name(manager):
    w = torch.ones(2)
    manager.save_sync(0, {"a": w, "b": w})
    live = torch.zeros(2)
    assert manager.load_into({"a": live, "b": live}).matched == ["a", "b"]
    assert live.tolist() == [1, 1]
    manager.save_sync(1, {"a": torch.ones(2), "b": torch.zeros(2)})
    report = manager.load_into({"a": live, "b": live})
    assert (report.matched, [row.field for row in report.mismatched]) == (["a"], ["value"])


def test_filled_tensors_may_overlap_no_other(manager):
    base = torch.zeros(3)
    manager.save_sync(0, {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(InvalidInputError, match="shares memory with"):
        manager.load_into({"a": base[:2], "b": base[1:]})


# Names


STRANGE = {
    "dots": {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
    "slashes": {
        "a/b": torch.tensor(3),
        "/": torch.tensor(4),
        "..": torch.tensor(5),
        "../../etc": torch.tensor(6),
    },
    "empty": {"": torch.tensor(7), "deep": {"": {"": torch.tensor(8)}}},
    "long": {"n" * 10_000: torch.tensor(9)},
    "unicode": {
        "é": torch.tensor(10),
        "e\u0301": torch.tensor(11),
        "名前": torch.tensor(12),
        "😀": torch.tensor(13),
    },
    "lines": {
        "a\nb": torch.tensor(14),
        "\0": torch.tensor(15),
        "\t": torch.tensor(16),
        " ": torch.tensor(17),
    },
    "ints": {7: torch.tensor(18), "7": torch.tensor(19), True: torch.tensor(20), "True": torch.tensor(21)},
    "tuples": {
        ("a", "b.c"): torch.tensor(22),
        '("a", "b.c")': torch.tensor(23),
        ("a", ("b",)): torch.tensor(24),
    },
    "quotes": {'"a"': torch.tensor(25), "a": torch.tensor(26), "'": torch.tensor(27), "\\": torch.tensor(28)},
    "others": {
        None: torch.tensor(29),
        "None": torch.tensor(30),
        1.5: torch.tensor(31),
        b"x": torch.tensor(32),
    },
    "reserved": {"_metadata": torch.tensor(33), "varvite.json": torch.tensor(34), "rng": torch.tensor(35)},
    "key(": {"key": torch.tensor(36), 'key("a")': torch.tensor(37)},
}


def test_strange_names_round_trip_and_never_meet(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save_sync(0, STRANGE)
        assert_same(dict(manager.load()), STRANGE)
        names = [entry.name for entry in manager.entries() if entry.rank is None]
        assert len(names) == len(set(names)) == 37
        for name in names:
            assert len(manager.load(names=[name])) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert len(list((tmp_path / "run" / "packs").iterdir())) == 1


def test_strange_names_of_objects(tmp_path):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("é\n", nn.Parameter(torch.ones(1)))
            self.add_module("a b", nn.Linear(1, 1))

    objects = {"a.b": Odd(), "ключ": {"w": torch.ones(1)}, "/": [torch.ones(1)]}
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(0, **objects)
        names = {entry.name for entry in manager.entries() if entry.rank is None}
        assert names == {'"a.b"."é\\n"', '"a.b".a b.weight', '"a.b".a b.bias', "ключ.w", "/.0"}
        live = Odd()
        manager.resume(**{"a.b": live, "ключ": {"w": torch.zeros(1)}, "/": [torch.zeros(1)]})
        assert_same(dict(live.state_dict()), dict(objects["a.b"].state_dict()))


def test_a_name_that_is_too_long_for_the_format_is_refused(manager):
    with pytest.raises(InvalidInputError, match=r"65536|65,536"):
        manager.save_sync(0, {"n" * 70_000: torch.ones(1)})
    manager.save_sync(0, {"v": 1})


KEYS = st.one_of(
    st.text(max_size=8),
    st.integers(),
    st.booleans(),
    st.none(),
    st.binary(max_size=3),
    st.tuples(st.text(max_size=3), st.integers(0, 3)),
)
LEAVES = st.one_of(
    st.integers(0, 255).map(lambda value: torch.full((2,), value, dtype=torch.uint8)),
    st.integers(0, 9).map(np.arange),
    st.none(),
    st.floats(),
    st.integers(),
    st.text(max_size=5),
)
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(KEYS, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=12,
)


def test_any_nest_round_trips_through_a_repository(tmp_path):
    with CheckpointManager(tmp_path, fsync=False) as manager:
        steps = iter(range(1000))

        @given(st.dictionaries(KEYS, NESTS, max_size=4))
        @settings(max_examples=40, deadline=None, database=None)
        def check(nest: dict[Any, Any]) -> None:
            step = next(steps)
            manager.save_sync(step, nest, rng=False)
            assert_same(dict(manager.load(step)), nest)
            names = [entry.name for entry in manager.entries(step)]
            assert len(names) == len(set(names))

        check()


def test_loading_alone_leaves_the_random_generators_where_they_are(manager):
    torch.manual_seed(1)
    manager.save_sync(0, w=torch.ones(2))
    torch.manual_seed(2)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    manager.load()
    manager.load(names=["w"])
    manager.load_into({"w": torch.zeros(2)})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
