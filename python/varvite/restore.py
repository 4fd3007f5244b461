"""The restore of objects as plans: validate everything, then read, then install; RNG comes last.

Each object gives a plan with destinations for the bytes; nothing of the object changes before all plans
agree with the snapshot. Tensors that lie dense in CPU memory are filled where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from varvite.errors import InvalidInputError, MismatchError
from varvite.modules import clean_names
from varvite.objects import SavedObject, kind_of, module_state, read_tree
from varvite.optim import override_groups, plan_optimizer
from varvite.plain import loaded, type_name
from varvite.state import flatten, structure_names, unflatten
from varvite.tensors import TensorSpec, allocate, allocate_array, describe, find_ties, is_direct

if TYPE_CHECKING:
    import torch

    from varvite.reading import SnapshotView

__all__ = ["ObjectPlan", "Problems", "Restored", "fill_in_place", "plan_object", "restore_objects"]

Mismatched = tuple[str, str, Any, Any]

_EXACT_WIDENINGS = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
    "float8_e4m3fn": ("float16", "bfloat16", "float32", "float64"),
    "float8_e5m2": ("float16", "bfloat16", "float32", "float64"),
    "complex32": ("complex64", "complex128"),
    "complex64": ("complex128",),
    "uint8": ("uint16", "uint32", "uint64", "int16", "int32", "int64"),
    "uint16": ("uint32", "uint64", "int32", "int64"),
    "uint32": ("uint64", "int64"),
    "int8": ("int16", "int32", "int64"),
    "int16": ("int32", "int64"),
    "int32": ("int64",),
}
"""Dtypes that hold every value of a dtype: a load may go there without asking."""


@dataclass
class Problems:
    """What a restore found, by names, over all objects.

    Attributes:
        matched: Entries that are restored.
        missing: Names that the live side has and the snapshot lacks.
        unexpected: Names that the snapshot has and the live side lacks.
        mismatched: `(name, field, expected, found)` of what differs.
        defaulted: Hyper-parameters that keep the live value.
        never_stepped: Parameters that had no optimizer state when they were saved.
    """

    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatched] = field(default_factory=list)
    defaulted: list[str] = field(default_factory=list)
    never_stepped: list[str] = field(default_factory=list)

    def add(self, other: Any) -> None:
        """Adds what another finding lists, an `OptimizerPlan` included."""
        for name in ("matched", "missing", "unexpected", "mismatched", "defaulted", "never_stepped"):
            getattr(self, name).extend(getattr(other, name))

    def check(self, *, strict: bool) -> None:
        """Raises what stands against the restore, all of it at once.

        Raises:
            MismatchError: A shape or dtype differs, or `strict` and one side lacks names; or nothing
                matched at all.
        """
        lines = [
            f"`{name}` has another {what}: expected {_show(expected)}, but the snapshot has: {_show(found)}"
            for name, what, expected, found in self.mismatched
        ]
        if strict:
            lines += [f"the snapshot lacks `{name}`" for name in self.missing]
            lines += [f"only the snapshot has `{name}`" for name in self.unexpected]
        elif not self.matched and (self.missing or self.unexpected):
            lines += ["no name of the snapshot matches: nothing would be loaded"]
        if not lines:
            return
        more = f"\n  and {len(lines) - 12} more" if len(lines) > 12 else ""
        raise MismatchError(
            "cannot restore, and nothing was changed:\n  " + "\n  ".join(lines[:12]) + more,
            hint=_advice(self.mismatched),
            missing=self.missing,
            unexpected=self.unexpected,
            mismatched=self.mismatched,
        )


def _show(value: Any) -> str:
    return str(list(value)) if isinstance(value, (list, tuple)) else str(value)


def _advice(mismatched: list[Mismatched]) -> str:
    if any(what == "dtype" for _, what, _, _ in mismatched):
        return 'to round values on load, pass override={"allow_narrowing": True}'
    if mismatched:
        return "build the objects as they were saved"
    return "pass the objects that were saved, or strict=False to load what matches"


@dataclass
class ObjectPlan:
    """What a restore will do with one object.

    Attributes:
        destinations: Dense CPU tensors or arrays to fill, by name of the entry.
        found: What matched and what did not.
        commit: Installs what was read; called once all destinations are filled.
    """

    destinations: dict[str, Any]
    found: Problems
    commit: Callable[[], None]


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


def restore_objects(
    view: SnapshotView, objects: Mapping[str, Any], *, strict: bool, override: Mapping[str, Any]
) -> Restored:
    """Restores objects from a snapshot: validates all of them, reads in one crossing, then installs.

    Args:
        view: The snapshot.
        objects: Live objects by the keyword they were saved under.
        strict: Whether names must match both ways.
        override: `allow_narrowing`, and hyper-parameters to set in every optimizer afterwards.

    Raises:
        MismatchError: Something does not match; nothing was changed.
        CorruptionError: Bytes differ from what was written; tensors that were filled before the damage
            was met hold values of the snapshot.
    """
    state_tree, saved = read_tree(view.reader.structure())
    modules = {keyword: value for keyword, value in objects.items() if kind_of(value) == "module"}
    settings = dict(override)
    allow_narrowing = bool(settings.pop("allow_narrowing", False))
    found = Problems()
    plans: dict[str, ObjectPlan] = {}
    for keyword, value in objects.items():
        if keyword not in saved:
            found.missing.append(keyword)
            continue
        plans[keyword] = plan_object(
            keyword, value, saved[keyword], view, modules, allow_narrowing=allow_narrowing
        )
        found.add(plans[keyword].found)
    found.unexpected += [keyword for keyword in saved if keyword not in objects]
    if state_tree is not None:
        found.unexpected += structure_names(state_tree)
    found.check(strict=strict)
    optimizers = [
        value for keyword, value in objects.items() if keyword in plans and kind_of(value) == "optimizer"
    ]
    if settings and not optimizers:
        reason = "no optimizer is restored; legal is `allow_narrowing`"
        raise InvalidInputError(
            f"invalid override `{next(iter(settings))}`: {reason}", what="override", reason=reason
        )

    view.read({name: buffer for plan in plans.values() for name, buffer in plan.destinations.items()})
    order = sorted(plans, key=lambda keyword: _install_order(objects[keyword]))
    for keyword in order:
        plans[keyword].commit()
    overridden = (
        [line for optimizer in optimizers for line in override_groups(optimizer, settings)]
        if settings
        else []
    )
    is_whole = not (found.missing or found.unexpected or found.mismatched)
    loader = "restored" if any(_is_loader(objects[keyword]) for keyword in order) else "absent"
    return Restored(found, order, overridden, is_whole, loader)


def _install_order(value: Any) -> int:
    """Models, then optimizers, then what counts on them, loaders last."""
    kind = kind_of(value)
    if kind == "stateful":
        return 4 if _is_loader(value) else 2
    return {"module": 0, "optimizer": 1, "nest": 3}[kind]


def _is_loader(value: Any) -> bool:
    return kind_of(value) == "stateful" and hasattr(value, "__iter__")


def plan_object(
    keyword: str,
    value: Any,
    saved: SavedObject,
    view: SnapshotView,
    modules: Mapping[str, torch.nn.Module],
    *,
    allow_narrowing: bool,
) -> ObjectPlan:
    """Plans the restore of one object.

    Nothing of it changes before `commit`, but for tensors that the destinations are.

    Args:
        keyword: The keyword it was saved under.
        value: The live object.
        saved: What the snapshot has under this keyword.
        view: The snapshot.
        modules: The modules given beside it.
        allow_narrowing: Whether a value may be rounded to the live dtype.

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
        plan = plan_optimizer(value, modules, unflatten(saved.structure, specs.__getitem__), prefix=keyword)
        found = Problems()
        found.add(plan)
        return ObjectPlan(dict(plan.destinations), found, plan.commit)
    if kind == "stateful":
        return _plan_stateful(value, saved, view)
    return _plan_nest(keyword, value, saved, view)


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
        if not exact and not _may_convert(saved_dtype, one.dtype, allow_narrowing=allow_narrowing):
            found.mismatched.append((name, "dtype", one.dtype, saved_dtype))
            continue
        found.matched.append(name)
        if name in ties and ties[name] in found.matched:
            if not view.same_bytes(name, ties[name]):
                found.mismatched.append(
                    (name, "value", f"that of `{ties[name]}`, with which it is tied", "another")
                )
            continue
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


