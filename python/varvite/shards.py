"""Tensors that several ranks hold in shards: which region of the whole this rank has, and its memory.

A region comes from the placements of a `DTensor` on its mesh alone, without asking any other rank, and is
checked against the memory that is really there. Nothing is ever gathered.

Importing this module imports no torch; what the program has not imported made no shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from varvite.plain import UnsavableError, loaded

if TYPE_CHECKING:
    import torch

__all__ = ["Region", "Shard", "is_sharded", "local_of", "region_of", "shard_of"]


class Region(NamedTuple):
    """A hyper-rectangle of a tensor, in elements.

    Attributes:
        offsets: Where it starts, in each dimension.
        lengths: How long it is, in each dimension.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def slices(self) -> tuple[slice, ...]:
        """Returns the index of its elements."""
        pairs = zip(self.offsets, self.lengths, strict=True)
        return tuple(slice(offset, offset + length) for offset, length in pairs)


class Shard(NamedTuple):
    """What this rank holds of a tensor.

    Attributes:
        shape: Of the whole tensor.
        region: What of it lies on this rank; perhaps empty.
        local: The elements of the region, not detached; on any device and with any strides.
    """

    shape: tuple[int, ...]
    region: Region
    local: torch.Tensor


def is_sharded(value: Any) -> bool:
    """True for a tensor that is this rank's shard of a larger one, in any form that torch has for it.

    A `DTensor` is one too where each rank holds all of it.
    """
    return _is_dtensor(value) or _is_sharded_tensor(value) or _is_checkpointable(value)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """Returns the memory that a tensor has on this rank: its shard of a `DTensor`, else the tensor itself."""
    if not _is_dtensor(value):
        return value
    import torch

    sharded: Any = value
    # Most are plain, and asking for them otherwise takes ten times as long: it makes a node for autograd.
    kept: torch.Tensor | None = getattr(sharded, "_local_tensor", None)
    if type(kept) is torch.Tensor:
        return kept
    with torch.no_grad():
        local: torch.Tensor = sharded.to_local()
    return local


def shard_of(value: Any) -> Shard | None:
    """Returns what this rank holds of a sharded tensor, or `None` for what is no sharded tensor.

    Raises:
        UnsavableError: What this rank holds is no region of the whole.
    """
    if _is_dtensor(value):
        return _shard_of_dtensor(value)
    if _is_sharded_tensor(value):
        raise UnsavableError(
            "`ShardedTensor` is what torch had before `DTensor`, and can't be restored in place",
            "shard the model with `torch.distributed.fsdp.fully_shard`, or give FSDP a `device_mesh`",
        )
    return _shard_of_checkpointable(value) if _is_checkpointable(value) else None


