"""The command line on buckets: urls, push, pull, and where snapshots lie."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from commands import TERMINAL, document, process, save, tree, varvite
from servers import SECRET_KEY

from varvite import CheckpointManager
from varvite.cli import exits

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucket import Bucket

DEAD = {
    "endpoint": "http://127.0.0.1:1",
    "retry_seconds": 0.1,
    "region": "us-east-1",
    "access_key_id": "key",
    "secret_access_key": "do-not-show",
}


def said(options: dict[str, Any]) -> list[str]:
    """Returns options as a command line says them."""
    return [word for name, value in options.items() for word in ("-o", f"{name}={value!s}")]


@pytest.fixture
def bucket(quick_bucket: Bucket) -> Bucket:
    """A bucket; what these tests are about does not depend on the server."""
    return quick_bucket


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A repository of three snapshots; the first is tagged."""
    path = tmp_path / "run"
    save(path, *({"w": torch.full((300, 300), float(step)), "step": step} for step in range(3)))
    with CheckpointManager(path) as manager:
        manager.pin(0, "first")
    return path


@pytest.fixture
def at(bucket: Bucket) -> list[str]:
    """How a command reaches the bucket."""
    return said(bucket.options())


@pytest.fixture
def pushed(run: Path, bucket: Bucket, at: list[str]) -> str:
    """The url of a bucket that holds the run."""
    assert varvite("push", run, bucket.url, *at).exit_code == 0
    return bucket.url


def without_root(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "repository": None}


def test_push_sends_everything_once(run: Path, bucket: Bucket, at: list[str]) -> None:
    plan = document("push", run, bucket.url, *at, "-n")
    assert (plan["dry_run"], plan["snapshots"], plan["packs"]) == (True, [3, 2, 1], 3)
    assert bucket.objects() == {}
    done = document("push", run, bucket.url, *at)
    assert (done["dry_run"], done["newest_pushed_seq"]) == (False, 3)
    assert (done["pending_objects"], done["removed_objects"], done["remote"]) == (0, 0, {"url": bucket.url})
    assert done["pushed_bytes"] > plan["pack_bytes"] > 3 * 300 * 300
    assert bucket.seqs() == [1, 2, 3]
    packs = {name: length for name, length in bucket.objects().items() if name.startswith("packs/")}
    assert packs == {f"packs/{path.name}": path.stat().st_size for path in (run / "packs").iterdir()}
    again = document("push", run, bucket.url, *at)
    assert (again["pushed_objects"], again["pushed_bytes"], again["newest_pushed_seq"]) == (0, 0, 3)
    plan = document("push", run, bucket.url, *at, "-n")
    assert (plan["snapshots"], plan["packs"], plan["pack_bytes"]) == ([], 0, 0)


def test_push_says_what_it_did(run: Path, bucket: Bucket, at: list[str]) -> None:
    lines = varvite("push", run, bucket.url, *at, "-n").stdout.splitlines()
    assert lines[:3] == [f"would push seq {seq}, step {seq - 1}" for seq in (3, 2, 1)]
    assert re.fullmatch(r"would push 3 snapshots: 3 packs, [0-9.]+ .B", lines[3])
    assert re.fullmatch(
        r"pushed \d+ objects, [0-9.]+ .B; removed 0\n", varvite("push", run, bucket.url, *at).stdout
    )
    again = varvite("push", run, bucket.url, *at).stdout
    assert again == f"nothing to push: `{bucket.url}` has everything\n"
    dry = varvite("push", run, bucket.url, *at, "-n").stdout
    assert dry == f"no snapshot to push: `{bucket.url}` has all of them\n"


def test_what_was_removed_here_is_removed_there(
    run: Path, pushed: str, bucket: Bucket, at: list[str]
) -> None:
    with bucket.manager(run) as manager:
        manager.delete("seq:2")
    document("push", run, pushed, *at)
    assert bucket.seqs() == [1, 3]
    assert {name.partition("-")[0] for name in bucket.names("packs/")} == {"packs/1", "packs/3"}


