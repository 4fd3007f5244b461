"""Retention policies: rules, unions, texts, refusals."""

from __future__ import annotations

import json
import pickle

import pytest

from varvite import keep
from varvite.errors import InvalidInputError

RULES = [
    (keep.last(3), "keep.last(3)", {"rule": "last", "count": 3}),
    (keep.every(5000), "keep.every(5000)", {"rule": "every", "steps": 5000}),
    (
        keep.best("val_loss"),
        'keep.best("val_loss", "min", n=1)',
        {"rule": "best", "metric": "val_loss", "mode": "min", "count": 1},
    ),
    (
        keep.best("acc", "max", n=2),
        'keep.best("acc", "max", n=2)',
        {"rule": "best", "metric": "acc", "mode": "max", "count": 2},
    ),
    (keep.within(hours=6), "keep.within(hours=6)", {"rule": "within", "milliseconds": 21_600_000}),
    (
        keep.within(days=1, minutes=0.5),
        "keep.within(days=1, minutes=0.5)",
        {"rule": "within", "milliseconds": 86_430_000},
    ),
    (keep.hourly(24), "keep.hourly(24)", {"rule": "bucket", "milliseconds": 3_600_000, "count": 24}),
    (keep.daily(7), "keep.daily(7)", {"rule": "bucket", "milliseconds": 86_400_000, "count": 7}),
    (keep.tagged(), "keep.tagged()", {"rule": "tagged"}),
    (keep.max_bytes("200GB"), 'keep.max_bytes("200GB")', {"rule": "max_bytes", "bytes": 200 * 10**9}),
    (keep.max_bytes(4096), "keep.max_bytes(4096)", {"rule": "max_bytes", "bytes": 4096}),
]


@pytest.mark.parametrize(("policy", "text", "rule"), RULES)
def test_policy_reads_like_its_call_and_gives_its_rule(
    policy: keep.Keep, text: str, rule: dict[str, object]
) -> None:
    assert repr(policy) == text
    assert policy.rules() == [rule]
    assert json.loads(json.dumps(policy.rules())) == [rule]
    assert eval(text, {"keep": keep}) == policy


def test_union_keeps_order_and_drops_what_is_there_already() -> None:
    policy = keep.last(3) | keep.every(10) | keep.last(3)
    assert repr(policy) == "keep.last(3) | keep.every(10)"
    assert [rule["rule"] for rule in policy.rules()] == ["last", "every"]


def test_policies_are_values() -> None:
    assert keep.last(3) == keep.last(3)
    assert hash(keep.last(3)) == hash(keep.last(3))
    assert keep.last(3) != keep.last(4)
    assert pickle.loads(pickle.dumps(keep.last(3) | keep.daily(1))) == keep.last(3) | keep.daily(1)
    with pytest.raises(AttributeError):
        keep.last(3).parts = ()  # type: ignore[misc]


def test_changing_the_rules_given_out_changes_no_policy() -> None:
    policy = keep.last(3)
    policy.rules()[0]["count"] = 0
    assert policy.rules() == [{"rule": "last", "count": 3}]


def test_union_with_something_else_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        keep.last(3) | 3  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "length_bytes"),
    [
        ("1", 1),
        ("12B", 12),
        ("1kB", 1000),
        ("1 KiB", 1024),
        ("1.5GB", 1_500_000_000),
        ("0.1TiB", (1 << 40) // 10),
        ("2m", 2_000_000),
        ("200gb", 200 * 10**9),
        (" 1 PB ", 10**15),
    ],
)
def test_sizes_have_decimal_and_binary_units(text: str, length_bytes: int) -> None:
    assert keep.max_bytes(text).rules()[0]["bytes"] == length_bytes


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: keep.last(0), "n"),
        (lambda: keep.last(-1), "n"),
        (lambda: keep.last(True), "n"),
        (lambda: keep.last(2.0), "n"),  # type: ignore[arg-type]
        (lambda: keep.last("3"), "n"),  # type: ignore[arg-type]
        (lambda: keep.last(1 << 40), "n"),
        (lambda: keep.every(0), "steps"),
        (lambda: keep.best(""), "metric"),
        (lambda: keep.best(3), "metric"),  # type: ignore[arg-type]
        (lambda: keep.best("loss", "lowest"), "mode"),
        (lambda: keep.best("loss", n=0), "n"),
        (keep.within, "time"),
        (lambda: keep.within(hours=-1), "hours"),
        (lambda: keep.within(days=float("nan")), "days"),
        (lambda: keep.within(minutes=float("inf")), "minutes"),
        (lambda: keep.within(minutes=True), "minutes"),
        (lambda: keep.hourly(0), "n"),
        (lambda: keep.daily(0), "n"),
        (lambda: keep.max_bytes(0), "size"),
        (lambda: keep.max_bytes("0GB"), "size"),
        (lambda: keep.max_bytes("many"), "size"),
        (lambda: keep.max_bytes("-3GB"), "size"),
        (lambda: keep.max_bytes("1e9"), "size"),
        (lambda: keep.max_bytes(1.5), "size"),  # type: ignore[arg-type]
        (lambda: keep.max_bytes(True), "size"),
        (lambda: keep.max_bytes("99999PB"), "size"),
    ],
)
def test_wrong_values_are_refused_by_name_with_what_is_legal(call: object, what: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.what == what
    assert str(caught.value).startswith(f"invalid {what} `")
    assert ": must be " in str(caught.value)
