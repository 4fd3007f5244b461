"""`save_dtype`: what is stored narrower, what is not, and what comes back."""

import pytest
import torch
from support import assert_same

from varvite import CheckpointManager
from varvite.errors import InvalidInputError, MismatchError


def open_manager(path, save_dtype, **arguments):
    return CheckpointManager(path, save_dtype=save_dtype, fsync=False, **arguments)


def stored_dtypes(manager):
    return {entry.name: entry.stored_dtype for entry in manager.entries() if entry.rank is None}


def trained(steps=3, dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)).to(
        dtype
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.randn(4, 8, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("save_dtype", "torch_dtype", "stored"),
    [
        ("bf16", torch.bfloat16, "bfloat16"),
        ("fp16", torch.float16, "float16"),
        ("fp8_e5m2", torch.float8_e5m2, "float8_e5m2"),
    ],
)
def test_floats_come_back_in_their_own_dtype_rounded_once(tmp_path, save_dtype, torch_dtype, stored):
    weight = torch.randn(200, 30)
    with open_manager(tmp_path, save_dtype) as manager:
        manager.save_sync(1, {"weight": weight, "count": torch.arange(5), "scale": torch.tensor(0.1)})
        loaded = manager.load()
        assert stored_dtypes(manager) == {"weight": stored, "count": "int64", "scale": "float32"}
    assert loaded["weight"].dtype == torch.float32
    if save_dtype == "fp8_e5m2":  # scaled by a power of two, so relative errors are those of the dtype
        largest = weight.abs().max()
        assert ((loaded["weight"] - weight).abs() <= (weight.abs() / 8).clamp_min(largest / 50_000)).all()
    else:
        assert_same(loaded["weight"], weight.to(torch_dtype).float())
    assert_same(loaded["count"], torch.arange(5))
    assert_same(loaded["scale"], torch.tensor(0.1))


@pytest.mark.parametrize("from_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("save_dtype", ["fp64", "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_only_a_narrower_float_is_a_cast(tmp_path, from_dtype, save_dtype):
    sizes = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
    value = torch.tensor([1.0, -0.0, 0.5, -2.0]).to(from_dtype)
    with open_manager(tmp_path, save_dtype) as manager:
        manager.save_sync(1, {"value": value})
        entry = next(entry for entry in manager.entries() if entry.name == "value")
        is_cast = sizes[save_dtype] < from_dtype.itemsize
        assert (entry.stored_dtype != entry.dtype) == is_cast
        assert entry.raw_bytes == 4 * min(sizes[save_dtype], from_dtype.itemsize)
        assert_same(manager.load()["value"], value)


def test_special_values_keep_their_meaning(tmp_path):
    value = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 3.4e38])
    with open_manager(tmp_path, "bf16") as manager:
        manager.save_sync(1, {"value": value})
        loaded = manager.load()["value"]
        assert torch.isnan(loaded[0])
        assert loaded[1:4].tolist() == [float("inf"), -float("inf"), 0.0]
        assert torch.signbit(loaded[3])
        assert manager.info().nonfinite == {"value": 4 if torch.isinf(value[5].bfloat16()) else 3}


def test_the_first_rule_that_matches_decides(tmp_path):
    model, optimizer = trained()
    rules = {"model.1.*": "fp32", "*.exp_avg_sq": "fp32", "optimizer.*": "bf16", "model.*": "fp16"}
    with open_manager(tmp_path, rules) as manager:
        manager.save_sync(1, model=model, optimizer=optimizer)
        found = stored_dtypes(manager)
    assert found["model.0.weight"] == "float16"
    assert found["model.1.weight"] == "float32"
    assert found["optimizer.state.0.weight.exp_avg"] == "bfloat16"
    assert found["optimizer.state.0.weight.exp_avg_sq"] == "float32"
    assert found["optimizer.state.0.weight.step"] == "float32"


def test_a_rule_that_matches_nothing_is_an_error_at_the_first_save(tmp_path):
    with open_manager(tmp_path, {"optimiser.*": "bf16"}) as manager:
        with pytest.raises(InvalidInputError, match="`optimiser") as caught:
            manager.save_sync(1, {"weight": torch.zeros(3)})
        assert caught.value.what == "save_dtype"
        assert manager.snapshots() == []


def test_resume_restores_a_cast_optimizer_in_place(tmp_path):
    model, optimizer = trained()
    with open_manager(tmp_path, {"optimizer.*": "bf16"}) as manager:
        manager.save_sync(3, model=model, optimizer=optimizer)
        live_model, live_optimizer = trained(steps=1)
        report = manager.resume(model=live_model, optimizer=live_optimizer)
    assert report.next_step == 4
    assert_same(dict(live_model.state_dict()), dict(model.state_dict()))
    for live, saved in zip(live_optimizer.state.values(), optimizer.state.values(), strict=True):
        assert live["exp_avg"].dtype == torch.float32
        assert_same(live["exp_avg"], saved["exp_avg"].bfloat16().float())


def test_a_tie_is_stored_once_whatever_the_rules_say_of_its_names(tmp_path):
    weight = torch.randn(10, 10)
    with open_manager(tmp_path, {"a": "bf16", "b": "fp16"}) as manager:
        manager.save_sync(1, {"a": weight, "b": weight})
        loaded = manager.load()
        assert stored_dtypes(manager) == {"a": "bfloat16", "b": "bfloat16"}
    assert loaded["a"] is loaded["b"] or loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert_same(loaded["a"], weight.bfloat16().float())


def test_a_manager_without_the_rule_reads_casts_and_saves_without(tmp_path):
    weight = torch.randn(100)
    with open_manager(tmp_path, "bf16") as manager:
        manager.save_sync(1, {"weight": weight})
    with CheckpointManager(tmp_path, fsync=False) as manager:
        assert_same(manager.load()["weight"], weight.bfloat16().float())
        manager.save_sync(2, {"weight": weight})
        assert_same(manager.load()["weight"], weight)
        assert_same(manager.load(1)["weight"], weight.bfloat16().float())


def test_load_into_another_dtype_than_the_callers_is_still_refused(tmp_path):
    with open_manager(tmp_path, "bf16") as manager:
        manager.save_sync(1, {"weight": torch.randn(10)})
        with pytest.raises(MismatchError, match="weight"):
            manager.load_into({"weight": torch.zeros(10, dtype=torch.bfloat16)})


def test_mmap_reads_what_is_cast(tmp_path):
    weight = torch.randn(3000)
    with open_manager(tmp_path, "bf16") as manager:
        manager.save_sync(1, {"weight": weight, "index": torch.arange(3000)})
        loaded = manager.load(mmap=True)
    assert_same(loaded["weight"], weight.bfloat16().float())
    assert_same(loaded["index"], torch.arange(3000))
