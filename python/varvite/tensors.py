"""Tensors and arrays as what the engine reads: a name, a dtype, a shape and dense bytes.

`describe` gives for each tensor one that lies dense, row-major and detached in CPU memory: the tensor
itself where it does already, else a copy of its own elements, by logical index, never of the storage it
is a view of. What can't be given so, and come back equal, is refused by name.

Ties are a fact of memory. Two tensors are tied when they are the same elements of the same memory in the
same order, whatever their values; equal tensors that lie apart are never tied.

Importing this module imports neither torch nor numpy.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from varvite._native import describe_dense
from varvite.errors import InvalidInputError, MismatchError, UnsupportedFormatError
from varvite.plain import UnsavableError, loaded, numpy_dtype_text
from varvite.shards import Shard, is_sharded, shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    import numpy as np
    import torch

__all__ = [
    "DTYPES",
    "Described",
    "TensorSpec",
    "allocate",
    "allocate_array",
    "copy_into",
    "describe",
    "find_ties",
    "is_direct",
    "torch_dtype",
]

DTYPES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Every dtype that can be saved, by its torch name without `torch.`, with the bytes of one element."""

_TENSOR_ONLY: Final = ("bfloat16", "complex32", "float8_", "float4_")
_ARRAY_DTYPES: Final = frozenset(name for name in DTYPES if not name.startswith(_TENSOR_ONLY))


class Described(NamedTuple):
    """A tensor or array as the engine reads it.

    Attributes:
        name: Name of the entry.
        dtype: A key of `DTYPES`.
        shape: Length of each dimension of the whole tensor, in elements.
        value: A dense, row-major, detached `torch.Tensor` in CPU memory, or such an array, of the region's
            elements. It may share memory with the caller's: read it before the caller goes on.
        identity: With dtype and shape, equal for two tensors that are tied; `None` for one that can't be.
            The address of the first element, and how the others are reached from there: an empty text
            for a dense tensor of the CPU.
        source: The caller's tensor. While it is held, no other tensor can get its memory and by that
            its identity.
        is_kept: True where nobody else uses the memory of the value before the save has ended.
        region: What the value is of a tensor of this shape: its offsets and its lengths, in elements; `None`
            for all of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: torch.Tensor | np.ndarray[Any, Any]
    identity: tuple[int, str] | None
    source: Any
    is_kept: bool = False
    region: tuple[list[int], list[int]] | None = None


class TensorSpec(NamedTuple):
    """A tensor of a snapshot that has not been read.

    Attributes:
        name: Name of the entry.
        dtype: A key of `DTYPES`.
        shape: Length of each dimension, in elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


def describe(name: str, value: Any) -> Described:
    """Describes a tensor or array for a save.

    Args:
        name: Name of the entry.
        value: A `torch.Tensor` on any device, a `DTensor` included, or a `numpy.ndarray`.

    Returns:
        The description. Its value is a copy only where the tensor, or this rank's shard of it, isn't dense,
        row-major, plain and in CPU memory.

    Raises:
        InvalidInputError: The value would not come back equal. The message has name, type and reason.

    Example:
        >>> import torch
        >>> column = torch.arange(6, dtype=torch.int16).reshape(2, 3)[:, 1]
        >>> described = describe("column", column)
        >>> described.dtype, described.shape, described.value.tolist()
        ('int16', (2,), [1, 4])
    """
    dense = None if is_sharded(value) else _describe_dense(name, value)
    return dense or describe_other(name, value)


def describe_other(
    name: str, value: Any, *, bring: Callable[[torch.Tensor], torch.Tensor | None] | None = None
) -> Described:
    """Describes a tensor or array that has to be copied or looked at more closely, or refuses it.

    The native walk of a save asks it for whatever is no plain, dense tensor in CPU memory.

    Args:
        name: Name of the entry.
        value: A `torch.Tensor` on any device, or a `numpy.ndarray`.
        bring: Gives memory of the CPU, kept until the save ends, that will hold the values of a dense
            tensor; `None` for one that it does not know.

    Raises:
        InvalidInputError: As `describe`.
    """
    torch = loaded("torch")
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            shard = shard_of(value)
            return _describe_any(name, value, bring) if shard is None else _describe_shard(name, shard, bring)
        return _describe_array(name, value)
    except UnsavableError as error:
        raise error.at(name, value) from None


