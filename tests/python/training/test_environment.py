"""The description of a run's environment: what it says, what it never says, and what it leaves alone."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support import clean_environment

import varvite
from varvite.training import environment
from varvite.training.environment import describe_environment

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _forget_the_source() -> None:
    environment._git.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *name, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in a repository with one commit, which the process takes for its own."""
    folder = tmp_path / "source"
    (folder / "inner").mkdir(parents=True)
    path = folder / "inner" / "train.py"
    path.write_text("pass\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(path)))
    return path


def test_versions_are_those_of_what_the_program_uses() -> None:
    versions = describe_environment()["versions"]
    assert versions.pop("cuda", None) == torch.version.cuda
    assert versions == {
        "varvite": varvite.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def test_it_is_plain_json_and_says_which_machine() -> None:
    found = describe_environment()
    assert json.loads(json.dumps(found)) == found
    assert found["host"] == platform.node()
    assert found["platform"] == platform.platform()


def test_settings_that_decide_about_bits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads = torch.get_num_threads()
    before = describe_environment()["torch"]
    assert (before["deterministic_algorithms"], before["cudnn_benchmark"]) == (False, False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    try:
        found = describe_environment()["torch"]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = False
    assert (found["deterministic_algorithms"], found["deterministic_warn_only"]) == (True, True)
    assert (found["threads"], found["cudnn_benchmark"]) == (1, True)
    assert found["cublas_workspace"] == ":4096:8"
    assert found["devices"] == []


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("pass", "none none"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32 none"),
        ("torch.backends.fp32_precision = 'tf32'", "tf32 tf32"),
        ("torch.set_float32_matmul_precision('medium')", "tf32 bf16"),
    ],
)
def test_the_precision_of_products_is_told_whichever_way_it_was_set(
    run_python: Callable[[str], str], setting: str, expected: str
) -> None:
    program = f"""
import torch
from varvite.training.environment import describe_environment
{setting}
found = describe_environment()["torch"]
print(found["cuda_matmul_precision"], found["cpu_matmul_precision"])
"""
    assert run_python(program) == expected


def test_devices_are_named_only_where_they_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["H200", "H200", "A100"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    assert describe_environment()["torch"]["devices"] == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert describe_environment()["torch"]["devices"] == ["A100", "H200"]


def test_launchers_are_named_and_nothing_else_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment._LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2" * 500)
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-the-user")
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "another-secret"])
    found = describe_environment()
    assert found["launcher"] == {"SLURM_JOB_ID": "4711", "TORCHELASTIC_RESTART_COUNT": "2" * 200}
    assert "secret" not in json.dumps(found)


def test_the_source_is_the_commit_of_the_programs_folder(program: Path) -> None:
    commit = git(program.parent, "rev-parse", "HEAD")
    (program.parent / "notes.txt").write_text("not tracked")
    assert describe_environment()["git"] == {"commit": commit, "dirty": False}
    program.write_text("changed\n")
    environment._git.cache_clear()
    assert describe_environment()["git"] == {"commit": commit, "dirty": True}


def test_a_repository_that_the_environment_names_is_not_taken_for_it(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = git(program.parent, "rev-parse", "HEAD")
    git(tmp_path, "init", "-q", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert describe_environment()["git"] == {"commit": commit, "dirty": False}


def test_the_source_is_read_once_a_process(program: Path) -> None:
    first = describe_environment()["git"]
    shutil.rmtree(program.parents[1] / ".git")
    assert describe_environment()["git"] == first


def test_the_index_of_the_source_is_not_written(program: Path) -> None:
    index = program.parents[1] / ".git" / "index"
    os.utime(program, (0, 0))  # an index that is out of date, which `git status` would refresh
    before = index.read_bytes()
    assert describe_environment()["git"]["dirty"] is False
    assert index.read_bytes() == before


def test_a_program_named_by_the_repository_is_not_started(program: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o755)
    git(program.parent, "config", "core.fsmonitor", str(trap))
    assert describe_environment()["git"] is not None
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("lack", ["repository", "commit", "git", "file", "answer"])
def test_where_there_is_no_source_to_name_there_is_none(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lack: str
) -> None:
    if lack in ("repository", "commit"):
        shutil.rmtree(program.parents[1] / ".git")
    if lack == "commit":
        git(program.parents[1], "init", "-q")
    if lack == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    if lack == "file":
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())
    if lack == "answer":
        slow = tmp_path / "git"
        slow.write_text("#!/bin/sh\nexec sleep 60\n")
        slow.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(environment, "_GIT_SECONDS", 0.05)
    assert describe_environment()["git"] is None


def test_nothing_is_imported_for_it() -> None:
    program = """
import sys
from varvite.training.environment import describe_environment
found = describe_environment()
print(found["torch"], sorted(found["versions"]), "torch" in sys.modules, "numpy" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=clean_environment(),
    )
    assert done.stdout.strip() == "None ['python', 'varvite'] False False"


def test_no_random_number_is_drawn() -> None:
    from support import assert_same

    from varvite.training import rng

    before: Any = rng.capture()
    describe_environment()
    assert_same(rng.capture(), before)
