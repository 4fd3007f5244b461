"""When the bytes of a save are taken: a snapshot is the state at the save, whatever is written next."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import assert_same, copy_of, manifests, run_child

from varvite import CheckpointManager
from varvite.errors import InvalidInputError, StoreError
from varvite.saving import describe_save
from varvite.staging import LEAST_LATER_BYTES, CowStaging, OverlapStaging, why_not_copy_on_write
from varvite.transfers import Accelerator, Transfers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODES = ["copy", "cow", "overlap"]
LARGE = LEAST_LATER_BYTES // 4
"""Elements of the smallest fp32 tensor that is taken later."""


class Network(torch.nn.Module):
    """Large and small parameters, a tie, a frozen one, and buffers that the forward pass writes."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(width, 4 * width)
        self.norm = torch.nn.BatchNorm1d(4 * width)
        self.outer = torch.nn.Linear(4 * width, width)
        self.tied = torch.nn.Linear(width, 4 * width, bias=False)
        self.tied.weight = self.inner.weight
        self.frozen = torch.nn.Parameter(torch.randn(width, 2 * width), requires_grad=False)
        self.register_buffer("average", torch.zeros(4 * width, width))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(batch)) + self.tied(batch)
        self.average.lerp_(self.inner.weight.detach(), 0.1)
        return self.outer(hidden.relu()) + batch @ self.frozen[:, : batch.shape[1]]


class Run:
    """A training run, and the state that a snapshot of it must hold."""

    def __init__(self, **how: Any) -> None:
        self.model = Network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **how)
        self.step()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, self.model.inner.in_features)).square().mean().backward()
        self.optimizer.step(closure)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def expected(self) -> tuple[dict[str, Any], dict[str, Any]]:
        named = dict(self.model.named_parameters())
        state = {name: self.optimizer.state[value] for name, value in named.items() if value.requires_grad}
        return copy_of(dict(self.model.state_dict())), copy_of(state)


def assert_holds(manager: CheckpointManager, step: int, expected: tuple[Any, Any]) -> None:
    """Asserts that a snapshot holds a state of a run, bit for bit."""
    loaded = manager.load(step)
    assert_same(dict(loaded["model"]), expected[0], f"model of {step}")
    assert_same({name: dict(own) for name, own in loaded["optimizer"]["state"].items()}, expected[1])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("staging", MODES)
def test_training_goes_on_at_once_and_every_snapshot_is_the_state_at_its_save(
    tmp_path, staging, how, threads
):
    run, expected = Run(**how), []
    with CheckpointManager(tmp_path, staging=staging, threads=threads, chunk_bytes=1 << 16) as manager:
        for step in range(12):
            expected.append(run.expected())
            handle = manager.save(step, **run.objects)
            run.step()
            if staging == "overlap":
                assert handle.copied
        manager.flush()
        for step, state in enumerate(expected):
            assert_holds(manager, step, state)
        assert manager.verify().ok


@pytest.mark.parametrize("staging", MODES)
def test_steps_while_the_save_runs_do_not_reach_the_snapshot(tmp_path, staging):
    run, step_count = Run(), 0
    with CheckpointManager(tmp_path, staging=staging) as manager:
        for step in range(6):
            expected = run.expected()
            handle = manager.save(step, **run.objects)
            while not handle.done:
                run.step()
                step_count += 1
            assert_holds(manager, step, expected)
    assert step_count > 0


def writes(tensor: torch.Tensor, value: int) -> None:
    """Writes to a tensor in every way that torch has and that a step or a forward pass may use."""
    tensor.data.fill_(value)
    tensor[1:].add_(1)
    tensor.view(-1)[::3] = value
    tensor.reshape(-1).narrow(0, 0, 7).zero_()
    torch.add(tensor, 1, out=tensor)
    torch._foreach_mul_([tensor], 3.0)
    tensor.index_fill_(0, torch.tensor([0]), float(value))
    tensor.copy_(torch.full_like(tensor, value))
    tensor.numpy()[...] = value + 1
    tensor.untyped_storage().fill_(value % 256)


