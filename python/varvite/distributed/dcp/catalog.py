"""What a snapshot holds, in the words of `torch.distributed.checkpoint`: the side that reads.

Nothing here is unpickled or looked up by a name from the file. A snapshot of `VarviteWriter` gives back the
metadata it was saved with; that of a `CheckpointManager` is described as if its nest had been given to
PyTorch, whose rules make the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from varvite.distributed.dcp.description import (
    MEMORY_FORMATS,
    Description,
    Path,
    Properties,
    dense_strides,
    is_mapping,
    pairs_of,
    read_description,
)
from varvite.objects import SavedObject, read_tree
from varvite.plain import corrupt
from varvite.reading import EntryRow, SnapshotView
from varvite.state import Json
from varvite.tensors import torch_dtype

__all__ = ["Catalog", "read_catalog"]


class Catalog(NamedTuple):
    """The items of a snapshot by their fully qualified names.

    Attributes:
        tensors: The entry with the elements of each tensor.
        values: The typed tree of each value that is no tensor.
        pickled: Names of the values that are bytes of a planner, stored as tensors.
        files: Positions in those that are `io.BytesIO` objects, stored as tensors.
        metadata: What a planner reads.
    """

    tensors: dict[str, EntryRow]
    values: dict[str, Json]
    pickled: set[str]
    files: dict[str, int]
    metadata: Metadata


def read_catalog(view: SnapshotView) -> Catalog:
    """Describes a snapshot to a planner.

    Args:
        view: The snapshot.

    Raises:
        CorruptionError: Structure and entries disagree, or no writer of ours has written them.
        UnsupportedFormatError: A newer version wrote this, or torch lacks a dtype.
    """
    state_tree, objects = read_tree(view.reader.structure())
    description = read_description(view)
    if description is None:
        nodes = dict(_flat_items(state_tree, objects))
        paths = {".".join(map(str, path)): path for path in nodes}
        if len(paths) != len(nodes):
            raise corrupt("names", "names that differ", sorted(".".join(map(str, path)) for path in nodes))
        items = {".".join(map(str, path)): node for path, node in nodes.items()}
        description = Description({}, paths, set(), {}, None)
    else:
        items = {str(key): node for key, node in pairs_of(state_tree)}
    tensors: dict[str, EntryRow] = {}
    values: dict[str, Json] = {}
    for name, node in items.items():
        is_bytes = name in description.pickled or name in description.files
        match node:
            case {"tensor": str(entry)}:
                row = view.row(entry)
                if is_bytes and row.dtype == "uint8" and len(row.shape) == 1:
                    values[name] = node
                    continue
                tensors[name] = row if row.tied_to is None else view.row(row.tied_to)
            case _:
                values[name] = node
        if is_bytes:
            raise corrupt(f"bytes of `{name}`", "a tensor of bytes", node)
    described = {
        name: _tensor_metadata(view, row, description.properties.get(name)) for name, row in tensors.items()
    }
    state_dict_metadata = {
        name: described[name] if name in described else BytesStorageMetadata() for name in items
    }
    planner_data = (
        description.planner_data if description.planner_data is not None else description.paths or None
    )
    metadata = Metadata(state_dict_metadata=state_dict_metadata, planner_data=planner_data)
    return Catalog(tensors, values, description.pickled, description.files, metadata)


def _tensor_metadata(view: SnapshotView, row: EntryRow, told: Properties | None) -> TensorStorageMetadata:
    # Of a tensor without elements there is no shard.
    shards = view.reader.shards(row.index) or [([0] * len(row.shape), row.shape)]
    first = next((lengths for offsets, lengths in shards if not any(offsets)), row.shape)
    if told is None:
        told = Properties(False, False, 0, dense_strides(first))
    properties = TensorProperties(
        dtype=torch_dtype(row.dtype),
        requires_grad=told.requires_grad,
        pin_memory=told.pin_memory,
        memory_format=getattr(torch, MEMORY_FORMATS[told.memory_format]),
    )
    if hasattr(properties, "strides"):
        properties.strides = told.strides
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(lengths))
        for offsets, lengths in shards
    ]
    return TensorStorageMetadata(properties=properties, size=torch.Size(row.shape), chunks=chunks)


# ---- the names that PyTorch would give ---------------------------------------------------------


def _flat_items(state_tree: Json | None, objects: Mapping[str, SavedObject]) -> Iterator[tuple[Path, Json]]:
    """Yields what a nest holds, by the path under which `flatten_state_dict` of PyTorch would find it."""
    if state_tree is not None:
        yield from _flat(state_tree, ())
    for keyword, saved in objects.items():
        yield from _flat(saved.structure, (keyword,))


def _flat(node: Json, path: Path) -> Iterator[tuple[Path, Json]]:
    if is_mapping(node):
        for key, inner in pairs_of(node):
            yield from _flat(inner, (*path, str(key)))
    elif type(node) is list and not _is_terminal(node):
        for index, inner in enumerate(node):
            yield from _flat(inner, (*path, index))
    else:
        yield path, node


def _is_terminal(node: Json) -> bool:
    """True for what PyTorch keeps whole: any list without tensors, dicts, or lists that hold such."""
    if type(node) is list:
        return not any(
            (type(item) is dict and "tensor" in item)
            or ((is_mapping(item) or type(item) is list) and not _is_terminal(item))
            for item in node
        )
    return not is_mapping(node)
