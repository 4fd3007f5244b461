"""What several tests of whole repositories share: bit-exact comparison, child processes, files to damage."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROCESSES = Path(__file__).parent / "processes"


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Asserts that two nests are equal in type, order and every bit; NaN equals NaN of the same bits."""
    assert type(left) is type(right), (where, type(left), type(right))
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert _bits(left) == _bits(right), where
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert left.tobytes() == right.tobytes(), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}.{index}")
    elif isinstance(left, float):
        assert left == right or left != left, where
        assert repr(left) == repr(right), where
    else:
        assert left == right, where


def _bits(tensor: torch.Tensor) -> bytes:
    return raw_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def raw_bytes(value: Any) -> bytes:
    """Returns the bytes of a dense tensor or array."""
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return value.tobytes()


def copy_of(nest: Any) -> Any:
    """Returns a copy of a nest that shares no memory with it."""
    if isinstance(nest, torch.Tensor):
        return nest.detach().clone()
    if isinstance(nest, np.ndarray):
        return nest.copy()
    if isinstance(nest, dict):
        return type(nest)({key: copy_of(value) for key, value in nest.items()})
    if isinstance(nest, list | tuple):
        return type(nest)(copy_of(value) for value in nest)
    return nest


def clean_environment(**more: str) -> dict[str, str]:
    """Returns the environment without what a launcher or a user may have set for Varvite."""
    dropped = ("VARVITE_", "WORLD_SIZE", "RANK", "LOCAL_", "PYTHONWARNINGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, **more}


def command(script: str, *arguments: object) -> list[str]:
    """Returns the command that runs a script of `processes/`."""
    return [sys.executable, "-W", "error", str(PROCESSES / f"{script}.py"), *map(str, arguments)]


def run_child(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of `processes/` to its end."""
    return subprocess.run(
        command(script, *arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=clean_environment(**environment),
    )


@contextlib.contextmanager
def child(script: str, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a script of `processes/`, which is killed at the end if it still runs."""
    process = subprocess.Popen(
        command(script, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(**environment),
    )
    try:
        with process:
            yield process
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
    finally:
        if process.poll() is None:
            process.kill()


@contextlib.contextmanager
def lives(script: str, *, errors: IO[str] | None = None, **environment: str) -> Iterator[Callable[..., int]]:
    """Starts a script of `processes/` that serves lives, with its libraries loaded once.

    Yields a function that has a fork live a case, given as keywords, and returns its exit code.
    """
    process = subprocess.Popen(
        command(script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=clean_environment(**environment),
    )
    assert process.stdout.readline() == "ready\n"

    def live(**case: Any) -> int:
        process.stdin.write(json.dumps(case) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    yield live
    process.stdin.close()
    assert process.wait() == 0
    process.stdout.close()


def packs(folder: Path) -> list[Path]:
    """Returns the packs of a repository, oldest first."""
    return sorted((folder / "packs").iterdir(), key=lambda path: int(path.name.split("-")[0]))


def manifests(folder: Path) -> list[Path]:
    """Returns the manifests of a repository, oldest first."""
    return sorted((folder / "snapshots").glob("*.json"), key=lambda path: int(path.stem))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(bytes(data))


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file below a folder, by its path, but for the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "writer.lock"
    }
