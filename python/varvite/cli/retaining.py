"""`varvite prune`, `pin` and `unpin`: what stays."""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from varvite import keep
from varvite.cli import exits
from varvite.cli.opening import Place, opened, snapshot_facts, tags_of
from varvite.cli.options import Reference, run_argument, with_output
from varvite.cli.output import Cell, Column, Output, bad, good
from varvite.cli.text import counted, printable
from varvite.errors import CheckpointError, InvalidInputError
from varvite.records import format_bytes

if TYPE_CHECKING:
    from varvite.keep import Keep
    from varvite.native_types import Plan

__all__ = ["pin", "prune", "unpin"]

_HOURS: Final = {"s": 1 / 3600, "m": 1 / 60, "h": 1, "d": 24, "w": 168}
_SPAN: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])")


class _Policy(click.ParamType["Keep"]):
    """An option's value as the policy that it stands for."""

    def __init__(self, name: str, read: Callable[[str], Keep]) -> None:
        """Takes the name of the value in the help, and what makes a policy of it."""
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Keep:
        try:
            return self._read(value)
        except InvalidInputError as error:
            self.fail(error.message, param, ctx)


def _number(make: Callable[[int], Keep]) -> Callable[[str], Keep]:
    """Makes a policy of a whole number; the policy says what is wrong with any other text."""
    return lambda text: make(int(text) if text.isascii() and text.isdecimal() else text)  # type: ignore[arg-type]


def _read_best(text: str) -> Keep:
    """Reads `METRIC`, `METRIC:MODE` or `METRIC:MODE:N`; a metric's name may hold colons."""
    name, mode, count = text, "min", "1"
    if match := re.fullmatch(r"(.+):(min|max)(?::([0-9]+))?", text):
        name, mode, count = match[1], match[2], match[3] or "1"
    elif text.count(":") and text.rpartition(":")[2].isdecimal():
        reason = "must be METRIC, METRIC:min, METRIC:max, or one of these two and :N"
        raise InvalidInputError(f"invalid best `{text}`: {reason}", what="best", reason=reason)
    return keep.best(name, mode, n=int(count))


def _read_span(text: str) -> Keep:
    match = _SPAN.fullmatch(text)
    if match is None:
        reason = "must be a number and a unit, such as `90m`, `6h` or `2d`"
        raise InvalidInputError(f"invalid time `{text}`: {reason}", what="within", reason=reason)
    return keep.within(hours=float(match[1]) * _HOURS[match[2]])


def _policy_options(function: Callable[..., Any]) -> Callable[..., Any]:
    rows = [
        ("--keep-last", "N", _number(keep.last), "Keep the N newest."),
        ("--keep-every", "N", _number(keep.every), "Keep those whose step is a multiple of N."),
        ("--keep-best", "METRIC:MODE:N", _read_best, "Keep the N best by a metric; MODE is min or max."),
        ("--keep-within", "TIME", _read_span, "Keep those no older than 90m, 6h, 2d."),
        ("--keep-hourly", "N", _number(keep.hourly), "Keep the newest of each of N hours."),
        ("--keep-daily", "N", _number(keep.daily), "Keep the newest of each of N days."),
        ("--max-bytes", "SIZE", keep.max_bytes, "Keep the newest that fit, such as 200GB."),
    ]
    for flag, metavar, read, text in reversed(rows):
        name = flag.removeprefix("--").replace("-", "_")
        kind = _Policy(metavar, read)
        function = click.option(flag, name, type=kind, metavar=metavar, multiple=True, help=text)(function)
    return function


@click.command()
@run_argument
@_policy_options
@click.option("--keep-tagged", is_flag=True, help="Keep nothing but what is always kept.")
@click.option("-n", "--dry-run", is_flag=True, help="Only show the plan.")
@click.option("-y", "--yes", is_flag=True, help="Remove without asking.")
@with_output("prune")
def prune(
    run: Place, keep_tagged: bool, dry_run: bool, yes: bool, output: Output, **policies: tuple[Keep, ...]
) -> int:
    """Remove the snapshots of RUN that no policy keeps, after showing what stays and goes, and why.

    Policies add up: what any of them keeps stays. The newest snapshot, the newest healthy one and those
    with a tag stay in any case. Nothing is removed without a confirmation on the terminal, or `--yes`.
    """
    given = [policy for one in policies.values() for policy in one]
    if keep_tagged:
        given.append(keep.tagged())
    if not given:
        raise click.UsageError("no policy given: say what to keep, such as `--keep-last 3`")
    policy = functools.reduce(operator.or_, given)
    with opened(run, keep=policy) as engine:
        plan, root = engine.prune(dry_run=True), engine.root
    if output.is_json:
        return _prune_json(run, policy, plan, root, dry_run=dry_run, yes=yes, output=output)
    _show_plan(plan, dry_run=dry_run, output=output)
    if dry_run or not plan["removed"]:
        return exits.OK
    code = _permission(len(plan["removed"]), yes=yes)
    if code == exits.OK:
        freed_bytes = _remove(run, policy, plan)
        output.line(f"removed {counted(len(plan['removed']), 'snapshot')}, freed {format_bytes(freed_bytes)}")
    return code


