"""Saves, waits, failures of background saves, references and lists: as a training loop uses them."""

from __future__ import annotations

import datetime as dt
import math
import os
import threading
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import assert_same, copy_of, files_of, packs, run_child

from varvite import CheckpointManager, keep
from varvite.errors import CheckpointError, InvalidInputError, SnapshotNotFoundError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", threads=2, chunk_bytes=4096) as manager:
        yield manager


@contextmanager
def broken(folder: Path) -> Iterator[None]:
    """Makes every save into a repository fail while the block runs."""
    packs_folder = folder / "packs"
    packs_folder.rename(folder / "hidden")
    try:
        yield
    finally:
        (folder / "hidden").rename(packs_folder)


EVERYTHING: dict[str, Any] = {
    "none": None,
    "flags": [True, False],
    "ints": [0, -1, 1 << 63, -(1 << 200)],
    "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324],
    "complex": 1 - 2j,
    "text": "τέλος\n\0end",
    "bytes": b"\0\xff",
    "tuple": (1, ("two", [3])),
    "sets": [{1, 2}, frozenset({"a"})],
    "empty": [{}, [], (), set(), "", b""],
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter("aab"),
    7: "an int key",
    "7": "its text",
    ("t", 1): "a tuple key",
    "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    "numpy": [np.float32(0.1), np.int64(-3), np.bool_(True), np.arange(6, dtype=">i2").reshape(2, 3)],
    "tensors": {
        "plain": torch.arange(5000, dtype=torch.float32),
        "scalar": torch.tensor(3, dtype=torch.int8),
        "empty": torch.zeros(2, 0),
        "bf16": torch.randn(7, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "view": torch.arange(1000.0)[10:13],
    },
}


def test_a_nest_of_every_plain_type_round_trips(manager):
    before = copy_of(EVERYTHING)
    manager.save_sync(3, EVERYTHING)
    loaded = manager.load()
    assert_same(dict(loaded), before)
    assert_same(EVERYTHING, before)
    assert loaded.step == 3
    assert loaded.snapshot == manager.info()
    assert loaded["tensors"]["view"].untyped_storage().nbytes() == 12


def test_facts_of_a_snapshot(manager):
    before = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=1)
    metadata = {"name": "run", "layers": (1, 2), 3: None}
    state = {"w": torch.zeros(10_000), "tie": None}
    state["tie"] = state["w"]
    info = manager.save_sync(5, state, metrics={"loss": 0.25}, metadata=metadata, rng=False)
    assert (info.seq, info.step, info.parent, info.world_size) == (1, 5, None, 1)
    assert (info.kind, info.raw_bytes, info.healthy, info.nonfinite) == ("base", 40_000, True, {})
    assert info.stored_bytes == packs(manager._settings.path)[0].stat().st_size
    assert info.metrics == {"loss": 0.25}
    assert_same(info.metadata, metadata)
    assert info.tags == []
    assert before <= info.created_at <= dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)
    assert len(bytes.fromhex(info.digest)) == 32
    assert manager.info(5) == info
    assert manager.snapshots() == [info]


def test_equal_states_have_one_digest_and_a_second_save_writes_next_to_nothing(manager):
    state = {"w": torch.randn(100_000), "epoch": 1}
    first = manager.save_sync(1, state, rng=False)
    second = manager.save_sync(2, state, rng=False)
    assert second.digest == first.digest
    assert (second.kind, second.raw_bytes) == ("delta", first.raw_bytes)
    assert second.stored_bytes < 20_000 < 400_000 < first.stored_bytes
    state["w"][0] += 1
    third = manager.save_sync(3, state, rng=False)
    assert third.digest != first.digest
    assert third.stored_bytes < second.stored_bytes + 3 * 4096


