"""Tensors as dense bytes: every dtype in every layout, ties, and what is refused by name."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
import pytest
import torch
from support import raw_bytes
from torch.utils import _pytree

from varvite.errors import InvalidInputError, MismatchError
from varvite.tensors import (
    DTYPES,
    allocate,
    allocate_array,
    copy_into,
    describe,
    find_ties,
    is_direct,
    torch_dtype,
)

TORCH_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
UNSUPPORTED = sorted(TORCH_DTYPES.keys() - DTYPES.keys())
FLOATS = [
    name for name in DTYPES if name.startswith(("float", "bfloat", "complex")) and name != "float4_e2m1fn_x2"
]


def base(name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, np.ndarray]:
    """Returns a tensor of noise, and its bytes as an array with one more dimension: the oracle.

    Views of the tensor and the same views of the array are made by different libraries.
    """
    size = DTYPES[name]
    noise = np.random.default_rng(7).integers(0, 256, (*shape, size), dtype=np.uint8)
    if name == "bool":
        noise &= 1
    flat = torch.from_numpy(noise.reshape(-1).copy())
    tensor = (flat != 0) if name == "bool" else flat.view(torch_dtype(name))
    return tensor.reshape(shape), noise


LAYOUTS: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "dense": ((3, 4), lambda t: t, lambda a: a),
    "0-d": ((3, 4), lambda t: t[1, 2], lambda a: a[1, 2]),
    "one element": ((1,), lambda t: t, lambda a: a),
    "empty": ((3, 4), lambda t: t[:0], lambda a: a[:0]),
    "empty columns": ((3, 4), lambda t: t[:, 2:2], lambda a: a[:, 2:2]),
    "empty 1-d": ((3, 4), lambda t: t[0, :0], lambda a: a[0, :0]),
    "transposed": ((3, 4), lambda t: t.t(), lambda a: a.transpose(1, 0, 2)),
    "strided": ((6, 5), lambda t: t[::2, 1::3], lambda a: a[::2, 1::3]),
    "column": ((6, 5), lambda t: t[:, 3], lambda a: a[:, 3]),
    "row": ((6, 5), lambda t: t[3], lambda a: a[3]),
    "expanded": (
        (1, 4),
        lambda t: t.expand(3, 4),
        lambda a: np.broadcast_to(a, (3, 4, a.shape[-1])),
    ),
    "channels last": (
        (2, 5, 6, 3),
        lambda t: t.permute(0, 3, 1, 2),
        lambda a: a.transpose(0, 3, 1, 2, 4),
    ),
    "chunk": ((100,), lambda t: t.chunk(10)[3], lambda a: np.array_split(a, 10)[3]),
    "inference": ((3, 4), lambda t: _inference(t), lambda a: a),  # noqa: PLW0108
}


def _inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        clone = _quietly(tensor.clone)
    assert clone.is_inference()
    return clone


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_in_every_layout_gives_its_elements_in_order(name: str, layout: str) -> None:
    shape, view, oracle_view = LAYOUTS[layout]
    tensor, noise = base(name, shape)
    value, oracle = view(tensor), oracle_view(noise)
    described = describe("w", value)
    assert (described.name, described.dtype, described.shape) == ("w", name, tuple(oracle.shape[:-1]))
    assert described.value.is_contiguous()
    assert not described.value.requires_grad
    assert tuple(described.value.shape) == described.shape
    assert raw_bytes(described.value) == np.ascontiguousarray(oracle).tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_can_be_allocated_and_has_its_size(name: str) -> None:
    for shape in ((), (0,), (2, 3)):
        tensor = allocate(name, shape)
        assert (tensor.dtype, tuple(tensor.shape)) == (TORCH_DTYPES[name], shape)
        assert tensor.element_size() == DTYPES[name]
        assert is_direct(tensor)
    assert allocate(name, (2,), "meta").device.type == "meta"


def test_table_is_torchs_own_list_but_for_named_ones() -> None:
    # huggingface/huggingface_hub#4901: a private dtype table went out of date.
    assert DTYPES.keys() <= TORCH_DTYPES.keys()
    for name in UNSUPPORTED:
        assert name.startswith(("q", "bits", "int", "uint")) or name == "bcomplex32", name


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_dtype_that_can_not_be_saved_is_refused_at_save(name: str) -> None:
    try:
        tensor = _quietly(lambda: torch.empty(2, dtype=TORCH_DTYPES[name]))
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch makes no such tensor")
    with pytest.raises(
        InvalidInputError, match=r"cannot save `model\.w` of type `torch\.Tensor`: "
    ) as caught:
        describe("model.w", tensor)
    assert name in str(caught.value)
    assert caught.value.name == "model.w"
    assert caught.value.hint


def test_unknown_dtype_name_lists_the_legal_ones() -> None:
    with pytest.raises(
        InvalidInputError, match=r"invalid dtype `float42`: must be one of bool, uint8"
    ) as caught:
        torch_dtype("float42")
    assert all(name in caught.value.reason for name in DTYPES)


def test_view_gives_its_own_bytes_not_those_of_its_storage() -> None:
    # pytorch/pytorch#95278: each chunk was as big as the tensor it was cut from.
    flat = torch.arange(1_000_000, dtype=torch.float32)
    described = describe("chunk", flat.chunk(10)[3])
    assert described.value.numel() == 100_000
    assert raw_bytes(described.value) == np.arange(300_000, 400_000, dtype=np.float32).tobytes()


@pytest.mark.parametrize("name", [name for name in FLOATS if "8" not in name or "128" in name])
def test_parameter_and_tensor_with_gradient_are_detached(name: str) -> None:
    tensor, noise = base(name, (2, 3))
    for value in (
        torch.nn.Parameter(tensor),
        tensor.clone().requires_grad_(),
        torch.nn.Parameter(tensor.t()).t(),
    ):
        described = describe("w", value)
        assert not described.value.requires_grad
        assert raw_bytes(described.value) == noise.tobytes()


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_conjugate_and_negated_views_give_their_own_values(dtype: torch.dtype) -> None:
    value = torch.complex(torch.tensor([1.0, -3.0]), torch.tensor([2.0, 0.5])).to(dtype)
    conjugate = value.conj()
    assert conjugate.is_conj()
    described = describe("c", conjugate).value
    assert not described.is_conj()
    assert torch.view_as_real(described).tolist() == [[1.0, -2.0], [-3.0, -0.5]]
    negated = conjugate.imag
    assert negated.is_neg()
    described = describe("n", negated).value
    assert not described.is_neg()
    assert described.tolist() == [-2.0, -0.5]


def test_dense_negated_view_gives_its_own_values() -> None:
    negated = torch._neg_view(torch.tensor([1.0, -2.0]))
    assert negated.is_contiguous()
    assert not is_direct(negated)
    assert describe("n", negated).value.tolist() == [-1.0, 2.0]
    assert raw_bytes(describe("n", negated).value) == np.array([-1.0, 2.0], np.float32).tobytes()


def test_nan_payloads_and_signs_survive() -> None:
    patterns = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0x00000001], dtype=torch.int64).to(
        torch.int32
    )
    assert raw_bytes(describe("w", patterns.view(torch.float32).view(2, 2).t()).value) == raw_bytes(
        patterns.view(2, 2).t().contiguous()
    )


def test_zeros_without_memory_are_saved_as_zeros() -> None:
    described = describe("z", torch._efficientzerotensor(3))
    assert described.value.tolist() == [0.0, 0.0, 0.0]
    assert described.identity is None


def test_dense_tensor_is_not_copied_and_copy_on_write_is_not_broken() -> None:
    value = torch.zeros(4)
    assert describe("w", value).value is value
    clone = value._lazy_clone()
    assert describe("w", clone).value is clone
    assert torch._C._is_cow_tensor(clone)


# What is refused


class Wrapped(torch.Tensor):
    """A tensor that wraps another, as quantization libraries make them."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        outer = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        outer.inner = inner
        return outer

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].inner)
        unwrap = lambda value: value.inner if isinstance(value, Wrapped) else value  # noqa: E731
        return func(*_pytree.tree_map(unwrap, args), **_pytree.tree_map(unwrap, kwargs or {}))


