"""Resume, warm start and fork are three verbs: what each takes over, leaves alone, and refuses."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import assert_same, copy_of, files_of, flip, manifests, packs
from torch import nn

from varvite import CheckpointManager, keep
from varvite.errors import (
    CorruptionError,
    InvalidInputError,
    MismatchError,
    NotARepositoryError,
    SnapshotNotFoundError,
    StoreError,
)
from varvite.manager import open_for_tags
from varvite.reading import SnapshotView
from varvite.training.identity import RunIdentity
from varvite.training.starting import plan_warm_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "parent", chunk_bytes=4096) as manager:
        yield manager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "child", chunk_bytes=4096) as manager:
        yield manager


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def trained(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a module and its optimizer after some steps."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
    for step in range(steps):
        train_step(model, optimizer, step)
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(module: nn.Module) -> dict[str, Any]:
    return copy_of(dict(module.state_dict()))


def draws() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(2).tolist()


def folder_of(manager: CheckpointManager) -> Path:
    return manager._settings.path


# Warm start


def test_a_warm_start_takes_weights_and_nothing_else(parent, manager):
    model, optimizer = trained()
    run = RunIdentity("old")
    parent.save_sync(41, model=model, optimizer=optimizer, progress={"tokens": 7}, run=run)
    before = files_of(folder_of(parent))
    live, mine = network(), RunIdentity("mine")
    fresh = mine.run_id
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = draws()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    report = manager.warm_start(folder_of(parent), model=live, run=mine)
    assert draws() == expected
    assert_same(weights(live), weights(model))
    assert (report.verb, report.step, report.next_step, report.fresh) == ("warm_start", None, 0, False)
    assert (report.rng, report.loader, report.restored) == ("untouched", "absent", ["model"])
    assert (report.snapshot.step, report.source, report.digest) == (
        41,
        str(folder_of(parent)),
        parent.info().digest,
    )
    assert sorted(report.matched) == sorted(f"model.{name}" for name in model.state_dict())
    assert (report.missing, report.unexpected, report.mismatched, report.dropped) == ([], [], [], [])
    assert report.verified_bytes == sum(value.nbytes for value in model.state_dict().values())
    assert report.summary().startswith(f"warm start from step 41 (seq 1) of {folder_of(parent)}: model (")
    assert list(range(report, 2)) == [0, 1]
    # A run of its own, which says where its weights are from, and carries no id of the old one.
    assert mine.run_id not in (fresh, run.run_id)
    assert (mine.name, mine.origin.verb, mine.origin.seq, mine.origin.step) == ("mine", "warm_start", 1, 41)
    assert (mine.origin.run_id, mine.origin.trackers, mine.trackers) == (None, {}, {})
    assert mine.origin.repository_id == parent._engine.repository_id
    assert files_of(folder_of(parent)) == before
    assert manager.snapshots() == []


def test_an_open_manager_is_a_source_and_its_running_save_is_waited_for(parent, manager):
    model = network()
    parent.save(3, model=model)
    live = network()
    report = manager.warm_start(parent, model=live)
    assert_same(weights(live), weights(model))
    assert report.source == str(folder_of(parent))
    parent.save(4, model=model)


def test_rules_load_under_other_names(parent, manager):
    model = network()
    parent.save_sync(0, net=nn.ModuleDict({"encoder": model, "head": nn.Linear(1, 9)}))
    live = nn.ModuleDict({"body": network(), "classes": nn.Linear(1, 2)})
    rules = {"net": "model", "net.encoder": "model.body", "net.head": None}
    kept = weights(live["classes"])
    plan = plan_warm_start(parent, rules=rules, model=live)
    assert plan.missing == ["model.classes.weight", "model.classes.bias"]
    assert plan.unused_rules == ["net"]
    rules.pop("net")
    report = manager.warm_start(parent, rules=rules, strict=False, model=live)
    assert_same(weights(live["body"]), weights(model))
    assert_same(weights(live["classes"]), kept)
    assert report.missing == plan.missing
    assert report.dropped == ["net.head.bias", "net.head.weight"]
    assert "dropped by rules: 2 names" in report.summary()


def test_averaged_weights_go_to_the_model(parent, manager):
    model = network()
    average = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.add_(1)
    parent.save_sync(0, model=model, ema=average)
    live = network()
    with pytest.raises(MismatchError, match="two saved names go to one place"):
        manager.warm_start(parent, rules={"ema.module": "model"}, model=live)
    manager.warm_start(parent, rules={"ema.module": "model", "model": None}, model=live)
    assert_same(weights(live), weights(average.module))


@pytest.mark.parametrize("positional", [True, False])
def test_a_state_dict_saved_as_a_plain_dict_is_found_by_its_paths(parent, manager, positional):
    model = network()
    if positional:
        parent.save_sync(0, {"model": model.state_dict()})
    else:
        parent.save_sync(0, model=dict(model.state_dict()))
    live = network()
    manager.warm_start(parent, model=live)
    assert_same(weights(live), weights(model))


def test_a_bare_state_dict_is_found_by_the_empty_prefix(parent, manager):
    model = network()
    parent.save_sync(0, model.state_dict())
    live = network()
    manager.warm_start(parent, rules={"": "model"}, model=live)
    assert_same(weights(live), weights(model))


class WithExtra(nn.Linear):
    """A layer with extra state: plain values and a tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = {"calls": 0, "scale": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_goes_where_its_layer_goes(parent, manager):
    model = nn.ModuleDict({"a": WithExtra(), "b": WithExtra()})
    model["a"].extra = {"calls": 3, "scale": torch.ones(2)}
    model["b"].extra = torch.tensor([4.0])
    parent.save_sync(0, model=model)
    live = nn.ModuleDict({"a": WithExtra(), "b": WithExtra()})
    report = manager.warm_start(parent, rules={"model.a": "model.b", "model.b": "model.a"}, model=live)
    assert_same(live["b"].extra, model["a"].extra)
    assert_same(live["a"].extra, model["b"].extra)
    assert_same(weights(live["b"])["weight"], weights(model["a"])["weight"])
    assert (report.missing, report.unexpected) == ([], [])
    plain = nn.ModuleDict({"a": nn.Linear(2, 2), "b": WithExtra()})
    with pytest.raises(MismatchError) as caught:
        manager.warm_start(parent, model=plain)
    assert caught.value.unexpected == ["model.a._extra_state"]


def test_a_module_that_only_its_hooks_know_is_loaded_by_its_own_method(parent, manager):
    class Doubling(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[f"{prefix}twice"] = self.weight.detach() * 2

        def _load_from_state_dict(self, state_dict, prefix, *_):
            with torch.no_grad():
                self.weight.copy_(state_dict[f"{prefix}twice"] / 2)

    model, live = nn.ModuleDict({"a": Doubling(2, 2)}), nn.ModuleDict({"b": Doubling(2, 2)})
    parent.save_sync(0, model=model)
    manager.warm_start(parent, rules={"model.a": "model.b"}, model=live)
    assert torch.equal(live["b"].weight, model["a"].weight)


def test_tied_weights_and_wrappers_are_no_obstacle(parent, manager):
    def tied() -> nn.ModuleDict:
        model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, live = tied(), tied()
    parent.save_sync(0, old=model)
    manager.warm_start(parent, rules={"old": "model"}, model=nn.DataParallel(live))
    assert torch.equal(live["embed"].weight, model["embed"].weight)
    assert live["head"].weight is live["embed"].weight
    loose = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    manager.warm_start(parent, rules={"old": "model"}, model=loose)
    assert torch.equal(loose["head"].weight, model["embed"].weight)
    assert loose["head"].weight.data_ptr() != loose["embed"].weight.data_ptr()


def test_what_does_not_fit_is_listed_and_nothing_is_changed(parent, manager):
    parent.save_sync(
        0, model=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3), "old": nn.Linear(1, 1)})
    )
    live = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 5), "new": nn.Linear(1, 1)})
    run = RunIdentity()
    before, run_id = weights(live), run.run_id
    with pytest.raises(MismatchError) as caught:
        manager.warm_start(parent, model=live, run=run)
    assert caught.value.missing == ["model.new.weight", "model.new.bias"]
    assert caught.value.unexpected == ["model.old.bias", "model.old.weight"]
    expected = [("model.b.bias", "shape", [5], [3]), ("model.b.weight", "shape", [5, 2], [3, 2])]
    assert caught.value.mismatched == expected
    with pytest.raises(MismatchError, match="skip_shape_mismatches"):
        manager.warm_start(parent, strict=False, model=live)
    assert_same(weights(live), before)
    assert run.run_id == run_id
    report = manager.warm_start(parent, strict=False, skip_shape_mismatches=True, model=live)
    assert report.matched == ["model.a.weight", "model.a.bias"]
    assert [tuple(one) for one in report.mismatched] == expected
    assert_same(weights(live["b"]), {"weight": before["b.weight"], "bias": before["b.bias"]})


