"""`varvite show`: one snapshot."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import click

from varvite.cli import exits
from varvite.cli.opening import Place, opened, snapshot_facts, tags_of
from varvite.cli.options import Reference, bytes_option, run_argument, with_output
from varvite.cli.outline import plain_json, plain_values, value_text
from varvite.cli.output import Cell, Column, Output, bad, good
from varvite.cli.text import ago, counted, metrics_text, printable, shape_text, timestamp
from varvite.cli.tree import branches
from varvite.reading import EntryRow, entries_of
from varvite.records import format_bytes
from varvite.state import from_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from varvite.native_types import Header
    from varvite.plain import Json

__all__ = ["show"]

_VALUE_WIDTH = 100


@click.command()
@run_argument
@click.argument("ref", type=Reference(), default="latest")
@click.option("--tree", is_flag=True, help="Show sums by the segments of names instead of each tensor.")
@click.option("--structure", is_flag=True, help="Show the plain values instead of the tensors.")
@click.option("--depth", type=click.IntRange(min=1), help="Levels of the tree to show.")
@bytes_option
@with_output("show")
def show(
    run: Place, ref: str, tree: bool, structure: bool, depth: int | None, exact_bytes: bool, output: Output
) -> int:
    """Show the facts and the tensors of snapshot REF of RUN, from its manifest alone.

    REF is `latest` where it is left out. `stored` are the bytes of a tensor's chunks, whichever save
    wrote them; `tied` names the tensor whose memory it shared.
    """
    if tree and structure:
        raise click.UsageError("`--tree` and `--structure` can't be used together")
    if depth is not None and not tree:
        raise click.UsageError("`--depth` belongs to `--tree`")
    with opened(run) as engine:
        reader = engine.open(engine.resolve(ref))
        header, tags = reader.header(), tags_of(engine)
        entries = entries_of(reader)
        values = plain_values(reader.structure(), reader.rank_structures()) if structure else {}
        packs = reader.packs()
        root = engine.root
    metadata = from_text(header["metadata"])
    if output.is_json:
        facts: dict[str, Any] = {
            "repository": {"path": root},
            "snapshot": {**snapshot_facts(header, tags), "metadata": plain_json(metadata)},
            "packs": [{"name": name, "length_bytes": length} for name, length in packs],
        }
        output.document(
            **facts, **_json_details(entries, values, tree=tree, structure=structure, depth=depth)
        )
        return exits.OK
    size: Callable[[int], str] = str if exact_bytes else format_bytes
    if not output.quiet:
        output.facts(_facts(header, tags.get(header["seq"], []), entries, len(packs), metadata, size))
        output.line()
    if structure:
        output.facts((printable(name), _cut(printable(value_text(value)))) for name, value in values.items())
    elif tree:
        _show_tree(entries, depth, size, output)
    else:
        _show_entries(entries, size, output)
    return exits.OK


def _json_details(
    entries: list[EntryRow], values: dict[str, Json], *, tree: bool, structure: bool, depth: int | None
) -> dict[str, Any]:
    if structure:
        return {"values": {name: plain_json(value) for name, value in values.items()}}
    if tree:
        rows = [
            {"name": name, "level": level, **vars(sums)} for level, _, name, sums in branches(entries, depth)
        ]
        return {"tree": rows}
    return {
        "entries": [
            {key: value for key, value in dataclasses.asdict(entry).items() if key != "index"}
            for entry in entries
        ]
    }


def _facts(
    header: Header,
    tags: list[str],
    entries: list[EntryRow],
    pack_count: int,
    metadata: Json,
    size: Callable[[int], str],
) -> list[tuple[str, Cell | str]]:
    created = header["created_at_unix_ms"]
    nonfinite = header["nonfinite"]
    worst = ", ".join(f"{printable(name)} ({count})" for name, count in list(nonfinite.items())[:5])
    facts: list[tuple[str, Cell | str]] = [
        ("snapshot", f"seq {header['seq']}, step {header['step']}"),
        ("created", f"{timestamp(created)} ({ago(created, time.time_ns() // 1_000_000)})"),
        ("parent", "none" if header["parent"] is None else f"seq {header['parent']}"),
        ("kind", f"{header['kind']}, in {counted(pack_count, 'pack')}"),
        ("size", f"{size(header['raw_bytes'])} raw, {size(header['stored_bytes'])} added by this save"),
        ("tensors", counted(len(entries), "tensor")),
        ("ranks", str(header["world_size"])),
        ("healthy", good("yes") if header["healthy"] else bad(f"no, not finite: {worst}")),
        ("digest", header["digest"]),
    ]
    if header["metrics"]:
        facts.append(("metrics", metrics_text(header["metrics"])))
    if tags:
        facts.append(("tags", ", ".join(tags)))
    known = plain_json(metadata)
    if isinstance(known, dict):
        facts += [
            (f"metadata {printable(name)}", _cut(printable(value_text(value))))
            for name, value in known.items()
        ]
    return facts


def _show_entries(entries: list[EntryRow], size: Callable[[int], str], output: Output) -> None:
    columns = [
        Column("name"),
        Column("dtype"),
        Column("shape"),
        Column("raw", is_number=True),
        Column("stored", is_number=True),
        Column("not finite", is_number=True),
        Column("tied"),
    ]
    output.table(
        columns,
        [
            [
                printable(entry.shown_name),
                entry.dtype
                if entry.dtype == entry.stored_dtype
                else f"{entry.dtype} as {entry.stored_dtype}",
                shape_text(entry.shape),
                size(entry.raw_bytes),
                size(entry.stored_bytes),
                bad(str(entry.nonfinite)) if entry.nonfinite else "",
                printable(entry.tied_to or ""),
            ]
            for entry in entries
        ],
    )


def _show_tree(
    entries: list[EntryRow], depth: int | None, size: Callable[[int], str], output: Output
) -> None:
    columns = [
        Column("name"),
        Column("tensors", is_number=True),
        Column("raw", is_number=True),
        Column("stored", is_number=True),
        Column("not finite", is_number=True),
    ]
    output.table(
        columns,
        [
            [
                "  " * level + printable(segment),
                str(sums.tensor_count),
                size(sums.raw_bytes),
                size(sums.stored_bytes),
                bad(str(sums.nonfinite)) if sums.nonfinite else "",
            ]
            for level, segment, _, sums in branches(entries, depth)
        ],
    )


def _cut(text: str) -> str:
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 3]}..."
