"""Optimizer state by parameter name, in its own dtype, read and restored without side effects.

`Optimizer.state_dict` numbers parameters by position and `load_state_dict` casts their state to the
parameter's dtype; the helpers of `torch.distributed.checkpoint` run a step on a fresh optimizer. None
of them is used here. State is read as it lies there, and put back as it was: absent state stays absent,
groups keep tuples, `None` and empty groups.

A load has two phases, so that bytes can be read straight to where they belong. `plan_optimizer`
validates everything and changes nothing; its `destinations` are then filled; `OptimizerPlan.commit`
installs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from varvite.errors import InvalidInputError
from varvite.modules import clean_names, parameter_names, unknown_parameter
from varvite.optim_plan import OptimizerPlan, plan_optimizer
from varvite.plain import UnsavableError, loaded, type_name
from varvite.state import StateDict, flatten, unflatten
from varvite.targets import Target, buffer_of
from varvite.tensors import Described, TensorSpec, copy_into, describe

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = [
    "OptimizerPlan",
    "apply_optimizer",
    "clean_names",
    "describe_optimizer",
    "override_groups",
    "parameter_names",
    "plan_optimizer",
]


def describe_optimizer(
    optimizer: torch.optim.Optimizer,
    modules: Mapping[str, torch.nn.Module],
    *,
    known: Mapping[str, Mapping[torch.Tensor, str]] | None = None,
) -> dict[str, Any]:
    """Reads the state of an optimizer as a nest to be saved.

    Nothing is changed, and no state is made for parameters that have none.

    Args:
        optimizer: Any optimizer with `state` and `param_groups` as torch has them.
        modules: The modules that hold its parameters, by the keyword they are saved under. With more
            than one, parameter names start with the keyword.
        known: As for `parameter_names`.

    Returns:
        `class`, the qualified name of the type; `state`, by parameter name; `param_groups`, each with
        the names of its `params` and its hyper-parameters; `never_stepped`, the names of parameters
        without state; `shapes`, the shape of each parameter; and, where the optimizer keeps state
        under keys that are not parameters, `extra`. Tensors are the optimizer's own, not copies.

    Raises:
        InvalidInputError: A parameter lies in no given module, or its state can't be saved.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> nest = describe_optimizer(optimizer, {"model": model})
        >>> nest["param_groups"][0]["params"], nest["never_stepped"]
        (['weight'], ['weight'])
    """
    names = parameter_names(modules, known=known)
    groups, shapes = [], {}
    state = StateDict()
    never_stepped = []
    for index, group in enumerate(optimizer.param_groups):
        group_names = []
        for position, parameter in enumerate(group["params"]):
            name = names.get(parameter)
            if name is None:
                raise unknown_parameter(index, position, parameter, modules)
            group_names.append(name)
            shapes[name] = list(parameter.shape)
            # `state` is a defaultdict: indexing it would make an entry.
            own = optimizer.state.get(parameter)
            if own:
                state[name] = _readable_state(own, name)
            else:
                never_stepped.append(name)
        hyper_parameters = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": group_names, **hyper_parameters})
    extra = _read_the_rest(optimizer, names, state, shapes)
    nest: dict[str, Any] = {
        "class": type_name(optimizer),
        "state": state,
        "param_groups": groups,
        "never_stepped": never_stepped,
        "shapes": shapes,
    }
    if extra:
        nest["extra"] = extra
    return nest


def apply_optimizer(
    optimizer: torch.optim.Optimizer,
    modules: Mapping[str, torch.nn.Module],
    saved: Mapping[str, Any],
    *,
    strict: bool = True,
    prefix: str = "optimizer",
) -> OptimizerPlan:
    """Restores an optimizer from a nest whose tensors are in memory; both phases in one call.

    Args:
        optimizer: The optimizer to restore.
        modules: The modules that hold its parameters.
        saved: A nest as `describe_optimizer` gives it.
        strict: Also refuses names that only one side has.
        prefix: Keyword of the optimizer, to start names with.

    Returns:
        The plan that was carried out.

    Raises:
        MismatchError: The optimizer and the nest disagree; nothing was changed.
        CorruptionError: No `describe_optimizer` made the nest; nothing was changed.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> first = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> second = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> plan = apply_optimizer(second, {"model": model}, describe_optimizer(first, {"model": model}))
        >>> second.param_groups[0]["lr"]
        0.5
    """
    flat = flatten(dict(saved), prefix=(prefix,))
    described = {leaf.name: describe(leaf.name, leaf.value) for leaf in flat.leaves}
    specs = {name: TensorSpec(name, one.dtype, one.shape) for name, one in described.items()}
    plan = plan_optimizer(optimizer, modules, unflatten(flat.structure, specs.__getitem__), prefix=prefix)
    plan.check(strict=strict)
    # What is read and what is written may be one memory, so no destination is filled before all are read.
    values = {name: _taken_by(target, described[name]).clone() for name, target in plan.destinations.items()}
    for name, destination in plan.destinations.items():
        copy_into(buffer_of(destination), values[name])
    plan.commit()
    return plan


def _taken_by(destination: Any, described: Described) -> torch.Tensor:
    """Returns the elements of a described tensor that a destination takes."""
    value = _as_tensor(described.value)
    if isinstance(destination, Target) and described.region is None:
        return value[destination.region.slices()]
    offsets = list(destination.region.offsets) if isinstance(destination, Target) else [0] * value.dim()
    if described.region is not None and described.region[0] != offsets:
        reason = f"this rank holds another region of it, from {described.region[0]} and not from {offsets}"
        raise InvalidInputError(
            f"cannot restore `{described.name}` from memory: {reason}",
            hint="save it, and resume from the snapshot",
            what=described.name,
            reason=reason,
        )
    return value


def override_groups(optimizer: torch.optim.Optimizer, override: Mapping[str, Any]) -> list[str]:
    """Sets hyper-parameters in every group that has them, after a restore.

    Args:
        optimizer: The optimizer to change.
        override: New values by hyper-parameter, such as `{"lr": 1e-5}`. Where the optimizer keeps a
            tensor, it is filled with the number.

    Returns:
        A line for each value set: `param_groups.0.lr: 0.1 -> 1e-05`.

    Raises:
        InvalidInputError: No group has such a hyper-parameter; nothing was changed.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> override_groups(optimizer, {"lr": 1e-05})
        ['param_groups.0.lr: 0.1 -> 1e-05']
    """
    legal = {key for group in optimizer.param_groups for key in group if key != "params"}
    for key in override:
        if key not in legal:
            reason = f"no group of the optimizer has it; legal are {', '.join(sorted(legal))}"
            raise InvalidInputError(f"invalid override `{key}`: {reason}", what=key, reason=reason)
    torch = loaded("torch")
    notes = []
    for index, group in enumerate(optimizer.param_groups):
        for key, value in override.items():
            if key not in group:
                continue
            old = group[key]
            if torch is not None and isinstance(old, torch.Tensor):
                notes.append(f"param_groups.{index}.{key}: {old.tolist()} -> {value}")
                old.detach().fill_(value)
            else:
                notes.append(f"param_groups.{index}.{key}: {old} -> {value}")
                group[key] = value
    return notes


def _readable_state(own: Mapping[str, Any], name: str) -> dict[str, Any]:
    for key, value in own.items():
        if not hasattr(value, "detach"):
            _refuse_arrays(value, f"state.{name}.{key}")
    return own if type(own) is dict else dict(own)


def _refuse_arrays(value: Any, name: str) -> None:
    """Refuses NumPy arrays: a restore fills tensors."""
    numpy = loaded("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        raise UnsavableError("an optimizer's state may hold no NumPy arrays", "keep it as a tensor").at(
            name, value
        )
    if type(value) in (list, tuple):
        for item in value:
            _refuse_arrays(item, name)


def _read_the_rest(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    state: StateDict,
    shapes: dict[str, list[int]],
) -> dict[Any, Any]:
    """Reads state of parameters that left their group, and returns state that is no parameter's."""
    import torch

    extra = {}
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            _refuse_arrays(value, f"extra.{key}")
            extra[key] = value
        elif value and (name := names.get(key)) is not None and name not in shapes:
            state[name] = _readable_state(value, name)
            shapes[name] = list(key.shape)
        # State of a tensor that is neither in a group nor in a module can't be reached by training.
    return extra


def _as_tensor(value: Any) -> torch.Tensor:
    import torch

    return value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