def test_nothing_that_fits_is_an_error_even_where_not_strict(parent, manager):
    parent.save_sync(0, model=nn.Linear(2, 2))
    with pytest.raises(MismatchError, match="no saved name fits `other`: nothing would be loaded"):
        manager.warm_start(parent, strict=False, skip_shape_mismatches=True, other=nn.Linear(2, 2))
    with pytest.raises(MismatchError, match="no saved name fits `other`"):
        manager.warm_start(parent, strict=False, model=nn.Linear(2, 2), other=nn.Linear(2, 2))


def test_narrowing_is_asked_for_and_widening_is_not(parent, manager):
    parent.save_sync(0, model=nn.Linear(2, 2))
    live = nn.Linear(2, 2).to(torch.bfloat16)
    before = weights(live)
    with pytest.raises(MismatchError, match="expected bfloat16, but the snapshot has: float32") as caught:
        manager.warm_start(parent, strict=False, model=live)
    assert "allow_narrowing=True" in caught.value.hint
    assert_same(weights(live), before)
    manager.warm_start(parent, allow_narrowing=True, model=live)
    saved = parent.load(names=["model.weight"])["model.weight"]
    assert torch.equal(live.weight, saved.to(torch.bfloat16))
    wide = nn.Linear(2, 2).to(torch.float64)
    manager.warm_start(parent, model=wide)
    assert torch.equal(wide.weight, saved.double())