def _may_convert(saved: str, live: str, *, allow_narrowing: bool) -> bool:
    if live in _EXACT_WIDENINGS.get(saved, ()):
        return True
    both_floats = all(name.startswith(("float", "bfloat")) and "x2" not in name for name in (saved, live))
    both_complex = all(name.startswith("complex") for name in (saved, live))
    return allow_narrowing and (both_floats or both_complex)


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
    flat = flatten(module_state(module), prefix=(keyword,))
    live = {leaf.name: leaf.value for leaf in flat.leaves}
    saved_names = structure_names(saved.structure)
    plan = fill_in_place(live, saved_names, view, allow_narrowing=allow_narrowing)
    if not _is_backed(module, live):
        # A hook makes other tensors of the module's own: only its load_state_dict knows the way back.
        return _plan_by_load_state_dict(module, saved, view, plan)
    extra = {key for key in module.state_dict() if key.endswith("_extra_state")}
    if not extra:
        return plan
    fill = plan.commit
    names = clean_names(module, extra)

    def commit() -> None:
        fill()
        state = unflatten(saved.structure, lambda name: plan.destinations.get(name, live.get(name)))
        found = {key: state[names[key]] for key in extra if names[key] in state}
        module.load_state_dict(found, strict=False)

    return ObjectPlan(plan.destinations, plan.found, commit)


