"""Two trainers on one bucket: the second is refused, or takes over; the first then writes nothing more."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading

import faults
import pytest
from looks import assert_loads, save_steps
from support import child

from varvite.errors import CommitConflictError, RepositoryLockedError

LEASE_SECONDS = 1.0
QUICK = {"lease_seconds": LEASE_SECONDS}
AT_ONCE = {**QUICK, "takeover": True}
FOR_LONG = {"lease_seconds": 86_400.0}
"""Longer than any test may take: who waited for it to run out would be seen."""


def us() -> tuple[str, str]:
    """What names a writer of this process."""
    return str(os.getpid()), socket.gethostname()


@contextlib.contextmanager
def zombie(manager):
    """Closes a manager that has been taken over, which says so."""
    yield manager
    with pytest.raises(CommitConflictError):
        manager.close()
    manager.close()


def assert_fenced(caught) -> None:
    """Asserts that an error names both writers and what to do."""
    process, host = us()
    text = str(caught.value)
    assert text.count(process) >= 2, text
    assert host in text
    assert caught.value.hint


def test_a_second_writer_is_refused_by_the_name_of_the_first(bucket, tmp_path):
    with bucket.manager(tmp_path / "a", remote_options=QUICK) as manager:
        save_steps(manager, 0)
        with pytest.raises(RepositoryLockedError) as caught:
            bucket.manager(tmp_path / "b", remote_options=QUICK)
        assert all(word in caught.value.holder for word in us())
        assert bucket.url in str(caught.value)
        # A reader is not.
        manager.sync_now()
        with bucket.reader() as reader:
            assert_loads(reader, 0)
        save_steps(manager, 1)
    with bucket.manager(tmp_path / "b", remote_options=QUICK) as manager:
        assert_loads(manager, 0, 1)


def test_one_that_was_closed_leaves_the_place_at_once(bucket, tmp_path):
    for number in range(3):
        with bucket.manager(tmp_path / f"{number}", remote_options=FOR_LONG) as manager:
            save_steps(manager, number)
            assert manager.stats().sync.lease_epoch is not None
    assert bucket.check_whole(tmp_path / "look") == [0, 1, 2]


def test_one_whose_process_was_killed_here_leaves_the_place_at_once(bucket, tmp_path):
    options = bucket.options(**FOR_LONG)
    with child("holds_bucket", tmp_path / "a", bucket.url, json.dumps(options)) as process:
        assert process.stdout.readline() == "holding\n", process.stderr.read()
        for line in ("save 0\n", "sync\n", "save 1\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
        process.kill()
        process.wait(30)
    with bucket.manager(tmp_path / "b", remote_options=FOR_LONG) as manager:
        assert_loads(manager, 0)
        save_steps(manager, 5)
    assert bucket.check_whole(tmp_path / "look") == [0, 5]


def test_a_second_process_is_refused_while_the_first_lives(quick_bucket, tmp_path):
    options = quick_bucket.options(**QUICK)
    with child("holds_bucket", tmp_path / "a", quick_bucket.url, json.dumps(options)) as process:
        assert process.stdout.readline() == "holding\n", process.stderr.read()
        with pytest.raises(RepositoryLockedError) as caught:
            quick_bucket.manager(tmp_path / "b", remote_options=QUICK)
        assert str(process.pid) in caught.value.holder
        process.stdin.write("close\n")
        process.stdin.flush()
        assert process.wait(30) == 0
    quick_bucket.manager(tmp_path / "b", remote_options=QUICK).close()


def test_one_that_is_silent_is_taken_over_and_writes_nothing_more(bucket, proxy, tmp_path):
    first = bucket.manager(tmp_path / "a", endpoint=proxy.endpoint, remote_options=QUICK)
    save_steps(first, 0)
    first.sync_now()
    epoch = first.stats().sync.lease_epoch
    proxy.go_down()
    with bucket.manager(tmp_path / "b", remote_options=QUICK) as second:
        assert second.stats().sync.lease_epoch == epoch + 1
        assert_loads(second, 0)
        save_steps(second, 7)
        second.sync_now()
        there = bucket.content()
        there.pop("lease.json")
        proxy.clear()
        proxy.come_back()
        with zombie(first):
            with pytest.raises(CommitConflictError) as caught:
                first.sync_now()
            assert_fenced(caught)
            assert all(word in first.stats().sync.fenced_by for word in us())
            assert [one for one in proxy.writes() if one.status is not None and one.status < 300] == []
            proxy.clear()
            # It holds for good, also for what would write here.
            for call in (
                lambda: first.save_sync(1, {"v": 1}),
                lambda: first.delete(0),
                lambda: first.pin(0, "x"),
                first.sync_now,
            ):
                with pytest.raises(CommitConflictError):
                    call()
            assert proxy.writes() == []
            assert first.load(0)["step"] == 0
        assert {name: data for name, data in bucket.content().items() if name != "lease.json"} == there
    assert bucket.check_whole(tmp_path / "look") == [0, 7]


def test_one_that_lives_is_taken_over_by_one_that_insists(quick_bucket, tmp_path):
    first = quick_bucket.manager(tmp_path / "a", remote_options=FOR_LONG)
    save_steps(first, 0)
    first.sync_now()
    with zombie(first), quick_bucket.manager(tmp_path / "b", remote_options=AT_ONCE) as second:
        save_steps(second, 7)
        second.sync_now()
        with pytest.raises(CommitConflictError) as caught:
            first.sync_now()
        assert_fenced(caught)
    assert quick_bucket.check_whole(tmp_path / "look") == [0, 7]


def sync_in_thread(manager, found: list) -> threading.Thread:
    def run() -> None:
        try:
            found.append(manager.sync_now())
        except CommitConflictError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_zombie_whose_manifest_comes_too_late_loses(bucket, proxy, tmp_path):
    """Paused between its last look at the lease and the commit: the number is another one's by then."""
    hold = faults.Hold()
    proxy.add(hold, operation="put", key="*/snapshots/1.json")
    first = bucket.manager(tmp_path / "a", endpoint=proxy.endpoint, sync_every=100, remote_options=QUICK)
    save_steps(first, 0)
    found: list = []
    thread = sync_in_thread(first, found)
    assert hold.reached.wait(30)
    with bucket.manager(tmp_path / "b", remote_options=AT_ONCE) as second:
        assert_loads(second)
        save_steps(second, 7)
        second.sync_now()
        winner = bucket.get("snapshots/1.json")
        hold.let_go()
        thread.join(30)
        assert isinstance(found[0], CommitConflictError)
        assert str(found[0]).count(us()[0]) >= 2
        assert bucket.get("snapshots/1.json") == winner
        proxy.clear()
        with zombie(first), pytest.raises(CommitConflictError):
            first.save_sync(1, {"v": 1})
        assert proxy.writes() == []
    assert bucket.check_whole(tmp_path / "look") == [7]