def test_one_tensor_of_a_wider_dtype_is_enough_for_an_error(parent, manager):
    parent.save_sync(0, model=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    live = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).half()})
    before = weights(live)
    with pytest.raises(MismatchError, match="other dtypes") as caught:
        manager.warm_start(parent, strict=False, model=live)
    assert caught.value.mismatched == [
        ("model.b.bias", "dtype", "float16", "float32"),
        ("model.b.weight", "dtype", "float16", "float32"),
    ]
    assert_same(weights(live), before)


def test_ties_are_ties_under_other_names_too(parent):
    weight = torch.ones(2)
    parent.save_sync(0, {"a": weight, "b": weight, "c": torch.ones(2)})
    view = SnapshotView(parent._engine, 1, 0).renamed({"z": "c", "y": "b", "x": "a"})
    buffers = view.allocate_for([{"tensor": "x"}, {"tensor": "y"}, {"tensor": "z"}])
    assert buffers["x"] is buffers["y"]
    assert buffers["x"] is not buffers["z"]
    view.read(view.unique(buffers))
    assert buffers["x"].tolist() == [1, 1]


def test_a_run_with_an_open_tracker_begins_nowhere(parent, manager):
    parent.save_sync(0, model=network())
    live, run = network(), RunIdentity()
    run.attach("wandb", FakeTracker())
    before = weights(live)
    for begin in (manager.warm_start, manager.fork):
        with pytest.raises(InvalidInputError, match="a tracker is open"):
            begin(parent, model=live, run=run)
    assert_same(weights(live), before)