def test_the_caller_may_change_everything_as_soon_as_save_returns(manager):
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    state = {"list": [1, [2]], "array": np.arange(10_000), "w": torch.ones(100_000)}
    expected = copy_of(state)
    weights = copy_of(model.state_dict())
    moments = [copy_of(optimizer.state[one]["exp_avg"]) for one in model.parameters()]
    manager.save(1, state, metrics=(metrics := {"loss": 1.0}), model=model, optimizer=optimizer)
    state["list"][1].append(3)
    state["array"][:] = -1
    state["w"].zero_()
    state["new"] = 1
    metrics["loss"] = 2.0
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(math.nan)
            optimizer.state[one]["exp_avg"].fill_(math.nan)
            optimizer.state[one]["step"].fill_(99)
    optimizer.param_groups[0].update(lr=77.0, betas=(0.0, 0.0))
    optimizer.param_groups[0]["params"].clear()

    loaded = manager.load()
    for key, value in expected.items():
        assert_same(loaded[key], value)
    assert "new" not in loaded
    assert_same(loaded["model"], dict(weights))
    saved = loaded["optimizer"]
    assert (saved["param_groups"][0]["lr"], saved["param_groups"][0]["betas"]) == (1e-3, (0.9, 0.95))
    assert saved["param_groups"][0]["params"] == ["weight", "bias"]
    for name, moment in zip(("weight", "bias"), moments, strict=True):
        assert_same(saved["state"][name]["exp_avg"], moment)
        assert saved["state"][name]["step"].item() == 1
    assert loaded.snapshot.metrics == {"loss": 1.0}


def test_a_save_changes_nothing(manager):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    grads = [copy_of(one.grad) for one in model.parameters()]
    weights = copy_of(model.state_dict())
    draws = (torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.is_grad_enabled())
    for _ in range(2):
        manager.save(1, model=model, optimizer=optimizer)
    manager.flush()
    manager.load()
    assert_same((torch.get_rng_state(), np.random.get_state()[1].tolist(), torch.is_grad_enabled()), draws)
    assert len(optimizer.state) == 0
    assert_same([one.grad for one in model.parameters()], grads)
    assert_same(dict(model.state_dict()), dict(weights))
    assert model.training


def test_a_handle_tells_how_its_save_goes(manager):
    handle = manager.save(7, {"w": torch.ones(10)})
    info = handle.wait(timeout=60)
    assert (handle.step, handle.done, handle.durable) == (7, True, True)
    assert info == manager.info(7)
    assert handle.wait() == info
    timings = handle.timings
    assert 0 < timings.copy <= timings.blocked
    assert min(timings.queue, timings.encode, timings.write, timings.sync, timings.commit) >= 0
    assert timings.commit > 0
    assert repr(handle) == "<SaveHandle of step 7: durable>"
    assert str(timings).startswith("blocked ")


def test_a_save_waits_for_the_one_before_and_both_are_committed(manager):
    state = {"w": torch.randn(4_000_000)}
    handles = []
    for step in range(4):
        state["w"] += 1
        handles.append(manager.save(step, state))
        assert all(handle.durable for handle in handles[:-1])
    manager.flush()
    assert [info.step for info in manager.snapshots()] == [0, 1, 2, 3]
    assert [info.parent for info in manager.snapshots()] == [None, 1, 2, 3]
    assert handles[1].timings.queue > 0
    assert manager.stats().queue_seconds >= handles[1].timings.queue
    first, last = manager.load(0)["w"], manager.load(3)["w"]
    assert not torch.equal(first, last)
    assert_same(last, state["w"])


def test_without_async_save_a_save_is_durable_when_it_returns(tmp_path):
    with CheckpointManager(tmp_path, async_save=False) as manager:
        handle = manager.save(np.int64(1), {"w": torch.ones(3)})
        assert (handle.done, handle.durable, type(handle.step)) == (True, True, int)
        assert handle.wait() == manager.info(1)
        with broken(tmp_path), pytest.raises(StoreError):
            manager.save(2, {"w": torch.ones(3)})
        manager.flush()


