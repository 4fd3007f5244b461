"""Repositories and snapshots as commands see them: the engine, without a training run around it.

References are explicit here: `latest` is the newest commit and is never exchanged for an older one, as
it is by an automatic resume. A person who asks about a damaged snapshot wants to hear of the damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from varvite.cli.text import timestamp
from varvite.facts import tags_by_seq
from varvite.manager import CheckpointManager, open_for_tags

if TYPE_CHECKING:
    from varvite._native import Engine, SnapshotReader
    from varvite.keep import Keep
    from varvite.native_types import Header

__all__ = ["Entry", "entries_of", "opened", "snapshot_facts", "tags_of"]


class Entry(NamedTuple):
    """A tensor of a snapshot, from its manifest.

    Attributes:
        position: Its place, by which the reader counts.
        name: Its name.
        rank: The rank it is local to, or `None`.
        dtype: Element type of what a load gives.
        stored_dtype: Element type of its raw bytes.
        shape: Its lengths, in elements.
        tied_to: Name of the entry whose memory it shares, or `None`.
        nonfinite: Number of NaN and infinite elements, `None` where not counted.
        raw_bytes: Length of its bytes; of a tied one too.
        stored_bytes: Length of its chunks in packs.
    """

    position: int
    name: str
    rank: int | None
    dtype: str
    stored_dtype: str
    shape: list[int]
    tied_to: str | None
    nonfinite: int | None
    raw_bytes: int
    stored_bytes: int

    @property
    def own_raw_bytes(self) -> int:
        """Raw bytes, where a tie counts once: at the entry that the others are tied to."""
        return 0 if self.tied_to is not None else self.raw_bytes

    @property
    def own_stored_bytes(self) -> int:
        """Stored bytes, where a tie counts once."""
        return 0 if self.tied_to is not None else self.stored_bytes

    @property
    def shown_name(self) -> str:
        """Its name, and its rank where it is local to one."""
        return self.name if self.rank is None else f"{self.name} (rank {self.rank})"


@contextmanager
def opened(path: str, *, access: str = "read", keep: Keep | None = None) -> Iterator[Engine]:
    """Opens a repository that exists; no command makes one.

    Args:
        path: Folder or url.
        access: `read`; `tag` for pins, which needs no lock; or `write`.
        keep: The retention policy, for plans.

    Raises:
        NotARepositoryError: There is none.
        RepositoryLockedError: `access` is `write`, and another process writes.
    """
    alone: dict[str, Any] = {"rank": 0, "world_size": 1}
    # A command is one process, whatever a launcher has left in the environment.
    manager = CheckpointManager(path, read_only=True, keep=keep, **alone)
    if access != "read":
        manager.close()
        manager = open_for_tags(path) if access == "tag" else CheckpointManager(path, keep=keep, **alone)
    with manager:
        yield manager._engine  # noqa: SLF001 - commands show what the manager's callers need not know


def tags_of(engine: Engine) -> dict[int, list[str]]:
    """Returns the names of pins and tags by commit number."""
    return tags_by_seq(engine.tags())


def entries_of(reader: SnapshotReader) -> list[Entry]:
    """Returns the entries of a snapshot in the order the reader counts them."""
    return [Entry(position, *row) for position, row in enumerate(reader.entries())]


def snapshot_facts(header: Header, tags: dict[int, list[str]]) -> dict[str, Any]:
    """Returns the facts of a snapshot as every JSON object of the command line has them."""
    return {
        "seq": header["seq"],
        "step": header["step"],
        "parent": header["parent"],
        "created_at": timestamp(header["created_at_unix_ms"]),
        "world_size": header["world_size"],
        "metrics": header["metrics"],
        "kind": header["kind"],
        "raw_bytes": header["raw_bytes"],
        "stored_bytes": header["stored_bytes"],
        "healthy": header["healthy"],
        "nonfinite": header["nonfinite"],
        "tags": tags.get(header["seq"], []),
        "digest": header["digest"],
    }
