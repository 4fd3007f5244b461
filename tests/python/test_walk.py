"""The native walk and description of tensors: what they take themselves is what the rules in Python say."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from varvite import names
from varvite._native import SaveTensors, Walk, describe_dense
from varvite.errors import InternalError, InvalidInputError
from varvite.modules import clean_names, read_plain
from varvite.plain import canonical_text, encode_hashable
from varvite.state import StateDict
from varvite.tensors import DTYPES, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

# The walk


KEYS: list[dict[Any, int]] = [
    {"a": 0, "layers": 1, "exp_avg-2": 2, "7": 3, "_": 4},
    {7: 0, -1: 1, 0: 2},
    {7: 0, "7": 1, "a": 2},
    {True: 0, "True": 1, "a": 2},
    {"a.b": 0, "layers.0.weight": 1},
    {"": 0, ".": 1, "a.": 2, ".a": 3, "a..b": 4},
    {"a b": 0, "é": 1, " a": 2, "a\u2028": 3},
    {'"': 0, "\\": 1, "\n\t\x01": 2, "\x7f": 3, "(a)": 4, "key('a')": 5},
    {None: 0, 1.5: 1, ("t", 1): 2, b"w": 3},
    {1 << 70: 0, 3: 1},
    {np.int64(3): 0, 4: 1},
]


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: canonical_text([repr(key) for key in keys])[:40])
def test_keys_are_named_and_written_by_the_rules(keys: dict[Any, int]) -> None:
    state = dict.fromkeys(keys, torch.zeros(1))
    walk = Walk()
    text = walk.flatten(state, "m")
    shown = [f"m.{part}" for part in names.show_keys(state)]
    assert [name for name, _ in walk.leaves()] == shown
    rows = [[encode_hashable(key), {"tensor": name}] for key, name in zip(keys, shown, strict=True)]
    assert text == canonical_text({"dict": rows})


@pytest.mark.parametrize(
    "keys",
    [
        ["layers.0.weight", "layers.0.bias", "seen"],
        ["a..b", "a."],
        ["a", "a.b"],
        ["a.b", "a.b.c", "a"],
        ['odd"', "ü.b"],
    ],
)
@pytest.mark.parametrize("make", [lambda: torch.zeros(1), lambda: {"x": torch.zeros(1)}])
def test_keys_of_a_state_dict_are_named_by_the_rules(keys: list[str], make: Callable[[], Any]) -> None:
    state = StateDict({key: make() for key in keys})
    walk = Walk()
    text = walk.flatten(state, "")
    shown = names.state_dict_names(state, lambda value: isinstance(value, dict))
    ends = [".x" if isinstance(value, dict) else "" for value in state.values()]
    assert [name for name, _ in walk.leaves()] == [name + end for name, end in zip(shown, ends, strict=True)]
    assert text.startswith('{"state_dict":[[' + canonical_text(keys[0]))


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    1e-05,
    1e16,
    0.1,
    -0.0,
    5e-324,
    float("inf"),
    float("nan"),
    "",
    "é\u2028\x7f",
    '"\\/\b\f\n\r\t\x00\x1f',
    b"x",
    1j,
    np.float64(0.5),
    torch.float16,
    torch.Size([2]),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_are_written_by_the_rules(value: Any) -> None:
    assert Walk().flatten(value, "x") == canonical_text(encode_hashable(value))


def test_an_ordered_dict_is_walked_in_its_own_order() -> None:
    state = OrderedDict(a=1, b=2, c=3)
    state.move_to_end("a")
    state.move_to_end("c", last=False)
    assert Walk().flatten(state, "") == '{"ordered_dict":[["c",3],["b",2],["a",1]]}'


def test_the_root_has_a_name_and_leaves_are_the_callers_own() -> None:
    walk, value = Walk(), torch.zeros(1)
    assert walk.flatten(value, "") == '{"tensor":"."}'
    assert walk.leaves() == [(".", value)]
    assert walk.leaves()[0][1] is value


def test_a_walk_that_refuses_keeps_no_leaf() -> None:
    walk = Walk()
    with pytest.raises(InvalidInputError, match=r"cannot save `x\.b` of type `object`"):
        walk.flatten({"a": torch.zeros(1), "b": object()}, "x")
    assert walk.leaves() == []


# Dense tensors


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in ("complex32", "float4_e2m1fn_x2")])
def test_a_dense_tensor_tells_dtype_shape_and_address(dtype: str) -> None:
    value = torch.zeros(6, 2, dtype=torch.uint8).to(torch_dtype(dtype))
    assert describe_dense(value) == (dtype, [6, 2], value.data_ptr())
    assert describe_dense(value[3:]) == (dtype, [3, 2], value.data_ptr() + 6 * value.element_size())
    assert describe_dense(value[:0]) == (dtype, [0, 2], value.data_ptr())


def test_a_parameter_is_dense_and_a_scalar_has_no_dimension() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert describe_dense(parameter) == ("float32", [2], parameter.data_ptr())
    scalar = torch.tensor(3, dtype=torch.int16)
    assert describe_dense(scalar) == ("int16", [], scalar.data_ptr())


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


def freed() -> torch.Tensor:
    value = torch.zeros(4)
    value.untyped_storage().resize_(0)
    return value


OTHERS: dict[str, Callable[[], Any]] = {
    "transposed": lambda: torch.zeros(2, 3).t(),
    "expanded": lambda: torch.zeros(1).expand(3),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(2)),
    "zeros without memory": lambda: torch._efficientzerotensor(3),
    "freed": freed,
    "meta": lambda: torch.zeros(2, device="meta"),
    "empty meta": lambda: torch.zeros(0, device="meta"),
    "coo": lambda: torch.eye(2).to_sparse(),
    "empty coo": lambda: torch.zeros(0, 2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "empty nested": lambda: torch.nested.nested_tensor([]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8),
    "of a subclass": lambda: torch.zeros(2).as_subclass(type("Sugar", (torch.Tensor,), {})),
    "array": lambda: np.zeros(3),
    "list": lambda: [1.0],
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_not_dense_plain_cpu_memory_is_left_to_python(make: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert describe_dense(make()) is None


def test_a_copy_on_write_clone_is_saved_without_a_copy_of_its_own(tmp_path: Any) -> None:
    from varvite import CheckpointManager

    base = torch.arange(4.0)
    clone = torch._lazy_clone(base)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"base": base, "clone": clone}).wait()
        manager.save_sync(2, {"base": base, "clone": clone})
        assert torch._C._is_cow_tensor(clone)
        loaded = manager.load()
    assert loaded["clone"].tolist() == [0.0, 1.0, 2.0, 3.0]


# The tensors of a save


def tensors_of(state: Any, rank: int | None = None) -> SaveTensors:
    walk, tensors = Walk(), SaveTensors()
    walk.flatten(state, "")
    tensors.add(walk, rank)
    assert walk.leaves() == []
    return tensors


def test_rows_tell_names_dtypes_shapes_and_ties() -> None:
    w = torch.zeros(2, 3)
    state = {"w": w, "t": w.t(), "again": w, "t2": w.t(), "n": np.zeros(2, ">i2"), "e": w[:0], "e2": w[:0]}
    assert tensors_of(state).rows() == [
        ("w", None, "float32", [2, 3], None),
        ("t", None, "float32", [3, 2], None),
        ("again", None, "float32", [2, 3], "w"),
        ("t2", None, "float32", [3, 2], "t"),
        ("n", None, "int16", [2], None),
        ("e", None, "float32", [0, 3], None),
        ("e2", None, "float32", [0, 3], None),
    ]


def test_ties_go_to_the_first_of_the_same_dtype_and_shape() -> None:
    w = torch.zeros(4)
    state = {"flat": w, "square": w.view(2, 2), "bits": w.view(torch.int32), "again": w.view(2, 2), "w": w[:]}
    assert [row[4] for row in tensors_of(state).rows()] == [None, None, None, "square", "flat"]


def test_a_parameter_with_methods_is_tied_to_the_tensor_below_it() -> None:
    class WithMethods(torch.nn.Parameter):
        pass

    w = torch.zeros(2)
    assert [row[4] for row in tensors_of({"a": WithMethods(w), "b": w}).rows()] == [None, "a"]


def test_tensors_of_a_rank_are_not_tied() -> None:
    w = torch.zeros(2)
    rows = tensors_of([w, w], rank=3).rows()
    assert [(row[1], row[4]) for row in rows] == [(3, None), (3, None)]


def test_a_tensor_that_is_refused_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"cannot save `x\.1` of type `torch\.Tensor`: layout"):
        tensors_of({"x": [torch.zeros(1), torch.eye(2).to_sparse()]})


def test_tensors_are_taken_by_one_save(tmp_path: Any) -> None:
    from varvite import CheckpointManager

    tensors = tensors_of({"w": torch.zeros(2)})
    texts = {"metrics": {}, "metadata": "{}", "structure": "null", "rank_structure": None}
    with CheckpointManager(tmp_path / "run") as manager:
        manager._engine.save_sync(1, tensors, **texts)
        with pytest.raises(InternalError, match="taken by another"):
            manager._engine.save_sync(2, tensors, **texts)
        with pytest.raises(InternalError, match="taken by another"):
            tensors.rows()


# Modules


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return 3

    def set_extra_state(self, state: Any) -> None:
        pass


def tied_and_absent() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[2].register_parameter("absent", None)
    model[2].register_buffer("fleeting", torch.zeros(1), persistent=False)
    model[2].register_buffer("none", None)
    model[2].register_module("nothing", None)
    return model


PLAIN: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: torch.nn.Linear(2, 2),
    "tied and absent": tied_and_absent,
    "transformer": lambda: torch.nn.TransformerEncoderLayer(4, 2, 4, batch_first=True),
    "lists": lambda: torch.nn.ParameterList([torch.zeros(1), torch.zeros(2)]),
    "dicts": lambda: torch.nn.ModuleDict({"module": torch.nn.LSTM(2, 2)}),
    "empty": torch.nn.ReLU,
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN.keys())
def test_a_plain_module_is_read_as_torch_reads_it(make: Callable[[], torch.nn.Module]) -> None:
    module = make()
    plain = read_plain(module)
    assert plain is not None
    state = module.state_dict()
    assert list(plain.state) == list(state)
    assert [value.data_ptr() for value in plain.state.values()] == [
        value.data_ptr() for value in state.values()
    ]
    named = {parameter: name for name, parameter in module.named_parameters()}
    assert plain.names == named
    assert list(plain.names.values()) == list(named.values())


def hooked() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module[0].register_state_dict_post_hook(lambda *arguments: None)
    return module


def hooked_before() -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    module.register_state_dict_pre_hook(lambda *arguments: None)
    return module


def overridden_by_attribute() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module[0].named_parameters = lambda *arguments, **keywords: iter(())
    return module


def with_parameter_class() -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    module.weight = type("WithMethods", (torch.nn.Parameter,), {})(torch.zeros(1, 1))
    return module


def shared() -> torch.nn.Module:
    part = torch.nn.Linear(1, 1)
    return torch.nn.Sequential(part, torch.nn.Sequential(part))


def loop() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].parent = model
    return model


OWN_WAYS: dict[str, Callable[[], torch.nn.Module]] = {
    "hook": hooked,
    "hook before": hooked_before,
    "extra state": lambda: torch.nn.Sequential(WithExtraState(1, 1)),
    "attribute": overridden_by_attribute,
    "parameter class": with_parameter_class,
    "shared": shared,
    "loop": loop,
    "lazy": lambda: torch.nn.LazyLinear(1),
    "wrapper": lambda: torch.nn.Sequential(torch.nn.DataParallel(torch.nn.Linear(1, 1))),
    "script": lambda: torch.jit.script(torch.nn.Linear(1, 1)),
    "method": lambda: type("Own", (torch.nn.Linear,), {"state_dict": lambda self, **_: {}})(1, 1),
}


@pytest.mark.parametrize("make", OWN_WAYS.values(), ids=OWN_WAYS.keys())
def test_a_module_with_ways_of_its_own_is_left_to_its_methods(make: Callable[[], torch.nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read_plain(make()) is None


def test_wrappers_are_found_below_many_modules_of_other_types() -> None:
    inner = torch.nn.DataParallel(torch.nn.Linear(1, 1, bias=False))
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.ReLU(), inner))
    assert list(clean_names(model).values()) == ["0.weight", "0.bias", "1.1.weight"]
