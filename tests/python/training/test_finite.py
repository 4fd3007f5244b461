"""The guard against losses and gradients that are not finite, and the way back to a healthy snapshot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import assert_same, copy_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from varvite import CheckpointManager, keep
from varvite.errors import CorruptionError, InvalidInputError, MismatchError, SnapshotNotFoundError
from varvite.training.accumulation import GradientAccumulation
from varvite.training.finite import Action, NonFiniteGuard, roll_back

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROCEED, SKIP, STOP, ROLL_BACK = Action.PROCEED, Action.SKIP, Action.STOP, Action.ROLL_BACK
NAN = math.nan


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run") as manager:
        yield manager


# What is not finite


@pytest.mark.parametrize("loss", [NAN, math.inf, -math.inf, torch.tensor(NAN), torch.tensor([math.inf])])
def test_a_loss_that_is_not_finite_is_seen(loss):
    guard = NonFiniteGuard("stop")
    assert (guard.check(torch.tensor(1.0)), guard.check(loss)) == (PROCEED, STOP)
    assert guard.reason == "the loss is not finite, 1 step"


def gradient(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


def test_a_number_in_memory_is_read_and_nothing_is_computed_with_it():
    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
            called.append(operation.overloadpacket.__name__)
            return operation(*arguments, **(keywords or {}))

    called: list[str] = []
    loss, norm = torch.tensor(1.0, requires_grad=True), torch.tensor([2.0], dtype=torch.float64)
    with Operations():
        assert NonFiniteGuard().check(loss, grad_norm=norm) is PROCEED
    assert called == ["_local_scalar_dense"] * 2


def test_gradients_that_are_not_finite_under_a_finite_loss_are_seen():
    without = nn.Parameter(torch.zeros(2))
    fine, empty = gradient(1.0, 2.0), gradient()
    half = gradient(1.0, dtype=torch.bfloat16)
    for bad in (gradient(1.0, NAN), gradient(-math.inf), gradient(NAN, dtype=torch.bfloat16)):
        guard = NonFiniteGuard("stop")
        assert guard.check(1.0, parameters=iter([without, fine, empty, half])) is PROCEED
        assert guard.check(1.0, parameters=[without, fine, bad, half]) is STOP
        assert guard.reason == "the loss is finite and its gradients are not finite, 1 step"
    assert NonFiniteGuard("stop").check(1.0, parameters=[without]) is PROCEED
    assert NonFiniteGuard("stop").check(1.0, grad_norm=torch.tensor(NAN)) is STOP
    assert NonFiniteGuard("stop").check(1.0, grad_norm=math.inf) is STOP


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 6e4), (torch.float32, 3e38)])
def test_finite_gradients_whose_norm_overflows_are_finite(dtype, value):
    parameter = gradient(*[value] * 4, dtype=dtype)
    assert not torch.nn.utils.get_total_norm([parameter.grad]).isfinite()
    assert NonFiniteGuard("stop").check(1.0, parameters=[parameter]) is PROCEED


def test_sparse_gradients_are_looked_at():
    table = nn.Embedding(10, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert NonFiniteGuard("stop").check(1.0, parameters=table.parameters()) is PROCEED
    (table(torch.tensor([3])) * NAN).sum().backward()
    assert NonFiniteGuard("stop").check(1.0, parameters=table.parameters()) is STOP


def test_a_check_changes_no_gradient_and_needs_no_graph():
    model = nn.Linear(3, 1)
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    before = [copy_of(one.grad) for one in model.parameters()]
    NonFiniteGuard().check(loss, parameters=model.parameters())
    assert_same([one.grad for one in model.parameters()], before)


def test_what_is_no_number_is_refused():
    with pytest.raises(InvalidInputError, match="invalid loss of type `str`"):
        NonFiniteGuard().check("1.0")


# Policies


def actions(guard: NonFiniteGuard, *losses: float) -> list[Action]:
    return [guard.check(loss) for loss in losses]


def test_skip_counts_failures_in_a_row_and_then_stops():
    guard = NonFiniteGuard("skip", max_consecutive=2)
    assert actions(guard, NAN, NAN, 1.0, NAN, NAN, NAN) == [SKIP, SKIP, PROCEED, SKIP, SKIP, STOP]
    assert (guard.consecutive, guard.failures) == (3, 5)
    assert actions(NonFiniteGuard(), *[NAN] * 11) == [*[SKIP] * 10, STOP]


def test_warn_goes_on_with_a_warning_and_then_stops():
    guard = NonFiniteGuard("warn", max_consecutive=1)
    with pytest.warns(RuntimeWarning, match="training goes on, though the loss is not finite, 1 step$"):
        assert guard.check(NAN) is PROCEED
    assert guard.check(NAN) is STOP


def test_rollback_skips_what_it_tolerates_and_stops_after_its_limit():
    guard = NonFiniteGuard("rollback", max_consecutive=1, max_rollbacks=2)
    expected = [SKIP, ROLL_BACK, SKIP, ROLL_BACK, SKIP, STOP]
    assert actions(guard, *[NAN] * 6) == expected
    assert guard.reason == "the loss is not finite, 2 steps in a row, after 2 rollbacks"
    assert actions(NonFiniteGuard("rollback"), NAN) == [ROLL_BACK]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"policy": "ignore"}, "policy"),
        ({"max_consecutive": -1}, "max_consecutive"),
        ({"max_rollbacks": 1.5}, "max_rollbacks"),
        ({"policy": "stop", "max_consecutive": 1}, "max_consecutive"),
    ],
)
def test_settings_that_mean_nothing_are_refused(arguments, what):
    with pytest.raises(InvalidInputError, match=f"invalid {what} ") as caught:
        NonFiniteGuard(**arguments)
    assert caught.value.what == what


def test_ranks_agree_on_the_worst():
    asked: list[list[int]] = []

    def agree(values: list[int]) -> list[int]:
        asked.append(values)
        return [max(pair) for pair in zip(values, others.pop(0), strict=True)]

    others = [[0, 0], [0, 1], [0, 0]]
    guard = NonFiniteGuard("skip", agree=agree)
    assert [guard.check(1.0), guard.check(1.0), guard.check(NAN)] == [PROCEED, SKIP, SKIP]
    assert asked == [[0, 0], [0, 0], [1, 0]]


# Gradient scaling


def scaled_step(scaler: torch.amp.GradScaler, factor: float) -> tuple[Action, NonFiniteGuard]:
    """One step whose gradients are `factor`."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(model.weight.sum() * factor).backward()
    scaler.unscale_(optimizer)
    guard = NonFiniteGuard("stop")
    action = guard.check(1.0, parameters=model.parameters(), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    return action, guard


def test_an_overflow_of_scaled_gradients_is_the_scalers_business():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    action, guard = scaled_step(scaler, math.inf)
    assert (action, guard.failures, guard.reason) == (PROCEED, 0, None)
    assert scaler.get_scale() == 2.0
    assert scaled_step(scaler, math.inf)[0] is PROCEED
    # The scale is 1 now: lowering it further helps no gradient of a loss that is not scaled.
    assert scaled_step(scaler, math.inf)[0] is STOP


def test_a_loss_that_is_not_finite_is_a_failure_whatever_the_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert NonFiniteGuard("stop").check(NAN, grad_norm=NAN, scaler=scaler) is STOP
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    assert NonFiniteGuard("stop").check(1.0, grad_norm=NAN, scaler=disabled) is STOP


# State


def test_counts_are_saved_with_the_run(manager):
    guard = NonFiniteGuard("rollback", max_consecutive=1)
    actions(guard, NAN, NAN, NAN)
    manager.save_sync(0, guard=guard)
    restored = NonFiniteGuard("rollback", max_consecutive=1)
    manager.resume(guard=restored)
    assert restored.state_dict() == {"consecutive": 1, "failures": 3, "rollbacks": 1}


@pytest.mark.parametrize("state", [None, {}, {"consecutive": -1}, {"failures": True}, {"rollbacks": 1.0}])
def test_a_state_that_is_none_is_corrupt_and_changes_nothing(state):
    if state:
        state = {"consecutive": 1, "failures": 1, "rollbacks": 1, **state}
    guard = NonFiniteGuard()
    with pytest.raises(CorruptionError, match="guard"):
        guard.load_state_dict(state)
    assert guard.state_dict() == {"consecutive": 0, "failures": 0, "rollbacks": 0}


# Rolling back


class Data:
    """A loader's position, which a load would move."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Run:
    """A run whose batch 5 gives NaN each time it is met."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.data = Data()
        self.guard = NonFiniteGuard("rollback", max_rollbacks=2)
        self.batches: list[int] = []

    def objects(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "data", "guard")
        return {name: getattr(self, name) for name in names}

    def train(
        self, manager: CheckpointManager, steps: int, *, start: int = 0, bad: tuple[int, ...] = (5,)
    ) -> int:
        step = start
        while step < steps:
            batch = self.data.position
            self.data.position += 1
            self.batches.append(batch)
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(batch))
            loss = self.model(inputs * (NAN if batch in bad else 1.0)).square().mean()
            loss.backward()
            action = self.guard.check(loss, parameters=self.model.parameters())
            if action is ROLL_BACK:
                step = int(roll_back(manager, self.objects(), keep_position=["data"]))
                continue
            if action is STOP:
                return step
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            if step % 2 == 1:
                manager.save(step, **self.objects(), metrics={"loss": loss.item()})
            step += 1
        return step