def test_prune_of_a_bucket_removes_in_the_bucket(
    pushed: str, bucket: Bucket, tmp_path: Path, at: list[str]
) -> None:
    at = [*at, "-o", f"spool={tmp_path / 'spool'}"]
    assert document("prune", pushed, "--keep-last", 1, "-y", *at)["applied"] is True
    assert bucket.seqs() == [1, 3]  # the first has a name
    assert {name.partition("-")[0] for name in bucket.names("packs/")} == {"packs/1", "packs/3"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["show", "latest"],
        ["show", "tag:first", "--tree"],
        ["show", "--structure"],
        ["verify"],
        ["verify", "seq:2"],
        ["receipts"],
        ["du"],
        ["du", "latest", "--by", "layer"],
    ],
)
def test_commands_say_the_same_of_a_folder_and_of_its_bucket(
    run: Path, pushed: str, at: list[str], arguments: list[str]
) -> None:
    command, *rest = arguments
    there = document(command, pushed, *rest, *at)
    assert there.get("repository", {"path": pushed})["path"].rstrip("/") == pushed
    assert without_root(there) == without_root(document(command, run, *rest))


def test_diff_of_a_bucket(run: Path, pushed: str, at: list[str]) -> None:
    there = document("diff", pushed, "0", "2", *at, code=exits.FINDINGS)
    assert without_root(there) == without_root(document("diff", run, "0", "2", code=exits.FINDINGS))
    assert document("diff", pushed, "2", "latest", *at)["equal"] is True


def test_reading_leaves_a_bucket_as_it_is(pushed: str, bucket: Bucket, at: list[str]) -> None:
    before = bucket.content()
    for arguments in (["ls"], ["show"], ["verify"], ["du"], ["receipts"]):
        assert varvite(arguments[0], pushed, *arguments[1:], *at).exit_code == 0
    assert bucket.content() == before


