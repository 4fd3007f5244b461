"""Repositories and snapshots as commands see them: the engine, without a training run around it.

References are explicit here: `latest` is the newest commit and is never exchanged for an older one, as
it is by an automatic resume. A person who asks about a damaged snapshot wants to hear of the damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from varvite.cli.text import timestamp
from varvite.facts import tags_by_seq
from varvite.manager import CheckpointManager, open_for_tags

if TYPE_CHECKING:
    from varvite._native import Engine
    from varvite.keep import Keep
    from varvite.native_types import Header

__all__ = ["opened", "snapshot_facts", "tags_of"]


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
