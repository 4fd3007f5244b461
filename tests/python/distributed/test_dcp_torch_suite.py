"""The scenarios of PyTorch's own tests of storage for `torch.distributed.checkpoint`, with our storage.

Named after PyTorch's files and tests (`test/distributed/checkpoint/` of its repository), and written anew for
ranks on CPU and gloo. Those of one number of ranks share their processes: each is a function, and a test asks
how it ended. What is not here tests planners, staging or other storages, and has no storage to put in place.
"""

from __future__ import annotations

import io
import traceback
import warnings
from concurrent.futures import Future

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
)
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, _save_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

from varvite.distributed.dcp import VarviteReader, VarviteWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:.*:FutureWarning")

SCENARIOS = {1: [], 2: [], 4: []}


def on(size):
    """Has a function run on so many ranks, with a folder of its own."""

    def register(scenario):
        SCENARIOS[size].append(scenario.__name__)
        return scenario

    return register


def save(state, folder, **options):
    dcp.save(state, storage_writer=VarviteWriter(folder), **options)


def load(state, folder, **options):
    dcp.load(state, storage_reader=VarviteReader(folder), **options)
    return state


# ---- test_file_system_checkpoint_cpu.py --------------------------------------------------------


class Blob(Stateful):
    def __init__(self, value):
        self.state = {"blob": value}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = state_dict


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 5), torch.nn.Linear(5, 1)
        self.embedding = torch.nn.EmbeddingBag(5, 10)


@on(1)
def read_write_only_tensor(folder):
    saved, other = Model().state_dict(), Model().state_dict()
    save(saved, folder, no_dist=True)
    load(other, folder, no_dist=True)
    assert all(torch.equal(saved[name], other[name]) for name in saved)


@on(1)
def read_write_tensor_and_blob(folder):
    saved, other = Model().state_dict(), Model().state_dict()
    save({**saved, "blob": Blob(b"some blob")}, folder)
    blob = Blob(b"")
    load({**other, "blob": blob}, folder)
    assert all(torch.equal(saved[name], other[name]) for name in saved)
    assert blob.state == {"blob": b"some blob"}


def halves(dim=0):
    return ChunkShardingSpec(dim=dim, placements=["rank:0/cpu", "rank:1/cpu"])


def pieces(*rows):
    """A spec of (first, count, rank) of rows of 20."""
    return EnumerableShardingSpec(
        [
            ShardMetadata(shard_offsets=[start, 0], shard_sizes=[count, 20], placement=f"rank:{rank}/cpu")
            for start, count, rank in rows
        ]
    )


def gathered(tensor):
    result = torch.zeros(tensor.size()) if dist.get_rank() == 0 else None
    tensor.gather(out=result)
    return result


def filled(spec, *shape):
    """Makes a sharded tensor whose elements all differ."""
    tensor = sharded_tensor.zeros(spec, *shape)
    for number, shard in enumerate(tensor.local_shards()):
        values = torch.arange(float(shard.tensor.numel())).reshape(shard.tensor.shape)
        shard.tensor.copy_(values + 1000 * dist.get_rank() + 10_000 * number)
    return tensor


def reshard(folder, before, after):
    saved, other = filled(before, 10, 20), sharded_tensor.zeros(after, 10, 20)
    save({"sharded": saved}, folder)
    load({"sharded": other}, folder)
    expected, found = gathered(saved), gathered(other)
    assert dist.get_rank() != 0 or torch.equal(expected, found)


@on(2)
def read_write_shard_tensor(folder):
    reshard(folder, halves(), halves())


@on(2)
def load_with_different_shard_plan(folder):
    uneven = pieces((0, 8, 1), (8, 2, 0))
    reshard(folder, halves(), uneven)
    reshard(folder, uneven, halves())
    scattered = pieces((0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0))
    reshard(folder, halves(), scattered)  # several regions of a rank are read


@on(2)
def load_rowwise_to_colwise(folder):
    reshard(folder, halves(0), halves(1))


@on(2)
def save_load_bytes(folder):
    save({"bytes0": [1], "bytes1": "string"}, folder)
    assert load({"bytes0": [2], "bytes1": "other"}, folder) == {"bytes0": [1], "bytes1": "string"}


@on(2)
def switch_between_sharded_tensor_to_tensor(folder):
    saved = {"sharded": filled(halves(), 32), "replicated": torch.rand(32)}
    dist.broadcast(saved["replicated"], src=0)
    save(saved, folder)
    other = {"sharded": torch.zeros(32), "replicated": sharded_tensor.zeros(halves(), 32)}
    load(other, folder)
    whole, back = gathered(saved["sharded"]), gathered(other["replicated"])
    assert dist.get_rank() != 0 or torch.equal(whole, other["sharded"])
    assert dist.get_rank() != 0 or torch.equal(back, saved["replicated"])


# ---- test_dtensor_checkpoint.py, test_dtensor_resharding.py ------------------------------------

