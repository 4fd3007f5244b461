"""`varvite doctor`: what a folder or a bucket is like as a place for a repository, and how that is."""

from __future__ import annotations

import dataclasses
import os
from typing import Final

import click

from varvite.buckets import read_remote
from varvite.cli import exits
from varvite.cli.opening import Place, opened
from varvite.cli.options import place_argument, with_output
from varvite.cli.output import Cell, Column, Output, bad, doubtful, good
from varvite.cli.text import counted, printable
from varvite.doctor import PROBE_COUNT, Check, examine, examine_bucket, examine_repository, existing_folder
from varvite.errors import CheckpointError, NotARepositoryError

__all__ = ["doctor"]

_VERDICTS: Final = {"ok": good, "warn": doubtful, "bad": bad}


@click.command()
@place_argument("path")
@with_output("doctor")
def doctor(path: Place, output: Output) -> int:
    """Probe PATH, a folder or the url of a bucket, and the repository in it if there is one.

    A folder need not exist yet: then the one is probed that it would be made in. Small files are written
    there, or objects of a few MiB in a bucket, and removed again; nothing else changes. Exit 3 where a run
    would fail or lose data. With `--quiet` only what is not in order is written.
    """
    if path.is_bucket:
        place, checks = path.path, _bucket(path)
    else:
        with output.bar("probing", lambda: PROBE_COUNT) as bar:
            checks = examine(path.path, ended=lambda: bar.advance(1))
        place, checks = str(existing_folder(path.path)), [*checks, *_repository(path)]
    failed = sum(check.verdict == "bad" for check in checks)
    doubts = sum(check.verdict == "warn" for check in checks)
    if output.is_json:
        output.document(
            path=place,
            ok=not failed,
            checks=[dataclasses.asdict(check) for check in checks],
        )
    else:
        shown = [check for check in checks if not output.quiet or check.verdict != "ok"]
        if shown:
            output.table([Column("check"), Column(""), Column("found"), Column("meaning")], map(_row, shown))
        verdict = "not a place for a repository: " if failed else ""
        output.message(f"{verdict}{counted(failed, 'failure')}, {counted(doubts, 'warning')}")
    return exits.FINDINGS if failed else exits.OK


def _row(check: Check) -> list[Cell | str]:
    return [
        check.name,
        _VERDICTS[check.verdict](check.verdict),
        printable(check.value),
        printable(check.meaning),
    ]


def _bucket(path: Place) -> list[Check]:
    checks = examine_bucket(read_remote(path.path, path.options, sync_every=1))
    # What can't be reached once is not asked again.
    return checks if checks[0].verdict == "bad" else [*checks, *_repository(path)]


def _repository(path: Place) -> list[Check]:
    try:
        with opened(path) as engine:
            return examine_repository(engine, is_folder=not path.is_bucket)
    except NotARepositoryError as error:
        if path.is_bucket:
            return [Check("repository", "none yet", meaning=error.message)]
        return [_no_repository(path.path)]
    except CheckpointError as error:
        return [Check("repository", "can't be opened", "bad", error.message)]


def _no_repository(path: str) -> Check:
    """Tells whether the first save would make a repository, as the engine decides it."""
    try:
        with os.scandir(path) as found:
            files = sorted(one.name for one in found if one.is_file(follow_symlinks=False))
    except OSError:
        files = []
    if files:
        meaning = f"the first save would refuse it: it holds other files: {', '.join(files[:3])}"
        return Check("repository", "none", "warn", meaning)
    return Check("repository", "none yet", meaning="the first save makes it")
