"""`varvite ls`: the snapshots of a repository."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from varvite.cli import exits
from varvite.cli.clear import show_clear
from varvite.cli.opening import Place, opened, snapshot_facts
from varvite.cli.options import bytes_option, run_argument, with_output
from varvite.cli.output import Cell, Column, Output, bad, damaged_row, dim, doubtful, good
from varvite.cli.sides import Side, differing, pending, read_bucket, read_side, require_same
from varvite.cli.text import counted, created_text, metrics_text, printable
from varvite.errors import EncryptionKeyError
from varvite.records import format_bytes

if TYPE_CHECKING:
    from varvite.native_types import Header

__all__ = ["ls"]

_COLUMNS = (
    Column("seq", is_number=True),
    Column("step", is_number=True),
    Column("kind"),
    Column("created"),
    Column("raw", is_number=True),
    Column("stored", is_number=True),
    Column("metrics"),
    Column("healthy"),
    Column("tags"),
)


@click.command()
@run_argument
@click.option("-a", "--all", "everything", is_flag=True, help="List superseded snapshots too.")
@click.option("--iso", is_flag=True, help="Show exact times (UTC).")
@click.option("--remote", metavar="URL", help="Show which snapshots lie here, in this bucket, or in both.")
@bytes_option
@with_output("ls")
def ls(run: Place, everything: bool, iso: bool, remote: str | None, exact_bytes: bool, output: Output) -> int:
    """List the snapshots of RUN in commit order.

    A snapshot that a later one of the same step supersedes is left out, unless `--all` is given. With
    `--quiet` only references are written, one a line. `raw` are the bytes of all tensors, `stored` those
    that the save added to the repository. Of an encrypted repository whose key is missing only what stands in
    the clear is shown.
    """
    if remote is not None and run.is_bucket:
        raise click.UsageError("`--remote` belongs to a folder: RUN is a bucket itself")
    try:
        found = _find(run, remote, output)
    except EncryptionKeyError as error:
        return show_clear(run, error, iso=iso, exact_bytes=exact_bytes, output=output)
    listed = [header for header in found.headers if everything or header["seq"] not in found.superseded]
    for seq, why in found.damaged:
        output.warning(f"snapshot {seq} is damaged: {printable(why)}")
    if output.is_json:
        output.document(
            repository={"path": found.here.root, "id": found.here.identity},
            **found.remote_facts(),
            snapshots=[found.snapshot_facts(header) for header in listed],
            damaged=[{"seq": seq, "why": why} for seq, why in found.damaged],
        )
    elif output.quiet:
        for header in listed:
            output.line(f"seq:{header['seq']}")
    elif found.headers or found.damaged:
        shown = _Shown(found, iso=iso, exact_bytes=exact_bytes)
        rows = [(header["seq"], shown.row(header)) for header in listed]
        rows += [(seq, damaged_row(seq, len(shown.columns))) for seq, _ in found.damaged]
        output.table(shown.columns, [row for _, row in sorted(rows, key=lambda row: row[0])])
        hidden = len(found.headers) - len(listed)
        if hidden:
            output.message(f"{counted(hidden, 'superseded snapshot')} not shown; `--all` shows them")
        found.say_pending(output)
    else:
        output.message("no snapshots yet")
    return exits.OK


def _find(run: Place, remote: str | None, output: Output) -> _Found:
    with opened(run if remote is None else Place(run.path)) as engine:
        found = _Found(read_side(engine, output, with_packs=remote is not None))
    if remote is not None:
        found.compare(read_bucket(run.behind(remote), output), remote)
    return found


class _Found:
    """The snapshots of a repository, and of the bucket beside it if one is looked at."""

    def __init__(self, here: Side) -> None:
        self.here = here
        self.there: Side | None = None
        self.differing: list[int] = []
        self._url = ""
        self._join(here.headers, here.damaged, here.tags)

    def _join(
        self, headers: dict[int, Header], damaged: list[tuple[int, str]], tags: dict[int, list[str]]
    ) -> None:
        self.headers = [headers[seq] for seq in sorted(headers)]
        self.damaged, self.tags = damaged, tags
        newest = {header["step"]: header["seq"] for header in self.headers}
        self.superseded = {
            header["seq"] for header in self.headers if newest[header["step"]] != header["seq"]
        }

    def compare(self, there: Side, url: str) -> None:
        """Adds what lies in a bucket."""
        require_same(self.here, there)
        self.there, self._url = there, url
        self.differing = differing(self.here, there)
        damaged = [*self.here.damaged, *((seq, f"in the bucket: {why}") for seq, why in there.damaged)]
        seqs = there.tags.keys() | self.here.tags.keys()
        tags = {seq: sorted({*self.here.tags.get(seq, []), *there.tags.get(seq, [])}) for seq in seqs}
        self._join({**there.headers, **self.here.headers}, damaged, tags)

    def place_of(self, seq: int) -> str:
        """Returns where a snapshot lies: `here`, `bucket`, `both`; `differs` where two have its number."""
        if seq in self.differing:
            return "differs"
        if self.there is None or seq not in self.there.headers:
            return "here"
        return "both" if seq in self.here.headers else "bucket"

    def snapshot_facts(self, header: Header) -> dict[str, Any]:
        seq = header["seq"]
        where = {} if self.there is None else {"where": self.place_of(seq)}
        return {**snapshot_facts(header, self.tags), "superseded": seq in self.superseded, **where}

    def remote_facts(self) -> dict[str, Any]:
        if self.there is None:
            return {}
        left = pending(self.here, self.there)
        return {"remote": {"url": self._url, "id": self.there.identity, "pending": left.facts()}}

    def say_pending(self, output: Output) -> None:
        """Says what the bucket lacks."""
        if self.there is None:
            return
        if self.differing:
            numbers = ", ".join(map(str, self.differing))
            output.warning(
                f"another writer has used numbers of this folder in the bucket: {numbers}. Nothing is pushed "
                "from here any more: give this folder a prefix of its own, or open it with "
                '`diverged="discard"`, which drops what the bucket does not have'
            )
            return
        left = pending(self.here, self.there)
        if left.snapshots:
            size = f"{counted(len(left.packs), 'pack')}, {format_bytes(left.pack_bytes)}"
            output.message(f"{counted(len(left.snapshots), 'snapshot')} to push: {size}")
        else:
            output.message("nothing to push: the bucket has all snapshots that are here")


class _Shown:
    """Snapshots as rows for people."""

    def __init__(self, found: _Found, *, iso: bool, exact_bytes: bool) -> None:
        self._found = found
        self._size = str if exact_bytes else format_bytes
        self._now = None if iso else time.time_ns() // 1_000_000
        where = () if found.there is None else (Column("where"),)
        self.columns = (*_COLUMNS[:3], *where, *_COLUMNS[3:])

    def row(self, header: Header) -> list[Cell | str]:
        created = header["created_at_unix_ms"]
        nonfinite = sum(header["nonfinite"].values())
        is_superseded = header["seq"] in self._found.superseded
        cells: list[Cell | str] = [
            str(header["seq"]),
            str(header["step"]),
            f"{header['kind']}, superseded" if is_superseded else header["kind"],
            *self._where(header["seq"]),
            created_text(created, self._now),
            self._size(header["raw_bytes"]),
            self._size(header["stored_bytes"]),
            metrics_text(header["metrics"]),
            "yes" if header["healthy"] else bad(f"{nonfinite} not finite"),
            ", ".join(self._found.tags.get(header["seq"], [])),
        ]
        return [cell if isinstance(cell, Cell) else dim(cell) for cell in cells] if is_superseded else cells

    def _where(self, seq: int) -> list[Cell | str]:
        if self._found.there is None:
            return []
        place = self._found.place_of(seq)
        return [{"both": good, "here": doubtful, "differs": bad}.get(place, Cell)(place)]
