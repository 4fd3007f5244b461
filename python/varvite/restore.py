"""The restore of objects as plans: validate everything, then read, then install; RNG comes last.

Each object gives a plan with destinations for the bytes; nothing of the object changes before all plans
agree with the snapshot. Tensors that lie dense in CPU memory are filled where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from varvite.errors import InvalidInputError, MismatchError
from varvite.filling import allocate_like
from varvite.module_plan import SavedName, plan_module
from varvite.nests import plan_nest
from varvite.objects import (
    SavedObject,
    SavedTree,
    kind_of,
    labels_in,
    modules_among,
    positional_objects,
    read_tree,
    stateful_of,
)
from varvite.optim import override_groups, plan_optimizer
from varvite.plain import loaded
from varvite.plans import ObjectPlan, Problems
from varvite.rank_local import RankLocal
from varvite.ranks import in_step
from varvite.records import Mismatched
from varvite.schedules import compare_schedules, learning_rates, scale_schedules
from varvite.state import flatten, structure_names, unflatten
from varvite.targets import describe_target
from varvite.tensors import TensorSpec, find_ties

if TYPE_CHECKING:
    import torch

    from varvite.ranks import Alone
    from varvite.reading import SnapshotView

__all__ = ["Restored", "restore_objects"]


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
    peers: Alone | None = None,
    world_size: int | None = None,
    rank_local: str = "derive",
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
        peers: Ranks that restore at the same time: nothing is changed, read or installed on any where one
            can't go on.
        world_size: How many ranks restore; `None` for as many as have saved.
        rank_local: What becomes of objects of one rank where another number has saved them: `derive` or
            `exact`.

    Raises:
        MismatchError: Something does not match; nothing was changed.
        CorruptionError: Bytes differ from what was written; tensors that were filled before the damage
            was met hold values of the snapshot.
    """
    settings = dict(override)
    allow_narrowing = bool(settings.pop("allow_narrowing", False))
    restoring = _Restoring(view, objects, read_tree(view.reader.structure()) if tree is None else tree)
    with in_step(peers, "prepare the restore"):
        local = RankLocal(view, world_size=world_size, mode=rank_local)
        restoring.plan(local, allow_narrowing=allow_narrowing, keep_hyper_parameters=keep_hyper_parameters)
        if not in_part:
            restoring.find_unexpected(local)
    if peers is not None:
        restoring.found = peers.unite(restoring.found)
    with in_step(peers, "validate the restore"):
        restoring.found.check(strict=strict, in_whole=restoring.is_in_whole())
        _check_override(settings, restoring.of_kind("optimizer"))
    with in_step(peers, "read the snapshot"):
        restoring.read()
    with in_step(peers, "install what was read"):
        return restoring.install(settings)


class _Restoring:
    """One restore, phase by phase."""

    def __init__(self, view: SnapshotView, objects: Mapping[str, Any], tree: SavedTree) -> None:
        self.found = Problems()
        self._view = view
        self._objects = objects
        self._state_tree, self._saved = tree
        self._positional = positional_objects(self._state_tree)
        self._plans: dict[str, ObjectPlan] = {}
        self._reads: list[tuple[SnapshotView, dict[str, Any]]] = []

    def plan(self, local: RankLocal, **settings: bool) -> None:
        """Finds where everything goes, and what stands against it."""
        labels = labels_in(self._view.header["metadata"])
        modules = modules_among(self._objects)
        beside = _Beside(modules, _qualified(modules, self._saved), **settings)
        shared: dict[str, ObjectPlan] = {}
        own: dict[str, ObjectPlan] = {}
        own_view = self._view.of_rank()
        for keyword, value in self._objects.items():
            known = self._saved.get(keyword) or labels.get(keyword) or self._positional.get(keyword)
            if keyword in local.keywords:
                mine = local.own(keyword)
                if mine is not None:
                    own[keyword] = _plan_object(keyword, value, mine, own_view, beside)
                else:
                    plan, reads = local.plan_all(keyword, value)
                    self._reads += reads
                    own.update({} if plan is None else {keyword: plan})
            elif known is not None:
                shared[keyword] = _plan_object(keyword, value, known, self._view, beside)
            done = shared.get(keyword) or own.get(keyword)
            if done is None:
                self.found.missing.append(keyword)
            else:
                self._plans[keyword] = done
                self.found.add(done.found)
        self._reads.append((self._view, _disjoint(shared, self._view, self.found)))
        self._reads.append((own_view, _disjoint(own, own_view, self.found)))

    def find_unexpected(self, local: RankLocal) -> None:
        """Notes what the snapshot holds beside the objects given."""
        saved = {**self._saved, **dict.fromkeys(sorted(local.keywords))}
        self.found.unexpected += [keyword for keyword in saved if keyword not in self._objects]
        if self._state_tree is not None:
            positional = [plan for keyword, plan in self._plans.items() if keyword in self._positional]
            restored = {name for plan in positional for name in plan.found.matched}
            self.found.unexpected += [
                name for name in structure_names(self._state_tree) if name not in restored
            ]

    def of_kind(self, kind: str) -> list[Any]:
        """Returns the live objects of a kind that are restored."""
        return [self._objects[keyword] for keyword in self._plans if kind_of(self._objects[keyword]) == kind]

    def is_in_whole(self) -> bool:
        """True where a tensor that doesn't fit can't be left out: a nest takes over whole containers."""
        return any(
            plan.found.mismatched
            for keyword, plan in self._plans.items()
            if kind_of(self._objects[keyword]) == "nest"
        )

    def read(self) -> None:
        """Fills all destinations."""
        for view, destinations in self._reads:
            if not destinations:
                continue
            before = view.verified_bytes
            view.read(destinations)
            if view is not self._view:
                self._view.verified_bytes += view.verified_bytes - before

    def install(self, settings: Mapping[str, Any]) -> Restored:
        """Carries out the plans, and overrides hyper-parameters."""
        order = sorted(self._plans, key=lambda keyword: _install_order(self._objects[keyword]))
        for keyword in order:
            self._plans[keyword].commit()
        stateful = self.of_kind("stateful")
        overridden = [
            line
            for optimizer in self.of_kind("optimizer")
            for line in _override(optimizer, settings, stateful)
        ]
        found = self.found
        is_whole = not (found.missing or found.unexpected or found.mismatched)
        loader = "restored" if any(_is_loader(self._objects[keyword]) for keyword in order) else "absent"
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
    for name, first in find_ties(describe_target(name, value) for name, value in joined.items()).items():
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


