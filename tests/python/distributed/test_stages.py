"""Pipelines, whose ranks hold other names, and objects that belong to one rank each."""

from __future__ import annotations

import pytest
import ranks
import torch
from support import assert_same
from torch import distributed as dist
from torch import nn

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError, MismatchError
from varvite.reading import SnapshotView
from varvite.restore import restore_objects


def layers(seed):
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {"in": nn.Linear(3, 4), "middle": nn.Linear(4, 4, bias=False), "out": nn.Linear(4, 2)}
    )


def stage(seed, *names):
    """Returns a part of the layers, under the names they have in the whole."""
    whole = layers(seed)
    return nn.ModuleDict({name: whole[name] for name in names})


def optimizer_of(model, lr=0.1):
    """Decays weights and not biases: a stage without bias has an empty group."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [one for name, one in named.items() if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [one for name, one in named.items() if name.endswith("bias")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def stepped(model):
    optimizer = optimizer_of(model)
    for name, parameter in model.named_parameters():
        # One parameter never gets a gradient.
        parameter.grad = None if name == "out.bias" else torch.full_like(parameter, float(len(name)))
    optimizer.step()
    return optimizer


STAGES = {2: [("in", "middle"), ("out",)], 3: [("in",), ("middle",), ("out",)]}


def of_state(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        names[parameter]: {key: value.tolist() for key, value in own.items()}
        for parameter, own in optimizer.state.items()
    }
    return {name: value.tolist() for name, value in model.state_dict().items()}, moments


def restore_stage(folder, seq, model, optimizer, strict=True):
    rank = dist.get_rank()
    with CheckpointManager(folder) as manager:
        view = SnapshotView(manager._engine, seq, rank)
        return restore_objects(
            view,
            {"model": model, "optimizer": optimizer},
            strict=strict,
            override={},
            peers=manager._ranks,
            world_size=dist.get_world_size(),
        )


def saves_stages(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = stage(1, *STAGES[size][rank])
    optimizer = stepped(model)
    with CheckpointManager(folder) as manager:
        manager.save_sync(1, model=model, optimizer=optimizer)
    return of_state(model, optimizer)


def restores_stages(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = stage(2, *STAGES[size][rank])
    optimizer = optimizer_of(model, lr=0.5)
    done = restore_stage(folder, 1, model, optimizer)
    assert (done.found.missing, done.found.unexpected) == ([], [])
    assert done.found.never_stepped == (["out.bias"] if "out" in model else [])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    return of_state(model, optimizer)


def lacks_a_stage(folder):
    model = stage(2, "in", "middle")
    optimizer = optimizer_of(model)
    before = of_state(model, optimizer)
    with pytest.raises(MismatchError, match=r"only the snapshot has `model\.out\.bias`") as caught:
        restore_stage(folder, 1, model, optimizer)
    assert of_state(model, optimizer) == before
    return sorted(caught.value.unexpected)


def test_stages_of_a_pipeline_are_one_model_and_optimizer(tmp_path):
    parts = ranks.run(3, saves_stages, tmp_path)
    model = layers(1)
    expected = of_state(model, stepped(model))
    for own, of_whole in zip(zip(*parts, strict=True), expected, strict=True):
        assert_same(
            {name: value for one in own for name, value in sorted(one.items())},
            dict(sorted(of_whole.items())),
        )
    # One process takes up the whole, and another number of stages their parts.
    whole = layers(2)
    optimizer = optimizer_of(whole, lr=0.5)
    with CheckpointManager(tmp_path) as manager:
        report = manager.resume(model=whole, optimizer=optimizer)
        nest = manager.load()["optimizer"]
    assert report.never_stepped == ["out.bias"]
    assert of_state(whole, optimizer) == expected
    assert [list(group["params"]) for group in nest["param_groups"]] == [
        ["in.weight", "middle.weight", "out.weight"],
        ["in.bias", "out.bias"],
    ]
    (first, second) = ranks.run(2, restores_stages, tmp_path)
    assert [{**first[kind], **second[kind]} for kind in (0, 1)] == list(expected)
    names = ["model.out.bias", "model.out.weight", "optimizer.state.out.bias", "optimizer.state.out.weight"]
    assert ranks.run(2, lacks_a_stage, tmp_path) == [names] * 2


def one_cannot_read(folder, phase):
    model = stage(2, *STAGES[2][dist.get_rank()])
    optimizer = optimizer_of(model)
    before = of_state(model, optimizer)
    if dist.get_rank() == 1:
        if phase == "plan":
            optimizer.param_groups[0]["params"] = [torch.zeros(3)]
        else:
            SnapshotView.read = damaged
    with pytest.raises((CorruptionError, InvalidInputError)) as caught:
        restore_stage(folder, 1, model, optimizer)
    if dist.get_rank() == 0:
        # Moments are installed on no rank. What was read to parameters in place stays there.
        assert of_state(model, optimizer)[1] == before[1] == {}
    return type(caught.value).__name__


def damaged(view, destinations):
    raise CorruptionError("corrupt pack")


@pytest.mark.parametrize(("phase", "kind"), [("plan", "InvalidInputError"), ("read", "CorruptionError")])
def test_what_one_rank_cannot_do_none_does(tmp_path, phase, kind):
    ranks.run(2, saves_stages, tmp_path)
    assert ranks.run(2, one_cannot_read, tmp_path, phase) == [kind] * 2
