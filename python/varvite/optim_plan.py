"""The restore of an optimizer as a plan: all that can go wrong is found before anything is changed.

The saved nest has a `TensorSpec` wherever a tensor was. The plan finds or makes the tensor that will
hold it, in the saved dtype, where this optimizer keeps it, and names the buffers that the bytes are to
be read to. A live tensor of the same dtype, shape and device is filled in place.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from varvite.errors import InternalError, MismatchError, first_lines
from varvite.modules import parameter_names, unknown_parameter
from varvite.optim_nest import Group, SavedOptimizer, read_nest
from varvite.plain import type_name
from varvite.shards import is_sharded, local_of
from varvite.targets import Target, target_in
from varvite.tensors import TensorSpec, allocate, copy_into, is_direct, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

__all__ = ["OptimizerPlan", "plan_optimizer"]


@dataclass
class Work:
    """What a commit does.

    Attributes:
        copies: Tensors, and the buffers to copy to them.
        states: New state by parameter, or by another key.
        stateless: Parameters that lose their state.
        groups: Live group, its new hyper-parameters, and its parameters in their new order.
        group_order: The live groups in their new order.
    """

    group_order: list[dict[str, Any]]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    states: dict[Any, Any] = field(default_factory=dict)
    stateless: list[torch.Tensor] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], dict[str, Any], list[torch.Tensor]]] = field(default_factory=list)


class OptimizerPlan:
    """What a restore will do, and what stands against it. Made by `plan_optimizer`.

    Attributes:
        destinations: What to read bytes to, by name of the entry: a dense CPU tensor, or a `Target` that
            takes this rank's region. All of them must be filled before `commit`.
        matched: Names of the entries that will be restored.
        missing: Names that the optimizer has and the snapshot lacks.
        unexpected: Names that the snapshot has and the optimizer lacks.
        mismatched: `(name, field, expected, found)` of what differs; never restored.
        defaulted: Hyper-parameters that the snapshot lacks; they keep the live value.
        never_stepped: Parameters that had no state when they were saved, and will have none.
        kept: A line for each hyper-parameter that keeps its live value although the saved one differs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, work: Work) -> None:
        """Makes a plan for an optimizer that reports nothing yet."""
        self.destinations: dict[str, torch.Tensor | Target] = {}
        self.matched: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[tuple[str, str, Any, Any]] = []
        self.defaulted: list[str] = []
        self.never_stepped: list[str] = []
        self.kept: list[str] = []
        self._optimizer = optimizer
        self._work = work
        self._is_committed = False

    def check(self, *, strict: bool = True) -> None:
        """Raises what stands against the restore.

        Args:
            strict: Also refuse names that only one side has.

        Raises:
            MismatchError: With all names at once.
        """
        lines = [
            f"`{name}` has another {field}: expected {expected}, but the snapshot has: {found}"
            for name, field, expected, found in self.mismatched
        ]
        if strict:
            lines += [f"the snapshot lacks: `{name}`" for name in self.missing]
            lines += [f"the optimizer lacks: `{name}`" for name in self.unexpected]
        if lines:
            raise MismatchError(
                f"cannot restore the optimizer: {'; '.join(first_lines(lines, 8))}",
                hint="build the optimizer over the parameters it was saved with",
                missing=self.missing,
                unexpected=self.unexpected,
                mismatched=self.mismatched,
            )

    def commit(self) -> None:
        """Installs state and groups, once all destinations are filled. What did not match stays.

        Groups and their parameters take the order they were saved in: schedulers number groups, and
        some optimizers number parameters.

        Raises:
            InternalError: The plan was committed before.
        """
        if self._is_committed:
            raise InternalError("internal error: a plan is committed twice", what="plan is committed once")
        self._is_committed = True
        work = self._work
        for target, buffer in work.copies:
            copy_into(target, buffer)
        for parameter in work.stateless:
            self._optimizer.state.pop(parameter, None)
        self._optimizer.state.update(work.states)
        for live, hyper_parameters, parameters in work.groups:
            live.update(hyper_parameters)
            live["params"][:] = parameters or live["params"]
        self._optimizer.param_groups[:] = work.group_order