def test_a_failed_background_save_is_raised_once_by_the_next_save(manager):
    folder = manager._settings.path
    manager.save_sync(0, {"w": torch.zeros(10)})
    with broken(folder):
        handle = manager.save(1, {"w": torch.ones(10)})
        with pytest.raises(StoreError):
            handle.wait()
    assert (handle.done, handle.durable) == (True, False)
    assert repr(handle) == "<SaveHandle of step 1: failed>"
    with pytest.raises(StoreError) as caught:
        manager.save(2, {"w": torch.ones(10)})
    assert caught.value.errno is not None
    manager.flush()
    assert [info.step for info in manager.snapshots()] == [0]
    manager.save(2, {"w": torch.ones(10)})
    manager.flush()
    assert [info.step for info in manager.snapshots()] == [0, 2]
    stats = manager.stats()
    assert (stats.save_count, len(stats.errors)) == (2, 1)
    assert stats.errors[0].startswith("step 1: ")
    with pytest.raises(StoreError):
        handle.wait()


def test_a_failed_background_save_is_raised_once_by_flush(manager):
    with broken(manager._settings.path):
        handle = manager.save(1, {"w": torch.ones(10)})
        with pytest.raises(StoreError):
            manager.flush()
    manager.flush()
    assert not handle.durable
    manager.close()


def test_a_failed_background_save_is_raised_by_close_which_lets_go_of_the_lock(tmp_path):
    manager = CheckpointManager(tmp_path)
    with broken(tmp_path):
        manager.save(1, {"w": torch.ones(10)})
        with pytest.raises(StoreError):
            manager.close()
    manager.close()
    with CheckpointManager(tmp_path) as again:
        assert again.snapshots() == []


def test_leaving_a_with_block_raises_a_failed_save(tmp_path):
    def train() -> None:
        with CheckpointManager(tmp_path) as manager, broken(tmp_path):
            manager.save(1, {"w": torch.ones(10)})
            manager._background.wait()

    with pytest.raises(StoreError):
        train()


def test_the_callers_own_exception_passes_and_notes_the_failed_save(tmp_path):
    def train() -> None:
        with CheckpointManager(tmp_path) as manager:
            with broken(tmp_path):
                manager.save(1, {"w": torch.ones(10)})
                manager._background.wait()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        train()
    [note] = caught.value.__notes__
    assert note.startswith("a save failed as well: StoreError: ")


def test_the_callers_own_exception_passes_and_the_running_save_is_committed(tmp_path):
    def train() -> None:
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, {"w": torch.ones(1_000_000)})
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        train()
    assert getattr(caught.value, "__notes__", []) == []
    with CheckpointManager(tmp_path, read_only=True) as reader:
        assert [info.step for info in reader.snapshots()] == [1]


def test_on_error_warn_warns_at_the_line_of_the_next_call_and_goes_on(tmp_path):
    with CheckpointManager(tmp_path, on_error="warn") as manager:
        with broken(tmp_path):
            manager.save(1, {"w": torch.ones(10)})
            manager._background.wait()
        with pytest.warns(RuntimeWarning, match="the save of step 1 failed: ") as caught:
            manager.save(2, {"w": torch.ones(10)})
        assert [one.filename for one in caught] == [__file__]
        manager.flush()
        assert [info.step for info in manager.snapshots()] == [2]


def test_a_manager_that_goes_out_of_scope_finishes_its_save_and_lets_go_of_the_lock(tmp_path):
    CheckpointManager(tmp_path).save(1, {"w": torch.ones(1_000_000)})
    with CheckpointManager(tmp_path) as manager:
        assert [info.step for info in manager.snapshots()] == [1]


def test_flush_with_a_timeout(manager, monkeypatch):
    manager.flush(timeout=0)
    handle = manager.save(1, {"w": torch.ones(10)})
    never = threading.Event()
    monkeypatch.setattr(type(handle), "done", property(lambda _: never.is_set()))

    def wait(timeout: float | None = None) -> None:
        assert timeout == 0.25
        raise TimeoutError("the save is still running")

    monkeypatch.setattr(handle, "wait", wait)
    with pytest.raises(TimeoutError):
        manager.flush(timeout=0.25)
    monkeypatch.undo()
    manager.flush()


