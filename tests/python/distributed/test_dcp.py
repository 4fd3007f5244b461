"""The adapter for `torch.distributed.checkpoint` in one process; several ranks have `test_dcp_ranks.py`."""

from __future__ import annotations

import io
import pickle
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import assert_same, copy_of, raw_bytes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from varvite import CheckpointManager, keep
from varvite.distributed.dcp import VarviteReader, VarviteWriter
from varvite.distributed.dcp.description import read_description
from varvite.distributed.dcp.identifiers import reference_of, step_of
from varvite.errors import (
    CheckpointError,
    CorruptionError,
    InvalidInputError,
    MismatchError,
    RepositoryLockedError,
    SnapshotNotFoundError,
    UnsupportedFormatError,
)
from varvite.objects import SavedObject

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:TypedStorage is deprecated",
    "ignore:.*deprecated:FutureWarning",
)


def save(state, writer, **options):
    return dcp.save(state, storage_writer=writer, no_dist=True, **options)


def load(state, reader, **options):
    dcp.load(state, storage_reader=reader, no_dist=True, **options)
    return state


def cause_of(function, *arguments, **options):
    """Returns the error of Varvite that PyTorch wraps."""
    with pytest.raises(CheckpointException) as caught:
        function(*arguments, **options)
    ((error, _stack),) = caught.value.failures.values()
    return error


def steps_in(folder):
    with CheckpointManager(folder, read_only=True) as manager:
        return [info.step for info in manager.snapshots()]


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    return {
        "model": OrderedDict(
            [
                ("layers.0.weight", rand(64, 33)),
                ("layers.0.bias", rand(64).bfloat16()),
                ("scalar", torch.tensor(float(seed))),
                ("empty", torch.empty(0, 4)),
                ("flag", torch.tensor([True, False, True])),
                ("odd name.(x)", rand(2)),
                ("transposed", rand(6, 5).t()),
                ("view", rand(10, 10)[2:5, 3:9]),
                ("ids", torch.arange(7) + seed),
                ("complex", torch.complex(rand(3), rand(3))),
            ]
        ),
        "optimizer": {
            "state": {"layers.0.weight": {"exp_avg": rand(64, 33), "step": torch.tensor(3.0 + seed)}},
            "param_groups": [
                {"lr": 0.1 + seed, "betas": (0.9, 0.99), "params": ["layers.0.weight"], "foreach": None},
                {"lr": float("inf"), "tensors": [rand(2), rand(3)]},
            ],
        },
        "epoch": 3 + seed,
        "name": "größer",
        "sets": {1, 2},
        "raw": b"\x00\xff",
        "dtype": torch.bfloat16,
        "array": np.arange(4, dtype=np.float32) + seed,
        "pair": (rand(3), seed),
        "big": 1 << 80,
    }


def emptied(nest):
    """Returns a nest of the same form with other values."""
    if isinstance(nest, torch.Tensor):
        return torch.zeros_like(nest)
    if isinstance(nest, dict):
        return type(nest)((key, emptied(value)) for key, value in nest.items())
    if isinstance(nest, list):
        return [emptied(item) for item in nest]
    return None


# ---- round trips -------------------------------------------------------------------------------


def test_a_nested_state_comes_back_bit_for_bit(tmp_path):
    state = make_state()
    save(state, VarviteWriter(tmp_path, step=7))
    found = load(emptied(state), VarviteReader(tmp_path))
    assert_same(found, state)


def test_metadata_is_what_pytorch_itself_stores(tmp_path):
    state = make_state()
    save(state, VarviteWriter(tmp_path / "ours", step=7))
    save(state, dcp.FileSystemWriter(tmp_path / "theirs"))
    ours = VarviteReader(tmp_path / "ours").read_metadata()
    theirs = dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)


def test_without_a_process_group_and_without_no_dist(tmp_path):
    dcp.save({"w": torch.ones(3)}, storage_writer=VarviteWriter(tmp_path))
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=VarviteReader(tmp_path))
    assert state["w"].tolist() == [1, 1, 1]


def test_an_empty_state(tmp_path):
    save({}, VarviteWriter(tmp_path))
    assert load({}, VarviteReader(tmp_path)) == {}