def find_ties(described: Iterable[Described]) -> dict[str, str]:
    """Finds the tensors that share memory with an earlier one, element for element.

    Args:
        described: Descriptions, in the order of the save.

    Returns:
        The name of the first tensor, by the name of each later one that is tied to it.

    Example:
        >>> import torch
        >>> weight, equal = torch.zeros(2), torch.zeros(2)
        >>> find_ties([describe("a", weight), describe("b", weight), describe("c", equal)])
        {'b': 'a'}
    """
    first_names: dict[Hashable, str] = {}
    ties = {}
    for one in described:
        if one.identity is not None:
            region = one.region and (*one.region[0], *one.region[1])
            first = first_names.setdefault((one.identity, one.dtype, one.shape, region), one.name)
            if first is not one.name:
                ties[one.name] = first
    return ties


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a name of `DTYPES`.

    Raises:
        InvalidInputError: No such name.
        UnsupportedFormatError: The installed torch is too old to have it.

    Example:
        >>> torch_dtype("bfloat16")
        torch.bfloat16
    """
    if name not in DTYPES:
        reason = f"must be one of {', '.join(DTYPES)}"
        raise InvalidInputError(f"invalid dtype `{name}`: {reason}", what="dtype", reason=reason)
    import torch

    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        message = f"unsupported dtype with torch {torch.__version__}: {name}"
        raise UnsupportedFormatError(message, hint="upgrade torch", what="dtype", found=name)
    return dtype


def allocate(dtype: str, shape: Iterable[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Makes a dense tensor for a load to fill; its values are what the memory held.

    Args:
        dtype: A key of `DTYPES`.
        shape: Length of each dimension, in elements.
        device: Where it lies.

    Raises:
        InvalidInputError: No such dtype.
        UnsupportedFormatError: The installed torch is too old to have it.

    Example:
        >>> allocate("uint8", (2, 0)).shape
        torch.Size([2, 0])
    """
    element_type = torch_dtype(dtype)
    import torch

    shape = tuple(shape)
    if dtype == "complex32":
        # `torch.empty` of complex halves warns that operators are missing; none is needed here.
        return torch.view_as_complex(torch.empty((*shape, 2), dtype=torch.float16, device=device))
    return torch.empty(shape, dtype=element_type, device=device)


def allocate_array(dtype: str, shape: Iterable[int]) -> np.ndarray[Any, Any]:
    """Makes a dense NumPy array for a load to fill; its values are what the memory held.

    Args:
        dtype: A key of `DTYPES` that NumPy has too, with native byte order.
        shape: Length of each dimension, in elements.

    Raises:
        InvalidInputError: NumPy has no such dtype.

    Example:
        >>> allocate_array("float16", (0, 3)).shape
        (0, 3)
    """
    if dtype not in _ARRAY_DTYPES:
        reason = "NumPy has no such dtype; load it as a tensor"
        raise InvalidInputError(f"invalid dtype `{dtype}` of an array: {reason}", what="dtype", reason=reason)
    import numpy as np

    return np.empty(tuple(shape), dtype=dtype)


