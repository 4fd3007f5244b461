"""How a plan of `torch.distributed.checkpoint` lies in a snapshot: the side that writes.

Each tensor is an entry under its fully qualified name, with the global shape; each item of a plan is a shard
of it. What is no tensor stands in the structure as typed JSON, and no pickle is stored unless the caller
allows it. The structure of a rank is a flat dict of all its items by name, so that the parts of all ranks
join by key, and every reader of snapshots sees `{name: tensor or value}`.
What PyTorch's metadata has beyond that stands beside it (`description`).
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from varvite._native import SaveTensors, Walk
from varvite.distributed.dcp.description import describe_plan
from varvite.errors import InvalidInputError
from varvite.objects import NOTES_KEYWORD, flatten_state
from varvite.state import StateDict, flatten
from varvite.tensors import Described, describe, describe_other

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from varvite.casting import CastRules

__all__ = ["PartContent", "describe_part"]


class PartContent(NamedTuple):
    """What one rank writes.

    Attributes:
        tensors: The regions that it writes; they keep the memory alive.
        structure: Typed tree of its items, as JSON text.
        rank_structure: Typed tree of what it tells of them, as JSON text.
    """

    tensors: SaveTensors
    structure: str
    rank_structure: str


class _Shard(torch.Tensor):  # type: ignore[misc]
    """Stands in a nest for a region of a tensor: an empty tensor that knows what it stands for."""

    region_of: tuple[torch.Tensor, list[int], list[int], list[int]]
    """The region's elements, its offsets and lengths, and the global shape."""


class _Unusual(NamedTuple):
    """Values that are stored as tensors of bytes.

    Attributes:
        pickled: Names of those that are bytes of the planner.
        files: Positions in those that are files in memory, by name.
    """

    pickled: list[str]
    files: dict[str, int]


def describe_part(
    plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool, casts: CastRules | None, is_first: bool
) -> PartContent:
    """Resolves the items of a rank's plan, and describes them for its pack.

    Args:
        plan: The final plan of this rank.
        planner: Gives the data of its items.
        allow_pickle: Whether values without a typed form are stored as the planner pickles them.
        casts: Which tensors are stored in a narrower dtype.
        is_first: Whether this rank tells what concerns the whole plan.

    Raises:
        InvalidInputError: An item can't be saved; names it.
    """
    items: dict[str, Any] = {}
    unusual = _Unusual([], {})
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            items[name] = _read_value(item, planner, unusual, allow_pickle=allow_pickle)
            continue
        if name in items:
            reason = "this rank holds several separate regions of it"
            raise InvalidInputError(
                f"cannot save `{name}`: {reason}",
                hint="give each rank one region of a tensor, as DTensor does",
                what=name,
                name=name,
                reason=reason,
            )
        items[name] = _shard_of(item, planner)
    walk, own_walk = Walk(), Walk()
    try:
        structure = flatten_state(walk, StateDict(items), {})
        tensors = SaveTensors(_describe_item)
        tensors.add(walk)
    except InvalidInputError as error:
        raise _with_hint(error, allow_pickle=allow_pickle) from None
    if casts is not None:
        tensors.store_as(casts.wishes(tensors.names()))
    description = describe_plan(plan, *unusual, is_first=is_first)
    return PartContent(tensors, structure, flatten_state(own_walk, None, {NOTES_KEYWORD: description}))


def _shard_of(item: WriteItem, planner: SavePlanner) -> _Shard:
    """Resolves a tensor; nothing is copied to the CPU yet."""
    value = planner.resolve_data(item)
    chunk, name = item.tensor_data.chunk, item.index.fqn
    if not isinstance(value, torch.Tensor) or value.shape != chunk.sizes:
        found = f"{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        reason = f"the planner gave {found} for a region of shape {list(chunk.sizes)}"
        raise InvalidInputError(f"cannot save `{name}`: {reason}", what=name, name=name, reason=reason)
    shard: _Shard = torch.empty(0).as_subclass(_Shard)
    shard.region_of = (value, list(chunk.offsets), list(chunk.sizes), list(item.tensor_data.size))
    return shard


def _describe_item(name: str, value: Any) -> Described:
    if type(value) is not _Shard:
        return describe_other(name, value)
    local, offsets, lengths, shape = value.region_of
    # Whether two names share memory is told by no plan; equal chunks are stored once all the same.
    return describe(name, local)._replace(
        shape=tuple(shape), identity=None, source=local, region=(offsets, lengths)
    )


def _read_value(item: WriteItem, planner: SavePlanner, unusual: _Unusual, *, allow_pickle: bool) -> Any:
    """Returns a value that is no tensor, and tells of one whose bytes are stored as a tensor."""
    name = item.index.fqn
    if _gives_values_unchanged(planner):
        value = planner.lookup_object(item.index)
        if type(value) is io.BytesIO:
            unusual.files[name] = value.tell()
            return _bytes_tensor(value.getvalue())
        if not allow_pickle or _has_typed_form(name, value):
            return value
    raw = planner.resolve_data(item)
    data = raw.getvalue() if isinstance(raw, io.BytesIO) else bytes(raw)
    if allow_pickle:
        unusual.pickled.append(name)
        return _bytes_tensor(data)
    # Another planner's own form: a value only where it is a file of torch.save with plain values.
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        reason = "the planner gives bytes that are no plain value"
        raise InvalidInputError(
            f"cannot save `{name}`: {reason}", hint=_PICKLE_HINT, what=name, name=name, reason=reason
        ) from error


def _bytes_tensor(data: bytes) -> torch.Tensor:
    # `frombuffer` refuses an empty one.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _gives_values_unchanged(planner: SavePlanner) -> bool:
    """True where a planner's bytes are what `torch.save` makes of the value that it looks up."""
    kind = type(planner)
    return isinstance(planner, DefaultSavePlanner) and (
        kind.transform_object is DefaultSavePlanner.transform_object
        and kind.resolve_data is DefaultSavePlanner.resolve_data
    )


def _has_typed_form(name: str, value: Any) -> bool:
    try:
        flatten(value, prefix=(name,))
    except InvalidInputError:
        return False
    return True


_PICKLE_HINT = "pass allow_pickle=True to the writer, and to every reader that trusts it"


def _with_hint(error: InvalidInputError, *, allow_pickle: bool) -> InvalidInputError:
    """Names one more way on, unless it was gone already."""
    if allow_pickle:
        return error
    hint = _PICKLE_HINT if error.hint is None else f"{error.hint}, or {_PICKLE_HINT}"
    return InvalidInputError(error.message, hint=hint, **error.facts)
