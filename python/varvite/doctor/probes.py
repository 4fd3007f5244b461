"""Measurements and trials of a file system, each with files of its own in a scratch folder.

A trial returns `works`, `not supported: ...` where the file system says so, or what went wrong.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from pathlib import Path
from typing import Final

__all__ = [
    "lock_state",
    "probe_direct",
    "probe_hard_link",
    "probe_lock",
    "probe_rename",
    "sync_seconds",
    "write_bytes_per_second",
]

_BLOCK_BYTES: Final = 1 << 20
_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1
_NOT_SUPPORTED: Final = frozenset([errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ENOTTY])


def sync_seconds(scratch: Path, count: int) -> list[float]:
    """Writes 4 KiB and syncs them, `count` times; returns the seconds of each, shortest first."""
    times = []
    with (scratch / "sync").open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(b"\x5a" * 4096)
            started = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - started)
    return sorted(times)


def write_bytes_per_second(scratch: Path, length_bytes: int) -> float:
    """Writes so many bytes and syncs once; returns the rate with the sync counted in."""
    # Random bytes: a file system that compresses must not look faster than it is for weights.
    block = os.urandom(_BLOCK_BYTES)
    started = time.perf_counter()
    with (scratch / "write").open("wb", buffering=0) as file:
        for start in range(0, length_bytes, _BLOCK_BYTES):
            _write_all(file.fileno(), block[: min(_BLOCK_BYTES, length_bytes - start)])
        os.fsync(file.fileno())
    rate = length_bytes / (time.perf_counter() - started)
    (scratch / "write").unlink()
    return rate


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def probe_rename(scratch: Path) -> str:
    """Tries `renameat2` with `RENAME_NOREPLACE`: it must publish once and refuse the second time."""
    first, second, target = scratch / "rename-1", scratch / "rename-2", scratch / "rename-target"
    target.unlink(missing_ok=True)
    first.write_bytes(b"first")
    second.write_bytes(b"second")
    code = _rename_if_absent(first, target)
    if code in _NOT_SUPPORTED:
        return f"not supported: {os.strerror(code)}"
    if code != 0:
        return f"failed: {os.strerror(code)}"
    code = _rename_if_absent(second, target)
    if code == errno.EEXIST and target.read_bytes() == b"first":
        return "works"
    return "it replaced a file that was there" if code == 0 else f"failed: {os.strerror(code)}"


def _rename_if_absent(source: Path, target: Path) -> int:
    """Returns 0, or the error number."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return errno.ENOSYS
    done = rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    return 0 if done == 0 else ctypes.get_errno()


def probe_hard_link(scratch: Path) -> str:
    """Tries a hard link: it must share the file, and refuse a name that is taken."""
    source, target = scratch / "link-source", scratch / "link-target"
    source.write_bytes(b"linked")
    try:
        target.hardlink_to(source)
    except OSError as error:
        known = error.errno in _NOT_SUPPORTED or error.errno == errno.EMLINK
        return f"{'not supported' if known else 'failed'}: {error.strerror}"
    try:
        target.hardlink_to(source)
    except FileExistsError:
        return "works" if target.samefile(source) else "it made a copy"
    return "it replaced a file that was there"


def probe_lock(scratch: Path) -> str:
    """Tries `flock`: a second open file must not get a lock that the first one holds."""
    path = scratch / "lock"
    with path.open("wb") as holder, path.open("rb+") as other:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            known = error.errno in _NOT_SUPPORTED or error.errno == errno.ENOLCK
            return f"{'not supported' if known else 'failed'}: {error.strerror}"
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "works"
        return "it let two writers in"


def probe_direct(scratch: Path) -> str:
    """Tries a write past the page cache (`O_DIRECT`) of one aligned page."""
    flag = getattr(os, "O_DIRECT", 0)
    if flag == 0:
        return "not supported: this system has no O_DIRECT"
    path = scratch / "direct"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    except OSError as error:
        return f"not supported: {error.strerror}"
    try:
        with mmap.mmap(-1, 4096) as page:  # anonymous memory is aligned to pages
            os.write(descriptor, page)
    except OSError as error:
        return f"not supported: {error.strerror}"
    finally:
        os.close(descriptor)
    return "works"


def lock_state(path: Path) -> tuple[bool, str]:
    """Tells whether somebody holds the lock of a repository, and the text of its file.

    A writer leaves its name there and takes it away when it ends well. So only where a name stands is
    the lock tried, shared and for an instant, and a run that starts meanwhile is not turned away.

    Args:
        path: The lock's file; it may be absent.
    """
    try:
        with path.open("rb") as file:
            text = file.read(4096).decode("utf-8", "replace")
            if not text:
                return False, ""
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True, text
            return False, text
    except FileNotFoundError:
        return False, ""
