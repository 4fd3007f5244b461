"""Saves and resumes of all ranks together, in real processes over gloo."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist

import varvite
from varvite.errors import (
    CheckpointError,
    InvalidInputError,
    MismatchError,
    SnapshotNotFoundError,
)


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))


def stepped(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = model_of(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def saves_and_resumes(folder, in_background):
    """Replicas are written once; what each rank has for itself comes back to it."""
    rank = dist.get_rank()
    model, optimizer = stepped(0)
    torch.manual_seed(100 + rank)
    with varvite.CheckpointManager(folder) as manager:
        assert manager.resume(model=model, optimizer=optimizer).fresh
        saved = {"model": model, "optimizer": optimizer, "cache": {"hits": rank}, "rank_local": ["cache"]}
        info = manager.save(3, **saved).wait() if in_background else manager.save_sync(3, **saved)
        drawn = torch.rand(3)
        torch.manual_seed(0)
        other, other_optimizer = stepped(5)
        cache = {"hits": -1}
        report = manager.resume(model=other, optimizer=other_optimizer, cache=cache)
        assert torch.equal(torch.rand(3), drawn)
        assert report.rng == "restored"
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    return info.world_size, info.seq, report.next_step, cache["hits"]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("in_background", [True, False])
def test_all_ranks_save_and_resume(tmp_path, size, in_background):
    found = ranks.run(size, saves_and_resumes, tmp_path, in_background)
    assert found == [(size, 1, 4, rank) for rank in range(size)]


def saves_replicas(folder):
    with varvite.CheckpointManager(folder, compression="none") as manager:
        state = {f"layer{number}": torch.full((1000, 64), float(number)) for number in range(8)}
        info = manager.save_sync(1, state, rng=False)
    return info.stored_bytes


def test_replicas_are_written_once_and_spread_over_the_ranks(tmp_path):
    (stored, *_) = ranks.run(4, saves_replicas, tmp_path)
    raw = 8 * 1000 * 64 * 4
    assert raw < stored < raw * 1.1
    packs = sorted((tmp_path / "packs").iterdir())
    assert [path.name.split("-")[1] for path in packs] == ["r0", "r1", "r2", "r3"]
    for path in packs:
        assert raw / 4 <= path.stat().st_size < raw / 4 * 1.1


def saves_unequal(folder):
    rank = dist.get_rank()
    with varvite.CheckpointManager(folder) as manager:
        with pytest.raises(MismatchError) as caught:
            manager.save_sync(1, {"same": torch.ones(4), "other": torch.full((4,), float(rank == 2))})
        assert manager.snapshots() == []
        manager.save_sync(2, {"same": torch.ones(4), "other": torch.ones(4)})
        return str(caught.value), [info.step for info in manager.snapshots()]


def test_replicas_that_differ_are_an_error_on_every_rank_that_names_them(tmp_path):
    for text, steps in ranks.run(3, saves_unequal, tmp_path):
        assert "`other`" in text
        assert "2" in text
        assert steps == [2]


def saves_different_values(folder):
    with varvite.CheckpointManager(folder) as manager, pytest.raises(MismatchError) as caught:
        manager.save_sync(1, {"loss": 0.5 + dist.get_rank()})
    return str(caught.value)


def test_plain_values_that_differ_are_an_error_and_not_lost(tmp_path):
    for text in ranks.run(2, saves_different_values, tmp_path):
        assert "loss" in text


class Unsavable:
    """Nothing can save it."""


def one_rank_fails(folder, bad):
    rank = dist.get_rank()
    with varvite.CheckpointManager(folder) as manager:
        with pytest.raises(InvalidInputError) as caught:
            manager.save(1, {"value": Unsavable() if rank == bad else 3})
        info = manager.save_sync(2, {"value": 3})
    return str(caught.value), info.seq, getattr(caught.value, "rank", None)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_ranks_failure_is_raised_by_all_and_the_next_save_works(tmp_path, bad):
    for rank, (text, seq, named) in enumerate(ranks.run(3, one_rank_fails, tmp_path, bad)):
        assert "value" in text
        assert seq == 1
        if rank != bad:
            assert named == bad
            assert f"rank {bad}" in text


def different_steps(folder):
    with varvite.CheckpointManager(folder) as manager:
        with pytest.raises(MismatchError, match="rank 0 saves 7, but rank 1: 8"):
            manager.save(7 + dist.get_rank(), {"value": 3})
        return len(manager.snapshots())


def test_ranks_at_different_steps_are_refused(tmp_path):
    assert ranks.run(2, different_steps, tmp_path) == [0, 0]


def stages(folder, size):
    """Each rank has the layers of one pipeline stage, under their global names."""
    rank = dist.get_rank()
    layers = [layer for layer in range(6) if layer * size // 6 == rank]
    model = torch.nn.ModuleDict({f"{layer}": torch.nn.Linear(4, 4) for layer in layers})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def saves_stages(folder):
    torch.manual_seed(dist.get_rank())
    model, optimizer = stages(folder, dist.get_world_size())
    for layer in model.values():
        layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with varvite.CheckpointManager(folder) as manager:
        manager.save_sync(1, model=model, optimizer=optimizer)
    return {name: value.tolist() for name, value in model.state_dict().items()}


def resumes_stages(folder):
    model, optimizer = stages(folder, dist.get_world_size())
    with varvite.CheckpointManager(folder) as manager:
        report = manager.resume(model=model, optimizer=optimizer)
    moments = sum(value["exp_avg"].abs().sum().item() > 0 for value in optimizer.state.values())
    return {name: value.tolist() for name, value in model.state_dict().items()}, moments, report.unexpected


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 2)])
def test_the_pipeline_degree_may_change(tmp_path, before, after):
    saved = {}
    for values in ranks.run(before, saves_stages, tmp_path):
        saved |= values
    restored, moments = {}, 0
    for values, count, unexpected in ranks.run(after, resumes_stages, tmp_path):
        restored |= values
        moments += count
        assert unexpected == []
    assert restored == saved
    assert moments == 12


def resumes_nothing(folder):
    with varvite.CheckpointManager(folder) as manager:
        fresh = manager.resume(model=model_of(0)).fresh
        with pytest.raises(SnapshotNotFoundError):
            manager.resume(model=model_of(0), require=True)
        with pytest.raises(SnapshotNotFoundError) as caught:
            manager.resume("step:9", model=model_of(0))
    return fresh, str(caught.value)


def test_whether_there_is_a_snapshot_is_decided_once(tmp_path):
    for fresh, text in ranks.run(2, resumes_nothing, tmp_path):
        assert fresh
        assert "step:9" in text


def kills_a_rank(folder):
    with varvite.CheckpointManager(folder) as manager:
        manager.save_sync(1, {"value": torch.ones(3)})
        ranks.at("saved")
        with pytest.raises(CheckpointError) as caught:
            manager.save_sync(2, {"value": torch.ones(3)})
        return str(caught.value), getattr(caught.value, "missing_ranks", None)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_died_is_named_by_the_others(tmp_path, dead):
    with ranks.start(3, kills_a_rank, tmp_path) as group:
        group.wait_for("saved")
        group.kill(dead)
        outcomes = group.outcomes()
    for rank, outcome in enumerate(outcomes):
        if rank != dead:
            assert f"{dead}" in outcome.value[0]
    with varvite.CheckpointManager(tmp_path) as manager:
        assert [info.step for info in manager.snapshots()] == [1]


def opens(folders):
    with pytest.raises(CheckpointError) as caught:
        varvite.CheckpointManager(folders[dist.get_rank()])
    return type(caught.value).__name__, str(caught.value)


def test_folders_of_one_name_that_are_not_one_folder_are_found_at_once(tmp_path):
    folders = [tmp_path / "a", tmp_path / "a", tmp_path / "b"]
    for kind, text in ranks.run(3, opens_impatiently, folders):
        assert kind == "StoreError"
        assert "rank" in text
        assert "2" in text


def opens_impatiently(folders):
    from varvite.distributed import together

    patient = together.check_shared_folder
    together.check_shared_folder = lambda *args, **options: patient(*args, **options, seconds=0.3)
    return opens(folders)


def opens_as_another_version(folder):
    if dist.get_rank() == 1:
        varvite.__version__ = "9.9.9"
    return opens([folder] * 3)


def test_ranks_with_different_versions_are_refused_and_named(tmp_path):
    for kind, text in ranks.run(3, opens_as_another_version, tmp_path):
        assert kind == "MismatchError"
        assert "9.9.9" in text
        assert "1" in text
    assert not (tmp_path / "varvite.json").exists()


def opens_where_it_is_locked(folder):
    return opens([folder] * 2)


def test_what_stands_against_opening_is_raised_on_all_ranks(tmp_path):
    with varvite.CheckpointManager(tmp_path):
        for kind, text in ranks.run(2, opens_where_it_is_locked, tmp_path):
            assert kind == "RepositoryLockedError"
            assert "is locked" in text


def draws_after_resume(folder, mode):
    with varvite.CheckpointManager(folder) as manager:
        if mode == "exact":
            with pytest.raises(
                MismatchError, match=r"\d ranks restore, but the snapshot was saved by"
            ) as caught:
                manager.resume(value={"x": 1}, rank_local=mode)
            return caught.value.found
        report = manager.resume(value={"x": 1}, rank_local=mode)
        return report.rng, torch.rand(2).tolist()


def saves_draws(folder):
    torch.manual_seed(dist.get_rank())
    with varvite.CheckpointManager(folder) as manager:
        manager.save_sync(1, value={"x": 1})
    return torch.rand(2).tolist()


def test_generators_on_another_number_of_ranks_are_derived_or_refused_as_told(tmp_path):
    drawn = ranks.run(3, saves_draws, tmp_path)
    same = ranks.run(3, draws_after_resume, tmp_path, "derive")
    assert same == [("restored", one) for one in drawn]
    first = ranks.run(2, draws_after_resume, tmp_path, "derive")
    assert [rng for rng, _ in first] == ["derived", "derived"]
    draws = [one for _, one in first]
    assert len({tuple(one) for one in draws + drawn}) == 5
    assert ranks.run(2, draws_after_resume, tmp_path, "derive") == first
    assert ranks.run(2, draws_after_resume, tmp_path, "exact") == [3, 3]


def sees_late(folder):
    """Rank 1 sees the newest snapshot only after a while, as on some network file systems."""
    import varvite.repository as module
    from varvite.errors import SnapshotNotFoundError

    looks = []
    real = module.SnapshotView
    if dist.get_rank() == 1:

        def late(engine, seq, rank):
            looks.append(seq)
            if len(looks) < 4:
                raise SnapshotNotFoundError("no snapshot yet")
            return real(engine, seq, rank)

        module.SnapshotView = late
    with varvite.CheckpointManager(folder) as manager:
        value = {"x": 0}
        report = manager.resume(value=value)
    return report.step, value["x"], looks


def test_a_rank_that_sees_a_snapshot_late_waits_for_it(tmp_path):
    with varvite.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save_sync(step, value={"x": step})
    assert ranks.run(2, sees_late, tmp_path) == [(2, 2, []), (2, 2, [2, 2, 2, 2])]


def one_sees_damage(folder):
    import varvite.reading as module
    from varvite.errors import CorruptionError

    if dist.get_rank() == 1:
        real = module.SnapshotView.read

        def read(self, destinations):
            if self.header["step"] == 2:
                raise CorruptionError("corrupt chunk", what="chunk")
            return real(self, destinations)

        module.SnapshotView.read = read
    import warnings

    with varvite.CheckpointManager(folder) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = {"x": torch.zeros(3)}
        report = manager.resume(value=value)
    return report.step, value["x"].tolist(), [seq for seq, _ in report.skipped_snapshots]


def test_all_ranks_fall_back_where_one_meets_damage(tmp_path):
    with varvite.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save_sync(step, value={"x": torch.full((3,), float(step))})
    assert ranks.run(2, one_sees_damage, tmp_path) == [(1, [1.0] * 3, [2])] * 2


def many_saves(folder):
    """Saves in the background beside collectives of training on the default group."""
    with varvite.CheckpointManager(folder, keep=varvite.keep.last(2)) as manager:
        weight = torch.zeros(100)
        for step in range(60):
            dist.all_reduce(torch.ones(10))
            weight += 1
            manager.save(step, weight=weight, rng=False)
            dist.all_reduce(torch.ones(10))
        manager.flush()
        return [info.step for info in manager.snapshots()], manager.load()["weight"][0].item()


def test_many_saves_beside_collectives_of_training(tmp_path):
    assert ranks.run(2, many_saves, tmp_path) == [([58, 59], 60.0)] * 2


def is_interrupted_while_it_writes(folder, victim):
    """Ctrl-C in a save that writes straight from the tensors: nothing is committed, and nothing torn."""
    import _thread
    import threading

    import varvite.distributed.together as module

    with varvite.CheckpointManager(folder) as manager:
        value = torch.zeros(1000)
        if dist.get_rank() == victim:
            real = module.RankSave.write_from

            def interrupted(self, payload):
                real(self, payload)
                _thread.interrupt_main()

            module.RankSave.write_from = interrupted
            with pytest.raises(KeyboardInterrupt):
                manager.save_sync(1, {"value": value})
            value.fill_(7)
            module.RankSave.write_from = real
        else:
            with pytest.raises(CheckpointError) as caught:
                manager.save_sync(1, {"value": value})
            assert "interrupted" in str(caught.value)
        assert threading.active_count() < 10
        info = manager.save_sync(2, {"value": torch.ones(3)})
        return info.step, [info.step for info in manager.snapshots()]


@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupt_of_a_save_that_waits_leaves_nothing_torn(tmp_path, victim):
    for step, steps in ranks.run(2, is_interrupted_while_it_writes, tmp_path, victim):
        assert step == 2
        assert steps in ([2], [1, 2])


def has_damaged_generators(folder):
    """Rank 1 can't read its generators of the newest snapshot: no rank restores anything of it."""
    import warnings

    import varvite.manager as module
    from varvite.errors import CorruptionError

    real = module.load_rng
    if dist.get_rank() == 1:

        def damaged(view, rank):
            if view.header["step"] == 2:
                raise CorruptionError("corrupt chunk", what="chunk")
            return real(view, rank)

        module.load_rng = damaged
    with varvite.CheckpointManager(folder) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = {"x": torch.zeros(2)}
        report = manager.resume(value=value)
        return report.step, value["x"].tolist(), report.rng


def saves_twice(folder):
    with varvite.CheckpointManager(folder) as manager:
        for step in (1, 2):
            manager.save_sync(step, value={"x": torch.full((2,), float(step))})


def test_damaged_generators_of_one_rank_are_damage_for_all(tmp_path):
    ranks.run(2, saves_twice, tmp_path)
    assert ranks.run(2, has_damaged_generators, tmp_path) == [(1, [1.0, 1.0], "restored")] * 2