def test_verify_finds_damage_in_a_bucket(run: Path, pushed: str, bucket: Bucket, at: list[str]) -> None:
    name = next(name for name in bucket.names("packs/2-"))
    data = bytearray(bucket.get(name))
    data[len(data) // 2] ^= 1
    bucket.put(name, bytes(data))
    found = document("verify", pushed, *at, code=exits.FINDINGS)
    assert [(row["object"].rpartition("packs/")[2], row["steps"]) for row in found["findings"]] == [
        (name.removeprefix("packs/"), [1])
    ]


def test_pull_takes_the_latest_alone(pushed: str, tmp_path: Path, at: list[str]) -> None:
    folder = tmp_path / "copy"
    plan = document("pull", pushed, folder, *at, "-n")
    assert (plan["dry_run"], plan["snapshots"], plan["packs"]) == (True, [3], 1)
    assert not folder.exists()
    done = document("pull", pushed, folder, *at)
    assert (done["snapshots"], done["dry_run"]) == ([3], False)
    assert done["pulled_bytes"] >= plan["pack_bytes"]
    assert [row["seq"] for row in document("ls", folder)["snapshots"]] == [3]
    assert document("verify", folder)["ok"]
    with CheckpointManager(folder) as manager:
        assert torch.equal(manager.load()["w"], torch.full((300, 300), 2.0))
    again = varvite("pull", pushed, folder, *at)
    assert again.stdout == f"nothing to pull: `{folder}` has seq 3 (step 2)\n"


def test_pull_takes_what_is_named_and_all(run: Path, pushed: str, tmp_path: Path, at: list[str]) -> None:
    folder = tmp_path / "copy"
    assert document("pull", pushed, folder, "tag:first", "1", "0", *at)["snapshots"] == [2, 1]
    assert document("pull", pushed, folder, "--all", *at)["snapshots"] == [3, 2, 1]
    assert [row["seq"] for row in document("ls", folder)["snapshots"]] == [1, 2, 3]
    assert {path: data for path, data in tree(folder).items() if path.startswith(("packs", "snap"))} == {
        path: data for path, data in tree(run).items() if path.startswith(("packs", "snap"))
    }


def test_pull_says_what_it_did(pushed: str, tmp_path: Path, at: list[str]) -> None:
    lines = varvite("pull", pushed, tmp_path / "a", "--all", "-n", *at).stdout.splitlines()
    assert lines[:3] == [f"would pull seq {seq}, step {seq - 1}" for seq in (3, 2, 1)]
    assert re.fullmatch(r"would pull 3 snapshots: at most 3 packs, [0-9.]+ .B", lines[3])
    done = varvite("pull", pushed, tmp_path / "a", "--all", *at).stdout
    assert re.fullmatch(r"pulled 3 snapshots, verified: \d+ objects, [0-9.]+ .B\n", done)


def test_pull_does_not_mix_two_runs(pushed: str, tmp_path: Path, at: list[str]) -> None:
    save(tmp_path / "other", {"w": torch.ones(1)})
    before = tree(tmp_path / "other")
    result = varvite("pull", pushed, tmp_path / "other", *at)
    assert result.exit_code != 0
    assert result.stderr.startswith("error: ")
    assert tree(tmp_path / "other") == before


def test_ls_shows_where_snapshots_lie(run: Path, pushed: str, bucket: Bucket, at: list[str]) -> None:
    bucket.delete("snapshots/1.json")
    (run / "snapshots" / "2.json").unlink()
    found = document("ls", run, "--remote", pushed, *at)
    assert [(row["seq"], row["where"]) for row in found["snapshots"]] == [
        (1, "here"),
        (2, "bucket"),
        (3, "both"),
    ]
    pending = found["remote"]["pending"]
    assert (pending["snapshots"], pending["packs"]) == ([1], 1)
    assert found["remote"]["id"] == found["repository"]["id"]
    text = varvite("ls", run, "--remote", pushed, *at)
    lines = text.stdout.splitlines()
    place = lines[0].split().index("where")
    assert [line.split()[place] for line in lines[1:]] == ["here", "bucket", "both"]
    assert text.stderr.startswith("1 snapshot to push: 1 pack, ")


def test_ls_shows_that_another_writer_has_used_a_number(
    run: Path, pushed: str, bucket: Bucket, at: list[str], tmp_path: Path
) -> None:
    # Another machine has gone on from the second snapshot, and this one did not hear of it.
    copy = bucket.download(tmp_path / "copy")
    for path in (copy / "snapshots" / "3.json", *(copy / "packs").glob("3-*")):
        path.unlink()
    with CheckpointManager(copy, fsync=False) as manager:
        manager.save_sync(9, {"w": torch.full((3,), 7.0)}, rng=False)
    for name in ("snapshots/3.json", *(f"packs/{path.name}" for path in (copy / "packs").iterdir())):
        bucket.put(name, (copy / name).read_bytes())
    found = document("ls", run, "--remote", pushed, *at)
    assert [(row["seq"], row["where"]) for row in found["snapshots"]] == [
        (1, "both"),
        (2, "both"),
        (3, "differs"),
    ]
    told = varvite("ls", run, "--remote", pushed, *at).stderr
    assert "another writer has used numbers of this folder in the bucket: 3." in told
    assert "nothing to push" not in told


def test_ls_of_a_folder_and_a_bucket_that_holds_nothing(run: Path, bucket: Bucket, at: list[str]) -> None:
    found = document("ls", run, "--remote", bucket.url, *at)
    assert {row["where"] for row in found["snapshots"]} == {"here"}
    assert (found["remote"]["id"], found["remote"]["pending"]["snapshots"]) == (None, [3, 2, 1])
    plain = document("ls", run)
    assert ("remote" in plain, "where" in plain["snapshots"][0]) == (False, False)


@pytest.mark.parametrize("command", [["ls", "--remote"], ["push", "-n"], ["push"]])
def test_two_runs_in_one_place_are_told_apart(
    tmp_path: Path, pushed: str, bucket: Bucket, at: list[str], command: list[str]
) -> None:
    save(tmp_path / "other", {"w": torch.ones(1)})
    before = {name: data for name, data in bucket.content().items() if name != "lease.json"}
    name, *flags = command
    words = [tmp_path / "other", *flags, pushed] if name == "ls" else [tmp_path / "other", pushed, *flags]
    result = varvite(name, *words, *at)
    assert result.exit_code in (exits.NO_REPOSITORY, exits.USAGE)
    assert result.stderr.startswith("error: ")
    assert {name: data for name, data in bucket.content().items() if name != "lease.json"} == before


@pytest.mark.parametrize("command", ["ls", "show", "verify", "du", "receipts", "pull"])
def test_a_bucket_without_a_repository_has_its_own_code(
    bucket: Bucket, at: list[str], tmp_path: Path, command: str
) -> None:
    result = varvite(command, bucket.url, *([tmp_path / "copy"] if command == "pull" else []), *at)
    assert (result.exit_code, result.stdout) == (exits.NO_REPOSITORY, "")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "{url}", "77", "{at}"], exits.NOT_FOUND),
        (["pull", "{url}", "{new}", "77", "{at}"], exits.NOT_FOUND),
        (["pull", "{url}", "{new}", "77", "--all", "{at}"], exits.USAGE),
        (["pull", "{run}", "{new}"], exits.USAGE),
        (["pull", "{url}", "{url}", "{at}"], exits.USAGE),
        (["push", "{url}", "{url}", "{at}"], exits.USAGE),
        (["push", "{run}", "{run}"], exits.USAGE),
        (["push", "{new}", "{url}", "{at}"], exits.NO_REPOSITORY),
        (["ls", "{url}", "--remote", "{url}", "{at}"], exits.USAGE),
        (["ls", "{run}", "-o", "region=x"], exits.USAGE),
        (["ls", "{url}", "-o", "colour=red"], exits.USAGE),
        (["ls", "{url}", "-o", "parallel=many"], exits.USAGE),
        (["ls", "{url}", "-o", "region"], exits.USAGE),
    ],
)
def test_errors_have_codes_and_one_form(
    run: Path, pushed: str, at: list[str], tmp_path: Path, arguments: list[str], code: int
) -> None:
    words = [one.format(url=pushed, run=run, new=tmp_path / "new", at="{at}") for one in arguments]
    spread = [word for one in words for word in (at if one == "{at}" else [one])]
    result = varvite(*spread)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "new").exists()


