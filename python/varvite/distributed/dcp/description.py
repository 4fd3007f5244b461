"""What PyTorch's metadata has, and entries and structure of a snapshot lack.

It is an object `varvite.dcp` of each rank's own, a dict of plain values:

- `version`: 1.
- `paths`: by name, the keys and indices under which the value lies in the nested state, as a list.
- `properties`: by name of a tensor whose properties are not those of a dense one without a gradient:
  `requires_grad`, `pin_memory`, the place of its memory format in `MEMORY_FORMATS`, its strides or `None`.
- `pickled`: names of values that are bytes of a planner. `files`: positions in `io.BytesIO` objects, by name.
  Both lie in the structure as tensors of bytes.
- `planner_data`: of a planner that gives no paths; told by rank 0.

The rank that writes a tensor's first element, or a value, tells of it; so each name is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from varvite.errors import UnsupportedFormatError
from varvite.objects import NOTES_KEYWORD
from varvite.plain import corrupt, decode_hashable
from varvite.state import Json, unflatten

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from varvite.reading import SnapshotView

__all__ = [
    "MEMORY_FORMATS",
    "Description",
    "Path",
    "Properties",
    "dense_strides",
    "describe_plan",
    "is_mapping",
    "pairs_of",
    "read_description",
]

MEMORY_FORMATS = ("contiguous_format", "channels_last", "preserve_format")
"""Memory formats that PyTorch's metadata knows, by the number they are stored as."""

Path = tuple[str | int, ...]

_VERSION = 1
_LIST_LIMIT = 1 << 20
"""PyTorch fills a list up to the index of a path: a hostile one would take all memory."""
_DICT_TAGS = ("dict", "ordered_dict", "counter", "state_dict")

Value = TypeVar("Value")


class Properties(NamedTuple):
    """Properties of a tensor beside its dtype.

    Attributes:
        requires_grad: As it was on the rank that told it.
        pin_memory: Likewise.
        memory_format: Place in `MEMORY_FORMATS`.
        strides: Of the region with the first element, in elements; `None` where PyTorch told none.
    """

    requires_grad: bool
    pin_memory: bool
    memory_format: int
    strides: tuple[int, ...] | None


class Description(NamedTuple):
    """What all ranks told, joined.

    Attributes:
        properties: By name of a tensor; those without are dense and have no gradient.
        paths: By name.
        pickled: Names of values that are bytes of a planner.
        files: Positions in files in memory, by name.
        planner_data: What a planner without paths told, or `None`.
    """

    properties: dict[str, Properties]
    paths: dict[str, Path]
    pickled: set[str]
    files: dict[str, int]
    planner_data: Any


def describe_plan(
    plan: SavePlan, pickled: Sequence[str], files: Mapping[str, int], *, is_first: bool
) -> dict[str, Any]:
    """Returns what a rank tells of the items it writes, to be saved as its own.

    Args:
        plan: The final plan of the rank.
        pickled: Names of its values that are bytes of the planner.
        files: Positions in its files in memory, by name.
        is_first: Whether it is rank 0.
    """
    told = {item.index.fqn: item for item in plan.items if _starts(item)}
    rows = {name: _unusual_properties(item) for name, item in told.items() if item.tensor_data is not None}
    description: dict[str, Any] = {
        "version": _VERSION,
        "properties": {name: list(row) for name, row in rows.items() if row is not None},
        "pickled": list(pickled),
        "files": dict(files),
    }
    planner_data = plan.planner_data
    if _is_paths(planner_data):
        description["paths"] = {name: list(planner_data[name]) for name in told if name in planner_data}
    elif planner_data is not None and is_first:
        description["planner_data"] = planner_data
    return {key: value for key, value in description.items() if value}


def dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a dense, row-major tensor.

    Example:
        >>> dense_strides([2, 0, 3])
        (3, 3, 1)
    """
    strides = [1] * len(sizes)
    for place in range(len(sizes) - 2, -1, -1):
        strides[place] = strides[place + 1] * max(sizes[place + 1], 1)
    return tuple(strides)


def _starts(item: WriteItem) -> bool:
    """True for the item with a tensor's first element, of which there is one, and for a value."""
    return item.tensor_data is None or not any(item.tensor_data.chunk.offsets)


def _unusual_properties(item: WriteItem) -> tuple[Any, ...] | None:
    properties: TensorProperties = item.tensor_data.properties
    row = Properties(
        bool(properties.requires_grad),
        bool(properties.pin_memory),
        MEMORY_FORMATS.index(str(properties.memory_format).removeprefix("torch.")),
        getattr(properties, "strides", None),
    )
    if row == (False, False, 0, dense_strides(item.tensor_data.chunk.sizes)):
        return None
    return row._replace(strides=None if row.strides is None else list(row.strides))  # type: ignore[arg-type]


