"""The adapter for `torch.distributed.checkpoint` with real ranks over gloo."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from varvite import CheckpointManager
from varvite.distributed.dcp import VarviteReader, VarviteWriter
from varvite.errors import CheckpointError, CorruptionError, InvalidInputError, MismatchError

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
KINDS = ("fsdp", "hsdp", "tp", "fsdp and tp")
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


@pytest.fixture(autouse=True, scope="module")
def preloaded():
    ranks.preload(
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint.state_dict",
        "varvite.distributed.dcp",
    )


def causes(function, *arguments, **options):
    """Returns the errors that PyTorch wraps, by rank."""
    with pytest.raises(CheckpointException) as caught:
        function(*arguments, **options)
    return {rank: error for rank, (error, _stack) in caught.value.failures.items()}


# ---- parallel models ---------------------------------------------------------------------------


def build(kind):
    """Makes a model of uneven shapes in the given parallel form, with AdamW."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    size = dist.get_world_size() if dist.is_initialized() else 1
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards")))
    elif kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    elif kind == "fsdp and tp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def train(model, optimizer):
    """A step with gradients that need no pass through the model."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def state_of(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def full_state(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FULL)
    return {"model": dict(model_state), "optimizer": optimizer_state}


def packed(nest):
    """Returns a nest as bytes: a rank can't hand out tensors."""
    content = io.BytesIO()
    torch.save(nest, content)
    return content.getvalue()


def unpacked(content):
    return torch.load(io.BytesIO(content), weights_only=False)


def save_parallel(folder):
    saved = {}
    for kind in KINDS:
        model, optimizer = build(kind)
        train(model, optimizer)
        state = {**state_of(model, optimizer), "epoch": 4}
        dcp.save(state, storage_writer=VarviteWriter(folder / kind, step=3))
        saved[kind] = full_state(model, optimizer)
    return packed(saved)


def load_parallel(folder, target, kinds):
    loaded = {}
    for kind in kinds:
        model, optimizer = build(target)
        state = {**state_of(model, optimizer), "epoch": 0}
        dcp.load(state, storage_reader=VarviteReader(folder / kind))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loaded[kind] = {**full_state(model, optimizer), "epoch": state["epoch"]}
    return packed(loaded)


def test_any_parallel_form_loads_in_any_other(tmp_path):
    saved = unpacked(ranks.run(4, save_parallel, tmp_path)[0])
    for target, size, kinds in [("alone", 1, KINDS), ("fsdp", 3, KINDS), ("fsdp and tp", 4, ("fsdp", "tp"))]:
        loaded = unpacked(ranks.run(size, load_parallel, tmp_path, target, kinds)[0])
        for kind in kinds:
            assert_same(loaded[kind]["model"], saved[kind]["model"])
            assert_same(loaded[kind]["optimizer"]["state"], saved[kind]["optimizer"]["state"])
            assert loaded[kind]["optimizer"]["param_groups"][0]["lr"] == 0.1
            assert loaded[kind]["epoch"] == 4
    for kind in KINDS:
        with CheckpointManager(tmp_path / kind, read_only=True) as manager:
            expected = {f"model.{name}": saved[kind]["model"][name] for name in NAMES}
            assert_same(dict(manager.load(names=list(expected))), expected)
            assert (manager.info().world_size, manager.info().step) == (4, 3)
            assert manager.verify().ok
            raw_bytes = sum(entry.raw_bytes for entry in manager.entries())
            assert raw_bytes == 3 * 4 * (5 * 8 + 8 + 8 * 3 + 3) + 4 * len(NAMES)  # each replica once


# ---- what is written once, and by whom ---------------------------------------------------------


def save_shares(folder):
    mesh = init_device_mesh("cpu", (3,))
    full = torch.arange(7.0 * 2).reshape(7, 2)
    state = {
        "uneven": distribute_tensor(full, mesh, [Shard(0)]),
        "some have none": distribute_tensor(full[:2], mesh, [Shard(0)]),
        "replicated": distribute_tensor(full, mesh, [Replicate()]),
        "plain": full.clone(),
        "single": distribute_tensor(torch.tensor([5.0]), mesh, [Shard(0)]),
        "scalar": torch.tensor(2.5),
        "word": "same",
    }
    metadata = dcp.save(state, storage_writer=VarviteWriter(folder))
    theirs = dcp.save(state, storage_writer=dcp.FileSystemWriter(folder.with_name("theirs")))
    assert metadata.state_dict_metadata == theirs.state_dict_metadata
    dcp.save({"alone": torch.ones(2)}, storage_writer=VarviteWriter(folder, step=1))


