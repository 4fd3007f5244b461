"""What the machine tells about a process and a folder: memory, files, page cache, identity."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from pathlib import Path
from typing import IO, Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_MAP_FAILED = ctypes.c_void_p(-1).value


def thread_count() -> int:
    """Threads the engine uses by default: `VARVITE_THREADS`, else the cores this process has."""
    return int(os.environ.get("VARVITE_THREADS") or len(os.sched_getaffinity(0)))


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"field is not in /proc/self/status: `{field}`")


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most it has been since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Start a new high-water mark: proc(5), /proc/pid/clear_refs, value 5."""
    Path("/proc/self/clear_refs").write_text("5")


def folder_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Each regular file below `folder` with (inode, size in bytes, mtime in ns)."""
    files = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            # A repository may remove a file of its own while we look.
            with contextlib.suppress(FileNotFoundError):
                entry = os.stat(path, follow_symlinks=False)
                files[path] = (entry.st_ino, entry.st_size, entry.st_mtime_ns)
    return files


def written_between(
    before: dict[str, tuple[int, int, int]], after: dict[str, tuple[int, int, int]]
) -> tuple[int, int]:
    """(bytes, files): whole size of each file that is new or was changed, and how many are new."""
    length_bytes = sum(entry[1] for path, entry in after.items() if before.get(path) != entry)
    return length_bytes, len(after.keys() - before.keys())


def sync_file(file: IO[bytes]) -> None:
    """Flush and `fsync` of an open file."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """`fsync` of a directory."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_page_cache(folder: Path) -> float:
    """Drop the cached pages of all files below `folder`; the share that stayed all the same.

    Only clean pages are dropped, so each file is synced first. The host below a virtual
    machine may still have the bytes: no one inside can tell.
    """
    cached = total = 0
    for path, (_, length_bytes, _) in folder_files(folder).items():
        if length_bytes == 0:
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            pages = _cached_pages(descriptor, length_bytes)
        finally:
            os.close(descriptor)
        cached += sum(page & 1 for page in pages)
        total += len(pages)
    return cached / total if total else 0.0


def _cached_pages(descriptor: int, length_bytes: int) -> bytes:
    """One byte a page, its lowest bit set where the page is cached.

    By mincore(2), which reads nothing: asking with a read that must not wait starts readahead.
    """
    pages = (ctypes.c_ubyte * -(-length_bytes // mmap.PAGESIZE))()
    address = _LIBC.mmap(None, length_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "map a file to ask what is cached")
    try:
        if _LIBC.mincore(address, length_bytes, pages) != 0:
            raise OSError(ctypes.get_errno(), "ask what is cached")
    finally:
        _LIBC.munmap(address, length_bytes)
    return bytes(pages)


def warm_page_cache(folder: Path) -> None:
    """Read every file below `folder` once."""
    piece = bytearray(8 << 20)
    for path in folder_files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def _file_system(folder: Path) -> str:
    best, kind = "", "unknown"
    resolved = str(folder.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mount, name = line.split()[1:3]
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, name
    return kind


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def describe_machine(folder: Path) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": thread_count(),
        "memory_bytes": memory_bytes,
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }
