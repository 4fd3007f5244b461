"""Rules for names: one pass, whole parts of paths, the most specific first, and nothing silent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varvite.errors import InvalidInputError, MismatchError
from varvite.weights import plan_keys

part = st.sampled_from(["a", "ab", "abc", "enc", "encoder", "0", "weight"])
path = st.lists(part, min_size=1, max_size=4).map(".".join)


def test_without_rules_names_go_where_they_are_the_same():
    plan = plan_keys(["m.a", "m.b"], ["m.b", "m.c"])
    assert plan.mapping == {"m.b": "m.b"}
    assert (plan.missing, plan.unexpected, plan.dropped, plan.renamed) == (["m.c"], ["m.a"], [], {})


# The measured traps of a rule list that works on text


def test_the_empty_prefix_adds_a_prefix_to_every_name():
    plan = plan_keys(["a.w", "b"], ["model.a.w", "model.b"], {"": "model"})
    assert plan.mapping == {"model.a.w": "a.w", "model.b": "b"}
    assert plan.rule_counts == {"": 2}


def test_a_prefix_fits_whole_parts_of_a_path_only():
    plan = plan_keys(["enc.w", "encoder.w", "enc"], ["x.w", "encoder.w", "x"], {"enc": "x"})
    assert plan.mapping == {"x.w": "enc.w", "encoder.w": "encoder.w", "x": "enc"}


def test_two_names_for_one_place_are_an_error_that_names_both():
    with pytest.raises(MismatchError) as caught:
        plan_keys(["teacher.w", "student.w"], ["model.w"], {"teacher": "model", "student": "model"})
    assert "`model.w` would be given `teacher.w` and `student.w`" in str(caught.value)
    assert (caught.value.name, caught.value.found) == ("model.w", ["teacher.w", "student.w"])


def test_a_name_that_a_rule_gives_may_not_fall_on_one_that_stays():
    with pytest.raises(MismatchError, match=r"`model\.w` would be given `ema\.w` and `model\.w`"):
        plan_keys(["ema.w", "model.w"], ["model.w"], {"ema": "model"})
    plan = plan_keys(["ema.w", "model.w"], ["model.w"], {"ema": "model", "model": None})
    assert (plan.mapping, plan.dropped) == ({"model.w": "ema.w"}, ["model.w"])


# Which rule


def test_the_most_specific_rule_decides_whatever_the_order():
    saved = ["m.enc.0.w", "m.enc.1.w", "m.head.w"]
    live = ["n.body.0.w", "n.last.w", "n.head.w"]
    rules = [("m", "n"), ("m.enc", "n.body"), ("m.enc.1", "n.last")]
    expected = dict(zip(["n.body.0.w", "n.last.w", "n.head.w"], saved, strict=True))
    assert plan_keys(saved, live, rules).mapping == expected
    assert plan_keys(saved, live, reversed(rules)).mapping == expected
    assert plan_keys(saved, live, dict(rules)).rule_counts == {"m": 1, "m.enc": 1, "m.enc.1": 1}


def test_one_pass_so_two_modules_can_change_places():
    plan = plan_keys(["a.w", "b.w"], ["a.w", "b.w"], {"a": "b", "b": "a"})
    assert plan.mapping == {"b.w": "a.w", "a.w": "b.w"}


def test_a_replacement_may_be_empty_and_none_drops():
    plan = plan_keys(["module.w", "module.head.w"], ["w"], {"module": "", "module.head": None})
    assert (plan.mapping, plan.dropped) == ({"w": "module.w"}, ["module.head.w"])


def test_a_rule_that_no_name_needs_is_an_error_if_strict_and_reported_always():
    plan = plan_keys(["m.w"], ["m.w"], {"n": "m"})
    assert plan.unused_rules == ["n"]
    assert "rule `n` gives `m`: 0 names" in str(plan)
    plan.check(strict=False)
    with pytest.raises(MismatchError, match="no name needs the rule: `n`"):
        plan.check()


def test_keys_with_dots_are_paths():
    plan = plan_keys(
        ['"layers.0.w"', 'model."a b"'], ["net.layers.0.w", 'model."a b"'], {"layers": "net.layers"}
    )
    assert plan.mapping == {"net.layers.0.w": '"layers.0.w"', 'model."a b"': 'model."a b"'}


# What is asked for


def test_names_that_end_up_elsewhere_are_left_alone():
    saved = ["model.w", "optimizer.state.w.exp_avg", "ema.w"]
    plan = plan_keys(saved, ["model.w"], within=["model"])
    assert (plan.mapping, plan.unexpected) == ({"model.w": "model.w"}, [])
    assert plan_keys(saved, ["model.w"]).unexpected == saved[1:]
    # Nor do they clash with one another.
    assert plan_keys(saved, ["model.w"], {"ema": "x", "optimizer.state": "x"}, within=["model"]).mapping


def test_shapes_that_differ_are_told_apart_from_names_that_are_missing():
    plan = plan_keys({"m.w": [3, 2], "m.b": [3]}, {"m.w": [4, 2], "m.b": [3], "m.c": [1]})
    assert (plan.mapping, plan.missing, plan.unexpected) == ({"m.b": "m.b"}, ["m.c"], [])
    assert plan.mismatched == [("m.w", [4, 2], [3, 2])]
    with pytest.raises(MismatchError) as caught:
        plan.check(strict=False)
    assert caught.value.mismatched == [("m.w", "shape", [4, 2], [3, 2])]
    assert "`m.w` has another shape: expected [4, 2], but the snapshot has: [3, 2]" in str(caught.value)
    plan.check(strict=False, skip_shape_mismatches=True)


def test_strict_lists_everything_at_once():
    plan = plan_keys(["m.a", "old.b"], ["m.a", "m.b"], {"old": "m.x"})
    with pytest.raises(MismatchError) as caught:
        plan.check()
    assert (caught.value.missing, caught.value.unexpected) == (["m.b"], ["old.b"])
    assert "unexpected: old.b -> m.x.b" in str(caught.value)
    plan.check(strict=False)


@pytest.mark.parametrize("within", [(), ("m",), ("m", "n")])
def test_nothing_at_all_is_an_error_even_where_not_strict(within):
    plan = plan_keys(["other.w"], ["m.w"], within=within)
    with pytest.raises(MismatchError, match="nothing would be loaded"):
        plan.check(strict=False, skip_shape_mismatches=True)


def test_nothing_for_one_of_two_keywords_is_an_error_too():
    plan = plan_keys(["m.w"], ["m.w", "n.w"], within=["m", "n"])
    with pytest.raises(MismatchError, match="no saved name fits `n`"):
        plan.check(strict=False)
    plan = plan_keys({"m.w": [1]}, {"m.w": [2]}, within=["m"])
    with pytest.raises(MismatchError, match="no saved name fits `m`"):
        plan.check(strict=False, skip_shape_mismatches=True)
    plan_keys(["m.w"], ["m.w"], within=["m", "empty"]).check()


def test_the_plan_is_printed_with_what_each_rule_does():
    plan = plan_keys(
        {"old.w": [1], "old.b": [1], "x.y": [1], "z": [1]},
        {"new.w": [1], "new.b": [2], "new.c": [1]},
        {"old": "new", "x": None},
    )
    assert str(plan).splitlines() == [
        "1 of 3 names would be loaded",
        "  rule `old` gives `new`: 2 names",
        "  rule `x` drops: 1 name",
        "  missing: new.c",
        "  unexpected: z",
        "  `new.b` has another shape: expected [2], but the snapshot has: [1]",
    ]


def test_long_lists_are_cut():
    plan = plan_keys([f"a.{index}" for index in range(30)], ["b"])
    assert str(plan).splitlines()[-1].endswith("a.7 and 22 more")


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ("enc", "must be a mapping"),
        (7, "must be a mapping"),
        ([("a", "b", "c")], "must be a pair"),
        (["ab"], "must be a pair"),
        ([("a", "b"), ("a", "c")], "given twice"),
        ({"a.": "b"}, "parts joined by single dots"),
        ({"a": ".b"}, "parts joined by single dots"),
        ({"a..b": "c"}, "parts joined by single dots"),
        ({3: "c"}, "parts joined by single dots"),
        ({"a": 3}, "parts joined by single dots"),
        ({"m": ""}, "leaves nothing"),
    ],
)
def test_rules_that_mean_nothing_are_refused(rules, reason):
    with pytest.raises(InvalidInputError, match=reason) as caught:
        plan_keys(["m"], ["m"], rules)
    assert caught.value.what == "rules"


@given(st.lists(path, unique=True), st.dictionaries(path, st.one_of(path, st.none()), max_size=4))
def test_every_name_is_decided_once_by_the_rule_with_the_most_parts(saved, rules):
    targets = {}
    for name in saved:
        parts = name.split(".")
        fitting = [prefix for prefix in rules if parts[: len(prefix.split("."))] == prefix.split(".")]
        best = max(fitting, key=lambda prefix: len(prefix.split(".")), default=None)
        if best is None:
            targets[name] = name
        elif rules[best] is not None:
            targets[name] = ".".join([rules[best], *parts[len(best.split(".")) :]])
    if len(set(targets.values())) < len(targets):
        with pytest.raises(MismatchError, match="two saved names go to one place"):
            plan_keys(saved, [], rules)
        return
    plan = plan_keys(saved, list(targets.values()), rules)
    assert plan.mapping == {target: name for name, target in targets.items()}
    assert sorted([*plan.mapping.values(), *plan.dropped]) == sorted(saved)
    assert plan.missing == plan.unexpected == []