def plan_optimizer(
    optimizer: torch.optim.Optimizer,
    modules: Mapping[str, torch.nn.Module],
    saved: Mapping[str, Any],
    *,
    prefix: str = "optimizer",
    qualified: Collection[str] | None = None,
    keep_hyper_parameters: bool = False,
) -> OptimizerPlan:
    """Plans the restore of an optimizer. Nothing of the optimizer is changed.

    Args:
        optimizer: The optimizer to restore.
        modules: The modules that hold its parameters, as at the save.
        saved: The saved nest, with a `TensorSpec` in place of each tensor. Two places that have specs
            of one name will share one tensor.
        prefix: Keyword of the optimizer, to start names with.
        qualified: Keywords that started the names of their module's parameters when they were saved; by
            default all where there is more than one module.
        keep_hyper_parameters: Groups keep their order and what their program has set in them; what the
            optimizer itself counts in a group is restored all the same.

    Returns:
        The plan; call its `check`, fill its `destinations`, then call its `commit`.

    Raises:
        CorruptionError: No `describe_optimizer` made the nest.
        InvalidInputError: A parameter of the optimizer lies in no given module.

    Example:
        >>> import torch
        >>> from varvite.optim import describe_optimizer
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> nest = describe_optimizer(optimizer, {"model": model})
        >>> plan_optimizer(optimizer, {"model": model}, nest).never_stepped
        ['weight', 'bias']
    """
    planning = _Planning(optimizer, modules, read_nest(saved, prefix), prefix, qualified)
    if keep_hyper_parameters:
        planning.keep_hyper_parameters()
    return planning.run()