def _prune_json(
    run: Place, policy: Keep, plan: Plan, root: str, *, dry_run: bool, yes: bool, output: Output
) -> int:
    freed_bytes, applied, code = plan["freed_bytes"], False, exits.OK
    if plan["removed"] and not dry_run:
        code = _permission(len(plan["removed"]), yes=yes)
        if code == exits.OK:
            freed_bytes, applied = _remove(run, policy, plan), True
    output.document(
        repository={"path": root},
        policy=repr(policy),
        dry_run=dry_run,
        applied=applied,
        kept=[{"seq": seq, "step": step, "reasons": reasons} for seq, step, reasons in plan["kept"]],
        removed=[{"seq": seq, "step": step, "reason": reason} for seq, step, reason in plan["removed"]],
        freed_bytes=freed_bytes,
    )
    return code


def _permission(count: int, *, yes: bool) -> int:
    """Asks whether to remove; returns `OK`, or the exit code of a refusal that it has explained."""
    if yes:
        return exits.OK
    if not sys.stdin.isatty():
        exits.show_error(
            "nothing was removed: there is no terminal to confirm on", "repeat the command with `--yes`"
        )
        return exits.USAGE
    if click.confirm(f"Remove {counted(count, 'snapshot')}?", err=True):
        return exits.OK
    click.echo("nothing was removed", err=True)
    return exits.FAILED


def _remove(run: Place, policy: Keep, shown: Plan) -> int:
    """Removes what the plan that was shown removes, and nothing else; returns the bytes freed."""
    with opened(run, access="write", keep=policy) as engine:
        seqs = {row[0] for row in shown["removed"]}
        others = [row[0] for row in engine.prune(dry_run=True)["removed"] if row[0] not in seqs]
        if others:
            text = ", ".join(map(str, others))
            raise CheckpointError(
                f"nothing was removed: the repository has changed, and now these would go too: {text}",
                hint="repeat the command to see the new plan",
            )
        return engine.prune(dry_run=False)["freed_bytes"]


def _show_plan(plan: Plan, *, dry_run: bool, output: Output) -> None:
    rows: list[tuple[int, list[Cell | str]]] = [
        (seq, [good("keep"), str(seq), str(step), printable(", ".join(reasons))])
        for seq, step, reasons in plan["kept"]
    ]
    rows += [
        (seq, [bad("remove"), str(seq), str(step), printable(reason)])
        for seq, step, reason in plan["removed"]
    ]
    columns = [Column(""), Column("seq", is_number=True), Column("step", is_number=True), Column("why")]
    if not output.quiet:
        output.table(columns, [row for _, row in sorted(rows, key=lambda row: row[0])])
        output.line()
    if not plan["removed"]:
        output.line(f"nothing to remove: {counted(len(plan['kept']), 'snapshot')} stay")
    elif dry_run:
        removed = counted(len(plan["removed"]), "snapshot")
        output.line(f"would remove {removed} and free {format_bytes(plan['freed_bytes'])}")


@click.command()
@run_argument
@click.argument("ref", type=Reference())
@click.argument("name")
@with_output("pin")
def pin(run: Place, ref: str, name: str, output: Output) -> int:
    """Give snapshot REF of RUN a NAME, which keeps it from being pruned until `unpin`.

    It works beside a run that is saving. `tag:NAME` is a reference to it from now on.
    """
    with opened(run, access="tag") as engine:
        seq = engine.resolve(ref)
        header = engine.header(seq)
        engine.pin(seq, name)
        tags, root = tags_of(engine), engine.root
    if output.is_json:
        output.document(repository={"path": root}, name=name, snapshot=snapshot_facts(header, tags))
    else:
        output.message(f"pinned seq {seq}, step {header['step']}, as `{name}`")
    return exits.OK


@click.command()
@run_argument
@click.argument("name")
@with_output("unpin")
def unpin(run: Place, name: str, output: Output) -> int:
    """Take a NAME from its snapshot of RUN, which then goes when no policy keeps it."""
    with opened(run, access="tag") as engine:
        seq = engine.tags().get(name)
        engine.unpin(name)
        root = engine.root
    if output.is_json:
        output.document(repository={"path": root}, name=name, seq=seq)
    else:
        output.message(f"unpinned `{name}` from seq {seq}")
    return exits.OK
