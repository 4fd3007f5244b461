"""How tests run commands, and how they make and break repositories."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from varvite import CheckpointManager
from varvite.cli.application import application

TERMINAL = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}


def varvite(*arguments: object, **options: Any) -> Result:
    """Runs a command in this process."""
    result = CliRunner().invoke(application, [str(one) for one in arguments], **options)
    if not isinstance(result.exception, (SystemExit, type(None))):
        raise result.exception
    return result


def document(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Runs a command with `--json` and returns its object."""
    result = varvite(*arguments, "--json")
    assert result.exit_code == code, result.stderr
    found = json.loads(result.stdout)
    assert found["schema"] == f"varvite.{arguments[0]}/1"
    return found


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own."""
    command = [sys.executable, "-W", "error", "-m", "varvite", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def save(path: Path, *states: dict[str, Any], **options: Any) -> None:
    """Saves states as steps 0, 1, ... of a repository without generators."""
    with CheckpointManager(path, fsync=False, **options) as manager:
        for step, state in enumerate(states):
            manager.save_sync(step, state, rng=False)


def damage(path: Path, offset: int) -> None:
    """Flips a byte of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


def tree(path: Path) -> dict[str, bytes]:
    """Returns every file below a folder."""
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


def on_terminal(*arguments: object, **environment: str) -> str:
    """Runs a command with stdout on a terminal and returns what it wrote there."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "varvite", *map(str, arguments)]
    base = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        command, stdout=slave, stderr=subprocess.DEVNULL, env={**base, **TERMINAL, **environment}
    ) as running:
        os.close(slave)
        written = b""
        while True:
            try:
                block = os.read(master, 65536)
            except OSError:  # the other side is closed
                break
            if not block:
                break
            written += block
    os.close(master)
    assert running.returncode == 0
    return written.decode()