@pytest.mark.parametrize("staging", ["copy", "cow"])
def test_writes_of_any_kind_do_not_reach_the_snapshot(tmp_path, staging):
    base = torch.randn(16, LARGE)
    state = {
        "base": base,
        "rows": base[3:7],
        "same rows": base[3:7],
        "start": base[:2],
        "columns": base[:, : LARGE // 2],
        "flat": base.view(-1)[5:],
        "other": torch.randn(8, LARGE),
        "small": torch.randn(3),
        "tied": base,
        "bf16": torch.randn(2, 2 * LARGE, dtype=torch.float32).to(torch.bfloat16),
    }
    with CheckpointManager(tmp_path, staging=staging) as manager:
        for step in range(8):
            expected = copy_of(state)
            handle = manager.save(step, state)
            value = step + 1
            while not handle.done:
                for tensor in (state["base"], state["other"]):
                    writes(tensor, value)
                state["small"].add_(1)
                state["bf16"].mul_(-1)
                value += 1
            loaded = manager.load(step)
            for name, tensor in expected.items():
                assert torch.equal(loaded[name], tensor), (step, name)


def payload_of(staging: Any, state: dict[str, Any], **objects: Any) -> Any:
    """Describes a save up to where `save` would return: a test can write before anything is copied."""
    payload = describe_save(0, state, None, None, objects, rng=False, rank=0, staging=staging)
    staging.mark(payload.tensors)
    return payload


def commit(manager: CheckpointManager, payload: Any) -> dict[str, Any]:
    """Does the rest of a save, and loads the snapshot."""
    manager._engine.save(payload.step, payload.tensors, **payload.labels, **payload.structures).wait(60)
    return manager.load()


def test_a_clone_is_what_the_tensor_was_however_late_it_is_copied(tmp_path):
    base = torch.randn(16, LARGE)
    state = {"base": base, "rows": base[3:7], "other": torch.randn(LARGE), "tied": base}
    expected = copy_of(state)
    with CheckpointManager(tmp_path, staging="cow") as manager:
        payload = payload_of(manager._staging, state)
        for tensor in (base, state["other"]):
            writes(tensor.reshape(1, -1).expand(1, -1) if tensor.dim() == 1 else tensor, 7)
        del base, state
        gc.collect()
        garbage = [torch.full((16, LARGE), 1.5) for _ in range(4)]
        loaded = commit(manager, payload)
        assert garbage[0][0, 0] == 1.5
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), name
        assert loaded["tied"] is loaded["base"]


def test_the_hazard_of_cow_an_alias_from_before_the_save_writes_into_the_snapshot(tmp_path):
    """Documented for `staging`. Should torch close it one day, the text is to be changed."""
    tensor = torch.zeros(LARGE)
    alias = tensor.numpy()
    with CheckpointManager(tmp_path, staging="cow") as manager:
        payload = payload_of(manager._staging, {"t": tensor})
        alias[5] = 7.0
        assert commit(manager, payload)["t"][5] == 7.0


def test_the_hazard_of_overlap_a_write_between_save_and_step_fails_the_save(tmp_path):
    run = Run()
    with CheckpointManager(tmp_path, staging="overlap") as manager:
        payload = payload_of(manager._staging, {}, **run.objects)
        with torch.no_grad():
            run.model.inner.weight.mul_(2)
        job = manager._engine.save(payload.step, payload.tensors, **payload.labels, **payload.structures)
        job.wait_copied(60)
        with pytest.raises(InvalidInputError, match=r"`model\.inner\.weight`.* written between the save and"):
            job.wait(60)
        assert job.copied
        run.step()
        expected = run.expected()
        manager.save(1, **run.objects)
        run.step()
        assert_holds(manager, 1, expected)


def test_a_parameter_that_gets_other_memory_before_it_is_copied(tmp_path):
    """Its first memory was freed once while the save still read it."""
    run = Run()
    with CheckpointManager(tmp_path, staging="overlap") as manager:
        expected = run.expected()
        payload = payload_of(manager._staging, {}, **run.objects)
        large = [value for value in run.model.parameters() if value.nbytes >= LEAST_LATER_BYTES]
        for value in large:
            value.data = torch.full_like(value, 3.0)
            run.optimizer.state.pop(value, None)
        gc.collect()
        garbage = [torch.full((768, 192), 2.5) for _ in range(20)]
        commit(manager, payload)
        assert garbage[-1][0, 0] == 2.5
        assert_holds(manager, 0, expected)


