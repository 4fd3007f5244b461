"""Live tensors and arrays that take the entries of their names, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from varvite.plain import loaded
from varvite.plans import ObjectPlan, Problems, may_convert
from varvite.shards import is_sharded
from varvite.state import Json, structure_leaves
from varvite.targets import Copy, target_in
from varvite.tensors import Described, allocate_array, describe, find_ties, torch_dtype

if TYPE_CHECKING:
    from varvite.reading import SnapshotView

__all__ = ["allocate_like", "copy_all", "fill_in_place"]


def fill_in_place(
    live: Mapping[str, Any], saved_names: list[str], view: SnapshotView, *, allow_narrowing: bool
) -> ObjectPlan:
    """Plans to fill live tensors with the entries of the same names; of sharded ones this rank's regions.

    Args:
        live: Tensors or arrays by entry name.
        saved_names: Names the snapshot has.
        view: The snapshot.
        allow_narrowing: Whether a value may be rounded to the live dtype.
    """
    found = Problems()
    known = set(saved_names)
    found.missing = [name for name in live if name not in known]
    found.unexpected = [name for name in saved_names if name not in live]
    described = {name: describe(name, value) for name, value in live.items() if name in known}
    ties = find_ties(described.values())
    destinations: dict[str, Any] = {}
    copies: list[tuple[Any, Any]] = []
    for name, one in described.items():
        problem = _differs(one, view, allow_narrowing=allow_narrowing)
        is_read = name in ties and ties[name] in found.matched
        if problem is None and is_read and not view.same_bytes(name, ties[name]):
            problem = (name, "value", f"that of `{ties[name]}`, with which it is tied", "another")
        if problem is not None:
            found.mismatched.append(problem)
            continue
        found.matched.append(name)
        if not is_read:
            destinations[name], copy = _destination(one, live[name], view)
            copies += [copy] if copy is not None else []
    return ObjectPlan(destinations, found, lambda: copy_all(copies))


def _differs(
    one: Described, view: SnapshotView, *, allow_narrowing: bool
) -> tuple[str, str, Any, Any] | None:
    saved_dtype, saved_shape = view.description(one.name)
    if tuple(saved_shape) != tuple(one.shape):
        return one.name, "shape", list(one.shape), list(saved_shape)
    if saved_dtype != one.dtype and not may_convert(saved_dtype, one.dtype, allow_narrowing=allow_narrowing):
        return one.name, "dtype", one.dtype, saved_dtype
    return None


def _destination(one: Described, value: Any, view: SnapshotView) -> tuple[Any, tuple[Any, Any] | None]:
    dtype, shape = view.description(one.name)
    if hasattr(value, "detach"):
        return target_in(one.name, value, dtype)
    if one.dtype == dtype and value.dtype.isnative and value.flags.carray:
        return value, None
    buffer = allocate_array(dtype, shape)
    return buffer, (value, buffer)


def copy_all(copies: list[tuple[Any, Any]]) -> None:
    """Copies what was read to buffers to where it belongs, rounded where the dtype is another."""
    torch = loaded("torch")
    for value, buffer in copies:
        if torch is not None and isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.detach().copy_(buffer)
        else:
            value[...] = buffer


def allocate_like(
    structure: Json, live: Mapping[str, Any], view: SnapshotView
) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None]]:
    """Makes memory for every leaf of a structure, sharded where what is live there is sharded.

    Args:
        structure: The saved tree.
        live: Tensors by entry name; nothing is written to them.
        view: The snapshot.

    Returns:
        The tensors and arrays by name; their destinations; and what to do once these are filled.
    """
    sharded: dict[str, Any] = {}
    destinations: dict[str, Any] = {}
    copies: list[Copy] = []
    references = list(structure_leaves(structure))
    for name in (reference.name for reference in references):
        dtype, shape = view.description(name)
        like = live.get(name)
        if like is None or not is_sharded(like) or tuple(like.shape) != shape:
            continue
        import torch

        made = torch.empty_like(like.detach(), dtype=torch_dtype(dtype))
        if is_sharded(made):
            sharded[name] = made
            destinations[name], copy = target_in(name, made, dtype)
            copies += [copy] if copy is not None else []
    whole = view.allocate(reference for reference in references if reference.name not in sharded)
    return {**whole, **sharded}, {**view.unique(whole), **destinations}, lambda: copy_all(copies)
