"""Meetings of real ranks through the store: results, failures, ranks that are lost or only slow."""

from __future__ import annotations

import threading
import time

import pytest
import ranks
import torch
import torch.distributed as dist

from varvite.distributed.coordination import Coordination
from varvite.distributed.meeting import LocalStore, Meeting
from varvite.errors import CheckpointError, IncompleteSaveError, StoreError

POLL_SECONDS = 0.002


def poll(ask):
    """Returns the first answer that is not None."""
    while (answer := ask()) is None:
        time.sleep(POLL_SECONDS)
    return answer


def meet(meeting, mine):
    """What a save does on its thread; returns what all are told."""
    meeting.report(mine)
    if meeting.rank == 0:
        try:
            meeting.conclude(b"+".join(poll(meeting.collect)))
        except CheckpointError as error:
            meeting.conclude(error)
        except ValueError as error:
            meeting.conclude(error)
    return poll(meeting.conclusion)


def text(error):
    return type(error).__name__, str(error).partition("\nhint: ")[0]


def outcome(call, *arguments):
    try:
        return call(*arguments)
    except Exception as error:  # noqa: BLE001 - it is looked at
        return text(error)


def count_keys(store):
    """Returns how many keys the store holds, or `None` where it can't tell."""
    try:
        return store.num_keys()
    except RuntimeError:
        return None


def meets_often(count):
    coordination = Coordination.join()
    rank, size = coordination.rank, coordination.world_size
    store = dist.distributed_c10d._get_default_store()
    before = count_keys(store)
    coordination.together("counted", None)
    told = {meet(coordination.meeting(f"save {n}"), b"%d" % rank) for n in range(count)}
    coordination.together("ended", None)
    after = count_keys(store)
    # Only then the connections of others may end, for which torch keeps a key.
    coordination.together("counted again", None)
    assert after == before
    return told, size


@pytest.mark.parametrize("store", ["launcher", "rank 0", "file"])
def test_all_hear_what_was_collected_and_nothing_is_left_in_the_store(store):
    told = {b"+".join(b"%d" % rank for rank in range(3))}
    assert ranks.run(3, meets_often, 40, store=store) == [(told, 3)] * 3


def fails_on_each():
    coordination = Coordination.join()
    rank, found = coordination.rank, []
    for failing in range(coordination.world_size):
        error = StoreError("cannot write", errno=28)
        mine = error if rank == failing else b""
        found.append(outcome(meet, coordination.meeting(f"save {failing}"), mine))
    foreign = ValueError("bad") if rank == 1 else b""
    found.append(outcome(meet, coordination.meeting("foreign"), foreign))
    return found


def test_a_failure_of_any_rank_is_raised_by_all():
    for rank, found in enumerate(ranks.run(4, fails_on_each)):
        for failing in range(4):
            prefix = "" if rank == failing else f"rank {failing} failed in `save {failing}`: "
            assert found[failing] == ("StoreError", f"{prefix}cannot write")
        foreign = ("CheckpointError", "rank 1 failed in `foreign`: ValueError: bad")
        assert found[4] == (("ValueError", "bad") if rank == 1 else foreign)


def coordinator_fails():
    coordination = Coordination.join()
    meeting = coordination.meeting("save")
    meeting.report(b"")
    if coordination.is_coordinator:
        poll(meeting.collect)
        meeting.conclude(StoreError("cannot publish"))
    return outcome(poll, meeting.conclusion)


def test_what_the_coordinator_fails_in_is_its_failure():
    own, *others = ranks.run(3, coordinator_fails)
    assert own == ("StoreError", "cannot publish")
    assert others == [("StoreError", "rank 0 failed in `save`: cannot publish")] * 2