def _is_backed(module: torch.nn.Module, live: Mapping[str, Any]) -> bool:
    """True where every tensor of the state dict is memory of a parameter or buffer of the module."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    return all(tensor.untyped_storage().data_ptr() in own for tensor in live.values() if tensor.numel() > 0)


def _plan_by_load_state_dict(
    module: torch.nn.Module, saved: SavedObject, view: SnapshotView, plan: ObjectPlan
) -> ObjectPlan:
    buffers = {name: allocate(*view.description(name)) for name in structure_names(saved.structure)}

    def commit() -> None:
        state = unflatten(saved.structure, buffers.__getitem__)
        original = {clean: key for key, clean in clean_names(module).items()}
        module.load_state_dict({original.get(key, key): value for key, value in state.items()}, strict=False)

    return ObjectPlan(buffers, plan.found, commit)


def _plan_stateful(value: Any, saved: SavedObject, view: SnapshotView) -> ObjectPlan:
    buffers = view.allocate_for(saved.structure)
    found = Problems(matched=structure_names(saved.structure))

    def commit() -> None:
        value.load_state_dict(unflatten(saved.structure, buffers.__getitem__))

    return ObjectPlan(view.unique(buffers), found, commit)


def _plan_nest(keyword: str, value: Any, saved: SavedObject, view: SnapshotView) -> ObjectPlan:
    flat = flatten(value, prefix=(keyword,))
    if not isinstance(value, (dict, list)) and not flat.leaves:
        reason = f"{type_name(value)} can't be filled in place"
        raise InvalidInputError(
            f"cannot restore `{keyword}`: {reason}",
            hint=f"pass a dict, or read it with load()[{keyword!r}]",
            what=keyword,
            reason=reason,
        )
    live = {leaf.name: leaf.value for leaf in flat.leaves}
    buffers = view.allocate_for(saved.structure)
    found = Problems(matched=[name for name in buffers if name in live or isinstance(value, (dict, list))])
    found.missing = [name for name in live if name not in buffers]
    for name, mine in live.items():
        if name in buffers:
            dtype, shape = view.description(name)
            one = describe(name, mine)
            if tuple(one.shape) != tuple(shape):
                found.mismatched.append((name, "shape", list(one.shape), list(shape)))
            elif one.dtype != dtype:
                found.mismatched.append((name, "dtype", one.dtype, dtype))

    def commit() -> None:
        _assign(value, unflatten(saved.structure, buffers.__getitem__))

    return ObjectPlan(view.unique(buffers), found, commit)


def _assign(live: Any, saved: Any) -> Any:
    """Makes `live` equal `saved`, keeping its containers and tensors; returns what stands in its place."""
    torch = loaded("torch")
    if torch is not None and isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        with torch.no_grad():
            live.detach().copy_(saved)
        return live
    if isinstance(live, dict) and isinstance(saved, dict):
        for key in [key for key in live if key not in saved]:
            del live[key]
        for key, value in saved.items():
            live[key] = _assign(live.get(key), value)
        return live
    if isinstance(live, list) and isinstance(saved, list):
        live[:] = [
            _assign(live[index] if index < len(live) else None, value) for index, value in enumerate(saved)
        ]
        return live
    numpy = loaded("numpy")
    if numpy is not None and isinstance(live, numpy.ndarray) and isinstance(saved, numpy.ndarray):
        live[...] = saved
        return live
    return saved
