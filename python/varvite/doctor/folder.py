"""The checks of a folder: measured there, with files that are removed again. No repository is needed."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from varvite.doctor.checks import Check
from varvite.doctor.filesystem import describe_file_system
from varvite.doctor.probes import (
    probe_direct,
    probe_hard_link,
    probe_lock,
    probe_rename,
    sync_seconds,
    write_bytes_per_second,
)
from varvite.records import format_bytes

__all__ = ["PROBE_COUNT", "examine", "existing_folder"]

_SYNC_COUNT: Final = 10
_WRITE_BYTES: Final = 64 << 20
_SLOW_SYNC_SECONDS: Final = 0.1
_SLOW_WRITE_BYTES_PER_SECOND: Final = 50e6
_LOW_SPACE_BYTES: Final = 10 * 1000**3
_LOW_INODES: Final = 1000
_CLOCK_SKEW_SECONDS: Final = 2.0
_EARLIEST_UNIX_SECONDS: Final = 1_735_689_600  # 2025-01-01; a clock before it was never set


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the folder itself, or the nearest one above it that exists: where it would be made.

    Example:
        >>> existing_folder("/no/such/folder")
        PosixPath('/')
    """
    folder = Path(path).expanduser().absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def examine(path: str | os.PathLike[str], ended: Callable[[], None] = lambda: None) -> list[Check]:
    """Runs all checks on a folder, which need not exist yet.

    Args:
        path: The folder.
        ended: Called after each of the `PROBE_COUNT` trials and measurements.

    Returns:
        The checks, in the order in which they are to be read. A check that can't be made says why.
    """
    folder = existing_folder(path)
    checks = [_place(Path(path).expanduser().absolute(), folder), _file_system(folder), *_space(folder)]
    try:
        with _scratch(folder) as scratch:
            for probe in _PROBES:
                checks.append(_attempt(probe, scratch))
                ended()
    except OSError as error:
        meaning = "a run can't save here; reading works"
        checks.append(
            Check("writing", f"not possible: {error.strerror}", "bad", meaning, {"errno": error.errno})
        )
    return [*checks, _clock(), *_versions()]


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Makes a folder for probes and removes it, whatever happens between."""
    scratch = Path(tempfile.mkdtemp(prefix=".varvite-doctor-", dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _attempt(probe: Callable[[Path], Check], scratch: Path) -> Check:
    try:
        return probe(scratch)
    except OSError as error:
        name = probe.__name__.strip("_").replace("_", " ")
        return Check(name, f"failed: {error.strerror}", "bad", facts={"errno": error.errno})


def _place(path: Path, folder: Path) -> Check:
    if path == folder:
        return Check("folder", str(folder), facts={"exists": True})
    if path.exists():
        return Check(
            "folder", f"{path} is no folder", "bad", f"looking at {folder} instead", {"exists": False}
        )
    return Check(
        "folder", f"{path} does not exist yet", meaning=f"looking at {folder}", facts={"exists": False}
    )


def _file_system(folder: Path) -> Check:
    found = describe_file_system(folder)
    value = f"{found.kind} ({found.place}), mounted at {found.mount_point}"
    facts = {
        "type": found.kind,
        "place": found.place,
        "mount_point": found.mount_point,
        "options": found.options,
    }
    return Check("file system", value, found.verdict, found.meaning, facts)


def _space(folder: Path) -> list[Check]:
    found = os.statvfs(folder)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if total == 0:
        return [Check("free space", "not told", facts={"free_bytes": None, "total_bytes": None})]
    verdict = "bad" if free == 0 else "warn" if free < _LOW_SPACE_BYTES else "ok"
    meaning = "" if verdict == "ok" else "a save that finds no room fails; those before it stay whole"
    space = Check(
        "free space",
        f"{format_bytes(free)} of {format_bytes(total)}",
        verdict,
        meaning,
        {"free_bytes": free, "total_bytes": total},
    )
    if found.f_files == 0:
        return [space, Check("free inodes", "not limited", facts={"free_count": None})]
    verdict = "bad" if found.f_favail == 0 else "warn" if found.f_favail < _LOW_INODES else "ok"
    meaning = "" if verdict == "ok" else "each save makes a few files"
    facts = {"free_count": found.f_favail, "total_count": found.f_files}
    return [space, Check("free inodes", f"{found.f_favail:,} of {found.f_files:,}", verdict, meaning, facts)]


def _sync_time(scratch: Path) -> Check:
    times = sync_seconds(scratch, _SYNC_COUNT)
    median = times[len(times) // 2]
    is_slow = median > _SLOW_SYNC_SECONDS
    return Check(
        "sync time",
        f"{median * 1000:.2f} ms, median of {len(times)} (slowest {times[-1] * 1000:.2f} ms)",
        "warn" if is_slow else "ok",
        "a commit waits for several syncs; saves in the background hide it" if is_slow else "",
        {"median_seconds": median, "slowest_seconds": times[-1]},
    )


def _write_rate(scratch: Path) -> Check:
    found = os.statvfs(scratch)
    length_bytes = min(_WRITE_BYTES, found.f_bavail * found.f_frsize // 4)
    if length_bytes < 1 << 20:
        return Check("write rate", "not measured for want of space", "warn")
    rate = write_bytes_per_second(scratch, length_bytes)
    is_slow = rate < _SLOW_WRITE_BYTES_PER_SECOND
    return Check(
        "write rate",
        f"{format_bytes(round(rate))}/s, {format_bytes(length_bytes)} and a sync",
        "warn" if is_slow else "ok",
        "a save may last longer than the steps between two" if is_slow else "",
        {"bytes_per_second": rate, "written_bytes": length_bytes},
    )


def _publish_by_rename(scratch: Path) -> Check:
    found = probe_rename(scratch)
    verdict = "ok" if found == "works" else "warn" if found.startswith("not supported") else "bad"
    meaning = "hard links are used instead" if verdict == "warn" else ""
    if verdict == "bad":
        meaning = "two writers could both believe that they committed"
    return Check("rename without replacing", found, verdict, meaning)


def _publish_by_link(scratch: Path) -> Check:
    found = probe_hard_link(scratch)
    if found == "works":
        return Check("hard link", found)
    if probe_rename(scratch) == "works":
        return Check("hard link", found, meaning="not needed: renaming works")
    return Check("hard link", found, "bad", "a snapshot can't be published safely here")


def _lock(scratch: Path) -> Check:
    found = probe_lock(scratch)
    if found == "works":
        return Check("flock", found)
    return Check("flock", found, "bad", "nothing would keep a second writer out")


def _direct_io(scratch: Path) -> Check:
    found = probe_direct(scratch)
    if found == "works":
        return Check("direct I/O", found)
    return Check("direct I/O", found, meaning="large saves go through the page cache")


def _file_clock(scratch: Path) -> Check:
    file = scratch / "clock"
    before = time.time()
    file.write_bytes(b"x")
    stamp, after = file.stat().st_mtime, time.time()
    # Coarse kernel time lags by a tick; only more than that is a difference of clocks.
    skew = max(before - stamp, stamp - after, 0.0)
    is_off = skew > _CLOCK_SKEW_SECONDS
    value = f"{skew:.1f} s from this machine's" if is_off else "agrees with this machine's"
    meaning = "the file server's clock is another one; nothing is decided by it" if is_off else ""
    return Check("clock of files", value, "warn" if is_off else "ok", meaning, {"skew_seconds": skew})


_PROBES: Final = (
    _sync_time,
    _write_rate,
    _publish_by_rename,
    _publish_by_link,
    _lock,
    _direct_io,
    _file_clock,
)

PROBE_COUNT: Final = len(_PROBES)
"""Trials and measurements that `examine` makes."""


def _clock() -> Check:
    now = time.time()
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    if now < _EARLIEST_UNIX_SECONDS:
        meaning = "ages of snapshots will be wrong: `keep.within` and `keep.hourly` go by them"
        return Check("clock", text, "warn", meaning, {"unix_seconds": now})
    return Check("clock", text, facts={"unix_seconds": now})


def _versions() -> list[Check]:
    checks = [
        Check("varvite", _version("varvite") or "unknown"),
        Check("python", f"{platform.python_version()} on {platform.system()} {platform.release()}"),
    ]
    for name in ("torch", "numpy"):
        version = _version(name)
        meaning = "needed to save and load tensors" if name == "torch" and version is None else ""
        verdict = "warn" if meaning else "ok"
        checks.append(Check(name, version or "not installed", verdict, meaning, {"version": version}))
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return [*checks, Check("cores", str(cores), facts={"count": cores})]


def _version(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None
