"""Rounds of real ranks: results, failures on each rank, lost ranks."""

from __future__ import annotations

import time

import pytest
import ranks
import torch
import torch.distributed as dist

from varvite.distributed import group as group_module
from varvite.distributed.coordination import Coordination
from varvite.errors import CheckpointError, MismatchError, StoreError


def caught(call, *arguments):
    """Returns the error of a call, which is to raise one."""
    try:
        call(*arguments)
    except BaseException as error:  # noqa: BLE001 - it is looked at
        return error
    raise AssertionError("nothing was raised")


def text(error):
    return type(error).__name__, str(error).partition("\nhint: ")[0]


def is_closed(coordination):
    """Closes; the connections of a rank that is slower must not miss what it still waits for."""
    dist.barrier()
    coordination.close()
    return text(caught(coordination.together, "closed", None))


def succeeds():
    coordination = Coordination.join()
    rank, size = coordination.rank, coordination.world_size
    long = bytes([rank]) * (5_000_000 + rank)
    return {
        "is_coordinator": coordination.is_coordinator,
        "for all": coordination.round("a", b"%d" % rank, b"".join),
        "for each": coordination.round("b", b"%d" % rank, lambda all_of: [one + b"!" for one in all_of]),
        "long": coordination.round("c", long, lambda all_of: all_of) == long,
        "edge": [len(coordination.round("d", b"x" * n, lambda _, n=n: b"y" * n)) for n in range(4080, 4100)],
        "broadcast": coordination.broadcast("e", lambda: b"of %d" % rank),
        "empty": coordination.round("f", b"", lambda all_of: b"%d" % len(all_of)),
        "together": coordination.together("g", None),
        "long for all": coordination.broadcast("h", lambda: b"x" * 5_000_000) == b"x" * 5_000_000,
        "closed": is_closed(coordination),
        "hosts": len(coordination.hosts) == size,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_rounds(size):
    for rank, found in enumerate(ranks.run(size, succeeds)):
        assert found == {
            "is_coordinator": rank == 0,
            "for all": "".join(map(str, range(size))).encode(),
            "for each": b"%d!" % rank,
            "long": True,
            "edge": [*range(4080, 4100)],
            "broadcast": b"of 0",
            "empty": b"%d" % size,
            "together": None,
            "long for all": True,
            "closed": ("CheckpointError", "cannot go on: the connections to the other ranks are closed"),
            "hosts": True,
        }


def fails_on_each():
    coordination = Coordination.join()
    rank = coordination.rank
    told = []
    for failing in range(coordination.world_size):
        error = StoreError(
            "cannot write `a.pack`", hint="free space", errno=28, object="a.pack", data=b"no JSON"
        )
        mine = error if rank == failing else b"well"
        found = caught(coordination.round, "save", mine, lambda _: pytest.fail("decided"))
        told.append([found is error, *text(found), found.hint, found.errno, found.object])
        told[-1].append(getattr(found, "rank", None))
        mine = ValueError("bad") if rank == failing else None
        found = caught(coordination.together, "stage", mine)
        told.append([found is mine, *text(found)])
    assert coordination.round("again", b"", lambda _: b"well") == b"well"
    return told


@pytest.mark.parametrize("size", [1, 4])
def test_a_failure_of_any_rank_is_raised_by_all(size):
    for rank, told in enumerate(ranks.run(size, fails_on_each)):
        for failing in range(size):
            prefix = "" if rank == failing else f"rank {failing} failed in `save`: "
            store = [
                rank == failing,
                "StoreError",
                f"{prefix}cannot write `a.pack`",
                "free space",
                28,
                "a.pack",
            ]
            assert told[2 * failing] == [*store, None if rank == failing else failing]
            foreign = (
                ["ValueError", "bad"]
                if rank == failing
                else ["CheckpointError", f"rank {failing} failed in `stage`: ValueError: bad"]
            )
            assert told[2 * failing + 1] == [rank == failing, *foreign]


def several_fail():
    coordination = Coordination.join()
    error = StoreError(f"full on {coordination.rank}") if coordination.rank else None
    found = caught(coordination.together, "save", error)
    return text(found), getattr(found, "__notes__", [])


def test_where_several_failed_the_others_hear_of_all():
    notes = [f"rank {rank} failed too: full on {rank}" for rank in (2, 3, 4)] + ["and 1 more"]
    own = [(("StoreError", f"full on {rank}"), []) for rank in range(1, 6)]
    assert ranks.run(6, several_fail) == [(("StoreError", "rank 1 failed in `save`: full on 1"), notes), *own]


def decisions_fail():
    coordination = Coordination.join()

    def refuse(_):
        raise MismatchError("replicas of `w` differ", name="w", ranks=[0, 1])

    mismatch = caught(coordination.round, "save", b"", refuse)
    few = caught(coordination.round, "few", b"", lambda _: [b""])
    long = caught(coordination.round, "long", b"x" * ((64 << 20) + 1), lambda _: b"")
    interrupted = caught(coordination.broadcast, "make", interrupt)
    assert coordination.broadcast("again", lambda: b"well") == b"well"
    return text(mismatch), mismatch.name, mismatch.ranks, text(few), text(long), text(interrupted)


def interrupt():
    raise KeyboardInterrupt


def test_what_the_coordinator_refuses_is_raised_by_all():
    few = "a decision has answers for another number of ranks, of 2: 1"
    long = f"cannot send a message of more than {64 << 20} bytes: {(64 << 20) + 1}"
    own = [
        ("MismatchError", "replicas of `w` differ"),
        "w",
        [0, 1],
        ("InternalError", few),
        ("InvalidInputError", long),
        ("KeyboardInterrupt", ""),
    ]
    others = [
        ("MismatchError", "rank 0 refused `save`: replicas of `w` differ"),
        "w",
        [0, 1],
        ("InternalError", f"rank 0 refused `few`: {few}"),
        ("InvalidInputError", long),
        ("CheckpointError", "rank 0 was interrupted in `make`: KeyboardInterrupt"),
    ]
    assert [list(one) for one in ranks.run(2, decisions_fail)] == [own, others]


def call_different_things():
    coordination = Coordination.join()
    if coordination.rank == 1:
        error = caught(coordination.broadcast, "resume", lambda: b"")
    else:
        error = caught(coordination.together, "save", None)
    own = ValueError("bad")
    found = caught(coordination.together, f"on {min(coordination.rank, 1)}", own)
    assert coordination.broadcast("again", lambda: b"well") == b"well"
    return text(error), error.calls, found is own


def test_ranks_in_different_calls_are_told_of_both():
    told = ("MismatchError", "ranks are in different calls: `save` on ranks 0, 2; `resume` on ranks 1")
    assert ranks.run(3, call_different_things) == [(told, {"save": [0, 2], "resume": [1]}, True)] * 3


def dies(timeout_seconds):
    group_module._GRACE_SECONDS = 0.5
    coordination = Coordination.join(timeout_seconds=timeout_seconds)
    coordination.together("before", None)
    ranks.at("before")

    def decide(_):
        ranks.at("deciding")
        return b"decided"

    begun = time.monotonic()
    found = [outcome(coordination.round, "save", b"", decide), outcome(coordination.together, "again", None)]
    return found, time.monotonic() - begun


def outcome(call, *arguments):
    try:
        return call(*arguments)
    except CheckpointError as error:
        return *text(error), getattr(error, "missing_ranks", None)


def lost(what, *missing):
    who = ", ".join(map(str, missing))
    return (
        "CheckpointError",
        f"cannot go on with `{what}` without all ranks; missing ranks: {who}",
        [*missing],
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_rank_that_dies_before_a_round_is_named(size, number):
    number %= size
    with ranks.start(size, dies, 100.0) as group:
        group.wait_for("before")
        group.kill(number)
        others = {*range(size)} - {number}
        group.go(*others)
        found = group.results_of(*others)
    assert [one for one, _ in found] == [[lost("save", number)] * 2] * (size - 1)
    assert all(seconds < 30 for _, seconds in found)


@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_that_dies_in_a_round_is_named(number):
    with ranks.start(3, dies, 100.0) as group:
        group.wait_for("before")
        group.go()
        group.wait_for("deciding", 0)
        group.kill(number)
        others = {0, 1, 2} - {number}
        found = (
            group.results_of(*others) if number == 0 else [one.value for one in group.outcomes() if one.value]
        )
    if number == 0:
        assert [one for one, _ in found] == [[lost("save", 0)] * 2] * 2
    else:
        # The decision was made, and a rank that does not hear of it is no reason to take it back.
        assert [one for one, _ in found] == [[b"decided", lost("again", 2)]] * 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_never_comes_is_named(number):
    with ranks.start(3, dies, 0.5) as group:
        group.wait_for("before")
        group.stop(number)
        others = {0, 1, 2} - {number}
        group.go(*others)
        found = group.results_of(*others)
    assert [one for one, _ in found] == [[lost("save", number)] * 2] * 2


def joins():
    group_module._GRACE_SECONDS = 0.5
    ranks.at("before")
    return outcome(join_quickly)


def join_quickly():
    return Coordination.join(timeout_seconds=1.0).rank


def test_a_rank_that_does_not_join_is_named():
    with ranks.start(3, joins) as group:
        group.wait_for("before")
        group.stop(1)
        group.go(0, 2)
        found = group.results_of(0, 2)
    message = "cannot set up a group of 3 ranks within 1 s; missing ranks: 1"
    assert found == [("CheckpointError", message, [1])] * 2


def is_interrupted(number):
    coordination = Coordination.join()
    star = coordination._star
    receive, calls = star._receive, []

    def receive_or_not(*arguments):
        """As if the interrupt came while gloo waits: half of the round is under way."""
        calls.append(arguments)
        if len(calls) == (2 if number == 0 else 1):
            raise KeyboardInterrupt
        return receive(*arguments)

    if coordination.rank == number:
        star._receive = receive_or_not
    if rank_hears(number, coordination.rank):
        first = text(caught(coordination.together, "save", None))
    else:
        first = coordination.together("save", None)
    return first, text(caught(coordination.together, "again", None))


def rank_hears(number, rank):
    """The coordinator decides once all have sent; an interrupt after that is found by the next round."""
    return number == 0 or rank == number


@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_that_is_interrupted_in_a_round_leaves_and_says_why(number):
    told = ("CheckpointError", f"rank {number} was interrupted in `save`: KeyboardInterrupt")
    expected = [(told if rank_hears(number, rank) else None, told) for rank in range(3)]
    expected[number] = (("KeyboardInterrupt", ""), told)
    assert ranks.run(3, is_interrupted, number) == expected


def part_of_the_ranks():
    group = dist.new_group([1, 3])
    found = work_in_part(group)
    # Ranks outside count no group of ours: theirs and the next of all have one name.
    everyone = dist.new_group()
    values = torch.ones(1)
    dist.all_reduce(values, group=everyone)
    assert values.item() == 4
    return found


def work_in_part(group):
    if dist.get_rank() not in (1, 3):
        error = caught(Coordination.join, group)
        return text(error), error.what
    coordination = Coordination.join(group)
    found = coordination.round("a", b"%d" % dist.get_rank(), b"".join)
    coordination.close()
    again = Coordination.join(group)
    assert again.broadcast("b", lambda: b"again") == b"again"
    return coordination.rank, coordination.world_size, found, coordination._group.called(1)


def test_a_part_of_the_ranks_works_together():
    refused = (("InvalidInputError", "invalid process_group: this process is not in it"), "process_group")
    found = ranks.run(4, part_of_the_ranks)
    called = "1 (rank 3 of all)"
    assert found == [refused, (0, 2, b"13", called), refused, (1, 2, b"13", called)]


def beside_a_group_without_gloo():
    """The group `fake` has no sockets: what works beside it needs nothing but the store."""
    coordination = Coordination.join()
    return dist.get_backend(), coordination.round("a", b"%d" % coordination.rank, b"".join)


def test_the_default_group_need_not_be_gloo():
    ranks.preload("torch.testing._internal.distributed.fake_pg")
    assert ranks.run(2, beside_a_group_without_gloo, backend="fake") == [("fake", b"01")] * 2


def train_and_decide(count):
    coordination = Coordination.join()
    for number in range(count):
        values = torch.full((3,), float(number))
        work = dist.all_reduce(values, async_op=True)
        decided = coordination.round("a", b"%d" % number, lambda all_of: all_of)
        work.wait()
        assert (decided, values.tolist()) == (b"%d" % number, [2.0 * number] * 3)
    return "well"


def test_many_rounds_while_collectives_of_training_are_under_way():
    assert ranks.run(2, train_and_decide, 200) == ["well"] * 2


def test_alone_it_needs_no_torch(run_python):
    program = """
import sys
from varvite.distributed.coordination import Coordination
from varvite.errors import StoreError
coordination = Coordination.join()
meeting = coordination.meeting("save")
meeting.report(b"mine")
meeting.conclude(meeting.collect()[0])
own = StoreError("full")
try:
    coordination.together("save", own)
except StoreError as error:
    print(error is own, coordination.world_size, meeting.conclusion(), "torch" in sys.modules)
"""
    assert run_python(program) == "True 1 b'mine' False"