class _Beside(NamedTuple):
    """What an object is restored with.

    Attributes:
        modules: The modules given beside it.
        qualified: The keywords among them that start names of parameters.
        allow_narrowing: Whether a value may be rounded to the live dtype.
        keep_hyper_parameters: Whether an optimizer keeps what its program has set in its groups.
    """

    modules: Mapping[str, torch.nn.Module]
    qualified: set[str]
    allow_narrowing: bool
    keep_hyper_parameters: bool


def _plan_object(
    keyword: str, value: Any, saved: SavedObject, view: SnapshotView, beside: _Beside
) -> ObjectPlan:
    """Plans the restore of one object.

    Nothing of it changes before `commit`, but for tensors that the destinations are.

    Args:
        keyword: The keyword it was saved under.
        value: The live object.
        saved: What the snapshot has under this keyword.
        view: The snapshot, with the names of the object.
        beside: What it is restored with.

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
        return plan_module(keyword, value, saved, view, allow_narrowing=beside.allow_narrowing)
    if kind == "optimizer":
        specs = {name: TensorSpec(name, *view.description(name)) for name in structure_names(saved.structure)}
        nest = unflatten(saved.structure, specs.__getitem__)
        plan = plan_optimizer(
            value,
            beside.modules,
            nest,
            prefix=keyword,
            qualified=beside.qualified,
            keep_hyper_parameters=beside.keep_hyper_parameters,
        )
        found = Problems()
        found.add(plan)
        return ObjectPlan(dict(plan.destinations), found, plan.commit)
    if kind == "stateful":
        return _plan_stateful(keyword, stateful_of(keyword, value), saved, view)
    return plan_nest(keyword, value, saved, view, allow_narrowing=beside.allow_narrowing)


def _plan_stateful(keyword: str, value: Any, saved: SavedObject, view: SnapshotView) -> ObjectPlan:
    live = _live_tensors(keyword, value, saved, view)
    buffers, destinations, finish = allocate_like(saved.structure, live, view)
    found = Problems(matched=structure_names(saved.structure))
    found.add(compare_schedules(keyword, value, unflatten(saved.structure, SavedName)))
    check = getattr(value, "check_state_dict", None)
    if check is not None and not buffers:
        # A state without tensors is known before anything is read: a refusal here changes nothing.
        check(unflatten(saved.structure, buffers.__getitem__))

    def commit() -> None:
        finish()
        value.load_state_dict(unflatten(saved.structure, buffers.__getitem__))

    return ObjectPlan(destinations, found, commit)


def _live_tensors(keyword: str, value: Any, saved: SavedObject, view: SnapshotView) -> dict[str, Any]:
    """Returns the tensors of an object's own state, by entry name, where some may be sharded.

    To ask costs: so only where sharded tensors are in use at all, and the saved state has tensors of at least
    one dimension. Loaders are never asked: they shard none, some would start their workers, and others have
    no state before they are attached.
    """
    may_shard = loaded("torch.distributed.tensor") is not None and not _is_loader(value)
    is_asked = may_shard and any(view.description(name)[1] for name in structure_names(saved.structure))
    if not is_asked:
        return {}
    return {leaf.name: leaf.value for leaf in flatten(value.state_dict(), prefix=(keyword,)).leaves}
