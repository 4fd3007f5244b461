"""The example that loses its machines: it runs as the README says, and its verdict can fail."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import clean_environment

if TYPE_CHECKING:
    from types import ModuleType

    from bucket import Bucket

EXAMPLES = Path(__file__).parents[3] / "examples"
EVERYTHING = os.environ.get("VARVITE_TEST_EVERYTHING") == "1"


@pytest.fixture
def spot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import spot

    return spot


def play(place: Path, *arguments: object, timeout: float = 115) -> str:
    """Runs the example in a folder, beside keys for another cloud, and returns what it wrote."""
    command = [sys.executable, str(EXAMPLES / "spot.py"), *map(str, arguments)]
    environment = clean_environment(AWS_ACCESS_KEY_ID="another", AWS_SECRET_ACCESS_KEY="cloud")
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout, cwd=place, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_starts_a_server_loses_its_machines_and_ends_bit_equal(tmp_path: Path) -> None:
    steps, kills = (48, 4) if EVERYTHING else (16, 1)
    written = play(tmp_path, "--folder", "spot", "--steps", steps, "--kills", kills, "--seed", 3)
    assert "the bucket: s3://spot/run" in written
    assert re.search(rf"kills that hit: {kills} of {kills}, in the middle of a push: [0-{kills}]\n", written)
    assert written.endswith("verdict: bit-equal\n")
    rows = [line.split() for line in written.splitlines()]
    compared = {row[0]: row[-1] for row in rows if row and row[-1] in ("equal", "DIFFER")}
    assert {"samples", "loss", "last", "model", "optimizer", "rng", "digest"} <= compared.keys()
    # Nothing of a machine is left: what was compared lay in the bucket.
    assert list((tmp_path / "spot" / "bucket").glob("machine-*")) == []


@pytest.mark.slow
@pytest.mark.skipif(
    not EVERYTHING, reason="set VARVITE_TEST_EVERYTHING=1: it trains as long as the one above"
)
def test_it_takes_any_bucket(tmp_path: Path, quick_bucket: Bucket) -> None:
    options = [word for name, value in quick_bucket.options().items() for word in ("-o", f"{name}={value}")]
    written = play(
        tmp_path,
        *("--folder", tmp_path / "spot", "--steps", 16, "--kills", 1, "--seed", 1),
        *("--bucket", quick_bucket.url, *options),
    )
    assert written.endswith("verdict: bit-equal\n")
    # Under a prefix of its own, so that a run that is there already is left alone.
    assert {name.count("/") for name in quick_bucket.names()} <= {1, 2}
    assert len({name.partition("/")[0] for name in quick_bucket.names()}) == 1


def test_kills_come_between_the_first_save_and_the_last_but_one(spot: ModuleType) -> None:
    for seed in range(50):
        aims = spot.plan_kills(3, 80, random.Random(seed))
        assert sorted(aim.kind for aim in aims) == ["push", "save", "step"]
        assert [10, *(aim.step for aim in aims), 70] == sorted([10, *(aim.step for aim in aims), 70])
    assert [aim.kind for aim in spot.plan_kills(1, 24, random.Random(0))] == ["push"]


def test_cues_of_kills(spot: ModuleType) -> None:
    lines = [
        {"step": 3, "loss": "0x1p+0"},
        {"event": "save", "step": 3},
        {"event": "staged", "step": 3},
        {"event": "resume", "step": 3},
    ]
    for kind, cue in (("step", 0), ("save", 1), ("push", 2)):
        aim = spot.SpotAim(kind, 3, 0.0)
        assert [place for place, line in enumerate(lines) if aim.is_cue(line)] == [cue]
        assert not any(spot.SpotAim(kind, 4, 0.0).is_cue(line) for line in lines)


def test_samples_that_differ_are_found(spot: ModuleType, tmp_path: Path) -> None:
    reference, killed = (spot.SpotRun(name, tmp_path / name, 3) for name in ("reference", "killed"))
    for step, samples in enumerate((7, 8, 9)):
        for run in (reference, killed):
            run.take({"step": step, "loss": "0x1p+0", "samples": samples})
    assert spot.compare_samples(reference, killed).different == []
    killed.take({"step": 1, "loss": "0x1p+0", "samples": 8})
    assert spot.compare_samples(reference, killed).different == []
    killed.take({"step": 1, "loss": "0x1p+0", "samples": 10})
    assert spot.compare_samples(reference, killed).different == ["step 1"]
    reference.steps = 4
    assert spot.compare_samples(reference, killed).different == ["step 1", "step 3"]
