"""A resume keeps who the run is; what is read from a snapshot is checked before it is believed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support import assert_same, files_of, flip, manifests

from varvite import CheckpointManager
from varvite.errors import CorruptionError, InvalidInputError, SnapshotNotFoundError, UnsupportedFormatError
from varvite.training.identity import Origin, RunIdentity
from varvite.training.tracking import NullTracker, open_tracker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", chunk_bytes=4096) as manager:
        yield manager


ORIGIN = Origin(
    verb="fork",
    path="parent",
    repository_id="a" * 32,
    seq=3,
    step=20,
    digest="b" * 64,
    run_id="c" * 32,
    trackers={"wandb": {"backend": "wandb", "run_id": "abc", "last_step": 20}},
)


def test_new_runs_differ_and_draw_no_random_number():
    random.seed(3)
    expected = random.getstate()
    first, second = RunIdentity(), RunIdentity()
    assert first.run_id != second.run_id
    assert len(bytes.fromhex(first.run_id)) == 16
    assert random.getstate() == expected
    assert (first.restart_count, first.origin, first.trackers, first.name) == (0, None, {}, None)


def test_a_resume_keeps_the_run_and_counts_restarts(manager):
    first = RunIdentity("baseline")
    first.origin = ORIGIN
    first.attach("null", NullTracker())
    manager.save(0, run=first)
    second = RunIdentity()
    manager.resume(run=second)
    assert (second.run_id, second.name, second.started_at) == (first.run_id, "baseline", first.started_at)
    assert (second.restart_count, second.origin) == (1, ORIGIN)
    assert second.trackers == {"null": {"backend": "null", "last_step": None}}
    manager.save(1, run=second)
    third = RunIdentity()
    manager.resume(run=third)
    assert (third.run_id, third.restart_count) == (first.run_id, 2)


def test_a_name_that_is_given_wins(manager):
    manager.save(0, run=RunIdentity("old"))
    run = RunIdentity("new")
    manager.resume(run=run)
    assert run.name == "new"


def test_the_record_that_is_saved_is_the_one_of_the_moment(manager):
    run = RunIdentity()
    tracker = open_tracker("null", run, "new")
    tracker.log(4, {})
    manager.save(4, run=run)
    tracker.log(5, {})
    saved = RunIdentity.peek(manager)
    assert saved.trackers["null"]["last_step"] == 4
    assert run.trackers["null"]["last_step"] == 5


class Tracker:
    """Stands for an open one."""

    def record(self) -> dict[str, Any]:
        return {"backend": "jsonl", "last_step": 3}


def test_an_open_tracker_stays_with_its_run_and_follows_no_other(manager):
    run = RunIdentity()
    run.attach("jsonl", Tracker())
    manager.save(3, run=run)
    manager.resume(run=run)  # back within the run
    assert (run.restart_count, run.trackers["jsonl"]["last_step"]) == (1, 3)
    other = RunIdentity()
    other.attach("jsonl", Tracker())
    before = other.state_dict()
    with pytest.raises(InvalidInputError, match="a tracker is open under the id it has: `jsonl`") as caught:
        manager.resume(run=other)
    assert "open trackers after" in caught.value.hint
    with pytest.raises(InvalidInputError, match="a tracker is open"):
        other.begin(None)
    assert_same(other.state_dict(), before)


def test_a_new_beginning_carries_no_record_of_before(manager):
    run = RunIdentity()
    run.attach("jsonl", Tracker())
    manager.save(3, run=run)
    again = RunIdentity()
    manager.resume(run=again)
    assert again.trackers == run.trackers
    again.begin(ORIGIN)
    assert (again.trackers, again.origin, again.restart_count) == ({}, ORIGIN, 0)
    assert again.run_id != run.run_id


def test_a_peek_reads_no_tensor_and_counts_nothing(manager):
    run = RunIdentity("baseline")
    manager.save_sync(3, model=torch.nn.Linear(2, 2), run=run)
    pack = next(iter((manager._settings.path / "packs").iterdir()))
    before = files_of(manager._settings.path)
    pack.write_bytes(bytes(len(pack.read_bytes())))
    found = RunIdentity.peek(manager)
    assert (found.run_id, found.name, found.restart_count) == (run.run_id, "baseline", 0)
    pack.write_bytes(before[f"packs/{pack.name}"])
    assert files_of(manager._settings.path) == before


def test_a_peek_finds_nothing_where_there_is_nothing(manager):
    assert RunIdentity.peek(manager) is None
    with pytest.raises(SnapshotNotFoundError):
        RunIdentity.peek(manager, 7)
    manager.save_sync(0, epoch={"n": 1})
    assert RunIdentity.peek(manager) is None
    manager.save_sync(1, who=RunIdentity("x"))
    assert RunIdentity.peek(manager, keyword="who").name == "x"


def test_a_peek_passes_over_a_damaged_snapshot_only_for_latest(manager):
    manager.save_sync(0, run=RunIdentity("good"))
    manager.save_sync(1, run=RunIdentity("damaged"))
    flip(manifests(manager._settings.path)[-1], 200)
    with pytest.warns(RuntimeWarning, match="snapshot 2 can't be used"):
        assert RunIdentity.peek(manager).name == "good"
    with pytest.raises(CorruptionError):
        RunIdentity.peek(manager, "seq:2")


DAMAGE: list[tuple[str, Any]] = [
    ("run_id", "xyz"),
    ("run_id", "A" * 32),
    ("run_id", None),
    ("name", 3),
    ("name", ""),
    ("started_at", "yesterday"),
    ("started_at", "2024-05-01T00:00:00"),
    ("started_at", 7),
    ("restart_count", -1),
    ("restart_count", True),
    ("restart_count", 1.0),
    ("origin", {"verb": "fork"}),
    ("origin", {**vars(ORIGIN), "verb": "steal"}),
    ("origin", {**vars(ORIGIN), "repository_id": "../.."}),
    ("origin", {**vars(ORIGIN), "seq": "3"}),
    ("origin", {**vars(ORIGIN), "digest": "g"}),
    ("origin", {**vars(ORIGIN), "path": None}),
    ("origin", {**vars(ORIGIN), "run_id": 5}),
    ("origin", {**vars(ORIGIN), "trackers": []}),
    ("trackers", None),
    ("trackers", {"wandb": {"backend": "jsonl"}}),
    ("trackers", {"wandb": {"backend": "wandb", "last_step": "9"}}),
    ("trackers", {"wandb": {"backend": "wandb", "nest": {}}}),
    ("trackers", {3: {"backend": 3}}),
    ("version", 0),
    ("version", "1"),
]


@pytest.mark.parametrize(("key", "value"), DAMAGE, ids=[f"{key}-{value!r:.30}" for key, value in DAMAGE])
def test_a_damaged_identity_is_refused_and_changes_nothing(key, value):
    run = RunIdentity("mine")
    before = run.state_dict()
    with pytest.raises(CorruptionError):
        run.check_state_dict({**before, key: value})
    with pytest.raises(CorruptionError):
        run.load_state_dict({**before, key: value})
    assert_same(run.state_dict(), before)


@pytest.mark.parametrize("state", [None, [], {}, "run", {"version": 1}])
def test_what_is_no_identity_is_refused(state):
    with pytest.raises(CorruptionError):
        RunIdentity().load_state_dict(state)


def test_more_or_fewer_keys_are_refused_and_a_newer_version_says_so():
    state = RunIdentity().state_dict()
    with pytest.raises(CorruptionError):
        RunIdentity().check_state_dict({**state, "more": 1})
    with pytest.raises(UnsupportedFormatError, match="unsupported version of a run identity: found 2"):
        RunIdentity().check_state_dict({"version": 2, "anything": 1})


def test_a_damaged_identity_stops_a_resume_before_anything_changes(manager):
    class Forged(RunIdentity):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "run_id": "forged"}

    manager.save(0, model=torch.nn.Linear(2, 2), run=Forged())
    model, run = torch.nn.Linear(2, 2), RunIdentity()
    before = model.weight.detach().clone()
    with pytest.raises(CorruptionError), pytest.warns(RuntimeWarning, match="can't be used"):
        manager.resume(model=model, run=run)
    with pytest.raises(CorruptionError, match="32 hex digits"):
        manager.resume("seq:1", model=model, run=run)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("name", ["", 3])
def test_a_name_must_be_a_text(name):
    with pytest.raises(InvalidInputError, match="invalid run name"):
        RunIdentity(name)
