"""The restore of a plain nest into the live one: its containers and tensors stay the same objects.

The saved structure decides what plain values and containers are there, so that a list that was empty at
the start of the program fills up. What the live nest has and the snapshot lacks is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from varvite import names
from varvite.errors import InvalidInputError
from varvite.filling import copy_all
from varvite.objects import SavedObject
from varvite.plain import loaded, type_name
from varvite.plans import ObjectPlan, Problems, may_convert
from varvite.shards import is_sharded
from varvite.state import StateDict, flatten, structure_leaves, unflatten
from varvite.targets import Copy, target_in
from varvite.tensors import describe, is_direct

if TYPE_CHECKING:
    from varvite.reading import SnapshotView

__all__ = ["plan_nest"]


def plan_nest(
    keyword: str, value: Any, saved: SavedObject, view: SnapshotView, *, allow_narrowing: bool
) -> ObjectPlan:
    """Plans to make a live nest equal to the saved one.

    Args:
        keyword: The keyword it was saved under.
        value: A dict, list, tensor or array, or a tuple of such.
        saved: What the snapshot has under this keyword.
        view: The snapshot.
        allow_narrowing: Whether a value may be rounded to the live dtype.

    Raises:
        InvalidInputError: The live object is a plain value, which can't be changed.
    """
    if not _is_fillable(value):
        reason = f"{type_name(value)} can't be filled in place"
        raise InvalidInputError(
            f"cannot restore `{keyword}`: {reason}",
            hint=f"pass it inside a dict, or read it with load()[{keyword!r}]",
            what=keyword,
            reason=reason,
        )
    live = {leaf.name: leaf.value for leaf in flatten(value, prefix=(keyword,)).leaves}
    found = Problems()
    direct: dict[str, Any] = {}
    sharded: dict[str, Any] = {}
    regions: dict[str, Any] = {}
    copies: list[Copy] = []
    saved_leaves = {leaf.name: leaf.is_array for leaf in structure_leaves(saved.structure)}
    for name, is_array in saved_leaves.items():
        problem = None
        if name in live:
            problem, exact = _compare(name, live[name], is_array, view, allow_narrowing=allow_narrowing)
            if problem is None and is_sharded(live[name]):
                sharded[name] = live[name]
                regions[name], copy = target_in(name, live[name], view.description(name)[0])
                copies += [copy] if copy is not None else []
            elif exact and view.row(name).tied_to is None:
                direct[name] = live[name]
        if problem is None:
            found.matched.append(name)
        else:
            found.mismatched.append(problem)
    found.missing = [name for name in live if name not in saved_leaves]
    outline = unflatten(saved.structure, lambda _name: None)
    found.missing += _plain_missing(value, outline, keyword)
    references = (leaf for leaf in structure_leaves(saved.structure) if leaf.name not in sharded)
    buffers = view.allocate(references, known=direct)

    def commit() -> None:
        copy_all(copies)
        _assign(value, unflatten(saved.structure, {**buffers, **sharded}.__getitem__))

    read_already = {id(value) for value in direct.values()}
    others = {name: buffer for name, buffer in buffers.items() if id(buffer) not in read_already}
    return ObjectPlan({**direct, **view.unique(others), **regions}, found, commit, may_alias=True)


def _is_fillable(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_fillable(item) for item in value)
    return isinstance(value, dict | list) or _is_tensor(value) or _is_array(value)


def _is_tensor(value: Any) -> bool:
    torch = loaded("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    numpy = loaded("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _compare(
    name: str, mine: Any, is_array: bool, view: SnapshotView, *, allow_narrowing: bool
) -> tuple[tuple[str, str, Any, Any] | None, bool]:
    """Returns what differs, and whether the bytes can be read straight into the live tensor or array."""
    dtype, shape = view.description(name)
    one = describe(name, mine)
    if is_array is not _is_array(mine):
        kinds = ("tensor", "array")
        return (name, "kind", kinds[not is_array], kinds[is_array]), False
    if tuple(one.shape) != tuple(shape):
        return (name, "shape", list(one.shape), list(shape)), False
    if one.dtype != dtype:
        if may_convert(dtype, one.dtype, allow_narrowing=allow_narrowing):
            return None, False
        return (name, "dtype", one.dtype, dtype), False
    return None, not is_array and is_direct(mine)


def _plain_missing(live: Any, saved: Any, name: str) -> Iterator[str]:
    """Yields the keys that only live dicts have and under which there is no tensor: those have names."""
    if isinstance(live, dict) and isinstance(saved, dict):
        shown = names.state_dict_names(live, lambda _: False) if isinstance(live, StateDict) else None
        for key, part in zip(live, shown or names.show_keys(live), strict=True):
            if key in saved:
                yield from _plain_missing(live[key], saved[key], names.join(name, part))
            elif not flatten(live[key]).leaves:
                yield names.join(name, part)
    elif isinstance(live, list | tuple) and isinstance(saved, list | tuple):
        for index, (item, other) in enumerate(zip(live, saved, strict=False)):
            yield from _plain_missing(item, other, names.join(name, str(index)))


def _assign(live: Any, saved: Any) -> Any:
    """Makes `live` equal `saved`, keeping its containers and tensors; returns what stands in its place."""
    if live is saved:
        return live
    if _is_tensor(live) and _is_tensor(saved):
        import torch

        with torch.no_grad():
            live.detach().copy_(saved)
        return live
    if isinstance(live, dict) and isinstance(saved, dict):
        # A key that the snapshot lacks was reported as missing, and keeps its value.
        for key, value in saved.items():
            live[key] = _assign(live.get(key), value)
        return live
    if isinstance(live, list) and isinstance(saved, list):
        live[:] = [
            _assign(live[index] if index < len(live) else None, value) for index, value in enumerate(saved)
        ]
        return live
    if type(live) is tuple and type(saved) is tuple and len(live) == len(saved):
        return tuple(_assign(item, value) for item, value in zip(live, saved, strict=True))
    if _is_array(live) and _is_array(saved):
        live[...] = saved
        return live
    return saved
