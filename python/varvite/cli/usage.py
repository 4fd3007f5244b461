"""`varvite du`: what takes the space."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from varvite.cli import exits
from varvite.cli.opening import Place, opened
from varvite.cli.options import Reference, bytes_option, run_argument, with_output
from varvite.cli.outline import kinds_of, split_name
from varvite.cli.output import Column, Output
from varvite.cli.text import printable
from varvite.cli.tree import Sums, grouped
from varvite.errors import CorruptionError, SnapshotNotFoundError
from varvite.names import show_part
from varvite.reading import EntryRow, entries_of
from varvite.records import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from varvite._native import Engine, SnapshotReader

__all__ = ["du"]

_KINDS = {"module": "model", "optimizer": "optimizer"}


class _Usage(NamedTuple):
    """What a snapshot takes, in bytes of whole packs.

    Attributes:
        seq: Its commit number.
        step: Its step.
        raw_bytes: Bytes of its tensors.
        own_bytes: Packs that its own save wrote.
        shared_bytes: Packs that other snapshots refer to as well.
        freed_bytes: Packs that only it refers to: what its deletion would free.
    """

    seq: int
    step: int
    raw_bytes: int
    own_bytes: int
    shared_bytes: int
    freed_bytes: int


@click.command()
@run_argument
@click.argument("ref", type=Reference(), required=False)
@click.option(
    "--by",
    type=click.Choice(["snapshot", "kind", "layer"]),
    help="Sum by snapshot, or the tensors of REF by kind or by layer.  [default: snapshot; kind with REF]",
)
@click.option(
    "--depth", type=click.IntRange(min=1), help="Segments of a name that make a layer.  [default: 3]"
)
@bytes_option
@with_output("du")
def du(
    run: Place, ref: str | None, by: str | None, depth: int | None, exact_bytes: bool, output: Output
) -> int:
    """Show what takes the space in RUN: by snapshot, or within snapshot REF by kind or layer.

    By snapshot, `own` are the packs that its save wrote, `shared` those that other snapshots need too,
    and `freed` those that would go if it were deleted. By kind and layer, `stored` are the chunks of the
    tensors, whichever save wrote them; REF is `latest` where it is left out.
    """
    by = by or ("snapshot" if ref is None else "kind")
    if by == "snapshot" and ref is not None:
        raise click.UsageError("`--by snapshot` shows all snapshots: leave REF out")
    if depth is not None and by != "layer":
        raise click.UsageError("`--depth` belongs to `--by layer`")
    size: Callable[[int], str] = str if exact_bytes else format_bytes
    with opened(run) as engine:
        facts: dict[str, Any] = {"repository": {"path": engine.root}, "by": by}
        if by == "snapshot":
            usages, stored_bytes = _by_snapshot(engine, output)
        else:
            reader = engine.open(engine.resolve(ref or "latest"))
            sums = _sums(reader, by, depth or 3)
    if by == "snapshot":
        if output.is_json:
            output.document(**facts, stored_bytes=stored_bytes, rows=[usage._asdict() for usage in usages])
        else:
            _show_snapshots(usages, stored_bytes, size, output)
    elif output.is_json:
        rows = [{"name": name, **vars(sum_)} for name, sum_ in sums.items()]
        output.document(**facts, seq=reader.header()["seq"], rows=rows)
    else:
        _show_sums(by, sums, size, output)
    return exits.OK


def _by_snapshot(engine: Engine, output: Output) -> tuple[list[_Usage], int]:
    """Returns the usage of each snapshot, and the bytes of all their packs together."""
    packs: dict[int, list[tuple[str, int]]] = {}
    headers = {}
    for seq in reversed(engine.candidates()):
        try:
            reader = engine.open(seq)
        except SnapshotNotFoundError:
            continue  # another process removed it since it was listed
        except CorruptionError as error:
            output.warning(f"snapshot {seq} is damaged: {printable(error.message)}")
            continue
        packs[seq], headers[seq] = reader.packs(), reader.header()
    users = Counter(name for table in packs.values() for name, _ in table)
    usages = [
        _Usage(
            seq,
            headers[seq]["step"],
            headers[seq]["raw_bytes"],
            sum(length for name, length in table if name.startswith(f"{seq}-")),
            sum(length for name, length in table if users[name] > 1),
            sum(length for name, length in table if users[name] == 1),
        )
        for seq, table in packs.items()
    ]
    lengths = {name: length for table in packs.values() for name, length in table}
    return usages, sum(lengths.values())


def _sums(reader: SnapshotReader, by: str, depth: int) -> dict[str, Sums]:
    """Returns the sums of a snapshot's tensors, the largest first."""
    if by == "layer":
        groups = grouped(entries_of(reader), lambda entry: ".".join(split_name(entry.name)[:depth]))
    else:
        kinds = {show_part(keyword): kind for keyword, kind in kinds_of(reader.structure()).items()}
        groups = grouped(entries_of(reader), lambda entry: _kind(entry, kinds))
    return dict(sorted(groups.items(), key=lambda row: (-row[1].raw_bytes, row[0])))


def _kind(entry: EntryRow, kinds: dict[str, str]) -> str:
    keyword = split_name(entry.name)[0]
    return _KINDS.get(kinds.get(keyword, ""), "other") if entry.rank is None else "other"


def _show_snapshots(
    usages: list[_Usage], stored_bytes: int, size: Callable[[int], str], output: Output
) -> None:
    titles = ("seq", "step", "raw", "own", "shared", "freed")
    rows = [[str(usage.seq), str(usage.step), *map(size, usage[2:])] for usage in usages]
    output.table([Column(title, is_number=True) for title in titles], rows)
    output.message(f"all packs together: {size(stored_bytes)}")


def _show_sums(by: str, sums: dict[str, Sums], size: Callable[[int], str], output: Output) -> None:
    columns = [
        Column(by),
        Column("tensors", is_number=True),
        Column("raw", is_number=True),
        Column("stored", is_number=True),
    ]
    output.table(
        columns,
        [
            [printable(name), str(sum_.tensor_count), size(sum_.raw_bytes), size(sum_.stored_bytes)]
            for name, sum_ in sums.items()
        ],
    )
