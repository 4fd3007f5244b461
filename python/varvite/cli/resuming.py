"""`varvite receipts`: what was restored, and how it went on."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Final

import click

from varvite.cli import exits
from varvite.cli.opening import Place, opened
from varvite.cli.options import bytes_option, run_argument, with_output
from varvite.cli.outline import plain_json
from varvite.cli.output import Cell, Column, Output, bad, damaged_row, dim, doubtful, good
from varvite.cli.text import created_text, printable, timestamp
from varvite.records import format_bytes
from varvite.state import flatten
from varvite.training.receipts import Receipt, scan_receipts

__all__ = ["receipts"]

_COLUMNS: Final = (
    Column("number", is_number=True),
    Column("written"),
    Column("verb"),
    Column("seq", is_number=True),
    Column("step", is_number=True),
    Column("next step", is_number=True),
    Column("verified", is_number=True),
    Column("rng"),
    Column("loader"),
    Column("ranks"),
    Column("verdict"),
)
_VERDICTS: Final = {"continuous": good, "discontinuous": bad, "not evaluated": doubtful}


@click.command()
@run_argument
@click.option("-n", "newest", type=click.IntRange(min=1), metavar="N", help="Only the last N.")
@click.option("--iso", is_flag=True, help="Show exact times (UTC).")
@bytes_option
@with_output("receipts")
def receipts(run: Place, newest: int | None, iso: bool, exact_bytes: bool, output: Output) -> int:
    """List what was restored from RUN or into it, oldest first, and how each run went on.

    `verified` are the bytes whose digest was checked, `ranks` those that saved and those that were restored.
    A verdict says whether losses and gradients went on as before; a loop of
    your own writes one by `manager.record_verdict`. `--json` has everything that a receipt
    holds: names that did not match, cursors, versions, source, settings, and the figures of the verdict.
    With `--quiet` only numbers are written, one a line.
    """
    with opened(run) as engine:
        found, damaged = scan_receipts(engine, newest)
        root, identity = engine.root, engine.repository_id
    for number, why in damaged:
        output.warning(f"receipt {number} is damaged: {printable(why)}")
    if output.is_json:
        output.document(
            repository={"path": root, "id": identity},
            receipts=[_facts(receipt) for receipt in found],
            damaged=[{"number": number, "why": why} for number, why in damaged],
        )
    elif output.quiet:
        for receipt in found:
            output.line(str(receipt.number))
    elif found or damaged:
        now = time.time_ns() // 1_000_000
        rows = [(one.number, _row(one, None if iso else now, exact_bytes=exact_bytes)) for one in found]
        rows += [(number, damaged_row(number, len(_COLUMNS))) for number, _ in damaged]
        output.table(_COLUMNS, [row for _, row in sorted(rows, key=lambda row: row[0])])
        _show_reason(found, output)
    else:
        output.message("no receipts yet")
    return exits.OK


def _facts(receipt: Receipt) -> dict[str, Any]:
    facts = {**asdict(receipt), "created_at": timestamp(_unix_milliseconds(receipt))}
    for name in ("cursors", "environment", "evidence"):
        facts[name] = plain_json(flatten(facts[name]).structure)
    return facts


def _row(receipt: Receipt, now: int | None, *, exact_bytes: bool) -> list[Cell | str]:
    written = _unix_milliseconds(receipt)
    verdict = receipt.verdict
    return [
        str(receipt.number),
        created_text(written, now),
        receipt.verb,
        "" if receipt.seq is None else str(receipt.seq),
        "" if receipt.step is None else str(receipt.step),
        str(receipt.next_step),
        str(receipt.verified_bytes) if exact_bytes else format_bytes(receipt.verified_bytes),
        printable(receipt.rng),
        printable(receipt.loader),
        _ranks(receipt),
        dim("none yet") if verdict is None else _VERDICTS[verdict](verdict),
    ]


def _ranks(receipt: Receipt) -> str:
    saved = receipt.saved_world_size
    return str(receipt.world_size) if saved == receipt.world_size else f"{saved} to {receipt.world_size}"


def _show_reason(found: list[Receipt], output: Output) -> None:
    """Says why the last run is not known to go on as before: the first thing that a reader asks then."""
    if found and found[-1].verdict in ("discontinuous", "not evaluated") and found[-1].reason:
        output.message(f"receipt {found[-1].number}: {printable(found[-1].reason)}")


def _unix_milliseconds(receipt: Receipt) -> int:
    return int(receipt.created_at.timestamp() * 1000)
