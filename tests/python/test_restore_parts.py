"""Restores of what ranks hold apart: stages of a pipeline, and objects that belong to one rank each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from varvite import CheckpointManager
from varvite.errors import CheckpointError, InvalidInputError, MismatchError
from varvite.reading import SnapshotView
from varvite.restore import restore_objects


def layers():
    return nn.ModuleDict({"in": nn.Linear(3, 4), "out": nn.Linear(4, 2, bias=False)})


def optimizer_of(model):
    named = dict(model.named_parameters())
    groups = [[one for name, one in named.items() if name.endswith(end)] for end in ("weight", "bias")]
    return torch.optim.AdamW([{"params": groups[0], "lr": 0.1}, {"params": groups[1], "lr": 0.2}])


def stepped(model):
    optimizer = optimizer_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


class Others:
    """Ranks that hold what is named, and of which one fails in a phase."""

    def __init__(self, *held, fails_in=None):
        self.held = held
        self.fails_in = fails_in
        self.phases = []

    def unite(self, problems):
        self.phases.append("unite")
        problems.unexpected = [name for name in problems.unexpected if name not in self.held]
        return problems

    def together(self, what, error=None):
        self.phases.append((what.partition(" ")[0], None if error is None else type(error).__name__))
        if error is None and what.partition(" ")[0] == self.fails_in:
            raise CheckpointError("another rank failed")


@pytest.fixture
def whole(tmp_path):
    """Yields a view of a snapshot of a whole model, with the model and its optimizer."""
    model = layers()
    optimizer = stepped(model)
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(1, model=model, optimizer=optimizer)
        yield SnapshotView(manager._engine, 1, 0), model, optimizer


OF_THE_OTHER = ["model.in.weight", "model.in.bias", "optimizer.state.in.weight", "optimizer.state.in.bias"]


def restore(view, stage, optimizer, peers=None, **more):
    given = {"strict": True, "override": {}, "peers": peers, **more}
    return restore_objects(view, {"model": stage, "optimizer": optimizer}, **given)


def test_a_stage_takes_its_names_and_the_others_are_of_other_ranks(whole):
    view, model, saved_optimizer = whole
    stage = nn.ModuleDict({"out": layers()["out"]})
    # No bias here: the group of biases is empty.
    optimizer = optimizer_of(stage)
    others = Others(*OF_THE_OTHER)
    done = restore(view, stage, optimizer, others)
    assert (done.found.missing, done.found.unexpected) == ([], [])
    assert others.phases == [
        ("prepare", None),
        "unite",
        ("validate", None),
        ("read", None),
        ("install", None),
    ]
    assert torch.equal(stage["out"].weight, model["out"].weight)
    own = optimizer.state[stage["out"].weight]
    assert torch.equal(own["exp_avg"], saved_optimizer.state[model["out"].weight]["exp_avg"])
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(1, 0.1), (0, 0.2)]


def test_a_name_that_no_rank_has_is_an_error(whole):
    view, _, _ = whole
    stage = nn.ModuleDict({"out": layers()["out"]})
    others = Others(*OF_THE_OTHER[1:])
    with pytest.raises(MismatchError, match=r"only the snapshot has `model\.in\.weight`") as caught:
        restore(view, stage, optimizer_of(stage), others)
    assert caught.value.unexpected == ["model.in.weight"]
    assert others.phases[-1] == ("validate", "MismatchError")


@pytest.mark.parametrize("phase", ["prepare", "validate", "read"])
def test_what_another_rank_cannot_do_is_not_installed_here(whole, phase):
    view, _, _ = whole
    model = layers()
    optimizer = optimizer_of(model)
    before = [parameter.tolist() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match="another rank failed"):
        restore(view, model, optimizer, Others(fails_in=phase))
    assert optimizer.state == {}
    if phase != "read":
        assert [parameter.tolist() for parameter in model.parameters()] == before


def test_what_this_rank_cannot_do_is_told_to_the_others(whole):
    view, _, _ = whole
    model = layers()
    optimizer = torch.optim.SGD([torch.zeros(1)])
    others = Others()
    with pytest.raises(InvalidInputError, match="lies in none of the modules"):
        restore(view, model, optimizer, others)
    assert others.phases == [("prepare", "InvalidInputError")]


# Objects of one rank


class Cache:
    """An object of one rank that can be divided anew."""

    is_rank_local = True

    def __init__(self, value=0.0):
        self.values = torch.full((2,), value)
        self.given = None

    def state_dict(self):
        return {"values": self.values, "name": "cache"}

    def load_state_dict(self, state):
        self.values = state["values"]

    def load_rank_states(self, states, *, rank, world_size):
        self.given = [state["values"].tolist() for state in states], rank, world_size


class Fixed(Cache):
    """One that can't."""

    load_rank_states = None


def test_own_objects_come_back_under_names_that_shared_state_has_too(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        shared = {"cache": {"values": torch.full((2,), 7.0)}}
        manager.save_sync(
            1, {"other": 1, "nest": shared}, cache=Cache(3.0), hits={"count": 4}, rank_local=["hits"]
        )
        cache, hits = Cache(), {"count": 0}
        report = manager.resume(
            cache=cache, hits=hits, nest={"cache": {"values": torch.zeros(2)}}, strict=False
        )
        assert (cache.values.tolist(), hits) == ([3.0, 3.0], {"count": 4})
        assert report.rng == "restored"
        assert report.unexpected == []
        with pytest.raises(MismatchError, match="only the snapshot has `cache`") as caught:
            manager.resume(hits=hits)
        assert "cache" in caught.value.unexpected
        loaded = manager.load()
        assert loaded["cache"]["values"].tolist() == [3.0, 3.0]
        assert loaded["hits"] == {"count": 4}


def restore_on(manager, world_size, mode="derive", **objects):
    view = SnapshotView(manager._engine, 1, 0)
    return restore_objects(view, objects, strict=True, override={}, world_size=world_size, rank_local=mode)


def test_other_number_of_ranks_divides_states_anew_or_is_refused(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(1, cache=Cache(3.0))
        cache = Cache()
        done = restore_on(manager, 2, cache=cache)
        assert cache.given == ([[3.0, 3.0]], 0, 2)
        assert done.found.matched == ["cache.values"]
        for refused, mode in ((Fixed(), "derive"), (cache, "exact")):
            with pytest.raises(MismatchError, match="is restored on 2 ranks, but was saved by: 1") as caught:
                restore_on(manager, 2, mode, cache=refused)
            assert caught.value.name == "cache"
        assert "load_rank_states" not in caught.value.hint
        with pytest.raises(InvalidInputError, match="must be `derive` or `exact`"):
            restore_on(manager, 1, "never", cache=cache)
