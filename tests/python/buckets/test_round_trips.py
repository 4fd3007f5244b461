"""Snapshots go to a bucket and come back on a machine that has nothing, bit for bit."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from looks import LENGTH_BYTES, assert_loads, assert_pushed, ours_in, save_steps, sent_from, state_of
from servers import BUCKET
from support import assert_same

from varvite import CheckpointManager, MergePolicy, keep
from varvite.errors import (
    CheckpointError,
    CommitConflictError,
    CorruptionError,
    SnapshotNotFoundError,
    StoreError,
    TensorNotFoundError,
)

PACK = "packs/7-r0-00000000000000ff.pack"
"""A name that a pack of some other writer could have."""


def test_what_is_saved_lies_in_the_bucket_and_loads_on_another_machine(bucket, tmp_path):
    with bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0, 1, 2)
        manager.pin(1, "kept")
        report = manager.sync_now()
        assert report.pending_objects == 0
        state = manager.stats().sync
        assert (state.newest_pushed_seq, state.unpushed, state.pending_objects) == (3, [], 0)
        assert (state.last_error, state.fenced_by, state.url) == (None, None, bucket.url)
        assert_pushed(bucket, tmp_path / "a")
        assert state.pushed_objects == len(ours_in(bucket))
        assert state.pushed_bytes == sum(map(len, ours_in(bucket).values()))
        again = manager.sync_now()
        assert (again.pushed_objects, again.pushed_bytes, again.removed_objects) == (0, 0, 0)
    assert bucket.check_whole(tmp_path / "look") == [0, 1, 2]
    with bucket.manager(tmp_path / "b") as manager:
        assert_loads(manager, 0, 1, 2)
        assert_same(dict(manager.load("tag:kept")), state_of(1))
        assert manager.verify().ok
        save_steps(manager, 3)
        manager.sync_now()
    assert bucket.seqs() == [1, 2, 3, 4]
    assert bucket.check_whole(tmp_path / "look again") == [0, 1, 2, 3]


def test_a_training_state_is_resumed_from_the_bucket_alone(bucket, tmp_path):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters())

    def step(model, optimizer, number):
        torch.manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    model, optimizer = build()
    with bucket.manager(tmp_path / "a") as manager:
        for number in range(4):
            step(model, optimizer, number)
            manager.save(number, model=model, optimizer=optimizer)
    shutil.rmtree(tmp_path / "a")

    other_model, other_optimizer = build()
    with bucket.manager(tmp_path / "b") as manager:
        report = manager.resume(model=other_model, optimizer=other_optimizer)
        assert (report.next_step, report.fresh) == (4, False)
    for number in range(4, 7):
        step(model, optimizer, number)
        step(other_model, other_optimizer, number)
    assert_same(dict(other_model.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_close_pushes_what_is_pending(quick_bucket, tmp_path):
    with quick_bucket.manager(tmp_path / "a", sync_every=100) as manager:
        manager.sync_now()  # what opening has begun
        save_steps(manager, 0, 1)
        assert quick_bucket.seqs() == []
    assert_pushed(quick_bucket, tmp_path / "a")


def test_a_close_pushes_a_tag_that_came_after_everything_else(quick_bucket, tmp_path):
    with quick_bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0)
        manager.sync_now()
        manager.pin(0, "late")
    assert quick_bucket.names("tags/") == ["tags/late"]
    with quick_bucket.manager(tmp_path / "a") as manager:
        manager.unpin("late")
    assert quick_bucket.names("tags/") == []


def test_a_final_save_is_in_the_bucket_when_it_returns(quick_bucket, tmp_path):
    with quick_bucket.manager(tmp_path / "a", sync_every=100) as manager:
        info = manager.save_final(0, state_of(0), rng=False)
        assert quick_bucket.seqs() == [info.seq] == [1]
        assert manager.stats().sync.unpushed == []


def test_an_empty_bucket_and_an_empty_folder_are_a_fresh_start(quick_bucket, tmp_path):
    with quick_bucket.manager(tmp_path / "a") as manager:
        assert manager.load_latest() is None
        assert manager.resume(values={}).fresh
        assert_loads(manager)
        with pytest.raises(SnapshotNotFoundError):
            manager.load()


def test_a_folder_of_earlier_runs_is_pushed_whole(quick_bucket, tmp_path):
    with CheckpointManager(tmp_path / "a") as manager:
        save_steps(manager, 0, 1, 2)
    with quick_bucket.manager(tmp_path / "a") as manager:
        assert manager.sync_now().pending_objects == 0
    assert_pushed(quick_bucket, tmp_path / "a")


# A repository by its url


def test_a_run_by_url_alone(bucket, tmp_path):
    options = bucket.options(spool=tmp_path / "spool")
    with CheckpointManager(bucket.url, remote_options=options) as manager:
        save_steps(manager, 0, 1)
        manager.sync_now()
        assert_pushed(bucket, tmp_path / "spool")
        assert bucket.url in repr(manager)
    options["spool"] = tmp_path / "another machine"
    with CheckpointManager(bucket.url, remote_options=options) as manager:
        assert_loads(manager, 0, 1)
        save_steps(manager, 2)
    assert bucket.check_whole(tmp_path / "look") == [0, 1, 2]


def test_a_reader_needs_no_folder_and_writes_nothing(bucket, proxy, tmp_path, monkeypatch):
    with bucket.manager(tmp_path / "a", keep=keep.last(3)) as manager:
        save_steps(manager, 0, 1, 2)
        manager.pin(1, "kept")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = bucket.content()
    with bucket.reader(endpoint=proxy.endpoint) as reader:
        assert_loads(reader, 0, 1, 2)
        assert_same(dict(reader.load("tag:kept")), state_of(1))
        assert reader.verify().ok
        assert {entry.name for entry in reader.entries()} == {"changing", "frozen"}
        with pytest.raises(TensorNotFoundError):
            reader.load(names=["nothing"])
    assert proxy.requests
    assert proxy.writes() == []
    assert bucket.content() == before
    assert not (tmp_path / "cache").exists()


def test_a_reader_sees_what_is_pushed_after_it_was_opened(quick_bucket, tmp_path):
    with quick_bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0)
        manager.sync_now()
        with quick_bucket.reader() as reader:
            assert_loads(reader, 0)
            save_steps(manager, 1)
            manager.sync_now()
            assert_loads(reader, 0, 1)


def test_a_few_tensors_move_little_more_than_their_bytes(bucket, proxy, tmp_path):
    count, each_bytes = 32, 1 << 20
    generator = torch.Generator().manual_seed(1)
    state = {
        f"t{number}": torch.randint(256, (each_bytes,), dtype=torch.uint8, generator=generator)
        for number in range(count)
    }
    with bucket.manager(tmp_path / "a") as manager:
        manager.save_sync(0, state, rng=False)
    with bucket.reader(endpoint=proxy.endpoint) as reader:
        loaded = reader.load(names=["t3", "t20"])
    assert_same(dict(loaded), {"t3": state["t3"], "t20": state["t20"]})
    _, down_bytes = proxy.moved_bytes()
    assert 2 * each_bytes <= down_bytes <= 1.1 * 2 * each_bytes + (1 << 20)
    proxy.clear()
    # A snapshot that lies only in the bucket, seen by a writer: the same.
    with bucket.manager(tmp_path / "b", endpoint=proxy.endpoint) as manager:
        loaded = manager.load(names=["t3", "t20"])
    assert_same(dict(loaded), {"t3": state["t3"], "t20": state["t20"]})
    _, down_bytes = proxy.moved_bytes()
    assert 2 * each_bytes <= down_bytes <= 1.1 * 2 * each_bytes + (1 << 20)


def test_a_second_save_moves_what_changed(quick_bucket, proxy_before, tmp_path):
    proxy = proxy_before(quick_bucket)
    state = {"frozen": np.random.default_rng(1).integers(0, 256, 4 << 20, dtype=np.uint8), "step": 0}
    with quick_bucket.manager(tmp_path / "a", endpoint=proxy.endpoint) as manager:
        manager.save_sync(0, state, rng=False)
        manager.sync_now()
        assert proxy.moved_bytes()[0] >= 4 << 20
        proxy.clear()
        manager.save_sync(1, {**state, "step": 1}, rng=False)
        manager.sync_now()
        assert proxy.moved_bytes()[0] <= 100_000
        # Whose bucket it is, and whether it is still ours, is asked each time.
        read = {one.key.rpartition("/")[2] for one in proxy.matching("get")}
        assert read <= {"varvite.json", "lease.json"}


# What is gone here is gone there, and nothing else


def test_retention_is_mirrored(bucket, tmp_path):
    with bucket.manager(tmp_path / "a", keep=keep.last(2)) as manager:
        for step in range(5):
            save_steps(manager, step)
            manager.sync_now()
        manager.prune()
        manager.sync_now()
        assert [info.step for info in manager.snapshots()] == [3, 4]
        assert_pushed(bucket, tmp_path / "a")
        assert manager.stats().sync.removed_objects > 0
    assert bucket.seqs() == [4, 5]
    assert bucket.check_whole(tmp_path / "look") == [3, 4]


def test_retention_takes_nothing_that_is_not_pushed(quick_bucket, tmp_path):
    with quick_bucket.manager(tmp_path / "a", keep=keep.last(1), sync_every=100) as manager:
        manager.sync_now()  # what opening has begun
        save_steps(manager, 0, 1, 2)
        plan = manager.prune()
        assert [info.step for info in manager.snapshots()] == [0, 1, 2]
        assert [step for _, step, reasons in plan.kept if "not pushed yet" in reasons] == [0, 1, 2]
        manager.sync_now()
        manager.prune()
        manager.sync_now()
        assert [info.step for info in manager.snapshots()] == [2]
    assert quick_bucket.seqs() == [3]


def test_retention_takes_what_is_not_pushed_where_it_is_told_to(quick_bucket, tmp_path):
    options = {"prune_unpushed": True}
    with quick_bucket.manager(
        tmp_path / "a", keep=keep.last(1), sync_every=100, remote_options=options
    ) as manager:
        save_steps(manager, 0, 1, 2)
        manager.prune()
        assert [info.step for info in manager.snapshots()] == [2]
    assert quick_bucket.seqs() == [3]
    assert_pushed(quick_bucket, tmp_path / "a")


def test_deletions_and_pins_are_mirrored_also_of_what_lies_only_there(bucket, tmp_path):
    with bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0, 1, 2)
        manager.pin(0, "first")
    with bucket.manager(tmp_path / "b") as manager:
        manager.unpin("first")
        manager.delete(0)
        manager.pin(1, "second")
        assert [info.step for info in manager.snapshots()] == [1, 2]
        manager.sync_now()
    assert bucket.seqs() == [2, 3]
    assert bucket.names("tags/") == ["tags/second"]
    assert bucket.check_whole(tmp_path / "look") == [1, 2]


def test_a_merge_is_mirrored(bucket, tmp_path):
    with bucket.manager(tmp_path / "a", merge=MergePolicy(), keep=keep.last(2)) as manager:
        for step in range(6):
            save_steps(manager, step)
            manager.sync_now()
        manager.merge_now()
        manager.prune()
        manager.sync_now()
        assert_pushed(bucket, tmp_path / "a")
    assert bucket.check_whole(tmp_path / "look") == [4, 5]


def test_foreign_objects_are_left_alone(bucket, tmp_path):
    foreign = {
        "notes.txt": b"mine",
        "packs/readme": b"mine",
        "packs/deeper/1-r0-0000000000000001.pack": b"mine",
        "snapshots/latest": b"mine",
        "logs/x y&z": b"mine",
        PACK: b"of a machine that is gone",
    }
    for name, data in foreign.items():
        bucket.put(name, data)
    with bucket.manager(tmp_path / "a", keep=keep.last(1)) as manager:
        for step in range(3):
            save_steps(manager, step)
            manager.sync_now()
        manager.prune()
        manager.sync_now()
    assert {name: data for name, data in bucket.content().items() if name in foreign} == foreign
    assert bucket.seqs() == [3]


def test_packs_that_nobody_names_go_when_they_are_old(bucket, tmp_path):
    bucket.put(PACK, b"of a machine that is gone")
    bucket.put("notes.txt", b"mine")
    with bucket.manager(tmp_path / "a", remote_options={"orphan_hours": 1e-7}) as manager:
        save_steps(manager, 0)
        manager.sync_now()
    with bucket.manager(tmp_path / "a", remote_options={"orphan_hours": 1e-7}) as manager:
        save_steps(manager, 1)
        manager.sync_now()
    assert PACK not in bucket.names()
    assert bucket.get("notes.txt") == b"mine"
    assert bucket.check_whole(tmp_path / "look") == [0, 1]


def test_uploads_of_a_machine_that_is_gone_are_ended_and_foreign_ones_are_not(bucket, tmp_path):
    foreign = f"{bucket.prefix}/notes.bin"
    identity = bucket.client.create_multipart_upload(Bucket=BUCKET, Key=foreign)["UploadId"]
    with bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0)
        manager.sync_now()
    assert bucket.uploads() == ["notes.bin"]
    bucket.client.abort_multipart_upload(Bucket=BUCKET, Key=foreign, UploadId=identity)


def test_what_somebody_lost_here_is_kept_there(bucket, tmp_path):
    with bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0, 1)
        manager.pin(0, "kept")
    before = ours_in(bucket)
    for folder in ("packs", "snapshots", "receipts"):
        for path in (tmp_path / "a" / folder).iterdir():
            path.unlink()
    with bucket.manager(tmp_path / "a") as manager:
        assert_loads(manager, 0, 1)
        manager.sync_now()
    assert ours_in(bucket) == before


def test_a_lost_journal_is_made_again_and_nothing_is_sent_twice(bucket, proxy, tmp_path):
    with bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0, 1)
    before = ours_in(bucket)
    shutil.rmtree(tmp_path / "a" / "sync")
    with bucket.manager(tmp_path / "a", endpoint=proxy.endpoint) as manager:
        assert manager.sync_now().pending_objects == 0
        assert manager.stats().sync.unpushed == []
    assert [one.key for one in proxy.writes() if "/packs/" in one.key or "/snapshots/" in one.key] == []
    assert ours_in(bucket) == before


# Prefixes


@pytest.mark.parametrize(
    "prefix",
    [
        "a b/run",
        "a+b/run",
        "a&b=c;d/run",
        "ä/日本/run",
        "a%2Fb/run",
        "a'()!*,~@$:/run",
        "deep/er/and/deep/er",
        "trailing/",
    ],
)
@pytest.mark.parametrize("name", ["moto", "seaweedfs"])
def test_a_prefix_of_any_characters(request, bucket_on, tmp_path, name, prefix):
    bucket = bucket_on(request.getfixturevalue(name), prefix)
    with bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0)
        manager.sync_now()
    assert "varvite.json" in bucket.at(bucket.prefix.rstrip("/"))
    with bucket.reader() as reader:
        assert_loads(reader, 0)


def test_two_runs_in_one_bucket_know_nothing_of_each_other(quick_bucket, seaweedfs, bucket_on, tmp_path):
    parent = quick_bucket
    child = bucket_on(seaweedfs)
    child.prefix = f"{parent.prefix}/packs"  # the nastiest place for another run
    beside = bucket_on(seaweedfs)
    beside.prefix = f"{parent.prefix}-2"  # starts with the same letters
    for number, one in enumerate((parent, child, beside)):
        with one.manager(tmp_path / f"{number}", keep=keep.last(1)) as manager:
            save_steps(manager, 10 * number, 10 * number + 1)
            manager.sync_now()
            manager.prune()
    for number, one in enumerate((parent, child, beside)):
        with one.reader() as reader:
            assert_loads(reader, 10 * number + 1)


# The folder and the bucket disagree


def test_a_folder_that_comes_back_with_numbers_of_another_writer(quick_bucket, tmp_path):
    with quick_bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0)
    with CheckpointManager(tmp_path / "a") as manager:
        save_steps(manager, 1)  # seq 2, only here
    with quick_bucket.manager(tmp_path / "b") as manager:
        save_steps(manager, 7)  # seq 2, there
    before = sent_from(tmp_path / "a")
    with pytest.raises(CommitConflictError) as caught:
        quick_bucket.manager(tmp_path / "a")
    assert "2" in str(caught.value)
    assert sent_from(tmp_path / "a") == before
    with (
        pytest.warns(RuntimeWarning, match="2"),
        quick_bucket.manager(tmp_path / "a", remote_options={"diverged": "discard"}) as manager,
    ):
        assert_loads(manager, 0, 7)
    assert quick_bucket.check_whole(tmp_path / "look") == [0, 7]


def test_a_folder_of_another_run_is_refused(quick_bucket, tmp_path):
    with quick_bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0)
    with CheckpointManager(tmp_path / "other") as manager:
        save_steps(manager, 5)
    before, there = sent_from(tmp_path / "other"), ours_in(quick_bucket)
    with pytest.raises(CheckpointError, match=quick_bucket.prefix):
        quick_bucket.manager(tmp_path / "other")
    assert sent_from(tmp_path / "other") == before
    assert ours_in(quick_bucket) == there


def test_a_damaged_object_in_the_bucket_is_found_and_never_loaded(quick_bucket, tmp_path):
    with quick_bucket.manager(tmp_path / "a") as manager:
        save_steps(manager, 0)
    name = quick_bucket.names("packs/")[0]
    whole = quick_bucket.get(name)
    data = bytearray(whole)
    data[whole.index(state_of(0)["changing"].tobytes()[:16]) + LENGTH_BYTES // 2] ^= 1
    quick_bucket.put(name, bytes(data))
    with quick_bucket.reader() as reader:
        with pytest.raises(CorruptionError) as caught:
            reader.load("seq:1")
        assert name in str(caught.value)
        assert not reader.verify().ok
    quick_bucket.delete(name)
    with quick_bucket.reader() as reader, pytest.raises((CorruptionError, StoreError)) as caught:
        reader.load("seq:1")
    assert name in str(caught.value)