def test_ranks_write_their_shares_and_each_a_pack(tmp_path):
    folder = tmp_path / "ours"
    ranks.run(3, save_shares, folder)
    full = torch.arange(14.0).reshape(7, 2)
    expected = {
        "uneven": full,
        "some have none": full[:2],
        "replicated": full,
        "plain": full,
        "single": torch.tensor([5.0]),
        "scalar": torch.tensor(2.5),
        "word": "same",
    }
    with CheckpointManager(folder, read_only=True) as manager:
        found = manager.load(0)
        assert_same({name: found[name] for name in expected}, expected)
        assert len(found) == len(expected)
        assert manager.load(1)["alone"].tolist() == [1, 1]
    assert len(list((folder / "packs").iterdir())) == 6
    ours = VarviteReader(folder, 0).read_metadata()
    theirs = dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    assert ours.planner_data == theirs.planner_data
    for name, one in theirs.state_dict_metadata.items():
        other = ours.state_dict_metadata[name]
        assert type(one) is type(other)
        if name not in ("word", "some have none", "single"):  # PyTorch lists shards without elements too
            key = lambda chunk: tuple(chunk.offsets)  # noqa: E731
            assert sorted(one.chunks, key=key) == sorted(other.chunks, key=key)
            assert (one.size, one.properties) == (other.size, other.properties)


# ---- many saves --------------------------------------------------------------------------------


def save_with_cached_plans(folder):
    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2, 3):
        rows = torch.full((5, 2), float(step))
        state = {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "plain": rows.clone(), "step": step}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=VarviteWriter(folder, step=step), planner=planner)


def test_cached_plans_write_the_state_of_now(tmp_path):
    ranks.run(2, save_with_cached_plans, tmp_path)
    with CheckpointManager(tmp_path, read_only=True) as manager:
        assert [info.step for info in manager.snapshots()] == [1, 2, 3]
        for step in (1, 2, 3):
            found = manager.load(step)
            assert (found["rows"].unique().tolist(), found["rows"].shape) == ([step], (5, 2))
            assert (found["plain"].unique().tolist(), found["step"]) == ([step], step)


def save_async(folder):
    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2):
        rows = distribute_tensor(torch.full((4, 2), float(step)), mesh, [Shard(0)])
        state = {"rows": rows, "step": step}
        future = dcp.async_save(state, storage_writer=VarviteWriter(folder, step=step))
        state["step"] = 0
        rows.to_local().zero_()
        future.result(100)
    loaded = {"rows": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(1)]), "step": 0}
    dcp.load(loaded, storage_reader=VarviteReader(folder))
    return loaded["rows"].full_tensor().unique().tolist(), loaded["step"]


def test_async_saves_in_threads(tmp_path):
    """Those in a process of their own are among the scenarios of PyTorch's tests."""
    assert ranks.run(2, save_async, tmp_path) == [([2], 2)] * 2
    with CheckpointManager(tmp_path, read_only=True) as manager:
        assert [info.step for info in manager.snapshots()] == [1, 2]


# ---- one decision ------------------------------------------------------------------------------


def load_with_other_references(folder):
    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2):
        rows = distribute_tensor(torch.full((4, 2), float(step)), mesh, [Shard(0)])
        dcp.save({"rows": rows, "step": step}, storage_writer=VarviteWriter(folder, step=step))
    state = {"rows": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(1)]), "step": 0}
    reader = VarviteReader(folder, 2 - dist.get_rank())  # rank 1 sees an older one as its choice
    dcp.load(state, storage_reader=reader)
    return state["rows"].full_tensor().unique().tolist(), state["step"], reader.snapshot.step


def test_all_ranks_read_what_the_coordinator_chose(tmp_path):
    assert ranks.run(2, load_with_other_references, tmp_path) == [([2], 2, 2)] * 2


# ---- failures ----------------------------------------------------------------------------------


class Failing(DefaultSavePlanner):
    """Fails on one rank, where it is told to."""

    def __init__(self, number, place):
        super().__init__()
        self.place = place if dist.get_rank() == number else None

    def create_local_plan(self):
        self.fail("plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan):
        self.fail("finish")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item):
        self.fail("resolve")
        return super().resolve_data(write_item)

    def fail(self, place):
        if self.place == place:
            raise OSError(28, "no space")