def _is_paths(planner_data: Any) -> bool:
    return isinstance(planner_data, Mapping) and all(
        isinstance(name, str) and isinstance(path, tuple) for name, path in planner_data.items()
    )


# ---- reading -------------------------------------------------------------------------------------


def read_description(view: SnapshotView) -> Description | None:
    """Joins what the ranks told; `None` where no writer of this kind has saved the snapshot.

    Raises:
        CorruptionError: No writer of this kind has written it so.
        UnsupportedFormatError: A newer version wrote it.
    """
    joined = Description({}, {}, set(), {}, None)
    is_ours = False
    for rank in sorted(view.reader.rank_structures()):
        saved = view.rank_objects(rank).get(NOTES_KEYWORD)
        if saved is None:
            continue
        is_ours = True
        told = dict(pairs_of(saved.structure))
        _check_version(told.get("version"), view)
        joined.properties.update(_by_name(told, "properties", _read_properties))
        joined.paths.update(_by_name(told, "paths", _read_path))
        joined.pickled.update(_read_names(told.get("pickled", [])))
        joined.files.update(_by_name(told, "files", _read_position))
        if "planner_data" in told:
            joined = joined._replace(planner_data=unflatten(told["planner_data"], _no_leaf))
    return joined if is_ours else None


def is_mapping(node: Json) -> bool:
    """True for the node of a dict, of whatever kind.

    Example:
        >>> is_mapping({"dict": []}), is_mapping({"tuple": []})
        (True, False)
    """
    return type(node) is dict and len(node) == 1 and next(iter(node)) in _DICT_TAGS


def pairs_of(node: Json) -> Iterator[tuple[Any, Json]]:
    """Yields the keys of a dict's node, decoded, with the nodes of its values.

    Raises:
        CorruptionError: It is no node of a dict.

    Example:
        >>> list(pairs_of({"dict": [["a", 1]]}))
        [('a', 1)]
    """
    if not isinstance(node, dict) or not is_mapping(node):
        raise corrupt("state", "a dict", node)
    tag, pairs = next(iter(node.items()))
    if not isinstance(pairs, list):
        raise corrupt(tag, "pairs of a key and a value", pairs)
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2:
            raise corrupt(tag, "pairs of a key and a value", pair)
        key, inner = pair
        yield key if type(key) is str else decode_hashable(key, f"key of a {tag}"), inner


def _no_leaf(name: str) -> None:
    raise corrupt(NOTES_KEYWORD, "plain values", name)


def _check_version(version: Json, view: SnapshotView) -> None:
    if version != _VERSION:
        seq = view.header["seq"]
        raise UnsupportedFormatError(
            f"unsupported description of a distributed checkpoint in snapshot {seq}: {version}",
            hint="upgrade Varvite: a newer version wrote this",
            what=NOTES_KEYWORD,
            found=str(version),
            supported=str(_VERSION),
        )


def _by_name(told: Mapping[str, Json], key: str, read: Callable[[Json], Value]) -> dict[str, Value]:
    found = {}
    for name, node in pairs_of(told.get(key, {"dict": []})):
        if type(name) is not str:
            raise corrupt(key, "names", name)
        found[name] = read(node)
    return found


def _read_properties(node: Json) -> Properties:
    match node:
        case [bool(requires_grad), bool(pin_memory), int(memory_format), None | list() as strides]:
            lengths = None if strides is None else tuple(map(_read_position, strides))
            if 0 <= memory_format < len(MEMORY_FORMATS):
                return Properties(requires_grad, pin_memory, memory_format, lengths)
    raise corrupt("properties of a tensor", "two flags, a memory format and strides", node)


def _read_path(node: Json) -> Path:
    if type(node) is not list or not node:
        raise corrupt("path of a name", "keys and indices", node)
    for part in node:
        if type(part) is not str and not (type(part) is int and 0 <= part < _LIST_LIMIT):
            raise corrupt("path of a name", "keys and indices", node)
    return tuple(node)  # type: ignore[arg-type]


def _read_names(node: Json) -> list[str]:
    if type(node) is not list or not all(type(name) is str for name in node):
        raise corrupt("names of pickles", "a list of names", node)
    return node  # type: ignore[return-value]


def _read_position(node: Json) -> int:
    if type(node) is not int or node < 0:
        raise corrupt("position", "a whole number", node)
    return node
