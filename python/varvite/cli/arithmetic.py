"""How far two tensors of one dtype and shape lie apart, from their bytes.

The only file of the command line that needs numpy. Values are widened to double precision, block by
block, so that a large tensor needs no copy of itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Distance", "distance", "small_float_values"]

_BLOCK_BYTES: Final = 1 << 22

_NATIVE: Final = {
    "bool": "u1",
    "uint8": "u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "int8": "i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float32": "<f4",
    "float64": "<f8",
    "complex32": "<f2",
    "complex64": "<f4",
    "complex128": "<f8",
}
_IS_COMPLEX: Final = frozenset(["complex32", "complex64", "complex128"])


class _SmallFloat(NamedTuple):
    """Layout of a float of at most eight bits.

    Attributes:
        exponent_bits: Width of the exponent.
        mantissa_bits: Width of the mantissa.
        bias: What is subtracted from the exponent.
        special: `ieee` where the largest exponent means infinity and NaN, `fn` where only the code of
            all ones is NaN, `fnuz` where only the code of minus zero is, `none` where every code is finite.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str


_SMALL_FLOATS: Final = {
    "float8_e4m3fn": _SmallFloat(4, 3, 7, "fn"),
    "float8_e4m3fnuz": _SmallFloat(4, 3, 8, "fnuz"),
    "float8_e5m2": _SmallFloat(5, 2, 15, "ieee"),
    "float8_e5m2fnuz": _SmallFloat(5, 2, 16, "fnuz"),
    "float4_e2m1fn_x2": _SmallFloat(2, 1, 1, "none"),
}


class Distance(NamedTuple):
    """How far the second tensor lies from the first.

    Attributes:
        element_count: Number of elements.
        changed_elements: Number of elements whose bits differ.
        relative_change: L2 norm of the difference divided by that of the first tensor, over elements that
            are finite in both; `None` where a changed element is not finite or the first norm is zero.
        largest_change: Largest absolute difference of such elements.
        nonfinite_elements: Number of changed elements that are NaN or infinite in either.
    """

    element_count: int
    changed_elements: int
    relative_change: float | None
    largest_change: float
    nonfinite_elements: int


def distance(dtype: str, first: NDArray[Any], second: NDArray[Any]) -> Distance:
    """Compares two tensors.

    Args:
        dtype: Their dtype, by its torch name.
        first: Bytes of one, as `uint8`.
        second: Bytes of the other, of the same length.
    """
    parts = 2 if dtype in _IS_COMPLEX or dtype == "float4_e2m1fn_x2" else 1
    element_count = changed_elements = nonfinite_elements = 0
    first_norm, difference_norm, largest = _Norm(), _Norm(), 0.0
    with np.errstate(all="ignore"):
        for left_bytes, right_bytes in _blocks(first, second):
            left, right = _values(dtype, left_bytes), _values(dtype, right_bytes)
            changed = _changed(dtype, left_bytes, right_bytes)
            left_wide, right_wide = _widened(dtype, left), _widened(dtype, right)
            finite = np.isfinite(left_wide) & np.isfinite(right_wide)
            difference = _difference(left, right, left_wide, right_wide)[finite]
            element_count += len(changed)
            changed_elements += int(np.count_nonzero(changed))
            nonfinite_elements += int(np.count_nonzero(changed & ~finite.reshape(-1, parts).all(axis=1)))
            first_norm.add(left_wide[finite])
            difference_norm.add(difference)
            largest = max(largest, float(difference.max(initial=0.0)))
    return Distance(
        element_count,
        changed_elements,
        None if nonfinite_elements else _ratio(difference_norm.value, first_norm.value),
        largest,
        nonfinite_elements,
    )


class _Norm:
    """An L2 norm that grows by blocks and neither overflows nor underflows on the way."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, values: NDArray[Any]) -> None:
        scale = float(np.abs(values).max(initial=0.0))
        if scale > 0.0:
            block = scale * math.sqrt(float(np.square(values / scale).sum()))
            self.value = math.hypot(self.value, block)


def _ratio(difference: float, first: float) -> float | None:
    if difference == 0.0:
        return 0.0
    ratio = difference / first if first > 0.0 else math.inf
    return ratio if math.isfinite(ratio) else None


def _blocks(first: NDArray[Any], second: NDArray[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    for start in range(0, len(first), _BLOCK_BYTES):
        yield first[start : start + _BLOCK_BYTES], second[start : start + _BLOCK_BYTES]


def _changed(dtype: str, left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """Tells of each element whether its bits differ."""
    size = _element_bytes(dtype)
    differs: NDArray[Any] = (left != right).reshape(-1, size).any(axis=1)
    return differs


def _element_bytes(dtype: str) -> int:
    native = _NATIVE.get(dtype)
    size = 1 if native is None else np.dtype(native).itemsize
    return 2 * size if dtype in _IS_COMPLEX else size


def _values(dtype: str, raw: NDArray[Any]) -> NDArray[Any]:
    return raw.view(_NATIVE.get(dtype, "u1"))


def _widened(dtype: str, values: NDArray[Any]) -> NDArray[Any]:
    """Returns values as doubles; two for a complex number, and for a byte of two four-bit floats."""
    if dtype == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    elif dtype not in _NATIVE:
        values = np.asarray(small_float_values(dtype))[values].reshape(-1)
    return values.astype("<f8")


def _difference(
    left: NDArray[Any], right: NDArray[Any], left_wide: NDArray[Any], right_wide: NDArray[Any]
) -> NDArray[Any]:
    """Returns absolute differences; those of integers are exact before they are rounded once."""
    if left.dtype.kind == "i" or left.dtype == np.dtype("<u8"):
        larger, smaller = np.maximum(left, right), np.minimum(left, right)
        # Modulo 2^64 the difference is right even where it doesn't fit the signed type.
        return (larger.astype("<u8") - smaller.astype("<u8")).astype("<f8")
    return np.abs(right_wide - left_wide)


@functools.cache
def small_float_values(dtype: str) -> tuple[Any, ...]:
    """Returns the value of each of the 256 bytes; a pair for a byte of two four-bit floats, low one first.

    Example:
        >>> small_float_values("float8_e4m3fn")[0x7E], small_float_values("float4_e2m1fn_x2")[0x21]
        (448.0, (0.5, 1.0))
    """
    if dtype == "float8_e8m0fnu":
        return (*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan)
    layout = _SMALL_FLOATS[dtype]
    if dtype == "float4_e2m1fn_x2":
        return tuple((_decode(byte & 15, layout), _decode(byte >> 4, layout)) for byte in range(256))
    return tuple(_decode(byte, layout) for byte in range(256))


def _decode(code: int, layout: _SmallFloat) -> float:
    magnitude_bits = layout.exponent_bits + layout.mantissa_bits
    exponent = (code >> layout.mantissa_bits) & ((1 << layout.exponent_bits) - 1)
    mantissa = code & ((1 << layout.mantissa_bits) - 1)
    is_negative = bool(code >> magnitude_bits)
    if layout.special == "fnuz" and code == 1 << magnitude_bits:
        return math.nan
    if layout.special == "fn" and code & ((1 << magnitude_bits) - 1) == (1 << magnitude_bits) - 1:
        return math.nan
    if layout.special == "ieee" and exponent == (1 << layout.exponent_bits) - 1:
        return math.nan if mantissa else -math.inf if is_negative else math.inf
    significand = mantissa if exponent == 0 else mantissa + (1 << layout.mantissa_bits)
    value = math.ldexp(significand, max(exponent, 1) - layout.bias - layout.mantissa_bits)
    return -value if is_negative else value
