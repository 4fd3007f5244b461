"""Nested state: every value comes back as it was or is refused by name; names never collide."""

from __future__ import annotations

import copy
import enum
import json
import math
import pickle
import struct
from collections import Counter, OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from varvite.errors import CorruptionError, InvalidInputError, UnsupportedFormatError
from varvite.state import (
    DEPTH_LIMIT,
    StateDict,
    flatten,
    from_text,
    register_enum,
    state_dict_node,
    structure_leaves,
    structure_names,
    to_text,
    unflatten,
)


@register_enum
class Phase(enum.Enum):
    WARMUP = 1
    DECAY = "decay"


class Level(enum.IntEnum):
    LOW = 7


register_enum(Level, "level")


class Unregistered(enum.Enum):
    A = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


register_enum(Access)


@dataclass
class Config:
    rate: float


class Pair(NamedTuple):
    a: int
    b: int


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


def assert_same(  # noqa: C901 - one branch for each type
    found: Any, expected: Any
) -> None:
    """Equality that tells types, signs of zero and NaN payloads apart."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert found.dtype.str == expected.dtype.str
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert len(found) == len(expected)
        for (key, value), (expected_key, expected_value) in zip(found.items(), expected.items(), strict=True):
            assert_same(key, expected_key)
            assert_same(value, expected_value)
    elif isinstance(expected, list | tuple) and not isinstance(expected, torch.Size):
        assert len(found) == len(expected)
        for item, expected_item in zip(found, expected, strict=True):
            assert_same(item, expected_item)
    elif isinstance(expected, set | frozenset):
        assert sorted(map(repr, found)) == sorted(map(repr, expected))
    elif isinstance(expected, complex):
        assert (bits(found.real), bits(found.imag)) == (bits(expected.real), bits(expected.imag))
    elif isinstance(expected, float):
        assert bits(found) == bits(expected)
    elif isinstance(expected, np.generic):
        assert (found.dtype.str, found.tobytes()) == (expected.dtype.str, expected.tobytes())
    else:
        assert found == expected


NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]

PLAIN_VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    10**5000,
    -(10**5000),
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    1e22,
    math.inf,
    -math.inf,
    math.nan,
    NAN_WITH_PAYLOAD,
    "",
    "text",
    "naïve ☃ \U0001f600 \u2028 \x00 \n \" \\ '",
    b"",
    b"\x00\xff",
    1 + 2j,
    complex(-0.0, math.nan),
    [],
    (),
    {},
    [[], [()], {}],
    (1, (2,), [3]),
    {1, 2.5, "a", None, b"x", (1, "t"), frozenset({1})},
    set(),
    frozenset({(1, 2), "z"}),
    {"a": 1, 7: 2, "7": 3, None: 4, True: 5, 1.5: 6, b"k": 7, ("t", 1): 8, (): 9, "": 10},
    {torch.float32: 1, (torch.bfloat16, "b.c"): 2, torch.device("cpu"): 3, np.int64(3): 4, Phase.WARMUP: 5},
    {2**70: 1, -(2**70): 2, 3 + 4j: 3, frozenset({1, 2}): 4, torch.Size((2,)): 5},
    OrderedDict([("z", 1), ("a", 2)]),
    Counter({30: 1, 80: 2}),
    StateDict({"layers.0.weight": 1, "plain": {"x": (1,)}}),
    torch.float32,
    torch.qint8,
    torch.device("cpu"),
    torch.device("cuda:1"),
    torch.device("meta"),
    torch.Size([2, 3]),
    torch.Size([]),
    Phase.WARMUP,
    Phase.DECAY,
    Level.LOW,
    Access.READ,
    np.float64(1.5),
    np.float32(math.nan),
    np.float16(-0.0),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.datetime64("2024-02-29T12:00", "m"),
    np.timedelta64(25, "s"),
]


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=lambda value: type(value).__name__)
def test_plain_value_comes_back_with_its_type(value: Any, round_trip: Any) -> None:
    assert_same(round_trip({"value": value})["value"], value)
    assert_same(round_trip(value), value)


def test_text_is_one_line_of_standard_json() -> None:
    text = to_text(flatten({"values": PLAIN_VALUES[:31]}).structure)
    assert "\n" not in text
    json.loads(text, parse_constant=pytest.fail)


def test_structure_of_each_kind_is_what_the_format_says() -> None:
    def structure(value: Any) -> Any:
        return flatten(value).structure

    assert structure([None, True, 3, 1.5, "x"]) == [None, True, 3, 1.5, "x"]
    assert structure({"a": 1, 2: "b"}) == {"dict": [["a", 1], [2, "b"]]}
    assert structure((1,)) == {"tuple": [1]}
    assert structure({"b", "a", 3}) == {"set": ["a", "b", 3]}
    assert structure(frozenset([2])) == {"frozenset": [2]}
    assert structure(b"hi") == {"bytes": "aGk="}
    assert structure(2**64) == {"int": "0x10000000000000000"}
    assert structure(math.nan) == {"float": "nan:7ff8000000000000"}
    assert structure([math.inf, -math.inf]) == [{"float": "inf"}, {"float": "-inf"}]
    assert structure(1 - 2j) == {"complex": [1.0, -2.0]}
    assert structure(torch.bfloat16) == {"dtype": "bfloat16"}
    assert structure(torch.device("cuda", 1)) == {"device": "cuda:1"}
    assert structure(torch.Size([2, 3])) == {"size": [2, 3]}
    assert structure(Level.LOW) == {"enum": ["level", "LOW"]}
    assert structure(OrderedDict(a=1)) == {"ordered_dict": [["a", 1]]}
    assert structure(Counter(a=1)) == {"counter": [["a", 1]]}
    assert structure(StateDict({"a.b": 1})) == {"state_dict": [["a.b", 1]]}
    assert structure(np.uint16(258)) == {"numpy_scalar": {"dtype": "<u2", "data": "AgE="}}
    assert structure({"w": torch.zeros(1)}) == {"dict": [["w", {"tensor": "w"}]]}
    assert structure([np.zeros(1, ">f4")]) == [{"ndarray": {"name": "0", "dtype": ">f4"}}]


def test_list_that_was_empty_in_the_template_needs_no_template(round_trip: Any) -> None:
    # pytorch/pytorch#137327: the structure was flattened to the keys of a template.
    assert round_trip({"schedule": [{"k": 1}, {"k": 2}]}) == {"schedule": [{"k": 1}, {"k": 2}]}


def test_betas_stay_a_tuple_of_floats_and_none_stays_none(round_trip: Any) -> None:
    # ray-project/ray#61937: a restore made tensors of all of them.
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "foreach": None, "amsgrad": False, "step": torch.tensor(3.0)}
    assert_same(round_trip({"param_groups": [group]})["param_groups"][0], group)


def test_plain_values_are_copied_at_once() -> None:
    state = {"seen": [1, 2], "config": {"lr": 0.1}, "tags": {"a"}}
    flat = flatten(state)
    state["seen"].append(3)
    state["config"]["lr"] = 0.5
    state["tags"].add("b")
    assert unflatten(flat.structure, {}.__getitem__) == {"seen": [1, 2], "config": {"lr": 0.1}, "tags": {"a"}}


def test_result_shares_no_container_with_the_structure() -> None:
    structure = flatten({"seen": [1, [2]]}).structure
    before = copy.deepcopy(structure)
    result = unflatten(structure, {}.__getitem__)
    result["seen"][1].append(3)
    assert structure == before


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
            ],
            [2],
        ),
    ],
)
def test_schedulers_of_torch_come_back(scheduler: Any, round_trip: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    schedule = scheduler(optimizer)
    for _ in range(3):
        optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
    state = schedule.state_dict()
    assert_same(round_trip(state), state)


# Names


def names_of(state: Any, **arguments: Any) -> list[str]:
    return [leaf.name for leaf in flatten(state, **arguments).leaves]


def test_names_are_paths_joined_by_dots() -> None:
    w = torch.zeros(1)
    state = {"model": state_dict_node({"layers.0.weight": w}), "seen": [w, (w, {"x": w})]}
    assert names_of(state) == ["model.layers.0.weight", "seen.0", "seen.1.0", "seen.1.1.x"]
    assert names_of({"w": w}, prefix=("ema",)) == ["ema.w"]
    assert names_of(w, prefix=("a.b", 3)) == ['"a.b".3']
    assert names_of(w) == ["."]


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("weight", "weight"),
        ("a b", "a b"),
        ("größe", "größe"),
        ("a/b", "a/b"),
        ("..", '".."'),
        ("", '""'),
        ("a.b", '"a.b"'),
        (" a", '" a"'),
        ("a ", '"a "'),
        ('a"', '"a\\""'),
        ("it's", '"it\'s"'),
        ("a\nb", '"a\\nb"'),
        ("f(x)", '"f(x)"'),
        ("`", '"`"'),
        ("\\", '"\\\\"'),
        ("\x7f", '"\x7f"'),
        ("7", "7"),
        (7, "7"),
        (-7, "-7"),
        (None, "None"),
        (True, "True"),
        (1.5, "float(1.5)"),
        (math.inf, "float(inf)"),
        (("t", 1), '("t", 1)'),
        (("t",), '("t",)'),
        ((), "()"),
        (("a.b", ("c", None), 2.0), '("a.b", ("c", None), float(2.0))'),
        (b"hi", 'bytes("aGk=")'),
        (torch.float32, 'dtype("float32")'),
        (2**64, 'int("0x10000000000000000")'),
        (Level.LOW, 'enum(["level","LOW"])'),
    ],
)
def test_part_of_a_name_is_quoted_where_it_must(key: Any, shown: str) -> None:
    assert names_of({key: torch.zeros(1)}) == [shown]


def test_string_beside_its_number_is_quoted() -> None:
    w = torch.zeros(1)
    assert names_of({7: w, "7": w, "8": w}) == ["7", '"7"', "8"]
    assert names_of({True: w, "True": w, None: w, "None": w}) == ["True", '"True"', "None", '"None"']


def test_names_that_other_tools_refuse_or_merge_stay_apart(round_trip: Any) -> None:
    # NVIDIA/Megatron-LM#7080 and measured: DCP refuses "a.b" beside {"a": {"b": ...}}, and 7 beside "7".
    state = {
        ("a", "b.c"): torch.tensor([1.0]),
        7: torch.tensor([2.0]),
        "7": torch.tensor([3.0]),
        "a.b": torch.tensor([4.0]),
        "a": {"b": torch.tensor([5.0])},
    }
    names = names_of(state)
    assert names == ['("a", "b.c")', "7", '"7"', '"a.b"', "a.b"]
    assert_same(round_trip(state), state)


def test_container_in_a_state_dict_beside_a_longer_key_has_a_name_of_its_own(round_trip: Any) -> None:
    state = state_dict_node({"a.b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}})
    assert names_of(state) == ["a.b", 'key("a").b']
    assert names_of(state_dict_node({"a.b": {"c": torch.zeros(1)}, "a.d": torch.zeros(1)})) == [
        "a.b.c",
        "a.d",
    ]
    assert_same(round_trip(state), state)


def test_state_dict_may_hold_plain_values_and_odd_keys(round_trip: Any) -> None:
    state = state_dict_node({"fc._extra_state": {"scale": 2, "history": (1, 2)}, "odd..key": torch.ones(2)})
    assert names_of(state) == ['odd."".key']
    assert_same(round_trip(state), state)


KEYS = st.one_of(
    st.text(alphabet="ab.\"'()7 ,\\`[", max_size=4),
    st.sampled_from(["True", "None", "7", "float(1.5)", '("t",)', "key(", 'key("a")', "a.b", "a", "b"]),
    st.integers(-8, 8),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.binary(max_size=2),
    st.tuples(st.sampled_from(["t", "a.b", '"', ", 1"]), st.integers(0, 2)),
    st.tuples(st.text(alphabet='a",(', max_size=3)),
    st.sampled_from([torch.float32, Phase.WARMUP, Level.LOW, np.int64(7), np.float32(0.5), 2**65]),
)
LEAF = st.builds(lambda: torch.zeros(()))


def nests(leaf: Any) -> Any:
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.dictionaries(KEYS, inner, max_size=5),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(alphabet='ab."(7', max_size=5), inner, max_size=5).map(StateDict),
        ),
        max_leaves=20,
    )


@settings(max_examples=300, deadline=None)
@given(nests(LEAF))
@example(StateDict({'a"': {"b": torch.zeros(())}, 'a".b': torch.zeros(())}))
@example(
    StateDict({"a": {"b": {"c": torch.zeros(())}}, "a.b": {"c": torch.zeros(())}, "a.b.c": torch.zeros(())})
)
def test_two_paths_never_share_a_name(state: Any) -> None:
    names = names_of(state)
    assert len(set(names)) == len(names)


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.binary(max_size=4),
    st.complex_numbers(),
    st.sets(st.one_of(st.integers(), st.text(alphabet="ab")), max_size=3),
    st.sampled_from([torch.float16, torch.device("cuda:3"), Phase.DECAY, np.float64(2.5), np.int8(-1)]),
)


@settings(max_examples=300, deadline=None)
@given(nests(st.one_of(PLAIN, LEAF)))
def test_any_nest_comes_back_through_its_text(state: Any) -> None:
    flat = flatten(state)
    leaves = {leaf.name: leaf.value for leaf in flat.leaves}
    structure = from_text(to_text(flat.structure))
    found = unflatten(structure, leaves.__getitem__)
    assert_same(found, state)
    assert flatten(found).structure == flat.structure
    assert structure_names(structure) == [leaf.name for leaf in flat.leaves]


def test_many_small_tensors_come_back(round_trip: Any) -> None:
    # safetensors/safetensors#361 and DCP: per-tensor overhead; here only that every one is right.
    state = {"model": StateDict({f"layers.{i}.w": torch.full((32,), float(i)) for i in range(5000)})}
    found = round_trip(state)
    assert list(found["model"]) == list(state["model"])
    assert all(torch.equal(found["model"][name], value) for name, value in state["model"].items())


# Leaves and ties


def test_tied_names_give_one_object_and_equal_ones_do_not(round_trip: Any) -> None:
    # huggingface/transformers#38870 and NVIDIA-NeMo/Automodel#2571.
    w = torch.arange(4.0)
    found = round_trip({"emb": w, "head": w, "copy": w.clone(), "view": w.view(2, 2)})
    assert found["emb"] is found["head"]
    assert found["copy"] is not found["emb"]
    assert torch.equal(found["copy"], w)
    assert found["view"].data_ptr() != found["emb"].data_ptr()
    found["head"][0] = 9.0
    assert found["emb"][0] == 9.0
    assert found["copy"][0] == 0.0


def test_leaf_is_asked_once_for_each_name() -> None:
    asked: list[str] = []
    structure = [{"tensor": "a"}, {"tensor": "a"}, {"tensor": "b"}]
    found = unflatten(structure, lambda name: asked.append(name) or object())  # type: ignore[func-returns-value]
    assert asked == ["a", "b"]
    assert found[0] is found[1]


def test_leaves_carry_name_and_the_callers_own_tensor() -> None:
    w, array = torch.zeros(2), np.zeros(2)
    leaves = flatten({"m": StateDict({"a.b": w}), "x": [array]}).leaves
    assert [leaf.name for leaf in leaves] == ["m.a.b", "x.0"]
    assert leaves[0].value is w
    assert leaves[1].value is array


def test_structure_tells_arrays_from_tensors() -> None:
    structure = flatten({"t": torch.zeros(1), "a": np.zeros(1), "n": 3}).structure
    assert [tuple(leaf) for leaf in structure_leaves(structure)] == [("t", False), ("a", True)]


def test_dict_that_looks_like_a_tag_is_still_a_dict(round_trip: Any) -> None:
    state = {"tensor": "x", "inner": {"tensor": "x"}, "other": {"dict": [["a", 1]]}}
    assert structure_names(flatten(state).structure) == []
    assert round_trip(state) == state


def test_parameter_comes_back_as_a_plain_tensor(round_trip: Any) -> None:
    found = round_trip({"p": torch.nn.Parameter(torch.ones(2))})["p"]
    assert type(found) is torch.Tensor
    assert not found.requires_grad


def test_state_dict_stays_one_and_pickles_as_an_ordered_dict(round_trip: Any) -> None:
    state = state_dict_node(torch.nn.Linear(2, 2).state_dict())
    again = round_trip({"m": state})["m"]
    assert names_of({"m": again}) == names_of({"m": state}) == ["m.weight", "m.bias"]
    assert type(pickle.loads(pickle.dumps(again))) is OrderedDict
    assert list(pickle.loads(pickle.dumps(again))) == ["weight", "bias"]
    assert type(copy.deepcopy(again)) is type(copy.copy(again)) is StateDict
    assert copy.deepcopy(again)["weight"] is not again["weight"]


# Refusals at save


def self_containing_list() -> Any:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    return loop


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


@pytest.mark.parametrize(
    ("value", "name", "kind", "words"),
    [
        (defaultdict(int), "x.y", "collections.defaultdict", "dict(...)"),
        (UserDict(), "x.y", "collections.UserDict", "plain"),
        (Config(0.1), "x.y", "test_state.Config", "dataclasses.asdict"),
        (Pair(1, 2), "x.y", "test_state.Pair", "_asdict"),
        (object(), "x.y", "object", "plain"),
        ((i for i in ()), "x.y", "generator", "plain"),
        (len, "x.y", "builtin_function_or_method", "plain"),
        (range(3), "x.y", "range", "plain"),
        (bytearray(b"x"), "x.y", "bytearray", "plain"),
        ("half \ud800", "x.y", "str", "surrogate"),
        (Unregistered.A, "x.y", "test_state.Unregistered", "register_enum(Unregistered)"),
        (Access.READ | Access.WRITE, "x.y", "test_state.Access", "combination"),
        (np.str_("s"), "x.y", "numpy.str_", "not supported"),
        (np.bytes_(b"s"), "x.y", "numpy.bytes_", "not supported"),
        (np.longdouble(1), "x.y", "numpy.longdouble", "float64"),
        (np.array([{}], dtype=object), "x.y", "numpy.ndarray", ".tolist()"),
        (np.array(["a"]), "x.y", "numpy.ndarray", ".tolist()"),
        (np.zeros(2, dtype=[("a", "f4")]), "x.y", "numpy.ndarray", "fields"),
        (np.zeros(2, dtype=np.longdouble), "x.y", "numpy.ndarray", "float64"),
        (np.ma.masked_array([1], [True]), "x.y", "numpy.ma.MaskedArray", "numpy.asarray"),
        ({torch.zeros(1): 1}, "x.y", "dict", "key"),
        ({math.nan: 1}, "x.y", "dict", "NaN"),
        ({("a", math.nan): 1}, "x.y", "dict", "NaN"),
        ({"\ud800": 1}, "x.y", "dict", "surrogate"),
        ({object(): 1}, "x.y", "dict", "plain value"),
        ({torch.zeros(1)}, "x.y", "set", "set"),
        (StateDict({7: 1}), "x.y", "varvite.state.StateDict", "not a string"),  # type: ignore[dict-item]
        (self_containing_list(), "x.y.1.again", "list", "contains itself"),
        (nested(DEPTH_LIMIT + 1), "x.y" + ".0.k" * (DEPTH_LIMIT // 2 - 1), None, f"{DEPTH_LIMIT}"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_is_refused_by_name_and_type(
    value: Any, name: str, kind: str | None, words: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        flatten({"x": {"y": value}})
    assert words in str(caught.value)
    if kind is not None:
        assert caught.value.name == name
        assert f"cannot save `{name}` of type `{kind}`: " in str(caught.value)
    assert caught.value.reason in str(caught.value)


def test_subclasses_of_plain_types_are_refused_not_flattened() -> None:
    class Step(int):
        pass

    with pytest.raises(InvalidInputError, match=r"int\(\.\.\.\)"):
        flatten({"step": Step(3)})


def test_a_list_met_twice_is_no_loop(round_trip: Any) -> None:
    shared = [1]
    assert round_trip([shared, shared, [shared]]) == [[1], [1], [[1]]]


def test_nest_at_the_limit_of_depth_comes_back(round_trip: Any) -> None:
    assert round_trip(nested(DEPTH_LIMIT)) == nested(DEPTH_LIMIT)


def test_set_counts_as_a_container() -> None:
    value: Any = 1
    for _ in range(DEPTH_LIMIT):
        value = frozenset([value])
    assert unflatten(flatten(value).structure, {}.__getitem__) == value
    with pytest.raises(InvalidInputError, match="deeper"):
        flatten([value])


# Decoding is strict


@pytest.mark.parametrize(
    "structure",
    [
        {},
        {"unknown": 1},
        {"dict": [], "list": []},
        {"dict": {}},
        {"dict": [["a"]]},
        {"dict": [["a", 1, 2]]},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [[1, 1], [True, 2]]},
        {"dict": [[[1], 1]]},
        {"dict": [[{"dict": []}, 1]]},
        {"dict": [[{"set": []}, 1]]},
        {"dict": [[{"tensor": "a"}, 1]]},
        {"dict": [[{"float": "nan:7ff8000000000000"}, 1]]},
        {"state_dict": [[1, 1]]},
        {"tuple": 1},
        {"set": [1, 1]},
        {"set": [[1]]},
        {"frozenset": [1, True]},
        {"bytes": "!"},
        {"bytes": 1},
        {"float": "nan"},
        {"float": "nan:7ff0000000000000"},
        {"float": "nan:3ff0000000000000"},
        {"float": "1.5"},
        {"float": 1.5},
        {"int": "0x5"},
        {"int": "0x0fffffffffffffffff"},
        {"int": 5},
        {"int": "__import__('os')"},
        {"complex": [1.0]},
        {"complex": [1, 2]},
        {"complex": ["a", 1.0]},
        {"tensor": 3},
        {"tensor": ["a"]},
        {"ndarray": {"name": "a"}},
        {"ndarray": {"name": "a", "dtype": "<f4", "more": 1}},
        {"ndarray": {"name": "a", "dtype": "O"}},
        {"ndarray": {"name": "a", "dtype": "(999999999,)f4"}},
        {"ndarray": {"name": "a", "dtype": "<M8[xx]"}},
        {"numpy_scalar": {"dtype": "<f4", "data": "AAAA"}},
        {"numpy_scalar": {"dtype": "|b1", "data": "Ag=="}},
        {"numpy_scalar": {"dtype": "|O8", "data": "AAAAAAAAAAA="}},
        {"numpy_scalar": "<f4"},
        {"dtype": "float32 "},
        {"dtype": "torch.float32"},
        {"dtype": "__class__"},
        {"device": "not a device"},
        {"device": "nonsense:0"},
        {"device": "cuda:999999"},
        {"size": [1.5]},
        {"size": [True]},
        {"size": [2**63]},
        {"size": 3},
        {"enum": ["level"]},
        {"enum": ["level", "HIGH"]},
        {"enum": ["level", "__class__"]},
        {"enum": [1, 2]},
        "half \ud800",
        math.inf,
        math.nan,
        object(),
        (1,),
    ],
    ids=lambda structure: "an object" if type(structure) is object else repr(structure),
)
def test_structure_that_no_encoder_wrote_is_corrupt(structure: Any) -> None:
    with pytest.raises(CorruptionError) as caught:
        unflatten(structure, lambda name: np.zeros(1, np.float32))
    assert caught.value.object == "structure"
    assert caught.value.what
    assert str(caught.value).startswith(f"corrupt {caught.value.what} in `structure`: expected ")


def test_depth_is_limited_when_decoding() -> None:
    for wrap in (lambda v: [v], lambda v: {"dict": [["k", v]]}, lambda v: {"frozenset": [v]}):
        structure: Any = 1
        for _ in range(DEPTH_LIMIT):
            structure = wrap(structure)
        unflatten(structure, {}.__getitem__)
        with pytest.raises(CorruptionError, match="containers"):
            unflatten(wrap(structure), {}.__getitem__)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "NaN",
        "[Infinity]",
        "[1,]",
        '{"a":1,"a":2}',
        '{"tensor":"a","tensor":"b"}',
        "[" * 100_000,
        "9" * 5000,
    ],
    ids=lambda text: text[:20],
)
def test_text_that_is_no_structure_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptionError):
        from_text(text)


TAGS = ["dict", "state_dict", "ordered_dict", "counter", "tuple", "set", "frozenset", "bytes", "float", "int"]
TAGS += ["complex", "tensor", "ndarray", "numpy_scalar", "dtype", "device", "size", "enum", "x"]


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(TAGS),
                inner,
                min_size=1,
                max_size=2,
            ),
        ),
        max_leaves=12,
    )
)
def test_any_json_is_decoded_or_refused_with_our_errors(structure: Any) -> None:
    try:
        value = unflatten(structure, lambda name: torch.zeros(()))
    except (CorruptionError, InvalidInputError, UnsupportedFormatError):
        return
    assert_same(unflatten(flatten(value).structure, lambda name: torch.zeros(())), value)


def test_enum_type_must_be_registered_to_be_loaded() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown enum type of enum: no\.such\.Type"):
        unflatten({"enum": ["no.such.Type", "A"]}, {}.__getitem__)


def test_enum_name_of_another_type_is_refused_and_a_reloaded_type_is_not() -> None:
    class Other(enum.Enum):
        A = 1

    with pytest.raises(InvalidInputError, match=r"the name is taken by `.*Level`"):
        register_enum(Other, "level")
    with pytest.raises(InvalidInputError, match=r"subclass of `enum\.Enum`"):
        register_enum(int)  # type: ignore[type-var]
    first = register_enum(enum.Enum("Again", "A", module="m", qualname="Again"))
    second = register_enum(enum.Enum("Again", "A", module="m", qualname="Again"))
    assert first is not second
    assert unflatten({"enum": ["m.Again", "A"]}, {}.__getitem__) is second.A


# Arrays


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::3],
        np.array(2.5),
        np.zeros((0, 3), np.float16),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.array(["2024-02-29", "NaT"], dtype="M8[D]"),
        np.array([1, 2], dtype=">m8[25s]"),
        np.array([2**64 - 1], np.uint64),
    ],
    ids=lambda array: array.dtype.str,
)
def test_array_comes_back_with_its_dtype_and_byte_order(array: np.ndarray, round_trip: Any) -> None:
    found = round_trip({"a": array})["a"]
    assert type(found) is np.ndarray
    assert (found.dtype.str, found.shape) == (array.dtype.str, array.shape)
    assert found.tobytes() == array.tobytes()


def test_array_of_another_dtype_than_recorded_is_corrupt() -> None:
    with pytest.raises(CorruptionError, match="dtype of `a`"):
        unflatten({"ndarray": {"name": "a", "dtype": "<f4"}}, lambda name: np.zeros(1, np.float64))


# Without libraries


def test_plain_state_needs_neither_torch_nor_numpy(run_python: Any) -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from varvite.state import flatten, from_text, to_text, unflatten
from varvite import keep, names, optim, records, tensors, errors
from varvite.training import rng
state = {"step": 3, 7: (1.5, None, b"x", {2}), "big": 2**70}
assert unflatten(from_text(to_text(flatten(state).structure)), {}.__getitem__) == state
assert rng.restore(rng.capture()) == []
for structure in ({"dtype": "float32"}, {"numpy_scalar": {"dtype": "<f4", "data": "AAAAAA=="}}):
    try:
        unflatten(structure, {}.__getitem__)
    except errors.UnsupportedFormatError as error:
        print(error.supported)
try:
    flatten({"x": object()})
except errors.InvalidInputError as error:
    print(error.name)
"""
    assert run_python(program).split() == ["torch", "numpy", "x"]


def test_importing_the_layer_imports_no_heavy_library(run_python: Any) -> None:
    program = """
import sys
import varvite.state, varvite.tensors, varvite.optim, varvite.keep, varvite.records, varvite.training.rng
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""
    assert run_python(program) == "[]"