def test_a_bucket_that_is_away_is_an_error_in_bounded_time(run: Path) -> None:
    for arguments in (["ls", "s3://bucket/run"], ["push", run, "s3://bucket/run"]):
        result = varvite(*arguments, *said(DEAD))
        assert (result.exit_code, result.stdout) == (exits.FAILED, "")
        assert "onnection refused" in result.stderr


def test_no_output_shows_a_secret(run: Path, bucket: Bucket) -> None:
    for arguments in (["ls", bucket.url], ["push", run, bucket.url], ["doctor", bucket.url]):
        for options in (said(DEAD), said(bucket.options())):
            result = varvite(*arguments, *options)
            assert "do-not-show" not in result.output
            assert SECRET_KEY not in result.output


def test_a_run_that_saves_keeps_push_out(run: Path, bucket: Bucket, at: list[str]) -> None:
    with CheckpointManager(run):
        assert varvite("push", run, bucket.url, *at).exit_code == exits.LOCKED
        assert document("push", run, bucket.url, *at, "-n")["snapshots"] == [3, 2, 1]
    assert bucket.objects() == {}


def test_names_beside_a_run_in_a_bucket(pushed: str, bucket: Bucket, at: list[str]) -> None:
    assert document("pin", pushed, "latest", "good", *at)["snapshot"]["seq"] == 3
    assert document("show", pushed, "tag:good", *at)["snapshot"]["seq"] == 3
    assert document("unpin", pushed, "good", *at)["seq"] == 3
    assert "tags/good" not in bucket.objects()