def test_only_modules_start_warm(parent, manager):
    model, optimizer = trained()
    parent.save_sync(0, model=model, optimizer=optimizer)
    with pytest.raises(InvalidInputError, match=r"`optimizer`: a warm start loads weights alone") as caught:
        manager.warm_start(parent, model=model, optimizer=optimizer)
    assert "fork" in caught.value.hint
    with pytest.raises(InvalidInputError, match="no object is given"):
        manager.warm_start(parent, run=RunIdentity())


def test_a_plan_says_what_a_warm_start_would_do_and_changes_nothing(parent):
    parent.save_sync(0, net=nn.Linear(2, 2))
    live = nn.Linear(2, 2)
    before = weights(live)
    plan = plan_warm_start(folder_of(parent), rules={"net": "model"}, model=live, run=RunIdentity())
    assert str(plan).splitlines() == ["2 of 2 names would be loaded", "  rule `net` gives `model`: 2 names"]
    assert_same(weights(live), before)


# A snapshot that a person named


@pytest.mark.parametrize("verb", ["warm_start", "fork"])
def test_no_reference_falls_back(parent, manager, verb):
    model = network()
    parent.save_sync(0, model=model)
    parent.save_sync(1, model=model)
    flip(manifests(folder_of(parent))[-1], 300)
    begin = getattr(manager, verb)
    for ref in ("latest", "seq:2"):
        with pytest.raises(CorruptionError):
            begin(parent, ref, model=network())
    assert begin(parent, "seq:1", model=network()).snapshot.seq == 1
    for ref in ("step:9", 9, "latest~7", "tag:none"):
        with pytest.raises(SnapshotNotFoundError):
            begin(parent, ref, model=network())


@pytest.mark.parametrize("verb", ["warm_start", "fork"])
def test_damaged_bytes_are_an_error_and_the_run_begins_nowhere(parent, manager, verb):
    parent.save_sync(0, model=network())
    pack = packs(folder_of(parent))[0]
    flip(pack, pack.read_bytes().index(network()[1].weight.detach().numpy().tobytes()))
    run = RunIdentity()
    run_id = run.run_id
    with pytest.raises(CorruptionError):
        getattr(manager, verb)(folder_of(parent), model=network(), run=run)
    assert (run.run_id, run.origin) == (run_id, None)
    assert parent.info().tags == []


@pytest.mark.parametrize("verb", ["warm_start", "fork"])
def test_a_source_must_be_another_repository_and_be_there(tmp_path, parent, manager, verb):
    begin = getattr(manager, verb)
    with pytest.raises(InvalidInputError, match="the run's own repository"):
        begin(folder_of(manager), model=network())
    with pytest.raises(InvalidInputError, match="the run's own repository"):
        begin(manager, model=network())
    with pytest.raises(NotARepositoryError):
        begin(tmp_path / "absent", model=network())
    assert not (tmp_path / "absent").exists()
    with pytest.raises(SnapshotNotFoundError):
        begin(parent, model=network())
    parent.close()
    with pytest.raises(InvalidInputError, match="the manager is closed"):
        begin(parent, model=network())


@pytest.mark.parametrize("verb", ["warm_start", "fork"])
def test_a_run_that_has_snapshots_is_resumed_not_begun(parent, manager, verb):
    parent.save_sync(0, model=network())
    manager.save_sync(5, model=network())
    live = network()
    before = weights(live)
    with pytest.raises(InvalidInputError, match="holds snapshots already") as caught:
        getattr(manager, verb)(parent, model=live)
    assert "resume first" in caught.value.hint
    assert_same(weights(live), before)
    report = getattr(manager, verb)(parent, over_snapshots=True, model=live)
    assert report.snapshot.step == 0
    assert [info.step for info in manager.snapshots()] == [5]


# Fork


