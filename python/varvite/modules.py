"""Names of a module's tensors as if no wrapper were around it or any of its children.

DDP, `torch.compile`, FSDP and activation checkpointing put a segment of their own into names. It is
left out wherever the module at that place is such a wrapper, at any depth; a real child that happens to
be called `module` keeps its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from varvite.errors import InvalidInputError
from varvite.plain import loaded
from varvite.settings import joined_distributed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import torch

__all__ = ["PlainModule", "buffers_of_others", "clean_names", "parameter_names", "read_plain"]

_WRAPPERS: Final = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
"""Library, class and the child that holds the wrapped module. A library not loaded has wrapped nothing."""


def clean_names(module: torch.nn.Module, names: Iterable[str] | None = None) -> dict[str, str]:
    """Maps names under a module to the same names without wrappers.

    Args:
        module: The module, perhaps a wrapper itself.
        names: Dotted names of its parameters, buffers or extra state; by default the keys of its
            `state_dict()`.

    Returns:
        The clean name by the given one, in the given order.

    Raises:
        InvalidInputError: Two of the names become one.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.DataParallel(torch.nn.Linear(1, 1, bias=False)))
        >>> clean_names(model)
        {'0.module.weight': '0.weight'}
    """
    segments = _wrapper_segments(module)
    names = module.state_dict() if names is None else names
    cleaned = {name: _clean(module, name, segments) if segments else name for name in names}
    if segments:
        _refuse_collisions(cleaned)
    return cleaned


class PlainModule(NamedTuple):
    """What a module holds that has nothing but what torch gives it.

    Attributes:
        state: The items of its `state_dict()`, in that order: its own parameters and buffers, not detached.
        names: The first name of each of its parameters.
    """

    state: dict[str, torch.Tensor]
    names: dict[torch.Tensor, str]


def read_plain(module: torch.nn.Module) -> PlainModule | None:
    """Reads a module in one walk, without the calls that `state_dict()` makes for each part of it.

    Returns:
        `None` where a wrapper, a hook, an overridden method, extra state or a parameter of another class
        may make its state another than its parameters and buffers, and where a part is met twice, which
        may be a loop: then only its methods know it.

    Example:
        >>> import torch
        >>> list(read_plain(torch.nn.Linear(1, 1)).names.values())
        ['weight', 'bias']
    """
    plain_types: set[type] = set()
    met: set[int] = set()
    plain = PlainModule({}, {})
    pending = [("", module)]
    while pending:
        prefix, part = pending.pop()
        if id(part) in met:
            return None
        met.add(id(part))
        kind = type(part)
        if kind not in plain_types:
            if not _is_plain_type(kind):
                return None
            plain_types.add(kind)
        own = part.__dict__
        children = own["_modules"]
        if type(children) is not dict or not _read_part(prefix, own, plain):
            return None
        if children:
            pending += [
                (f"{prefix}{name}.", child) for name, child in reversed(children.items()) if child is not None
            ]
    return plain


def _read_part(prefix: str, own: Mapping[str, Any], plain: PlainModule) -> bool:
    """Adds the tensors of one part by its own attributes; false where they don't tell everything."""
    import torch

    parameters, buffers = own["_parameters"], own["_buffers"]
    if type(parameters) is not dict or type(buffers) is not dict:
        return False
    if own["_state_dict_hooks"] or own["_state_dict_pre_hooks"] or not own.keys().isdisjoint(_STATE_METHODS):
        return False
    for name, parameter in parameters.items():
        if parameter is not None:
            if type(parameter) is not torch.nn.Parameter:
                return False
            full_name = prefix + name
            plain.state[full_name] = parameter
            plain.names.setdefault(parameter, full_name)
    fleeting = own["_non_persistent_buffers_set"]
    for name, buffer in buffers.items():
        if buffer is not None and name not in fleeting:
            if type(buffer) is not torch.Tensor:
                return False
            plain.state[prefix + name] = buffer
    return True


_STATE_METHODS: Final = frozenset(
    [
        "state_dict",
        "_save_to_state_dict",
        "get_extra_state",
        "named_parameters",
        "named_modules",
        "_named_members",
    ]
)
"""Methods of a module that say what its state and its parameters are."""


def _is_plain_type(kind: type[torch.nn.Module]) -> bool:
    """True for a class of modules that is no wrapper and leaves torch's own methods as they are."""
    from torch.nn.modules.module import Module

    for name in _STATE_METHODS:
        method = getattr(Module, name)
        if getattr(kind, name, None) is not method or method.__module__ != Module.__module__:
            return False
    return not any(issubclass(kind, wrapper) for wrapper, _ in _loaded_wrappers())


