"""Objects of every kind come back where they were: nests, wrappers, hooks, extra state, users' reports."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import assert_same, copy_of
from torch import nn

from varvite import CheckpointManager
from varvite.errors import InvalidInputError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", chunk_bytes=4096) as manager:
        yield manager


# Nests


def test_a_nest_keeps_its_containers_and_tensors_and_takes_the_saved_values(manager):
    saved = {
        "epoch": 3,
        "w": torch.ones(3),
        "pair": (torch.full((2,), 2.0), 5),
        "history": [{"k": 1}, {"k": 2}],
    }
    manager.save(0, progress=saved, array=np.arange(3), bare=torch.tensor(7))
    live = {"epoch": 0, "w": torch.zeros(3), "pair": (torch.zeros(2), 0), "history": []}
    kept = (live["w"], live["pair"][0], live["history"])
    array, bare = np.zeros(3, np.int64), torch.tensor(0)
    report = manager.resume(progress=live, array=array, bare=bare)
    assert_same(live, saved)
    assert (live["w"] is kept[0], live["pair"][0] is kept[1], live["history"] is kept[2]) == (
        True,
        True,
        True,
    )
    assert (array.tolist(), bare.item()) == ([0, 1, 2], 7)
    assert report.matched == ["progress.w", "progress.pair.0", "array", "bare"]


def test_the_positional_nest_is_restored_by_the_names_of_its_keys(manager):
    manager.save(0, {"w": torch.ones(3), "progress": {"epoch": 4}, 7: 1}, model=nn.Linear(1, 1))
    w, progress = torch.zeros(3), {"epoch": 0}
    manager.resume(w=w, progress=progress, model=nn.Linear(1, 1))
    assert (w.tolist(), progress) == ([1, 1, 1], {"epoch": 4})
    with pytest.raises(MismatchError) as caught:
        manager.resume(model=nn.Linear(1, 1))
    assert caught.value.unexpected == ["w"]


def test_what_only_the_live_nest_has_is_missing_and_keeps_its_value(manager):
    manager.save(0, progress={"epoch": 3, "deep": {"a": 1}})
    live = {"epoch": 0, "best": 0.5, "deep": {"a": 0, "b.c": [2]}, "w": torch.zeros(2)}
    before = copy_of(live)
    with pytest.raises(MismatchError) as caught:
        manager.resume(progress=live)
    assert caught.value.missing == ["progress.w", "progress.best", 'progress.deep."b.c"']
    assert_same(live, before)


def test_without_strict_the_rest_of_a_nest_is_restored(manager):
    manager.save(0, progress={"epoch": 3, "w": torch.ones(2)})
    live = {"epoch": 0, "best": 0.5, "w": torch.zeros(2)}
    report = manager.resume(strict=False, progress=live)
    assert_same(live, {"epoch": 3, "best": 0.5, "w": torch.ones(2)})
    assert report.missing == ["progress.best"]


@pytest.mark.parametrize(
    ("saved", "live", "problem"),
    [
        (torch.ones(2), torch.zeros(3), ("x.v", "shape", [3], [2])),
        (torch.ones(2), torch.zeros(2, dtype=torch.float16), ("x.v", "dtype", "float16", "float32")),
        (torch.ones(2), torch.zeros(2, dtype=torch.int64), ("x.v", "dtype", "int64", "float32")),
        (np.ones(2), torch.zeros(2, dtype=torch.float64), ("x.v", "kind", "tensor", "array")),
    ],
)
def test_a_tensor_of_a_nest_that_differs_is_refused(manager, saved, live, problem):
    manager.save(0, x={"v": saved})
    with pytest.raises(MismatchError) as caught:
        manager.resume(x={"v": live})
    assert caught.value.mismatched == [problem]
    assert live.sum() == 0


def test_a_tensor_of_a_nest_is_widened_and_narrowed_on_request(manager):
    manager.save(0, x=[torch.full((2,), 1 + 2**-12)])
    wide, narrow = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bfloat16)
    manager.resume(x=[wide])
    manager.resume(x=[narrow], override={"allow_narrowing": True})
    assert (wide.tolist(), narrow.tolist()) == ([1 + 2**-12] * 2, [1, 1])


def test_tensors_of_a_nest_wherever_they_lie(manager):
    base = torch.arange(6.0).reshape(2, 3)
    tied = torch.ones(2)
    manager.save(0, x={"t": base.t(), "a": tied, "b": tied, "expanded": torch.ones(1).expand(3)})
    live = {"t": torch.zeros(2, 3).t(), "a": torch.zeros(2), "b": torch.zeros(2), "expanded": torch.zeros(3)}
    manager.resume(x=live)
    assert_same(live, {"t": base.t(), "a": tied, "b": tied, "expanded": torch.ones(3)})
    one = torch.zeros(2)
    manager.save(1, x={"a": torch.ones(2), "b": torch.zeros(2)})
    with pytest.raises(MismatchError, match=r"`x.b` has another value"):
        manager.resume(x={"a": one, "b": one})


def test_a_nest_and_a_stateful_object_that_share_memory_with_a_module(manager):
    class Holder:
        def __init__(self, weight: torch.Tensor) -> None:
            self.weight = weight

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"weight": self.weight}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.weight = state["weight"]

    model = nn.Linear(2, 2)
    weight = model.weight.detach().clone()
    manager.save(0, model=model, nest={"w": model.weight}, holder=Holder(model.weight.detach()))
    for apart in (True, False):
        live = nn.Linear(2, 2)
        other = torch.zeros(2, 2) if apart else live.weight
        holder = Holder(other)
        manager.resume(model=live, nest=(nest := {"w": other}), holder=holder)
        assert_same([live.weight.detach(), nest["w"].detach(), holder.weight.detach()], [weight] * 3)
        assert nest["w"] is other


@pytest.mark.parametrize("value", [3, "text", None, (1, 2), (torch.zeros(1), 3)], ids=str)
def test_a_plain_value_can_not_be_restored_in_place(manager, value):
    manager.save(0, epoch=value)
    with pytest.raises(InvalidInputError) as caught:
        manager.resume(epoch=value)
    assert "can't be filled in place" in caught.value.message
    assert "load()['epoch']" in caught.value.hint


def test_a_tuple_of_tensors_is_filled(manager):
    manager.save(0, pair=(torch.ones(2), [torch.ones(1)]))
    pair = (torch.zeros(2), [torch.zeros(1)])
    manager.resume(pair=pair)
    assert_same(pair, (torch.ones(2), [torch.ones(1)]))


# Modules


class DataParallelLike(nn.Module):
    """Not one of torch's wrappers: its child is called `module` by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_wrappers_leave_no_trace_in_names_and_a_child_called_module_keeps_its_name(manager):
    model = nn.Sequential(nn.Linear(2, 2), DataParallelLike())
    manager.save(0, model=nn.DataParallel(model), optimizer=torch.optim.SGD(model.parameters(), lr=1))
    names = [entry.name for entry in manager.entries() if entry.rank is None]
    assert sorted(names) == ["model.0.bias", "model.0.weight", "model.1.module.bias", "model.1.module.weight"]
    other = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)), DataParallelLike())
    manager.resume(model=other, optimizer=torch.optim.SGD(other.parameters(), lr=1))
    assert_same(other[0].module.weight.detach(), model[0].weight.detach())
    plain = nn.Sequential(nn.Linear(2, 2), DataParallelLike())
    manager.resume(model=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=1))
    assert_same(plain[1].module.bias.detach(), model[1].module.bias.detach())


