"""`varvite merge`: rewrites old packs so that they can go."""

from __future__ import annotations

import click

from varvite.cli import exits
from varvite.cli.opening import Place, opened
from varvite.cli.options import run_argument, with_output
from varvite.cli.output import Output
from varvite.cli.text import counted, printable
from varvite.records import Finding, format_bytes

__all__ = ["merge"]


@click.command()
@run_argument
@with_output("merge")
def merge(run: Place, output: Output) -> int:
    """Rewrite what is live in the packs of RUN into few new ones; exit 3 where something is damaged.

    Every snapshot stays as it is, and every chunk is verified on the way. Damaged chunks are left where they
    are, with all that the snapshots concerned refer to.
    """
    with opened(run, access="write") as engine:
        done, root = engine.merge_now(), engine.root
    findings = [Finding(*row) for row in done["findings"]]
    if output.is_json:
        output.document(
            repository={"path": root},
            merged_packs=done["merged_packs"],
            written_bytes=done["written_bytes"],
            freed_bytes=done["freed_bytes"],
            stood_down=done["stood_down"],
            findings=[finding._asdict() for finding in findings],
        )
        return exits.FINDINGS if findings else exits.OK
    for finding in findings:
        where = f"`{finding.object}` at byte {finding.offset_bytes}"
        steps = ", ".join(map(str, finding.steps)) or "unknown"
        output.warning(printable(f"{where}: {finding.what}; snapshots of steps: {steps}"))
    if done["stood_down"] is not None:
        output.line(f"stood down: {printable(done['stood_down'])}", "doubtful")
    if done["merged_packs"]:
        written, freed = format_bytes(done["written_bytes"]), format_bytes(done["freed_bytes"])
        output.line(f"merged {counted(done['merged_packs'], 'pack')}: wrote {written}, freed {freed}")
    elif done["stood_down"] is None and not findings:
        output.line("nothing to merge")
    return exits.FINDINGS if findings else exits.OK
