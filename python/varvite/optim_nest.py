"""A saved optimizer's nest, checked to be one before a plan trusts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from varvite.plain import corrupt

__all__ = ["Group", "SavedOptimizer", "read_nest"]


class Group(NamedTuple):
    """A parameter group by names."""

    names: list[str]
    hyper_parameters: dict[str, Any]


class SavedOptimizer(NamedTuple):
    """A nest of `describe_optimizer`, checked to be one."""

    kind: str
    state: Mapping[str, dict[str, Any]]
    groups: list[Group]
    never_stepped: frozenset[str]
    shapes: Mapping[str, list[int]]
    extra: dict[Any, Any]


def read_nest(saved: Mapping[str, Any], prefix: str) -> SavedOptimizer:
    """Checks that a nest has the form that `describe_optimizer` gives it.

    Args:
        saved: The nest; what stands in place of tensors is not looked at.
        prefix: Keyword of the optimizer, for messages.

    Raises:
        CorruptionError: It has another form.

    Example:
        >>> groups = [{"params": ["weight"], "lr": 0.1}]
        >>> read_nest({"class": "SGD", "state": {}, "param_groups": groups}, "optimizer").groups
        [Group(names=['weight'], hyper_parameters={'lr': 0.1})]
    """
    if not isinstance(saved, dict) or not isinstance(saved.get("class"), str):
        _refuse(prefix, "an optimizer's nest", saved)
    state, groups = saved.get("state"), saved.get("param_groups")
    if not isinstance(state, dict) or not all(isinstance(own, dict) and own for own in state.values()):
        _refuse(f"{prefix}.state", "a dict of state by parameter name", type(state))
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and _is_names(group.get("params")) for group in groups
    ):
        _refuse(f"{prefix}.param_groups", "groups with names of parameters", type(groups))
    never_stepped, shapes, extra = (saved.get(key, empty) for key, empty in _OPTIONAL)
    if not _is_names(never_stepped):
        _refuse(f"{prefix}.never_stepped", "names of parameters", never_stepped)
    if not isinstance(shapes, dict) or not isinstance(extra, dict):
        _refuse(prefix, "dicts of shapes and extra state", type(shapes))
    names = [name for group in groups for name in group["params"]]
    if len(set(names)) != len(names):
        _refuse(f"{prefix}.param_groups", "each parameter once", names)
    for name in never_stepped:
        if name in state:
            _refuse(f"{prefix}.state.{name}", "no state of a parameter never stepped", "state")
    hyper_parameters = ({key: value for key, value in group.items() if key != "params"} for group in groups)
    return SavedOptimizer(
        saved["class"],
        state,
        [Group(group["params"], rest) for group, rest in zip(groups, hyper_parameters, strict=True)],
        frozenset(never_stepped),
        shapes,
        extra,
    )


_OPTIONAL: tuple[tuple[str, Any], ...] = (("never_stepped", []), ("shapes", {}), ("extra", {}))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _refuse(what: str, expected: str, found: object) -> NoReturn:
    raise corrupt(what, expected, found)
