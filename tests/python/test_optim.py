"""Optimizers: state by name, in its own dtype, exact after a restore, and never touched by a save."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from varvite.errors import CorruptionError, InternalError, InvalidInputError, MismatchError
from varvite.modules import clean_names
from varvite.optim import (
    OptimizerPlan,
    apply_optimizer,
    describe_optimizer,
    override_groups,
    parameter_names,
    plan_optimizer,
)
from varvite.tensors import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from conftest import Vault


def mlp(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3, bias=bias), nn.Tanh(), nn.Linear(3, 2, bias=bias))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        inputs, targets = torch.randn(5, 4), torch.randn(5, 2)

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def keep_state(optimizer: torch.optim.Optimizer, model: nn.Module, save: Callable[..., Vault]) -> Vault:
    return save(describe_optimizer(optimizer, {"model": model}), prefix=("optimizer",))


def restore(
    optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module] | nn.Module, vault: Vault
) -> OptimizerPlan:
    """Both phases, with bytes that went through JSON and memory as they would through a pack."""
    modules = {"model": modules} if isinstance(modules, nn.Module) else modules
    plan = plan_optimizer(optimizer, modules, vault.specified())
    plan.check()
    vault.read(plan.destinations)
    plan.commit()
    return plan


def assert_same_state(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.device, found.shape) == (expected.dtype, expected.device, expected.shape)
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same_state(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for item, other in zip(found, expected, strict=True):
            assert_same_state(item, other)
    else:
        assert found == expected


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam capturable": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95)),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_resumed_training_gives_the_bits_of_an_uninterrupted_one(name: str, before: int, save: Any) -> None:
    """`before` steps are done by the process that resumes, on other data, before it restores."""
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, range(3))
    weights = copy.deepcopy(model.state_dict())
    vault = keep_state(optimizer, model, save)
    train(model, optimizer, range(3, 6))

    other = mlp()
    resumed = OPTIMIZERS[name](other.parameters())
    train(other, resumed, range(50, 50 + before))
    restore(resumed, other, vault)
    other.load_state_dict(weights)
    train(other, resumed, range(3, 6))
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key
    assert_same_state(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reading_state_changes_nothing(name: str, save: Any) -> None:
    # pytorch/pytorch#164929: a dummy step that counted was run to make state.
    model, untouched = mlp(), mlp()
    optimizer, reference = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](untouched.parameters())
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    keys = list(optimizer.state)
    keep_state(optimizer, model, save)
    assert list(optimizer.state) == keys
    assert calls == []
    assert all(parameter.grad is None for parameter in model.parameters())
    train(model, optimizer, range(2))
    train(untouched, reference, range(2))
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    for parameter, other in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_nest_is_by_name_and_its_entries_are_named_by_parameter(save: Any) -> None:
    model = mlp(bias=False)
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[2].weight]}], betas=(0.9, 0.95)
    )
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    nest = describe_optimizer(optimizer, {"model": model})
    assert nest["class"] == "torch.optim.adamw.AdamW"
    assert [group["params"] for group in nest["param_groups"]] == [["0.weight"], ["2.weight"]]
    assert [group["lr"] for group in nest["param_groups"]] == [0.5, 0.001]
    assert nest["param_groups"][0]["betas"] == (0.9, 0.95)
    assert nest["param_groups"][0]["foreach"] is None
    assert nest["never_stepped"] == ["2.weight"]
    assert nest["shapes"] == {"0.weight": [3, 4], "2.weight": [2, 3]}
    assert "extra" not in nest
    assert sorted(keep_state(optimizer, model, save).specs) == [
        "optimizer.state.0.weight.exp_avg",
        "optimizer.state.0.weight.exp_avg_sq",
        "optimizer.state.0.weight.step",
    ]


# dtypes, layouts, devices


def test_each_state_tensor_keeps_its_own_dtype_and_bits(save: Any) -> None:
    # Measured: `Optimizer.load_state_dict` made bf16 of fp32 moments, bytes and int64; pytorch/pytorch#43706.
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    state = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full((1, 2), 1 + 2**-20, dtype=torch.float32),
        "quantized": torch.tensor([[1, 255]], dtype=torch.uint8),
        "count": torch.tensor(2**53 + 1, dtype=torch.int64),
        "mask": torch.tensor([[True, False]]),
        "scales": torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64),
        "note": ("plain", None, 3),
    }
    optimizer.state[model.weight] = state
    vault = keep_state(optimizer, model, save)
    other, resumed = make()
    resumed.state[other.weight] = {"exp_avg": torch.zeros(1, 2, dtype=torch.bfloat16)}
    restore(resumed, other, vault)
    assert_same_state(resumed.state[other.weight], state)


def test_bf16_moment_of_an_fp32_parameter_stays_bf16(save: Any) -> None:
    model, other = mlp(), mlp()
    optimizer, resumed = (torch.optim.SGD(m.parameters(), lr=1, momentum=0.9) for m in (model, other))
    optimizer.state[model[0].weight] = {"momentum_buffer": torch.full((3, 4), 3.0, dtype=torch.bfloat16)}
    restore(resumed, other, keep_state(optimizer, model, save))
    buffer = resumed.state[other[0].weight]["momentum_buffer"]
    assert buffer.dtype is torch.bfloat16
    assert torch.equal(buffer, torch.full((3, 4), 3.0, dtype=torch.bfloat16))


def test_moments_of_channels_last_weights_are_right_and_have_their_strides(save: Any) -> None:
    # tracel-ai/burn#5383, NVIDIA/physicsnemo#1597: storage order read as row-major.
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Conv2d(3, 8, 2, bias=False).to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = make()
    model.weight.grad = torch.arange(96.0).reshape(8, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    optimizer.step()
    saved = optimizer.state[model.weight]["momentum_buffer"]
    assert not saved.is_contiguous()
    vault = keep_state(optimizer, model, save)
    for steps in (0, 1):
        other, resumed = make()
        if steps:
            other.weight.grad = torch.zeros_like(other.weight)
            resumed.step()
        restore(resumed, other, vault)
        found = resumed.state[other.weight]["momentum_buffer"]
        assert found[3, 1, 0, 1] == 3 * 12 + 1 * 4 + 1
        assert torch.equal(found, saved)
        assert found.stride() == saved.stride()


@pytest.mark.parametrize(
    ("flags", "device"), [({}, "cpu"), ({"capturable": True}, "meta"), ({"fused": True}, "meta")]
)
def test_step_goes_where_the_flags_of_the_optimizer_want_it(
    flags: dict[str, bool], device: str, save: Any
) -> None:
    # pytorch/pytorch#103256. The device is played by `meta`: only where tensors are put is looked at.
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(1, 2)}
    optimizer.param_groups[0].update(flags)
    vault = keep_state(optimizer, model, save)
    other = nn.Linear(2, 1, bias=False, device="meta")
    resumed = torch.optim.AdamW(other.parameters())
    plan = plan_optimizer(resumed, {"model": other}, vault.specified())
    plan.check()
    vault.read(plan.destinations)
    assert {name: buffer.device.type for name, buffer in plan.destinations.items()} == dict.fromkeys(
        vault.specs, "cpu"
    )
    plan.commit()
    state = resumed.state[other.weight]
    assert (state["step"].device.type, state["step"].shape, state["step"].dtype) == (
        device,
        (),
        torch.float32,
    )
    assert state["exp_avg"].device.type == "meta"


def test_live_tensors_that_fit_are_filled_in_place(save: Any) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(1))
    vault = keep_state(optimizer, model, save)
    train(model, optimizer, range(1, 2))
    moments = optimizer.state[model[0].weight]["exp_avg"]
    plan = restore(optimizer, model, vault)
    assert optimizer.state[model[0].weight]["exp_avg"] is moments
    assert plan.destinations["optimizer.state.0.weight.exp_avg"] is moments
    assert sorted(plan.matched) == sorted(vault.specs)
    assert moments.numpy().tobytes() == vault.raw["optimizer.state.0.weight.exp_avg"]


def test_live_tensor_that_two_entries_share_is_filled_for_one_of_them(save: Any) -> None:
    model, other = mlp(bias=False), mlp(bias=False)
    optimizer, resumed = (torch.optim.Adagrad(m.parameters()) for m in (model, other))
    for position, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(position)),
            "sum": torch.zeros_like(parameter),
        }
    shared = torch.tensor(9.0)
    for parameter in other.parameters():
        resumed.state[parameter] = {"step": shared, "sum": torch.zeros(()).expand(parameter.shape)}
    restore(resumed, other, keep_state(optimizer, model, save))
    steps = [resumed.state[parameter]["step"].item() for parameter in other.parameters()]
    assert steps == [0.0, 1.0]


def test_specs_of_one_name_give_one_tensor(save: Any) -> None:
    model, other = mlp(bias=False), mlp(bias=False)
    optimizer, resumed = (torch.optim.Adagrad(m.parameters()) for m in (model, other))
    step = torch.tensor(4.0)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": step, "sum": torch.zeros_like(parameter)}
    vault = keep_state(optimizer, model, save)
    assert vault.ties == {"optimizer.state.2.weight.step": "optimizer.state.0.weight.step"}
    vault.specs["optimizer.state.2.weight.step"] = vault.specs["optimizer.state.0.weight.step"]
    restore(resumed, other, vault)
    first, second = (resumed.state[parameter]["step"] for parameter in other.parameters())
    assert first is second
    assert first.item() == 4.0


# Names


def test_state_is_matched_by_name_when_parameters_come_in_another_order(save: Any) -> None:
    # pytorch/pytorch#1489: moments swapped between two parameters of one shape.
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 2)), "b": nn.Parameter(torch.zeros(2, 2))})
    first = torch.optim.SGD([model["a"], model["b"]], lr=1, momentum=0.9)
    for value, name in enumerate("ab"):
        first.state[model[name]] = {"momentum_buffer": torch.full((2, 2), float(value))}
    second = torch.optim.SGD([model["b"], model["a"]], lr=1, momentum=0.9)
    restore(second, model, keep_state(first, model, save))
    assert second.state[model["a"]]["momentum_buffer"].unique().tolist() == [0.0]
    assert second.state[model["b"]]["momentum_buffer"].unique().tolist() == [1.0]
    assert [id(parameter) for parameter in second.param_groups[0]["params"]] == [
        id(model["a"]),
        id(model["b"]),
    ]


def test_groups_in_another_order_are_matched_by_their_parameters(save: Any) -> None:
    model = mlp(bias=False)
    one, two = model[0].weight, model[2].weight
    first = torch.optim.SGD([{"params": [one], "lr": 1.0}, {"params": [two], "lr": 2.0}])
    second = torch.optim.SGD([{"params": [two], "lr": 0.0}, {"params": [one], "lr": 0.0}])
    restore(second, model, keep_state(first, model, save))
    # The saved order: a scheduler that is restored beside it counts groups.
    assert [(group["params"][0] is one, group["lr"]) for group in second.param_groups] == [
        (True, 1.0),
        (False, 2.0),
    ]


def test_parameters_of_several_modules_have_their_keyword_in_front(save: Any) -> None:
    modules = {"actor": nn.Linear(2, 1), "critic": nn.Linear(2, 1)}
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1, momentum=0.9)
    for value, parameter in enumerate(parameters):
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, float(value))}
    vault = save(describe_optimizer(optimizer, modules), prefix=("optimizer",))
    assert list(vault.specs) == [
        f"optimizer.state.{name}.momentum_buffer"
        for name in ("actor.weight", "actor.bias", "critic.weight", "critic.bias")
    ]
    resumed = torch.optim.SGD(list(reversed(parameters)), lr=1, momentum=0.9)
    restore(resumed, modules, vault)
    values = [resumed.state[parameter]["momentum_buffer"].unique().item() for parameter in parameters]
    assert values == [0.0, 1.0, 2.0, 3.0]


def test_tied_parameter_has_one_name_and_one_state(save: Any) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.Adagrad(model.parameters())
    nest = describe_optimizer(optimizer, {"model": model})
    assert nest["param_groups"][0]["params"] == ["embed.weight"]
    assert list(nest["state"]) == ["embed.weight"]


def test_parameter_of_no_given_module_is_refused_with_where_it_stands() -> None:
    model, head = nn.Linear(2, 2), nn.Linear(2, 5)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [head.bias, head.weight]}], lr=1)
    expected = (
        r"cannot name parameter 0 of group 1 with shape \[5\]: it lies in none of the modules given: `model`"
    )
    with pytest.raises(InvalidInputError, match=expected) as caught:
        describe_optimizer(optimizer, {"model": model})
    assert caught.value.hint == "pass the module that holds it beside the optimizer"
    assert (caught.value.group, caught.value.position, caught.value.shape) == (1, 0, [5])
    with pytest.raises(InvalidInputError, match="modules given: none"):
        describe_optimizer(optimizer, {})
    with pytest.raises(InvalidInputError, match="parameter 0 of group 1"):
        plan_optimizer(optimizer, {"model": model}, {"class": "x", "state": {}, "param_groups": []})


class Holder(nn.Module):
    """A real child that is called `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def wrapped_models() -> dict[str, tuple[nn.Module, list[str]]]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def linear() -> nn.Module:
        return nn.Linear(2, 2, bias=False)

    return {
        "bare": (linear(), ["weight"]),
        "data parallel": (nn.DataParallel(linear()), ["weight"]),
        "compiled": (torch.compile(linear()), ["weight"]),
        "both": (nn.DataParallel(torch.compile(linear())), ["weight"]),
        "deep": (nn.Sequential(torch.compile(nn.Sequential(nn.DataParallel(linear())))), ["0.0.weight"]),
        "checkpointed": (nn.Sequential(checkpoint_wrapper(linear()), linear()), ["0.weight", "1.weight"]),
        "all": (
            nn.DataParallel(torch.compile(nn.Sequential(checkpoint_wrapper(nn.DataParallel(linear()))))),
            ["0.weight"],
        ),
        "a real child": (Holder(linear()), ["module.weight"]),
        "a real child in a wrapper": (nn.DataParallel(Holder(linear())), ["module.weight"]),
        "a wrapper in a real child": (Holder(nn.DataParallel(Holder(linear()))), ["module.module.weight"]),
    }


@pytest.mark.parametrize("case", wrapped_models())
def test_wrappers_are_left_out_of_names_and_real_children_are_not(case: str) -> None:
    # FareedKhan-dev/train-llm-from-scratch#36, karpathy/nanoGPT#325: one prefix was stripped, once.
    model, expected = wrapped_models()[case]
    assert list(clean_names(model).values()) == expected
    assert list(clean_names(model)) == list(model.state_dict())
    assert list(parameter_names({"model": model}).values()) == expected
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    assert describe_optimizer(optimizer, {"model": model})["param_groups"][0]["params"] == expected


def test_state_saved_under_wrappers_is_restored_without_them(save: Any) -> None:
    model, bare = wrapped_models()["all"][0], nn.Sequential(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    (parameter,) = model.parameters()
    optimizer.state[parameter] = {"momentum_buffer": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    resumed = torch.optim.SGD(bare.parameters(), lr=1, momentum=0.9)
    restore(resumed, bare, keep_state(optimizer, model, save))
    assert resumed.state[bare[0].weight]["momentum_buffer"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_names_that_meet_without_wrappers_are_refused() -> None:
    wrapper = nn.DataParallel(nn.Linear(2, 2, bias=False))
    wrapper.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    with pytest.raises(InvalidInputError, match=r"cannot name `module\.weight`: .* of `weight`: weight"):
        clean_names(wrapper)


# Absent state, groups, hyper-parameters


def test_parameter_that_never_got_a_gradient_stays_without_state(save: Any) -> None:
    # PrimeIntellect-ai/prime-rl#2800, F7: every restart died on the same missing `step`.
    model = mlp(bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    vault = keep_state(optimizer, model, save)
    other = mlp(bias=False)
    resumed = torch.optim.AdamW(other.parameters())
    train(other, resumed, range(1))
    plan = restore(resumed, other, vault)
    assert plan.never_stepped == ["2.weight"]
    assert other[2].weight not in resumed.state
    assert resumed.state[other[0].weight]["step"].item() == 1.0
    assert describe_optimizer(resumed, {"model": other})["never_stepped"] == ["2.weight"]


def test_empty_state_counts_as_absent_and_is_not_made_by_a_save() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    assert optimizer.state[model.weight] == {}
    assert describe_optimizer(optimizer, {"model": model})["never_stepped"] == ["weight"]


def test_state_that_is_gone_without_a_record_is_an_error(save: Any) -> None:
    # NVIDIA-NeMo/Megatron-Bridge#6032: a load that "succeeds" with a key dropped.
    model = mlp(bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    nest = keep_state(optimizer, model, save).specified()
    del nest["state"]["2.weight"]
    before = copy.deepcopy(optimizer.state_dict())
    plan = plan_optimizer(optimizer, {"model": model}, nest)
    assert plan.missing == ["optimizer.state.2.weight"]
    with pytest.raises(MismatchError, match=r"the snapshot lacks: `optimizer\.state\.2\.weight`") as caught:
        plan.check()
    assert caught.value.missing == ["optimizer.state.2.weight"]
    plan.check(strict=False)
    assert_same_state(optimizer.state_dict(), before)


def test_state_of_a_parameter_recorded_as_never_stepped_is_corrupt(save: Any) -> None:
    model = mlp(bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    nest = keep_state(optimizer, model, save).specified()
    nest["never_stepped"].append("0.weight")
    with pytest.raises(CorruptionError, match=r"optimizer\.state\.0\.weight"):
        plan_optimizer(optimizer, {"model": model}, nest)


def test_added_and_removed_parameters_are_reported_by_name_and_the_rest_can_be_loaded(save: Any) -> None:
    model = mlp(bias=False)
    optimizer = torch.optim.SGD([model[0].weight], lr=0.5, momentum=0.9)
    optimizer.state[model[0].weight] = {"momentum_buffer": torch.ones(3, 4)}
    small = keep_state(optimizer, model, save)
    larger = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = plan_optimizer(larger, {"model": model}, small.specified())
    assert (plan.missing, plan.unexpected) == (["optimizer.state.2.weight"], [])
    with pytest.raises(MismatchError, match=r"the snapshot lacks"):
        plan.check()
    small.read(plan.destinations)
    plan.commit()
    assert larger.state[model[0].weight]["momentum_buffer"].unique().tolist() == [1.0]
    assert model[2].weight not in larger.state
    assert larger.param_groups[0]["lr"] == 0.5
    assert len(larger.param_groups[0]["params"]) == 2

    plan = plan_optimizer(optimizer, {"model": model}, keep_state(larger, model, save).specified())
    assert (plan.missing, plan.unexpected) == ([], ["optimizer.state.2.weight"])
    with pytest.raises(MismatchError, match=r"the optimizer lacks"):
        plan.check()


def test_groups_come_back_with_tuples_none_and_empty_groups(save: Any) -> None:
    # pytorch/pytorch#143828, ray-project/ray#61937.
    def make(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 1, bias=False)
        groups = [{"params": [model.weight]}, {"params": [], "lr": lr, "tag": None}]
        return model, torch.optim.AdamW(groups, lr=lr, betas=(0.9, lr))

    model, optimizer = make(5e-4)
    other, resumed = make(0.1)
    restore(resumed, other, keep_state(optimizer, model, save))
    for found, expected in zip(resumed.param_groups, optimizer.param_groups, strict=True):
        for key in expected.keys() - {"params"}:
            assert type(found[key]) is type(expected[key])
            assert found[key] == expected[key]
    assert resumed.param_groups[1]["params"] == []
    assert resumed.param_groups[0]["betas"] == (0.9, 5e-4)
    other.weight.grad = torch.ones_like(other.weight)
    resumed.step()


def test_new_hyper_parameter_keeps_the_live_default_and_is_listed(save: Any) -> None:
    # pytorch/pytorch#146157: an older file fails after an upgrade.
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    vault = keep_state(optimizer, model, save)
    nest = vault.specified()
    del nest["param_groups"][0]["decoupled_weight_decay"]
    nest["param_groups"][0]["initial_lr"] = 0.7
    resumed = torch.optim.AdamW(model.parameters(), lr=0.1)
    plan = plan_optimizer(resumed, {"model": model}, nest)
    plan.check()
    plan.commit()
    assert plan.defaulted == ["optimizer.param_groups.0.decoupled_weight_decay"]
    assert resumed.param_groups[0]["decoupled_weight_decay"] is True
    assert (resumed.param_groups[0]["lr"], resumed.param_groups[0]["initial_lr"]) == (0.5, 0.7)


def test_tensor_hyper_parameter_is_restored_as_a_tensor_and_filled_in_place(save: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    vault = keep_state(optimizer, model, save)
    assert "optimizer.param_groups.0.lr" in vault.specs
    live = torch.tensor(0.5)
    resumed = torch.optim.AdamW(model.parameters(), lr=live)
    restore(resumed, model, vault)
    assert resumed.param_groups[0]["lr"] is live
    assert live.item() == 0.25


def test_other_partition_into_groups_is_a_mismatch_and_nothing_is_moved(save: Any) -> None:
    model = mlp(bias=False)
    one, two = model[0].weight, model[2].weight
    joined = torch.optim.SGD([one, two], lr=1.0)
    split = torch.optim.SGD([{"params": [one], "lr": 2.0}, {"params": [two], "lr": 3.0}])
    emptied = torch.optim.SGD([{"params": [one, two], "lr": 4.0}, {"params": [], "lr": 5.0}])
    for live, saved in ((joined, split), (split, joined), (joined, emptied), (emptied, joined)):
        plan = plan_optimizer(live, {"model": model}, keep_state(saved, model, save).specified())
        assert [(name, field) for name, field, _, _ in plan.mismatched] == [
            ("optimizer.param_groups", "partition")
        ]
        with pytest.raises(MismatchError, match="partition"):
            plan.check(strict=False)
    assert [group["lr"] for group in split.param_groups] == [2.0, 3.0]


def test_other_class_is_a_mismatch(save: Any) -> None:
    model = nn.Linear(2, 1)
    vault = keep_state(torch.optim.Adam(model.parameters()), model, save)
    plan = plan_optimizer(torch.optim.AdamW(model.parameters()), {"model": model}, vault.specified())
    assert plan.mismatched == [("optimizer", "class", "torch.optim.adamw.AdamW", "torch.optim.adam.Adam")]
    assert plan.destinations == {}
    with pytest.raises(MismatchError, match=r"another class: expected torch\.optim\.adamw\.AdamW") as caught:
        plan.check(strict=False)
    assert caught.value.mismatched == plan.mismatched


def test_other_shape_of_a_parameter_or_moment_is_a_mismatch_by_name(save: Any) -> None:
    model = nn.Linear(2, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    optimizer.state[model.weight] = {"momentum_buffer": torch.ones(3, 2)}
    vault = keep_state(optimizer, model, save)
    wider = nn.Linear(4, 3, bias=False)
    plan = plan_optimizer(torch.optim.SGD(wider.parameters(), lr=1), {"model": wider}, vault.specified())
    assert plan.mismatched == [("optimizer.state.weight", "shape", [3, 4], [3, 2])]
    factored = torch.optim.SGD(model.parameters(), lr=1)
    factored.state[model.weight] = {"momentum_buffer": torch.zeros(3)}
    plan = plan_optimizer(factored, {"model": model}, vault.specified())
    assert plan.mismatched == [("optimizer.state.weight.momentum_buffer", "shape", [3], [3, 2])]
    assert factored.state[model.weight]["momentum_buffer"].tolist() == [0.0, 0.0, 0.0]


def test_all_problems_are_raised_together_and_long_lists_are_cut() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(12)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    nest = describe_optimizer(optimizer, {"model": model})
    nest["param_groups"][0]["params"] = ["0", "gone"]
    plan = plan_optimizer(optimizer, {"model": model}, nest)
    with pytest.raises(MismatchError, match="; and 4 more") as caught:
        plan.check()
    assert caught.value.missing == [f"optimizer.state.{index}" for index in range(1, 12)]
    assert caught.value.unexpected == ["optimizer.state.gone"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda nest: nest.pop("class"),
        lambda nest: nest.update({"class": 3}),
        lambda nest: nest.update(state=[]),
        lambda nest: nest["state"].update(weight={}),
        lambda nest: nest["state"].update(weight=3),
        lambda nest: nest.update(param_groups={}),
        lambda nest: nest["param_groups"].append(3),
        lambda nest: nest["param_groups"][0].pop("params"),
        lambda nest: nest["param_groups"][0].update(params=[3]),
        lambda nest: nest["param_groups"][0]["params"].append("weight"),
        lambda nest: nest.update(never_stepped=3),
        lambda nest: nest.update(shapes=[]),
        lambda nest: nest.update(extra=[]),
    ],
)
def test_nest_of_another_form_is_corrupt_and_nothing_is_changed(damage: Any, save: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    nest = keep_state(optimizer, model, save).specified()
    damage(nest)
    with pytest.raises(CorruptionError, match="corrupt optimizer"):
        plan_optimizer(optimizer, {"model": model}, nest)
    with pytest.raises(CorruptionError):
        plan_optimizer(optimizer, {"model": model}, [])  # type: ignore[arg-type]
    assert_same_state(optimizer.state_dict(), before)


def test_plan_changes_nothing_before_its_commit_and_commits_once(save: Any) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    vault = keep_state(optimizer, model, save)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    plan = plan_optimizer(optimizer, {"model": model}, vault.specified())
    assert_same_state(optimizer.state_dict(), before)
    plan.commit()
    assert len(optimizer.state) == 0
    with pytest.raises(InternalError):
        plan.commit()


# Unusual optimizers


def test_state_that_is_no_parameters_is_kept_with_its_dtype(save: Any) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 1, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=1)

    model, optimizer = make()
    optimizer.state["count"] = 7
    optimizer.state[("shared", 1)] = {"scale": torch.tensor([1.5], dtype=torch.float16), "history": [1, (2,)]}
    vault = keep_state(optimizer, model, save)
    other, resumed = make()
    resumed.state["count"] = 0
    resumed.state["new"] = 1
    plan = restore(resumed, other, vault)
    assert_same_state(
        dict(resumed.state), {"count": 7, "new": 1, ("shared", 1): optimizer.state[("shared", 1)]}
    )
    assert plan.defaulted == ["optimizer.extra.new"]


def test_state_of_a_parameter_that_left_its_group_is_kept(save: Any) -> None:
    model, other = mlp(bias=False), mlp(bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    optimizer.state[model[2].weight] = {"momentum_buffer": torch.ones(2, 3)}
    optimizer.state[torch.zeros(1)] = {"momentum_buffer": torch.zeros(1)}
    optimizer.param_groups[0]["params"].pop()
    vault = keep_state(optimizer, model, save)
    assert list(vault.specs) == ["optimizer.state.2.weight.momentum_buffer"]
    resumed = torch.optim.SGD([other[0].weight], lr=1, momentum=0.9)
    restore(resumed, other, vault)
    assert resumed.state[other[2].weight]["momentum_buffer"].unique().tolist() == [1.0]


class TwoSequences(torch.optim.Optimizer):
    """Holds the weights it trains aside while it is in eval mode, as schedule-free optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"train_mode": True})

    def train(self, mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                for parameter in group["params"]:
                    swapped = self.state[parameter].setdefault("z", torch.zeros_like(parameter))
                    aside = swapped.clone()
                    swapped.copy_(parameter.detach())
                    parameter.data.copy_(aside)
                group["train_mode"] = mode


def test_mode_of_an_optimizer_with_two_weight_sequences_is_saved_with_them(save: Any) -> None:
    # facebookresearch/schedule_free#22.
    model, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    optimizer, resumed = TwoSequences(model.parameters()), TwoSequences(other.parameters())
    trained = model.weight.detach().clone()
    optimizer.train(False)
    vault = keep_state(optimizer, model, save)
    restore(resumed, other, vault)
    other.load_state_dict(model.state_dict())
    assert resumed.param_groups[0]["train_mode"] is False
    resumed.train(True)
    assert torch.equal(other.weight, trained)


def test_array_in_the_state_of_an_optimizer_is_refused_by_name() -> None:
    numpy = pytest.importorskip("numpy")
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    optimizer.state[model.weight] = {"history": [(1, numpy.zeros(2))]}
    with pytest.raises(
        InvalidInputError, match=r"cannot save `state\.weight\.history` of type `numpy\.ndarray`"
    ):
        describe_optimizer(optimizer, {"model": model})


def test_frozen_parameters_and_gradients_do_not_matter(save: Any) -> None:
    # pytorch/pytorch#140898: state came back empty while gradients were set.
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    model[0].weight.requires_grad_(False)
    assert model[2].weight.grad is not None
    vault = keep_state(optimizer, model, save)
    assert len(vault.specs) == 3 * 4
    restore(optimizer, model, vault)


def test_apply_restores_from_tensors_in_memory_and_survives_itself() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    plan = apply_optimizer(optimizer, {"model": model}, describe_optimizer(optimizer, {"model": model}))
    assert len(plan.matched) == 12
    assert_same_state(optimizer.state_dict(), before)
    other = torch.optim.AdamW(model.parameters())
    apply_optimizer(other, {"model": model}, describe_optimizer(optimizer, {"model": model}))
    assert_same_state(other.state_dict(), before)
    moment = optimizer.state[model[0].weight]["exp_avg"]
    assert other.state[model[0].weight]["exp_avg"].data_ptr() != moment.data_ptr()


def test_spec_is_replaced_everywhere_in_nested_state(save: Any) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    state = {
        "dirs": [torch.ones(2), torch.zeros(2)],
        "al": [None, torch.tensor(3.0)],
        "d": ({"t": torch.ones(1)},),
    }
    optimizer.state[model.weight] = state
    resumed = torch.optim.SGD(model.parameters(), lr=1)
    restore(resumed, model, keep_state(optimizer, model, save))
    assert_same_state(resumed.state[model.weight], state)
    assert "TensorSpec" in TensorSpec.__name__
    assert not any("Spec" in type(item).__name__ for item in resumed.state[model.weight]["dirs"])


# Overrides


def test_override_sets_every_group_and_says_so() -> None:
    model = mlp(bias=False)
    lr = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].weight], "lr": 0.1}, {"params": [model[2].weight], "lr": lr, "only": 1}]
    )
    assert override_groups(optimizer, {"lr": 0.25, "betas": (0.8, 0.9)}) == [
        "param_groups.0.lr: 0.1 -> 0.25",
        "param_groups.0.betas: (0.9, 0.999) -> (0.8, 0.9)",
        "param_groups.1.lr: 0.5 -> 0.25",
        "param_groups.1.betas: (0.9, 0.999) -> (0.8, 0.9)",
    ]
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[1]["lr"] is lr
    assert lr.item() == 0.25
    assert override_groups(optimizer, {"only": 2}) == ["param_groups.1.only: 1 -> 2"]
    assert "only" not in optimizer.param_groups[0]
    assert override_groups(optimizer, {}) == []


@pytest.mark.parametrize("key", ["learning_rate", "params", ""])
def test_unknown_override_lists_the_legal_ones_and_changes_nothing(key: str) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        InvalidInputError, match=f"invalid override `{key}`: .*legal are .*lr, .*momentum"
    ) as caught:
        override_groups(optimizer, {"lr": 0.5, key: 1})
    assert caught.value.what == key
    assert optimizer.param_groups[0]["lr"] == 0.1