WHOLE = torch.arange(16.0).view(4, 4)
ONE_D = [[Shard(0)], [Shard(1)], [Replicate()]]
TWO_D = [
    [Replicate(), Replicate()],
    [Replicate(), Shard(0)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(1), Shard(0)],
]


def reshard_placements(folder, mesh, before, other_mesh, after, whole=WHOLE):
    save({"tensor": distribute_tensor(whole, mesh, before)}, folder)
    for placements in after:
        state = {"tensor": zeros(*whole.shape, device_mesh=other_mesh, placements=placements)}
        load(state, folder)
        assert torch.equal(state["tensor"].full_tensor(), whole)


@on(2)
def reshard_placement_change_1d(folder):
    mesh = init_device_mesh("cpu", (2,))
    for placements in ONE_D:
        reshard_placements(folder, mesh, placements, mesh, ONE_D)


@on(4)
def reshard_placement_change_2d(folder):
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in TWO_D:
        reshard_placements(folder, mesh, placements, mesh, TWO_D)


@on(4)
def reshard_mesh_change(folder):
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for placements in ONE_D:
        reshard_placements(folder, line, placements, square, TWO_D)
    for placements in TWO_D:
        reshard_placements(folder, square, placements, line, ONE_D)


@on(4)
def uneven_and_empty_shards(folder):
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for shape in [(5, 3), (2, 7), (1, 1), (3, 0)]:
        whole = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        reshard_placements(folder, line, [Shard(0)], square, TWO_D, whole)


@on(4)
def tensors_of_a_submesh(folder):
    mesh = DeviceMesh("cpu", [0, 2])
    held = distribute_tensor(WHOLE, mesh, [Shard(0)])
    everywhere = distribute_tensor(WHOLE * 2, init_device_mesh("cpu", (4,)), [Shard(0)])
    save({"held": held, "everywhere": everywhere}, folder)
    state = {
        "held": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]),
        "everywhere": zeros(4, 4, device_mesh=everywhere.device_mesh, placements=[Shard(1)]),
    }
    load(state, folder)
    if mesh.get_coordinate() is not None:
        assert torch.equal(state["held"].full_tensor(), WHOLE)
    assert torch.equal(state["everywhere"].full_tensor(), WHOLE * 2)


# ---- e2e/test_e2e_save_and_load.py -------------------------------------------------------------


@on(1)
def stateful_and_non_stateful_loads(folder):
    class Noting(dict):
        replaced = False

        def __setitem__(self, key, value):
            self.replaced = True
            super().__setitem__(key, value)

    class Nothing(Stateful):
        loaded = False

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            self.loaded = True

    stateful = Nothing()
    state = Noting(stateful=stateful)
    save(state, folder)
    load(state, folder)
    assert (stateful.loaded, state.replaced) == (True, False)
    state = Noting(nest={"replicated": torch.rand(10, 10), "bytes": [1, 2, 3, 4]})
    save(state, folder)
    load(state, folder)
    assert state.replaced


@on(1)
def no_dist_and_nothing_to_save(folder):
    save({}, folder)
    load({}, folder)


class TrainState(Stateful):
    """As a trainer's: tensors of a number, and a file in memory."""

    def __init__(self, step=0, losses=()):
        self.step, self.losses = step, list(losses)

    def state_dict(self):
        file = io.BytesIO()
        torch.save(self.losses, file)
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": file}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"].item()
        state_dict["losses"].seek(0)
        self.losses = torch.load(state_dict["losses"])


def e2e_async(folder, kind, *, early):
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(WHOLE, mesh, [Shard(0)])
    options = StagingOptions(False, False, early, False)
    stager = DefaultStager(options)
    response = dcp.async_save(
        {"rows": rows, "train": TrainState(3, [0.5, 0.25])},
        storage_writer=VarviteWriter(folder),
        async_checkpointer_type=kind,
        async_stager=stager,
    )
    future = response if isinstance(response, Future) else response.upload_completion
    future.result(100)
    stager.close()
    train = TrainState()
    state = {"rows": zeros(4, 4, device_mesh=mesh, placements=[Shard(1)]), "train": train}
    load(state, folder)
    assert torch.equal(state["rows"].full_tensor(), WHOLE)
    assert (train.step, train.losses) == (3, [0.5, 0.25])


@on(2)
def e2e_async_thread(folder):
    e2e_async(folder, AsyncCheckpointerType.THREAD, early=False)


@on(2)
def e2e_async_thread_with_async_staging(folder):
    e2e_async(folder, AsyncCheckpointerType.THREAD, early=True)


@on(2)
def e2e_async_process(folder):
    e2e_async(folder, AsyncCheckpointerType.PROCESS, early=False)


@on(2)
def partial_load(folder):
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(WHOLE, mesh, [Shard(0)])
    save(
        {"model": {"rows": rows}, "optimizer": {"state": {"rows": {"step": torch.tensor(2.0)}}, "lr": 0.5}},
        folder,
    )
    state = {"model": {"rows": zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])}}
    load(state, folder)
    assert torch.equal(state["model"]["rows"].full_tensor(), WHOLE)
    found = _load_state_dict_from_keys("model", storage_reader=VarviteReader(folder))
    assert torch.equal(found["model"]["rows"], WHOLE)
    found = _load_state_dict_from_keys("optimizer.state", storage_reader=VarviteReader(folder))
    assert found["optimizer"] == {"state": {"rows": {"step": torch.tensor(2.0)}}}


