"""`varvite doctor`: what a folder is like as a place for a repository, and how the one in it is."""

from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from varvite.cli import exits
from varvite.cli.opening import opened
from varvite.cli.options import with_output
from varvite.cli.output import Cell, Column, Output, bad, doubtful, good
from varvite.cli.text import counted, printable
from varvite.doctor import Check, examine, existing_folder
from varvite.errors import CheckpointError, NotARepositoryError
from varvite.probes import lock_state
from varvite.records import format_bytes

__all__ = ["doctor"]

_VERDICTS: Final = {"ok": good, "warn": doubtful, "bad": bad}
_HOLDER: Final = re.compile(r"(process [0-9]+ on \S+) since ([0-9]+) \(unix milliseconds\)")


@click.command()
@click.argument("path", type=click.Path())
@with_output("doctor")
def doctor(path: str, output: Output) -> int:
    """Probe folder PATH as a place for a repository, and the repository in it if there is one.

    PATH need not exist yet. Small files are written there and removed again; nothing else changes.
    Exit 3 where a run would fail or lose data.
    """
    with output.bar("probing", len(_STAGES)) as bar:
        checks = examine(path, started=lambda _name: bar.advance(1))
    checks += _repository_checks(path)
    if output.is_json:
        output.document(path=str(existing_folder(path)), checks=[dataclasses.asdict(check) for check in checks])
    else:
        shown = [check for check in checks if not output.quiet or check.verdict != "ok"]
        if shown:
            output.table([Column("check"), Column(""), Column("found"), Column("meaning")], map(_row, shown))
    return exits.FINDINGS if any(check.verdict == "bad" for check in checks) else exits.OK
