"""Typed JSON of plain values: the leaves of a state that are not tensors.

`None`, booleans, finite floats, strings and integers of 64 bits are themselves. Every other value is an
object with exactly one key, its tag: `{"bytes": ...}`, `{"float": "inf"}`. So no value is mistaken for
another and none needs a pickle. Decoding is strict: what the encoder can't have written is a
`CorruptionError`. Nothing is imported or looked up by a name from the bytes, except members of enum
types that the program registered.

Neither torch nor numpy is imported to encode; a value of theirs proves that they are loaded.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import math
import operator
import re
import reprlib
import struct
import sys
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from varvite.errors import CorruptionError, InvalidInputError, UnsupportedFormatError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import numpy as np
    import torch

__all__ = ["DEPTH_LIMIT", "Json", "canonical_text", "decode_hashable", "encode_hashable", "register_enum"]

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

DEPTH_LIMIT: Final = 200
"""Containers that may lie inside one another, in a state and in its encoding."""

INT_LIMIT: Final = 1 << 63
"""Integers from `-INT_LIMIT` up to `INT_LIMIT`, that one left out, are JSON numbers."""

EnumType = TypeVar("EnumType", bound=type[enum.Enum])

_NUMPY_DTYPE = re.compile(r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)")
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(?::[0-9]{1,5})?")
_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]{0,63}")
_HEX_INT = re.compile(r"-?0x[1-9a-f][0-9a-f]*")

_short = reprlib.Repr()
_short.maxlevel = 3
_short.maxstring = _short.maxother = 80

_enum_types: dict[str, type[enum.Enum]] = {}
_enum_names: dict[type[enum.Enum], str] = {}


class UnsavableError(Exception):
    """A value that can't be saved, before anybody knows its name.

    Attributes:
        reason: Why.
        hint: What to do instead, or `None`.
    """

    def __init__(self, reason: str, hint: str | None = None) -> None:
        """Keeps the reason and the hint."""
        super().__init__(reason)
        self.reason = reason
        self.hint = hint

    def at(self, name: str, value: object) -> InvalidInputError:
        """Returns the error for the caller: this reason, at a name of the state."""
        kind = type_name(value)
        message = f"cannot save `{name}` of type `{kind}`: {self.reason}"
        return InvalidInputError(message, hint=self.hint, what=name, name=name, type=kind, reason=self.reason)


def type_name(value: object) -> str:
    """Returns the qualified name of a value's type, without `builtins.`."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def loaded(library: str) -> ModuleType | None:
    """Returns a library that the program has imported already, else `None`."""
    return sys.modules.get(library)


def short(value: object) -> str:
    """Returns the `repr` of a value for a message, cut where it is long."""
    try:
        text = _short.repr(value)
    except ValueError:  # an integer of more digits than Python converts
        return f"{type_name(value)} of many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def corrupt(what: str, expected: str, found: object) -> CorruptionError:
    """Returns the error for a structure that no encoder wrote.

    Args:
        what: The part of the structure concerned.
        expected: What should stand there.
        found: What stands there; a long text is cut.
    """
    text = short(found)
    message = f"corrupt {what} in `structure`: expected {expected}, found: {text}"
    return CorruptionError(message, object="structure", what=what, expected=expected, found=text)


