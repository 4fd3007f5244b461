"""Sharded tensors: which region a rank holds, and that it comes back to the memory that is there.

One process plays each rank of a mesh in turn: torch's fake process group talks to nobody, and what a rank
holds of a tensor is computed without asking others.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import assert_same
from torch import distributed as dist
from torch import nn

from varvite import CheckpointManager
from varvite.errors import InvalidInputError, MismatchError
from varvite.optim import apply_optimizer, describe_optimizer
from varvite.shards import Region, _orders, local_of, region_of
from varvite.tensors import describe, find_ties

pytest.importorskip("torch.distributed.fsdp")
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

RANK_COUNT = 8


@contextlib.contextmanager
def playing(rank: int, world_size: int = RANK_COUNT) -> Any:
    """Has this process be one rank of several, which are not there."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # torch keeps placements with their mesh, and by that the rank that was played.
        _clear_sharding_prop_cache()


class Net(nn.Module):
    """Lengths that divide evenly, unevenly, and into fewer pieces than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 9)
        self.down = nn.Linear(9, 16)
        self.one = nn.Linear(1, 1)
        self.few = nn.Parameter(torch.zeros(2, 5))
        self.scale = nn.Parameter(torch.zeros(7))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mean", torch.zeros(3))


def numbered(net: nn.Module) -> nn.Module:
    """Gives every element of a module a number of its own."""
    with torch.no_grad():
        for index, value in enumerate(net.state_dict().values()):
            value.copy_(torch.arange(value.numel()).reshape(value.shape) + 1000 * index)
    return net


def fsdp(net: nn.Module) -> nn.Module:
    return fully_shard(net, mesh=init_device_mesh("cpu", (8,)))


def fsdp_last(net: nn.Module) -> nn.Module:
    """Shards the last dimension where it divides evenly."""

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(parameter.ndim - 1) if parameter.shape[-1] % 2 == 0 else None

    pairs = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(net, mesh=pairs, shard_placement_fn=place)


def hsdp(net: nn.Module) -> nn.Module:
    return fully_shard(net, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")))


def in_tensor_parallel(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(net, mesh, plan, src_data_rank=None)


def tp(net: nn.Module) -> nn.Module:
    return in_tensor_parallel(net, init_device_mesh("cpu", (8,)))


def fsdp_tp(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
    return fully_shard(in_tensor_parallel(net, mesh["tensor"]), mesh=mesh["data"])


def hsdp_tp(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    return fully_shard(in_tensor_parallel(net, mesh["tensor"]), mesh=mesh["replicate", "shard"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.other = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight


def part_of(whole: torch.Tensor, region: tuple[list[int], list[int]]) -> torch.Tensor:
    """Returns the elements of a region."""
    return whole[tuple(slice(start, start + length) for start, length in zip(*region, strict=True))]


@pytest.mark.parametrize("shard", [fsdp, fsdp_last, hsdp, tp, fsdp_tp, hsdp_tp])
def test_regions_of_all_ranks_cover_each_tensor_and_hold_its_elements(shard):
    whole = numbered(Net()).state_dict()
    covered = {name: torch.zeros_like(value, dtype=torch.int) for name, value in whole.items()}
    sharded = set()
    for rank in range(RANK_COUNT):
        with playing(rank):
            for name, value in shard(numbered(Net())).state_dict().items():
                one = describe(name, value)
                assert (one.dtype, one.shape) == (str(value.dtype).removeprefix("torch."), whole[name].shape)
                region = one.region or ([0] * value.ndim, list(value.shape))
                assert one.value.tolist() == part_of(whole[name], region).tolist()
                assert one.value.is_contiguous()
                part_of(covered[name], region).add_(1)
                if list(one.value.shape) != list(one.shape):
                    sharded.add(name)
    for name, count in covered.items():
        # Every element is held, and all by the same number of ranks.
        assert count.min() == count.max() > 0, name
    assert {"up.weight", "up.bias", "down.weight"} <= sharded


def test_dense_shard_is_described_without_a_copy():
    with playing(1, world_size=2):
        mesh = init_device_mesh("cpu", (2,))
        value = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)], src_data_rank=None)
        one = describe("w", nn.Parameter(value))
        assert (one.region, one.value.tolist()) == (([2, 0], [1, 2]), [[4.0, 5.0]])
        assert one.value.data_ptr() == value.to_local().data_ptr()
        assert not one.value.requires_grad
        columns = distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(1)], src_data_rank=None)
        assert describe("w", columns.t()).value.tolist() == [[2.0, 5.0]]


def test_region_of_a_mesh_cut_in_any_order():
    # 14 over 3, then each over 4: what FSDP does to what tensor parallelism has left.
    regions = [region_of([14], [4, 3], [data, tensor], [[1, 0]]) for tensor in range(3) for data in range(4)]
    assert [one.offsets[0] for one in regions] == [0, 2, 4, 5, 5, 7, 9, 10, 10, 11, 12, 13]
    assert [one.lengths[0] for one in regions] == [2, 2, 1, 0, 2, 2, 1, 0, 1, 1, 1, 1]
    assert region_of([], [4], [3], []) == Region((), ())


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ([Shard(0), Shard(0), Replicate()], [[0, 1], []]),
        ([Shard(0), Shard(1), Shard(0)], [[0, 2], [1]]),
        ([_StridedShard(0, split_factor=4), Shard(0), Shard(0)], [[1, 2, 0], []]),
        ([_StridedShard(0, split_factor=2), Shard(0), Shard(0)], [[1, 0, 2], []]),
        ([Replicate(), _StridedShard(1, split_factor=2), Shard(1)], [[], [2, 1]]),
    ],
)
def test_order_of_cuts_where_torch_keeps_none_beside_the_placements(placements, expected):
    mesh = SimpleNamespace(shape=(2, 2, 2))
    tensor = SimpleNamespace(shape=(16, 16), placements=placements, device_mesh=mesh, _spec=None)
    assert _orders(tensor, tuple(tensor.device_mesh.shape)) == expected


REFUSED = {
    "sum": ([Partial()], "holds a summand"),
    "strided": ([_StridedShard(0, split_factor=2)], "pieces that lie apart"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_region_is_refused_by_name(case):
    placements, words = REFUSED[case]
    with playing(0, world_size=2):
        value = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), placements, run_check=False)
        with pytest.raises(InvalidInputError, match=words) as caught:
            describe("model.w", value)
    assert caught.value.name == "model.w"
    assert caught.value.type == "torch.distributed.tensor.DTensor"
    assert ".redistribute(" in caught.value.hint


def test_local_part_of_another_length_than_its_placement_says_is_refused():
    # `from_local` without a shape takes every rank to hold as much: 2 and 1 rows become 4 and 2.
    with playing(1, world_size=2):
        mesh = init_device_mesh("cpu", (2,))
        value = DTensor.from_local(
            torch.ones(1, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size([4, 2]), stride=(2, 1)
        )
        with pytest.raises(InvalidInputError, match=r"holds \[1, 2\] of \[4, 2\], but .* hold \[2, 2\]"):
            describe("w", value)


def test_rank_outside_of_a_mesh_holds_nothing():
    with playing(3, world_size=4):
        value = distribute_tensor(torch.ones(4, 2), DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)
        assert describe("w", value).region == ([0, 0], [0, 0])
        scalar = distribute_tensor(
            torch.ones(()), DeviceMesh("cpu", [0, 1]), [Replicate()], src_data_rank=None
        )
        with pytest.raises(InvalidInputError, match="not in the mesh"):
            describe("step", scalar)


def test_ties_of_shards_are_found_also_where_they_are_empty():
    for rank in range(4):
        with playing(rank, world_size=4):
            net = fully_shard(Tied(), mesh=init_device_mesh("cpu", (4,)))
            described = [describe(name, value) for name, value in net.state_dict().items()]
            assert [0 in one.value.shape for one in described] == [rank == 3] * 3
            assert find_ties(described) == {"head.weight": "embedding.weight"}


def with_attributes(tensor, **attributes):
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def test_plain_tensor_that_says_what_region_it_is():
    value = with_attributes(
        torch.arange(12.0).reshape(3, 4),
        global_shape=(6, 3),
        global_offsets=((2, 0),),
        local_offsets=((1, 1),),
        local_sizes=((2, 3),),
    )
    described = describe("w", value)
    assert (described.shape, described.region) == ((6, 3), ([2, 0], [2, 3]))
    assert described.value.tolist() == [[5.0, 6.0, 7.0], [9.0, 10.0, 11.0]]
    value.local_sizes = ((2, 4),)
    with pytest.raises(InvalidInputError, match="fit neither"):
        describe("w", value)
    value.local_sizes = ((1, 1), (1, 1))
    with pytest.raises(InvalidInputError, match="holds 2 shards"):
        describe("w", value)


def test_sharded_tensor_of_old_is_refused_with_a_way_on():
    from torch.distributed._shard import sharded_tensor, sharding_spec

    with playing(0, world_size=1):
        spec = sharding_spec.ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        with pytest.raises(InvalidInputError, match="fully_shard"):
            describe("w", sharded_tensor.empty(spec, 4))


# Restores


def lone(folder):
    """Opens a repository as if there were no other ranks: nobody is there to agree with."""
    return CheckpointManager(folder, rank=0, world_size=1)


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    for index, parameter in enumerate(net.parameters()):
        numbers = torch.arange(parameter.numel()).reshape(parameter.shape)
        parameter.grad = (numbers + 10 * index).to(parameter.dtype).cos()
    optimizer.step()
    return optimizer


def assert_part(live, whole):
    """Asserts that what this rank holds of a tensor is that region of the whole, bit for bit."""
    one = describe("it", live)
    region = one.region or ([0] * live.ndim, list(live.shape))
    assert_same(one.value, part_of(whole.detach(), region).contiguous())


@pytest.mark.parametrize("shard", [fsdp, fsdp_last, hsdp, tp, fsdp_tp, hsdp_tp])
def test_each_rank_reads_its_own_regions_in_place(tmp_path, shard):
    whole = numbered(Net())
    whole_optimizer = stepped(whole)
    states = {name: whole_optimizer.state[parameter] for name, parameter in whole.named_parameters()}
    with lone(tmp_path) as manager:
        manager.save_sync(1, model=whole, optimizer=whole_optimizer)
        for rank in range(0, RANK_COUNT, 3):
            with playing(rank):
                net = shard(Net())
                optimizer = torch.optim.AdamW(net.parameters(), lr=0.5, foreach=False)
                pointers = [local_of(value).data_ptr() for value in net.state_dict().values()]
                report = manager.resume(model=net, optimizer=optimizer, strict=True)
                assert (report.missing, report.unexpected) == ([], [])
                assert [local_of(value).data_ptr() for value in net.state_dict().values()] == pointers
                for name, value in net.state_dict().items():
                    assert_part(value, whole.state_dict()[name])
                for name, parameter in net.named_parameters():
                    own = optimizer.state[parameter]
                    assert list(own) == list(states[name])
                    assert type(own["exp_avg"]) is type(parameter.data)
                    assert type(own["step"]) is torch.Tensor
                    for key, value in own.items():
                        assert_part(value, states[name][key])
                again = shard(Net()).state_dict()
                assert manager.load_into(dict(again), prefix="model").missing == []
                assert_part(again["up.weight"], whole.up.weight)


def test_step_of_a_parameter_of_one_element_is_counted_beside_it(tmp_path):
    class Scaled(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.scale = nn.Parameter(value)

    saved = Scaled(torch.tensor(2.0))
    optimizer = stepped(saved)
    with lone(tmp_path) as manager:
        manager.save_sync(1, model=saved, optimizer=optimizer)
        with playing(1, world_size=2):
            mesh = init_device_mesh("cpu", (2,))
            net = Scaled(distribute_tensor(torch.tensor(0.0), mesh, [Replicate()], src_data_rank=None))
            live = torch.optim.AdamW(net.parameters(), foreach=False)
            manager.resume(model=net, optimizer=live)
            own = live.state[net.scale]
            assert [type(own[key]) for key in ("step", "exp_avg")] == [torch.Tensor, DTensor]
            assert_part(own["exp_avg"], optimizer.state[saved.scale]["exp_avg"])
            assert_part(net.scale, saved.scale)


def test_optimizer_takes_its_regions_from_a_nest_in_memory():
    whole = nn.Linear(2, 3)
    nest = describe_optimizer(stepped(whole), {"model": whole})
    with playing(1, world_size=2):
        first, second = (fully_shard(nn.Linear(2, 3), mesh=init_device_mesh("cpu", (2,))) for _ in range(2))
        live = torch.optim.AdamW(first.parameters(), foreach=False)
        apply_optimizer(live, {"model": first}, nest)
        assert_part(live.state[first.weight]["exp_avg"], nest["state"]["weight"]["exp_avg"])
        sharded = describe_optimizer(live, {"model": first})
        other = torch.optim.AdamW(second.parameters(), foreach=False)
        apply_optimizer(other, {"model": second}, sharded)
        assert_part(other.state[second.bias]["exp_avg"], nest["state"]["bias"]["exp_avg"])
        with pytest.raises(
            InvalidInputError, match=r"another region of it, from \[2, 0\] and not from \[0, 0\]"
        ):
            apply_optimizer(torch.optim.AdamW(whole.parameters()), {"model": whole}, sharded)


def one_of(tensor, dimension=0):
    """Returns a shard of a tensor over two ranks."""
    return distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(dimension)], src_data_rank=None)


def test_nest_takes_regions_in_place_also_of_other_dtypes_strides_and_ties(tmp_path):
    saved = torch.arange(12.0).reshape(3, 4)
    with lone(tmp_path) as manager:
        manager.save_sync(1, {"plain": saved, "wide": saved.bfloat16(), "first": saved, "turned": saved + 1})
        with playing(1, world_size=2):
            plain = one_of(torch.zeros(3, 4))
            live = {
                "plain": plain,
                "wide": one_of(torch.zeros(3, 4)),
                "first": one_of(torch.zeros(3, 4)),
                "turned": one_of(torch.zeros(4, 3), 1).t(),
            }
            report = manager.resume(**live)
            assert report.mismatched == []
            assert live["plain"] is plain
            for key, add in {"plain": 0, "wide": 0, "first": 0, "turned": 1}.items():
                assert live[key].to_local().tolist() == (saved[2:] + add).tolist(), key
            nest = {"inner": [one_of(torch.zeros(3, 4))]}
            manager.save_sync(2, {"nest": {"inner": [torch.zeros(2)]}})
            with pytest.raises(MismatchError, match=r"expected \[3, 4\], but the snapshot has: \[2\]"):
                manager.resume(nest=nest)
            assert nest["inner"][0].to_local().tolist() == [[0.0] * 4]


class Average:
    """Keeps a copy of tensors, as they are sharded, and copies into it what it is given."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.given = None

    def state_dict(self):
        return {"shadow": {"w": self.tensor}, "count": 3}

    def load_state_dict(self, state):
        self.given = state["shadow"]["w"]
        self.tensor.copy_(self.given)