class Casting(DefaultSavePlanner):
    """Gives another dtype on rank 1."""

    def resolve_data(self, write_item):
        value = super().resolve_data(write_item)
        return value.double() if dist.get_rank() == 1 else value


def fail_everywhere(folder):
    mesh = init_device_mesh("cpu", (3,))
    rows = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    heard = {}
    for number in range(3):
        for place in ("plan", "resolve", "finish"):
            planner = Failing(number, place)
            writer = VarviteWriter(folder)
            errors = causes(dcp.save, {"rows": rows}, storage_writer=writer, planner=planner)
            heard[number, place] = {rank: (type(one), str(one)) for rank, one in errors.items()}
            with CheckpointManager(folder, read_only=True, rank=0, world_size=1) as manager:
                assert manager.snapshots() == []
    errors = causes(dcp.save, {"rows": rows}, storage_writer=VarviteWriter(folder), planner=Casting())
    heard["commit"] = {rank: (type(one), one.name) for rank, one in errors.items()}
    dist.barrier()
    heard["packs"] = len(list((folder / "packs").iterdir()))
    dist.barrier()
    dcp.save({"rows": rows}, storage_writer=VarviteWriter(folder, step=9))
    return heard


def test_the_failure_of_any_rank_reaches_all_and_the_next_save_works(tmp_path):
    (tmp_path / "varvite").mkdir()
    folder = tmp_path / "varvite"
    CheckpointManager(folder).close()
    by_rank = ranks.run(3, fail_everywhere, folder)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    for number in range(3):
        told = f"rank {number} failed in `dcp.save`: OSError: [Errno 28] no space"
        assert by_rank[0][number, "resolve"] == {0: (CheckpointError, told)}
        for place in ("plan", "finish"):
            assert by_rank[0][number, place] == {number: (OSError, "[Errno 28] no space")}
    assert by_rank[0]["commit"] == {0: (MismatchError, "rows")}
    assert by_rank[0]["packs"] == 0  # what was written of saves that failed is gone
    with CheckpointManager(folder, read_only=True) as manager:
        assert [info.step for info in manager.snapshots()] == [9]


def damage_on_one_rank(folder):
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(40_000.0).reshape(2, -1)
    state = {"rows": distribute_tensor(rows, mesh, [Shard(0)])}
    dcp.save(state, storage_writer=VarviteWriter(folder, compression="none"))
    if dist.get_rank() == 0:
        (pack,) = folder.glob("packs/*-r1-*")
        content = bytearray(pack.read_bytes())
        content[content.index(rows[1].numpy().tobytes()) + 1000] ^= 1
        pack.chmod(0o644)
        pack.write_bytes(content)
    dist.barrier()
    errors = causes(dcp.load, state, storage_reader=VarviteReader(folder))
    return {rank: type(error) for rank, error in errors.items()}


def test_damage_that_one_rank_meets_reaches_all(tmp_path):
    assert ranks.run(2, damage_on_one_rank, tmp_path) == [{1: CorruptionError}] * 2


def without_collectives(folder):
    with pytest.raises(InvalidInputError, match="use_collectives=False"):
        dcp.save({"n": 1}, storage_writer=VarviteWriter(folder), use_collectives=False)
    return Path(folder).exists()


def test_without_collectives_several_ranks_are_refused(tmp_path):
    assert ranks.run(2, without_collectives, tmp_path / "none") == [False, False]


def dies_before_its_pack(folder):
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    dcp.save({"rows": rows}, storage_writer=VarviteWriter(folder, step=1))
    planner = Waiting()
    dcp.save({"rows": rows}, storage_writer=VarviteWriter(folder, step=2), planner=planner)


class Waiting(DefaultSavePlanner):
    def resolve_data(self, write_item):
        ranks.at("resolve")
        return super().resolve_data(write_item)


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_dies_leaves_the_snapshots_before_it(tmp_path, number):
    with ranks.start(2, dies_before_its_pack, tmp_path) as group:
        group.wait_for("resolve")
        group.kill(number)
        outcomes = group.outcomes()
    assert outcomes[number].exit_code == -9
    assert outcomes[1 - number].error is not None
    with CheckpointManager(tmp_path) as manager:
        assert [info.step for info in manager.snapshots()] == [1]
