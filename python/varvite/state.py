"""Nested state to flat typed leaves and back.

`flatten` walks a nest of dicts, lists and tuples once. Tensors and arrays become leaves, each with a
name of its own (`varvite.names`); everything else is copied into a structure of typed JSON
(`varvite.plain`) at once, so that the caller may change the nest as soon as `flatten` returns.
`unflatten` builds an equal nest from the structure and the leaves. Nothing is pickled, and nothing that
would not come back as it was is taken.

Containers keep their type: `dict`, `collections.OrderedDict`, `collections.Counter`, `list`, `tuple`,
`set`, `frozenset` and `StateDict`. A container reached by two paths is saved twice; a tensor reached by
two paths is one tensor again after a load, if the caller resolves ties as `unflatten` says.

Example:
    >>> flat = flatten({"step": 3, "betas": (0.9, 0.95)})
    >>> to_text(flat.structure)
    '{"dict":[["step",3],["betas",{"tuple":[0.9,0.95]}]]}'
    >>> unflatten(flat.structure, leaf=lambda name: None)
    {'step': 3, 'betas': (0.9, 0.95)}
"""

from __future__ import annotations

import copy
import json
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from varvite import names
from varvite._native import Walk
from varvite.errors import InvalidInputError
from varvite.names import PathPart
from varvite.plain import (
    DEPTH_LIMIT,
    Json,
    UnsavableError,
    canonical_text,
    check_decode_depth,
    check_depth,
    corrupt,
    decode_bare,
    decode_hashable,
    decode_tag,
    encode_hashable,
    encode_items,
    equals_itself,
    expect_list,
    expect_text,
    loaded,
    numpy_dtype,
    numpy_dtype_text,
    open_tag,
    register_enum,
    unique_set,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = [
    "DEPTH_LIMIT",
    "Flat",
    "Json",
    "Leaf",
    "LeafReference",
    "PathPart",
    "StateDict",
    "flatten",
    "from_text",
    "register_enum",
    "shown_prefix",
    "state_dict_node",
    "structure_leaves",
    "structure_names",
    "to_text",
    "unflatten",
]


class StateDict(dict[str, Any]):
    """A flat dict whose keys are paths joined by dots, as `Module.state_dict()` gives.

    Its keys are split at the dots to make names, and come back whole. It pickles as an `OrderedDict`,
    so a file made with `torch.save` needs no Varvite to be read.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as an `OrderedDict`."""
        return OrderedDict, (), None, None, iter(self.items())

    def __copy__(self) -> StateDict:
        """Returns another state dict with the same values."""
        return StateDict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDict:
        """Returns another state dict with copies of the values."""
        duplicate = StateDict()
        memo[id(self)] = duplicate
        for key, value in self.items():
            duplicate[key] = copy.deepcopy(value, memo)
        return duplicate


class Leaf(NamedTuple):
    """A tensor or array of a state.

    Attributes:
        name: Its path as text (`varvite.names`); no other leaf of the state has it.
        value: The caller's own `torch.Tensor` or `numpy.ndarray`, not a copy.
    """

    name: str
    value: Any


class Flat(NamedTuple):
    """A state taken apart.

    Attributes:
        text: Everything but the leaves, as the text of typed JSON.
        leaves: The leaves, in the order of the walk.
    """

    text: str
    leaves: list[Leaf]

    @property
    def structure(self) -> Json:
        """The typed JSON itself."""
        return from_text(self.text)


class LeafReference(NamedTuple):
    """A place of a structure that wants a leaf.

    Attributes:
        name: Name of the leaf.
        is_array: True for a NumPy array, false for a tensor.
    """

    name: str
    is_array: bool


def state_dict_node(mapping: Mapping[str, Any]) -> StateDict:
    """Marks a flat dict with dotted keys, so that its names have no quotes.

    Args:
        mapping: For instance the result of `Module.state_dict()`; plain values are allowed in it.

    Example:
        >>> dict(state_dict_node({"layers.0.weight": 1}))
        {'layers.0.weight': 1}
    """
    return StateDict(mapping)


def flatten(state: Any, *, prefix: tuple[PathPart, ...] = ()) -> Flat:
    """Takes a state apart into typed JSON and leaves.

    Plain values are copied; tensors and arrays are not.

    Args:
        state: A nest of containers, tensors, arrays and plain values.
        prefix: Path of the state itself, to start every name with.

    Returns:
        The structure and the leaves; dicts are walked in their own order.

    Raises:
        InvalidInputError: A value can't come back as it is. The message names its path and its type.

    Example:
        >>> flatten({"seen": {3, 1}}).structure
        {'dict': [['seen', {'set': [1, 3]}]]}
    """
    walk = Walk()
    text = walk.flatten(state, shown_prefix(prefix))
    return Flat(text, [Leaf(*leaf) for leaf in walk.leaves()])


def shown_prefix(prefix: Iterable[PathPart]) -> str:
    """Returns the start of all names under a path.

    Raises:
        InvalidInputError: A part can't be saved as a key.

    Example:
        >>> shown_prefix(("model", "a.b"))
        'model."a.b"'
    """
    shown = ""
    for part in prefix:
        try:
            shown = names.join(shown, names.show_part(part))
        except UnsavableError as error:
            raise error.at(shown or names.ROOT_NAME, part) from None
    return shown


def unflatten(structure: Json, leaf: Callable[[str], Any]) -> Any:
    """Builds the state of a structure.

    Args:
        structure: What `flatten` gave, perhaps by way of `to_text` and `from_text`.
        leaf: Returns the tensor or array of a name. It is asked once for each name. Ties are resolved
            there: for tied names it returns one and the same object.

    Returns:
        A nest equal to the one that was flattened, with new containers.

    Raises:
        CorruptionError: No `flatten` wrote this structure.
        InvalidInputError: A member of an enum type that is not registered.
        UnsupportedFormatError: A value of torch or NumPy, and that library is not installed.

    Example:
        >>> unflatten({"dict": [["w", {"tensor": "w"}]]}, leaf={"w": "the tensor"}.__getitem__)
        {'w': 'the tensor'}
    """
    return _Unflattening(leaf).decode(structure, 0)


def structure_leaves(structure: Json) -> Iterator[LeafReference]:
    """Yields the leaves that a structure asks for, in its order, without building anything.

    Example:
        >>> [leaf.name for leaf in structure_leaves({"dict": [["w", {"tensor": "w"}]]})]
        ['w']
    """
    pending: list[Json] = [structure]
    while pending:
        node = pending.pop()
        if type(node) is list:
            pending.extend(reversed(node))
        elif type(node) is dict and len(node) == 1:
            tag, payload = next(iter(node.items()))
            if tag == "tensor":
                yield LeafReference(expect_text(payload, "tensor"), is_array=False)
            elif tag == "ndarray":
                yield LeafReference(_open_array(payload, "ndarray")[0], is_array=True)
            else:
                pending.append(payload)


def structure_names(structure: Json) -> list[str]:
    """Returns the names of the leaves of a structure, each once, in its order.

    Example:
        >>> structure_names({"list": []}), structure_names([{"tensor": "0"}, {"tensor": "1"}])
        ([], ['0', '1'])
    """
    return list(dict.fromkeys(reference.name for reference in structure_leaves(structure)))


def to_text(structure: Json) -> str:
    """Returns the JSON text of a structure: one line, UTF-8 text without spaces.

    Example:
        >>> to_text({"tuple": [-0.0, "é"]})
        '{"tuple":[-0.0,"é"]}'
    """
    return canonical_text(structure)


def from_text(text: str) -> Json:
    """Reads the JSON text of a structure.

    Raises:
        CorruptionError: It is no JSON, or holds a number or an object that no structure has.

    Example:
        >>> from_text('{"tuple":[-0.0,"é"]}')
        {'tuple': [-0.0, 'é']}
    """
    try:
        structure: Json = json.loads(text, object_pairs_hook=_unique_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise corrupt("text", f"JSON ({error})", text) from None
    return structure


def _unique_object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    node = dict(pairs)
    if len(node) != len(pairs):
        raise corrupt("object", "keys that differ", [key for key, _ in pairs])
    return node


def _refuse_constant(constant: str) -> NoReturn:
    raise corrupt("number", "a finite number", constant)


_DICT_TAGS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered_dict",
    Counter: "counter",
    StateDict: "state_dict",
}
_CONTAINERS = frozenset([*_DICT_TAGS, list, tuple, set, frozenset])


# The native walk asks these three for whatever it doesn't take by itself.


def encode_other(value: Any, name: str, depth: int) -> tuple[str, bool]:
    """Encodes a value that is no container of the walk, no tensor, and not its own JSON.

    Args:
        value: A set, an array, a plain value of a rarer type, or what can't be saved.
        name: Name of its place.
        depth: Containers around it.

    Returns:
        Its JSON text, and whether it is a leaf.

    Raises:
        InvalidInputError: It can't come back as it is.

    Example:
        >>> encode_other({3, 1}, "seen", 1)
        ('{"set":[1,3]}', False)
    """
    kind = type(value)
    try:
        if kind is set or kind is frozenset:
            check_depth(depth)
            return canonical_text({kind.__name__: encode_items(value, depth)}), False
        if _is_array(value):
            return canonical_text({"ndarray": {"name": name, "dtype": numpy_dtype_text(value.dtype)}}), True
        return canonical_text(encode_hashable(value)), False
    except UnsavableError as error:
        raise error.at(name, value) from None


def encode_keys(value: dict[Any, Any], name: str) -> tuple[list[str], list[str]]:
    """Shows and encodes the keys of a dict, of whatever types they are.

    Args:
        value: A dict of one of the types that come back.
        name: Name of its place.

    Returns:
        The keys as parts of names, and as JSON texts, in the order of the dict.

    Raises:
        InvalidInputError: A key can't come back as it is.

    Example:
        >>> encode_keys({"a.b": 1, 7: 2}, ".")
        (['"a.b"', '7'], ['"a.b"', '7'])
    """
    try:
        if type(value) is StateDict:
            shown = names.state_dict_names(value, lambda item: type(item) in _CONTAINERS)
        else:
            shown = names.show_keys(value)
        return shown, [canonical_text(encode_hashable(key)) for key in value]
    except UnsavableError as error:
        raise error.at(name, value) from None


def container_error(value: Any, name: str, contains_itself: bool) -> InvalidInputError:
    """Returns the error for a container inside of itself, or below more containers than may be.

    Example:
        >>> container_error([], "x", True).reason
        'it contains itself'
    """
    if contains_itself:
        return UnsavableError("it contains itself").at(name, value)
    return UnsavableError(f"it lies deeper than {DEPTH_LIMIT} containers").at(name, value)


def _is_array(value: Any) -> bool:
    """True for a NumPy array that is no more than its values.

    Raises:
        UnsavableError: It is of a subclass, whose other state would be lost.
    """
    numpy = loaded("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    if type(value) not in (numpy.ndarray, numpy.memmap):
        raise UnsavableError("subclasses of `numpy.ndarray` are not supported", "save `numpy.asarray` of it")
    return True


class _Unflattening:
    """One walk over a structure."""

    def __init__(self, leaf: Callable[[str], Any]) -> None:
        self._leaf = leaf
        self._found: dict[str, Any] = {}

    def decode(self, node: Json, depth: int) -> Any:
        kind = type(node)
        if kind is list:
            return self._decode_items(node, "list", depth)
        if kind is not dict:
            return decode_bare(node, "value")
        tag, payload = open_tag(node, "value")
        if tag == "tensor":
            return self._find(expect_text(payload, tag))
        if tag == "ndarray":
            name, dtype = _open_array(payload, tag)
            return _restore_array(self._find(name), dtype, name)
        if tag == "tuple":
            return tuple(self._decode_items(payload, tag, depth))
        if tag == "set":
            check_decode_depth(depth, tag)
            items = [decode_hashable(item, tag, depth + 1) for item in expect_list(payload, tag)]
            return unique_set(items, tag, set)
        if tag == "frozenset":
            return decode_hashable(node, tag, depth)
        if tag in _DICT_BUILDERS:
            return self._decode_dict(tag, payload, depth)
        return decode_tag(tag, payload, tag)

    def _find(self, name: str) -> Any:
        if name not in self._found:
            self._found[name] = self._leaf(name)
        return self._found[name]

    def _decode_items(self, payload: Json, tag: str, depth: int) -> list[Any]:
        check_decode_depth(depth, tag)
        return [self.decode(item, depth + 1) for item in expect_list(payload, tag)]

    def _decode_dict(self, tag: str, payload: Json, depth: int) -> dict[Any, Any]:
        check_decode_depth(depth, tag)
        result = _DICT_BUILDERS[tag]()
        for pair in expect_list(payload, tag):
            if type(pair) is not list or len(pair) != 2:
                raise corrupt(tag, "pairs of a key and a value", pair)
            key = decode_hashable(pair[0], f"key of a {tag}")
            if tag == "state_dict" and type(key) is not str:
                raise corrupt(f"key of a {tag}", "a string", key)
            if key in result or not equals_itself(key):
                raise corrupt(f"key of a {tag}", "keys that differ", key)
            result[key] = self.decode(pair[1], depth + 1)
        return result


_DICT_BUILDERS: dict[str, Callable[[], dict[Any, Any]]] = {tag: kind for kind, tag in _DICT_TAGS.items()}


def _open_array(payload: Json, what: str) -> tuple[str, Json]:
    if type(payload) is not dict or payload.keys() != {"name", "dtype"}:
        raise corrupt(what, "`name` and `dtype`", payload)
    return expect_text(payload["name"], what), payload["dtype"]


def _restore_array(value: Any, dtype_text: Json, name: str) -> Any:
    """Gives an array of native elements the dtype it was saved with.

    What is neither array nor tensor stands for one, as in a plan of a load, and is handed on.
    """
    dtype = numpy_dtype(dtype_text, f"dtype of `{name}`")
    torch = loaded("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.numpy()
    import numpy as np

    if not isinstance(value, np.ndarray) or value.dtype == dtype:
        return value
    if dtype.kind in "mM" and value.dtype == np.int64:
        value = value.view(dtype.newbyteorder("="))
    if value.dtype != dtype.newbyteorder("="):
        raise corrupt(f"dtype of `{name}`", f"`{dtype}`", str(value.dtype))
    return value.astype(dtype)