def test_a_zombie_whose_manifest_came_first_has_its_snapshot_and_no_other(bucket, proxy, tmp_path):
    hold = faults.Hold(after=True)
    proxy.add(hold, operation="put", key="*/snapshots/1.json")
    first = bucket.manager(tmp_path / "a", endpoint=proxy.endpoint, sync_every=100, remote_options=QUICK)
    save_steps(first, 0)
    found: list = []
    thread = sync_in_thread(first, found)
    assert hold.reached.wait(30)
    with bucket.manager(tmp_path / "b", remote_options=AT_ONCE) as second:
        assert_loads(second, 0)
        save_steps(second, 7)
        second.sync_now()
        hold.let_go()
        thread.join(30)
        with zombie(first):
            with pytest.raises(CommitConflictError) as caught:
                first.sync_now()
            assert_fenced(caught)
    assert bucket.seqs() == [1, 2]
    assert bucket.check_whole(tmp_path / "look") == [0, 7]


def test_a_zombie_removes_nothing(bucket, proxy, tmp_path):
    first = bucket.manager(tmp_path / "a", endpoint=proxy.endpoint, sync_every=100, remote_options=QUICK)
    save_steps(first, 0, 1)
    first.sync_now()
    first.delete(0)
    with bucket.manager(tmp_path / "b", remote_options=AT_ONCE) as second:
        before = {name for name in bucket.names() if name != "lease.json"}
        assert_loads(second, 0, 1)
        proxy.clear()
        with zombie(first), pytest.raises(CommitConflictError):
            first.sync_now()
        assert proxy.matching("delete", "delete_many") == []
        assert {name for name in bucket.names() if name != "lease.json"} == before
        save_steps(second, 2)
    assert bucket.check_whole(tmp_path / "look") == [0, 1, 2]


def test_of_several_that_open_at_once_one_gets_it(bucket, tmp_path):
    barrier = threading.Barrier(4)
    found: list = []

    def race(number: int) -> None:
        barrier.wait()
        try:
            found.append(bucket.manager(tmp_path / f"{number}", remote_options=QUICK))
        except RepositoryLockedError as error:
            found.append(error)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    winners = [one for one in found if not isinstance(one, RepositoryLockedError)]
    assert (len(found), len(winners)) == (4, 1)
    with winners[0] as manager:
        save_steps(manager, 0)
    assert bucket.check_whole(tmp_path / "look") == [0]