class _Planning:
    """One planning: the live side beside the saved side."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        modules: Mapping[str, torch.nn.Module],
        saved: SavedOptimizer,
        prefix: str,
        qualified: Collection[str] | None,
    ) -> None:
        self.work = Work(group_order=list(optimizer.param_groups))
        self.plan = OptimizerPlan(optimizer, self.work)
        self.optimizer = optimizer
        self.saved = saved
        self.prefix = prefix
        self.names = parameter_names(modules, qualified)
        self.parameters = {name: parameter for parameter, name in self.names.items()}
        self.live_groups = [
            self._live_group(index, group, modules) for index, group in enumerate(optimizer.param_groups)
        ]
        self.live_names = [name for group in self.live_groups for name in group.names]
        self._placed: dict[str, torch.Tensor] = {}
        self._reused: set[int] = set()
        self._counted: frozenset[str] | None = None

    def keep_hyper_parameters(self) -> None:
        """Has the groups keep what the program set in them."""
        self._counted = counted_in_groups(self.optimizer)

    def run(self) -> OptimizerPlan:
        kind = type_name(self.optimizer)
        if kind != self.saved.kind:
            self.plan.mismatched.append((self.prefix, "class", kind, self.saved.kind))
            return self.plan
        effective = self._plan_groups()
        self._plan_states(effective)
        self._plan_extra()
        return self.plan

    def _live_group(self, index: int, group: dict[str, Any], modules: Mapping[str, torch.nn.Module]) -> Group:
        names = []
        for position, parameter in enumerate(group["params"]):
            if parameter not in self.names:
                raise unknown_parameter(index, position, parameter, modules)
            names.append(self.names[parameter])
        return Group(names, group)

    # Groups

    def _plan_groups(self) -> dict[str, dict[str, Any]]:
        """Plans hyper-parameters; returns those in force after the restore, by parameter name."""
        pairs = self._match_groups()
        effective: dict[str, dict[str, Any]] = {}
        for live_index, live in enumerate(self.live_groups):
            saved_index = pairs.get(live_index)
            hyper_parameters = {} if saved_index is None else self._restored(saved_index)
            in_force = {**live.hyper_parameters, **hyper_parameters}
            effective.update((name, in_force) for name in live.names)
            if saved_index is not None:
                self._plan_group(live, live_index, saved_index)
        if self._counted is not None:
            # Schedulers that stand on the live groups number them.
            return effective
        saved_order = sorted(
            range(len(self.live_groups)), key=lambda index: (pairs.get(index, len(self.saved.groups)), index)
        )
        self.work.group_order = [self.optimizer.param_groups[index] for index in saved_order]
        return effective

    def _restored(self, saved_index: int) -> dict[str, Any]:
        """Returns what of a saved group is restored."""
        saved = self.saved.groups[saved_index].hyper_parameters
        return {key: value for key, value in saved.items() if self._counted is None or key in self._counted}

    def _plan_group(self, live: Group, live_index: int, saved_index: int) -> None:
        saved = self.saved.groups[saved_index]
        placed = {
            key: self._place(value, live.hyper_parameters.get(key), None, on_device=None)
            for key, value in self._restored(saved_index).items()
        }
        if self._counted is not None:
            self._keep(live, live_index, saved)
            self.work.groups.append((self.optimizer.param_groups[live_index], placed, []))
            return
        for key in live.hyper_parameters:
            if key != "params" and key not in saved.hyper_parameters:
                self.plan.defaulted.append(f"{self.prefix}.param_groups.{live_index}.{key}")
        known = set(live.names)
        ordered = [name for name in saved.names if name in known]
        known.difference_update(ordered)
        ordered += [name for name in live.names if name in known]
        parameters = [self.parameters[name] for name in ordered]
        self.work.groups.append((self.optimizer.param_groups[live_index], placed, parameters))

    def _keep(self, live: Group, live_index: int, saved: Group) -> None:
        """Notes which live values are kept, and refuses those that need state the saved run never had."""
        where = f"{self.prefix}.param_groups.{live_index}"
        for key, value in live.hyper_parameters.items():
            if key == "params" or key in (self._counted or ()):
                continue
            found = saved.hyper_parameters.get(key)
            if key in _MAKE_STATE and value and not found and self.saved.state:
                self.plan.mismatched.append((f"{where}.{key}", "value", value, found))
            elif isinstance(found, TensorSpec) or hasattr(value, "detach"):
                self.plan.kept.append(f"{where}.{key}: kept {_plain_value(value)}")
            elif key not in saved.hyper_parameters or found != value:
                self.plan.kept.append(f"{where}.{key}: {found} -> {value}")

    def _match_groups(self) -> dict[int, int]:
        """Pairs live groups with saved ones by the parameters in them; empty ones by their order."""
        holder = {name: index for index, group in enumerate(self.saved.groups) for name in group.names}
        pairs: dict[int, int] = {}
        for index, group in enumerate(self.live_groups):
            holders = sorted({holder[name] for name in group.names if name in holder})
            if len(holders) > 1 or (holders and holders[0] in pairs.values()):
                return self._refuse_partition()
            if holders:
                pairs[index] = holders[0]
        live_empty = [index for index, group in enumerate(self.live_groups) if not group.names]
        saved_empty = [index for index, group in enumerate(self.saved.groups) if not group.names]
        if len(live_empty) != len(saved_empty) and len(self.live_groups) == len(self.saved.groups):
            # Of a pipeline, a stage may have no parameter of a group that others have some of.
            saved_empty = [index for index in live_empty if index not in pairs.values()]
        if len(live_empty) != len(saved_empty):
            return self._refuse_partition()
        pairs.update(zip(live_empty, saved_empty, strict=True))
        return pairs

    def _refuse_partition(self) -> dict[int, int]:
        expected = [group.names for group in self.live_groups]
        found = [group.names for group in self.saved.groups]
        self.plan.mismatched.append((f"{self.prefix}.param_groups", "partition", expected, found))
        return {}

    # State

    def _plan_states(self, effective: Mapping[str, dict[str, Any]]) -> None:
        saved = self.saved
        saved_names = {name for group in saved.groups for name in group.names} | set(saved.state)
        for name in self.live_names:
            if name not in saved_names:
                self.plan.missing.append(f"{self.prefix}.state.{name}")
        for name in dict.fromkeys([*(name for group in saved.groups for name in group.names), *saved.state]):
            parameter = self.parameters.get(name)
            in_group = name in effective
            if parameter is None or (not in_group and name not in saved.state):
                self.plan.unexpected.append(f"{self.prefix}.state.{name}")
            elif self._fits(name, parameter):
                self._plan_state(name, parameter, effective.get(name, {}))

    def _fits(self, name: str, parameter: torch.Tensor) -> bool:
        found = self.saved.shapes.get(name)
        if found is None or found == list(parameter.shape):
            return True
        self.plan.mismatched.append((f"{self.prefix}.state.{name}", "shape", list(parameter.shape), found))
        return False

    def _plan_state(self, name: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        own = self.saved.state.get(name)
        if own is None:
            if name in self.saved.never_stepped:
                self.plan.never_stepped.append(name)
                self.work.stateless.append(parameter)
            else:
                self.plan.missing.append(f"{self.prefix}.state.{name}")
            return
        live = self.optimizer.state.get(parameter) or {}
        if not self._moments_fit(name, own, live):
            return
        self.work.states[parameter] = {
            key: self._place(
                value,
                live.get(key),
                # Steps are counted beside the parameter, not in its form.
                None if key == "step" else parameter,
                on_device=_device(key, value, live.get(key), parameter, group),
            )
            for key, value in own.items()
        }

    def _moments_fit(self, name: str, own: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
        fits = True
        for key, value in own.items():
            shape = getattr(live.get(key), "shape", None)
            if isinstance(value, TensorSpec) and shape is not None and tuple(shape) != value.shape:
                where = f"{self.prefix}.state.{name}.{key}"
                self.plan.mismatched.append((where, "shape", list(shape), list(value.shape)))
                fits = False
        return fits

    def _plan_extra(self) -> None:
        for key, value in self.saved.extra.items():
            live = self.optimizer.state.get(key)
            self.work.states[key] = self._place(value, live, None, on_device=None)
        import torch

        for key in self.optimizer.state:
            if not isinstance(key, torch.Tensor) and key not in self.saved.extra:
                self.plan.defaulted.append(f"{self.prefix}.extra.{key}")

    # Tensors

    def _place(self, value: Any, live: Any, like: torch.Tensor | None, *, on_device: Any) -> Any:
        """Returns a saved value with tensors, yet to be filled, in place of specs."""
        if isinstance(value, TensorSpec):
            return self._place_tensor(value, live, like, on_device)
        if type(value) in (list, tuple):
            lives = live if type(live) in (list, tuple) and len(live) == len(value) else [None] * len(value)
            return type(value)(
                self._place(item, other, like, on_device=on_device)
                for item, other in zip(value, lives, strict=True)
            )
        if isinstance(value, dict):
            lives = live if isinstance(live, dict) else {}
            for key in value:
                value[key] = self._place(value[key], lives.get(key), like, on_device=on_device)
        return value

    def _place_tensor(
        self, spec: TensorSpec, live: Any, like: torch.Tensor | None, on_device: Any
    ) -> torch.Tensor:
        """Finds or makes the tensor of a spec, and the buffer that its bytes are read to."""
        placed = self._placed.get(spec.name)
        if placed is not None:
            return placed
        import torch

        live = live if isinstance(live, torch.Tensor) else None
        device = on_device or (torch.device("cpu") if live is None else live.device)
        if live is not None and self._can_fill(live, spec, device):
            tensor = live
            self._reused.add(local_of(live).data_ptr())
        elif like is not None and tuple(like.shape) == spec.shape:
            # As `zeros_like` in the optimizers: with the strides of the parameter, and sharded as it is.
            tensor = torch.empty_like(like.detach(), dtype=torch_dtype(spec.dtype), device=device)
        elif like is not None and is_sharded(like) and spec.shape:
            # As `new_zeros` in the optimizers: held by every rank of the parameter's mesh.
            tensor = like.detach().new_empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
        else:
            tensor = allocate(spec.dtype, spec.shape, device)
        self.plan.destinations[spec.name], copy = target_in(spec.name, tensor, spec.dtype)
        self.work.copies += [copy] if copy is not None else []
        self._placed[spec.name] = tensor
        self.plan.matched.append(spec.name)
        return tensor

    def _can_fill(self, live: torch.Tensor, spec: TensorSpec, device: torch.device) -> bool:
        """True where a live tensor can hold the bytes, and no other entry's bytes go to its memory."""
        import torch

        local = local_of(live)
        return (
            type(local) in (torch.Tensor, torch.nn.Parameter)
            and local.dtype is torch_dtype(spec.dtype)
            and tuple(live.shape) == spec.shape
            and local.device == device
            and (is_direct(local) or _is_without_overlap(local))
            and not local.is_inference()
            and (local.numel() == 0 or local.data_ptr() not in self._reused)
        )