def test_a_rollback_goes_back_with_everything_but_the_data(manager):
    run = Run()
    assert run.train(manager, 8) == 8
    # Step 5 met batch 5; it and step 4 are done again with the batches after it.
    assert run.batches == list(range(10))
    assert run.scheduler.last_epoch == 8
    assert run.optimizer.state[run.model[0].weight]["step"].item() == 8
    assert run.guard.state_dict() == {"consecutive": 0, "failures": 1, "rollbacks": 1}
    # Statistics of the batch that failed are gone with it.
    assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())


def test_after_a_rollback_the_run_equals_one_that_never_met_the_batch(manager, tmp_path):
    """Bit for bit, random numbers and moments included."""
    run = Run()
    run.train(manager, 8)
    other = Run()
    with CheckpointManager(tmp_path / "other") as elsewhere:
        other.train(elsewhere, 4)
        other.data.position = 6
        other.train(elsewhere, 8, start=4)
    assert other.batches == [0, 1, 2, 3, 6, 7, 8, 9]
    assert_same(dict(run.model.state_dict()), dict(other.model.state_dict()))
    for mine, others in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert_same(run.optimizer.state[mine], other.optimizer.state[others])
    assert run.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]


def test_what_is_rolled_back_to_is_the_latest_at_once_with_the_data_moved_on(manager):
    run = Run()
    run.train(manager, 5)
    run.data.position = 6
    manager.save_sync(6, **run.objects(), metrics={"loss": 0.5})
    with torch.no_grad():
        run.model[0].weight[0, 0] = NAN
    manager.save_sync(7, **run.objects())
    run.data.position = 9
    run.model[0].weight.grad = torch.full_like(run.model[0].weight, NAN)
    report = roll_back(manager, run.objects(), keep_position=["data"])
    assert (report.step, int(report), run.data.position) == (6, 7, 9)
    assert [one.grad for one in run.model.parameters()] == [None] * 6
    latest = manager.info("latest")
    assert (latest.step, latest.healthy, latest.metrics) == (6, True, {"loss": 0.5})
    assert latest.metadata == {"rolled_back_to": report.snapshot.seq}
    assert latest.parent == report.snapshot.seq
    again = Run()
    assert manager.resume(**again.objects()).step == 6
    assert again.data.position == 9