# What is taken later


def later_bytes(staging: Any, state: dict[str, Any], **objects: Any) -> int:
    """Returns the bytes that are not copied before `save` returns."""
    with torch.no_grad():
        return payload_of(staging, state, **objects).tensors.later_bytes()


def test_what_cow_takes_later():
    staging = CowStaging()
    large, tiny = torch.zeros(LARGE), torch.zeros(LARGE - 1)
    size = large.nbytes
    assert later_bytes(staging, {"a": large, "b": tiny}) == size
    assert later_bytes(staging, {"a": large, "b": large}) == size
    assert later_bytes(staging, {"a": torch.zeros(4, LARGE)[:, ::2]}) == 0
    parameter = torch.nn.Parameter(torch.zeros(2, LARGE))
    assert later_bytes(staging, {"a": parameter, "b": parameter[1]}) == 3 * size
    assert not parameter.grad_fn
    with torch.inference_mode():
        assert later_bytes(staging, {"a": torch.zeros(LARGE)}) == size


def foreign_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors whose memory torch did not allocate: it makes no clones of them."""
    torch.save({"t": torch.ones(LARGE)}, folder / "file.pt")
    return {
        "array": torch.from_numpy(np.ones(LARGE, dtype=np.float32)),
        "buffer": torch.frombuffer(bytearray(4 * LARGE), dtype=torch.float32),
        "shared": torch.ones(LARGE).share_memory_(),
        "mapped": torch.load(folder / "file.pt", mmap=True)["t"],
    }


def test_tensors_with_foreign_memory_are_copied_at_once(tmp_path):
    state = foreign_tensors(tmp_path)
    assert later_bytes(CowStaging(), state) == 0
    expected = copy_of(state)
    with CheckpointManager(tmp_path / "run", staging="cow") as manager:
        handle = manager.save(0, state)
        for tensor in state.values():
            tensor.add_(1)
        assert handle.copied
        loaded = manager.load()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_what_overlap_takes_later():
    run, staging = Run(), OverlapStaging()
    trained = [value for value in run.model.parameters() if value.requires_grad]
    large = [value for value in trained if value.nbytes >= LEAST_LATER_BYTES]
    expected = 3 * sum(value.nbytes for value in large) + run.model.frozen.nbytes
    assert later_bytes(staging, {}, **run.objects) == expected
    # No optimizer, nothing that waits for the copy.
    assert later_bytes(staging, {}, model=run.model) == 0
    assert later_bytes(staging, {"optimizer": run.optimizer.state_dict()}) == 0
    # A part of a parameter is the parameter; a tensor that is more than it is not.
    flat = torch.zeros(4 * LARGE)
    model = torch.nn.Module()
    model.part = torch.nn.Parameter(flat[: 2 * LARGE])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"flat": flat, "start": model.part.detach()[:LARGE], "end": model.part.detach()[LARGE:]}
    assert later_bytes(staging, state, model=model, optimizer=optimizer) == 3 * flat.nbytes // 4
    staging.close()


# The step that waits


class FakeJob:
    """A job whose copy is waited for by name."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def wait_copied(self, timeout: float | None = None) -> None:
        self.events.append("waited")


def test_a_step_waits_once_for_the_copy_and_before_it_writes():
    run, staging, events = Run(), OverlapStaging(), []
    staging.begin(run.objects)
    staging.begin(run.objects)
    before = run.model.inner.weight.detach().clone()

    class Checks(FakeJob):
        def wait_copied(self, timeout: float | None = None) -> None:
            super().wait_copied()
            assert torch.equal(run.model.inner.weight, before)

    staging.started(Checks(events))
    run.step()
    assert events == ["waited"]
    run.step()
    assert events == ["waited"]
    staging.started(FakeJob(events))
    staging.close()
    run.step()
    assert events == ["waited"]
    assert not run.optimizer._optimizer_step_pre_hooks


def test_a_hook_keeps_neither_the_manager_nor_the_optimizer(tmp_path):
    run = Run()
    manager = CheckpointManager(tmp_path, staging="overlap")
    manager.save(0, **run.objects)
    twin = copy.deepcopy(run.optimizer)
    assert not twin._optimizer_step_pre_hooks
    optimizer, gone = weakref.ref(run.optimizer), weakref.ref(manager)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    gc.collect()
    assert optimizer() is None
    manager.save(1, **run.objects)
    del manager
    gc.collect()
    assert gone() is None
    assert not run.optimizer._optimizer_step_pre_hooks
    run.step()


