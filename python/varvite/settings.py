"""What the arguments of a manager mean: checked once, by name, before anything is opened."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from varvite._native import Engine
from varvite.buckets import Remote, is_bucket_url, read_remote, spool_folder
from varvite.casting import SAVE_DTYPES, CastRules
from varvite.encryption import KeySource, read_encryption
from varvite.errors import InvalidInputError
from varvite.keep import Keep
from varvite.plain import loaded

__all__ = ["MergePolicy", "Settings", "joined_distributed", "open_engine", "read_settings"]

_LEGAL_PATHS = "a folder, or a url file://, s3://, gs:// or az://"


@dataclass(frozen=True)
class MergePolicy:
    """When old packs are rewritten so that they can go.

    Attributes:
        stride: Merge after this many saves; 0 for never by count.
        max_packs: Merge when a snapshot refers to more packs than this, for each of its ranks. Its smallest
            packs go, until half of that is left.
        dead_ratio: Merge a pack when more than this share of its bytes is referred to by nobody. One of less
            than 1 MiB waits until it is merged with others.

    Example:
        >>> MergePolicy().max_packs
        8
    """

    stride: int = 0
    max_packs: int = 8
    dead_ratio: float = 0.5

    def __post_init__(self) -> None:
        """Refuses values that mean nothing."""
        counts = (self.stride, self.max_packs)
        is_whole = all(isinstance(count, int) and not isinstance(count, bool) for count in counts)
        if not is_whole or self.stride < 0 or self.max_packs < 1 or not 0 < self.dead_ratio <= 1:
            raise _refuse("merge", self, "`stride` from 0, `max_packs` from 1, `dead_ratio` in (0, 1]")


@dataclass(frozen=True)
class Settings:
    """The checked arguments of a manager.

    Attributes:
        path: Folder of the repository; of one in a bucket, that of its spool.
        remote: The bucket, if there is one.
        is_direct: Whether the bucket is read without a folder.
        rules: Retention rules as JSON, `[]` for none.
        merge: The merge policy as JSON, `null` for none.
        async_save: Whether `save` returns before the snapshot is durable.
        threads: Threads that copy, digest and read.
        chunk_bytes: Raw bytes of a chunk.
        casts: Which tensors are stored in a narrower dtype.
        compression: `none`, `fast`, `max` or `auto`.
        delta: Whether a chunk may be stored as a difference.
        staging: `copy`, `cow` or `overlap`.
        fsync: Whether durability is asked of the medium.
        access: `write`, `rank` (of a rank that does not coordinate), `tag` or `read`.
        on_error: `raise` or `warn`: what becomes of a failed background save.
        rank: Rank of this process.
        world_size: Ranks that save together.
        together: Whether they do so by `torch.distributed`: saves and resumes are collective.
        process_group: The group whose ranks these are; `None` for all.
        profile: Whether a line of timings is written for each save.
        encryption: Where the key of an encrypted repository comes from.
    """

    path: Path
    remote: Remote | None
    is_direct: bool
    rules: str
    merge: str
    async_save: bool
    threads: int
    chunk_bytes: int
    casts: CastRules | None
    compression: str
    delta: bool
    staging: str
    fsync: bool
    access: str
    on_error: str
    rank: int
    world_size: int
    together: bool
    process_group: Any
    profile: bool
    encryption: KeySource

    @property
    def place(self) -> str:
        """What a person calls the repository: the url of one that lives in a bucket, else its folder."""
        is_in_bucket = self.remote is not None and (self.is_direct or self.remote.is_spooled)
        return self.remote.url if self.remote is not None and is_in_bucket else str(self.path)

    @property
    def is_coordinator(self) -> bool:
        """True on the rank that decides, and that alone writes manifests."""
        return self.rank == 0


def read_settings(path: str | os.PathLike[str], arguments: Mapping[str, Any]) -> Settings:
    """Checks the arguments of `CheckpointManager` and fills in what the environment says.

    Args:
        path: Folder or url.
        arguments: The keyword arguments by name.

    Raises:
        InvalidInputError: A value is not legal; the message lists what is.
    """
    _check_choices(arguments)
    folder, remote = _places(path, arguments)
    rank, world_size, together = _topology(
        arguments["rank"], arguments["world_size"], arguments["process_group"]
    )
    writes = "write" if rank == 0 else "rank"
    keep, merge = arguments["keep"], arguments["merge"]
    if keep is not None and not isinstance(keep, Keep):
        raise _refuse("keep", keep, "a policy of `varvite.keep`, such as `keep.last(3)`, or None")
    return Settings(
        path=folder,
        remote=remote,
        is_direct=arguments["read_only"] and is_bucket_url(path),
        rules=json.dumps([] if keep is None else keep.rules()),
        merge=json.dumps(None if merge is None else asdict(merge)),
        async_save=bool(arguments["async_save"]),
        threads=_threads(arguments["threads"]),
        chunk_bytes=_chunk_bytes(arguments["chunk_bytes"]),
        casts=None if arguments["save_dtype"] is None else CastRules(arguments["save_dtype"]),
        compression=arguments["compression"],
        delta=arguments["delta"],
        staging=arguments["staging"],
        fsync=bool(arguments["fsync"]) and os.environ.get("VARVITE_FSYNC", "1") != "0",
        access="read" if arguments["read_only"] else writes,
        on_error=arguments["on_error"],
        rank=rank,
        world_size=world_size,
        together=together,
        process_group=arguments["process_group"],
        profile=os.environ.get("VARVITE_PROFILE", "0") not in ("", "0"),
        encryption=read_encryption(arguments["encryption"]),
    )


def open_engine(
    settings: Settings, access: str, *, rank: int | None = None, world_size: int | None = None
) -> Engine:
    """Opens a repository for one rank.

    Args:
        settings: The repository and how to write it.
        access: `write`, `rank`, `tag` or `read`.
        rank: The rank; by default that of the settings.
        world_size: Number of ranks; by default that of the settings.

    Raises:
        NotARepositoryError: The folder holds something else, or nothing and it is opened to read.
        RepositoryLockedError: Another process writes here.
        UnsupportedFormatError: A newer version wrote here.
        StoreError: The bucket can't be reached, and the folder doesn't say what there is.
        CommitConflictError: The folder holds snapshots that the bucket has from another writer.
        EncryptionKeyError: It is encrypted with another key, or is not and was to be.
    """
    remote = settings.remote
    return Engine(
        None if settings.is_direct else settings.path,
        remote=None if remote is None else remote.text,
        credentials=None if remote is None else remote.credentials,
        access=access,
        chunk_bytes=settings.chunk_bytes,
        threads=settings.threads,
        sync=settings.fsync,
        rules=settings.rules,
        merge=settings.merge,
        rank=settings.rank if rank is None else rank,
        world_size=settings.world_size if world_size is None else world_size,
        compression=settings.compression,
        delta=settings.delta,
        key=settings.encryption.fetch(settings.place),
        encrypt=settings.encryption.is_required,
    )


def _refuse(what: str, value: object, reason: str) -> InvalidInputError:
    message = f"invalid {what} `{value}`: must be {reason}"
    return InvalidInputError(message, what=what, reason=f"must be {reason}")


def _check_choices(arguments: Mapping[str, Any]) -> None:
    choices = {
        "compression": ("none", "fast", "max", "auto"),
        "staging": ("copy", "cow", "overlap"),
        "on_error": ("raise", "warn"),
    }
    for name, legal in choices.items():
        if arguments[name] not in legal:
            raise _refuse(name, arguments[name], "one of " + ", ".join(f"`{value}`" for value in legal))
    save_dtype = arguments["save_dtype"]
    given = (
        save_dtype.values()
        if isinstance(save_dtype, Mapping)
        else ()
        if save_dtype is None
        else (save_dtype,)
    )
    for value in given:
        if value not in SAVE_DTYPES:
            raise _refuse("save_dtype", value, "one of " + ", ".join(f"`{dtype}`" for dtype in SAVE_DTYPES))
    for name in ("async_save", "fsync", "read_only", "delta"):
        if not isinstance(arguments[name], bool):
            raise _refuse(name, arguments[name], "True or False")
    sync_every = arguments["sync_every"]
    if not isinstance(sync_every, int) or isinstance(sync_every, bool) or sync_every < 1:
        raise _refuse("sync_every", sync_every, "a whole number from 1")
    merge = arguments["merge"]
    if merge is not None and not isinstance(merge, MergePolicy):
        raise _refuse("merge", merge, "a MergePolicy or None")


def _places(path: str | os.PathLike[str], arguments: Mapping[str, Any]) -> tuple[Path, Remote | None]:
    """The folder and the bucket of a run."""
    remote, options = arguments["remote"], arguments["remote_options"]
    if options is not None and not isinstance(options, Mapping):
        raise _refuse("remote_options", options, "a dict or None")
    is_spooled = is_bucket_url(path)
    if is_spooled and remote is not None:
        raise _refuse("remote", remote, "None where the path is the url of a bucket itself")
    url = os.fspath(path) if is_spooled else remote
    if url is None:
        if options is not None:
            raise _refuse("remote_options", sorted(options), "None where there is no bucket")
        return _folder(path), None
    bucket = read_remote(url, options, sync_every=arguments["sync_every"], is_spooled=is_spooled)
    return spool_folder(url, options) if is_spooled else _folder(path), bucket


def _folder(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise _refuse("path", path, _LEGAL_PATHS)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme == "file":
        url = urlsplit(text)
        # `file://runs/demo` names a host, and would open `/demo`.
        if url.netloc not in ("", "localhost") or not url.path:
            raise _refuse("path", path, "an absolute path after `file://`, as in file:///home/me/runs")
        text = unquote(url.path)
    elif scheme:
        raise _refuse("path", path, _LEGAL_PATHS)
    return Path(text).expanduser().absolute()


def _threads(threads: int | None) -> int:
    source, value, shown = "threads", threads, str(threads)
    if value is None and os.environ.get("VARVITE_THREADS"):
        source, shown = "VARVITE_THREADS", os.environ["VARVITE_THREADS"]
        value = int(shown) if shown.isdecimal() else -1
    if value is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // max(1, _environment_number("LOCAL_WORLD_SIZE") or 1))
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:
        raise _refuse(source, shown, "a whole number from 1 to 1024")
    return value


def _chunk_bytes(chunk_bytes: int) -> int:
    legal = isinstance(chunk_bytes, int) and not isinstance(chunk_bytes, bool)
    if not legal or chunk_bytes.bit_count() != 1 or not 4096 <= chunk_bytes <= 64 << 20:
        raise _refuse("chunk_bytes", chunk_bytes, "a power of two from 4096 to 67108864")
    return chunk_bytes


def _topology(
    rank: int | str | None, world_size: int | str | None, process_group: Any
) -> tuple[int, int, bool]:
    """Which rank of how many this process is, and whether they are those of `torch.distributed`.

    What a launcher says is never adopted silently.
    """
    for name, value in (("rank", rank), ("world_size", world_size)):
        is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if value not in (None, "auto") and not is_whole:
            raise _refuse(name, value, "a whole number, `auto`, or None")
    joined = _joined(process_group)
    found = joined or _launched()
    says_nothing = rank is None and world_size is None
    if says_nothing and joined is None and found is not None and found[1] > 1:
        raise _nothing_said(*found)
    if says_nothing:
        chosen = joined or (0, 1)
    else:
        source = found if "auto" in (rank, world_size) and found is not None else (0, 1)
        chosen = (
            source[0] if rank in (None, "auto") else int(rank or 0),
            source[1] if world_size in (None, "auto") else int(world_size or 0),
        )
    if chosen[1] < 1 or chosen[0] >= chosen[1]:
        raise _refuse("rank", chosen[0], f"below the world size: {chosen[1]}")
    if process_group is not None and chosen != joined:
        reason = f"its rank and world size are {joined}, not {chosen}"
        raise InvalidInputError(f"invalid process_group: {reason}", what="process_group", reason=reason)
    return *chosen, chosen[1] > 1 and chosen == joined


def _nothing_said(rank: int, world_size: int) -> InvalidInputError:
    message = (
        f"invalid rank and world size: this process was launched as rank {rank} of {world_size}, and "
        "nothing was said about ranks"
    )
    hint = (
        "call torch.distributed.init_process_group first to save with all ranks, pass "
        'rank="auto" and world_size="auto" to hand sessions around yourself, or rank=0 and world_size=1 '
        "to save alone"
    )
    return InvalidInputError(message, hint=hint, what="rank", rank=rank, world_size=world_size)


def _joined(process_group: Any) -> tuple[int, int] | None:
    """Rank and world size in `torch.distributed`, where the program has set it up."""
    distributed = joined_distributed()
    if distributed is None:
        if process_group is None:
            return None
        reason = "torch.distributed is not set up in this process"
        raise InvalidInputError(f"invalid process_group: {reason}", what="process_group", reason=reason)
    rank = distributed.get_rank(process_group)
    if rank < 0:
        reason = "this process is not in it"
        raise InvalidInputError(f"invalid process_group: {reason}", what="process_group", reason=reason)
    return rank, distributed.get_world_size(process_group)


def _launched() -> tuple[int, int] | None:
    """Rank and world size by the launcher's environment."""
    world_size = _environment_number("WORLD_SIZE")
    if world_size is None:
        return None
    return _environment_number("RANK") or 0, world_size


def joined_distributed() -> Any:
    """Returns `torch.distributed` where the program has set it up, else `None`.

    Example:
        >>> joined_distributed() is None
        True
    """
    distributed = loaded("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _environment_number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None