def test_planners_that_do_not_flatten(tmp_path):
    state = {"w": torch.arange(3), "groups": [{"lr": 0.1}]}
    save(state, VarviteWriter(tmp_path), planner=DefaultSavePlanner(False, False))
    assert VarviteReader(tmp_path).read_metadata().planner_data is None
    fresh = {"w": torch.zeros(3, dtype=torch.int64), "groups": None}
    load(fresh, VarviteReader(tmp_path), planner=DefaultLoadPlanner(False, False))
    assert_same(fresh, state)


def test_keys_alone_rebuild_the_nest(tmp_path):
    state = make_state()
    save(state, VarviteWriter(tmp_path))
    found = _load_state_dict_from_keys(
        {"optimizer.param_groups", "model"}, storage_reader=VarviteReader(tmp_path)
    )
    assert_same(dict(found["model"]), dict(state["model"]))
    assert_same(found["optimizer"]["param_groups"], state["optimizer"]["param_groups"])
    assert "state" not in found["optimizer"]


def test_files_in_memory_keep_content_and_position(tmp_path):
    file = io.BytesIO(b"some bytes")
    file.seek(5)
    save({"file": file, "none": io.BytesIO()}, VarviteWriter(tmp_path))
    found = load({"file": None, "none": None}, VarviteReader(tmp_path))
    assert (found["file"].read(), found["file"].getvalue(), found["none"].read()) == (
        b"bytes",
        b"some bytes",
        b"",
    )


def test_a_rank_is_read_by_ranges_alone(tmp_path):
    rows = torch.arange(4 * 4096, dtype=torch.int32).reshape(4096, 4)
    save({"rows": rows}, VarviteWriter(tmp_path, chunk_bytes=4096))

    if not hasattr(dcp, "CheckpointableTensor"):
        pytest.skip("this torch has no CheckpointableTensor")
    local = torch.zeros(10, 4, dtype=torch.int32)
    local.global_shape, local.global_offsets = (4096, 4), ((1000, 0),)
    local.local_offsets, local.local_sizes = ((0, 0),), ((10, 4),)
    reader = VarviteReader(tmp_path)
    load({"rows": local}, reader)
    assert torch.equal(torch.as_tensor(local), rows[1000:1010])
    assert reader.verified_bytes == 4096


# ---- what others see of it ---------------------------------------------------------------------


def test_a_manager_reads_names_and_values(tmp_path):
    state = make_state()
    save(state, VarviteWriter(tmp_path, step=7, metrics={"loss": 0.5}, metadata={"who": "me"}))
    with CheckpointManager(tmp_path) as manager:
        (info,) = manager.snapshots()
        assert (info.step, info.world_size, info.metrics, info.metadata) == (
            7,
            1,
            {"loss": 0.5},
            {"who": "me"},
        )
        found = manager.load()
        assert set(found) == set(VarviteReader(tmp_path).read_metadata().state_dict_metadata)
        assert_same(found["model.layers.0.weight"], state["model"]["layers.0.weight"])
        assert_same(found["optimizer.param_groups.0.betas"], (0.9, 0.99))
        assert_same(found["pair"], state["pair"])
        assert found["epoch"] == 3
        assert set(manager.load(names=["model.layers.*"])) == {
            "model.layers.0.weight",
            "model.layers.0.bias",
        }
        assert manager.verify().ok
        assert {entry.name for entry in manager.entries() if entry.rank is not None} == set()
        manager.load_into({"model.scalar": torch.ones(())})


