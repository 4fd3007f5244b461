"""Snapshots of several ranks without `torch.distributed`: each rank's own manager, or one for all."""

from __future__ import annotations

import threading

import pytest
import torch

from varvite import CheckpointManager, keep
from varvite.errors import IncompleteSaveError, InvalidInputError, MismatchError


def open_rank(folder, rank, size, **options):
    return CheckpointManager(folder, rank=rank, world_size=size, fsync=False, **options)


def test_one_manager_for_all_ranks(tmp_path):
    with CheckpointManager(tmp_path, fsync=False) as manager:
        session = manager.create_snapshot(7, world_size=3, metrics={"loss": 0.5}, metadata={"run": "a"})
        for rank in (2, 0, 1):
            state = {f"layer{rank}": torch.full((4,), float(rank)), "shared": torch.arange(5)}
            manager.save_rank(session.id, rank, state)
        info = manager.finalize_snapshot(session.id)
        assert (info.step, info.world_size, info.metrics, info.metadata) == (
            7,
            3,
            {"loss": 0.5},
            {"run": "a"},
        )
        loaded = manager.load()
    assert sorted(loaded) == ["layer0", "layer1", "layer2", "shared"]
    assert loaded["layer2"].tolist() == [2.0] * 4
    assert loaded["shared"].tolist() == [0, 1, 2, 3, 4]


def test_a_manager_for_each_rank_whichever_opens_first(tmp_path):
    with open_rank(tmp_path, 1, 2) as second, open_rank(tmp_path, 0, 2) as first:
        session = first.create_snapshot(1)
        assert session.world_size == 2
        report = second.save_rank(
            session.id, 1, {"b": torch.ones(2)}, cache={"hits": 3}, rank_local=["cache"]
        )
        assert report["rank"] == 1
        first.save_rank(session_id=session.id, rank=0, state={"a": torch.zeros(2)})
        first.finalize_snapshot(session.id)
        assert [info.step for info in second.snapshots()] == [1]
        assert second.load()["cache"] == {"hits": 3}
        assert "cache" not in first.load()


