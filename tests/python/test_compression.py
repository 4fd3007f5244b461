"""Coding and differences on real training states: what comes back is what was saved, bit for bit."""

import copy
import random

import pytest
import torch
from support import assert_same

from varvite import CheckpointManager, MergePolicy, keep


class Training:
    """A small language model on repeating text, with everything a real run has: embeddings, norms, AdamW."""

    def __init__(self, lr, dtype=torch.float32):
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(64, 64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
        ).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.generator = torch.Generator().manual_seed(1)
        self.steps(30)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def steps(self, count):
        for _ in range(count):
            tokens = torch.randint(64, (32,), generator=self.generator)
            loss = torch.nn.functional.cross_entropy(self.model(tokens).float(), (tokens * 7 + 3) % 64)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def snapshot(self):
        return copy.deepcopy(
            {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()["state"]}
        )


def found(manager, ref):
    loaded = manager.load(ref)
    moments = loaded["optimizer"]["state"]
    return {"model": dict(loaded["model"]), "optimizer": dict(enumerate(moments.values()))}


def published(weights):
    """A bf16 copy of weights, as a run publishes it."""
    return {name: value.to(torch.bfloat16) for name, value in weights.items()}


@pytest.mark.parametrize("lr", [3e-4, 3e-5, 1e-6])
@pytest.mark.parametrize("compression", ["fast", "max"])
def test_ten_saves_of_a_run_come_back_in_any_order_of_pruning_and_merging(tmp_path, lr, compression):
    training = Training(lr)
    order = random.Random(lr)
    expected = {}
    options = {"compression": compression, "fsync": False, "chunk_bytes": 16 << 10, "keep": keep.last(100)}
    options["merge"] = MergePolicy(stride=3)
    with CheckpointManager(tmp_path, **options) as manager:
        for step in range(10):
            training.steps(1)
            manager.save(step, {"copy": published(training.model.state_dict())}, **training.objects)
            expected[step] = training.snapshot()
        manager.flush()
        while expected:
            for step, state in expected.items():
                assert_same(found(manager, step), state)
            assert manager.verify().ok
            if order.random() < 0.4:
                manager.merge_now()
                continue
            step = order.choice(list(expected))
            del expected[step]
            manager.delete(step)
    with CheckpointManager(tmp_path, **options) as manager:
        manager.save_sync(0, {"last": torch.zeros(3)}, rng=False)
        manager.prune()
    assert len(list((tmp_path / "packs").iterdir())) == 1


def bytes_of(manager, ref, prefix):
    rows = [entry for entry in manager.entries(ref) if entry.name.startswith(prefix)]
    return sum(row.raw_bytes for row in rows), sum(row.stored_bytes for row in rows)


def test_weights_at_a_small_learning_rate_cost_little(tmp_path):
    training = Training(1e-6)
    with CheckpointManager(tmp_path, compression="fast", fsync=False) as manager:
        manager.save_sync(0, {"copy": published(training.model.state_dict())}, rng=False)
        training.steps(1)
        state = published(training.model.state_dict())
        manager.save_sync(1, {"copy": state}, rng=False)
        raw, stored = bytes_of(manager, 1, "copy")
        assert stored * 20 < raw
        assert_same(manager.load()["copy"], state)


def test_delta_false_stores_every_chunk_by_itself(tmp_path):
    training = Training(3e-4)
    with CheckpointManager(tmp_path, compression="fast", delta=False, fsync=False) as manager:
        for step in range(2):
            manager.save_sync(step, rng=False, **training.objects)
            training.steps(1)
        assert manager.info().kind == "base"
        raw, stored = bytes_of(manager, "latest", "")
        assert stored < raw / 1.1


def test_a_copy_of_the_master_weights_costs_nothing(tmp_path):
    training = Training(3e-4)
    weights = published(training.model.state_dict())
    with CheckpointManager(tmp_path, compression="fast", fsync=False) as manager:
        manager.save_sync(0, {"copy": weights}, **training.objects)
        large = [
            entry for entry in manager.entries() if entry.name.startswith("copy") and entry.raw_bytes > 512
        ]
        assert [entry.stored_bytes for entry in large] == [0] * 3
        assert_same(manager.load()["copy"], weights)
        assert_same(manager.load(names=["copy.*"])['copy."1.weight"'], weights["1.weight"])
        live = {name: torch.zeros_like(value) for name, value in weights.items()}
        manager.load_into(live, prefix="copy")
        assert_same(live, weights)


def test_a_fresh_process_takes_differences_to_what_it_finds(tmp_path):
    training = Training(1e-6)
    with CheckpointManager(tmp_path, compression="fast", fsync=False) as manager:
        manager.save_sync(0, **training.objects)
    training.steps(1)
    with CheckpointManager(tmp_path, compression="fast", fsync=False) as manager:
        info = manager.save_sync(1, **training.objects)
        assert info.kind == "delta"
        assert_same(found(manager, 1), training.snapshot())


def test_auto_does_not_code_before_it_knows_the_store(tmp_path):
    with CheckpointManager(tmp_path, fsync=False) as manager:
        info = manager.save_sync(0, {"zeros": torch.zeros(100_000)}, rng=False)
        assert info.stored_bytes > info.raw_bytes
