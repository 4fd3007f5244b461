"""A run that is killed is equal to one that never was: batches, draws, losses, weights, moments, bit for bit.

Every run is killed twice at the same named point, once with each of two snapshots to go back to, and then
left to its end. The runs are forks of one process that has the libraries loaded.
"""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from support import lives

from varvite import CheckpointManager, _native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KINDS = ["sgd", "foreach", "fused", "bf16", "scaler", "step_lr", "cosine"]
EDGES = {"mid-epoch": 5, "epoch edge": 7}
# Those of the engine but for merges and pushes; `save.copied` is passed with tensors that are copied in the
# background, and these are small.
NATIVE = [
    point
    for point in _native.KILL_POINTS
    if not point.startswith(("merge.", "recover.", "sync.")) and point != "save.copied"
]
IN_PYTHON = [
    "update.before",
    "update.after",
    "step.done",
    "save.before",
    "save.staged_in_python",
    "save.heard_of",
    "resume.restored",
]
AT_OPEN = [point for point in _native.KILL_POINTS if point.startswith("recover.")]
FEW = ["update.after", "save.first_chunk", "commit.published"]
EVERYTHING = os.environ.get("VARVITE_TEST_EVERYTHING") == "1"
"""All points with all kinds, edges and workers: minutes. Else two rows of that, a few points of others."""

CASES = [
    (kind, edge, workers, point)
    for kind in KINDS
    for edge in EDGES
    for workers in (0, 2)
    for point in [*NATIVE, *IN_PYTHON, *AT_OPEN]
    if EVERYTHING or ((edge == "epoch edge") == (workers == 2) and (kind == "foreach" or point in FEW))
]


@pytest.fixture(scope="module")
def live() -> Iterator[Callable[..., int]]:
    """Returns a function that lives one life of a run and returns its exit code."""
    with lives("exact_training") as send:

        def live(folder: Path, kind: str, edge: str, workers: int, point: str = "") -> int:
            case = {"folder": str(folder), "kind": kind, "every": EDGES[edge], "workers": workers}
            return send(**case, point=point, native=NATIVE)

        yield live


@pytest.fixture(scope="module")
def untouched(live, tmp_path_factory) -> Callable[..., tuple[dict[int, Any], str]]:
    """Returns a function that gives the steps and the last state digest of a run that is left alone."""
    known: dict[tuple[str, str, int], tuple[dict[int, Any], str]] = {}

    def run(kind: str, edge: str, workers: int) -> tuple[dict[int, Any], str]:
        key = (kind, edge, workers)
        if key not in known:
            folder = tmp_path_factory.mktemp("untouched")
            assert live(folder, *key) == 0
            known[key] = (steps_of(folder), digest_of(folder))
        return known[key]

    return run


def steps_of(folder: Path) -> dict[int, Any]:
    """Returns what each step did. A step that was done again did the same again."""
    steps: dict[int, Any] = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert steps.setdefault(row["step"], row) == row
    return steps


def digest_of(folder: Path) -> str:
    with CheckpointManager(folder / "checkpoints", read_only=True) as manager:
        return manager.info().digest


@pytest.mark.parametrize(("kind", "edge", "workers", "point"), CASES)
def test_a_run_killed_twice_is_equal_to_one_left_alone(tmp_path, live, untouched, kind, edge, workers, point):
    case = (kind, edge, workers)
    if point in AT_OPEN:
        # What recovery finds to do: a whole pack without its manifest, or staged files.
        before = "commit.pack_durable" if point == "recover.published" else "publish.synced"
        assert live(tmp_path, *case, before) == -signal.SIGKILL
        assert live(tmp_path, *case, point) == -signal.SIGKILL
    else:
        assert live(tmp_path, *case, point) == -signal.SIGKILL
        assert live(tmp_path, *case, point) == -signal.SIGKILL
    assert live(tmp_path, *case) == 0
    steps, digest = untouched(*case)
    found = steps_of(tmp_path)
    assert list(found) == list(range(5 * EDGES[edge]))
    assert found == steps
    assert digest_of(tmp_path) == digest


def test_the_runs_do_what_they_are_to_show(untouched):
    """Nothing is proven by runs that skip no update, or whose draws and orders are all alike."""
    steps, _ = untouched("scaler", "mid-epoch", 0)
    assert {row["updated"] for row in steps.values()} == {True, False}
    assert len({row["draws"][0] for row in steps.values()}) == len(steps)
    first, second = (
        [sample for step in range(start, start + 7) for sample in steps[step]["samples"]] for start in (0, 7)
    )
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