def canonical_text(node: Json) -> str:
    """Returns the one JSON text of an encoded value: no spaces, no escapes that are not needed."""
    return json.dumps(node, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def register_enum(kind: EnumType, name: str | None = None) -> EnumType:
    """Lets members of an enum type be saved, and be found again by name when they are loaded.

    Call it where the type is defined, so that the program that loads has done it too. It works as a
    decorator.

    Args:
        kind: The enum type.
        name: Name to store; by default the type's module and qualified name.

    Returns:
        The type itself.

    Raises:
        InvalidInputError: `kind` is not an enum type, or the name is another type's.

    Example:
        >>> import enum
        >>> @register_enum
        ... class Phase(enum.Enum):
        ...     WARMUP = 1
        >>> encode_hashable(Phase.WARMUP)["enum"][1]
        'WARMUP'
    """
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        reason = "must be a subclass of `enum.Enum`"
        raise InvalidInputError(f"invalid enum type `{kind!r}`: {reason}", what="kind", reason=reason)
    name = f"{kind.__module__}.{kind.__qualname__}" if name is None else name
    other = _enum_types.get(name)
    # A reloaded module or notebook cell defines its types anew under the names they had.
    if other is not None and (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        reason = f"the name is taken by `{other.__module__}.{other.__qualname__}`"
        raise InvalidInputError(f"invalid enum name `{name}`: {reason}", what="name", reason=reason)
    _enum_types[name] = kind
    _enum_names[kind] = name
    return kind


def encode_hashable(value: Any, depth: int = 0) -> Json:
    """Encodes a plain value that holds nothing but other hashable plain values.

    Args:
        value: A plain value, or a tuple or frozenset of such.
        depth: Containers around it.

    Raises:
        UnsavableError: The value has no typed JSON.
    """
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        return encode(value)
    if type(value) is tuple:
        check_depth(depth)
        return {"tuple": [encode_hashable(item, depth + 1) for item in value]}
    if type(value) is frozenset:
        check_depth(depth)
        return {"frozenset": encode_items(value, depth)}
    return _encode_foreign(value)


def encode_items(items: set[Any] | frozenset[Any], depth: int) -> list[Json]:
    """Encodes the items of a set that lies in `depth` containers, in the order of their texts."""
    return sorted((encode_hashable(item, depth + 1) for item in items), key=canonical_text)


def decode_hashable(node: Json, what: str, depth: int = 0) -> Any:
    """Decodes what `encode_hashable` wrote.

    Args:
        node: The encoded value.
        what: Where it stands, for errors.
        depth: Containers around it.

    Raises:
        CorruptionError: No encoder wrote this.
        InvalidInputError: It is a member of an enum type that is not registered.
    """
    kind = type(node)
    if kind is not dict:
        return decode_bare(node, what)
    tag, payload = open_tag(node, what)
    if tag in ("tuple", "frozenset"):
        check_decode_depth(depth, what)
        nodes = expect_list(payload, what)
        items = [decode_hashable(item, what, depth + 1) for item in nodes]
        if tag == "tuple":
            return tuple(items)
        return unique_set(items, what, frozenset)
    return decode_tag(tag, payload, what)


def decode_bare(node: Json, what: str) -> bool | int | float | str | None:
    """Decodes a value that is its own encoding."""
    if node is None or type(node) in (bool, int):
        return node  # type: ignore[return-value]
    if type(node) is str:
        if not _is_text(node):
            raise corrupt(what, "text of whole characters", node)
        return node
    if type(node) is float and math.isfinite(node):
        return node
    raise corrupt(what, "a plain value", node)


def decode_tag(tag: str, payload: Json, what: str) -> Any:
    """Decodes a tagged plain value."""
    decode = _DECODERS.get(tag)
    if decode is None:
        raise corrupt(what, "a known tag", tag)
    return decode(payload, what)


def open_tag(node: Json, what: str) -> tuple[str, Json]:
    """Splits an object with exactly one key into its tag and what is under it."""
    if type(node) is not dict or len(node) != 1:
        raise corrupt(what, "an object with one key", node)
    return next(iter(node.items()))


def expect_list(payload: Json, what: str) -> list[Json]:
    """Returns the payload, which must be a list."""
    if type(payload) is not list:
        raise corrupt(what, "a list", payload)
    return payload


def expect_text(payload: Json, what: str) -> str:
    """Returns the payload, which must be a string."""
    if type(payload) is not str or not _is_text(payload):
        raise corrupt(what, "a string", payload)
    return payload


def unique_set(items: list[Any], what: str, kind: Callable[[list[Any]], Any]) -> Any:
    """Builds a set, which must not lose an item by it."""
    result = kind(items)
    if len(result) != len(items):
        raise corrupt(what, "items that differ", items)
    return result


def equals_itself(key: object) -> bool:
    """False for NaN and the like, which no dict can look up."""
    return bool(operator.eq(key, key))


def check_depth(depth: int) -> None:
    """Refuses a container that lies too deep to be saved."""
    if depth >= DEPTH_LIMIT:
        raise UnsavableError(f"it lies deeper than {DEPTH_LIMIT} containers")


def check_decode_depth(depth: int, what: str) -> None:
    """Refuses a container that lies deeper than an encoder writes."""
    if depth >= DEPTH_LIMIT:
        raise corrupt(what, f"at most {DEPTH_LIMIT} containers", depth + 1)


def numpy_dtype_text(dtype: np.dtype[Any]) -> str:
    """Returns NumPy's own text of a dtype that can be saved, such as `<f4`.

    Raises:
        UnsavableError: Values of this dtype can't come back exactly.
    """
    if dtype.fields is not None or dtype.subdtype is not None:
        raise UnsavableError("structured NumPy dtypes are not supported", "save its fields one by one")
    if dtype.hasobject:
        raise UnsavableError("NumPy arrays of objects are not supported", "save `.tolist()` of it instead")
    if dtype.kind in "SUTV":
        raise UnsavableError(
            f"NumPy dtype `{dtype}` is not supported",
            "save text as `.tolist()`, and raw bytes or foreign number types as `.view(numpy.uint8)`",
        )
    text = dtype.str
    if _NUMPY_DTYPE.fullmatch(text) is None:
        raise UnsavableError(f"NumPy dtype `{dtype}` differs between machines", "save it as `float64`")
    return text


def numpy_dtype(text: Json, what: str) -> np.dtype[Any]:
    """Returns the dtype of a text that `numpy_dtype_text` gave."""
    if type(text) is not str or _NUMPY_DTYPE.fullmatch(text) is None:
        raise corrupt(what, "a NumPy dtype", text)
    try:
        import numpy as np
    except ImportError:
        raise _needs("numpy", what) from None
    try:
        return np.dtype(text)
    except (TypeError, ValueError):
        raise corrupt(what, "a NumPy dtype", text) from None


def _needs(library: str, what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"cannot read {what} without a library: {library}",
        hint=f"install it: pip install {library}",
        what=what,
        supported=library,
    )


def _is_text(value: str) -> bool:
    """True where every character has a UTF-8 form: no lone surrogate."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_self(value: Any) -> Json:
    return value  # type: ignore[no-any-return]


def _encode_int(value: int) -> Json:
    # Hexadecimal has no limit of digits and takes linear time; and many JSON readers round long numbers.
    return value if -INT_LIMIT <= value < INT_LIMIT else {"int": hex(value)}


def _encode_float(value: float) -> Json:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return {"float": f"nan:{struct.pack('>d', value).hex()}"}
    return {"float": "inf" if value > 0 else "-inf"}


def _encode_str(value: str) -> Json:
    if not _is_text(value):
        raise UnsavableError("the text holds half a surrogate pair", "encode it with `surrogateescape`")
    return value


def _encode_bytes(value: bytes) -> Json:
    return {"bytes": base64.b64encode(value).decode("ascii")}


def _encode_complex(value: complex) -> Json:
    return {"complex": [_encode_float(value.real), _encode_float(value.imag)]}


_ENCODERS: dict[type, Callable[[Any], Json]] = {
    type(None): _encode_self,
    bool: _encode_self,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: _encode_bytes,
    complex: _encode_complex,
}


def _encode_foreign(value: Any) -> Json:
    """Encodes enum members and the scalars of torch and NumPy."""
    if isinstance(value, enum.Enum):
        return _encode_enum(value)
    torch = loaded("torch")
    if torch is not None:
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if type(value) is torch.Size:
            return {"size": [*value]}
        if isinstance(value, torch.Tensor):
            raise UnsavableError("a tensor can't be a key or lie in a set", "use its name instead")
    numpy = loaded("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        dtype = numpy_dtype_text(value.dtype)
        return {"numpy_scalar": {"dtype": dtype, "data": base64.b64encode(value.tobytes()).decode("ascii")}}
    raise UnsavableError("it is not a plain value, a tensor or an array", _advice(value))


def _encode_enum(value: enum.Enum) -> Json:
    kind = type(value)
    name = _enum_names.get(kind)
    if name is None:
        raise UnsavableError(
            f"enum type `{kind.__qualname__}` is not registered",
            f"call varvite.state.register_enum({kind.__qualname__})",
        )
    if value.name is None or kind.__members__.get(value.name) is not value:
        raise UnsavableError("a combination of flags has no name of its own", "save its `.value`")
    return {"enum": [name, value.name]}


def _advice(value: object) -> str:
    """Returns what to save instead of a value of an unsupported type."""
    if isinstance(value, dict):
        return "convert it with `dict(...)`; other dict types carry state that would be lost"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "save `._asdict()` of it"
    if hasattr(type(value), "__dataclass_fields__"):
        return "save `dataclasses.asdict(...)` of it"
    for kind in (bool, int, float, str, bytes, list, tuple, set, frozenset):
        if isinstance(value, kind):
            return f"convert it with `{kind.__name__}(...)`"
    if hasattr(value, "state_dict"):
        return "pass it to the save by keyword, or save its `.state_dict()`"
    return "save plain values from which you can build it again"


def _decode_int(payload: Json, what: str) -> int:
    text = expect_text(payload, what)
    if _HEX_INT.fullmatch(text) is None:
        raise corrupt(what, "a hexadecimal integer", text)
    value = int(text, 16)
    if -INT_LIMIT <= value < INT_LIMIT:
        raise corrupt(what, "an integer beyond 64 bits", text)
    return value


def _decode_float(payload: Json, what: str) -> float:
    text = expect_text(payload, what)
    if text in ("inf", "-inf"):
        return float(text)
    if re.fullmatch(r"nan:[0-9a-f]{16}", text) is not None:
        value: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0]
        if math.isnan(value):
            return value
    raise corrupt(what, "`inf`, `-inf` or `nan:` with its bits", text)


def _decode_bytes(payload: Json, what: str) -> bytes:
    text = expect_text(payload, what)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise corrupt(what, "base64", text) from None


def _decode_complex(payload: Json, what: str) -> complex:
    parts = [decode_hashable(part, what) for part in expect_list(payload, what)]
    if len(parts) != 2 or not all(type(part) is float for part in parts):
        raise corrupt(what, "two floats", payload)
    return complex(parts[0], parts[1])


def _decode_enum(payload: Json, what: str) -> enum.Enum:
    texts = [expect_text(part, what) for part in expect_list(payload, what)]
    if len(texts) != 2:
        raise corrupt(what, "an enum type and a member", payload)
    name, member = texts
    kind = _enum_types.get(name)
    if kind is None:
        reason = "register the type with `varvite.state.register_enum` before loading"
        raise InvalidInputError(f"unknown enum type of {what}: {name}", hint=reason, what=name, reason=reason)
    if member not in kind.__members__:
        raise corrupt(what, f"a member of `{name}`", member)
    return kind[member]


def _decode_numpy_scalar(payload: Json, what: str) -> np.generic:
    if type(payload) is not dict or payload.keys() != {"dtype", "data"}:
        raise corrupt(what, "`dtype` and `data`", payload)
    dtype = numpy_dtype(payload["dtype"], what)
    data = _decode_bytes(payload["data"], what)
    if len(data) != dtype.itemsize or (dtype.kind == "b" and data not in (b"\0", b"\1")):
        raise corrupt(what, f"one element of `{dtype}`", payload["data"])
    import numpy as np

    scalar: np.generic = np.frombuffer(data, dtype=dtype)[0]
    return scalar


def _import_torch(what: str) -> Any:
    try:
        import torch
    except ImportError:
        raise _needs("torch", what) from None
    return torch


def _decode_dtype(payload: Json, what: str) -> torch.dtype:
    name = expect_text(payload, what)
    if _IDENTIFIER.fullmatch(name) is None:
        raise corrupt(what, "a torch dtype", name)
    library = _import_torch(what)
    dtype: Any = getattr(library, name, None)
    if not isinstance(dtype, library.dtype) or str(dtype) != f"torch.{name}":
        message = f"cannot read {what} with torch {library.__version__}, which has no dtype: {name}"
        raise UnsupportedFormatError(message, hint="upgrade torch", what="dtype", found=name)
    return cast("torch.dtype", dtype)


def _decode_device(payload: Json, what: str) -> torch.device:
    name = expect_text(payload, what)
    if _DEVICE.fullmatch(name) is None:
        raise corrupt(what, "a torch device", name)
    library = _import_torch(what)
    try:
        device: torch.device = library.device(name)
    except RuntimeError:
        raise corrupt(what, "a torch device", name) from None
    return device


def _decode_size(payload: Json, what: str) -> torch.Size:
    lengths = expect_list(payload, what)
    if not all(type(length) is int and abs(length) < INT_LIMIT for length in lengths):
        raise corrupt(what, "a list of 64-bit integers", payload)
    library = _import_torch(what)
    size: torch.Size = library.Size(lengths)
    return size


_DECODERS: dict[str, Callable[[Json, str], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "bytes": _decode_bytes,
    "complex": _decode_complex,
    "enum": _decode_enum,
    "numpy_scalar": _decode_numpy_scalar,
    "dtype": _decode_dtype,
    "device": _decode_device,
    "size": _decode_size,
}
