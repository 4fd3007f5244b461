"""Resumed training equals training that never stopped, and what does not match is reported by name."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import assert_same, copy_of, flip, packs
from torch import nn

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError, MismatchError, SnapshotNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", chunk_bytes=4096) as manager:
        yield manager


class Counter:
    """An object of the caller's with state of many kinds."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.average = torch.zeros(3)
        self.best = math.inf

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "average": self.average, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.average, self.best = state["seen"], state["average"], state["best"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), foreach=False),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, amsgrad=True, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, fused=True),
    "adamw_capturable_lr": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(3e-3), foreach=False
    ),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5, centered=True),
}


class Run:
    """A small training run with everything that a run has."""

    def __init__(
        self, make_optimizer: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, seed: int = 0
    ):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)).to(
            dtype
        )
        self.optimizer = make_optimizer(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.counter = Counter()
        self.dtype = dtype

    def step(self, step: int) -> float:
        inputs = torch.randn(4, 5).to(self.dtype) + random.random() + np.random.rand()
        loss = self.model(inputs).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.counter.seen.append(step)
        self.counter.average += step
        self.counter.best = min(self.counter.best, loss.item())
        return loss.item()

    def objects(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "counter")
        return {name: getattr(self, name) for name in names}

    def facts(self) -> dict[str, Any]:
        state = [copy_of(self.optimizer.state[one]) for one in self.model.parameters()]
        groups = [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups]
        return {
            "model": dict(copy_of(self.model.state_dict())),
            "state": state,
            "groups": copy_of(groups),
            "scheduler": self.scheduler.state_dict(),
            "counter": copy_of(self.counter.state_dict()),
            "draws": (random.random(), np.random.rand(3), torch.rand(3)),
        }


def seed_all() -> None:
    random.seed(1)
    np.random.seed(2)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_resumed_training_equals_training_that_never_stopped_bit_for_bit(manager, name, dtype):
    make = OPTIMIZERS[name]
    seed_all()
    whole = Run(make, dtype)
    losses = [whole.step(step) for step in range(7)]
    expected = whole.facts()

    seed_all()
    first = Run(make, dtype)
    resumed_losses = [first.step(step) for step in range(3)]
    manager.save(2, **first.objects(), metrics={"loss": resumed_losses[-1]})
    first.step(3)

    random.seed(77)
    np.random.seed(77)
    second = Run(make, dtype, seed=77)
    report = manager.resume(**second.objects())
    assert (report.step, report.next_step, report.fresh, report.rng) == (2, 3, False, "restored")
    assert report.restored == ["model", "optimizer", "scheduler", "scaler", "counter"]
    assert (report.missing, report.unexpected, report.mismatched, report.defaulted) == ([], [], [], [])
    assert report.digest == report.snapshot.digest == manager.info().digest
    assert report.rng_skipped == []
    resumed_losses += [second.step(step) for step in range(report, 7)]
    assert_same(resumed_losses, losses)
    assert_same(second.facts(), expected)


def test_a_report_is_an_int_and_says_what_was_done(manager):
    model = nn.Linear(2, 2)
    manager.save(9, model=model)
    report = manager.resume(model=model)
    assert (int(report), list(range(report, 12)), "abcdefghijkl"[report]) == (10, [10, 11], "k")
    assert "resumed after step 9: model" in str(report)
    assert report.verified_bytes >= 24
    assert sorted(report.matched) == ["model.bias", "model.weight"]


def test_a_fresh_start_touches_nothing(manager):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy_of(model.state_dict())
    draws = torch.get_rng_state()
    report = manager.resume(model=model, optimizer=optimizer)
    assert (report.fresh, int(report), report.step, report.snapshot, report.rng) == (
        True,
        0,
        None,
        None,
        "absent",
    )
    assert_same(dict(model.state_dict()), dict(before))
    assert_same(torch.get_rng_state(), draws)
    assert len(optimizer.state) == 0
    with pytest.raises(SnapshotNotFoundError):
        manager.resume(require=True, model=model)
    for ref in (0, "healthy", "latest~1", "tag:x"):
        with pytest.raises(SnapshotNotFoundError):
            manager.resume(ref, model=model)


def test_moments_keep_their_own_dtype_whatever_that_of_the_parameter(manager):
    model = nn.Linear(3, 3).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for one in model.parameters():
        optimizer.state[one] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(one.shape) * (1 + 2**-12),
            "exp_avg_sq": torch.rand(one.shape, dtype=torch.float64),
            "codes": torch.arange(one.numel(), dtype=torch.uint8),
        }
    manager.save(0, model=model, optimizer=optimizer)
    expected = [copy_of(optimizer.state[one]) for one in model.parameters()]
    other = nn.Linear(3, 3).to(torch.bfloat16)
    restored = torch.optim.AdamW(other.parameters())
    manager.resume(model=other, optimizer=restored)
    assert_same([restored.state[one] for one in other.parameters()], expected)


