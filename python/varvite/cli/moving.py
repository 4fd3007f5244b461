"""`varvite push` and `pull`: a repository to a bucket, and snapshots of a bucket to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from varvite.buckets import is_bucket_url, read_remote
from varvite.cli import exits
from varvite.cli.opening import Place, opened
from varvite.cli.options import Reference, place_argument, run_argument, with_output
from varvite.cli.output import Output
from varvite.cli.sides import packs_of, pending, read_bucket, read_side, require_same
from varvite.cli.text import counted, printable
from varvite.encryption import read_encryption
from varvite.errors import InternalError
from varvite.records import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from varvite._native import Engine
    from varvite.native_types import SyncFigures

__all__ = ["pull", "push"]


@click.command()
@run_argument
@click.argument("url", metavar="URL")
@click.option("-n", "--dry-run", is_flag=True, help="Only say what would be pushed.")
@with_output("push")
def push(run: Place, url: str, dry_run: bool, output: Output) -> int:
    """Push everything of folder RUN that the bucket at URL lacks, the newest snapshot first.

    The bucket then holds each snapshot whole. What a run that pushes there has removed here is removed
    there. A run that is saving pushes by itself, and keeps this command out: exit 11. With `--dry-run`
    nothing is locked or changed, and packs that a push that was cut short has sent count as lacking.
    """
    if run.is_bucket:
        raise click.UsageError("RUN must be a folder: `varvite pull` copies from a bucket")
    if dry_run:
        return _plan_push(run, url, output)
    with opened(run, access="write", remote=url) as engine:
        with (
            output.bar("pushing", lambda: _total(engine), is_bytes=True) as bar,
            bar.following(lambda: _state(engine)["moved_bytes"], lambda: _total(engine)),
        ):
            engine.sync_now()
        # What the engine had begun to push by itself counts too.
        state, root, identity = _state(engine), engine.root, engine.repository_id
    if output.is_json:
        output.document(
            repository={"path": root, "id": identity},
            remote={"url": url},
            dry_run=False,
            newest_pushed_seq=state["newest_pushed_seq"],
            pushed_objects=state["pushed_objects"],
            pushed_bytes=state["pushed_bytes"],
            removed_objects=state["removed_objects"],
            pending_objects=state["pending_objects"],
        )
    else:
        output.line(_pushed(state, url), "good")
    return exits.OK


def _state(engine: Engine) -> SyncFigures:
    found = engine.sync_state()
    if found is None:
        raise InternalError("an engine that was opened with a bucket has none", what="sync state")
    return found


def _total(engine: Engine) -> int:
    """Bytes of a push, as far as they are known by now."""
    state = _state(engine)
    return state["pushed_bytes"] + state["pending_bytes"]


def _pushed(state: SyncFigures, url: str) -> str:
    if not state["pushed_objects"] and not state["removed_objects"]:
        return f"nothing to push: `{url}` has everything"
    text = f"pushed {counted(state['pushed_objects'], 'object')}, {format_bytes(state['pushed_bytes'])}"
    return f"{text}; removed {state['removed_objects']:,}"


def _plan_push(run: Place, url: str, output: Output) -> int:
    with opened(Place(run.path)) as engine:
        here = read_side(engine, output)
    bucket = read_bucket(run.behind(url), output)
    require_same(here, bucket)
    plan = pending(here, bucket)
    if output.is_json:
        output.document(
            repository={"path": here.root, "id": here.identity},
            remote={"url": url},
            dry_run=True,
            **plan.facts(),
        )
        return exits.OK
    for seq in plan.snapshots:
        output.line(f"would push seq {seq}, step {here.headers[seq]['step']}")
    if plan.snapshots:
        packs = counted(len(plan.packs), "pack")
        output.line(
            f"would push {counted(len(plan.snapshots), 'snapshot')}: {packs}, {format_bytes(plan.pack_bytes)}"
        )
    else:
        output.line(f"no snapshot to push: `{url}` has all of them")
    return exits.OK


@click.command()
@place_argument("url")
@click.argument("folder", type=click.Path(), metavar="FOLDER")
@click.argument("refs", type=Reference(), nargs=-1, metavar="[REF]...")
@click.option("-a", "--all", "everything", is_flag=True, help="Pull every snapshot.")
@click.option("-n", "--dry-run", is_flag=True, help="Only say what would be pulled.")
@with_output("pull")
def pull(
    url: Place, folder: str, refs: tuple[str, ...], everything: bool, dry_run: bool, output: Output
) -> int:
    """Copy snapshots of the bucket at URL into FOLDER, verified, the newest first.

    Each REF names a snapshot of the bucket; without one it is `latest`. FOLDER must be empty, absent, or hold
    snapshots of the same run; what it has already is not read again. It is a repository like any other
    then.
    """
    if not url.is_bucket:
        raise click.UsageError("URL must be a bucket, such as s3://bucket/run")
    if is_bucket_url(folder):
        raise click.UsageError("FOLDER must be a folder: `varvite push` copies to a bucket")
    if refs and everything:
        raise click.UsageError("`--all` pulls every snapshot: leave REF out")
    remote = read_remote(url.path, url.options, sync_every=1)
    with opened(url) as engine:
        steps, damaged = _all(engine) if everything else (_resolve(engine, refs or ("latest",)), [])
        seqs = list(steps)
        packs = packs_of(engine, seqs, output)
        identity = engine.repository_id
    for seq, why in damaged:
        output.warning(f"snapshot {seq} is damaged: {printable(why)}")
    code = exits.FINDINGS if damaged else exits.OK
    lengths = {name: length for table in packs.values() for name, length in table.items()}
    facts = {"repository": {"path": folder, "id": identity}, "remote": {"url": url.path}, "snapshots": seqs}
    if dry_run:
        if output.is_json:
            output.document(**facts, dry_run=True, packs=len(lengths), pack_bytes=sum(lengths.values()))
        else:
            _show_plan(steps, lengths, output)
        return code
    from varvite._native import pull as pull_snapshots

    Path(folder).mkdir(parents=True, exist_ok=True)
    with output.bar("pulling", lambda: sum(lengths.values()), is_bytes=True) as bar:
        key = read_encryption(None).fetch(url.path)
        done = pull_snapshots(folder, remote.text, remote.credentials, seqs, bar.reach, key)
    if output.is_json:
        output.document(
            **facts, dry_run=False, pulled_objects=done["pulled_objects"], pulled_bytes=done["pulled_bytes"]
        )
    elif done["pulled_objects"]:
        objects, size = counted(done["pulled_objects"], "object"), format_bytes(done["pulled_bytes"])
        output.line(f"pulled {counted(len(seqs), 'snapshot')}, verified: {objects}, {size}", "good")
    else:
        output.line(f"nothing to pull: `{printable(folder)}` has {_named(steps)}", "good")
    return code


def _resolve(engine: Engine, refs: Sequence[str]) -> dict[int, int]:
    """Returns the steps of the snapshots that references name, by commit number, newest first."""
    seqs = sorted({engine.resolve(ref) for ref in refs}, reverse=True)
    return {seq: engine.header(seq)["step"] for seq in seqs}


def _all(engine: Engine) -> tuple[dict[int, int], list[tuple[int, str]]]:
    """Returns the steps of all snapshots likewise, and what can't be read."""
    headers, damaged = engine.snapshots()
    return {header["seq"]: header["step"] for header in reversed(headers)}, damaged


def _named(steps: dict[int, int]) -> str:
    return ", ".join(f"seq {seq} (step {step})" for seq, step in steps.items())


def _show_plan(steps: dict[int, int], lengths: dict[str, int], output: Output) -> None:
    for seq, step in steps.items():
        output.line(f"would pull seq {seq}, step {step}")
    packs = f"{counted(len(lengths), 'pack')}, {format_bytes(sum(lengths.values()))}"
    output.line(f"would pull {counted(len(steps), 'snapshot')}: at most {packs}")
