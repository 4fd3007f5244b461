"""Full disks, read-only places, second writers: a clear error, nothing lost, and the next save works."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import assert_same, child, files_of, run_child

from varvite import CheckpointManager
from varvite.errors import InvalidInputError, RepositoryLockedError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    """Mounts a file system for the time of the block; skips the test where that is not allowed."""
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=4m", "none"):
        yield folder


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def noise(length_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length_bytes, dtype=np.uint8)


def save_and_wait(manager: CheckpointManager, *, background: bool) -> None:
    """Saves more than the small disk can hold."""
    if background:
        manager.save(2, {"w": noise(5 << 20)})
        manager.flush()
    else:
        manager.save_sync(2, {"w": noise(5 << 20)})


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
def test_a_full_disk_is_an_error_with_a_way_on_and_leaves_nothing_behind(small_disk, background):
    with CheckpointManager(small_disk / "run") as manager:
        manager.save_sync(1, {"w": noise(1 << 20)})
        free_before = free_bytes(small_disk)
        for _ in range(2):
            with pytest.raises(StoreError) as caught:
                save_and_wait(manager, background=background)
            assert (caught.value.errno, isinstance(caught.value, OSError)) == (errno.ENOSPC, True)
            assert "free some space" in caught.value.hint
            assert "committed ones are whole" in caught.value.hint
            assert str(small_disk / "run") in caught.value.object
            assert free_bytes(small_disk) == free_before
        assert_same(dict(manager.load()), {"w": noise(1 << 20)})
        assert manager.verify().ok
        assert [info.step for info in manager.snapshots()] == [1]
        assert manager.save_sync(3, {"w": noise(1 << 20, seed=3)}).step == 3


def test_a_disk_that_is_full_to_the_last_byte(small_disk):
    with CheckpointManager(small_disk / "run") as manager:
        manager.save_sync(1, {"w": noise(1 << 20)})
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert free_bytes(small_disk) == 0
    with CheckpointManager(small_disk / "run", read_only=True) as reader:
        assert_same(dict(reader.load()), {"w": noise(1 << 20)})
    # A writer may open or say that it can't; it never harms what is there.
    with contextlib.suppress(StoreError), CheckpointManager(small_disk / "run") as manager:
        with pytest.raises(StoreError) as caught:
            manager.save_sync(2, {"w": noise(1 << 20, seed=2)})
        assert caught.value.errno == errno.ENOSPC
    filler.unlink()
    with CheckpointManager(small_disk / "run") as manager:
        assert_same(dict(manager.load()), {"w": noise(1 << 20)})
        assert manager.save_sync(2, {"w": noise(1 << 20, seed=2)}).step == 2
        assert manager.verify().ok


def test_on_a_full_disk_a_snapshot_can_be_deleted(small_disk):
    with CheckpointManager(small_disk / "run") as manager:
        for step in range(3):
            manager.save_sync(step, {"w": noise(1 << 20, seed=step)}, rng=False)
        with pytest.raises(StoreError):
            manager.save_sync(3, {"w": noise(1 << 20, seed=3)}, rng=False)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        manager.delete(0)
        assert free_bytes(small_disk) >= 1 << 20
        assert manager.save_sync(3, {"w": noise(1 << 19, seed=3)}, rng=False).step == 3
        assert [info.step for info in manager.snapshots()] == [1, 2, 3]


def test_a_limit_on_the_size_of_files_is_an_error_with_a_way_on(tmp_path):
    done = run_child("file_limit", tmp_path)
    assert done.stderr == ""
    hint = "raise the file-size limit of this process or file system, then save again"
    assert done.stdout.splitlines() == [
        f"sync {errno.EFBIG} {hint}",
        "left over 0",
        f"background {errno.EFBIG} {hint}",
        "left over 0",
        "old one 1000.0",
        "saved 3",
        "verified True",
    ]


@contextlib.contextmanager
def read_only_place(folder: Path) -> Iterator[None]:
    """Makes a folder read-only, for the superuser by a mount."""
    if os.geteuid() == 0:
        with mounted(folder, "--bind", str(folder)):
            subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
            yield
    else:
        folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        for path in folders:
            path.chmod(0o555)
        try:
            yield
        finally:
            for path in folders:
                path.chmod(0o755)


def test_a_read_only_place_can_be_read_and_says_so_to_a_writer(tmp_path):
    folder = tmp_path / "run"
    with CheckpointManager(folder) as manager:
        manager.save_sync(1, {"w": noise(1000)})
        manager.pin(1, "kept")
    (folder / "tmp" / "left").write_bytes(b"by a crash")
    before = files_of(folder)
    with read_only_place(folder):
        with CheckpointManager(folder, read_only=True) as reader:
            assert_same(dict(reader.load("tag:kept")), {"w": noise(1000)})
            assert_same(dict(reader.load(mmap=True)), {"w": noise(1000)})
            assert reader.verify().ok
        with pytest.raises(StoreError) as caught:
            CheckpointManager(folder)
        assert caught.value.errno in (errno.EROFS, errno.EACCES)
        assert "read_only=True" in caught.value.hint
        with pytest.raises(StoreError):
            CheckpointManager(folder / "new")
    assert files_of(folder) == before


def test_a_place_that_becomes_read_only_fails_the_save_and_nothing_else(tmp_path):
    folder = tmp_path / "run"
    with CheckpointManager(folder) as manager:
        manager.save_sync(1, {"w": noise(1000)})
        with read_only_place(folder):
            manager.save(2, {"w": noise(1000, seed=2)})
            with pytest.raises(StoreError) as caught:
                manager.flush()
            assert caught.value.errno in (errno.EROFS, errno.EACCES)
            assert_same(dict(manager.load()), {"w": noise(1000)})
        assert manager.save_sync(3, {"w": noise(1000, seed=3)}).step == 3


def test_a_folder_that_vanishes_fails_the_save_by_name(tmp_path):
    folder = tmp_path / "run"
    with CheckpointManager(folder) as manager:
        manager.save_sync(1, {"w": noise(1000)})
        folder.rename(tmp_path / "moved")
        with pytest.raises(StoreError) as caught:
            manager.save_sync(2, {"w": noise(1000)})
        assert caught.value.errno == errno.ENOENT
        assert str(folder) in str(caught.value)
        (tmp_path / "moved").rename(folder)
        assert manager.save_sync(3, {"w": noise(1000)}).step == 3


# Writers


def test_a_second_writer_in_this_process_is_refused_and_a_reader_is_not(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save_sync(1, {"v": 1})
        with pytest.raises(RepositoryLockedError) as caught:
            CheckpointManager(tmp_path)
        assert caught.value.root == str(tmp_path)
        assert f"process {os.getpid()} " in caught.value.holder
        assert "read_only=True" in caught.value.hint
        with CheckpointManager(tmp_path, read_only=True) as reader:
            assert reader.load() == {"v": 1}
        assert manager.save_sync(2, {"v": 2}).step == 2
    with CheckpointManager(tmp_path) as manager:
        assert manager.load() == {"v": 2}


def test_a_second_writer_in_another_process_is_refused_by_the_name_of_the_first(tmp_path):
    with child("holds", tmp_path) as process:
        assert process.stdout.readline() == "holding\n"
        with pytest.raises(RepositoryLockedError) as caught:
            CheckpointManager(tmp_path)
        assert f"process {process.pid} " in str(caught.value)
        with CheckpointManager(tmp_path, read_only=True) as reader:
            assert reader.load() == {"v": 1}
        process.stdin.close()
        assert process.wait(30) == 0
    with CheckpointManager(tmp_path) as manager:
        assert manager.load() == {"v": 1}


def test_the_lock_goes_with_a_holder_that_is_killed(tmp_path):
    with child("holds", tmp_path) as process:
        assert process.stdout.readline() == "holding\n"
        process.kill()
        process.wait(30)
        with CheckpointManager(tmp_path) as manager:
            assert manager.load() == {"v": 1}


def test_ctrl_c_in_close_leaves_the_manager_open_and_locked(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"v": 1})

    def interrupted(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(manager._background, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    monkeypatch.undo()
    with pytest.raises(RepositoryLockedError):
        CheckpointManager(tmp_path)
    assert manager.save_sync(2, {"v": 2}).step == 2
    manager.close()
    with pytest.raises(InvalidInputError, match="closed"):
        manager.save(3, {"v": 3})
    CheckpointManager(tmp_path).close()
