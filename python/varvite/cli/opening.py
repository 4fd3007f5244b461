"""Repositories and snapshots as commands see them: the engine, without a training run around it.

References are explicit here: `latest` is the newest commit and is never exchanged for an older one, as
it is by an automatic resume. A person who asks about a damaged snapshot wants to hear of the damage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from varvite.buckets import is_bucket_url
from varvite.cli.text import timestamp
from varvite.facts import tags_by_seq
from varvite.manager import CheckpointManager, open_for_tags

if TYPE_CHECKING:
    from varvite._native import Engine
    from varvite.keep import Keep
    from varvite.native_types import Header

__all__ = ["Place", "opened", "snapshot_facts", "tags_of"]


@dataclass(frozen=True)
class Place:
    """Where a repository is, as the command line says it.

    Attributes:
        path: A folder, or the url of a bucket.
        options: Options of the bucket, whether it is the path or stands behind it.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_bucket(self) -> bool:
        """True where it is a bucket."""
        return is_bucket_url(self.path)

    def behind(self, url: str) -> Place:
        """Returns the bucket at a url that is spoken to by the options given here."""
        return Place(url, self.options)


@contextmanager
def opened(
    place: Place, *, access: str = "read", keep: Keep | None = None, remote: str | None = None
) -> Iterator[Engine]:
    """Opens a repository that exists; no command makes one in a folder.

    Args:
        place: Folder or bucket.
        access: `read`; `tag` for pins, which needs no lock; or `write`.
        keep: The retention policy, for plans.
        remote: Url of a bucket behind the folder, for one that is opened to be written.

    Raises:
        NotARepositoryError: There is none.
        RepositoryLockedError: `access` is `write`, and another process writes.
    """
    # A command is one process, whatever a launcher has left in the environment.
    alone: dict[str, Any] = {"rank": 0, "world_size": 1}
    options = dict(place.options) or None
    found = CheckpointManager(
        place.path, read_only=True, keep=keep, remote_options=options if remote is None else None, **alone
    )
    if access == "read":
        manager = found
    else:
        found.close()
        manager = (
            open_for_tags(place.path, options)
            if access == "tag"
            else CheckpointManager(place.path, keep=keep, remote=remote, remote_options=options, **alone)
        )
    with manager:
        engine = manager._engine  # noqa: SLF001 - commands show what the manager's callers need not know
        yield engine
        if access == "write" and place.is_bucket:
            engine.sync_now()  # the folder is only a spool: what was done is to be done in the bucket


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
