"""Merges of old packs, as a training run sees them."""

from __future__ import annotations

import contextlib
import errno
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_same

from varvite import CheckpointManager, MergePolicy, keep
from varvite.errors import InvalidInputError, StoreError
from varvite.records import MergeReport

CHUNK = 4096


def state(step: int) -> dict[str, Any]:
    """Eight tensors of one chunk; those up to `step` have changed since step 0."""
    return {
        f"t{index}": torch.full((CHUNK // 4,), float(index * 100 + (index if index <= step else 0)))
        for index in range(1, 9)
    }


def packs(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "packs").iterdir())


def sizes(run: Path) -> int:
    return sum(path.stat().st_size for path in (run / "packs").iterdir())


def opened(run: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(run, fsync=False, chunk_bytes=CHUNK, **options)


def save_steps(manager: CheckpointManager, steps: range) -> None:
    for step in steps:
        manager.save(step, state(step), rng=False)
    manager.flush()


def assert_all_load(manager: CheckpointManager, steps: range) -> None:
    assert [info.step for info in manager.snapshots()] == list(steps)
    for step in steps:
        assert_same(dict(manager.load(step)), state(step))


def test_merge_now_leaves_one_pack_and_every_snapshot(tmp_path):
    run = tmp_path / "run"
    with opened(run) as manager:
        save_steps(manager, range(1, 6))
        before, count = sizes(run), len(packs(run))
        report = manager.merge_now()
        assert (report.merged_packs, report.stood_down, report.findings) == (count, None, [])
        assert (report.freed_bytes, report.written_bytes) == (before, sizes(run))
        assert str(report).startswith("merged 5 packs: wrote ")
        assert [name.startswith("5-m0-") for name in packs(run)] == [True]
        assert_all_load(manager, range(1, 6))
        assert manager.merge_now() == MergeReport()
        assert manager.verify().ok
    with opened(run, read_only=True) as reader:
        assert_all_load(reader, range(1, 6))


def test_the_policy_merges_behind_the_training_loop(tmp_path):
    run = tmp_path / "run"
    with opened(run, merge=MergePolicy(max_packs=4)) as manager:
        save_steps(manager, range(1, 5))
        manager._merging.wait()
        assert len(packs(run)) == 4
        save_steps(manager, range(5, 6))
        manager._merging.wait()
        # Five packs: four of them become one, so that half of what is allowed is left.
        assert len(packs(run)) == 2
        assert any("-m0-" in name for name in packs(run))
        save_steps(manager, range(6, 9))
        assert manager.stats().errors == []
        assert_all_load(manager, range(1, 9))


def test_a_stride_merges_after_so_many_saves(tmp_path):
    run = tmp_path / "run"
    with opened(run, merge=MergePolicy(stride=3, max_packs=100)) as manager:
        save_steps(manager, range(1, 3))
        manager._merging.wait()
        assert all("-r0-" in name for name in packs(run))
        save_steps(manager, range(3, 4))
        manager._merging.wait()
        assert any(name.startswith("3-m0-") for name in packs(run))
        assert_all_load(manager, range(1, 4))


def test_a_pack_that_is_mostly_dead_is_rewritten(tmp_path):
    run = tmp_path / "run"
    frozen = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    policy = MergePolicy(max_packs=100, dead_ratio=0.5)
    with opened(run, keep=keep.last(1), merge=policy) as manager:
        for step in (1, 2):
            changing = np.random.default_rng(10 + step).integers(0, 256, 2 << 20, dtype=np.uint8)
            manager.save_sync(step, {"frozen": frozen, "changing": changing})
        manager._merging.wait()
        # Of the first pack a third is live: it was rewritten, and what is dead went.
        assert len(packs(run)) == 2
        assert sizes(run) < (3 << 20) + (1 << 18)
        assert_same(manager.load()["frozen"], frozen)


def test_save_final_saves_and_then_merges_if_there_is_a_policy(tmp_path):
    with opened(tmp_path / "with", merge=MergePolicy(max_packs=100)) as manager:
        save_steps(manager, range(1, 4))
        info = manager.save_final(4, state(4), rng=False)
        assert (info.step, info.kind) == (4, "delta")
        assert len(packs(tmp_path / "with")) == 1
        assert_all_load(manager, range(1, 5))
    with opened(tmp_path / "without") as manager:
        save_steps(manager, range(1, 4))
        manager.save_final(4, state(4), rng=False)
        assert len(packs(tmp_path / "without")) == 4


def test_loads_go_on_while_packs_are_merged(tmp_path):
    run = tmp_path / "run"
    failures: list[BaseException] = []
    stop = threading.Event()

    def load_again_and_again() -> None:
        try:
            with opened(run, read_only=True) as reader:
                while not stop.is_set():
                    for step in (1, 2):
                        assert_same(dict(reader.load(step)), state(step))
        except BaseException as failure:  # noqa: BLE001 - the thread's end is looked at below
            failures.append(failure)

    with opened(run, merge=MergePolicy(max_packs=1)) as manager:
        save_steps(manager, range(1, 3))
        thread = threading.Thread(target=load_again_and_again)
        thread.start()
        for _ in range(5):
            save_steps(manager, range(3, 9))
            manager.merge_now()
        stop.set()
        thread.join()
    assert failures == []


def test_a_mapped_tensor_outlives_the_merge_of_its_pack(tmp_path):
    run = tmp_path / "run"
    with opened(run) as manager:
        save_steps(manager, range(1, 4))
        mapped = manager.load(1, mmap=True)
        manager.merge_now()
        assert_same(dict(mapped), state(1))
        assert_same(dict(manager.load(1, mmap=True)), state(1))


@contextlib.contextmanager
def small_files_only() -> Iterator[None]:
    """Lets a file of more than 40 kB fail: the pack of a merge, and none of the saves here."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail_to_merge(manager: CheckpointManager) -> None:
    """Makes a merge in the background fail, of a manager that allows two packs."""
    save_steps(manager, range(1, 3))
    manager._merging.wait()  # else it may run into the limit too, and fail twice
    with small_files_only():
        manager.save_sync(3, state(3), rng=False)
        manager._merging.wait()


def test_a_failure_in_the_background_is_raised_once_and_listed(tmp_path):
    with opened(tmp_path / "run", merge=MergePolicy(max_packs=2)) as manager:
        fail_to_merge(manager)
        (text,) = manager.stats().errors
        assert text.startswith("merge: cannot write")
        with pytest.raises(StoreError) as caught:
            manager.flush()
        assert caught.value.errno == errno.EFBIG
        manager.flush()
        assert len(manager.stats().errors) == 1
        assert manager.merge_now().merged_packs == 3
        assert_all_load(manager, range(1, 4))


def test_a_failure_in_the_background_is_raised_by_merge_now_before_it_merges(tmp_path):
    with opened(tmp_path / "run", merge=MergePolicy(max_packs=2)) as manager:
        fail_to_merge(manager)
        with small_files_only():
            for _ in range(2):  # the one in the background, then its own
                with pytest.raises(StoreError, match="cannot write"):
                    manager.merge_now()
        assert len(manager.stats().errors) == 1
        assert manager.merge_now().merged_packs == 3


def test_a_failure_in_the_background_is_raised_by_close(tmp_path):
    manager = opened(tmp_path / "run", merge=MergePolicy(max_packs=2))
    fail_to_merge(manager)
    with pytest.raises(StoreError, match="cannot write"):
        manager.close()
    manager.close()


def test_a_failure_is_a_warning_where_that_was_asked_for(tmp_path):
    with opened(tmp_path / "run", merge=MergePolicy(max_packs=2), on_error="warn") as manager:
        fail_to_merge(manager)
        with pytest.warns(RuntimeWarning, match="a merge failed: cannot write"):
            manager.flush()


def test_damage_is_a_finding_and_a_warning_of_a_merge_in_the_background(tmp_path):
    run = tmp_path / "run"
    with opened(run, merge=MergePolicy(max_packs=2)) as manager:
        save_steps(manager, range(1, 3))
        first = next(path for path in (run / "packs").iterdir() if path.name.startswith("1-"))
        content = bytearray(first.read_bytes())
        content[64 + 5] ^= 1  # of a tensor that all snapshots share
        first.write_bytes(content)
        manager.save_sync(3, state(3), rng=False)
        manager._merging.wait()
        with pytest.warns(RuntimeWarning, match="a merge found damage in `packs/1-r0-"):
            manager.flush()
        report = manager.merge_now()
    (finding,) = report.findings
    assert finding.object == f"packs/{first.name}"
    assert finding.steps == [1, 2, 3]
    assert str(report).splitlines()[1].startswith(f"  `packs/{first.name}` at byte ")


def test_closing_does_not_wait_for_a_merge_to_finish_and_loses_nothing(tmp_path):
    run = tmp_path / "run"
    with opened(run, merge=MergePolicy(max_packs=1)) as manager:
        for step in range(1, 9):
            manager.save(step, state(step), rng=False)
        manager.flush()
        # Each save refers to what the one before has, whatever a merge does meanwhile.
        assert [save.reused_chunk_count for save in manager.stats().saves] == [0] + [7] * 7
    with opened(run) as manager:
        assert_all_load(manager, range(1, 9))
        manager.merge_now()
        assert len(packs(run)) == 1
        assert_all_load(manager, range(1, 9))


def test_a_reader_may_not_merge(tmp_path):
    with opened(tmp_path) as manager:
        save_steps(manager, range(1, 3))
    with opened(tmp_path, read_only=True) as reader, pytest.raises(InvalidInputError, match="read-only"):
        reader.merge_now()