def is_direct(tensor: torch.Tensor) -> bool:
    """True where a load may write the elements of a tensor straight into its memory.

    Example:
        >>> import torch
        >>> is_direct(torch.zeros(2, 2)), is_direct(torch.zeros(2, 2).t())
        (True, False)
    """
    return describe_dense(tensor) is not None


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies the elements of one tensor to another of the same dtype and shape, on any device.

    Raises:
        MismatchError: Dtypes or shapes differ; nothing is ever cast or broadcast.

    Example:
        >>> import torch
        >>> target = torch.zeros(2, 2).t()
        >>> copy_into(target, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> target.tolist()
        [[1.0, 2.0], [3.0, 4.0]]
    """
    for field in ("dtype", "shape"):
        expected, found = getattr(target, field), getattr(source, field)
        if expected != found:
            message = f"cannot copy to a tensor of {field} `{expected}` from one of: {found}"
            raise MismatchError(message, field=field, expected=expected, found=found)
    import torch

    with torch.no_grad():
        target.detach().copy_(source)


_dtype_names: dict[Any, str] = {}


def _dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, or an empty one where it can't be saved."""
    name = _dtype_names.get(dtype)
    if name is None:
        name = str(dtype).removeprefix("torch.")
        name = name if name in DTYPES else ""
        _dtype_names[dtype] = name
    return name


def _describe_dense(name: str, value: Any) -> Described | None:
    """Describes a tensor whose memory is its bytes; `None` for any other. The path of most tensors."""
    found = describe_dense(value)
    if found is None:
        return None
    dtype, shape, address = found
    identity = None if 0 in shape else (address, "")
    dense = value.detach() if value.requires_grad else value
    return Described(name, dtype, tuple(shape), dense, identity, value)


def _describe_any(
    name: str, value: torch.Tensor, bring: Callable[[torch.Tensor], torch.Tensor | None] | None
) -> Described:
    """Describes a tensor that has to be copied, or refuses it."""
    import torch

    _refuse_type(value)
    _refuse_layout(value)
    dtype_name = _dtype_name(value.dtype)
    if not dtype_name:
        raise UnsavableError(f"dtype `{value.dtype}` is not supported", _dtype_advice(value.dtype))
    if 0 not in value.shape and _address(value) == 0 and not _is_zero(value):
        raise UnsavableError(
            "it has no memory of its own", "save it outside of transforms, before its storage is freed"
        )
    brought = None
    with torch.no_grad():
        dense = value.detach()
        if _is_zero(dense):
            dense = dense.clone()
        if dense.dtype is torch.complex32:
            dense = _dense_complex_half(dense)
        else:
            dense = dense.resolve_conj().resolve_neg().contiguous()
            brought = None if bring is None else bring(dense)
            dense = dense.to("cpu") if brought is None else brought
    described = _describe_dense(name, dense)
    if described is None:
        raise UnsavableError("it can't be copied to CPU memory", "save `.cpu()` of it")
    return described._replace(identity=_identity(value), source=value, is_kept=brought is not None)


def _describe_shard(
    name: str, shard: Shard, bring: Callable[[torch.Tensor], torch.Tensor | None] | None
) -> Described:
    """Describes what this rank holds of a sharded tensor."""
    described = _describe_dense(name, shard.local) or _describe_any(name, shard.local, bring)
    identity = described.identity
    if identity is None and 0 not in shard.shape:
        # An empty shard has no memory. That it is tied shows in the storage it is a part of.
        storage = shard.local.untyped_storage()
        identity = storage._cdata, f"empty at {shard.local.storage_offset()}"  # noqa: SLF001 - no public way
    offsets, lengths = shard.region
    return described._replace(
        shape=shard.shape, identity=identity, source=shard.local, region=(list(offsets), list(lengths))
    )


def _dense_complex_half(value: torch.Tensor) -> torch.Tensor:
    """Copies a complex32 tensor by its halves: making one directly warns that operators are missing."""
    import torch

    is_conjugate = value.is_conj()
    halves = torch.view_as_real(value.conj() if is_conjugate else value)
    halves = halves.resolve_neg().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if is_conjugate:
        halves[..., 1].neg_()
    return torch.view_as_complex(halves)


def _identity(value: torch.Tensor) -> tuple[int, str] | None:
    """Returns what is, with dtype and shape, equal exactly for the same elements of memory."""
    address = _address(value)
    if address == 0 or 0 in value.shape:
        return None
    # A conjugate or negated view has the memory of its base but other values.
    flips = (1 if value.is_conj() else 0) + (2 if value.is_neg() else 0)
    if value.is_cpu and value.is_contiguous() and not flips:
        return address, ""
    return address, f"{value.stride()} {value.device} {flips}"


def _address(value: torch.Tensor) -> int:
    """Returns the address of the first element; 0 for a tensor without memory of its own."""
    try:
        return _address_reader()(value)
    except (RuntimeError, NotImplementedError):
        return 0


@functools.cache
def _address_reader() -> Callable[[torch.Tensor], int]:
    """Returns the function that reads the address of a tensor's first element.

    Unlike `Tensor.data_ptr`, `_data_address` doesn't make a copy-on-write clone copy itself. It gives
    where the storage starts, not the tensor.
    """
    import torch

    storage_address: Any = getattr(torch._C, "_data_address", None)  # noqa: SLF001 - there is no public way
    if storage_address is None:
        data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
        return data_ptr

    def read(value: torch.Tensor) -> int:
        start: int = storage_address(value)
        return start + value.storage_offset() * value.element_size() if start else 0

    return read


def _is_zero(value: torch.Tensor) -> bool:
    """True for the zeros without memory that autograd makes."""
    return bool(value._is_zerotensor())  # noqa: SLF001 - there is no public way to ask


def _refuse_type(value: torch.Tensor) -> None:
    """Refuses tensor types whose bytes are not all there is to them."""
    import torch

    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return
    if torch.nn.parameter.is_lazy(value):
        raise UnsavableError("it has no shape before the first forward pass", "run one batch before the save")
    if kind.__module__.startswith("torch._subclasses."):
        raise UnsavableError("fake tensors have no values", "save the real tensors")
    own_dispatch = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if own_dispatch or hasattr(kind, "__tensor_flatten__"):
        raise UnsavableError(
            "tensors that wrap other tensors are not supported",
            "save the inner tensors (`__tensor_flatten__`), or the plain values (`.dequantize()`)",
        )
    if not issubclass(kind, torch.nn.Parameter):
        raise UnsavableError(
            "its class and what else it holds would be lost", "save `.as_subclass(torch.Tensor)` of it"
        )


def _refuse_layout(value: torch.Tensor) -> None:
    """Refuses tensors that are not an array of elements."""
    import torch

    if value.is_nested:
        raise UnsavableError("nested tensors are not supported", "save the list that `.unbind()` gives")
    if value.is_quantized:
        raise UnsavableError(
            f"quantized tensors (`{value.dtype}`) are not supported",
            "save `.int_repr()` with scale and zero point, or `.dequantize()` of it",
        )
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        advice = "save `.to_dense()` of it, or its indices and values"
        raise UnsavableError(f"layout `{layout}` is not supported", advice)
    if value.is_meta:
        raise UnsavableError("tensors on the `meta` device have no values", "materialise it before the save")


def _dtype_advice(dtype: torch.dtype) -> str:
    size = dtype.itemsize
    unsigned = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}.get(size, "uint8")
    return f"save `.view(torch.{unsigned})` of it"


def _describe_array(name: str, value: Any) -> Described:
    numpy = loaded("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        raise UnsavableError("it is neither a tensor nor an array")
    if type(value) not in (numpy.ndarray, numpy.memmap):
        raise UnsavableError("subclasses of `numpy.ndarray` are not supported", "save `numpy.asarray` of it")
    numpy_dtype_text(value.dtype)
    dense = value
    if value.dtype.kind in "mM":
        # As integers, whatever the unit and the byte order; the structure has the dtype.
        dense = dense.astype(value.dtype.newbyteorder("="), copy=False).view(numpy.int64)
    elif not value.dtype.isnative:
        dense = dense.astype(value.dtype.newbyteorder("="))
    if not dense.flags.c_contiguous:
        dense = dense.copy(order="C")  # `ascontiguousarray` would give a 0-d array a dimension
    identity = (id(value), "numpy") if math.prod(value.shape) else None
    return Described(name, dense.dtype.name, value.shape, dense, identity, value)
