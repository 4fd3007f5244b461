"""What the keyword arguments of a save are, and the state each of them has.

An object is a module, an optimizer, something with `state_dict()` and `load_state_dict()`, or a plain
nest; its kind is written down, so that a restore knows what it was. Reading state changes nothing: no
optimizer state appears, no random number is drawn, no gradient is touched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from varvite._native import Walk
from varvite.errors import CorruptionError, InvalidInputError
from varvite.modules import buffers_of_others, clean_names, read_plain
from varvite.optim import describe_optimizer
from varvite.plain import loaded, type_name
from varvite.state import Json, from_text, shown_prefix, state_dict_node, to_text

if TYPE_CHECKING:
    import torch

__all__ = [
    "BUILT_IN_KEYWORDS",
    "LABELS_KEY",
    "NOTES_KEYWORD",
    "RNG_KEYWORD",
    "SavedObject",
    "SavedTree",
    "flatten_state",
    "is_torch_loader",
    "kind_of",
    "labels_in",
    "module_state",
    "modules_among",
    "positional_objects",
    "read_tree",
    "split_labels",
    "split_rank_local",
    "stateful_of",
]

LABELS_KEY = "varvite"
"""Key of the metadata under which labels are kept."""

RNG_KEYWORD = "rng"
"""Keyword of the generators' state among the objects of a rank."""

NOTES_KEYWORD = "varvite.dcp"
"""Keyword among the objects of a rank of what an adapter notes about the entries; no state of the program."""

BUILT_IN_KEYWORDS = frozenset({RNG_KEYWORD, NOTES_KEYWORD})
"""Keywords among the objects of a rank that Varvite itself gives."""

KINDS = ("module", "optimizer", "stateful", "nest")


class SavedObject(NamedTuple):
    """One object of a snapshot.

    Attributes:
        kind: One of `module`, `optimizer`, `stateful`, `nest`.
        structure: Its typed tree.
    """

    kind: str
    structure: Json


SavedTree = tuple[Json | None, dict[str, SavedObject]]
"""The tree of the positional nest of a snapshot, or `None`, and its objects by keyword."""


def kind_of(value: Any) -> str:
    """Tells what an object is to a save.

    Example:
        >>> kind_of({"epoch": 3})
        'nest'
    """
    torch = loaded("torch")
    if torch is not None:
        if isinstance(value, torch.nn.Module):
            return "module"
        if isinstance(value, torch.optim.Optimizer):
            return "optimizer"
    if is_torch_loader(value):
        return "stateful"
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "stateful"
    return "nest"


