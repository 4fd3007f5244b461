"""What the machine itself allows for a number of bytes: copy, write + fsync, read.

The copy is glibc's `memcpy` through ctypes (which lets go of the GIL), from memory that was
written to into memory that was written to, one contiguous slice a thread. `Tensor.copy_` and
NumPy reach about half of it and are no limit. The limit is the best of several samples; what
is set against it is a median, so the ratio errs to the strict side. The first write is left
out: it takes memory for the page cache that the machine may first have to find.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from comparison import host

TITLES = {
    "memcpy": "memcpy into touched memory",
    "write": "write + fsync",
    "write_direct": "write + fsync, O_DIRECT",
    "read_cold": "read, cold",
    "read_cold_direct": "read, cold, O_DIRECT",
    "read_warm": "read, warm",
}

PIECE_BYTES = 8 << 20
PAGE_BYTES = 4096

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_LIBC.memcpy.restype = ctypes.c_void_p


class Buffer:
    """Anonymous, page-aligned memory with every page touched."""

    def __init__(self, length_bytes: int, fill: int) -> None:
        self.length_bytes = length_bytes
        self.memory = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        ctypes.memset(self.address, fill, length_bytes)

    def randomise(self) -> None:
        """Fill with noise, so that no layer below can store it smaller."""
        noise = os.urandom(PIECE_BYTES)
        for start in range(0, self.length_bytes, PIECE_BYTES):
            length_bytes = min(PIECE_BYTES, self.length_bytes - start)
            ctypes.memmove(self.address + start, noise, length_bytes)


def _slices(length_bytes: int, parts: int) -> list[tuple[int, int]]:
    bounds = [length_bytes * part // parts // PAGE_BYTES * PAGE_BYTES for part in range(parts)]
    bounds.append(length_bytes)
    return list(itertools.pairwise(bounds))


def _repeat(action: Callable[[], float], count: int) -> list[float]:
    return [action() for _ in range(count)]


def _copy(source: Buffer, target: Buffer, threads: int, pool: ThreadPoolExecutor) -> float:
    def one(bounds: tuple[int, int]) -> None:
        start, end = bounds
        copy_memory(target.address + start, source.address + start, end - start)

    parts = _slices(source.length_bytes, threads)
    begin = time.perf_counter()
    if threads == 1:
        one(parts[0])
    else:
        list(pool.map(one, parts))
    return time.perf_counter() - begin


def copy_memory(target: int, source: int, length_bytes: int) -> None:
    """`memcpy` of glibc between two addresses."""
    _LIBC.memcpy(target, source, length_bytes)


def write_file(source: Buffer, path: Path, flags: int) -> float:
    """Write a new file, sync it and its folder; seconds."""
    path.unlink(missing_ok=True)
    view = memoryview(source.memory)
    begin = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o644)
    try:
        offset = 0
        while offset < source.length_bytes:
            offset += os.write(descriptor, view[offset : offset + PIECE_BYTES])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    host.sync_folder(path.parent)
    return time.perf_counter() - begin


def _read(target: Buffer, path: Path, threads: int, flags: int, pool: ThreadPoolExecutor) -> float:
    descriptor = os.open(path, os.O_RDONLY | flags)

    def one(bounds: tuple[int, int]) -> None:
        offset, end = bounds
        view = memoryview(target.memory)
        while offset < end:
            piece = view[offset : min(offset + PIECE_BYTES, end)]
            found_bytes = os.preadv(descriptor, [piece], offset)
            if found_bytes <= 0:
                raise OSError(f"file ended early: `{path}` at byte {offset}")
            offset += found_bytes

    try:
        begin = time.perf_counter()
        list(pool.map(one, _slices(target.length_bytes, threads)))
        return time.perf_counter() - begin
    finally:
        os.close(descriptor)


def measure(length_bytes: int, folder: Path, repeat: int) -> dict[str, Any]:
    """Seconds of each sample, by name, for `length_bytes` rounded up to a page."""
    length_bytes = (length_bytes + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "raw-limits"
    threads = host.thread_count()
    source, target = Buffer(length_bytes, 7), Buffer(length_bytes, 1)
    source.randomise()
    samples: dict[str, list[float]] = {}
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))
        for count in sorted({1, threads}):
            samples[f"memcpy_{count}"] = _repeat(partial(_copy, source, target, count, pool), 5 * repeat)
        os.sync()
        try:
            direct = _repeat(lambda: write_file(source, path, os.O_DIRECT), repeat)
        except OSError:
            direct = []  # the file system has no O_DIRECT (tmpfs)
        samples["write_direct"] = direct
        samples["write"] = _repeat(lambda: write_file(source, path, 0), repeat + 1)[1:]
        samples.update(_read_samples(target, path, threads, repeat, pool, direct=bool(direct)))
    matches = source.memory[:PAGE_BYTES] == target.memory[:PAGE_BYTES]
    path.unlink()
    if not matches:
        raise AssertionError(f"raw read gave other bytes than were written: `{path}`")
    return {"length_bytes": length_bytes, "threads": threads, "samples": samples}


def _read_samples(
    target: Buffer,
    path: Path,
    threads: int,
    repeat: int,
    pool: ThreadPoolExecutor,
    *,
    direct: bool,
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    for count in sorted({1, threads}):
        for name, flags in (("read_cold", 0), ("read_cold_direct", os.O_DIRECT)):
            if flags and not direct:
                continue
            taken = []
            for _ in range(repeat):
                host.drop_page_cache(path.parent)
                taken.append(_read(target, path, count, flags, pool))
            samples[f"{name}_{count}"] = taken
    host.warm_page_cache(path.parent)
    for count in sorted({1, threads}):
        samples[f"read_warm_{count}"] = _repeat(partial(_read, target, path, count, 0, pool), 2 * repeat)
    return samples


def merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The limits over several runs of `measure` for the same bytes.

    Adds `seconds`, the best of each kind of sample: the one number that ratios refer to.
    """
    samples: dict[str, list[float]] = {}
    for run in runs:
        for name, taken in run["samples"].items():
            samples.setdefault(name, []).extend(taken)
    first = runs[0]
    return {
        "length_bytes": first["length_bytes"],
        "threads": first["threads"],
        "samples": samples,
        "seconds": {name: min(taken) for name, taken in samples.items() if taken},
    }
