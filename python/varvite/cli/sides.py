"""A folder and a bucket side by side: what lies where, as their manifests tell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from varvite.cli.opening import Place, opened, tags_of
from varvite.cli.output import Output
from varvite.cli.text import printable
from varvite.errors import CorruptionError, InvalidInputError, NotARepositoryError, SnapshotNotFoundError

if TYPE_CHECKING:
    from varvite._native import Engine
    from varvite.native_types import Header

__all__ = ["Pending", "Side", "differing", "packs_of", "pending", "read_bucket", "read_side", "require_same"]


@dataclass(frozen=True)
class Side:
    """What lies in one place.

    Attributes:
        root: The place, for messages.
        identity: Identity of the repository, `None` where there is none yet.
        headers: Headers of its snapshots by commit number.
        damaged: Commit numbers of snapshots that can't be read, and why.
        tags: Names by commit number.
        packs: Lengths of the packs that its snapshots refer to, by commit number and name.
    """

    root: str
    identity: str | None
    headers: dict[int, Header]
    damaged: list[tuple[int, str]]
    tags: dict[int, list[str]]
    packs: dict[int, dict[str, int]]


@dataclass(frozen=True)
class Pending:
    """What a folder has and a bucket lacks.

    Attributes:
        snapshots: Commit numbers, newest first.
        packs: Lengths of the packs they refer to that no snapshot of the bucket does, by name.
    """

    snapshots: list[int]
    packs: dict[str, int]

    @property
    def pack_bytes(self) -> int:
        """Bytes of these packs."""
        return sum(self.packs.values())

    def facts(self) -> dict[str, Any]:
        """Returns the facts for a JSON object."""
        return {"snapshots": self.snapshots, "packs": len(self.packs), "pack_bytes": self.pack_bytes}


def read_side(engine: Engine, output: Output, *, with_packs: bool = True) -> Side:
    """Reads what a repository has, its packs by opening each snapshot."""
    headers, damaged = engine.snapshots()
    known = {header["seq"]: header for header in headers}
    return Side(
        engine.root,
        engine.repository_id,
        known,
        damaged,
        tags_of(engine),
        packs_of(engine, sorted(known), output) if with_packs else {},
    )


def read_bucket(bucket: Place, output: Output) -> Side:
    """Reads what a bucket has, which may be nothing yet."""
    try:
        with opened(bucket) as engine:
            return read_side(engine, output)
    except NotARepositoryError:
        return Side(bucket.path, None, {}, [], {}, {})


def packs_of(engine: Engine, seqs: list[int], output: Output) -> dict[int, dict[str, int]]:
    """Returns the packs of snapshots, of those that can be opened."""
    found = {}
    for seq in seqs:
        try:
            found[seq] = dict(engine.open(seq).packs())
        except SnapshotNotFoundError:
            continue  # another process removed it since it was listed
        except CorruptionError as error:
            output.warning(f"snapshot {seq} is damaged: {printable(error.message)}")
    return found


def require_same(here: Side, bucket: Side) -> None:
    """Refuses a folder and a bucket that hold two repositories.

    Raises:
        InvalidInputError: They do.
    """
    if bucket.identity is not None and bucket.identity != here.identity:
        reason = f"its repository is {bucket.identity}, that of `{here.root}` is {here.identity}"
        raise InvalidInputError(
            f"the bucket `{bucket.root}` holds another run: {reason}",
            hint="give each run a prefix of its own",
            what="remote",
            reason=reason,
        )


def differing(here: Side, bucket: Side) -> list[int]:
    """Returns the numbers that two snapshots have: one here, and another writer's in the bucket."""

    def identity(header: Header) -> tuple[int, int, str]:
        return header["step"], header["created_at_unix_ms"], header["digest"]

    both = sorted(here.headers.keys() & bucket.headers.keys())
    return [seq for seq in both if identity(here.headers[seq]) != identity(bucket.headers[seq])]


def pending(here: Side, bucket: Side) -> Pending:
    """Returns what a push would send, but for names and receipts.

    Packs that are in the bucket already without a snapshot that refers to them, as after a push that was cut
    short, count as lacking.
    """
    seqs = sorted(here.headers.keys() - bucket.headers.keys(), reverse=True)
    there = {name for packs in bucket.packs.values() for name in packs}
    lacking = {
        name: length for seq in seqs for name, length in here.packs.get(seq, {}).items() if name not in there
    }
    return Pending(seqs, lacking)
