"""Sharded models and optimizers over real ranks: saved on one mesh, restored in place on another."""

from __future__ import annotations

import pytest
import ranks
import torch
from support import assert_same
from torch import distributed as dist
from torch import nn

from varvite import CheckpointManager

pytest.importorskip("torch.distributed.fsdp")


class Net(nn.Module):
    """Divides evenly where tensor parallelism has to, and leaves FSDP uneven and empty shards."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(3, 12)
        self.down = nn.Linear(12, 16)
        self.one = nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.rand(7))
        self.register_buffer("mean", torch.rand(3))

    def forward(self, values):
        factor = self.one(torch.ones(1, 1)).sum() * self.scale.sum()
        return self.down(torch.tanh(self.up(values - self.mean))).square().mean() * factor


def whole(seed):
    return Net(seed)


def fsdp(seed):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(Net(seed), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(seed):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(Net(seed), mesh=dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")))


def in_tensor_parallel(net, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tp(seed):
    return in_tensor_parallel(Net(seed), dist.init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp_tp(seed):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return fully_shard(in_tensor_parallel(Net(seed), mesh["tensor"]), mesh=mesh["data"])


def made(shard, seed):
    net = shard(seed)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)


def steps(net, optimizer, first, count):
    for step in range(first, first + count):
        optimizer.zero_grad()
        net(torch.arange(6.0).reshape(2, 3) / (step + 1)).backward()
        optimizer.step()


def full(value):
    """Returns a nest with whole tensors in place of shards; all ranks call it."""
    if isinstance(value, dict):
        return {key: full(one) for key, one in value.items()}
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def arrays(value):
    """Returns a nest with arrays in place of tensors: what a rank can send."""
    if isinstance(value, dict):
        return {key: arrays(one) for key, one in value.items()}
    return value.numpy()


def full_state(net, optimizer):
    names = {parameter: name for name, parameter in net.named_parameters()}
    moments = {names[parameter]: dict(own) for parameter, own in optimizer.state.items()}
    return full(
        {"model": dict(net.state_dict()), "moments": {name: moments[name] for name in sorted(moments)}}
    )


def saves_and_goes_on(folder, shard):
    net, optimizer = made(shard, 1)
    steps(net, optimizer, 0, 2)
    saved = full_state(net, optimizer)
    with CheckpointManager(folder) as manager:
        manager.save_sync(2, model=net, optimizer=optimizer)
        steps(net, optimizer, 2, 2)
        other, other_optimizer = made(shard, 2)
        before = {name: value.to_local().data_ptr() for name, value in sharded(other).items()}
        report = manager.resume(model=other, optimizer=other_optimizer)
    assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])
    # In place, and moments are sharded as their parameters without a step.
    assert {name: value.to_local().data_ptr() for name, value in sharded(other).items()} == before
    assert_same(full_state(other, other_optimizer), saved)
    for parameter, own in other_optimizer.state.items():
        for key, value in own.items():
            if key != "step":
                assert getattr(value, "placements", None) == getattr(parameter, "placements", None)
    steps(other, other_optimizer, 2, 2)
    assert_same(full_state(other, other_optimizer), full_state(net, optimizer))
    return arrays(saved)


def sharded(net):
    return {name: value for name, value in net.state_dict().items() if hasattr(value, "placements")}


def restores(folder, shard):
    net, optimizer = made(shard, 3)
    with CheckpointManager(folder) as manager:
        report = manager.resume(model=net, optimizer=optimizer)
        blank = shard(4)
        manager.load_into(dict(blank.state_dict()), prefix="model")
    assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])
    restored = full_state(net, optimizer)
    assert_same(full(dict(blank.state_dict())), restored["model"])
    return arrays(restored)


def all_save_and_restore(folder):
    """Each mesh saves, and takes up what the lone process and another mesh have saved."""
    saved = {shard.__name__: saves_and_goes_on(folder / shard.__name__, shard) for shard in MESHES}
    restored = {
        (by.__name__, shard.__name__): restores(folder / by.__name__, shard)
        for shard, other in zip(MESHES, [*MESHES[1:], MESHES[0]], strict=True)
        for by in (whole, other)
    }
    return saved, restored


def all_restore(folder, shard):
    return {by.__name__: restores(folder / by.__name__, shard) for by in (whole, *MESHES)}


MESHES = [fsdp, hsdp, tp, fsdp_tp]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a folder with a repository for each mesh, and the state each of them has saved."""
    ranks.preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel")
    folder = tmp_path_factory.mktemp("sharded")
    net, optimizer = made(whole, 1)
    steps(net, optimizer, 0, 2)
    with CheckpointManager(folder / "whole") as manager:
        manager.save_sync(2, model=net, optimizer=optimizer)
    states = {"whole": arrays(full_state(net, optimizer))}
    of_ranks = ranks.run(4, all_save_and_restore, folder, seconds=200)
    states.update(of_ranks[0][0])
    for own, restored in of_ranks:
        assert_same(own, of_ranks[0][0])
        for (by, shard), state in restored.items():
            assert_same(state, states[by], f"{shard} of {by}")
    return folder, states


def test_training_goes_on_bit_for_bit_and_other_meshes_take_it_up(saved):
    _, states = saved
    assert list(states) == ["whole", "fsdp", "hsdp", "tp", "fsdp_tp"]


def test_one_process_takes_up_what_any_mesh_saved(saved):
    folder, states = saved
    for by, state in states.items():
        assert_same(restores(folder / by, whole), state)
        with CheckpointManager(folder / by, read_only=True) as manager:
            loaded = manager.load(mmap=True)
            assert manager.verify().ok
        assert_same(arrays(loaded["model"]), state["model"])
        assert_same(
            loaded["optimizer"]["state"]["up.weight"]["exp_avg"].numpy(),
            state["moments"]["up.weight"]["exp_avg"],
        )


def test_another_number_of_ranks_takes_it_up(saved):
    folder, states = saved
    for restored in ranks.run(3, all_restore, folder, fsdp):
        assert_same(restored, states)