def test_a_fork_takes_weights_and_moments_and_keeps_the_settings_of_its_program(parent, manager):
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train_step(model, optimizer, 3)
    scheduler.step()
    run = RunIdentity("old")
    run.attach("wandb", FakeTracker())
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": {"n": 4}}
    parent.save_sync(41, **objects, run=run)
    live = network()
    other = torch.optim.AdamW(live.parameters(), lr=0.7, betas=(0.5, 0.6))
    mine_scheduler = torch.optim.lr_scheduler.StepLR(other, 10, 0.1)
    scheduled = mine_scheduler.state_dict()
    settings = {key: value for key, value in other.param_groups[0].items() if key != "params"}
    seen, mine = {"n": 0}, RunIdentity()
    report = manager.fork(folder_of(parent), name="high-lr", model=live, optimizer=other, seen=seen, run=mine)
    assert_same(weights(live), weights(model))
    for left, right in zip(live.parameters(), model.parameters(), strict=True):
        assert_same(other.state[left], optimizer.state[right])
    assert {key: value for key, value in other.param_groups[0].items() if key != "params"} == settings
    assert mine_scheduler.state_dict() == scheduled
    assert seen == {"n": 4}
    assert (report.verb, report.step, report.next_step, report.fresh) == ("fork", 41, 42, False)
    assert (report.rng, report.restored) == ("untouched", ["model", "optimizer", "seen"])
    assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])
    assert report.overridden == [
        "optimizer.param_groups.0.lr: 0.05 -> 0.7",
        "optimizer.param_groups.0.betas: (0.9, 0.999) -> (0.5, 0.6)",
        "optimizer.param_groups.0.weight_decay: 0.2 -> 0.01",
        "optimizer.param_groups.0.initial_lr: 0.1 -> 0.7",
    ]
    assert report.summary().startswith(f"forked after step 41 (seq 1) of {folder_of(parent)}: model, ")
    assert mine.run_id != run.run_id
    assert (mine.name, mine.restart_count) == ("high-lr", 0)
    assert (mine.origin.verb, mine.origin.run_id, mine.origin.step) == ("fork", run.run_id, 41)
    assert mine.origin.digest == parent.info().digest
    assert mine.origin.trackers == {"wandb": {"backend": "wandb", "run_id": "w", "last_step": 41}}
    assert mine.trackers == {}


class FakeTracker:
    def record(self) -> dict[str, Any]:
        return {"backend": "wandb", "run_id": "w", "last_step": 41}


def test_a_fork_with_the_same_settings_goes_on_as_the_parent_would(parent, manager):
    model, optimizer = trained(3)
    parent.save_sync(2, model=model, optimizer=optimizer)
    live = network()
    other = torch.optim.AdamW(live.parameters(), lr=0.1, weight_decay=0.2)
    start = manager.fork(parent, model=live, optimizer=other)
    for step in range(start, 6):
        train_step(model, optimizer, step)
        train_step(live, other, step)
    assert_same(weights(live), weights(model))


def test_the_usual_pattern_forks_once_and_resumes_after(tmp_path, parent):
    model, optimizer = trained()
    parent.save_sync(9, model=model, optimizer=optimizer, run=RunIdentity("old"))
    seen = []
    for _ in range(2):
        live, run = network(), RunIdentity()
        other = torch.optim.AdamW(live.parameters(), lr=0.01)
        objects = {"model": live, "optimizer": other, "run": run}
        with CheckpointManager(tmp_path / "child") as manager:
            report = manager.resume(**objects)
            if report.fresh:
                report = manager.fork(parent, **objects)
            seen.append(
                (report.verb, int(report), run.run_id, run.restart_count, other.param_groups[0]["lr"])
            )
            assert run.origin.step == 9
            manager.save_sync(int(report), **objects)
    run_id = seen[0][2]
    assert seen == [("fork", 10, run_id, 0, 0.01), ("resume", 11, run_id, 1, 0.01)]


