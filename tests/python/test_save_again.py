"""A state that changes its form between saves of one manager: each save is what a first save would be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import assert_same
from torch import nn

from varvite import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Run:
    """A model, an optimizer that has stepped, and a nest with tensors and plain values."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        self.model.register_buffer("seen", torch.zeros(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.nest: dict[str, Any] = {"a": torch.arange(4.0), "more": [torch.ones(2), 3], "step": 1}
        self.train()

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        self.optimizer.step()


def values_change_in_place(run: Run) -> Iterator[None]:
    run.train()
    run.nest["a"].add_(1)
    run.nest["more"][1] += 1
    yield


def parameter_replaced(run: Run) -> Iterator[None]:
    old = run.model[0].weight
    run.model[0].weight = new = nn.Parameter(torch.full((3, 3), 7.0))
    run.optimizer.param_groups[0]["params"][0] = new
    del run.optimizer.state[old]
    yield
    run.train()
    yield


def memory_replaced_under_a_parameter(run: Run) -> Iterator[None]:
    weight = run.model[0].weight
    weight.data = weight.data.double() + 1
    yield
    weight.data = torch.zeros(5, 2)
    yield


def model_converted(run: Run) -> Iterator[None]:
    run.model.to(torch.bfloat16)
    yield
    run.model.to(torch.float32)
    yield


def module_added_and_removed(run: Run) -> Iterator[None]:
    run.model.append(nn.BatchNorm1d(3))
    yield
    del run.model[1]
    run.optimizer.param_groups[0]["params"] = list(run.model[0].parameters())
    yield


def buffer_goes(run: Run) -> Iterator[None]:
    run.model.seen = torch.ones(4, dtype=torch.int16)
    yield
    run.model.register_buffer("seen", torch.ones(4), persistent=False)
    yield
    run.model.seen = None
    yield


def tensors_move_in_the_nest(run: Run) -> Iterator[None]:
    run.nest["b"] = run.nest.pop("a")
    yield
    run.nest["more"].reverse()
    run.nest["b"], run.nest["more"][1] = run.nest["more"][1], run.nest["b"]
    yield


def optimizer_state_emptied_and_loaded(run: Run) -> Iterator[None]:
    saved = run.optimizer.state_dict()
    run.optimizer.state.clear()
    yield
    run.optimizer.load_state_dict(saved)
    yield
    del run.optimizer.state[run.model[0].weight]
    yield


def tie_made_and_broken(run: Run) -> Iterator[None]:
    run.nest["tied"] = run.nest["a"]
    run.model[1].weight = run.model[0].weight
    run.optimizer.param_groups[0]["params"].pop()
    yield
    run.nest["tied"] = run.nest["a"].clone()
    run.model[1].weight = nn.Parameter(run.model[0].weight.detach().clone())
    yield
    run.nest["tied"] = run.nest["a"].view(4)
    yield


def tensor_becomes_a_plain_value_and_back(run: Run) -> Iterator[None]:
    run.nest["a"] = 4.0
    yield
    run.nest["a"] = {"inner": torch.zeros(1)}
    yield
    run.nest["a"] = torch.full((4,), 9.0)
    yield


def tensor_resized_in_place(run: Run) -> Iterator[None]:
    run.nest["a"].resize_(9).fill_(2)
    yield
    run.nest["a"].resize_(2)
    yield
    run.nest["a"].set_(torch.arange(3.0))
    yield


def tensor_becomes_a_view(run: Run) -> Iterator[None]:
    run.nest["a"] = torch.arange(8.0)[::2]
    yield
    run.nest["a"] = run.nest["a"].contiguous()
    yield
    run.nest["a"] = torch.complex(torch.ones(2), torch.ones(2)).conj()
    yield


def groups_change(run: Run) -> Iterator[None]:
    run.model.append(nn.Linear(3, 1))
    run.optimizer.add_param_group({"params": run.model[2].parameters(), "lr": 0.5, "tags": ["new"]})
    yield
    run.optimizer.param_groups[1]["tags"].append("old")
    run.optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    yield


def hook_comes_and_goes(run: Run) -> Iterator[None]:
    def double(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    hook = run.model[1].register_state_dict_post_hook(double)
    yield
    hook.remove()
    yield


def methods_are_overridden(run: Run) -> Iterator[None]:
    run.model[1].get_extra_state = lambda: {"ignored": "torch asks the class"}
    yield
    run.model[0].state_dict = lambda destination, prefix, keep_vars: destination.update(
        {f"{prefix}only": torch.ones(1)}
    )
    yield


CHANGES = [
    values_change_in_place,
    parameter_replaced,
    memory_replaced_under_a_parameter,
    model_converted,
    module_added_and_removed,
    buffer_goes,
    tensors_move_in_the_nest,
    optimizer_state_emptied_and_loaded,
    tie_made_and_broken,
    tensor_becomes_a_plain_value_and_back,
    tensor_resized_in_place,
    tensor_becomes_a_view,
    groups_change,
    hook_comes_and_goes,
    methods_are_overridden,
]


def written(manager: CheckpointManager, run: Run, step: int) -> tuple[Any, ...]:
    """Saves and returns everything that the snapshot says of the state: bytes by their digests."""
    info = manager.save(step, run.nest, rng=False, model=run.model, optimizer=run.optimizer).wait()
    reader = manager._engine.open(info.seq)
    rows = reader.entries()
    digests = [reader.chunk_digests(index) for index in range(len(rows))]
    return reader.structure(), [row[:6] for row in rows], digests, info.digest


def assert_loads_as_live(loaded: dict[str, Any], run: Run) -> None:
    """Compares with what torch itself says, which no code of a save has a part in."""
    live = {
        key: value.resolve_conj() if isinstance(value, torch.Tensor) else value
        for key, value in run.nest.items()
    }
    assert_same({key: loaded[key] for key in run.nest}, live)
    assert_same(loaded["model"], dict(run.model.state_dict()))
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    state = {
        names[parameter]: dict(own) for parameter, own in run.optimizer.state.items() if parameter in names
    }
    assert {name: dict(own) for name, own in loaded["optimizer"]["state"].items()}.keys() == state.keys()
    for name, own in state.items():
        assert_same(dict(loaded["optimizer"]["state"][name]), own)
    for saved, group in zip(loaded["optimizer"]["param_groups"], run.optimizer.param_groups, strict=True):
        assert saved.keys() == group.keys()
        assert_same({key: saved[key] for key in group if key != "params"}, without_params(group))
        assert saved["params"] == [names[parameter] for parameter in group["params"]]


def without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_save_of_a_manager_is_what_a_first_save_would_be(
    tmp_path: Path, change: Callable[[Run], Iterator[None]]
) -> None:
    run = Run()
    with CheckpointManager(tmp_path / "kept", threads=2, chunk_bytes=4096) as manager:
        before = written(manager, run, 0)
        for step, _ in enumerate(change(run), start=1):
            for attempt in ("first", "second"):
                with CheckpointManager(tmp_path / f"{step}-{attempt}", threads=2, chunk_bytes=4096) as fresh:
                    assert written(manager, run, step) == written(fresh, run, step)
            assert_loads_as_live(manager.load(), run)
        assert step > 0
        assert change is hook_comes_and_goes or written(manager, run, 99) != before