def test_the_end_of_a_process_flushes_the_running_save(tmp_path):
    done = run_child("exits", tmp_path, "running")
    assert (done.returncode, done.stderr) == (0, "")
    with CheckpointManager(tmp_path, read_only=True) as reader:
        assert reader.load()["w"].sum() == 3_000_000


@pytest.mark.parametrize("how", ["failed", "dropped", "raised"])
def test_a_process_that_has_not_heard_of_a_failed_save_ends_with_a_status_and_a_text(tmp_path, how):
    done = run_child("exits", tmp_path, how)
    assert done.returncode == 1
    assert "varvite: a save failed and was not waited for:" in done.stderr
    assert "StoreError" in done.stderr
    assert done.stdout == "training is over\n"


def test_a_process_that_has_heard_of_a_failed_save_ends_well(tmp_path):
    done = run_child("exits", tmp_path, "heard")
    assert (done.returncode, done.stderr) == (0, "")


def test_statistics_and_their_print_on_an_ascii_console(tmp_path):
    done = run_child(
        "ascii_console", tmp_path / "é", PYTHONIOENCODING="ascii:strict", PYTHONUTF8="0", LC_ALL="C"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("step 1: 40.0 kB")
    assert "1 saves: 40.0 kB" in done.stdout
    assert "failed: step 2: " in done.stdout
    assert "the text is ascii: False" in done.stdout
    assert done.stdout.isascii()


def test_a_line_of_timings_for_each_save_where_the_environment_asks(tmp_path):
    done = run_child("plain_state", tmp_path, VARVITE_PROFILE="1")
    [line] = done.stderr.splitlines()
    assert line.startswith("varvite: step 1: ")
    assert "commit" in line


def test_saving_a_step_again_supersedes_the_older_snapshot(manager):
    manager.save_sync(1, {"v": "old"})
    manager.save_sync(2, {"v": 2})
    new = manager.save_sync(1, {"v": "new"})
    assert (new.seq, new.parent) == (3, 2)
    assert [(info.seq, info.step) for info in manager.snapshots()] == [(2, 2), (3, 1)]
    assert manager.load(1) == {"v": "new"}
    assert manager.load("step:1") == {"v": "new"}
    assert manager.load("seq:1") == {"v": "old"}
    assert manager.load() == {"v": "new"}


def test_after_a_rollback_the_abandoned_future_does_not_come_back(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in (10, 20, 30):
            manager.save_sync(step, {"v": [step]})
    with CheckpointManager(tmp_path) as manager:
        report = manager.resume(10, v=(restored := []))
        assert (report.step, restored) == (10, [10])
        info = manager.save_sync(11, {"v": 11})
        assert (info.seq, info.parent) == (4, 1)
        assert manager.load() == {"v": 11}
    with CheckpointManager(tmp_path, read_only=True) as reader:
        assert reader.info("latest").step == 11
        assert [info.step for info in reader.snapshots()] == [10, 20, 30, 11]


def test_references(manager):
    losses = {10: 0.5, 20: 0.25, 30: math.nan, 40: math.inf, 50: 0.75}
    for step, loss in losses.items():
        weight = torch.tensor([math.nan if step == 50 else 1.0])
        manager.save_sync(step, {"step": step, "w": weight}, metrics={"loss": loss, "val/acc": -loss})
    manager.pin(20, "good")
    expected = {
        "latest": 50,
        "latest~0": 50,
        "latest~1": 40,
        "latest~4": 10,
        "healthy": 40,
        "best:loss": 20,
        "best:loss:max": 40,
        "best:val/acc:max": 20,
        "step:30": 30,
        "seq:1": 10,
        "tag:good": 20,
        30: 30,
        np.int64(30): 30,
    }
    assert {ref: manager.load(ref)["step"] for ref in expected} == expected
    assert {ref: manager.info(ref).step for ref in expected} == expected
    for ref in ("latest~5", "best:accuracy", "step:31", "seq:6", "tag:bad", 31):
        with pytest.raises(SnapshotNotFoundError) as caught:
            manager.load(ref)
        assert "varvite ls" in caught.value.hint


def test_the_policy_says_in_which_direction_a_metric_is_better(tmp_path):
    with CheckpointManager(tmp_path, keep=keep.best("acc", "max", n=2)) as manager:
        for step, accuracy in enumerate([0.1, 0.9, math.nan, 0.8, 0.2]):
            manager.save_sync(step, {"v": step}, metrics={"acc": accuracy})
        assert manager.load("best:acc") == {"v": 1}
        assert [info.step for info in manager.snapshots()] == [1, 3, 4]


def test_metrics_that_are_no_numbers_come_back_as_they_were(manager):
    metrics = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "tiny": 5e-324, "é\n": 0.1}
    assert_same(manager.save_sync(1, metrics=metrics).metrics, dict(sorted(metrics.items())))
    with pytest.raises(SnapshotNotFoundError):
        manager.load("best:nan")


def test_weights_that_are_not_finite_make_a_snapshot_unhealthy(manager):
    model = torch.nn.Linear(3, 2)
    manager.save_sync(1, model=model)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
        model.weight[1, 1] = -math.inf
        model.bias[0] = math.inf
    info = manager.save_sync(2, model=model)
    assert (info.healthy, info.nonfinite) == (False, {"model.weight": 2, "model.bias": 1})
    assert {
        entry.name: entry.nonfinite for entry in manager.entries() if entry.rank is None
    } == info.nonfinite
    assert "not finite: 3 elements" in str(info)
    assert manager.info("healthy").step == 1
    assert_same(manager.load()["model"]["weight"], model.weight.detach())


def test_pins_keep_a_snapshot_from_deletion_and_from_retention(tmp_path):
    with CheckpointManager(tmp_path, keep=keep.last(1)) as manager:
        manager.save_sync(0, {"v": 0})
        manager.pin("latest", "start")
        manager.pin(0, "start")
        for step in (1, 2):
            manager.save_sync(step, {"v": step})
        assert [info.step for info in manager.snapshots()] == [0, 2]
        assert manager.info(0).tags == ["start"]
        with pytest.raises(InvalidInputError, match="it is pinned; unpin first: start"):
            manager.delete(0)
        with pytest.raises(InvalidInputError, match="names snapshot 1 already"):
            manager.pin(2, "start")
        with pytest.raises(InvalidInputError):
            manager.pin(2, "../evil")
        plan = manager.prune(dry_run=True)
        assert next((row.step, row.reasons) for row in plan.kept) == (0, ["tag start"])
        assert plan.removed == []
        manager.unpin("start")
        with pytest.raises(SnapshotNotFoundError, match="tag:start"):
            manager.unpin("start")
        plan = manager.prune(dry_run=True)
        assert [row.step for row in plan.removed] == [0]
        assert [info.step for info in manager.snapshots()] == [0, 2]
        assert manager.prune() == plan
        assert [info.step for info in manager.snapshots()] == [2]
        manager.delete(2)
        with pytest.raises(SnapshotNotFoundError):
            manager.delete(2)
        assert manager.snapshots() == []
        assert manager.load_latest() is None
        assert manager.save_sync(3, {"v": 3}).seq == 4


def test_a_reader_finishes_though_its_snapshot_is_deleted(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(1, {"w": torch.arange(100_000)})
        mapped = manager.load(mmap=True)
        manager.save_sync(2, {"w": torch.zeros(3)})
        manager.delete(1)
        assert_same(mapped["w"], torch.arange(100_000))


def test_entries_come_from_the_manifest_alone(tmp_path):
    state = {"w": torch.ones(3, 5, dtype=torch.float64), "empty": torch.zeros(0, 2)}
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(1, {**state, "tie": state["w"]}, rng=False)
    for pack in packs(tmp_path):
        pack.unlink()
    with CheckpointManager(tmp_path, read_only=True) as reader:
        rows = {entry.name: entry for entry in reader.entries()}
        assert {name: (row.dtype, row.stored_dtype, row.shape) for name, row in rows.items()} == {
            "w": ("float64", "float64", (3, 5)),
            "empty": ("float32", "float32", (0, 2)),
            "tie": ("float64", "float64", (3, 5)),
        }
        assert (rows["w"].raw_bytes, rows["w"].stored_bytes, rows["empty"].raw_bytes) == (120, 120, 0)
        assert reader.info().raw_bytes == 120


def test_names_of_the_callers_own_random_state_and_of_ours_do_not_mix(manager):
    mine = {"torch": torch.arange(9.0), "numpy": {"state": {"key": np.arange(3)}}}
    manager.save_sync(1, {"rng": mine})
    loaded = manager.load()
    assert_same(loaded["rng"], mine)
    assert loaded.rng["torch"].dtype is torch.uint8
    assert {entry.rank for entry in manager.entries() if entry.name == "rng.torch"} == {None, 0}
    assert_same(dict(manager.load(names=["rng.torch"])), {"rng.torch": mine["torch"]})
    drawn = torch.rand(3)
    report = manager.resume(rng=copy_of(mine))
    assert report.rng == "restored"
    assert_same(torch.rand(3), drawn)


def test_reading_does_not_write(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in range(3):
            manager.save_sync(step, {"w": torch.full((1000,), step)})
    (tmp_path / "tmp" / "leftover").write_bytes(b"of a crash")
    before = files_of(tmp_path)
    with CheckpointManager(tmp_path, read_only=True) as reader:
        reader.load()
        reader.resume(w=torch.zeros(1000, dtype=torch.int64))
        assert reader.verify().ok
        assert reader.prune(dry_run=True).removed == []
        for call in (
            lambda: reader.save(9, {}),
            lambda: reader.save_sync(9, {}),
            reader.prune,
            lambda: reader.delete(1),
            lambda: reader.pin(1, "x"),
        ):
            with pytest.raises(InvalidInputError, match="the repository was opened read-only"):
                call()
    assert files_of(tmp_path) == before


def test_a_reader_sees_what_a_writer_commits_later(tmp_path):
    with CheckpointManager(tmp_path) as writer:
        writer.save_sync(1, {"v": 1})
        with CheckpointManager(tmp_path, read_only=True) as reader:
            assert reader.load() == {"v": 1}
            writer.save_sync(2, {"v": 2})
            assert reader.load() == {"v": 2}
            writer.delete(1)
            assert [info.step for info in reader.snapshots()] == [2]


def test_verify_reads_everything_and_a_sample_less(manager):
    manager.save_sync(1, {"w": torch.randn(200_000)}, rng=False)
    whole = manager.verify()
    assert (whole.ok, whole.findings) == (True, [])
    assert whole.checked_bytes >= 800_000
    assert 0 < manager.verify("latest", sample=0.1).checked_bytes < whole.checked_bytes / 2
    for sample in (0, -1, 1.5, math.nan):
        with pytest.raises(InvalidInputError, match="invalid sample"):
            manager.verify(sample=sample)
    assert str(whole).startswith("no damage found, ")


def test_memory_does_not_grow_with_saves(tmp_path):
    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    state = {f"layer{index}": torch.randn(25_000) for index in range(20)}
    with CheckpointManager(tmp_path, keep=keep.last(2)) as manager:
        for step in range(60):
            for tensor in state.values():
                tensor.add_(1)
            manager.save(step, state)
            if step == 5:
                manager.flush()
                after_the_fifth = resident_bytes()
        manager.flush()
        assert len(packs(tmp_path)) == 2
        assert resident_bytes() - after_the_fifth < 60 << 20


def test_an_error_of_a_save_is_a_checkpoint_error(manager):
    with broken(manager._settings.path), pytest.raises(CheckpointError):
        manager.save_sync(1, {"w": torch.ones(3)})
    assert manager.save_sync(1, {"w": torch.ones(3)}).step == 1
