"""`varvite ls`: the snapshots of a repository."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from varvite.cli import exits
from varvite.cli.opening import opened, snapshot_facts, tags_of
from varvite.cli.options import bytes_option, run_argument, with_output
from varvite.cli.output import Cell, Column, Output, bad, dim
from varvite.cli.text import ago, counted, metrics_text, printable, timestamp
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
@bytes_option
@with_output("ls")
def ls(run: str, everything: bool, iso: bool, exact_bytes: bool, output: Output) -> int:
    """List the snapshots of RUN in commit order.

    A snapshot that a later one of the same step supersedes is left out, unless `--all` is given. With
    `--quiet` only references are written, one a line. `raw` are the bytes of all tensors, `stored` those
    that the save added to the repository.
    """
    with opened(run) as engine:
        headers, damaged = engine.snapshots()
        tags = tags_of(engine)
        root, identity = engine.root, engine.repository_id
    newest = {header["step"]: header["seq"] for header in headers}
    superseded = {header["seq"] for header in headers if newest[header["step"]] != header["seq"]}
    listed = [header for header in headers if everything or header["seq"] not in superseded]
    for seq, why in damaged:
        output.warning(f"snapshot {seq} is damaged: {printable(why)}")
    if output.is_json:
        output.document(
            repository={"path": root, "id": identity},
            snapshots=[
                {**snapshot_facts(header, tags), "superseded": header["seq"] in superseded}
                for header in listed
            ],
            damaged=[{"seq": seq, "why": why} for seq, why in damaged],
        )
    elif output.quiet:
        for header in listed:
            output.line(f"seq:{header['seq']}")
    elif headers or damaged:
        shown = _Shown(tags, superseded, iso=iso, exact_bytes=exact_bytes)
        rows = [(header["seq"], shown.row(header)) for header in listed]
        rows += [(seq, _damaged_row(seq)) for seq, _ in damaged]
        output.table(_COLUMNS, [row for _, row in sorted(rows, key=lambda row: row[0])])
        hidden = len(headers) - len(listed)
        if hidden:
            output.message(f"{counted(hidden, 'superseded snapshot')} not shown; `--all` shows them")
    else:
        output.message("no snapshots yet")
    return exits.OK


class _Shown:
    """Snapshots as rows for people."""

    def __init__(
        self, tags: dict[int, list[str]], superseded: set[int], *, iso: bool, exact_bytes: bool
    ) -> None:
        self._tags = tags
        self._superseded = superseded
        self._iso = iso
        self._size = str if exact_bytes else format_bytes
        self._now = time.time_ns() // 1_000_000

    def row(self, header: Header) -> list[Cell | str]:
        created = header["created_at_unix_ms"]
        nonfinite = sum(header["nonfinite"].values())
        cells: list[Cell | str] = [
            str(header["seq"]),
            str(header["step"]),
            header["kind"],
            timestamp(created) if self._iso else ago(created, self._now),
            self._size(header["raw_bytes"]),
            self._size(header["stored_bytes"]),
            metrics_text(header["metrics"]),
            "yes" if header["healthy"] else bad(f"{nonfinite} not finite"),
            ", ".join(self._tags.get(header["seq"], [])),
        ]
        if header["seq"] not in self._superseded:
            return cells
        cells[2] = f"{header['kind']}, superseded"
        return [cell if isinstance(cell, Cell) else dim(cell) for cell in cells]


def _damaged_row(seq: int) -> list[Cell | str]:
    return [str(seq), "?", bad("damaged"), *("" for _ in range(len(_COLUMNS) - 3))]
