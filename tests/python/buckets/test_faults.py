"""Each fault at each request of a push and of a load: no half snapshot, no wrong bytes, and on it goes.

In a usual run the first request of each kind meets it, of one walk where the client has to come through; with
`VARVITE_TEST_EVERYTHING=1` every request, each in a walk of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import faults
import numpy as np
import pytest
from bucket import Bucket
from faults import Fault, Rule, from_on, only
from looks import assert_loads, assert_pushed, ours_in, save_steps, sent_from, state_of
from proxy import Proxy
from support import assert_same

from varvite import CheckpointManager
from varvite.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

EVERYTHING = os.environ.get("VARVITE_TEST_EVERYTHING") == "1"
REQUESTS = 400
"""More than any of these walks needs: a loop that comes here does not end."""
OPTIONS = {"retry_seconds": 3.0, "timeout_seconds": 0.7, "takeover": True}
"""A client that tries again, is not patient, and takes the place of its earlier lives at once."""

# Faults that say nothing about the object: the client has to come through as if nothing had happened.
PASSING: list[Fault] = [
    faults.SLOW_DOWN,
    faults.TOO_MANY,
    faults.INTERNAL,
    faults.CONFLICTING,
    faults.ResetBefore(),
    faults.ResetInRequest(),
    faults.LostReply(),
    faults.HalfReply(),
    faults.ShortReply(),
    faults.Twice(),
    faults.Silent(),
    faults.Slow(bytes_per_second=2_000_000),
    faults.Skew(seconds=-7 * 86_400),
]
# Faults that it may give up at, or be misled by, and that must do no harm.
TROUBLING: list[Fault] = [faults.DENIED, faults.EXPIRED, faults.SKEWED, faults.StaleList()]
KINDS_OF_A_PUSH = [
    ("list", "*"),
    ("get", "*"),
    ("put", "*/lease.json"),
    ("put", "*/varvite.json"),
    ("put", "*/packs/*"),
    ("put", "*/snapshots/*"),
    ("put", "*/tags/*"),
    ("delete*", "*"),
]
KINDS_OF_A_LOAD = [("list", "*"), ("get", "*/lease.json"), ("get", "*/snapshots/*"), ("get", "*/packs/*")]


@dataclass(frozen=True)
class Scene:
    """A bucket with two snapshots, and a folder that has gone on: one more, one deleted, a tag moved."""

    bucket: Bucket
    proxy: Proxy
    folder: Path
    content: dict[str, bytes]
    work: Path

    def set(self) -> Path:
        """Puts everything back to how it was; returns a copy of the folder."""
        for name in self.bucket.names():
            if name not in self.content:
                self.bucket.delete(name)
        for name, data in self.content.items():
            self.bucket.put(name, data)
        shutil.rmtree(self.work, ignore_errors=True)
        self.proxy.clear()
        return shutil.copytree(self.folder, self.work / "folder")

    def manager(self, folder: Path, *, is_direct: bool = False, **options) -> CheckpointManager:
        endpoint = None if is_direct else self.proxy.endpoint
        options = {**OPTIONS, **options}
        return self.bucket.manager(folder, endpoint=endpoint, sync_every=10_000, remote_options=options)

    def check_bucket(self) -> None:
        """Asserts that every manifest in the bucket has all its packs whole."""
        look = self.work / "look"
        steps = self.bucket.check_whole(look)
        assert steps[-1:] in ([1], [2])
        shutil.rmtree(look)


@pytest.fixture(scope="module")
def scene(seaweedfs, tmp_path_factory) -> Iterator[Scene]:
    place = tmp_path_factory.mktemp("scene")
    folder, bucket = place / "run", Bucket(seaweedfs, place.name)
    with contextlib.closing(bucket):
        with bucket.manager(folder, sync_every=10_000, remote_options=OPTIONS) as manager:
            save_steps(manager, 0, 1)
            manager.pin(0, "kept")
            manager.pin(1, "moved")
            manager.sync_now()
        content = bucket.content()
        # Beside a dead bucket: nothing of this is mirrored yet.
        with Proxy(seaweedfs.port) as dead, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            dead.go_down()
            options = {**OPTIONS, "retry_seconds": 0.05}
            manager = bucket.manager(
                folder, endpoint=dead.endpoint, sync_every=10_000, remote_options=options
            )
            save_steps(manager, 2)
            for name in ("kept", "moved"):
                manager.unpin(name)
            manager.delete(0)
            manager.pin(2, "moved")
            with contextlib.suppress(CheckpointError):
                manager.close()
        with Proxy(seaweedfs.port) as proxy:
            yield Scene(bucket, proxy, folder, content, place / "work")


def ends(call: Callable[[], None]) -> str:
    """Returns how a call ends: an error of another kind, or a wrong value, is for the test to fail of."""
    try:
        call()
    except CheckpointError:
        return "failed"
    return "done"


def push(scene: Scene, folder: Path, **options) -> None:
    """Opens the folder, pushes and closes; raises the first failure."""
    manager = scene.manager(folder, **options)
    try:
        manager.sync_now()
    finally:
        with contextlib.suppress(CheckpointError):
            manager.close()


def check_push(scene: Scene, folder: Path, before: dict[str, bytes]) -> None:
    """What has to hold after a push that went wrong anywhere, and that another one puts everything right."""
    assert sent_from(folder) == before
    scene.check_bucket()
    push(scene, folder, is_direct=True)
    assert_pushed(scene.bucket, folder)
    assert sent_from(folder) == before


Target = tuple[str, str, int]
"""Which request meets a fault: operation, key and number."""


def targets(fault: Fault, kinds: list[tuple[str, str]]) -> Iterator[list[Target]]:
    """Yields the requests of one walk that are to meet a fault."""
    if fault is faults.CONFLICTING:
        # Two conditional writes at once: nothing else is answered so.
        kinds = [(operation, key) for operation, key in kinds if operation == "put"]
    if EVERYTHING:
        operation = "put" if fault is faults.CONFLICTING else "*"
        yield from ([(operation, "*", number)] for number in range(1, REQUESTS))
    elif fault in PASSING:
        yield [(operation, key, 1) for operation, key in kinds]
    else:
        # A walk that gives up at one kind never comes to the next.
        last = ("*/packs/*", "*/snapshots/*") if fault in (faults.EXPIRED, faults.SKEWED) else ("*",)
        yield from ([(operation, key, 1)] for operation, key in kinds if key in last or last == ("*",))


def set_rules(proxy: Proxy, fault: Fault, met: list[Target]) -> list[Rule]:
    """Has requests meet a fault."""
    return [
        proxy.add(fault, operation=operation, key=key, when=only(number)) for operation, key, number in met
    ]


@pytest.mark.filterwarnings("ignore:pushing to:RuntimeWarning")
@pytest.mark.timeout(1_800 if EVERYTHING else 120)
@pytest.mark.parametrize("fault", [*PASSING, *TROUBLING], ids=lambda fault: fault.name)
def test_a_push_meets_a_fault_once(scene, fault):
    fired = 0
    for met in targets(fault, KINDS_OF_A_PUSH):
        folder = scene.set()
        before = sent_from(folder)
        rules = set_rules(scene.proxy, fault, met)
        if fault in PASSING:
            push(scene, folder)
            assert_pushed(scene.bucket, folder)
        else:
            ends(lambda folder=folder: push(scene, folder))
        fired += sum(rule.fired for rule in rules)
        check_push(scene, folder, before)
        if EVERYTHING and rules[0].matched < met[0][2]:
            break
    else:
        assert not EVERYTHING, "the push never ends"
    assert fired > 0


@pytest.mark.filterwarnings("ignore:pushing to:RuntimeWarning")
@pytest.mark.timeout(1_800 if EVERYTHING else 120)
@pytest.mark.parametrize(
    "fault",
    [faults.SLOW_DOWN, faults.DENIED, faults.ResetBefore(), faults.LostReply()],
    ids=lambda one: one.name,
)
def test_a_push_meets_a_fault_for_ever(scene, fault):
    outcomes = set()
    for number in itertools.count(1, 1 if EVERYTHING else 6):
        assert number < REQUESTS, "the push never ends"
        folder = scene.set()
        before = sent_from(folder)
        rule = scene.proxy.add(fault, when=from_on(number))
        outcomes.add(ends(lambda folder=folder: push(scene, folder, retry_seconds=0.1)))
        check_push(scene, folder, before)
        if rule.matched < number:
            break
    assert outcomes == {"failed", "done"}


# Loads


@pytest.fixture(scope="module")
def full(scene) -> Scene:
    """The scene with everything pushed."""
    folder = scene.set()
    push(scene, folder, is_direct=True)
    return Scene(scene.bucket, scene.proxy, scene.folder, scene.bucket.content(), scene.work)


def look(manager: CheckpointManager, *, exact: bool) -> None:
    """Asserts that a manager loads what is there; where not `exact`, that what it loads is no other state."""
    if exact:
        assert_loads(manager, 1, 2)
        assert_same(dict(manager.load("tag:moved")), state_of(2))
        return
    newest = manager.load_latest()
    assert newest is not None
    assert_same(dict(newest), state_of(newest.step))


def load_by_writer(scene: Scene, folder: Path, *, exact: bool = True, **options) -> None:
    with scene.manager(folder, **options) as manager:
        look(manager, exact=exact)


def load_by_reader(scene: Scene, _folder: Path, *, exact: bool = True, **options) -> None:
    with scene.bucket.reader(endpoint=scene.proxy.endpoint, **{**OPTIONS, **options}) as reader:
        look(reader, exact=exact)


@pytest.mark.timeout(1_800 if EVERYTHING else 120)
@pytest.mark.parametrize("load", [load_by_writer, load_by_reader])
@pytest.mark.parametrize(
    "fault",
    [fault for fault in [*PASSING, *TROUBLING] if fault is not faults.CONFLICTING],
    ids=lambda fault: fault.name,
)
def test_a_load_meets_a_fault_once(full, fault, load):
    fired = 0
    there = {name: data for name, data in full.content.items() if name != "lease.json"}
    for met in targets(fault, KINDS_OF_A_LOAD):
        full.set()
        folder = full.work / "fresh"
        rules = set_rules(full.proxy, fault, met)
        if fault in PASSING:
            load(full, folder)
        else:
            ends(lambda folder=folder: load(full, folder, exact=False))
        fired += sum(rule.fired for rule in rules)
        full.proxy.clear()
        load(full, folder)
        assert ours_in(full.bucket) == there
        if EVERYTHING and rules[0].matched < met[0][2]:
            break
    else:
        assert not EVERYTHING, "the load never ends"
    assert fired > 0


@pytest.mark.timeout(1_800 if EVERYTHING else 120)
@pytest.mark.parametrize("load", [load_by_writer, load_by_reader])
@pytest.mark.parametrize("fault", [faults.SLOW_DOWN, faults.HalfReply()], ids=lambda one: one.name)
def test_a_load_meets_a_fault_for_ever(full, fault, load):
    outcomes = set()
    for number in itertools.count(1, 1 if EVERYTHING else 10):
        assert number < REQUESTS, "the load never ends"
        full.set()
        folder = full.work / "fresh"
        rule = full.proxy.add(fault, when=from_on(number))
        outcomes.add(ends(lambda folder=folder: load(full, folder, retry_seconds=0.1)))
        full.proxy.clear()
        load(full, folder)
        if rule.matched < number:
            break
    assert outcomes == {"failed", "done"}


# Objects in parts

PART_BYTES = 5 << 20
PART_COUNT = 3
IN_PARTS = {**OPTIONS, "timeout_seconds": 5.0, "part_bytes": PART_BYTES, "parallel": 1}
QUICK_FAULTS = [faults.SLOW_DOWN, faults.ResetInRequest(), faults.LostReply(), faults.Twice()]


def large_state() -> dict[str, np.ndarray]:
    length_bytes = (PART_COUNT - 1) * PART_BYTES + 100_000
    return {"w": np.random.default_rng(0).integers(0, 256, length_bytes, dtype=np.uint8)}


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "run"
    with CheckpointManager(folder, compression="none") as manager:
        manager.save_sync(0, large_state(), rng=False)
    return folder


@pytest.mark.timeout(600 if EVERYTHING else 120)
@pytest.mark.parametrize("fault", PASSING if EVERYTHING else QUICK_FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize(
    ("operation", "number"), [("begin_upload", 1), ("put_part", 2), ("complete_upload", 1)]
)
def test_an_upload_in_parts_meets_a_fault_once(
    quick_bucket, proxy_before, large_folder, tmp_path, fault, operation, number
):
    proxy = proxy_before(quick_bucket)
    folder = shutil.copytree(large_folder, tmp_path / "run")
    rule = proxy.add(fault, operation=operation, when=only(number))
    with quick_bucket.manager(folder, endpoint=proxy.endpoint, remote_options=IN_PARTS) as manager:
        manager.sync_now()
    assert rule.fired == 1
    assert_pushed(quick_bucket, folder)
    # An upload that was begun twice is known to nobody by its first name.
    # (Half of a request without a body is all of it.)
    in_doubt = isinstance(fault, faults.Twice | faults.LostReply | faults.ResetInRequest)
    lost = in_doubt and operation == "begin_upload"
    assert len(quick_bucket.uploads()) <= (1 if lost else 0)
    assert sum(one.up_bytes for one in proxy.matching("put_part")) <= (PART_COUNT + 1) * PART_BYTES
    with quick_bucket.reader() as reader:
        assert_same(dict(reader.load()), large_state())


def test_an_error_in_the_answer_to_the_end_of_an_upload(quick_bucket, proxy_before, large_folder, tmp_path):
    proxy = proxy_before(quick_bucket)
    folder = shutil.copytree(large_folder, tmp_path / "run")
    rule = proxy.add(faults.ERROR_IN_SUCCESS, operation="complete_upload", when=only(1))
    with quick_bucket.manager(folder, endpoint=proxy.endpoint, remote_options=IN_PARTS) as manager:
        manager.sync_now()
    assert rule.fired == 1
    assert_pushed(quick_bucket, folder)


def test_parts_that_were_sent_are_not_sent_again_by_the_next_push(
    quick_bucket, proxy_before, large_folder, tmp_path
):
    proxy = proxy_before(quick_bucket)
    folder = shutil.copytree(large_folder, tmp_path / "run")
    proxy.add(faults.DENIED, operation="complete_upload")
    manager = quick_bucket.manager(folder, endpoint=proxy.endpoint, remote_options=IN_PARTS)
    with pytest.raises(CheckpointError, match="AccessDenied"):
        manager.sync_now()
    assert quick_bucket.seqs() == []
    proxy.clear()
    manager.sync_now()
    manager.close()
    assert proxy.matching("put_part") == []
    assert proxy.moved_bytes()[0] < 200_000
    assert_pushed(quick_bucket, folder)
    assert quick_bucket.uploads() == []


@pytest.mark.filterwarnings("ignore:pushing to:RuntimeWarning")
def test_bandwidth_is_limited(quick_bucket, large_folder, tmp_path):
    folder = shutil.copytree(large_folder, tmp_path / "run")
    options = {**IN_PARTS, "bandwidth": "8MB"}
    started = time.monotonic()
    with quick_bucket.manager(folder, sync_every=10_000, remote_options=options) as manager:
        manager.sync_now()
        # A lower bound, which holds on any machine: 10.6 MB at 8 MB a second, less what a bucket may save up.
        assert time.monotonic() - started >= 0.6
    assert_pushed(quick_bucket, folder)
