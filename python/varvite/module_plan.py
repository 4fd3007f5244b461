"""The restore of a module as a plan: its tensors in place, the rest through its own methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from varvite.filling import allocate_like, fill_in_place
from varvite.modules import clean_names
from varvite.objects import SavedObject, module_state
from varvite.plans import ObjectPlan
from varvite.shards import local_of
from varvite.state import flatten, state_dict_node, structure_leaves, unflatten

if TYPE_CHECKING:
    import torch

    from varvite.reading import SnapshotView

__all__ = ["SavedName", "is_extra", "plan_module"]


def plan_module(
    keyword: str, module: torch.nn.Module, saved: SavedObject, view: SnapshotView, *, allow_narrowing: bool
) -> ObjectPlan:
    """Plans to make a module's state equal to the saved one.

    Args:
        keyword: The keyword it was saved under.
        module: The live module.
        saved: What the snapshot has under this keyword.
        view: The snapshot.
        allow_narrowing: Whether a value may be rounded to the live dtype.
    """
    state = module_state(module)
    saved_state = unflatten(saved.structure, SavedName)
    tensors = {key: value for key, value in state.items() if not is_extra(key, value)}
    live = {leaf.name: leaf.value for leaf in flatten(state_dict_node(tensors), prefix=(keyword,)).leaves}
    saved_extra = {key: value for key, value in saved_state.items() if is_extra(key, value)}
    saved_names = [
        name for key in saved_state if key not in saved_extra for name in _names_in(saved_state[key])
    ]
    plan = fill_in_place(live, saved_names, view, allow_narrowing=allow_narrowing)
    extra = [key for key in state if key not in tensors]
    plan.found.missing += [f"{keyword}.{key}" for key in extra if key not in saved_extra]
    plan.found.unexpected += [f"{keyword}.{key}" for key in saved_extra if key not in extra]
    if not _is_backed(module, live):
        # A hook makes other tensors of the module's own: only its load_state_dict knows the way back.
        return _plan_by_load_state_dict(module, saved, view, plan, live)
    wanted = {key: saved_extra[key] for key in extra if key in saved_extra}
    return _plan_extra_state(module, saved, view, plan, wanted) if wanted else plan


class SavedName(str):
    """Stands for the leaf of this name."""

    __slots__ = ()


def is_extra(key: str, value: Any) -> bool:
    """True for what `get_extra_state` gave, or what a hook added: no tensor of the module's own."""
    is_leaf = (
        isinstance(value, SavedName) or hasattr(value, "detach") or hasattr(value, "__array_interface__")
    )
    return not is_leaf or key.rpartition(".")[2] == "_extra_state"


def _names_in(value: Any) -> list[str]:
    if isinstance(value, SavedName):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [name for item in items for name in _names_in(item)]


def _plan_extra_state(
    module: torch.nn.Module,
    saved: SavedObject,
    view: SnapshotView,
    plan: ObjectPlan,
    wanted: Mapping[str, Any],
) -> ObjectPlan:
    """Adds to a plan what only the module's load_state_dict takes back."""
    names = {name for value in wanted.values() for name in _names_in(value)}
    buffers = view.allocate(leaf for leaf in structure_leaves(saved.structure) if leaf.name in names)
    plan.found.matched += sorted(names)
    original = {clean: key for key, clean in clean_names(module).items()}
    fill = plan.commit

    def commit() -> None:
        fill()
        found = unflatten(saved.structure, buffers.get)
        module.load_state_dict({original[key]: found[key] for key in wanted}, strict=False)

    return ObjectPlan({**plan.destinations, **view.unique(buffers)}, plan.found, commit)


def _is_backed(module: torch.nn.Module, live: Mapping[str, Any]) -> bool:
    """True where every leaf of the state dict is memory of a parameter or buffer of the module."""
    own = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return all(
        hasattr(leaf, "untyped_storage") and (local_of(leaf).numel() == 0 or _storage(leaf) in own)
        for leaf in live.values()
    )


def _storage(tensor: torch.Tensor) -> int:
    address: int = local_of(tensor).untyped_storage().data_ptr()
    return address


def _plan_by_load_state_dict(
    module: torch.nn.Module,
    saved: SavedObject,
    view: SnapshotView,
    plan: ObjectPlan,
    live: Mapping[str, Any],
) -> ObjectPlan:
    buffers, destinations, finish = allocate_like(saved.structure, live, view)

    def commit() -> None:
        finish()
        state = unflatten(saved.structure, buffers.__getitem__)
        original = {clean: key for key, clean in clean_names(module).items()}
        left_alone = {row[0].partition(".")[2] for row in plan.found.mismatched}
        fitting = {original.get(key, key): value for key, value in state.items() if key not in left_alone}
        module.load_state_dict(fitting, strict=False)

    return ObjectPlan(destinations, plan.found, commit)