def is_lost(lost_seconds):
    Meeting.LOST_SECONDS, Meeting.LOOK_SECONDS, Meeting.BEAT_SECONDS = lost_seconds, 0.05, 0.02
    coordination = Coordination.join()
    meeting = coordination.meeting("save")
    ranks.at("in the meeting")
    return outcome(meet, meeting, b"")


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_lost_rank_is_named(how, number):
    with ranks.start(3, is_lost, 1.0) as group:
        group.wait_for("in the meeting")
        getattr(group, how)(number)
        others = {0, 1, 2} - {number}
        group.go(*others)
        found = group.results_of(*others)
    if number == 0:
        start = "no sign of life from the coordinator for 1 s in `save`: 0 on `"
        assert all(kind == "CheckpointError" and said.startswith(start) for kind, said in found)
    else:
        start = f"no sign of life for 1 s in `save`; missing ranks: {number} on `"
        assert all(kind == "IncompleteSaveError" and said.startswith(start) for kind, said in found)


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_stood_still_for_too_long_hears_the_same_as_the_others(number):
    with ranks.start(3, is_lost, 1.0) as group:
        group.wait_for("in the meeting")
        group.stop(number)
        group.go()
        others = {0, 1, 2} - {number}
        found = group.results_of(*others)
        group.resume(number)
        kind, said = group.results()[number]
    if number == 0:
        # It must not publish what the others take for lost.
        assert said.startswith("rank 1 failed in `save`: no sign of life from the coordinator for 1 s")
    else:
        assert said.startswith("no sign of life for 1 s in `save`; missing ranks: 1 on `")
    assert kind == ("CheckpointError" if number == 0 else "IncompleteSaveError")
    assert found[1][0] == kind


def test_the_store_is_lost():
    with ranks.start(2, is_lost, 20.0) as group:
        group.wait_for("in the meeting")
        group.kill(-1)
        found = group.results()
    assert {kind for kind, _ in found} == {"CheckpointError"}
    assert all(said.startswith("lost the store of the launcher in `save`: ") for _, said in found)


def trains_meanwhile(count):
    coordination = Coordination.join()
    rank, size = coordination.rank, coordination.world_size
    told = []

    def save(number):
        told.append(meet(coordination.meeting(f"save {number}"), b"%d" % number))

    for number in range(count):
        ticket = coordination.broadcast("begin", lambda number=number: b"%d" % number)
        thread = threading.Thread(target=save, args=(int(ticket),))
        thread.start()
        values = torch.full((3,), float(rank))
        dist.all_reduce(values)
        assert values.tolist() == [sum(range(size))] * 3
        thread.join()
    return told


def test_many_saves_in_the_background_while_training_uses_its_own_collectives():
    told = [b"+".join([b"%d" % number] * 3) for number in range(200)]
    assert ranks.run(3, trains_meanwhile, 200) == [told] * 3


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("varvite.distributed.meeting.time", clock)
    return clock


def test_a_rank_that_beats_is_waited_for_also_after_the_coordinator_itself_stood_still(clock):
    store = LocalStore()
    mine, other = (Meeting("save", store, rank=rank, hosts=["a", "b"]) for rank in (0, 1))
    mine.report(b"")
    for seconds in (1, 1, 1000):
        clock.now += seconds
        assert mine.collect() is None
    for _ in range(30):
        clock.now += 1
        other.beat()
        assert mine.collect() is None
    for _ in range(19):
        clock.now += 1
        assert mine.collect() is None
    clock.now += 1
    with pytest.raises(IncompleteSaveError, match="missing ranks: 1 on `b`") as caught:
        mine.collect()
    assert caught.value.missing_ranks == [1]


def test_a_rank_that_gave_up_after_it_had_reported_keeps_the_coordinator_from_going_on(clock):
    store = LocalStore()
    mine, other = (Meeting("save", store, rank=rank, hosts=["a", "b"]) for rank in (0, 1))
    mine.report(b"")
    other.report(b"")
    assert mine.collect() == [b"", b""]
    for _ in range(21):
        clock.now += 1
        gave_up = outcome(other.conclusion)
    assert gave_up == ("CheckpointError", "no sign of life from the coordinator for 20 s in `save`: 0 on `a`")
    with pytest.raises(
        CheckpointError, match=r"rank 1 failed in `save`: no sign of life from the coordinator"
    ):
        mine.collect()