def test_ranks_save_at_the_same_time(tmp_path):
    with CheckpointManager(tmp_path, fsync=False) as manager:
        session = manager.create_snapshot(1, world_size=4)
        state = {rank: {f"layer{rank}": torch.full((1 << 18,), float(rank))} for rank in range(4)}
        threads = [
            threading.Thread(target=manager.save_rank, args=(session.id, rank, state[rank]))
            for rank in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        manager.finalize_snapshot(session.id)
        loaded = manager.load()
    for rank in range(4):
        assert torch.equal(loaded[f"layer{rank}"], state[rank][f"layer{rank}"])


def test_missing_ranks_are_named_and_may_still_come(tmp_path):
    with CheckpointManager(tmp_path, fsync=False) as manager:
        session = manager.create_snapshot(1, world_size=3)
        manager.save_rank(session.id, 1, {"a": torch.ones(2)})
        with pytest.raises(IncompleteSaveError, match=r"no part of ranks: \[0, 2\]") as caught:
            manager.finalize_snapshot(session.id)
        assert caught.value.missing_ranks == [0, 2]
        assert manager.snapshots() == []
        for rank in (0, 2):
            manager.save_rank(session.id, rank, {"a": torch.ones(2)})
        assert manager.finalize_snapshot(session.id).step == 1


def test_ranks_that_disagree_are_named_with_the_key(tmp_path):
    with CheckpointManager(tmp_path, fsync=False) as manager:
        session = manager.create_snapshot(1, world_size=2)
        for rank in range(2):
            manager.save_rank(session.id, rank, {"w": torch.full((3,), float(rank))})
        with pytest.raises(MismatchError, match="ranks 0 and 1 disagree on the value of `w`") as caught:
            manager.finalize_snapshot(session.id)
        assert (caught.value.name, caught.value.ranks) == ("w", [0, 1])
        assert "rank_local" in caught.value.hint
        manager.abandon_snapshot(session.id)
        assert manager.save_sync(2, {"w": torch.ones(3)}).step == 2


def test_an_abandoned_snapshot_stays_away_although_all_ranks_have_saved(tmp_path):
    with CheckpointManager(tmp_path, fsync=False) as manager:
        session = manager.create_snapshot(1, world_size=2)
        for rank in range(2):
            manager.save_rank(session.id, rank, {"w": torch.ones(3)})
        manager.abandon_snapshot(session.id)
    with CheckpointManager(tmp_path, fsync=False) as manager:
        assert manager.snapshots() == []
        with pytest.raises(InvalidInputError, match="has not begun it"):
            manager.finalize_snapshot(session.id)


def test_a_snapshot_that_was_not_finalized_is_published_by_the_next_open_if_it_is_whole(tmp_path):
    with CheckpointManager(tmp_path, fsync=False) as manager:
        whole = manager.create_snapshot(1, world_size=2, metrics={"loss": 0.25})
        for rank in range(2):
            manager.save_rank(whole.id, rank, {"w": torch.ones(3)})
    with CheckpointManager(tmp_path, fsync=False) as manager:
        (info,) = manager.snapshots()
        assert (info.step, info.metrics) == (1, {"loss": 0.25})
        part = manager.create_snapshot(2, world_size=2)
        manager.save_rank(part.id, 1, {"w": torch.ones(3)})
    with CheckpointManager(tmp_path, fsync=False) as manager:
        assert [info.step for info in manager.snapshots()] == [1]


def test_what_an_open_session_builds_on_stays(tmp_path):
    frozen = torch.arange(200_000.0)
    with CheckpointManager(tmp_path, fsync=False, keep=keep.last(1)) as manager:
        for step in (1, 2):
            session = manager.create_snapshot(step, world_size=2)
            for rank in range(2):
                manager.save_rank(session.id, rank, {"frozen": frozen, "step": torch.tensor(step)})
            manager.finalize_snapshot(session.id)
        session = manager.create_snapshot(3, world_size=2)
        manager.delete("latest")
        reports = [
            manager.save_rank(session.id, rank, {"frozen": frozen, "step": torch.tensor(3)})
            for rank in range(2)
        ]
        manager.finalize_snapshot(session.id)
        assert torch.equal(manager.load()["frozen"], frozen)
        assert all(report["length_bytes"] < 100_000 for report in reports)


@pytest.mark.parametrize("text", ["", "step-7", "{}"])
def test_what_is_no_session_id_is_refused(tmp_path, text):
    with CheckpointManager(tmp_path, fsync=False) as manager:
        for call in (
            lambda: manager.save_rank(text, 0, {}),
            lambda: manager.finalize_snapshot(text),
            lambda: manager.abandon_snapshot(text),
        ):
            with pytest.raises(InvalidInputError, match="session id"):
                call()


def test_a_save_of_one_rank_of_several_says_how_it_is_done(tmp_path):
    with open_rank(tmp_path, 0, 2) as manager:
        with pytest.raises(InvalidInputError, match="rank 0 of 2, and nothing connects it") as caught:
            manager.save(1, {"w": torch.ones(2)})
        assert "create_snapshot" in caught.value.hint
        with pytest.raises(InvalidInputError, match="has 2 ranks, and no rank 2"):
            manager.save_rank(manager.create_snapshot(1).id, 2, {})
    with open_rank(tmp_path, 1, 2) as manager, pytest.raises(InvalidInputError, match="only the coordinator"):
        manager.create_snapshot(1)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
def test_a_wrong_world_size_is_refused(tmp_path, size):
    with CheckpointManager(tmp_path, fsync=False) as manager, pytest.raises(InvalidInputError) as caught:
        manager.create_snapshot(1, world_size=size)
    assert caught.value.what == "world_size"


def test_a_launchers_word_is_never_adopted_silently(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidInputError, match="rank 1 of 2") as caught:
        CheckpointManager(tmp_path)
    assert (caught.value.rank, caught.value.world_size) == (1, 2)
    with CheckpointManager(tmp_path, rank="auto", world_size="auto") as manager:
        assert manager.snapshots() == []
        with pytest.raises(InvalidInputError, match="only the coordinator"):
            manager.create_snapshot(1)
    with CheckpointManager(tmp_path, rank=0, world_size=1) as manager:
        assert manager.save_sync(1, {"w": 1}).world_size == 1


def test_a_rank_of_its_own_group_needs_torch_distributed(tmp_path):
    with pytest.raises(InvalidInputError, match=r"torch\.distributed is not set up"):
        CheckpointManager(tmp_path, process_group=object())