_MAKE_STATE = ("amsgrad", "centered")
"""Flags of groups that need state of their own beside each parameter's."""


def counted_in_groups(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Returns the keys of groups that an optimizer counts in by itself, as averaging ones do.

    They are defaults of the optimizer that nobody can give to its constructor.

    Example:
        >>> import torch
        >>> counted_in_groups(torch.optim.AdamW([torch.zeros(1)]))
        frozenset()
    """
    taken: set[str] = set()
    for kind in type(optimizer).__mro__:
        if "__init__" in vars(kind):
            taken.update(inspect.signature(vars(kind)["__init__"]).parameters)
    return frozenset(key for key in optimizer.defaults if key not in taken)


def _plain_value(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _is_without_overlap(tensor: torch.Tensor) -> bool:
    """True where no two elements of a tensor share memory, as those of `expand` do."""
    import torch

    return bool(torch._debug_has_internal_overlap(tensor) == 0)  # noqa: SLF001 - no public way to ask


def _device(
    key: Any, value: Any, live: Any, parameter: torch.Tensor, group: Mapping[str, Any]
) -> torch.device:
    """Returns where an optimizer keeps a tensor of a parameter's state.

    It is the parameter's device, but for `step`: torch keeps that on the CPU unless `capturable` or
    `fused`; an optimizer without these flags keeps it where it is.
    """
    import torch

    if key != "step":
        return parameter.device
    if "capturable" in group or "fused" in group:
        on_device = bool(group.get("capturable")) or bool(group.get("fused"))
        return parameter.device if on_device else torch.device("cpu")
    if isinstance(live, torch.Tensor):
        return live.device
    is_counter = isinstance(value, TensorSpec) and value.shape == ()
    return torch.device("cpu") if is_counter else parameter.device
