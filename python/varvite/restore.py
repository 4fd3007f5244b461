"""The restore of objects as plans: validate everything, then read, then install; RNG comes last.

Each object gives a plan with destinations for the bytes; nothing of the object changes before all plans
agree with the snapshot. Tensors that lie dense in CPU memory are filled where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from varvite.errors import InvalidInputError, MismatchError
from varvite.modules import clean_names
from varvite.nests import plan_nest
from varvite.objects import (
    SavedObject,
    SavedTree,
    kind_of,
    labels_in,
    module_state,
    modules_among,
    positional_objects,
    read_tree,
    stateful_of,
)
from varvite.optim import override_groups, plan_optimizer
from varvite.plain import loaded
from varvite.plans import ObjectPlan, Problems, may_convert
from varvite.records import Mismatched
from varvite.schedules import compare_schedules, learning_rates, scale_schedules
from varvite.state import flatten, state_dict_node, structure_leaves, structure_names, unflatten
from varvite.tensors import TensorSpec, allocate, allocate_array, describe, find_ties, is_direct

if TYPE_CHECKING:
    import torch

    from varvite.reading import SnapshotView

__all__ = ["Restored", "SavedName", "fill_in_place", "is_extra", "restore_objects"]


@dataclass
class Restored:
    """What `restore_objects` did.

    Attributes:
        found: What matched and what did not, over all objects.
        restored: Keywords of the objects, in the order in which they were installed.
        overridden: A line for each hyper-parameter that an override set.
        is_whole: True where every entry of the snapshot was read.
        loader: `restored` where a data loader was among the objects, else `absent`.
    """

    found: Problems
    restored: list[str]
    overridden: list[str]
    is_whole: bool
    loader: str

    def fields(self) -> dict[str, Any]:
        """Returns what a `ResumeReport` says of it, by field."""
        return {
            "restored": self.restored,
            "matched": self.found.matched,
            "missing": self.found.missing,
            "unexpected": self.found.unexpected,
            "mismatched": [Mismatched(*row) for row in self.found.mismatched],
            "defaulted": self.found.defaulted,
            "never_stepped": self.found.never_stepped,
            "overridden": self.overridden,
            "loader": self.loader,
        }


def restore_objects(
    view: SnapshotView,
    objects: Mapping[str, Any],
    *,
    strict: bool,
    override: Mapping[str, Any],
    tree: SavedTree | None = None,
    in_part: bool = False,
    keep_hyper_parameters: bool = False,
) -> Restored:
    """Restores objects from a snapshot: validates all of them, reads in one crossing, then installs.

    Args:
        view: The snapshot.
        objects: Live objects by the keyword they were saved under.
        strict: Whether names must match both ways.
        override: `allow_narrowing`, and hyper-parameters to set in every optimizer afterwards.
        tree: What the snapshot holds, as `read_tree` gives it, where that is not what the view says.
        in_part: What the snapshot holds beside the objects given is left out, and not unexpected.
        keep_hyper_parameters: Optimizers keep what their program has set in their groups.

    Raises:
        MismatchError: Something does not match; nothing was changed.
        CorruptionError: Bytes differ from what was written; tensors that were filled before the damage
            was met hold values of the snapshot.
    """
    state_tree, saved = read_tree(view.reader.structure()) if tree is None else tree
    positional = positional_objects(state_tree)
    labels = labels_in(view.header["metadata"])
    settings = dict(override)
    allow_narrowing = bool(settings.pop("allow_narrowing", False))
    modules = modules_among(objects)
    qualified = _qualified(modules, saved)
    found = Problems()
    plans: dict[str, ObjectPlan] = {}
    for keyword, value in objects.items():
        known = saved.get(keyword) or labels.get(keyword) or positional.get(keyword)
        if known is None:
            found.missing.append(keyword)
            continue
        plans[keyword] = _plan_object(
            keyword,
            value,
            known,
            view,
            modules,
            qualified,
            allow_narrowing=allow_narrowing,
            keep_hyper_parameters=keep_hyper_parameters,
        )
        found.add(plans[keyword].found)
    if not in_part:
        found.unexpected += [keyword for keyword in saved if keyword not in objects]
    if state_tree is not None and not in_part:
        restored = {
            name for keyword in plans if keyword in positional for name in plans[keyword].found.matched
        }
        found.unexpected += [name for name in structure_names(state_tree) if name not in restored]
    destinations = _disjoint(plans, view, found)
    # A nest takes over whole containers: there is no leaving out one of its tensors.
    in_whole = any(
        plan.found.mismatched for keyword, plan in plans.items() if kind_of(objects[keyword]) == "nest"
    )
    found.check(strict=strict, in_whole=in_whole)
    optimizers = [objects[keyword] for keyword in plans if kind_of(objects[keyword]) == "optimizer"]
    _check_override(settings, optimizers)

    view.read(destinations)
    order = sorted(plans, key=lambda keyword: _install_order(objects[keyword]))
    for keyword in order:
        plans[keyword].commit()
    stateful = [objects[keyword] for keyword in plans if kind_of(objects[keyword]) == "stateful"]
    overridden = [line for optimizer in optimizers for line in _override(optimizer, settings, stateful)]
    is_whole = not (found.missing or found.unexpected or found.mismatched)
    loader = "restored" if any(_is_loader(objects[keyword]) for keyword in order) else "absent"
    return Restored(found, order, overridden, is_whole, loader)


def _qualified(modules: Mapping[str, Any], saved: Mapping[str, SavedObject]) -> set[str]:
    """Returns the modules whose keyword starts the names of their parameters in the saved optimizers.

    That was decided by the modules beside them at the save, and a resume may be given others.
    """
    saved_modules = {keyword for keyword, one in saved.items() if one.kind == "module"}
    return set(modules) if len(saved_modules) > 1 else set(modules) - saved_modules


def _disjoint(plans: Mapping[str, ObjectPlan], view: SnapshotView, found: Problems) -> dict[str, Any]:
    """Joins the destinations of all plans; of those that are one memory only the first is read.

    A module and a part of it under two keywords are such.
    """
    joined = {name: buffer for plan in plans.values() for name, buffer in plan.destinations.items()}
    if len(plans) < 2 and not any(plan.may_alias for plan in plans.values()):
        return joined
    for name, first in find_ties(describe(name, value) for name, value in joined.items()).items():
        del joined[name]
        if not view.same_bytes(name, first):
            expected = f"that of `{first}`, with which it shares memory"
            found.mismatched.append((name, "value", expected, "another"))
    return joined


def _check_override(settings: Mapping[str, Any], optimizers: list[Any]) -> None:
    """Refuses what no optimizer has, before anything changes."""
    legal = {key for optimizer in optimizers for group in optimizer.param_groups for key in group}
    legal = {"allow_narrowing", *legal} - {"params"}
    for key in settings:
        if key not in legal:
            reason = f"no optimizer that is restored has it; legal are {', '.join(sorted(legal))}"
            raise InvalidInputError(f"invalid override `{key}`: {reason}", what="override", reason=reason)


def _override(optimizer: Any, settings: Mapping[str, Any], stateful: list[Any]) -> list[str]:
    """Sets hyper-parameters; schedulers go on from a new learning rate."""
    own = {key: settings[key] for key in settings if any(key in group for group in optimizer.param_groups)}
    before = learning_rates(optimizer) if "lr" in own else []
    lines = override_groups(optimizer, own)
    return lines + (scale_schedules(optimizer, stateful, before, overridden=own) if before else [])


def _install_order(value: Any) -> int:
    """Models, then optimizers, then what counts on them, loaders last."""
    kind = kind_of(value)
    if kind == "stateful":
        return 4 if _is_loader(value) else 2
    return {"module": 0, "optimizer": 1, "nest": 3}[kind]


def _is_loader(value: Any) -> bool:
    return kind_of(value) == "stateful" and hasattr(value, "__iter__")


def _plan_object(
    keyword: str,
    value: Any,
    saved: SavedObject,
    view: SnapshotView,
    modules: Mapping[str, torch.nn.Module],
    qualified: set[str],
    *,
    allow_narrowing: bool,
    keep_hyper_parameters: bool,
) -> ObjectPlan:
    """Plans the restore of one object.

    Nothing of it changes before `commit`, but for tensors that the destinations are.

    Args:
        keyword: The keyword it was saved under.
        value: The live object.
        saved: What the snapshot has under this keyword.
        view: The snapshot.
        modules: The modules given beside it.
        qualified: The keywords among them that start names of parameters.
        allow_narrowing: Whether a value may be rounded to the live dtype.
        keep_hyper_parameters: Whether an optimizer keeps what its program has set in its groups.

    Raises:
        MismatchError: The snapshot holds another kind of object under this keyword.
        InvalidInputError: The object can't be restored in place.
    """
    kind = kind_of(value)
    if kind != saved.kind:
        raise MismatchError(
            f"`{keyword}` has another kind: expected {kind}, but the snapshot has: {saved.kind}",
            hint="pass the object that was saved under this keyword, or read its state with load()",
            name=keyword,
            field="kind",
            expected=kind,
            found=saved.kind,
        )
    if kind == "module":
        return _plan_module(keyword, value, saved, view, allow_narrowing=allow_narrowing)
    if kind == "optimizer":
        specs = {name: TensorSpec(name, *view.description(name)) for name in structure_names(saved.structure)}
        nest = unflatten(saved.structure, specs.__getitem__)
        plan = plan_optimizer(
            value,
            modules,
            nest,
            prefix=keyword,
            qualified=qualified,
            keep_hyper_parameters=keep_hyper_parameters,
        )
        found = Problems()
        found.add(plan)
        return ObjectPlan(dict(plan.destinations), found, plan.commit)
    if kind == "stateful":
        return _plan_stateful(keyword, stateful_of(keyword, value), saved, view)
    return plan_nest(keyword, value, saved, view, allow_narrowing=allow_narrowing)


def fill_in_place(
    live: Mapping[str, Any], saved_names: list[str], view: SnapshotView, *, allow_narrowing: bool
) -> ObjectPlan:
    """Plans to fill live tensors with the entries of the same names.

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
        saved_dtype, saved_shape = view.description(name)
        if tuple(saved_shape) != tuple(one.shape):
            found.mismatched.append((name, "shape", list(one.shape), list(saved_shape)))
            continue
        exact = saved_dtype == one.dtype
        if not exact and not may_convert(saved_dtype, one.dtype, allow_narrowing=allow_narrowing):
            found.mismatched.append((name, "dtype", one.dtype, saved_dtype))
            continue
        if name in ties and ties[name] in found.matched:
            if view.same_bytes(name, ties[name]):
                found.matched.append(name)
            else:
                expected = f"that of `{ties[name]}`, with which it is tied"
                found.mismatched.append((name, "value", expected, "another"))
            continue
        found.matched.append(name)
        value = live[name]
        if exact and _is_direct(value):
            destinations[name] = value.detach() if hasattr(value, "detach") else value
        else:
            buffer = (
                allocate(saved_dtype, saved_shape)
                if hasattr(value, "detach")
                else allocate_array(saved_dtype, saved_shape)
            )
            destinations[name] = buffer
            copies.append((value, buffer))
    return ObjectPlan(destinations, found, lambda: _copy_all(copies))