def parameter_names(
    modules: Mapping[str, torch.nn.Module],
    qualified: Collection[str] | None = None,
    *,
    known: Mapping[str, Mapping[torch.Tensor, str]] | None = None,
) -> dict[torch.Tensor, str]:
    """Names the parameters of modules, each once: a tied one by its first name.

    Args:
        modules: Modules by the keyword they are saved under.
        qualified: The keywords that start the names of their module's parameters; by default all where
            there is more than one module, else none.
        known: Names of the parameters of some of the modules, where they were read a moment ago.

    Example:
        >>> import torch
        >>> list(parameter_names({"model": torch.nn.Linear(1, 1)}).values())
        ['weight', 'bias']
    """
    result: dict[torch.Tensor, str] = {}
    if qualified is None:
        qualified = modules if len(modules) > 1 else ()
    for keyword, module in modules.items():
        start = f"{keyword}." if keyword in qualified else ""
        names = None if known is None else known.get(keyword)
        if names is None:
            _reshard(module)
            named = dict(module.named_parameters())
            names = {named[name]: clean for name, clean in clean_names(module, named).items()}
        if not result and not start:
            result = dict(names)
            continue
        for parameter, name in names.items():
            result.setdefault(parameter, start + name)
    return result


def _reshard(module: torch.nn.Module) -> None:
    """Has FSDP show the parameters that optimizers have, as it does itself for a state dict.

    After a forward pass without a backward one it shows whole ones in their place.
    """
    fsdp = loaded("torch.distributed.fsdp")
    if fsdp is None:
        return
    for part in module.modules():
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def unknown_parameter(
    group: int, position: int, parameter: torch.Tensor, modules: Mapping[str, torch.nn.Module]
) -> InvalidInputError:
    """Returns the error for a parameter of an optimizer that no given module holds."""
    given = ", ".join(f"`{keyword}`" for keyword in modules) or "none"
    where = f"parameter {position} of group {group} with shape {list(parameter.shape)}"
    reason = f"it lies in none of the modules given: {given}"
    return InvalidInputError(
        f"cannot name {where}: {reason}",
        hint="pass the module that holds it beside the optimizer",
        what="modules",
        reason=reason,
        group=group,
        position=position,
        shape=list(parameter.shape),
    )


def _wrapper_segments(module: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Returns the wrappers among a module and its descendants, with the child each wraps."""
    kinds = _loaded_wrappers()
    descendants = _descendants(module)
    # Most models have many modules of few types and no wrapper among them.
    wrappers = {type(descendant) for descendant in descendants}
    wrappers = {type_ for type_ in wrappers if any(issubclass(type_, kind) for kind, _ in kinds)}
    segments = {}
    for descendant in descendants if wrappers else ():
        for kind, segment in kinds:
            if isinstance(descendant, kind) and segment in _children(descendant):
                segments[descendant] = segment
    return segments


def _loaded_wrappers() -> list[tuple[type[torch.nn.Module], str]]:
    """Returns the classes of wrappers that the program has loaded, with the child each wraps."""
    libraries = ((loaded(path), name, segment) for path, name, segment in _WRAPPERS)
    return [
        (getattr(library, name), segment)
        for library, name, segment in libraries
        if library is not None and hasattr(library, name)
    ]


def _descendants(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns a module and all below it, each once."""
    found = {id(module): module}
    pending = [module]
    while pending:
        for child in _children(pending.pop()).values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                pending.append(child)
    return list(found.values())


def _clean(module: torch.nn.Module, name: str, segments: Mapping[torch.nn.Module, str]) -> str:
    kept = []
    node: torch.nn.Module | None = module
    for part in name.split("."):
        # A hook may have left a wrapper's segment out of this name already: then step inside unasked.
        while node is not None and node in segments and part != segments[node] and not _owns(node, part):
            node = _children(node)[segments[node]]
        if node is not None and part == segments.get(node):
            node = _children(node)[part]
            continue
        kept.append(part)
        node = None if node is None else _children(node).get(part)
    return ".".join(kept)


def _owns(module: torch.nn.Module, part: str) -> bool:
    own_tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return part in _children(module) or any(part == name for name, _ in own_tensors)


def _children(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    # `named_children` leaves out a child that was met before; `getattr` of a wrapper reaches inside it.
    return module._modules  # type: ignore[no-any-return,unused-ignore]  # noqa: SLF001


def _refuse_collisions(cleaned: Mapping[str, str]) -> None:
    originals: dict[str, str] = {}
    for name, clean in cleaned.items():
        other = originals.setdefault(clean, name)
        if other != name:
            reason = f"without wrappers it has the name of `{other}`: {clean}"
            raise InvalidInputError(
                f"cannot name `{name}`: {reason}",
                hint="rename the attribute of the wrapper, or save the wrapped module",
                what=name,
                name=name,
                reason=reason,
            )


def buffers_of_others(module: torch.nn.Module) -> set[str]:
    """Returns the keys of buffers that the next forward pass takes from another rank.

    `DistributedDataParallel` sends those of its first rank to all before each forward pass: until then ranks
    differ, such as in the running statistics of a BatchNorm, and the others' are never used.

    Example:
        >>> import torch
        >>> buffers_of_others(torch.nn.BatchNorm1d(2))
        set()
    """
    parallel = loaded("torch.nn.parallel.distributed")
    distributed = joined_distributed()
    if parallel is None or distributed is None:
        return set()
    keys: set[str] = set()
    for prefix, part in module.named_modules():
        if not isinstance(part, parallel.DistributedDataParallel) or not part.broadcast_buffers:
            continue
        if distributed.get_rank(part.process_group) == 0:
            continue
        names = {name for name, _ in part.module.named_buffers(remove_duplicate=False)}
        start = f"{prefix}.module." if prefix else "module."
        keys |= {start + name for name in names - set(part.parameters_to_ignore)}
    return keys