def split_labels(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the labels among objects, and the others.

    A label is an object whose class has `is_label = True`: it says whose a state is, and is no part of it. It
    is saved with the header and not counted by the state digest, so that two runs that came to the same state
    have the same digest.

    Example:
        >>> from varvite.training import RunIdentity
        >>> labels, others = split_labels({"run": RunIdentity(), "epoch": {"number": 3}})
        >>> list(labels), list(others)
        (['run'], ['epoch'])
    """
    labels = {
        keyword: value for keyword, value in objects.items() if getattr(value, "is_label", False) is True
    }
    return labels, {keyword: value for keyword, value in objects.items() if keyword not in labels}


def split_rank_local(
    objects: Mapping[str, Any], named: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the objects that all ranks share, and those that belong to this rank alone.

    The latter are those that are named, objects whose class has `is_rank_local = True`, and data loaders that
    keep a state of their own, such as torchdata's: each rank's has read another part of the data.

    Raises:
        InvalidInputError: A name is no keyword of an object, or is one that is taken.

    Example:
        >>> split_rank_local({"model": {}, "cache": {"hits": 3}}, ["cache"])
        ({'model': {}}, {'cache': {'hits': 3}})
    """
    named = [named] if isinstance(named, str) else list(named)
    for name in named:
        if name not in objects:
            reason = f"no object is given under it; objects: {', '.join(objects) or 'none'}"
            raise InvalidInputError(
                f"invalid rank_local `{name}`: {reason}", what="rank_local", reason=reason
            )
    own = {
        keyword: value
        for keyword, value in objects.items()
        if keyword in named or getattr(value, "is_rank_local", False) is True or _has_own_position(value)
    }
    if RNG_KEYWORD in own:
        reason = "the state of the generators is kept under it; use another keyword"
        raise InvalidInputError(f"invalid keyword `{RNG_KEYWORD}`: {reason}", what=RNG_KEYWORD, reason=reason)
    return {keyword: value for keyword, value in objects.items() if keyword not in own}, own


def _has_own_position(value: Any) -> bool:
    """True for a data loader that saves where its own process is in the data."""
    return is_torch_loader(value) and hasattr(value, "state_dict") and _sampler_of(value) is None


def _sampler_of(loader: Any) -> Any:
    # Where the module was never imported, no loader has such a sampler.
    samplers = loaded("varvite.training.sampler")
    return None if samplers is None else samplers.sampler_of(loader)


def labels_in(metadata_text: str) -> dict[str, SavedObject]:
    """Returns the labels that the metadata of a header holds, by keyword.

    Example:
        >>> labels_in('{"dict":[["varvite",{"dict":[["run",{"dict":[]}]]}]]}')
        {'run': SavedObject(kind='stateful', structure={'dict': []})}
    """
    kept = positional_objects(from_text(metadata_text)).get(LABELS_KEY)
    nests = {} if kept is None else positional_objects(kept.structure)
    return {keyword: SavedObject("stateful", nest.structure) for keyword, nest in nests.items()}


def stateful_of(keyword: str, value: Any) -> Any:
    """Returns what holds the state of a stateful object: of a `DataLoader`, its `ResumableSampler`.

    Args:
        keyword: The keyword it is given under.
        value: An object whose kind is `stateful`.

    Raises:
        InvalidInputError: It is a `DataLoader` whose position is not known.
    """
    if not is_torch_loader(value):
        return value
    sampler = _sampler_of(value)
    if sampler is not None:
        return sampler
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value
    reason = "a plain data loader does not know how much of it the training loop was given"
    raise InvalidInputError(
        f"invalid loader `{keyword}` of type `{type_name(value)}`: {reason}",
        hint="give it a ResumableSampler, or iterate over a ResumableLoader of it and pass that",
        what=keyword,
        reason=reason,
    )


def is_torch_loader(value: Any) -> bool:
    """Tells whether a value is a `DataLoader` of torch, or of a kind made from it.

    Example:
        >>> is_torch_loader([1, 2])
        False
    """
    data = loaded("torch.utils.data")
    return data is not None and isinstance(value, data.DataLoader)


def modules_among(objects: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """Returns the modules among objects: they name the parameters of the optimizers beside them."""
    return {keyword: value for keyword, value in objects.items() if kind_of(value) == "module"}


def module_state(module: torch.nn.Module, *, as_saved: bool = False) -> dict[str, Any]:
    """Returns a module's state dict under clean names; its tensors share memory with the module's.

    Args:
        module: The module.
        as_saved: Leave out buffers of which another rank has the values that count.
    """
    state = module.state_dict()
    if as_saved:
        for key in buffers_of_others(module):
            state.pop(key, None)
    names = clean_names(module, state)
    return state_dict_node({names[key]: value for key, value in state.items()})


def flatten_state(walk: Walk, state: dict[Any, Any] | None, objects: Mapping[str, Any]) -> str:
    """Takes a state and the objects beside it apart.

    Args:
        walk: Collects their tensors and arrays.
        state: The positional nest of a save.
        objects: The keyword arguments of a save.

    Returns:
        The structure as JSON text, what the manifest holds:
        `{"state": tree or null, "objects": [[keyword, kind, tree], ...]}`.

    Raises:
        InvalidInputError: The nest is no dict, one of its keys is also a keyword, or a value can't be
            saved. The message names its path.

    Example:
        >>> flatten_state(Walk(), {"epoch": 3}, {})
        '{"state":{"dict":[["epoch",3]]},"objects":[]}'
    """
    if state is not None and not isinstance(state, dict):
        reason = f"must be a dict whose values are a nest of state, not {type_name(state)}"
        hint = "give objects by keyword, such as model=model" if kind_of(state) != "nest" else None
        raise InvalidInputError(f"invalid state: {reason}", hint=hint, what="state", reason=reason)
    for keyword in objects:
        if state is not None and keyword in state:
            reason = "it is both a key of the state and a keyword argument"
            raise InvalidInputError(f"invalid keyword `{keyword}`: {reason}", what=keyword, reason=reason)
    modules = modules_among(objects)
    plain = {keyword: read_plain(module) for keyword, module in modules.items()}
    known = {keyword: one.names for keyword, one in plain.items() if one is not None}
    state_text = "null" if state is None else walk.flatten(state, "")
    rows = []
    for keyword, value in objects.items():
        kind = kind_of(value)
        read = plain.get(keyword)
        tree = state_dict_node(read.state) if read else _state_of(kind, value, modules, keyword, known)
        tree_text = walk.flatten(tree, shown_prefix((keyword,)))
        rows.append(f"[{to_text(keyword)},{to_text(kind)},{tree_text}]")
    return f'{{"state":{state_text},"objects":[{",".join(rows)}]}}'


def _state_of(
    kind: str,
    value: Any,
    modules: Mapping[str, torch.nn.Module],
    keyword: str,
    known: Mapping[str, Mapping[torch.Tensor, str]],
) -> Any:
    if kind == "module":
        return module_state(value, as_saved=True)
    if kind == "optimizer":
        if not modules:
            reason = "an optimizer is saved by parameter name, and no module stands beside it"
            raise InvalidInputError(
                f"invalid optimizer `{keyword}`: {reason}",
                hint=f"save the module too: save(step, model=model, {keyword}={keyword})",
                what=keyword,
                reason=reason,
            )
        return describe_optimizer(value, modules, known=known)
    if kind == "stateful":
        return stateful_of(keyword, value).state_dict()
    return value


def read_tree(text: str) -> SavedTree:
    """Reads what `flatten_state` wrote.

    Returns:
        The tree of the positional nest, or `None`; and the objects by keyword.

    Raises:
        CorruptionError: No `flatten_state` wrote this text.

    Example:
        >>> read_tree('{"state":null,"objects":[["epoch","nest",3]]}')
        (None, {'epoch': SavedObject(kind='nest', structure=3)})
    """
    tree = from_text(text)
    objects: dict[str, SavedObject] = {}
    if (
        not isinstance(tree, dict)
        or set(tree) != {"state", "objects"}
        or not isinstance(tree["objects"], list)
    ):
        raise _corrupt("structure", "an object with `state` and `objects`", tree)
    for row in tree["objects"]:
        match row:
            case [str(keyword), str(kind), node] if kind in KINDS and keyword not in objects:
                objects[keyword] = SavedObject(kind, node)
            case _:
                raise _corrupt("structure of objects", "[keyword, kind, tree], each keyword once", row)
    return tree["state"], objects


def positional_objects(state_tree: Json | None) -> dict[str, SavedObject]:
    """Returns what the positional nest of a save has under its keys, as nests that a resume can ask for.

    Example:
        >>> positional_objects({"dict": [["epoch", 3]]})
        {'epoch': SavedObject(kind='nest', structure=3)}
    """
    match state_tree:
        case {"dict": list(pairs)} | {"ordered_dict": list(pairs)} | {"counter": list(pairs)}:
            nests = {}
            for pair in pairs:
                match pair:
                    case [str(key), node]:
                        nests[key] = SavedObject("nest", node)
            return nests
        case _:
            return {}


def _corrupt(what: str, expected: str, found: object) -> CorruptionError:
    shown = repr(found)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return CorruptionError(
        f"corrupt {what}: expected {expected}, found: {shown}",
        hint="use another snapshot",
        what=what,
        expected=expected,
        found=shown,
    )