def test_buffers_persistent_and_not(manager):
    class Buffers(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("kept", torch.full((2,), value))
            self.register_buffer("dropped", torch.full((2,), value), persistent=False)

    manager.save(0, model=Buffers(1.0))
    live = Buffers(5.0)
    manager.resume(model=live)
    assert (live.kept.tolist(), live.dropped.tolist()) == ([1, 1], [5, 5])


def test_channels_last_and_other_strides_of_a_module(manager):
    model = nn.Conv2d(3, 8, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    manager.save(0, model=model, optimizer=optimizer)
    for layout in (torch.channels_last, torch.contiguous_format):
        other = nn.Conv2d(3, 8, 2).to(memory_format=layout)
        restored = torch.optim.AdamW(other.parameters())
        manager.resume(model=other, optimizer=restored)
        assert other.weight.is_contiguous(memory_format=layout)
        assert_same(other.weight.detach(), model.weight.detach())
        assert_same(restored.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


class Extra(nn.Module):
    """A module with state that is not a tensor."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [{"scale": 512, "history": [1.5]}, torch.arange(3.0), {"amax": torch.ones(2)}, np.arange(3), 7],
    ids=repr,
)
def test_extra_state_of_modules(manager, extra):
    model = nn.Sequential(Extra(extra))
    manager.save(0, model=model)
    live = nn.Sequential(Extra(None if isinstance(extra, dict | int) else extra * 0))
    manager.resume(model=live)
    assert_same(live[0].extra, extra)
    assert_same(live[0].linear.weight.detach(), model[0].linear.weight.detach())


def test_extra_state_that_one_side_lacks_is_reported(manager):
    model = nn.ModuleDict({"a": Extra(1)})
    manager.save(0, model=model)
    plain = nn.ModuleDict({"a": nn.ModuleDict({"linear": nn.Linear(2, 2)})})
    manager.save(1, model=plain)
    with pytest.raises(MismatchError) as caught:
        manager.resume(0, model=plain)
    assert caught.value.unexpected == ["model.a._extra_state"]
    with pytest.raises(MismatchError) as caught:
        manager.resume(1, model=nn.ModuleDict({"a": Extra(2)}))
    assert caught.value.missing == ["model.a._extra_state"]


def test_a_hook_that_changes_what_is_saved_is_undone_by_its_partner(manager):
    class Halved(nn.Module):
        """Saves half of its weight under another name, and doubles what it loads."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            self.register_state_dict_post_hook(self._halve)
            self.register_load_state_dict_pre_hook(self._double)

        @staticmethod
        def _halve(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            state[f"{prefix}half"] = state.pop(f"{prefix}weight") / 2

        @staticmethod
        def _double(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            state[f"{prefix}weight"] = state.pop(f"{prefix}half") * 2

    model, live = nn.Sequential(Halved()), nn.Sequential(Halved())
    manager.save(0, model=model)
    assert_same(dict(manager.load()["model"]), {"0.half": model[0].weight.detach() / 2})
    manager.resume(model=live)
    assert_same(live[0].weight.detach(), model[0].weight.detach())


def test_parameters_keep_their_identity_their_gradient_and_their_hooks(manager):
    manager.save(0, model=nn.Linear(2, 2))
    live = nn.Linear(2, 2)
    weight = live.weight
    weight.grad = torch.ones(2, 2)
    manager.resume(model=live)
    assert live.weight is weight
    assert (weight.requires_grad, weight.is_leaf, weight.grad.tolist()) == (True, True, [[1, 1], [1, 1]])


# What users of other engines suffered from (research, section 2)


def test_views_of_one_flat_buffer_cost_their_own_bytes(manager):
    flat = torch.arange(1_000_000.0)
    model = nn.ParameterList([nn.Parameter(part) for part in flat.chunk(10)])
    info = manager.save_sync(0, {"part": flat.chunk(10)[3]}, rng=False)
    assert (info.raw_bytes, info.stored_bytes < 420_000) == (400_000, True)
    assert manager.save_sync(1, model=model, rng=False).raw_bytes == 4_000_000
    other_flat = torch.zeros(1_000_000)
    other = nn.ParameterList([nn.Parameter(part) for part in other_flat.chunk(10)])
    manager.resume(model=other)
    assert_same(other_flat, flat)


def test_an_ema_with_a_plain_count_comes_back_beside_the_raw_weights(manager):
    class Ema:
        def __init__(self, model: nn.Module) -> None:
            self.shadow = copy_of(model.state_dict())
            self.updates = 0

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow, "updates": self.updates}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow, self.updates = state["shadow"], state["updates"]

    model = nn.Linear(1, 1)
    ema = Ema(model)
    ema.shadow["weight"].fill_(0.5)
    ema.updates = 123
    with torch.no_grad():
        model.weight.fill_(1.0)
    manager.save(0, model=model, ema=ema)
    other = nn.Linear(1, 1)
    restored = Ema(other)
    manager.resume(model=other, ema=restored)
    assert (other.weight.item(), restored.shadow["weight"].item(), restored.updates) == (1.0, 0.5, 123)
    assert type(restored.shadow) is OrderedDict


def test_an_optimizer_with_two_weight_sequences_is_saved_in_its_mode(manager):
    class ScheduleFree(torch.optim.SGD):
        """Swaps parameters with `z` between training and evaluation."""

        def swap(self, *, train: bool) -> None:
            for group in self.param_groups:
                if group.get("train_mode", True) is not train:
                    for one in group["params"]:
                        held = one.detach().clone()
                        one.data.copy_(self.state[one]["z"])
                        self.state[one]["z"].copy_(held)
                    group["train_mode"] = train

    model = nn.Linear(1, 1, bias=False)
    optimizer = ScheduleFree(model.parameters(), lr=1)
    optimizer.state[model.weight]["z"] = torch.full((1, 1), 9.0)
    with torch.no_grad():
        model.weight.fill_(4.0)
    optimizer.param_groups[0]["train_mode"] = True
    optimizer.swap(train=False)
    manager.save(0, model=model, optimizer=optimizer)
    other = nn.Linear(1, 1, bias=False)
    restored = ScheduleFree(other.parameters(), lr=1)
    restored.param_groups[0]["train_mode"] = True
    manager.resume(model=other, optimizer=restored)
    assert (other.weight.item(), restored.param_groups[0]["train_mode"]) == (9.0, False)
    restored.swap(train=True)
    assert (other.weight.item(), restored.state[other.weight]["z"].item()) == (4.0, 9.0)


@pytest.mark.parametrize("in_sequence", [False, True])
def test_a_scheduler_of_another_class_is_refused_and_nothing_changes(manager, in_sequence):
    schedulers = torch.optim.lr_scheduler
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def build(scheduler):
        if not in_sequence:
            return scheduler
        parts = [schedulers.LinearLR(optimizer, 0.5), scheduler]
        return schedulers.SequentialLR(optimizer, parts, milestones=[3])

    manager.save_sync(1, model=model, optimizer=optimizer, scheduler=build(schedulers.StepLR(optimizer, 5)))
    other = build(schedulers.CosineAnnealingLR(optimizer, 10))
    before = other.state_dict()
    with pytest.raises(MismatchError) as caught:
        manager.resume(model=model, optimizer=optimizer, scheduler=other)
    prefix = "scheduler.1" if in_sequence else "scheduler"
    assert caught.value.missing == [f"{prefix}.T_max", f"{prefix}.eta_min"]
    assert caught.value.unexpected == [f"{prefix}.step_size", f"{prefix}.gamma"]
    assert other.state_dict() == before


def test_a_scheduler_may_lack_what_only_some_versions_of_torch_keep(manager):
    class OfAnOlderTorch:
        def __init__(self, scheduler):
            self.scheduler = scheduler

        def state_dict(self):
            state = {**self.scheduler.state_dict(), "verbose": False}
            return {key: value for key, value in state.items() if key != "_is_initial"}

        def load_state_dict(self, state):
            raise NotImplementedError

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    scheduler.last_epoch = 3
    manager.save_sync(1, scheduler=OfAnOlderTorch(scheduler))
    live = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    manager.resume(scheduler=live)
    assert live.last_epoch == 3


def test_a_scheduler_does_not_step_by_being_restored(manager):
    model = nn.Linear(1, 1)

    def build() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    optimizer, scheduler = build()
    rates = []
    for step in range(6):
        optimizer.step()
        if step == 2:
            manager.save(step, model=model, optimizer=optimizer, scheduler=scheduler)
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    optimizer, scheduler = build()
    manager.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    resumed = []
    for step in range(2, 6):
        if step > 2:
            optimizer.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer, "_opt_called", True, raising=False)
            scheduler.step()
        resumed.append(optimizer.param_groups[0]["lr"])
    assert resumed == rates[2:]


def test_a_scaler_comes_back_as_it_was(manager):
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler._growth_tracker.fill_(7)
    model = nn.Linear(1, 1)
    manager.save(0, model=model, optimizer=torch.optim.AdamW(model.parameters()), scaler=scaler)
    restored = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    manager.resume(model=model, optimizer=optimizer, scaler=restored)
    assert (restored.get_scale(), restored.state_dict()["_growth_tracker"], len(optimizer.state)) == (
        512.0,
        7,
        0,
    )


def test_a_loader_is_restored_last_of_the_objects_and_named(manager):
    order: list[str] = []

    class Stateful:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, int]:
            return {"position": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            order.append(f"{self.name} {state['position']}")

    class Loader(Stateful):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    objects = {"loader": Loader("loader"), "scheduler": Stateful("scheduler"), "model": nn.Linear(1, 1)}
    manager.save(0, **objects)
    report = manager.resume(**objects)
    assert order == ["scheduler 3", "loader 3"]
    assert (report.restored, report.loader) == (["model", "scheduler", "loader"], "restored")


class Picky:
    """Takes no state but its own, and says so when it is asked before a restore."""

    def __init__(self, length: int) -> None:
        self.length = length

    def state_dict(self) -> dict[str, int]:
        return {"length": self.length}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("must not be asked to load")

    def check_state_dict(self, state: dict[str, int]) -> None:
        if state["length"] != self.length:
            raise MismatchError("data has another length", name="data", expected=self.length, found=state)


def test_an_object_that_refuses_its_state_does_so_before_anything_changes(manager):
    model = nn.Linear(3, 3)
    manager.save_sync(1, model=model, data=Picky(5))
    live = nn.Linear(3, 3)
    before, stream = copy_of(live.state_dict()), torch.get_rng_state()
    with pytest.raises(MismatchError, match="another length"):
        manager.resume(model=live, data=Picky(6))
    assert_same(live.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), stream)


def test_many_small_tensors_make_one_pack_of_about_their_size(manager):
    state = {f"t{index}": torch.full((32,), float(index)) for index in range(5000)}
    info = manager.save_sync(0, state, rng=False)
    assert info.stored_bytes <= 3 * info.raw_bytes
    live = {name: torch.zeros(32) for name in state}
    manager.load_into(live)
    assert_same(live, state)