@on(2)
def different_ordered_state_dict_keys(folder):
    class Summing(Stateful):
        """Talks to the others while it is saved and loaded: another order on each rank would hang."""

        def __init__(self):
            self.total = torch.zeros(1)

        def state_dict(self):
            dist.barrier()
            return {"total": self.total}

        def load_state_dict(self, state_dict):
            dist.barrier()

    names = ["a", "b"] if dist.get_rank() == 0 else ["b", "a"]
    objects = {name: Summing() for name in sorted(names)}
    save({name: objects[name] for name in sorted(names)}, folder)
    load({name: objects[name] for name in names}, folder)


@on(2)
def overwrite(folder):
    for value in (1.0, 2.0):
        save({"random": torch.full((10,), value)}, folder, checkpoint_id="step-1")
    assert load({"random": torch.zeros(10)}, folder)["random"].unique().tolist() == [2.0]
    assert load({"random": torch.zeros(10)}, folder, checkpoint_id="step-1")["random"].unique().tolist() == [
        2.0
    ]


# ---- test_async_process_executor.py ------------------------------------------------------------


@on(2)
def async_process_survives_a_failed_save(folder):
    state = {"rows": distribute_tensor(WHOLE, init_device_mesh("cpu", (2,)), [Shard(0)])}
    kind = AsyncCheckpointerType.PROCESS
    bad = dcp.async_save(
        state, checkpoint_id="no step", storage_writer=VarviteWriter(folder), async_checkpointer_type=kind
    )
    with pytest.raises(Exception, match="invalid checkpoint_id"):
        bad.result(100)
    good = dcp.async_save(
        state, checkpoint_id="step-3", storage_writer=VarviteWriter(folder), async_checkpointer_type=kind
    )
    assert set(good.result(100).state_dict_metadata) == {"rows"}


# ---- test_format_utils.py ----------------------------------------------------------------------


@on(1)
def dcp_to_torch_save_and_back(folder):
    state = {"model": Model().state_dict(), "epoch": 3, "groups": [{"lr": 0.1, "w": torch.ones(2)}]}
    _save_state_dict(state, VarviteWriter(folder), no_dist=True)
    found = {}
    _load_state_dict(found, VarviteReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert all(torch.equal(again["model"][name], value) for name, value in state["model"].items())
    assert (again["epoch"], again["groups"][0]["lr"], again["groups"][0]["w"].tolist()) == (3, 0.1, [1, 1])


# ---- CheckpointableTensor (2.14) ---------------------------------------------------------------


@on(2)
def checkpointable_tensors(folder):
    if not hasattr(dcp, "CheckpointableTensor"):
        return
    rank = dist.get_rank()

    def local(values):
        padded = torch.full((3, 4), -1.0)  # its last row is padding
        padded[:2] = values
        padded.global_shape, padded.global_offsets = (4, 4), ((2 * rank, 0),)
        padded.local_offsets, padded.local_sizes = ((0, 0),), ((2, 4),)
        return padded

    save({"tensor": local(WHOLE[2 * rank : 2 * rank + 2])}, folder)
    fresh = local(torch.zeros(2, 4))
    load({"tensor": fresh}, folder)
    assert torch.equal(torch.as_tensor(fresh)[:2], WHOLE[2 * rank : 2 * rank + 2])
    assert torch.as_tensor(fresh)[2].unique().tolist() == [-1]
    state = {"tensor": torch.zeros(4, 4)}
    load(state, folder)
    assert torch.equal(state["tensor"], WHOLE)


# ---- how they ended ----------------------------------------------------------------------------


def run_all(folder, names):
    warnings.filterwarnings("ignore", category=FutureWarning)  # of ShardedTensor, that it is old
    ended = {}
    for name in names:
        try:
            globals()[name](folder / name)
            ended[name] = ""
        except BaseException:  # noqa: BLE001 - the test of this scenario shows it
            ended[name] = traceback.format_exc()
    return ended


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    ranks.preload(
        "torch.distributed._shard.sharded_tensor",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint.state_dict",
        "varvite.distributed.dcp",
    )
    known = {}

    def of(size):
        if size not in known:
            folder = tmp_path_factory.mktemp("suite")
            known[size] = ranks.run(size, run_all, folder, SCENARIOS[size], seconds=100)
        return known[size]

    return of


@pytest.mark.parametrize("name", SCENARIOS[1])
def test_alone(name, tmp_path):
    globals()[name](tmp_path)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size in (2, 4) for name in SCENARIOS[size]])
def test_on_ranks(endings, size, name):
    failures = [ended[name] for ended in endings(size) if ended[name]]
    assert not failures, "\n".join(failures)