def _is_direct(value: Any) -> bool:
    torch = loaded("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return is_direct(value)
    return bool(value.flags["C_CONTIGUOUS"] and value.flags["WRITEABLE"] and value.dtype.isnative)


def _copy_all(copies: list[tuple[Any, Any]]) -> None:
    torch = loaded("torch")
    for value, buffer in copies:
        if torch is not None and isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.detach().copy_(buffer)
        else:
            value[...] = buffer


def _plan_module(
    keyword: str, module: torch.nn.Module, saved: SavedObject, view: SnapshotView, *, allow_narrowing: bool
) -> ObjectPlan:
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
        return _plan_by_load_state_dict(module, saved, view, plan)
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
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    return all(
        hasattr(leaf, "untyped_storage") and (leaf.numel() == 0 or leaf.untyped_storage().data_ptr() in own)
        for leaf in live.values()
    )


def _plan_by_load_state_dict(
    module: torch.nn.Module, saved: SavedObject, view: SnapshotView, plan: ObjectPlan
) -> ObjectPlan:
    buffers = view.allocate_for(saved.structure)

    def commit() -> None:
        state = unflatten(saved.structure, buffers.__getitem__)
        original = {clean: key for key, clean in clean_names(module).items()}
        left_alone = {row[0].partition(".")[2] for row in plan.found.mismatched}
        fitting = {original.get(key, key): value for key, value in state.items() if key not in left_alone}
        module.load_state_dict(fitting, strict=False)

    return ObjectPlan(view.unique(buffers), plan.found, commit)


def _plan_stateful(keyword: str, value: Any, saved: SavedObject, view: SnapshotView) -> ObjectPlan:
    buffers = view.allocate_for(saved.structure)
    found = Problems(matched=structure_names(saved.structure))
    found.add(compare_schedules(keyword, value, unflatten(saved.structure, SavedName)))
    check = getattr(value, "check_state_dict", None)
    if check is not None and not buffers:
        # A state without tensors is known before anything is read: a refusal here changes nothing.
        check(unflatten(saved.structure, buffers.__getitem__))

    def commit() -> None:
        value.load_state_dict(unflatten(saved.structure, buffers.__getitem__))

    return ObjectPlan(view.unique(buffers), found, commit)