class Sugar(torch.Tensor):
    """A subclass without data of its own."""


class ParameterWithMethods(torch.nn.Parameter):
    """What model libraries subclass for methods; the bytes are all there is."""


def _quietly(make: Any) -> torch.Tensor:
    """Makes a tensor of a kind that torch calls experimental or old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def _quantized() -> torch.Tensor:
    return _quietly(lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8))


def _nested(layout: torch.layout) -> torch.Tensor:
    return _quietly(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout))


def _csr() -> torch.Tensor:
    return _quietly(lambda: torch.eye(4).to_sparse_csr())


def _fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


def _freed() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


def _freed_view() -> torch.Tensor:
    tensor = torch.ones(8)
    view = tensor[::2]
    tensor.untyped_storage().resize_(0)
    return view


def _batched() -> torch.Tensor:
    leaked = []
    torch.vmap(lambda x: leaked.append(x) or x * 2)(torch.ones(3, 2))  # type: ignore[func-returns-value]
    return leaked[0]


REFUSED = {
    "quantized": (_quantized, "qint8"),
    "coo": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "csr": (_csr, "sparse_csr"),
    "csc": (lambda: _csr().to_sparse_csc(), "sparse_csc"),
    "bsr": (lambda: _csr().to_sparse_bsr((2, 2)), "sparse_bsr"),
    "bsc": (lambda: _csr().to_sparse_bsc((2, 2)), "sparse_bsc"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "_mkldnn"),
    "nested strided": (lambda: _nested(torch.strided), "nested"),
    "nested jagged": (lambda: _nested(torch.jagged), "wrap other tensors"),
    "meta": (lambda: torch.zeros(3, device="meta"), "meta"),
    "meta empty": (lambda: torch.zeros(0, device="meta"), "meta"),
    "meta parameter": (lambda: torch.nn.Parameter(torch.zeros(3, device="meta")), "meta"),
    "fake": (_fake, "fake tensors have no values"),
    "wrapper": (lambda: Wrapped(torch.ones(3)), "wrap other tensors"),
    "wrapper parameter": (lambda: torch.nn.Parameter(Wrapped(torch.ones(3))), "wrap other tensors"),
    "subclass": (lambda: torch.ones(3).as_subclass(Sugar), "as_subclass(torch.Tensor)"),
    "uninitialized": (torch.nn.UninitializedParameter, "first forward pass"),
    "freed": (_freed, "no memory of its own"),
    "freed view": (_freed_view, "no memory of its own"),
    "batched": (_batched, "no memory of its own"),
    "list": (lambda: [1], "neither a tensor nor an array"),
    "none": (lambda: None, "neither a tensor nor an array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_come_back_is_refused_by_name(case: str) -> None:
    # NVIDIA/TransformerEngine#2721: an async save of wrapper tensors wrote NaN, without an error.
    make, words = REFUSED[case]
    with pytest.raises(InvalidInputError) as caught:
        describe("model.w", make())
    assert str(caught.value).startswith("cannot save `model.w` of type `")
    assert words in str(caught.value)
    assert caught.value.name == "model.w"


def test_subclass_of_parameter_is_its_bytes() -> None:
    assert describe("w", ParameterWithMethods(torch.tensor([1.0, 2.0]))).value.tolist() == [1.0, 2.0]


# Arrays


@pytest.mark.parametrize(
    ("array", "dtype", "expected"),
    [
        (np.arange(6, dtype=">i4").reshape(2, 3), "int32", np.arange(6, dtype="<i4").tobytes()),
        (np.asfortranarray([[1.0, 2.0], [3.0, 4.0]]), "float64", np.array([1.0, 2.0, 3.0, 4.0]).tobytes()),
        (np.arange(10, dtype=np.uint8)[::3], "uint8", bytes([0, 3, 6, 9])),
        (np.array(2.5, np.float16), "float16", np.float16(2.5).tobytes()),
        (np.array([True, False]), "bool", b"\x01\x00"),
        (np.array([1 + 2j], ">c8"), "complex64", np.array([1 + 2j], "<c8").tobytes()),
        (np.array([1, 2], dtype=">M8[s]"), "int64", np.array([1, 2], "<i8").tobytes()),
    ],
)
def test_array_gives_its_elements_in_native_order(array: np.ndarray, dtype: str, expected: bytes) -> None:
    described = describe("a", array)
    assert (described.dtype, described.shape) == (dtype, array.shape)
    assert described.value.flags.c_contiguous
    assert described.value.tobytes() == expected
    assert described.value.shape == array.shape


def test_mapped_array_is_saved_and_other_subclasses_are_not(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "a", dtype=np.float32, mode="w+", shape=(3,))
    mapped[:] = [1, 2, 3]
    assert describe("a", mapped).value.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(InvalidInputError, match="MaskedArray"):
        describe("a", np.ma.masked_array([1.0], [True]))


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_are_allocated_for_dtypes_that_numpy_has(name: str) -> None:
    if name.startswith(("bfloat", "float8", "float4", "complex32")):
        with pytest.raises(InvalidInputError, match=f"invalid dtype `{name}` of an array"):
            allocate_array(name, (2,))
    else:
        array = allocate_array(name, (2, 3))
        assert (array.dtype.name, array.shape, array.dtype.isnative) == (name, (2, 3), True)


# Ties


def ties(**values: Any) -> dict[str, str]:
    return find_ties([describe(name, value) for name, value in values.items()])


def test_tie_is_same_memory_not_equal_bytes() -> None:
    w = torch.zeros(4)
    assert ties(a=w, b=w.clone(), c=w, d=torch.zeros(4), e=w.detach()) == {"c": "a", "e": "a"}


def test_tie_of_parameters_is_found_through_state_dicts() -> None:
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    assert ties(**{key.replace(".", "_"): value for key, value in model.state_dict().items()}) == {
        "head_weight": "embed_weight"
    }
    assert ties(a=model["embed"].weight, b=model["head"].weight.data) == {"b": "a"}


def test_views_of_one_memory_with_another_shape_stride_or_dtype_are_no_ties() -> None:
    w = torch.zeros(4, 4)
    assert ties(a=w, b=w.view(16), c=w.t(), d=w[:2], e=w.view(torch.int32), f=w.view(2, 8)) == {}
    c = torch.zeros(2, dtype=torch.complex64)
    assert ties(a=c, b=c.conj(), c=c.real, d=c.conj().imag) == {}
    assert ties(a=c.conj(), b=c.conj(), c=c.conj().imag, d=c.conj().imag) == {"b": "a", "d": "c"}


def test_strided_tensors_are_tied_though_their_bytes_are_copied() -> None:
    w = torch.arange(6.0).reshape(2, 3)
    assert ties(a=w.t(), b=w.t(), c=w[:, 1], d=w[:, 1]) == {"b": "a", "d": "c"}


def test_empty_tensors_are_never_tied() -> None:
    empty = torch.zeros(0, 3)
    assert ties(a=empty, b=empty) == {}
    assert ties(a=np.zeros(0), b=np.zeros(0)) == {}


def test_identity_outlives_the_tensor_of_the_caller() -> None:
    strided, array = torch.zeros(3, 2).t(), np.zeros(3)
    assert describe("w", strided).source is strided
    assert describe("a", array).source is array
    described = [describe(f"w{index}", torch.full((64, 3), float(index)).t()) for index in range(50)]
    assert find_ties(described) == {}


def test_array_is_tied_to_itself_alone() -> None:
    array = np.zeros(3)
    assert ties(a=array, b=array, c=array[:], d=np.zeros(3)) == {"b": "a"}


# Targets


def test_only_dense_plain_cpu_tensors_are_filled_directly() -> None:
    w = torch.zeros(4, 4)
    assert is_direct(w)
    assert is_direct(torch.nn.Parameter(w))
    assert is_direct(w[1])
    assert is_direct(torch.zeros(0, 3))
    for other in (
        w.t(),
        w[:, 1],
        w[0, :1].expand(4),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.ones(3).to_mkldnn(),
        w.as_subclass(Sugar),
        torch._efficientzerotensor(3),
    ):
        assert not is_direct(other)


def test_copy_never_casts_or_broadcasts() -> None:
    target = torch.nn.Parameter(torch.zeros(2, 3))
    copy_into(target.t(), torch.arange(6.0).reshape(3, 2))
    assert target.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    with pytest.raises(MismatchError, match=r"of dtype `torch\.float32` from one of: torch\.bfloat16"):
        copy_into(target, torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(MismatchError, match="of shape") as caught:
        copy_into(target, torch.zeros(3))
    assert (caught.value.field, caught.value.found) == ("shape", torch.Size([3]))
    assert target[1, 2] == 5.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensor_on_a_device_is_copied_to_the_cpu() -> None:
    value = torch.arange(6.0, device="cuda").reshape(2, 3).t()
    described = describe("w", value)
    assert described.value.device.type == "cpu"
    assert described.value.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert ties(a=value, b=value, c=value.clone()) == {"b": "a"}
    target = torch.zeros(3, 2, device="cuda")
    copy_into(target, described.value)
    assert target.tolist() == described.value.tolist()
