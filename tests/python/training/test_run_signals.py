"""`run_training` under signals to the whole job, in each phase: one whole snapshot, the right exit code.

The runs are forks of one process that has the libraries loaded.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import PROCESSES, lives

from varvite import CheckpointManager
from varvite.training import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAST = 11


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Iterator[Callable[..., int]]:
    """Returns a function that lives one life of a run and returns its exit code."""
    path = os.pathsep.join([str(PROCESSES.parent), *_paths()])
    with (
        (tmp_path_factory.mktemp("errors") / "errors").open("a+") as errors,
        lives("trains", errors=errors, PYTHONPATH=path) as send,
    ):

        def live(
            folder: Path,
            place: str = "",
            signals: tuple[str, ...] = ("SIGTERM",),
            *,
            workers: int = 2,
            poison: bool = False,
            says: str = "",
        ) -> int:
            case = {"folder": str(folder), "place": place, "signals": signals, "workers": workers}
            code = send(**case, poison=poison)
            errors.seek(0)
            said = errors.read()
            errors.truncate(0)
            assert said.rpartition("\n")[0].rpartition("\n")[2] == says
            return code

        yield live


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


@pytest.fixture(scope="module")
def untouched(live, tmp_path_factory) -> str:
    """The last state digest of a run that is left alone."""
    folder = tmp_path_factory.mktemp("untouched")
    assert live(folder) == ExitCode.FINISHED
    return digest_of(folder)


def digest_of(folder: Path) -> str:
    with CheckpointManager(folder, read_only=True) as manager:
        return manager.info(LAST).digest


def steps_of(folder: Path) -> list[int]:
    """Returns the steps of what the next run finds when it opens the repository, which is whole."""
    with CheckpointManager(folder) as manager:
        assert manager.verify().ok
        return [info.step for info in manager.snapshots()]


PLACES = {
    "restoring": [0],
    "restored": [0],
    "data": [0],
    "step 2": [2],
    "stepped 2": [2],
    "evaluation": [3],
    "saving 4": [4, 5],
    "staged 4": [4, 5],
    "saved 4": [4, 5],
    "stepped 4": [4],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_is_saved_once_at_the_next_boundary_and_goes_on_as_if_untouched(
    tmp_path, live, untouched, place
):
    assert live(tmp_path, place, ("SIGTERM", "SIGTERM")) == ExitCode.RESUMABLE
    steps = steps_of(tmp_path)
    assert steps == PLACES[place] or (place == "saved 4" and steps[0] == 4 and len(steps) == 2)
    assert live(tmp_path) == ExitCode.FINISHED
    assert digest_of(tmp_path) == untouched


@pytest.mark.parametrize("place", ["stepped 11", "saving 11", "saved 11", "ended", "tear-down"])
def test_at_the_end_of_a_run_a_signal_changes_nothing(tmp_path, live, untouched, place):
    assert live(tmp_path, place) == ExitCode.FINISHED
    assert steps_of(tmp_path) == [4, 9, 11]
    assert digest_of(tmp_path) == untouched


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", ExitCode.RESUMABLE), ("SIGKILL", -signal.SIGKILL)])
def test_a_rollback_is_not_undone_by_what_ends_the_run_after_it(tmp_path, live, name, code):
    assert live(tmp_path / "alone", poison=True) == ExitCode.FINISHED
    assert live(tmp_path / "ended", "rolled back", (name,), poison=True) == code
    assert steps_of(tmp_path / "ended") == ([4, 5] if name == "SIGTERM" else [4])
    assert live(tmp_path / "ended") == ExitCode.FINISHED
    assert digest_of(tmp_path / "ended") == digest_of(tmp_path / "alone")


def test_the_second_ctrl_c_ends_the_run_and_what_was_committed_stays(tmp_path, live, untouched):
    assert live(tmp_path, "step 7", ("SIGINT",)) == ExitCode.RESUMABLE
    assert live(tmp_path, "step 10", ("SIGINT", "SIGINT"), says="KeyboardInterrupt") == 1
    assert steps_of(tmp_path) == [4, 7, 9]
    assert live(tmp_path) == ExitCode.FINISHED
    assert digest_of(tmp_path) == untouched