def test_only_what_is_given_is_forked_and_that_must_match(parent, manager):
    model, optimizer = trained()
    parent.save_sync(0, model=model, optimizer=optimizer, other={"n": 1})
    live = network()
    assert manager.fork(parent, pin=False, model=live).unexpected == []
    before = weights(live)
    with pytest.raises(InvalidInputError, match="no object is given"):
        manager.fork(parent, run=RunIdentity())
    with pytest.raises(MismatchError, match="the snapshot lacks `missing`"):
        manager.fork(parent, pin=False, model=live, missing={"n": 1})
    assert_same(weights(live), before)


def test_a_second_module_beside_the_parents_does_not_hide_its_optimizer(parent, manager):
    model, optimizer = trained()
    parent.save_sync(0, model=model, optimizer=optimizer, ema=network())
    live = network()
    other = torch.optim.AdamW(live.parameters(), lr=1.0)
    report = manager.fork(parent, model=live, optimizer=other)
    assert report.missing == report.unexpected == []
    first, second = next(live.parameters()), next(model.parameters())
    assert_same(other.state[first]["exp_avg"], optimizer.state[second]["exp_avg"])


def test_groups_must_hold_the_same_parameters_and_keep_their_order(parent, manager):
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})

    def groups(*order: str, **more: Any) -> list[dict[str, Any]]:
        return [{"params": model[name].parameters(), **more} for name in order]

    parent.save_sync(0, model=model, optimizer=torch.optim.SGD(groups("a", "b"), lr=0.1))
    turned = torch.optim.SGD(groups("b", "a"), lr=0.5)
    before = [[id(one) for one in group["params"]] for group in turned.param_groups]
    manager.fork(parent, model=model, optimizer=turned)
    assert [[id(one) for one in group["params"]] for group in turned.param_groups] == before
    with pytest.raises(MismatchError, match="partition"):
        manager.fork(parent, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(MismatchError, match="class"):
        manager.fork(parent, model=model, optimizer=torch.optim.AdamW(groups("a", "b")))


def test_a_setting_that_needs_state_the_parent_never_had_is_refused(parent, manager):
    model, optimizer = trained()
    parent.save_sync(0, model=model, optimizer=optimizer)
    live = network()
    with pytest.raises(MismatchError, match="amsgrad` has another value: expected True"):
        manager.fork(parent, model=live, optimizer=torch.optim.AdamW(live.parameters(), amsgrad=True))
    # Where it never stepped, there is no state that could lack.
    parent.save_sync(1, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    manager.fork(parent, model=live, optimizer=torch.optim.AdamW(live.parameters(), amsgrad=True))


def test_what_an_optimizer_counts_in_its_groups_is_the_parents(parent, manager):
    class ScheduleFree(torch.optim.Optimizer):
        def __init__(self, parameters, lr=0.1, warmup=0):
            super().__init__(parameters, {"lr": lr, "warmup": warmup, "k": 0, "weight_sum": 0.0})

    model = nn.Linear(1, 1)
    optimizer = ScheduleFree(model.parameters())
    optimizer.param_groups[0].update(k=12, weight_sum=3.5)
    parent.save_sync(0, model=model, optimizer=optimizer)
    other = ScheduleFree(model.parameters(), lr=0.5, warmup=4)
    report = manager.fork(parent, model=model, optimizer=other)
    group = {key: value for key, value in other.param_groups[0].items() if key != "params"}
    assert group == {"lr": 0.5, "warmup": 4, "k": 12, "weight_sum": 3.5}
    assert report.overridden == [
        "optimizer.param_groups.0.lr: 0.1 -> 0.5",
        "optimizer.param_groups.0.warmup: 0 -> 4",
    ]


def test_a_learning_rate_in_a_tensor_is_kept_and_is_not_read_over(parent, manager):
    model = nn.Linear(1, 1)
    parent.save_sync(0, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5)))
    rate = torch.tensor(0.25)
    other = torch.optim.AdamW(model.parameters(), lr=rate)
    report = manager.fork(parent, model=model, optimizer=other)
    assert other.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    assert "optimizer.param_groups.0.lr: kept 0.25" in report.overridden


