"""Runs that a signal stops, as processes: one whole snapshot, and an exit code that says run me again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from support import child

from varvite import CheckpointManager
from varvite.training.exits import ExitCode


def stop(folder: Path, where: str, number: int = signal.SIGTERM) -> tuple[int, int]:
    """Runs until a signal to the whole process group stops it; returns exit code and step of the stop."""
    with child("stops", folder, where) as process:
        assert process.stdout.readline() == "running\n", process.stderr.read()
        if where == "save_sync":
            while not any(path.stat().st_size > 1 << 20 for path in staged(folder)):
                assert process.poll() is None
        os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=60)
    assert errors == ""
    words = output.split()
    assert words[:2] == ["stopped", "after"], output
    assert words[-5] == signal.Signals(number).name
    return process.returncode, int(words[2].rstrip(":"))


def staged(folder: Path) -> list[Path]:
    return [path for path in (folder / "tmp").iterdir() if path.exists()]


def check(folder: Path, steps: list[int]) -> None:
    """Opens the repository as the next run does: what was saved is whole, and nothing else is there."""
    with CheckpointManager(folder) as manager:
        assert [info.step for info in manager.snapshots()] == steps
        assert manager.load()["step"] == steps[-1]
        assert manager.verify().ok
        assert staged(folder) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_in_a_step(tmp_path, number):
    code, step = stop(tmp_path, "step", number)
    assert code == ExitCode.RESUMABLE
    check(tmp_path, [step])
    assert stop(tmp_path, "step", number)[0] == ExitCode.RESUMABLE


def test_sigterm_in_an_evaluation(tmp_path):
    assert stop(tmp_path, "eval") == (ExitCode.RESUMABLE, 1)
    check(tmp_path, [1])


def test_sigterm_while_a_save_runs_in_the_background(tmp_path):
    """The step whose save runs is saved once more: only the end of the step has the state of the step."""
    assert stop(tmp_path, "save") == (ExitCode.RESUMABLE, 0)
    check(tmp_path, [0])


def test_sigterm_in_a_save_that_training_waits_for_is_not_followed_by_another(tmp_path):
    assert stop(tmp_path, "save_sync") == (ExitCode.RESUMABLE, 0)
    check(tmp_path, [0])
    assert len(list((tmp_path / "packs").iterdir())) == 1


@pytest.mark.parametrize(
    "method",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.slow),
        pytest.param("forkserver", marks=pytest.mark.slow),
    ],
)
def test_sigterm_with_loader_workers(tmp_path, method):
    """Trap M9. That the process ends at all shows that the shield does not outlive the run."""
    code, step = stop(tmp_path, method)
    assert code == ExitCode.RESUMABLE
    check(tmp_path, [step])


def test_without_the_shield_the_last_save_is_lost(tmp_path):
    """What the shield is for, and that the tests above signal the workers too."""
    with child("stops", tmp_path, "fork-unshielded") as process:
        assert process.stdout.readline() == "running\n", process.stderr.read()
        os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "DataLoader worker" in errors
    with CheckpointManager(tmp_path) as manager:
        assert manager.snapshots() == []


def storm(method: str, times: int, how: str) -> tuple[int, str, str]:
    """Signals a process group without a pause while it starts workers."""
    with child("workers_start", method, times, how) as process:
        assert process.stdout.readline() == "running\n", process.stderr.read()
        while process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            time.sleep(0.001)  # so that the processes get on between two signals
        output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@pytest.mark.parametrize(
    ("method", "times"),
    [
        ("fork", 10),
        pytest.param("spawn", 1, marks=pytest.mark.slow),
    ],
)
def test_workers_are_shielded_from_their_very_start(method, times):
    """Before `worker_init_fn` a worker has torch's handler, or none at all."""
    code, output, errors = storm(method, times, "shielded")
    assert (code, output) == (0, "whole SIGTERM came to rank 0\n"), errors
    # A storm may also hit Python's own tracker of resources while it starts, which then complains.
    assert "DataLoader" not in errors


def test_a_save_that_hangs_is_ended_by_the_hard_timer(tmp_path):
    with child("stops", tmp_path, "hangs") as process:
        assert process.stdout.readline() == "running\n", process.stderr.read()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.TIMED_OUT
    assert errors == "varvite: asked to stop, and the last save was not durable within 0 s\n"


def test_the_second_ctrl_c_ends_a_process_that_does_not_come_to_a_boundary(tmp_path):
    with child("stops", tmp_path, "waits") as process:
        assert process.stdout.readline() == "running\n", process.stderr.read()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked\n", process.stderr.read()
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.endswith("KeyboardInterrupt\n")