def test_a_snapshot_of_a_manager_is_read_by_the_names_of_its_nest(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(5, {"epoch": 9, "lists": [1, [2, torch.ones(2)]]}, model=model, optimizer=optimizer)
    fresh = {
        "model": emptied(model.state_dict()),
        "optimizer": {"state": {"0.weight": {"exp_avg": torch.zeros(3, 4)}}, "param_groups": [{"lr": 0.0}]},
        "epoch": 0,
        "lists": [0, [0, torch.zeros(2)]],
    }
    load(fresh, VarviteReader(tmp_path, "step:5"))
    assert_same(dict(fresh["model"]), dict(model.state_dict()))
    exp_avg = optimizer.state[model[0].weight]["exp_avg"]
    assert_same(fresh["optimizer"]["state"]["0.weight"]["exp_avg"], exp_avg)
    assert fresh["optimizer"]["param_groups"] == [{"lr": 0.25}]
    assert (fresh["epoch"], fresh["lists"][0], fresh["lists"][1][1].tolist()) == (9, 1, [1, 1])


def test_saves_of_one_process_follow_one_another(tmp_path):
    for step in (1, 2):
        save({"w": torch.full((1 << 18,), 1.0), "n": torch.tensor(step)}, VarviteWriter(tmp_path, step=step))
    with CheckpointManager(tmp_path, read_only=True) as manager:
        first, second = manager.snapshots()
    assert (first.parent, second.parent) == (None, first.seq)
    assert second.stored_bytes - first.stored_bytes < 1 << 18  # `w` was not written again


def test_a_save_after_a_load_has_the_loaded_one_as_its_parent(tmp_path):
    for step in (1, 2):
        save({"w": torch.full((2,), step)}, VarviteWriter(tmp_path, step=step))
    state = load({"w": torch.zeros(2, dtype=torch.int64)}, VarviteReader(tmp_path, 1))
    writer = VarviteWriter(tmp_path, step=2)
    save(state, writer)
    assert (writer.snapshot.seq, writer.snapshot.parent) == (3, 1)


# ---- values that are no plain data -------------------------------------------------------------


class Foreign:
    """No plain value; unpickling it is seen."""

    unpickled = 0

    def __init__(self, value):
        self.value = value

    def __setstate__(self, state):
        Foreign.unpickled += 1
        self.__dict__.update(state)


def test_what_has_no_typed_form_is_refused_by_name(tmp_path):
    error = cause_of(save, {"w": torch.ones(2), "deep": {"thing": Foreign(1)}}, VarviteWriter(tmp_path))
    assert isinstance(error, InvalidInputError)
    assert (error.name, error.rank) == ("deep.thing", 0)
    assert "allow_pickle=True" in error.hint
    assert steps_in(tmp_path) == []


def test_pickles_are_stored_and_read_only_where_both_sides_say_so(tmp_path):
    state = {"thing": Foreign(5), "plain": [1]}
    save(state, VarviteWriter(tmp_path, allow_pickle=True))
    Foreign.unpickled = 0
    error = cause_of(load, {"thing": None, "plain": None}, VarviteReader(tmp_path))
    assert (type(error), error.what) == (InvalidInputError, "thing")
    assert load({"plain": None}, VarviteReader(tmp_path)) == {"plain": [1]}
    assert Foreign.unpickled == 0
    found = load({"thing": None, "plain": None}, VarviteReader(tmp_path, allow_pickle=True))
    assert (found["thing"].value, found["plain"], Foreign.unpickled) == (5, [1], 1)


class Doubling(DefaultSavePlanner):
    def transform_object(self, write_item, object):  # noqa: A002 - the name PyTorch has
        return super().transform_object(write_item, object * 2)


class OwnBytes(DefaultSavePlanner):
    def transform_object(self, write_item, object):  # noqa: A002 - the name PyTorch has
        return io.BytesIO(b"own" + object)


class OwnBytesBack(DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        self.state_dict[read_item.dest_index.fqn] = self.original_state_dict["own"] = value.getvalue()[3:]


def test_what_a_planner_makes_of_values_is_what_is_saved(tmp_path):
    save({"w": torch.ones(2), "n": 4}, VarviteWriter(tmp_path), planner=Doubling())
    assert_same(
        load({"w": torch.zeros(2), "n": 0}, VarviteReader(tmp_path)), {"w": torch.ones(2) * 2, "n": 8}
    )


def test_bytes_of_a_planner_need_a_word(tmp_path):
    error = cause_of(save, {"own": b"!"}, VarviteWriter(tmp_path), planner=OwnBytes())
    assert (type(error), error.name) == (InvalidInputError, "own")
    save({"own": b"!"}, VarviteWriter(tmp_path, allow_pickle=True), planner=OwnBytes())
    found = load({"own": b""}, VarviteReader(tmp_path, allow_pickle=True), planner=OwnBytesBack())
    assert found == {"own": b"!"}


# ---- steps and references ----------------------------------------------------------------------


def test_ids_say_steps(tmp_path):
    writer = VarviteWriter(tmp_path)
    for given in ("step-10", "20", tmp_path / "step_30", tmp_path):
        save({"n": 0}, writer, checkpoint_id=given)
    assert steps_in(tmp_path) == [10, 20, 30, 31]
    save({"n": 1}, VarviteWriter(tmp_path, step=5))
    save({"n": 2}, VarviteWriter(tmp_path))
    assert steps_in(tmp_path) == [10, 20, 30, 31, 5, 6]
    assert load({"n": None}, VarviteReader(tmp_path), checkpoint_id="step-5") == {"n": 1}
    assert load({"n": None}, VarviteReader(tmp_path, 5), checkpoint_id="latest") == {"n": 2}
    assert load({"n": None}, VarviteReader(tmp_path, 5), checkpoint_id=tmp_path) == {"n": 1}


@pytest.mark.parametrize("given", ["2026-11-30", "s3://bucket/step-1", "/elsewhere/step-1", "final", ""])
def test_ids_that_say_no_step(tmp_path, given):
    with pytest.raises(InvalidInputError, match="invalid checkpoint_id") as caught:
        step_of(given, tmp_path)
    assert caught.value.what == "checkpoint_id"
    assert not VarviteWriter.validate_checkpoint_id(given)
    with pytest.raises(InvalidInputError, match="invalid checkpoint_id"):
        reference_of(given, tmp_path)


def test_an_id_against_the_step_of_the_writer(tmp_path):
    writer = VarviteWriter(tmp_path, step=5)
    with pytest.raises(InvalidInputError, match="made for step 5"):
        save({"n": 0}, writer, checkpoint_id="step-6")
    save({"n": 0}, writer, checkpoint_id="step-5")
    assert writer.snapshot.step == 5


def test_arguments_are_checked_at_once(tmp_path):
    with pytest.raises(InvalidInputError, match="invalid step"):
        VarviteWriter(tmp_path, step=-1)
    with pytest.raises(InvalidInputError, match="invalid compression"):
        VarviteWriter(tmp_path, compression="zip")
    with pytest.raises(InvalidInputError, match="invalid metric"):
        VarviteWriter(tmp_path, metrics={"loss": "low"})
    with pytest.raises(InvalidInputError, match="invalid reference"):
        VarviteReader(tmp_path, 1.5)
    assert list(tmp_path.iterdir()) == []


def test_no_snapshot(tmp_path):
    error = cause_of(load, {"n": 0}, VarviteReader(tmp_path / "none"))
    assert "none" in str(error)
    with pytest.raises(SnapshotNotFoundError):
        VarviteReader(tmp_path / "none").read_metadata()


# ---- dtypes, ties, shapes ----------------------------------------------------------------------


def test_values_are_widened_and_not_rounded(tmp_path):
    save({"w": torch.tensor([1.0, 1.001])}, VarviteWriter(tmp_path))
    error = cause_of(load, {"w": torch.zeros(2, dtype=torch.bfloat16)}, VarviteReader(tmp_path))
    assert isinstance(error, MismatchError)
    assert (error.name, error.field, error.expected, error.found) == ("w", "dtype", "bfloat16", "float32")
    found = load({"w": torch.zeros(2, dtype=torch.float64)}, VarviteReader(tmp_path))
    assert found["w"].tolist() == torch.tensor([1.0, 1.001]).double().tolist()
    found = load({"w": torch.zeros(2, dtype=torch.bfloat16)}, VarviteReader(tmp_path, allow_narrowing=True))
    assert found["w"].tolist() == [1.0, 1.0]


def test_a_tie_is_filled_through_both_names(tmp_path):
    tied = torch.arange(6.0)
    save({"a": tied, "b": tied, "c": tied[2:4]}, VarviteWriter(tmp_path))
    live = torch.zeros(6)
    load({"a": live, "b": live, "c": live[2:4]}, VarviteReader(tmp_path))
    assert live.tolist() == tied.tolist()


def test_targets_that_are_not_dense(tmp_path):
    save({"w": torch.arange(12.0).reshape(3, 4)}, VarviteWriter(tmp_path))
    live = torch.zeros(4, 3)
    parameter = torch.nn.Parameter(live.t())
    load({"w": parameter}, VarviteReader(tmp_path))
    assert live.t().tolist() == torch.arange(12.0).reshape(3, 4).tolist()


def test_narrower_storage(tmp_path):
    save({"w": torch.tensor([1.001]), "n": torch.tensor([7])}, VarviteWriter(tmp_path, save_dtype="bf16"))
    found = load({"w": torch.zeros(1), "n": torch.zeros(1, dtype=torch.int64)}, VarviteReader(tmp_path))
    assert (found["w"].tolist(), found["n"].tolist()) == ([1.0], [7])


# ---- failures ----------------------------------------------------------------------------------


class Failing(DefaultSavePlanner):
    """Fails where it is told to."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def resolve_data(self, write_item):
        if self.place == "resolve":
            raise RuntimeError("no such thing")
        return super().resolve_data(write_item)

    def finish_plan(self, new_plan):
        if self.place == "finish":
            raise RuntimeError("no such plan")
        return super().finish_plan(new_plan)


def test_a_failure_of_a_rank_is_told_with_rank_and_cause(tmp_path):
    writer = VarviteWriter(tmp_path)
    error = cause_of(save, {"w": torch.ones(2)}, writer, planner=Failing("resolve"))
    assert (type(error), error.rank) == (CheckpointError, 0)
    assert error.message == "rank 0 failed in `dcp.save`: RuntimeError: no such thing"
    assert (steps_in(tmp_path), writer.snapshot) == ([], None)
    with CheckpointManager(tmp_path) as manager:  # the lock is free
        assert manager.snapshots() == []
    save({"w": torch.ones(2)}, writer)
    assert steps_in(tmp_path) == [0]


def test_several_regions_of_a_rank_are_refused_by_name(tmp_path):
    tensor = torch.arange(8.0).reshape(4, 2)
    tensor.global_shape, tensor.global_offsets = (6, 2), ((0, 0), (4, 0))
    tensor.local_offsets, tensor.local_sizes = ((0, 0), (2, 0)), ((2, 2), (2, 2))
    if not hasattr(dcp, "CheckpointableTensor"):
        pytest.skip("this torch has no CheckpointableTensor")
    error = cause_of(save, {"w": tensor}, VarviteWriter(tmp_path))
    assert (type(error), error.name, error.reason) == (
        InvalidInputError,
        "w",
        "this rank holds several separate regions of it",
    )


def test_a_session_that_was_left_behind_is_ended_by_the_next_save(tmp_path):
    error = cause_of(save, {"w": torch.ones(2)}, VarviteWriter(tmp_path), planner=Failing("finish"))
    assert str(error) == "no such plan"
    with pytest.raises(RepositoryLockedError):
        CheckpointManager(tmp_path)
    save({"w": torch.ones(2)}, VarviteWriter(tmp_path, step=4))
    thread = threading.Thread(
        target=cause_of,
        args=(save, {"w": torch.ones(2)}, VarviteWriter(tmp_path)),
        kwargs={"planner": Failing("finish")},
    )
    thread.start()
    thread.join()
    save({"w": torch.ones(2)}, VarviteWriter(tmp_path, step=5))
    assert steps_in(tmp_path) == [4, 5]
    CheckpointManager(tmp_path).close()


def test_retention_takes_what_this_process_saved_itself_but_not_what_it_began_from(tmp_path):
    for step in range(3):
        save({"n": step}, VarviteWriter(tmp_path, step=step, keep=keep.last(1)))
    assert steps_in(tmp_path) == [2]
    load({"n": 0}, VarviteReader(tmp_path))
    for step in (3, 4):
        save({"n": step}, VarviteWriter(tmp_path, step=step, keep=keep.last(1)))
    assert steps_in(tmp_path) == [4]


def test_a_manager_that_writes_here_keeps_a_save_out(tmp_path):
    with CheckpointManager(tmp_path):
        assert isinstance(cause_of(save, {"n": 1}, VarviteWriter(tmp_path)), RepositoryLockedError)
    save({"n": 1}, VarviteWriter(tmp_path))
    assert steps_in(tmp_path) == [0]


def test_damage_is_found_before_it_reaches_a_tensor(tmp_path):
    state = {"w": torch.rand(1000)}
    save(state, VarviteWriter(tmp_path, compression="none"))
    (pack,) = Path(tmp_path, "packs").iterdir()
    content = bytearray(pack.read_bytes())
    content[content.index(raw_bytes(state["w"])) + 100] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(content)
    error = cause_of(load, {"w": torch.zeros(1000)}, VarviteReader(tmp_path))
    assert isinstance(error, CorruptionError)


def test_without_collectives_alone(tmp_path):
    save({"n": 1}, VarviteWriter(tmp_path), use_collectives=False)
    assert load({"n": 0}, VarviteReader(tmp_path)) == {"n": 1}


# ---- many saves --------------------------------------------------------------------------------


def test_cached_plans_write_the_state_of_now(tmp_path):
    DefaultSavePlanner._cached_save_plan.clear()
    for step in (1, 2, 3):
        state = {"w": torch.full((3,), float(step)), "n": step}
        save(state, VarviteWriter(tmp_path, step=step), planner=DefaultSavePlanner(enable_plan_caching=True))
    assert steps_in(tmp_path) == [1, 2, 3]
    for step in (1, 2, 3):
        found = load({"w": torch.zeros(3), "n": 0}, VarviteReader(tmp_path, step))
        assert_same(found, {"w": torch.full((3,), float(step)), "n": step})


def test_async_saves_in_threads_wait_for_one_another(tmp_path):
    state = {"w": torch.zeros(100_000), "n": 0}
    futures = []
    for step in range(4):
        state["w"].fill_(step)
        state["n"] = step
        writer = VarviteWriter(tmp_path, step=step)
        futures.append(dcp.async_save(state, storage_writer=writer, no_dist=True))
    for future in futures:
        future.result(60)
    assert sorted(steps_in(tmp_path)) == [0, 1, 2, 3]
    for step in range(4):
        found = load({"w": torch.ones(100_000), "n": None}, VarviteReader(tmp_path, step))
        assert (found["n"], found["w"].unique().tolist()) == (step, [step])


def test_a_writer_pickles_before_and_after_a_save(tmp_path):
    writer = pickle.loads(pickle.dumps(VarviteWriter(tmp_path, step=1, metrics={"loss": 1})))
    save({"n": 1}, writer)
    again = pickle.loads(pickle.dumps(writer))
    save({"n": 2}, again)
    assert load({"n": 0}, VarviteReader(tmp_path)) == {"n": 2}
    assert again.snapshot.metrics == {"loss": 1.0}


def test_a_state_is_not_changed_by_its_save(tmp_path):
    state = make_state()
    before = copy_of(state["model"])
    save(state, VarviteWriter(tmp_path))
    assert_same(state["model"], before)


# ---- what a stranger may have written ----------------------------------------------------------


class Told:
    """Stands for a snapshot in which one rank told this."""

    def __init__(self, **told):
        nodes = [[key, node] for key, node in {"version": 1, **told}.items()]
        self.reader = self
        self.header = {"seq": 1}
        self.objects = {"varvite.dcp": SavedObject("nest", {"dict": nodes})}

    def rank_structures(self):
        return {0: "of the rank"}

    def rank_objects(self, rank):
        return self.objects


@pytest.mark.parametrize(
    "told",
    [
        {"paths": {"dict": [["w", [1 << 30]]]}},
        {"paths": {"dict": [["w", [-1]]]}},
        {"paths": {"dict": [["w", []]]}},
        {"paths": {"dict": [["w", "w"]]}},
        {"paths": {"dict": [[7, ["w"]]]}},
        {"paths": [["w", ["w"]]]},
        {"properties": {"dict": [["w", [False, False, 3, None]]]}},
        {"properties": {"dict": [["w", [False, False, 0, [-1]]]]}},
        {"properties": {"dict": [["w", [0, False, 0, None]]]}},
        {"pickled": [1]},
        {"pickled": "w"},
        {"files": {"dict": [["w", -1]]}},
        {"files": {"dict": [["w", True]]}},
        {"files": {"dict": [["w"]]}},
        {"planner_data": {"tensor": "w"}},
        {"planner_data": {"enum": ["os.system", "x"], "dict": []}},
    ],
)
def test_a_description_that_no_writer_tells_is_damage(told):
    with pytest.raises(CorruptionError):
        read_description(Told(**told))


def test_a_newer_description_is_refused():
    with pytest.raises(
        UnsupportedFormatError, match="description of a distributed checkpoint in snapshot 1: 2"
    ):
        read_description(Told(version=2))
