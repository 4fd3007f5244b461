"""`varvite verify`: reads what snapshots refer to and compares it with its digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from varvite.cli import exits
from varvite.cli.opening import Place, opened
from varvite.cli.options import Reference, run_argument, with_output
from varvite.cli.output import Column, Output, bad
from varvite.cli.progress import bytes_read
from varvite.cli.text import counted, printable
from varvite.errors import CorruptionError, SnapshotNotFoundError
from varvite.records import Finding, format_bytes

if TYPE_CHECKING:
    from varvite._native import Engine

__all__ = ["verify"]


class _Share(click.ParamType[float]):
    """A share in (0, 1], as a number or in per cent."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        number, percent = value.removesuffix("%"), value.endswith("%")
        try:
            share = float(number) / (100 if percent else 1)
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            self.fail(f"`{value}` is not a share such as `0.1` or `10%`", param, ctx)
        return share


@click.command()
@run_argument
@click.argument("ref", type=Reference(), required=False)
@click.option("--sample", type=_Share(), default=1.0, help="Share of the chunks to read, such as 0.1 or 10%.")
@with_output("verify")
def verify(run: Place, ref: str | None, sample: float, output: Output) -> int:
    """Check every byte of RUN, or of snapshot REF, against its digest; exit 3 where something is damaged.

    Nothing is changed, and a run may go on writing meanwhile. With `--sample` headers and footers of
    packs are still checked in full. With `--quiet` only the verdict is written.
    """
    with opened(run) as engine:
        seq = None if ref is None else engine.resolve(ref)
        with output.bar("verifying", lambda: _planned_bytes(engine, seq, sample), is_bytes=True) as bar:
            start = bytes_read()
            with bar.following(lambda: bytes_read() - start):
                report = engine.verify(seq, sample)
        root = engine.root
    findings = [Finding(*row) for row in report["findings"]]
    if output.is_json:
        output.document(
            repository={"path": root},
            seq=seq,
            sample=sample,
            ok=not findings,
            checked_bytes=report["checked_bytes"],
            findings=[finding._asdict() for finding in findings],
        )
    else:
        _show(findings, report["checked_bytes"], sample, output)
    return exits.FINDINGS if findings else exits.OK


def _planned_bytes(engine: Engine, seq: int | None, sample: float) -> int:
    """Bytes of packs that will be read, as far as their manifests can tell."""
    lengths: dict[str, int] = {}
    for one in engine.candidates() if seq is None else [seq]:
        try:
            lengths.update(engine.open(one).packs())
        except (CorruptionError, SnapshotNotFoundError):
            continue  # it will be a finding, or it is gone
    return round(sum(lengths.values()) * sample)


def _show(findings: list[Finding], checked_bytes: int, sample: float, output: Output) -> None:
    if findings and not output.quiet:
        columns = [
            Column("object"),
            Column("byte", is_number=True),
            Column("what"),
            Column("steps concerned"),
        ]
        output.table(
            columns,
            [
                [
                    printable(finding.object),
                    str(finding.offset_bytes),
                    bad(printable(finding.what)),
                    ", ".join(map(str, finding.steps)) or "none",
                ]
                for finding in findings
            ],
        )
        output.line()
    checked = f"{format_bytes(checked_bytes)} checked"
    if sample < 1:
        checked += f", a sample of {100 * sample:g} %"
    if findings:
        output.line(f"damaged: {counted(len(findings), 'finding')}; {checked}", "bad")
    else:
        output.line(f"no damage found; {checked}", "good" if sample == 1 else "doubtful")
