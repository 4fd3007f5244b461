"""Machines that die in a push: the bucket has only whole snapshots, and another machine goes on from them."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import faults
import numpy as np
import pytest
from faults import Fault, only
from looks import assert_loads, assert_pushed, save_steps, state_of
from support import assert_same, lives, packs

from varvite import CheckpointManager, _native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EVERYTHING = os.environ.get("VARVITE_TEST_EVERYTHING") == "1"
POINTS = [
    point
    for point in getattr(_native, "KILL_POINTS", ())
    if point.startswith("put.")  # of each note that a push takes of what it has done
]
PASSAGES = range(1, 100) if EVERYTHING else range(1, 100, 4)
REQUEST_STEP = 1 if EVERYTHING else 4
KILLED = -signal.SIGKILL


class KillClient(Fault):
    """Kills the process that sends the request, before the server hears of it or when it has done it."""

    def __init__(self, process: Path, *, after: bool = False) -> None:
        self._process, self._after = process, after

    def play(self, exchange: faults.Exchange) -> None:
        if self._after:
            exchange.forward()
            exchange.hear()
        else:
            exchange.drop_body()
        os.kill(int(self._process.read_text()), signal.SIGKILL)
        exchange.close(reset=True)


@pytest.fixture(scope="module")
def live() -> Iterator[Callable[..., int]]:
    """Lives one life of a machine, and returns its exit code."""
    with lives("pushes", VARVITE_FSYNC="0") as send:
        yield send


@pytest.fixture
def case(quick_bucket, tmp_path) -> dict:
    """A life that pushes what its folder holds."""
    return {
        "folder": str(tmp_path / "run"),
        "url": quick_bucket.url,
        "options": quick_bucket.options(**PATIENT),
        "process": str(tmp_path / "process"),
        "log": str(tmp_path / "acknowledged"),
        "sync_every": 10_000,
        "what": "push",
        "point": None,
        "nth": 1,
    }


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A folder with three snapshots and a tag, never pushed."""
    folder = tmp_path_factory.mktemp("template") / "run"
    with CheckpointManager(folder) as manager:
        save_steps(manager, 0, 1, 2)
        manager.pin(1, "kept")
    return folder


PATIENT = {"lease_seconds": 86_400.0}
"""The holder is dead, and on this host: who waited for the lease to run out would be seen."""


def check(bucket, case: dict, number: int) -> None:
    """What another machine finds now, and then what the first one makes of it when it comes back."""
    folder = Path(case["folder"])
    steps = bucket.check_whole(folder.with_name(f"look-{number}"))
    assert steps == [0, 1, 2][3 - len(steps) :]  # the newest first
    if steps:  # else a machine that starts now starts another run
        with bucket.manager(folder.with_name(f"fresh-{number}"), remote_options=PATIENT) as manager:
            assert_loads(manager, *steps)
    with bucket.manager(folder, remote_options=PATIENT) as manager:
        assert_loads(manager, 0, 1, 2)
        manager.sync_now()
    # Of a machine that died while it tried whether the server keeps conditions; a later trial removes it.
    probes = bucket.names("uploads/probe-")
    assert len(probes) <= 1
    for name in probes:
        bucket.delete(name)
    assert_pushed(bucket, folder)
    assert bucket.uploads() == []


def reset(bucket, case: dict, template: Path) -> None:
    for name in bucket.names():
        bucket.delete(name)
    shutil.rmtree(case["folder"], ignore_errors=True)
    shutil.copytree(template, case["folder"])


def test_there_are_points_to_be_killed_at():
    assert POINTS


@pytest.mark.timeout(900 if EVERYTHING else 120)
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_a_point_of_a_push(live, quick_bucket, case, template, point):
    """Between what a push does in the bucket and what it notes here, which the points of its notes are."""
    codes = []
    for nth in PASSAGES:
        reset(quick_bucket, case, template)
        codes.append(live(**{**case, "point": point, "nth": nth}))
        check(quick_bucket, case, nth)
        if codes[-1] == 0:
            break
    assert codes == [KILLED] * (len(codes) - 1) + [0]
    assert len(codes) > 1, "the point is never passed"