def region_of(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    orders: Iterable[Sequence[int]],
) -> Region:
    """Computes the region at one place of a mesh.

    Args:
        shape: Of the whole tensor.
        mesh_shape: Number of ranks in each dimension of the mesh.
        coordinate: The place.
        orders: For each dimension of the tensor, the dimensions of the mesh that cut it, in the order in
            which they do. Each cuts what is there into equal pieces but for the last, as `torch.chunk`.

    Example:
        >>> region_of([5, 3], [2, 2], [1, 0], [[1, 0], []])
        Region(offsets=(2, 0), lengths=(1, 3))
    """
    offsets, lengths = [], []
    for length, order in zip(shape, orders, strict=True):
        start, end = 0, length
        for mesh_dimension in order:
            piece = -(-(end - start) // mesh_shape[mesh_dimension])
            start = min(start + piece * coordinate[mesh_dimension], end)
            end = min(start + piece, end)
        offsets.append(start)
        lengths.append(end - start)
    return Region(tuple(offsets), tuple(lengths))


def _is_dtensor(value: Any) -> bool:
    library = loaded("torch.distributed.tensor")
    return library is not None and isinstance(value, library.DTensor)


def _is_sharded_tensor(value: Any) -> bool:
    library = loaded("torch.distributed._shard.sharded_tensor")
    return library is not None and isinstance(value, library.ShardedTensor)


def _is_checkpointable(value: Any) -> bool:
    """True for what `torch.distributed.checkpoint.CheckpointableTensor` describes: attributes of a tensor."""
    torch = loaded("torch")
    return (
        torch is not None
        and isinstance(value, torch.Tensor)
        and hasattr(value, "global_shape")
        and all(hasattr(value, name) for name in ("global_offsets", "local_offsets", "local_sizes"))
    )


def _shard_of_dtensor(value: Any) -> Shard:
    local = local_of(value)
    mesh, shape = value.device_mesh, tuple(value.shape)
    mesh_shape = tuple(mesh.shape)
    orders = _orders(value, mesh_shape)
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        region = region_of(shape, mesh_shape, coordinate, orders)
    elif shape:
        region = Region((0,) * len(shape), (0,) * len(shape))
        local = local.new_empty(region.lengths)
    else:
        raise UnsavableError(
            "it has one element, and this rank is not in the mesh that holds it",
            "save it under its name on the ranks of its mesh only",
        )
    if tuple(local.shape) != region.lengths:
        placed = ", ".join(map(str, value.placements))
        raise UnsavableError(
            f"this rank holds {list(local.shape)} of {list(shape)}, but placed ({placed}) it would hold "
            f"{list(region.lengths)}",
            "make it with `distribute_tensor`, or give `DTensor.from_local` the shape of the whole",
        )
    return Shard(shape, region, local)


def _orders(value: Any, mesh_shape: Sequence[int]) -> list[list[int]]:
    """Returns, for each dimension of a tensor, the dimensions of the mesh that cut it, in their order.

    From left to right, unless torch says otherwise: FSDP cuts what tensor parallelism has left, and says so
    by the number of pieces that are there before it cuts.
    """
    orders: list[list[int]] = [[] for _ in value.shape]
    placements = value.placements
    for mesh_dimension in reversed(range(len(placements))):
        placement = placements[mesh_dimension]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise UnsavableError(
                "each rank holds a summand of it, not a part",
                "save `.redistribute(placements=...)` of it, with `Replicate()` in place of `Partial`",
            )
        dimension = getattr(placement, "dim", None)
        if dimension is None:
            raise UnsavableError(
                f"the placement `{placement}` is not supported", "save `.full_tensor()` of it"
            )
        order = orders[dimension]
        position = _position(order, getattr(placement, "split_factor", 1), mesh_shape)
        if position is None:
            raise UnsavableError(
                f"with the placement `{placement}` this rank holds pieces that lie apart",
                "save `.redistribute(placements=...)` of it, with `Shard`",
            )
        order.insert(position, mesh_dimension)
    # A newer torch keeps an order of its own beside plain placements.
    for entry in getattr(value._spec, "shard_order", None) or ():  # noqa: SLF001 - there is no public way to ask
        orders[entry.tensor_dim] = list(entry.mesh_dims)
    return orders


def _position(order: list[int], piece_count: int, mesh_shape: Sequence[int]) -> int | None:
    """Returns behind how many of the cuts one stands that finds so many pieces; `None` if none fits."""
    pieces = 1
    for position, mesh_dimension in enumerate(order):
        if pieces == piece_count:
            return position
        pieces *= mesh_shape[mesh_dimension]
    return len(order) if pieces == piece_count else None


def _shard_of_checkpointable(value: Any) -> Shard:
    shape = tuple(value.global_shape)
    count = len(value.local_sizes)
    if count > 1 or (count == 0 and not shape):
        raise UnsavableError(
            f"its memory holds {count} shards, and only one of a tensor is supported",
            "save each shard under a name of its own, or the whole as a DTensor",
        )
    if count == 0:
        region = Region((0,) * len(shape), (0,) * len(shape))
        return Shard(shape, region, value.new_empty(region.lengths))
    region = Region(tuple(value.global_offsets[0]), tuple(value.local_sizes[0]))
    starts = value.local_offsets[0] or (0,) * len(shape)
    slices = tuple(slice(start, start + length) for start, length in zip(starts, region.lengths, strict=True))
    local = value.detach()[slices]
    fits = all(
        0 <= offset <= offset + length <= whole
        for offset, length, whole in zip(region.offsets, region.lengths, shape, strict=True)
    )
    if tuple(local.shape) != region.lengths or not fits:
        raise UnsavableError(
            f"its `local_sizes` {list(region.lengths)} fit neither its memory {list(value.shape)} nor its "
            f"`global_shape` {list(shape)}",
            "set them as `torch.distributed.checkpoint.CheckpointableTensor` says",
        )
    return Shard(shape, region, local)
