"""Which parameters are trained: compared by name before a load, and set again after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError, MismatchError
from varvite.training.trainable import TrainableMask

if TYPE_CHECKING:
    from pathlib import Path


def model(*frozen: str) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for name, parameter in made.named_parameters():
        parameter.requires_grad = name not in frozen
    return made


def flags(module: nn.Module) -> dict[str, bool]:
    return {name: one.requires_grad for name, one in module.named_parameters()}


def test_a_mask_that_differs_is_an_error_that_lists_the_names():
    saved = TrainableMask(model("0.weight", "0.bias")).state_dict()
    live = model("0.bias", "1.bias")
    mask = TrainableMask(live)
    for take in (mask.check_state_dict, mask.load_state_dict):
        with pytest.raises(MismatchError) as caught:
            take(saved)
        assert caught.value.field == "requires_grad"
        assert caught.value.mismatched == [
            ("0.weight", "requires_grad", True, False),
            ("1.bias", "requires_grad", False, True),
        ]
        assert "`1.bias` is frozen, but the snapshot has: trained" in str(caught.value)
    assert flags(live) == flags(model("0.bias", "1.bias"))


def test_a_mask_that_is_equal_changes_nothing():
    live = model("0.bias")
    TrainableMask(live).load_state_dict(TrainableMask(model("0.bias")).state_dict())
    assert flags(live) == flags(model("0.bias"))


def test_a_mask_is_applied_on_request_and_through_a_manager(tmp_path: Path):
    frozen, live = model("0.weight"), model("1.weight")
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(0, model=frozen, trainable=TrainableMask(frozen))
        manager.resume(model=live, trainable=TrainableMask(live, on_mismatch="apply"))
        assert flags(live) == flags(frozen)
        with pytest.raises(MismatchError, match="other parameters are trained than were saved"):
            manager.resume(model=model(), trainable=TrainableMask(model()))


def test_only_names_of_both_sides_are_compared():
    saved = TrainableMask(nn.Linear(2, 2)).state_dict()
    saved["requires_grad"]["gone"] = False
    live = nn.Linear(2, 2)
    live.register_parameter("added", nn.Parameter(torch.zeros(1), requires_grad=False))
    TrainableMask(live).load_state_dict(saved)
    assert flags(live) == {"weight": True, "bias": True, "added": False}


def test_names_leave_wrappers_out_and_take_the_keyword_of_several_modules():
    wrapped = nn.DataParallel(model("0.bias"))
    assert TrainableMask(wrapped).state_dict() == TrainableMask(model("0.bias")).state_dict()
    several = TrainableMask({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    assert several.state_dict() == {"requires_grad": {"a.weight": True, "b.weight": True}}


def test_a_tied_parameter_has_one_flag():
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    assert TrainableMask(tied).state_dict() == {"requires_grad": {"0.weight": True}}


def test_a_long_list_is_cut():
    many = nn.ModuleList(nn.Linear(1, 1) for _ in range(10))
    saved = TrainableMask(many).state_dict()
    many.requires_grad_(False)
    with pytest.raises(MismatchError, match="and 8 more") as caught:
        TrainableMask(many).check_state_dict(saved)
    assert len(caught.value.mismatched) == 20


@pytest.mark.parametrize(
    "state",
    [None, {}, {"requires_grad": []}, {"requires_grad": {"0.bias": 1}}, {"requires_grad": {}, "more": 1}],
)
def test_a_state_that_is_none_is_corrupt(state):
    live = model("0.weight")
    with pytest.raises(CorruptionError, match="corrupt mask"):
        TrainableMask(live, on_mismatch="apply").load_state_dict(state)
    assert flags(live) == flags(model("0.weight"))


def test_a_policy_that_is_none_is_refused():
    with pytest.raises(InvalidInputError, match="invalid on_mismatch `ignore`"):
        TrainableMask(nn.Linear(1, 1), on_mismatch="ignore")