def environment(bucket: Bucket, **more: str) -> dict[str, str]:
    options = bucket.options()
    return {
        **os.environ,
        "AWS_ENDPOINT_URL": options["endpoint"],
        "AWS_REGION": options["region"],
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
        **more,
    }


def test_the_environment_is_enough(run: Path, bucket: Bucket, tmp_path: Path) -> None:
    known = environment(bucket)
    assert process("push", run, bucket.url, env=known).returncode == 0
    assert process("pull", bucket.url, tmp_path / "copy", env=known).returncode == 0
    listed = process("ls", bucket.url, "-q", env=known)
    assert (listed.returncode, listed.stdout, listed.stderr) == (0, "seq:1\nseq:2\nseq:3\n", "")


def drawn(*arguments: object) -> str:
    """Runs a command with stderr on a terminal and returns what it drew there."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "varvite", *map(str, arguments)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=slave, env={**os.environ, **TERMINAL}, check=False
        )
        written = os.read(master, 65536).decode()
    finally:
        os.close(slave)
        os.close(master)
    assert done.returncode == 0, written
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


def test_a_push_shows_bytes_their_rate_and_the_time_left(run: Path, bucket: Bucket, at: list[str]) -> None:
    written = drawn("push", run, bucket.url, *at, "-o", "bandwidth=800kB")
    assert "pushing" in written
    assert re.search(r"[0-9.]+/1\.1 MB +[0-9.]+ .?B/s +0:00:0[0-9]", written), written


def test_a_pull_shows_bytes(pushed: str, tmp_path: Path, at: list[str]) -> None:
    written = drawn("pull", pushed, tmp_path / "copy", "--all", *at)
    assert re.search(r"pulling .* [0-9.]+/1\.1 MB", written)


@pytest.mark.parametrize("command", ["push", "pull", "ls"])
def test_commands_import_no_heavy_library(
    run: Path, pushed: str, at: list[str], tmp_path: Path, run_python: Callable[[str], str], command: str
) -> None:
    words = {"push": [str(run), pushed], "pull": [pushed, str(tmp_path / "copy")], "ls": [pushed]}[command]
    program = f"""
import contextlib, io, sys
from varvite.cli.application import application
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    code = application.main({[command, *words, *at]!r}, standalone_mode=False)
assert code == 0, code
print(sorted({{"torch", "numpy", "rich"}} & set(sys.modules)))
"""
    assert run_python(program) == "[]"


def test_doctor_of_a_bucket(pushed: str, bucket: Bucket, at: list[str]) -> None:
    before = bucket.content()
    found = {check["name"]: check for check in document("doctor", pushed, *at)["checks"]}
    endpoint = str(bucket.options()["endpoint"])
    assert (found["bucket"]["facts"]["url"], found["bucket"]["facts"]["endpoint"]) == (pushed, endpoint)
    assert found["credentials"]["value"] == "the options"
    assert (found["put if absent"]["value"], found["compare and swap"]["value"]) == ("works", "works")
    assert found["snapshots"]["value"] == "3, all manifests readable"
    assert "writer" not in found
    assert bucket.content() == before


def test_doctor_of_a_bucket_that_holds_nothing_yet(bucket: Bucket, at: list[str]) -> None:
    found = {check["name"]: check for check in document("doctor", bucket.url, *at)["checks"]}
    assert found["repository"]["value"] == "none yet"
    assert bucket.objects() == {}


def test_doctor_of_a_bucket_that_is_away() -> None:
    found = document("doctor", "s3://bucket/run", *said(DEAD), code=exits.FINDINGS)
    assert (found["ok"], [check["name"] for check in found["checks"]]) == (False, ["bucket", "credentials"])
    assert "onnection refused" in found["checks"][0]["meaning"]


def test_doctor_refuses_a_store_that_ignores_conditions(
    rclone: Any, bucket_on: Callable[..., Bucket]
) -> None:
    bucket = bucket_on(rclone)
    found = document("doctor", bucket.url, *said(bucket.options()), code=exits.FINDINGS)
    assert "conditional" in json.dumps(found["checks"]) or "condition" in json.dumps(found["checks"])