def test_retention_keeps_the_newest_healthy_snapshot_to_roll_back_to(tmp_path):
    with CheckpointManager(tmp_path / "run", keep=keep.last(1)) as manager:
        run = Run()
        manager.save_sync(1, **run.objects())
        with torch.no_grad():
            run.model[0].weight.fill_(NAN)
        for step in range(2, 5):
            manager.save_sync(step, **run.objects())
        assert [info.step for info in manager.snapshots()] == [1, 4]
        assert int(roll_back(manager, run.objects(), keep_position=["data"])) == 2
        assert run.model[0].weight.isfinite().all()


def test_a_guard_keeps_its_counts_over_rollbacks_and_so_reaches_its_limit(manager):
    run = Run()
    assert run.train(manager, 20, bad=(5, 7, 9)) == 5
    assert run.guard.rollbacks == 2
    assert run.guard.reason == "the loss is not finite, 1 step, after 2 rollbacks"


def test_without_a_healthy_snapshot_nothing_is_changed(manager):
    run = Run()
    with torch.no_grad():
        run.model[0].weight.fill_(NAN)
    with pytest.raises(SnapshotNotFoundError):
        roll_back(manager, run.objects(), keep_position=["data"])
    manager.save_sync(0, **run.objects())
    with pytest.raises(SnapshotNotFoundError):
        roll_back(manager, run.objects(), keep_position=["data"])
    assert len(manager.snapshots()) == 1
    assert run.model[0].weight.isnan().all()


def test_objects_that_do_not_match_change_nothing(manager):
    run = Run()
    manager.save_sync(0, **run.objects())
    objects = run.objects()
    del objects["scheduler"]
    before = copy_of(run.model.state_dict())
    with torch.no_grad():
        run.model[0].weight.add_(1)
    with pytest.raises(MismatchError, match="only the snapshot has `scheduler`"):
        roll_back(manager, objects)
    assert_same(run.model[0].weight.detach(), before["0.weight"] + 1)


@pytest.mark.parametrize(
    ("keyword", "reason"), [("loader", "the objects are model"), ("model", "it names a module")]
)
def test_a_position_that_can_not_be_kept_is_refused(manager, keyword, reason):
    with pytest.raises(InvalidInputError, match=f"invalid keep_position `{keyword}`: {reason}"):
        roll_back(manager, Run().objects(), keep_position=[keyword])


def test_a_learning_rate_can_be_lowered_on_the_way(manager):
    run = Run()
    manager.save_sync(0, **run.objects())
    report = roll_back(manager, run.objects(), override={"lr": 1e-4})
    assert "param_groups.0.lr: 0.01 -> 0.0001" in report.overridden
    loaded = manager.load("latest")
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 1e-4


def test_a_rollback_in_the_middle_of_an_accumulated_step(manager):
    run = Run()
    accumulation = GradientAccumulation(2)
    manager.save_sync(0, **run.objects(), accumulation=accumulation)
    for _ in range(2):
        with accumulation.microbatch():
            roll_back(manager, {**run.objects(), "accumulation": accumulation}, keep_position=["data"])
    assert accumulation.pending == 0
