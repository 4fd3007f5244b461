"""The command line as a whole: exit codes, imports, pipes and terminals."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TERMINAL, on_terminal, process, save, tree, varvite

from varvite import errors
from varvite.cli import exits
from varvite.cli.text import ago, printable


@pytest.mark.parametrize("command", ["ls", "show", "verify", "du"])
def test_a_place_without_a_repository_has_its_own_code(tmp_path: Path, command: str) -> None:
    result = varvite(command, tmp_path / "absent")
    assert (result.exit_code, result.stdout) == (exits.NO_REPOSITORY, "")
    assert result.stderr.startswith(f"error: no repository in `{tmp_path}/absent`")
    assert "\nhint: check the path" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "{run}", "77"], exits.NOT_FOUND),
        (["verify", "{run}", "tag:none"], exits.NOT_FOUND),
        (["diff", "{run}", "10", "77"], exits.NOT_FOUND),
        (["show", "{run}", "odd:1"], exits.USAGE),
        (["show", "{run}", "--tree", "--structure"], exits.USAGE),
        (["show", "{run}", "--depth", "2"], exits.USAGE),
        (["du", "{run}", "10", "--by", "snapshot"], exits.USAGE),
        (["ls"], exits.USAGE),
        (["ls", "{run}", "--frob"], exits.USAGE),
        (["frob"], exits.USAGE),
        (["ls", "s3://bucket/run", "-o", "part_bytes=1"], exits.USAGE),
    ],
)
def test_errors_have_codes_and_one_form(run: Path, arguments: list[str], code: int) -> None:
    result = varvite(*(one.format(run=run) for one in arguments))
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.StoreError("cannot write", errno=errno.ENOSPC), 13),
        (errors.StoreError("cannot write", errno=errno.EDQUOT), 13),
        (errors.StoreError("cannot write", errno=errno.EIO), 1),
        (errors.NotARepositoryError("no repository"), 10),
        (errors.SnapshotNotFoundError("no snapshot"), 4),
        (errors.TensorNotFoundError("no tensor"), 4),
        (errors.RepositoryLockedError("locked"), 11),
        (errors.CorruptionError("corrupt"), 3),
        (errors.InvalidInputError("invalid"), 2),
        (errors.InternalError("internal"), 1),
    ],
)
def test_exit_codes_of_errors(error: errors.CheckpointError, code: int) -> None:
    assert exits.exit_code(error) == code


def test_reading_changes_nothing(run: Path) -> None:
    before = tree(run)
    for arguments in (
        ["ls", run],
        ["show", run],
        ["diff", run, "10", "20"],
        ["du", run],
        ["doctor", run],
        ["receipts", run],
    ):
        assert varvite(*arguments).exit_code in (exits.OK, exits.FINDINGS)
    assert tree(run) == before


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        ("['--help']", "torch numpy rich varvite._native"),
        ("['ls', RUN, '--json']", "torch numpy rich"),
        ("['ls', RUN]", "torch numpy rich"),
        ("['show', RUN, '--structure']", "torch numpy rich"),
        ("['diff', RUN, '10', '10']", "torch numpy rich"),
        ("['diff', RUN, '10', '30']", "torch rich"),
        ("['verify', RUN]", "torch numpy rich"),
        ("['du', RUN, '10']", "torch numpy rich"),
        ("['prune', RUN, '--keep-last', '1', '-n']", "torch numpy rich"),
        ("['doctor', RUN]", "torch numpy rich"),
    ],
)
def test_commands_import_no_heavy_library(run: Path, run_python: Any, arguments: str, absent: str) -> None:
    program = f"""
import contextlib, io, sys
RUN = {str(run)!r}
from varvite.cli.application import application
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    application.main({arguments}, standalone_mode=False)
print(sorted(set({absent!r}.split()) & set(sys.modules)))
"""
    assert run_python(program) == "[]"


def test_it_runs_as_a_module_and_ends_with_the_code(run: Path) -> None:
    done = process("ls", run, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "seq:1\nseq:3\nseq:4\n", "")
    done = process("show", run, "77")
    assert (done.returncode, done.stdout) == (exits.NOT_FOUND, "")
    assert process("--version").stdout.startswith("varvite, version ")


def test_a_reader_that_stops_ends_the_command_silently(tmp_path: Path) -> None:
    save(tmp_path / "run", {f"tensor_{index:05}": torch.ones(1) for index in range(5000)})
    command = [sys.executable, "-W", "error", "-m", "varvite", "show", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == exits.PIPE_CLOSED


def test_a_name_that_the_console_lacks_ends_no_command(tmp_path: Path) -> None:
    save(tmp_path / "run", {"größe语": torch.ones(1)})
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = process("show", tmp_path / "run", env=environment, encoding="latin-1")
    assert done.returncode == 0
    assert "größe\\u8bed  float32" in done.stdout


def test_a_terminal_gets_colours_unless_it_does_not_want_them(run: Path) -> None:
    red = "\x1b[1;31m1 not finite"
    assert red in on_terminal("ls", run)
    for written in (on_terminal("ls", run, NO_COLOR="1"), on_terminal("ls", run, "--color", "never")):
        assert "31m" not in written
        assert "1 not finite" in written
    assert red in on_terminal("ls", run, "--color", "always", NO_COLOR="1")
    assert "\x1b" not in process("ls", run).stdout
    assert red in process("ls", run, "--color", "always", env={**os.environ, **TERMINAL}).stdout


def test_a_bar_is_drawn_on_a_terminal_only(run: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "varvite", "verify", str(run)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=slave, env={**os.environ, **TERMINAL}, check=False
        )
        assert done.returncode == 0
        assert b"verifying" in os.read(master, 65536)
    finally:
        os.close(slave)
        os.close(master)
    assert process("verify", run).stderr == ""


def test_texts_for_people() -> None:
    assert [ago(0, seconds * 1000) for seconds in (0, 59, 61, 3600, 200_000)] == [
        "now",
        "59 s ago",
        "1 min ago",
        "1 h ago",
        "2 d ago",
    ]
    assert printable("a\tb\u202e") == "a\\tb\\u202e"