def test_moments_go_to_the_parameter_of_their_name_whatever_the_order(manager):
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    optimizer = torch.optim.SGD([model["a"].weight, model["b"].weight], lr=0.1, momentum=0.9)
    (model["a"].weight.sum() + 2 * model["b"].weight.sum()).backward()
    optimizer.step()
    manager.save(0, model=model, optimizer=optimizer)
    other = torch.optim.SGD([model["b"].weight, model["a"].weight], lr=0.7, momentum=0.1)
    manager.resume(model=model, optimizer=other)
    moments = {key: other.state[model[key].weight]["momentum_buffer"] for key in "ab"}
    assert_same(moments, {"a": torch.ones(2, 2), "b": torch.full((2, 2), 2.0)})
    assert (other.param_groups[0]["lr"], other.param_groups[0]["momentum"]) == (0.1, 0.9)


def test_a_parameter_that_never_stepped_stays_without_state(manager):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    manager.save(0, model=model, optimizer=optimizer)
    other = torch.optim.AdamW(model.parameters())
    report = manager.resume(model=model, optimizer=other)
    assert report.never_stepped == ["1.weight", "1.bias"]
    assert [one in other.state for one in model.parameters()] == [True, True, False, False]


def test_tied_weights_load_and_stay_tied_and_equal_ones_do_not_become_so(manager):
    def build() -> nn.Module:
        model = nn.ModuleDict({"emb": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        model["head"].weight = model["emb"].weight
        model["one"], model["two"] = nn.Linear(2, 2), nn.Linear(2, 2)
        model["two"].load_state_dict(model["one"].state_dict())
        return model

    model = build()
    manager.save(0, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1))
    other = build()
    other["two"].weight.data.zero_()
    report = manager.resume(model=other, optimizer=torch.optim.SGD(other.parameters(), lr=1))
    assert {"model.emb.weight", "model.head.weight"} <= set(report.matched)
    assert other["head"].weight is other["emb"].weight
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    loaded = manager.load()["model"]
    assert loaded["head.weight"] is loaded["emb.weight"]
    assert loaded["two.weight"] is not loaded["one.weight"]


def test_weights_that_are_tied_now_and_were_not_are_an_error_unless_they_are_equal(manager):
    apart = nn.ModuleDict({"emb": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    manager.save(0, model=apart)
    tied = nn.ModuleDict({"emb": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    tied["head"].weight = tied["emb"].weight
    with pytest.raises(
        MismatchError, match=r"`model.head.weight` has another value: expected that of `model.emb"
    ):
        manager.resume(model=tied)
    apart["head"].load_state_dict(apart["emb"].state_dict())
    manager.save(1, model=apart)
    manager.resume(model=tied)
    assert_same(tied["head"].weight.detach(), apart["emb"].weight.detach())


def test_a_module_and_a_part_of_it_under_two_keywords(manager):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    manager.save(0, model=model, head=model[1])
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    manager.resume(model=other, head=other[1])
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    manager.save(1, model=model, head=nn.Linear(2, 2))
    with pytest.raises(MismatchError, match="with which it shares memory"):
        manager.resume(model=other, head=other[1])


def test_an_optimizer_is_named_as_at_the_save_whatever_modules_stand_beside_it_now(manager):
    model, ema = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moment = copy_of(optimizer.state[model.weight]["momentum_buffer"])
    manager.save(0, model=model, ema=ema, optimizer=optimizer)
    manager.save(1, model=model, optimizer=optimizer)
    for step, objects in ((0, {"model": model}), (1, {"model": model, "ema": ema})):
        restored = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        manager.resume(step, strict=False, optimizer=restored, **objects)
        assert_same(restored.state[model.weight]["momentum_buffer"], moment)


def test_strict_refuses_names_of_either_side_and_changes_nothing(manager):
    saved = nn.ModuleDict({"a": nn.Linear(2, 2), "old": nn.Linear(2, 2)})
    manager.save(0, model=saved, extra={"w": torch.ones(2)})
    live = nn.ModuleDict({"a": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    before = copy_of(live.state_dict())
    with pytest.raises(MismatchError) as caught:
        manager.resume(model=live, scheduler=Counter())
    assert caught.value.missing == ["model.new.weight", "model.new.bias", "scheduler"]
    assert caught.value.unexpected == ["model.old.weight", "model.old.bias", "extra"]
    assert "the snapshot lacks `model.new.weight`" in caught.value.message
    assert "only the snapshot has `extra`" in caught.value.message
    assert_same(dict(live.state_dict()), dict(before))

    report = manager.resume(strict=False, model=live, scheduler=Counter())
    assert report.missing == caught.value.missing
    assert report.unexpected == caught.value.unexpected
    assert sorted(report.matched) == ["model.a.bias", "model.a.weight"]
    assert_same(live["a"].weight.detach(), saved["a"].weight.detach())
    assert_same(live["new"].weight.detach(), before["new.weight"])


def test_nothing_matched_is_an_error_even_without_strict(manager):
    manager.save(0, model=nn.ModuleDict({"a": nn.Linear(2, 2)}))
    with pytest.raises(MismatchError, match="no name of the snapshot matches: nothing would be loaded"):
        manager.resume(strict=False, model=nn.ModuleDict({"b": nn.Linear(2, 2)}))


@pytest.mark.parametrize("strict", [True, False])
def test_a_shape_that_differs_is_reported_by_name(manager, strict):
    manager.save(0, model=nn.Linear(2, 3))
    live = nn.Linear(2, 4)
    before = copy_of(live.state_dict())
    with pytest.raises(MismatchError) as caught:
        manager.resume(strict=strict, model=live)
    assert ("model.weight", "shape", [4, 2], [3, 2]) in caught.value.mismatched
    assert "`model.weight` has another shape: expected [4, 2], but the snapshot has: [3, 2]" in str(
        caught.value
    )
    assert_same(dict(live.state_dict()), dict(before))


def test_narrowing_is_refused_by_name_and_allowed_on_request(manager):
    saved = nn.Linear(3, 3)
    with torch.no_grad():
        saved.weight.fill_(1 + 2**-12)
    manager.save(0, model=saved)
    live = nn.Linear(3, 3).to(torch.bfloat16)
    before = copy_of(live.state_dict())
    with pytest.raises(MismatchError) as caught:
        manager.resume(model=live)
    assert ("model.weight", "dtype", "bfloat16", "float32") in caught.value.mismatched
    assert "allow_narrowing" in caught.value.hint
    assert_same(dict(live.state_dict()), dict(before))
    manager.resume(model=live, override={"allow_narrowing": True})
    assert_same(live.weight.detach(), saved.weight.detach().to(torch.bfloat16))
    wider = nn.Linear(3, 3).to(torch.float64)
    manager.resume(model=wider)
    assert_same(wider.weight.detach(), saved.weight.detach().to(torch.float64))


def test_an_override_is_applied_after_the_restore_and_noted(manager):
    model = nn.Linear(2, 2)
    manager.save(
        0,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.5),
        other=torch.optim.SGD(model.parameters(), lr=0.25),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.SGD(model.parameters(), lr=1)
    report = manager.resume(
        model=model, optimizer=optimizer, other=other, override={"lr": 1e-5, "betas": (0.5, 0.6)}
    )
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (1e-5, (0.5, 0.6))
    assert other.param_groups[0]["lr"] == 1e-5
    assert report.overridden == [
        "param_groups.0.lr: 0.5 -> 1e-05",
        "param_groups.0.betas: (0.9, 0.999) -> (0.5, 0.6)",
        "param_groups.0.lr: 0.25 -> 1e-05",
    ]


@pytest.mark.parametrize("override", [{"learning_rate": 1}, {"params": []}])
def test_an_override_that_nothing_has_is_refused_before_anything_changes(manager, override):
    model = nn.Linear(2, 2)
    manager.save(0, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1))
    live = nn.Linear(2, 2)
    before = copy_of(live.state_dict())
    with pytest.raises(InvalidInputError, match=f"invalid override `{next(iter(override))}`"):
        manager.resume(model=live, optimizer=torch.optim.SGD(live.parameters(), lr=1), override=override)
    assert_same(dict(live.state_dict()), dict(before))


def test_groups_are_restored_as_saved(manager):
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [], "lr": 5e-4}, {"params": [model.bias]}]
    manager.save(0, model=model, optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=None))
    empty = [{"params": [model.weight]}, {"params": []}, {"params": [model.bias]}]
    optimizer = torch.optim.AdamW(empty, lr=7)
    report = manager.resume(model=model, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 5e-4, 1e-3]
    assert_same([group["betas"] for group in optimizer.param_groups], [(0.9, 0.95)] * 3)
    assert [group["foreach"] for group in optimizer.param_groups] == [None] * 3
    assert report.never_stepped == ["weight", "bias"]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_hyper_parameter_that_is_new_gets_the_live_default_and_is_listed(manager):
    model = nn.Linear(2, 2)
    old = torch.optim.AdamW(model.parameters())
    del old.param_groups[0]["decoupled_weight_decay"]
    manager.save(0, model=model, optimizer=old)
    optimizer = torch.optim.AdamW(model.parameters())
    report = manager.resume(model=model, optimizer=optimizer)
    assert report.defaulted == ["optimizer.param_groups.0.decoupled_weight_decay"]
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_an_optimizer_needs_its_module_beside_it(manager):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(InvalidInputError) as caught:
        manager.save(0, optimizer=optimizer)
    assert "save(step, model=model, optimizer=optimizer)" in caught.value.hint
    manager.save(0, model=model, optimizer=optimizer)
    with pytest.raises(InvalidInputError, match="it lies in none of the modules given: none"):
        manager.resume(strict=False, optimizer=optimizer)


def test_an_optimizer_of_another_class_is_refused(manager):
    model = nn.Linear(2, 2)
    manager.save(0, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(MismatchError, match="`optimizer` has another class"):
        manager.resume(model=model, optimizer=torch.optim.AdamW(model.parameters()))


def test_an_object_of_another_kind_is_refused(manager):
    manager.save(0, thing=Counter())
    with pytest.raises(
        MismatchError, match="`thing` has another kind: expected module, but the snapshot has: stateful"
    ):
        manager.resume(thing=nn.Linear(2, 2))


def test_a_damaged_newest_snapshot_is_passed_over_and_said(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save_sync(step, w=torch.full((5000,), float(step)))
        flip(packs(tmp_path)[-1], 5000)
        live = torch.zeros(5000)
        with pytest.raises(CorruptionError):
            manager.resume(2, w=live)
        with pytest.warns(
            RuntimeWarning, match="snapshot 2 can't be used, going back to the one before"
        ) as caught:
            report = manager.resume(w=live)
        assert [one.filename for one in caught] == [__file__]
        assert (report.step, [seq for seq, _ in report.skipped_snapshots]) == (1, [2])
        assert "packs/2-r0-" in report.skipped_snapshots[0][1]
        assert_same(live, torch.full((5000,), 1.0))
        assert manager.save_sync(2, w=live).parent == 1


def test_generators_that_are_registered_or_not(manager):
    from varvite.training import rng

    generator = torch.Generator().manual_seed(5)
    rng.register("augment", generator)
    try:
        manager.save(0, {"v": 1})
        drawn = torch.rand(3, generator=generator)
        manager.resume()
        assert_same(torch.rand(3, generator=generator), drawn)
    finally:
        rng.unregister("augment")
    report = manager.resume()
    assert report.rng_skipped == ["generator `augment`: not registered here"]
    assert "generator not restored: generator `augment`" in str(report)


def test_without_rng_nothing_of_it_is_saved_or_restored(manager):
    manager.save(0, {"v": 1}, rng=False)
    assert manager.entries() == []
    state = torch.get_rng_state()
    report = manager.resume()
    assert report.rng == "absent"
    assert_same(torch.get_rng_state(), state)
    assert manager.load().rng is None


def test_without_strict_a_tensor_of_another_shape_keeps_its_value_and_the_rest_is_restored(manager):
    def build(classes):
        torch.manual_seed(classes)
        model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, classes)})
        optimizer = torch.optim.Adam(model.parameters())
        model["head"](model["body"](torch.ones(1, 2))).sum().backward()
        optimizer.step()
        return model, optimizer

    saved, saved_optimizer = build(3)
    manager.save(0, model=saved, optimizer=saved_optimizer)
    live, optimizer = build(4)
    head = copy_of(live["head"].weight)
    moment = copy_of(optimizer.state[live["head"].weight]["exp_avg"])
    with pytest.raises(MismatchError):
        manager.resume(model=live, optimizer=optimizer)
    report = manager.resume(strict=False, model=live, optimizer=optimizer)
    assert ("model.head.weight", "shape", [4, 2], [3, 2]) in report.mismatched
    assert_same(live["body"].weight.detach(), saved["body"].weight.detach())
    assert_same(live["head"].weight.detach(), head)
    body = optimizer.state[live["body"].weight]["exp_avg"]
    assert_same(body, saved_optimizer.state[saved["body"].weight]["exp_avg"])
    assert_same(optimizer.state[live["head"].weight]["exp_avg"], moment)


def test_a_snapshot_that_another_process_has_removed_since_it_was_listed_is_passed_over(
    tmp_path, monkeypatch
):
    import varvite.facts
    import varvite.repository
    from varvite.errors import SnapshotNotFoundError
    from varvite.reading import SnapshotView

    class Removed(SnapshotView):
        def __init__(self, engine, seq, rank):
            if seq == 2:
                raise SnapshotNotFoundError("it is no more")
            super().__init__(engine, seq, rank)

    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save_sync(step, value={"x": step})
        for module in (varvite.facts, varvite.repository):
            monkeypatch.setattr(module, "SnapshotView", Removed)
        value = {"x": 0}
        report = manager.resume(value=value)
        assert (report.step, value, report.skipped_snapshots) == (1, {"x": 1}, [])
        assert manager.load()["value"] == {"x": 1}
        assert manager.info().step == 1
        with pytest.raises(SnapshotNotFoundError):
            manager.resume("seq:2", value=value)
