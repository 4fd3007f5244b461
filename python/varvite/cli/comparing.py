"""`varvite diff`: what two snapshots differ in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from varvite.cli import exits
from varvite.cli.differences import Changed, Differences, compare
from varvite.cli.opening import Place, opened, snapshot_facts, tags_of
from varvite.cli.options import Reference, bytes_option, run_argument, with_output
from varvite.cli.outline import plain_json, value_text
from varvite.cli.output import Cell, Column, Output, bad, dim, doubtful
from varvite.cli.text import counted, printable, shape_text
from varvite.reading import EntryRow
from varvite.records import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from varvite.native_types import Header
    from varvite.plain import Json

__all__ = ["diff"]

_COLUMNS = (
    Column("name"),
    Column("dtype"),
    Column("shape"),
    Column("changed bytes", is_number=True),
    Column("of", is_number=True),
    Column("elements", is_number=True),
    Column("largest", is_number=True),
    Column("relative", is_number=True),
)
_VALUE_WIDTH = 60


@click.command()
@run_argument
@click.argument("first", type=Reference(), metavar="REF")
@click.argument("second", type=Reference(), metavar="REF")
@bytes_option
@with_output("diff")
def diff(run: Place, first: str, second: str, exact_bytes: bool, output: Output) -> int:
    """Compare two snapshots of RUN, tensor by tensor; exit 3 where they differ.

    Digests are compared first, and only tensors that differ are read. `relative` is the L2 norm of the
    difference divided by that of the first tensor; the largest comes first. `changed bytes` are those of
    the chunks that differ. Plain values, such as learning rates, are compared too. With `--quiet` only
    the last line is written.
    """
    with opened(run) as engine:
        left, right = (engine.open(engine.resolve(ref)) for ref in (first, second))
        found = compare(left, right, lambda total: output.bar("comparing", lambda: total, is_bytes=True))
        headers, tags, root = (left.header(), right.header()), tags_of(engine), engine.root
    is_measured = all(changed.distance is not None for changed in found.changed)
    if output.is_json:
        output.document(
            repository={"path": root},
            first=snapshot_facts(headers[0], tags),
            second=snapshot_facts(headers[1], tags),
            **_json_facts(found, is_measured=is_measured),
        )
    else:
        size: Callable[[int], str] = str if exact_bytes else format_bytes
        if not output.quiet:
            _show(found, headers, size, output)
        output.line(_verdict(found, size))
    if not is_measured:
        output.message("only digests were compared, for want of numpy")
        output.message("hint: install numpy to see by how much values differ")
    return exits.OK if found.is_empty else exits.FINDINGS


def _json_facts(found: Differences, *, is_measured: bool) -> dict[str, Any]:
    return {
        "equal": found.is_empty,
        "measured": is_measured,
        "unchanged_count": found.unchanged_count,
        "changed_bytes": sum(changed.changed_bytes for changed in found.changed),
        "changed": [
            {
                **_json_entry(changed.entry),
                "changed_bytes": changed.changed_bytes,
                **(changed.distance._asdict() if changed.distance is not None else {}),
            }
            for changed in found.changed
        ],
        "redescribed": [redescribed._asdict() for redescribed in found.redescribed],
        "added": [_json_entry(entry) for entry in found.added],
        "removed": [_json_entry(entry) for entry in found.removed],
        "values": [
            {"name": name, "first": [*map(plain_json, before)], "second": [*map(plain_json, after)]}
            for name, before, after in found.values
        ],
    }


def _json_entry(entry: EntryRow) -> dict[str, Any]:
    return {
        "name": entry.name,
        "rank": entry.rank,
        "dtype": entry.dtype,
        "shape": entry.shape,
        "raw_bytes": entry.raw_bytes,
    }


def _show(
    found: Differences, headers: tuple[Header, Header], size: Callable[[int], str], output: Output
) -> None:
    for label, header in zip(("first", "second"), headers, strict=True):
        output.line(f"{label:<6}  seq {header['seq']}, step {header['step']}")
    if found.changed:
        output.line()
        output.table(_COLUMNS, [_row(changed, size) for changed in found.changed])
    others: list[list[Cell | str]] = [
        [
            doubtful(redescribed.field),
            printable(redescribed.name),
            f"{redescribed.first} -> {redescribed.second}",
        ]
        for redescribed in found.redescribed
    ]
    others += [["removed", printable(entry.shown_name), _description(entry)] for entry in found.removed]
    others += [["added", printable(entry.shown_name), _description(entry)] for entry in found.added]
    others += [
        ["value", printable(name), f"{_value(before)} -> {_value(after)}"]
        for name, before, after in found.values
    ]
    if others:
        output.line()
        output.table([Column("what"), Column("name"), Column("first -> second")], others)
    if found.changed or others:
        output.line()


def _row(changed: Changed, size: Callable[[int], str]) -> list[Cell | str]:
    entry, distance = changed.entry, changed.distance
    described = [printable(entry.shown_name), entry.dtype, shape_text(entry.shape)]
    sizes = [size(changed.changed_bytes), size(entry.raw_bytes)]
    if distance is None:
        return [*described, *sizes, dim("?"), dim("?"), dim("?")]
    share = f"{100 * distance.changed_elements / distance.element_count:.3g} %"
    largest = f"{distance.largest_change:.3g}"
    return [
        *described,
        *sizes,
        share,
        largest,
        _relative(distance.relative_change, distance.nonfinite_elements),
    ]


def _relative(relative: float | None, nonfinite_elements: int) -> Cell | str:
    if relative is not None:
        return f"{relative:.3g}"
    return bad(f"{nonfinite_elements} not finite") if nonfinite_elements else doubtful("from zero")


def _description(entry: EntryRow) -> str:
    return f"{entry.dtype} {shape_text(entry.shape)}"


def _value(nodes: list[Json]) -> str:
    text = printable(value_text(nodes[0])) if nodes else "absent"
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 3]}..."


def _verdict(found: Differences, size: Callable[[int], str]) -> str:
    if found.is_empty:
        return f"equal: {counted(found.unchanged_count, 'tensor')}"
    changed_bytes = sum(changed.changed_bytes for changed in found.changed)
    parts = [
        (len(found.changed), f"changed ({size(changed_bytes)})"),
        (len({redescribed.name for redescribed in found.redescribed}), "of another dtype, shape or tie"),
        (len(found.added), "added"),
        (len(found.removed), "removed"),
        (found.unchanged_count, "unchanged"),
    ]
    tensors = ", ".join(f"{count:,} {what}" for count, what in parts if count)
    values = f"; {counted(len(found.values), 'plain value')} differ" if found.values else ""
    return f"different: tensors {tensors or 'equal'}{values}"