def test_object_with_sharded_state_is_given_shards(tmp_path):
    saved = torch.arange(12.0).reshape(3, 4)
    with lone(tmp_path) as manager:
        manager.save_sync(1, average=Average(saved))
        with playing(1, world_size=2):
            average = Average(one_of(torch.zeros(3, 4)))
            manager.resume(average=average)
            assert average.given.placements == average.tensor.placements
            assert average.tensor.to_local().tolist() == saved[2:].tolist()


def test_module_whose_hook_makes_its_state_is_given_shards(tmp_path):
    def doubled(module, state, prefix, _metadata):
        state[f"{prefix}weight"] = module.weight.detach() * 2

    def make(weight):
        layer = nn.Linear(4, 3, bias=False)
        layer.weight = nn.Parameter(weight)
        layer.register_state_dict_post_hook(doubled)
        return layer

    saved = torch.arange(12.0).reshape(3, 4)
    with lone(tmp_path) as manager:
        manager.save_sync(1, layer=make(saved))
        with playing(1, world_size=2):
            layer = make(one_of(torch.zeros(3, 4)))
            manager.resume(layer=layer)
            assert layer.weight.to_local().tolist() == (saved[2:] * 2).tolist()


def test_tied_shards_are_filled_once_and_stay_tied(tmp_path):
    tied, untied = Tied(), Tied()
    untied.head.weight = nn.Parameter(torch.rand(3, 2))
    with lone(tmp_path) as manager:
        manager.save_sync(1, model=numbered(tied))
        manager.save_sync(2, model=untied)
        for rank in (0, 3):
            with playing(rank, world_size=4):
                net = fully_shard(Tied(), mesh=init_device_mesh("cpu", (4,)))
                manager.resume(1, model=net)
                assert net.head.weight is net.embedding.weight
                assert_part(net.head.weight, tied.embedding.weight)
                with pytest.raises(MismatchError, match="with which it is tied"):
                    manager.resume(2, model=net)
                assert_part(net.head.weight, tied.embedding.weight)


def test_optimizer_after_a_forward_pass_alone_finds_its_parameters(tmp_path):
    with playing(0, world_size=1):
        net = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        with torch.no_grad():
            net(torch.ones(1, 3))
        assert not isinstance(net.weight, DTensor)
        with lone(tmp_path) as manager:
            manager.save_sync(1, optimizer=optimizer, model=net)
            net.unshard()
            report = manager.resume(optimizer=optimizer, model=net)
        assert report.restored == ["model", "optimizer"]
        assert isinstance(net.weight, DTensor)