# The pin


def test_the_parents_snapshot_is_pinned_and_outlives_its_retention(tmp_path):
    model = network()
    with CheckpointManager(tmp_path / "parent", keep=keep.last(1)) as parent:
        parent.save_sync(0, model=model)
        with CheckpointManager(tmp_path / "high lr") as manager:
            manager.fork(tmp_path / "parent", model=network())
            pin = f"fork.high-lr.{manager._engine.repository_id[:12]}"
        for step in (1, 2):
            parent.save_sync(step, model=model)
        assert [(info.step, info.tags) for info in parent.snapshots()] == [(0, [pin]), (2, [])]


def test_a_fork_that_starts_again_moves_its_own_pin_alone(parent, manager):
    model = network()
    parent.save_sync(0, model=model)
    parent.pin("latest", "fork.mine")
    manager.fork(parent, name="mine", model=network())
    manager.fork(parent, name="mine", model=network())
    parent.save_sync(1, model=model)
    manager.fork(parent, name="mine", model=network())
    pin = f"fork.mine.{manager._engine.repository_id[:12]}"
    assert [(info.step, info.tags) for info in parent.snapshots()] == [(0, ["fork.mine"]), (1, [pin])]


def test_a_fork_that_fails_takes_its_pin_back(parent, manager):
    parent.save_sync(0, model=network())
    with pytest.raises(MismatchError):
        manager.fork(parent, model=nn.Linear(1, 1))
    assert parent.info().tags == []


def test_without_a_pin_the_parents_repository_is_not_written(parent, manager):
    parent.save_sync(0, model=network())
    before = files_of(folder_of(parent))
    manager.fork(folder_of(parent), pin=False, model=network())
    assert files_of(folder_of(parent)) == before


def test_a_parent_that_can_not_be_written_says_how_to_go_on(tmp_path, parent, manager):
    parent.save_sync(0, model=network())
    staging = folder_of(parent) / "tmp"
    staging.rmdir()
    staging.write_text("in the way of what is staged")
    live = network()
    before = weights(live)
    with pytest.raises(StoreError, match="cannot pin snapshot 1 of the parent") as caught:
        manager.fork(folder_of(parent), model=live)
    assert "pin=False" in caught.value.hint
    assert caught.value.errno is not None
    assert_same(weights(live), before)


@pytest.mark.parametrize("name", ["ü" * 200, "../../etc", "...", "a" * 500])
def test_any_name_makes_a_legal_pin(parent, manager, name):
    parent.save_sync(0, model=network())
    manager.fork(parent, name=name, model=network())
    (pin,) = parent.info().tags
    assert pin.endswith(manager._engine.repository_id[:12])
    with open_for_tags(folder_of(parent)) as tags:
        tags.unpin(pin)


def test_what_lies_under_the_keyword_of_the_identity_must_be_one(parent, manager):
    class Forged(RunIdentity):
        def state_dict(self) -> dict[str, Any]:
            return {"id": "w"}

    parent.save_sync(0, model=network(), run=Forged())
    live = network()
    before = weights(live)
    with pytest.raises(CorruptionError, match="run identity"):
        manager.fork(parent, model=live, run=RunIdentity())
    assert_same(weights(live), before)
    assert parent.info().tags == []


# Resume


def test_a_resume_that_must_find_something_writes_nothing(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        before = files_of(tmp_path)
        with pytest.raises(SnapshotNotFoundError):
            manager.resume(require=True, model=network())
        for ref in ("latest~1", "step:0", "tag:x", 3):
            with pytest.raises(SnapshotNotFoundError):
                manager.resume(ref, model=network())
        assert files_of(tmp_path) == before
    with pytest.raises(NotARepositoryError):
        CheckpointManager(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()


def test_a_resume_says_its_verb(manager):
    assert manager.resume(model=network()).verb == "resume"
    manager.save_sync(0, model=network())
    report = manager.resume(model=network())
    assert (report.verb, report.source, report.dropped) == ("resume", None, [])
