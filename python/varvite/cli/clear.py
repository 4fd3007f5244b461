"""`varvite ls` of an encrypted repository without its key: what stands in the clear."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from varvite.buckets import read_remote
from varvite.cli import exits
from varvite.cli.output import Cell, Column, Output, damaged_row
from varvite.cli.text import created_text, printable, timestamp
from varvite.records import format_bytes

if TYPE_CHECKING:
    from varvite.cli.opening import Place
    from varvite.errors import EncryptionKeyError
    from varvite.native_types import Clear, ClearSnapshot

__all__ = ["show_clear"]

_COLUMNS = (
    Column("seq", is_number=True),
    Column("step", is_number=True),
    Column("ranks", is_number=True),
    Column("created"),
    Column("raw", is_number=True),
    Column("stored", is_number=True),
)


def show_clear(run: Place, error: EncryptionKeyError, *, iso: bool, exact_bytes: bool, output: Output) -> int:
    """Shows what everybody may know, and says why that is all.

    Args:
        run: The repository.
        error: Why it did not open.
        iso: Show exact times.
        exact_bytes: Show sizes in bytes.
        output: Where to.

    Raises:
        EncryptionKeyError: The repository is not encrypted, so the key is not what is missing.
    """
    clear = _read(run)
    if clear is None:
        raise error
    output.warning(f"{printable(error.message)}; nothing below is verified")
    snapshots = clear["snapshots"]
    if output.is_json:
        output.document(
            repository={"path": run.path, "id": None},
            encrypted=True,
            snapshots=[
                {
                    "seq": row["seq"],
                    "step": row["step"],
                    "created_at": timestamp(row["created_at_unix_ms"]),
                    "world_size": row["world_size"],
                    "raw_bytes": row["raw_bytes"],
                    "stored_bytes": row["stored_bytes"],
                }
                for row in snapshots
            ],
            damaged=[{"seq": seq, "why": why} for seq, why in clear["damaged"]],
        )
    elif output.quiet:
        for row in snapshots:
            output.line(f"seq:{row['seq']}")
    elif snapshots or clear["damaged"]:
        rows = _Rows(iso=iso, exact_bytes=exact_bytes)
        shown = [(row["seq"], rows.row(row)) for row in snapshots]
        shown += [(seq, damaged_row(seq, len(_COLUMNS))) for seq, _ in clear["damaged"]]
        output.table(_COLUMNS, [row for _, row in sorted(shown, key=lambda row: row[0])])
    else:
        output.message("no snapshots yet")
    return exits.OK


class _Rows:
    """Snapshots as rows for people."""

    def __init__(self, *, iso: bool, exact_bytes: bool) -> None:
        self._size = str if exact_bytes else format_bytes
        self._now = None if iso else time.time_ns() // 1_000_000

    def row(self, facts: ClearSnapshot) -> list[Cell | str]:
        created = facts["created_at_unix_ms"]
        return [
            str(facts["seq"]),
            str(facts["step"]),
            str(facts["world_size"]),
            created_text(created, self._now),
            self._size(facts["raw_bytes"]),
            self._size(facts["stored_bytes"]),
        ]


def _read(run: Place) -> Clear | None:
    from varvite._native import read_clear

    if not run.is_bucket:
        return read_clear(Path(run.path).expanduser().absolute())
    remote = read_remote(run.path, run.options, sync_every=1)
    return read_clear(None, remote.text, remote.credentials)
