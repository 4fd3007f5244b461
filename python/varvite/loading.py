"""Loads without live objects: the whole nest, some tensors, or into tensors that are there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from varvite.errors import InvalidInputError, TensorNotFoundError
from varvite.filling import fill_in_place
from varvite.objects import (
    BUILT_IN_KEYWORDS,
    RNG_KEYWORD,
    SavedObject,
    labels_in,
    positional_objects,
    read_tree,
)
from varvite.plain import loaded
from varvite.plans import Problems
from varvite.reading import EntryRow, SnapshotView
from varvite.state import Json, StateDict, flatten, structure_leaves, unflatten
from varvite.tensors import allocate

if TYPE_CHECKING:
    import torch

__all__ = ["fill_state_dict", "load_nest", "load_object", "load_objects", "load_rng", "load_tensors"]


def load_nest(view: SnapshotView, *, device: torch.device | str | None, mmap: bool) -> dict[str, Any]:
    """Reads a snapshot as the nest that was saved, objects under their keyword.

    Args:
        view: The snapshot.
        device: Where tensors go; `None` for CPU.
        mmap: Whether tensors may be views of the mapped pack.
    """
    state_tree, objects = read_tree(view.reader.structure())
    trees = {keyword: saved.structure for keyword, saved in objects.items()}
    buffers = _read(view, [state_tree, *trees.values()], device=device, mmap=mmap)
    nest = {} if state_tree is None else unflatten(state_tree, buffers.__getitem__)
    own, own_view = view.rank_objects(), view.of_rank()
    local = {
        keyword: load_object(own_view, saved, device=device, mmap=mmap, into=view)
        for keyword, saved in own.items()
        if keyword not in BUILT_IN_KEYWORDS and keyword not in nest and keyword not in objects
    }
    return {**nest, **_assemble(trees, buffers), **local}


def load_object(
    view: SnapshotView,
    saved: SavedObject,
    *,
    into: SnapshotView,
    device: torch.device | str | None = None,
    mmap: bool = False,
) -> Any:
    """Reads one object of one rank.

    Args:
        view: The snapshot, with the names of that rank.
        saved: What it has of the object.
        into: The view that counts the verified bytes.
        device: Where tensors go; `None` for CPU.
        mmap: Whether tensors may be views of the mapped pack.
    """
    before = view.verified_bytes
    buffers = _read(view, [saved.structure], device=device, mmap=mmap)
    into.verified_bytes += view.verified_bytes - before
    return _assemble({"": saved.structure}, buffers)[""]


def load_objects(
    view: SnapshotView, keywords: Iterable[str], *, device: torch.device | str | None, mmap: bool
) -> dict[str, Any]:
    """Reads some objects, or keys of the positional state, and no other bytes.

    Args:
        view: The snapshot.
        keywords: What to read; the result is in this order.
        device: Where tensors go; `None` for CPU.
        mmap: Whether tensors may be views of the mapped pack.

    Raises:
        TensorNotFoundError: The snapshot has no such object; lists what it has.
    """
    state_tree, objects = read_tree(view.reader.structure())
    known = {**positional_objects(state_tree), **objects, **labels_in(view.header["metadata"])}
    trees: dict[str, Any] = {}
    for keyword in keywords:
        if keyword not in known:
            seq = view.header["seq"]
            raise TensorNotFoundError(
                f"no object `{keyword}` in snapshot {seq}",
                hint=f"it has {', '.join(f'`{name}`' for name in known) or 'none'}",
                name=keyword,
                seq=seq,
                nearest=list(known),
            )
        trees[keyword] = known[keyword].structure
    return _assemble(trees, _read(view, trees.values(), device=device, mmap=mmap))


def load_rng(view: SnapshotView, rank: int) -> dict[str, Any] | None:
    """Reads the state of a rank's random number generators, or `None` where it was not saved."""
    saved = view.rank_objects(rank).get(RNG_KEYWORD)
    found = None if saved is None else load_object(view.of_rank(rank), saved, into=view)
    return found if isinstance(found, dict) else None