def test_an_optimizer_that_does_not_call_hooks_is_copied_at_once(tmp_path):
    inner = Run()

    class Wrapper(torch.optim.Optimizer):
        """As `accelerate` makes them: all but the step is handed through."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

        def step(self, closure: Any = None) -> None:
            self.optimizer.step(closure)

    objects = {"model": inner.model, "optimizer": Wrapper(inner.optimizer)}
    staging = OverlapStaging()
    assert later_bytes(staging, {}, **objects) == 0
    with CheckpointManager(tmp_path, staging="overlap") as manager:
        expected = inner.expected()
        assert manager.save(0, **objects).copied
        inner.step()
        assert_holds(manager, 0, expected)


def test_an_exception_in_a_step_leaves_everything_usable(tmp_path):
    run = Run()

    def fails() -> None:
        raise ArithmeticError("bad batch")

    with CheckpointManager(tmp_path, staging="overlap") as manager:
        for step in range(4):
            expected = run.expected()
            manager.save(step, **run.objects)
            with pytest.raises(ArithmeticError):
                run.step(fails)
            run.step()
            assert_holds(manager, step, expected)


@pytest.mark.parametrize("staging", ["cow", "overlap"])
def test_two_managers_save_one_run(tmp_path, staging):
    run, expected = Run(), []
    with (
        CheckpointManager(tmp_path / "a", staging=staging) as first,
        CheckpointManager(tmp_path / "b", staging=staging) as second,
    ):
        for step in range(5):
            expected.append(run.expected())
            first.save(step, **run.objects)
            second.save(step, **run.objects)
            run.step()
        for manager in (first, second):
            for step, state in enumerate(expected):
                assert_holds(manager, step, state)
    assert not run.optimizer._optimizer_step_pre_hooks


# The objects change or go away


@pytest.mark.parametrize("staging", MODES)
def test_a_model_that_is_deleted_or_replaced_right_after_the_save(tmp_path, staging):
    with CheckpointManager(tmp_path, staging=staging) as manager:
        for step in range(5):
            run = Run()
            expected = run.expected()
            manager.save(step, **run.objects)
            if step % 2:
                for name, value in list(run.model.named_parameters()):
                    value.data = torch.full_like(value, 3.0)
                    owner, _, key = name.rpartition(".")
                    setattr(run.model.get_submodule(owner), key, torch.nn.Parameter(torch.ones_like(value)))
            del run
            gc.collect()
            garbage = [torch.full((768, 192), 2.5) for _ in range(20)]
            assert garbage[-1][0, 0] == 2.5
            assert_holds(manager, step, expected)


@pytest.mark.parametrize("staging", MODES)
def test_what_is_frozen_is_not_copied_or_written_again_until_it_changes(tmp_path, staging):
    run = Run()
    with CheckpointManager(tmp_path, staging=staging) as manager:
        for step in range(4):
            expected = run.expected()
            manager.save(step, **run.objects)
            run.step()
            assert_holds(manager, step, expected)
        assert manager.stats().saves[-1].reused_chunk_count > 0
        with torch.no_grad():
            run.model.frozen.add_(1)
        expected = run.expected()
        manager.save(4, **run.objects)
        run.step()
        assert_holds(manager, 4, expected)


# Failures


@pytest.mark.parametrize("staging", MODES)
def test_a_save_that_fails_holds_up_no_step_and_is_raised_once(tmp_path, staging):
    run, folder = Run(), tmp_path / "run"
    with CheckpointManager(folder, staging=staging) as manager:
        first = run.expected()
        manager.save(0, **run.objects)
        manager.flush()
        (folder / "tmp").rename(folder / "elsewhere")
        handle = manager.save(1, **run.objects)
        run.step()
        handle.wait_copied(60)
        assert handle.copied
        with pytest.raises(StoreError):
            manager.save(2, **run.objects)
        assert not handle.durable
        (folder / "elsewhere").rename(folder / "tmp")
        expected = run.expected()
        manager.save(3, **run.objects)
        run.step()
        assert_holds(manager, 3, expected)
        assert_holds(manager, 0, first)


def test_a_wait_for_the_copy_has_a_limit(tmp_path):
    class Slow(Transfers):
        """Arrives when it is told to."""

        told = threading.Event()

        def arrive(self) -> None:
            if self._copies:
                assert self.told.wait(60)
            super().arrive()

    class Columns(Accelerator):
        """Takes every copy that is made for the tensor of a device's."""

        def has(self, tensor: torch.Tensor) -> bool:
            return tensor.dim() == 2

        def pinned(self, length_bytes: int) -> torch.Tensor:
            return torch.zeros(length_bytes, dtype=torch.uint8)

    transfers = Slow(Columns())
    transfers.launch = lambda: [copy.target.copy_(copy.source) for copy in transfers._copies]
    with CheckpointManager(tmp_path) as manager:
        manager._staging = OverlapStaging(transfers)
        handle = manager.save(0, {"t": torch.arange(6).reshape(2, 3).t()})
        with pytest.raises(TimeoutError, match="still copying"):
            handle.wait_copied(0)
        assert not handle.copied
        assert not handle.done
        transfers.told.set()
        handle.wait_copied()
        assert handle.copied
        assert manager.load()["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
        handle.wait_copied(0)


@pytest.mark.parametrize("staging", ["cow", "overlap"])
def test_a_save_that_waits_takes_everything_at_once_and_leaves_no_hook(tmp_path, staging):
    run = Run()
    with CheckpointManager(tmp_path / "a", staging=staging) as manager:
        manager.save_sync(0, **run.objects)
        assert not run.optimizer._optimizer_step_pre_hooks
    with CheckpointManager(tmp_path / "b", staging=staging, async_save=False) as manager:
        expected = run.expected()
        assert manager.save(0, **run.objects).copied
        assert not run.optimizer._optimizer_step_pre_hooks
        assert_holds(manager, 0, expected)


@pytest.mark.parametrize("staging", ["cow", "overlap"])
def test_a_fork_while_the_save_copies_goes_on_alone(tmp_path, staging):
    done = run_child("forks_while_saving", tmp_path, staging)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["child stepped 20", "whole 20"]


@pytest.mark.parametrize("staging", ["cow", "overlap"])
def test_a_program_that_ends_while_the_save_copies_ends_well(tmp_path, staging):
    done = run_child("ends_while_saving", tmp_path, staging)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(manifests(tmp_path)) == 1
    with CheckpointManager(tmp_path, read_only=True) as reader:
        assert torch.equal(reader.load()["t"], torch.arange(1 << 22))


# Where a mode can't be had


def test_this_torch_makes_clones_that_a_write_leaves_alone():
    assert why_not_copy_on_write() is None


@pytest.mark.parametrize(
    ("clone", "reason"),
    [
        (None, "it has no `_lazy_clone`"),
        (lambda tensor: tensor.clone(), "a clone does not share memory"),
        (lambda tensor: tensor.detach(), "a write reaches the clone"),
        (lambda tensor: tensor, None),
    ],
    ids=["absent", "copies", "aliases", "raises"],
)
def test_a_torch_that_fails_the_trial_is_refused_by_version(tmp_path, monkeypatch, clone, reason):
    if clone is None:
        monkeypatch.delattr(torch, "_lazy_clone")
    elif reason is None:

        def fails(tensor: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not implemented")

        monkeypatch.setattr(torch, "_lazy_clone", fails)
        reason = "a clone failed: not implemented"
    else:
        monkeypatch.setattr(torch, "_lazy_clone", clone)
    with pytest.raises(InvalidInputError) as caught:
        CheckpointManager(tmp_path, staging="cow")
    assert caught.value.what == "staging"
    assert f"torch {torch.__version__}: {reason}" in str(caught.value)
    assert 'staging="copy"' in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("staging", ["cow", "overlap"])
def test_a_save_while_a_graph_is_captured_is_refused(tmp_path, monkeypatch, staging):
    with CheckpointManager(tmp_path, staging=staging) as manager:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(InvalidInputError, match="a CUDA graph is being captured"):
            manager.save(0, {"t": torch.zeros(LARGE)})
        monkeypatch.undo()
        assert manager.save(1, {"t": torch.zeros(LARGE)}).wait().step == 1