@pytest.mark.timeout(900 if EVERYTHING else 120)
@pytest.mark.parametrize("after", [False, True], ids=["before it is done", "when it is done"])
def test_a_kill_at_each_request_of_a_push(live, quick_bucket, proxy_before, case, template, after, tmp_path):
    proxy = proxy_before(quick_bucket)
    case["options"]["endpoint"] = proxy.endpoint
    codes = []
    for number in range(1, 400, REQUEST_STEP):
        reset(quick_bucket, case, template)
        proxy.clear()
        proxy.add(KillClient(tmp_path / "process", after=after), when=only(number))
        codes.append(live(**case))
        proxy.clear()
        check(quick_bucket, case, number)
        if codes[-1] == 0:
            break
    assert codes == [KILLED] * (len(codes) - 1) + [0]
    assert len(codes) > 2


@pytest.mark.timeout(900 if EVERYTHING else 120)
def test_a_kill_at_each_request_of_a_load(live, quick_bucket, proxy_before, case, template, tmp_path):
    reset(quick_bucket, case, template)
    assert live(**case) == 0
    proxy = proxy_before(quick_bucket)
    case["options"]["endpoint"] = proxy.endpoint
    codes = []
    for number in range(1, 400, REQUEST_STEP):
        proxy.clear()
        proxy.add(KillClient(tmp_path / "process"), when=only(number))
        folder = tmp_path / f"fresh-{number}"
        codes.append(live(**{**case, "folder": str(folder), "what": "load"}))
        proxy.clear()
        with quick_bucket.manager(folder, remote_options=PATIENT) as manager:
            assert_loads(manager, 0, 1, 2)
        if codes[-1] == 0:
            break
    assert codes == [KILLED] * (len(codes) - 1) + [0]
    assert len(codes) > 1


PART_BYTES = 5 << 20


@pytest.mark.parametrize(("operation", "number"), [("put_part", 2), ("put_part", 4), ("complete_upload", 1)])
def test_parts_that_were_sent_before_a_kill_are_not_sent_again(
    live, quick_bucket, proxy_before, case, tmp_path, operation, number
):
    state = {"w": np.random.default_rng(0).integers(0, 256, 3 * PART_BYTES, dtype=np.uint8)}
    with CheckpointManager(tmp_path / "run", compression="none") as manager:
        manager.save_sync(0, state, rng=False)
    (pack,) = packs(tmp_path / "run")
    length_bytes = pack.stat().st_size
    proxy = proxy_before(quick_bucket)
    case["options"].update(endpoint=proxy.endpoint, part_bytes=PART_BYTES, parallel=1)
    proxy.add(KillClient(tmp_path / "process"), operation=operation, when=only(number))
    assert live(**case) == KILLED
    assert quick_bucket.seqs() == []
    sent = [one.up_bytes for one in proxy.matching("put_part") if one.fault is None]
    assert len(sent) == (number - 1 if operation == "put_part" else 4)
    proxy.clear()
    assert live(**case) == 0
    left_bytes = length_bytes - sum(sent)
    # The last part before a kill may not be noted yet.
    again_bytes = PART_BYTES if operation == "put_part" else 0
    moved_bytes = sum(one.up_bytes for one in proxy.matching("put_part"))
    assert left_bytes <= moved_bytes <= left_bytes + again_bytes
    assert_pushed(quick_bucket, tmp_path / "run")
    assert quick_bucket.uploads() == []
    with quick_bucket.reader() as reader:
        assert_same(dict(reader.load()), state)


@pytest.mark.timeout(900 if EVERYTHING else 120)
def test_a_run_goes_from_machine_to_machine(live, quick_bucket, proxy_before, case, tmp_path):
    """Each is killed at a random request and its folder is gone: what was pushed for sure is never lost."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    rng = random.Random(seed)
    proxy = proxy_before(quick_bucket)
    case["options"]["endpoint"] = proxy.endpoint
    log = tmp_path / "acknowledged"
    for number in range(40 if EVERYTHING else 4):
        proxy.clear()
        proxy.add(KillClient(tmp_path / "process", after=rng.random() < 0.5), when=only(rng.randrange(1, 80)))
        folder = tmp_path / f"machine-{number}"
        life = {**case, "folder": str(folder), "what": "train", "sync_every": rng.choice([1, 10_000])}
        assert live(**life) == KILLED
        shutil.rmtree(folder, ignore_errors=True)
        with quick_bucket.reader() as reader:
            newest = reader.load_latest()
            acknowledged = [int(line) for line in log.read_text().split()] if log.exists() else []
            found = -1 if newest is None else newest.step
            assert found >= max(acknowledged, default=-1)
            if newest is not None:
                assert_same(dict(newest), state_of(found))
                assert reader.verify().ok
    assert log.exists()
