"""Which file system a folder lies on, and what that means for a repository."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["FileSystem", "describe_file_system", "parse_mounts"]


class FileSystem(NamedTuple):
    """A file system.

    Attributes:
        kind: Its type, such as `ext4`, `nfs4` or `fuse.sshfs`.
        place: `local disk`, `memory`, `container layer`, `network`, `user space`, or `unknown`.
        mount_point: Where it is mounted.
        options: Its mount options.
        verdict: `ok` or `warn`.
        meaning: What a run has to know of it.
    """

    kind: str
    place: str
    mount_point: str
    options: str
    verdict: str
    meaning: str


class Mount(NamedTuple):
    """A line of `/proc/self/mountinfo`.

    Attributes:
        mount_point: Folder it is mounted at.
        kind: Type of the file system.
        options: Options of the mount and of the file system.
    """

    mount_point: str
    kind: str
    options: str


# statfs(2) and linux/magic.h: how the kernel names the type of the very folder.
_MAGIC: Final = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x4D44: "vfat",
    0x2011BAB0: "exfat",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x61756673: "aufs",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x00C36400: "ceph",
    0x5346414F: "afs",
    0x20030528: "orangefs",
    0x01021997: "9p",
    0x65735546: "fuse",
}

_LOCAL: Final = frozenset(
    ["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "vfat", "exfat"]
)
_MEMORY: Final = frozenset(["tmpfs", "ramfs"])
_LAYER: Final = frozenset(["overlay", "aufs"])
_NETWORK: Final = frozenset(
    [
        *("nfs", "nfs4", "cifs", "smb2", "smb3", "lustre", "gpfs", "beegfs", "ceph", "afs"),
        *("orangefs", "9p", "wekafs", "panfs", "virtiofs", "glusterfs"),
    ]
)

_MEANINGS: Final = {
    "local disk": ("ok", "only this machine sees it: another node can't resume from here"),
    "memory": ("warn", "it is gone when the machine restarts: keep the repository on a disk"),
    "container layer": ("warn", "it is gone with the container: mount a volume for the repository"),
    "network": ("ok", "other nodes see it; that the lock holds between nodes depends on its server"),
    "user space": ("warn", "a program answers for it: rename, lock and sync are as good as that program"),
    "unknown": ("warn", "it is not known whether its sync and rename keep what they promise"),
}


def describe_file_system(folder: Path) -> FileSystem:
    """Finds the file system of a folder that exists.

    The kernel's magic number decides; the table of mounts adds what it can't tell, such as the program
    behind a FUSE mount.
    """
    mounts = []
    with suppress(OSError):
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape"))
    mount = _mount_of(os.path.realpath(folder), mounts)
    magic = _MAGIC.get(_magic_number(folder))
    if mount is None:
        mount = Mount("?", magic or "unknown", "")
    kind = mount.kind
    # A mount that hides another, or one that another namespace made, is in the table under its old type.
    if magic is not None and not _agree(magic, kind):
        kind = magic
    place = place_of(kind)
    verdict, meaning = _MEANINGS[place]
    if place == "network" and _has_local_locks(mount.options):
        verdict, meaning = "warn", "mounted without locks between nodes: two nodes could write at once"
    return FileSystem(kind, place, mount.mount_point, mount.options, verdict, meaning)


def place_of(kind: str) -> str:
    """Returns where the bytes of a file system lie.

    Example:
        >>> place_of("nfs4"), place_of("fuse.sshfs"), place_of("ext4")
        ('network', 'user space', 'local disk')
    """
    places = ((_LOCAL, "local disk"), (_MEMORY, "memory"), (_LAYER, "container layer"), (_NETWORK, "network"))
    for kinds, place in places:
        if kind in kinds:
            return place
    return "user space" if kind.partition(".")[0] in ("fuse", "fuseblk") else "unknown"


def parse_mounts(text: str) -> list[Mount]:
    r"""Reads the table of mounts (proc(5), `mountinfo`), in its order.

    Example:
        >>> parse_mounts("36 35 98:0 / /a\\040b rw - nfs4 server:/x rw,nolock\n")
        [Mount(mount_point='/a b', kind='nfs4', options='rw,nolock')]
    """
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, more = before.split(" "), after.split(" ")
        if separator and len(fields) >= 6 and len(more) >= 3:
            options = ",".join(dict.fromkeys([*fields[5].split(","), *more[2].split(",")]))
            mounts.append(Mount(_unescaped(fields[4]), more[0], options))
    return mounts


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _mount_of(real_path: str, mounts: list[Mount]) -> Mount | None:
    """Returns the mount that a path lies on: the longest that contains it, and of equal ones the last."""
    found = None
    for mount in mounts:
        point = mount.mount_point.rstrip("/")
        contains = real_path == point or real_path.startswith(f"{point}/")
        if contains and (found is None or len(mount.mount_point) >= len(found.mount_point)):
            found = mount
    return found


def _agree(magic: str, kind: str) -> bool:
    families = {"ext4": ("ext2", "ext3", "ext4"), "nfs": ("nfs", "nfs4"), "smb2": ("cifs", "smb3", "smb2")}
    return kind in families.get(magic, (magic,)) or (magic == "fuse" and kind.startswith("fuse"))


def _has_local_locks(options: str) -> bool:
    return not {"nolock", "local_lock=all", "local_lock=flock", "localflock"}.isdisjoint(options.split(","))


def _magic_number(folder: Path) -> int:
    """Returns `f_type` of statfs(2), which Python's `os.statvfs` lacks; 0 where it can't be had."""
    # The structure is shorter than this everywhere, and starts with the type as a machine word.
    buffer = (ctypes.c_long * 64)()
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.statfs(os.fsencode(folder), ctypes.byref(buffer)) == 0:
            return int(buffer[0]) & 0xFFFFFFFF
    return 0