def load_tensors(
    view: SnapshotView, patterns: Iterable[str], *, device: torch.device | str | None, mmap: bool
) -> dict[str, Any]:
    """Reads some tensors by name.

    Args:
        view: The snapshot.
        patterns: Names, or globs over names.
        device: Where tensors go; `None` for CPU.
        mmap: Whether tensors may be views of the mapped pack.

    Returns:
        The tensors by name; tied ones are one object.

    Raises:
        TensorNotFoundError: A pattern matches nothing.
    """
    rows = view.select(patterns)
    buffers: dict[str, Any] = {}
    fresh: dict[str, Any] = {}
    for row in rows:
        first = _first_name(row)
        if first not in buffers:
            mapped = view.map(row.name, is_array=False) if mmap else None
            buffers[first] = allocate(row.dtype, row.shape) if mapped is None else mapped
            if mapped is None:
                fresh[row.name] = buffers[first]
    view.read(fresh)
    moved = {first: _move(value, device) for first, value in buffers.items()}
    return {row.name: moved[_first_name(row)] for row in rows}


def fill_state_dict(view: SnapshotView, state_dict: Mapping[str, Any], prefix: str) -> Problems:
    """Fills the tensors of a state dict in place with the entries of the same names.

    Args:
        view: The snapshot.
        state_dict: A flat state dict with dotted keys, or a nest of dicts and lists.
        prefix: What stands before each name in the snapshot, such as `model`.

    Returns:
        What matched and what did not.

    Raises:
        MismatchError: No name matched.
        InvalidInputError: It is no dict.
    """
    if not isinstance(state_dict, dict):
        reason = "must be a dict of tensors"
        raise InvalidInputError(f"invalid state_dict: {reason}", what="state_dict", reason=reason)
    start = prefix.rstrip(".")
    saved = [name for name in view.shared if not start or name.startswith(f"{start}.")]
    live = _live_by_name(state_dict, start, set(saved))
    plan = fill_in_place(live, saved, view, allow_narrowing=False)
    if not plan.found.matched:
        plan.found.check(strict=False)
    view.read(plan.destinations)
    plan.commit()
    return plan.found


def _live_by_name(state_dict: dict[str, Any], start: str, saved: set[str]) -> dict[str, Any]:
    """Names the tensors as a nest or as a module's state dict, whichever the snapshot knows better."""
    prefix = tuple(start.split(".")) if start else ()
    forms = [state_dict]
    if all(isinstance(key, str) for key in state_dict):
        forms.insert(0, StateDict(state_dict))
    candidates = [{leaf.name: leaf.value for leaf in flatten(form, prefix=prefix).leaves} for form in forms]
    return max(candidates, key=lambda names: len(saved.intersection(names)))


def _first_name(row: EntryRow) -> str:
    return row.name if row.tied_to is None else row.tied_to


def _read(
    view: SnapshotView, trees: Iterable[Any], *, device: torch.device | str | None, mmap: bool
) -> dict[str, Any]:
    """Makes and fills memory for all leaves of some trees; tied leaves are one object."""
    buffers: dict[str, Any] = {}
    for tree in trees:
        if tree is None:
            continue
        if mmap:
            for reference in structure_leaves(tree):
                row = view.row(reference.name)
                if _first_name(row) not in buffers:
                    mapped = view.map(row.name, is_array=reference.is_array)
                    if mapped is not None:
                        buffers[_first_name(row)] = mapped
        mapped_names = set(buffers)
        fresh = view.allocate_for(tree, known=buffers)
        view.read(
            {
                name: value
                for name, value in view.unique(fresh).items()
                if _first_name(view.row(name)) not in mapped_names
            }
        )
        buffers.update(fresh)
    if device is None:
        return buffers
    moved: dict[int, Any] = {}
    return {name: moved.setdefault(id(value), _move(value, device)) for name, value in buffers.items()}


def _assemble(trees: Mapping[str, Json], buffers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects of some trees; a module's state dict becomes a plain dict."""
    values = {keyword: unflatten(tree, buffers.__getitem__) for keyword, tree in trees.items()}
    return {key: dict(value) if isinstance(value, StateDict) else value for key, value in values.items()}


def _move(value: Any, device: torch.device | str | None) -> Any:
    torch = loaded("torch")
    if device is None or torch is None or not isinstance(value, torch.Tensor):
        return value
    return value.to(device)
