"""`varvite diff`, and the arithmetic behind it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import document, save, varvite

from varvite import CheckpointManager
from varvite.cli import exits
from varvite.cli.arithmetic import distance, small_float_values


def test_diff_of_a_snapshot_with_itself_is_equal(run: Path) -> None:
    found = document("diff", run, "10", "tag:first")
    assert (found["equal"], found["changed"], found["unchanged_count"]) == (True, [], 10)
    result = varvite("diff", run, "10", "10")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "equal: 10 tensors")


def test_diff_reads_by_how_much_each_tensor_changed(tmp_path: Path) -> None:
    weight = torch.zeros(3000)
    weight[0] = 4.0
    changed = weight.clone()
    changed[2000] = 3.0
    first = {"small": torch.tensor([3.0, 4.0]), "large": weight, "same": torch.ones(2), "lr": 0.1, "one": 1}
    second = {
        "small": torch.tensor([3.0, 4.5]),
        "large": changed,
        "same": torch.ones(2),
        "lr": 0.2,
        "one": 1.0,
    }
    save(tmp_path / "run", first, second, chunk_bytes=4096)
    found = document("diff", tmp_path / "run", 0, 1, code=exits.FINDINGS)
    assert [(row["name"], row["relative_change"]) for row in found["changed"]] == [
        ("large", 0.75),
        ("small", 0.1),
    ]
    large = found["changed"][0]
    assert (large["changed_bytes"], large["raw_bytes"]) == (4096, 12000)
    assert (large["changed_elements"], large["element_count"], large["largest_change"]) == (1, 3000, 3.0)
    assert found["unchanged_count"] == 1
    assert found["values"] == [
        {"name": "lr", "first": [0.1], "second": [0.2]},
        {"name": "one", "first": [1], "second": [1.0]},
    ]
    text = varvite("diff", tmp_path / "run", 0, 1, "-q")
    assert text.stdout == "different: tensors 2 changed (4.10 kB), 1 unchanged; 2 plain values differ\n"
    assert text.exit_code == exits.FINDINGS


def test_diff_tells_what_is_another_tensor(tmp_path: Path) -> None:
    tied = torch.ones(2)
    first = {"gone": torch.ones(1), "type": torch.ones(2), "shape": torch.ones(2), "a": tied, "b": tied}
    second = {"new": torch.ones(1), "type": torch.ones(2).half(), "shape": torch.ones(1, 2)}
    second |= {"a": tied, "b": tied.clone()}
    save(tmp_path / "run", first, second)
    found = document("diff", tmp_path / "run", 0, 1, code=exits.FINDINGS)
    assert {(row["name"], row["field"]) for row in found["redescribed"]} == {
        ("type", "dtype"),
        ("type", "stored_dtype"),
        ("shape", "shape"),
        ("b", "tied_to"),
    }
    assert [row["name"] for row in found["added"]] == ["new"]
    assert [row["name"] for row in found["removed"]] == ["gone"]
    assert (found["changed"], found["unchanged_count"]) == ([], 1)
    text = varvite("diff", tmp_path / "run", 0, 1).stdout.splitlines()
    assert "different: tensors 3 of another dtype, shape or tie, 1 added, 1 removed, 1 unchanged" in text


def test_diff_across_other_chunk_sizes_compares_bytes(tmp_path: Path) -> None:
    state = {"w": torch.arange(4096.0)}
    save(tmp_path / "run", state, chunk_bytes=4096)
    with CheckpointManager(tmp_path / "run", fsync=False, chunk_bytes=8192) as manager:
        manager.save_sync(1, state, rng=False)
    found = document("diff", tmp_path / "run", 0, 1)
    assert (found["equal"], found["unchanged_count"]) == (True, 1)


def test_diff_puts_what_has_no_number_first(tmp_path: Path) -> None:
    first = {"a": torch.ones(2), "zero": torch.zeros(2), "nan": torch.ones(2)}
    second = {"a": torch.ones(2) * 9, "zero": torch.ones(2), "nan": torch.tensor([math.nan, 1.0])}
    save(tmp_path / "run", first, second)
    rows = document("diff", tmp_path / "run", 0, 1, code=exits.FINDINGS)["changed"]
    assert [(row["name"], row["relative_change"]) for row in rows] == [
        ("nan", None),
        ("zero", None),
        ("a", 8.0),
    ]
    text = varvite("diff", tmp_path / "run", 0, 1).stdout
    assert "1 not finite" in text
    assert "from zero" in text


def test_diff_without_numpy_compares_digests_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", {"w": torch.ones(3000)}, {"w": torch.zeros(3000)}, chunk_bytes=4096)
    monkeypatch.setitem(sys.modules, "numpy", None)
    result = varvite("diff", tmp_path / "run", 0, 1, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["measured"]) == (exits.FINDINGS, False)
    assert found["changed"] == [
        {
            "name": "w",
            "rank": None,
            "dtype": "float32",
            "shape": [3000],
            "raw_bytes": 12000,
            "changed_bytes": 12000,
        }
    ]
    assert "for want of numpy" in result.stderr


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SMALL = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", FLOATS)
def test_relative_change_of_floats_is_that_of_double_precision(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    first = torch.randn(5000, generator=generator).to(dtype)
    second = (first.double() * 1.25).to(dtype)
    found = distance(name_of(dtype), raw(first), raw(second))
    difference = (second.double() - first.double()).abs()
    assert found.relative_change == pytest.approx(
        (difference.norm() / first.double().norm()).item(), rel=1e-12
    )
    assert found.largest_change == difference.max().item()
    assert found.changed_elements == int((first != second).sum())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_element_changes_when_either_part_does(dtype: torch.dtype) -> None:
    first = torch.tensor([3 + 4j, 1j], dtype=dtype)
    second = torch.tensor([3 + 4j, 2 + 1j], dtype=dtype)
    found = distance(name_of(dtype), raw(first), raw(second))
    assert (found.element_count, found.changed_elements, found.largest_change) == (2, 1, 2.0)
    assert found.relative_change == pytest.approx(2 / math.sqrt(26))


def test_differences_of_large_integers_are_exact() -> None:
    first = torch.tensor([2**62, -(2**63)])
    second = torch.tensor([2**62 + 1, 2**63 - 1])
    assert distance("int64", raw(first)[:8], raw(second)[:8]).largest_change == 1.0
    assert distance("int64", raw(first), raw(second)).largest_change == 2.0**64
    signed = distance(
        "int8", raw(torch.tensor([-128]).to(torch.int8)), raw(torch.tensor([127]).to(torch.int8))
    )
    assert signed.largest_change == 255.0


def test_norms_neither_overflow_nor_underflow() -> None:
    for scale in (1e-320, 1e300):
        first = torch.tensor([3.0, 4.0], dtype=torch.float64) * scale
        found = distance("float64", raw(first), raw(first * 2))
        assert found.relative_change == pytest.approx(1.0)


def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.arange(100.0), torch.arange(100.0) + 1
    whole = distance("float32", raw(first), raw(second))
    monkeypatch.setattr("varvite.cli.arithmetic._BLOCK_BYTES", 16)
    parts = distance("float32", raw(first), raw(second))
    assert parts.relative_change == pytest.approx(whole.relative_change)
    assert parts[:2] == whole[:2] == (100, 100)
    assert parts.largest_change == 1.0


@pytest.mark.parametrize("name", SMALL)
def test_values_of_small_floats_are_those_of_torch(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float().double()
    ours = torch.tensor(small_float_values(name), dtype=torch.float64)
    assert torch.equal(ours.nan_to_num(-1e9, 1e9, -2e9), codes.nan_to_num(-1e9, 1e9, -2e9))


def test_values_of_four_bit_floats() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = small_float_values("float4_e2m1fn_x2")
    assert [values[code][0] for code in range(16)] == positive + [-value for value in positive]
    assert [values[code << 4][1] for code in range(8)] == positive
    found = distance("float4_e2m1fn_x2", np.array([0x22], np.uint8), np.array([0x62], np.uint8))
    assert found.relative_change == pytest.approx(3 / math.sqrt(2))
