"""Where the bytes of a load go: all of an entry to a tensor or array, or a region of it to this rank's shard.

Of sharded tensors nobody ever holds the whole: each rank reads its own region, to where its shard lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from varvite.plain import UnsavableError
from varvite.shards import Region, shard_of
from varvite.tensors import Described, allocate, describe, is_direct

if TYPE_CHECKING:
    import torch

__all__ = ["Copy", "Target", "buffer_of", "describe_target", "target_in"]

Copy = tuple["torch.Tensor", "torch.Tensor"]
"""A tensor, and the dense buffer whose elements are to be copied to it once they have been read."""


class Target(NamedTuple):
    """Memory that takes a region of an entry, where it does not take all of it.

    Attributes:
        buffer: A dense CPU tensor of the region's lengths.
        region: What of the entry it takes.
    """

    buffer: torch.Tensor
    region: Region


def target_in(name: str, live: torch.Tensor, dtype: str) -> tuple[Any, Copy | None]:
    """Finds where a load writes what goes to a live tensor.

    Args:
        name: Name of the entry, for messages.
        live: Takes the values: any tensor, or this rank's shard of one.
        dtype: A key of `DTYPES`: that of the entry.

    Returns:
        The destination: the live memory itself where it is dense, in CPU memory and of this dtype; and,
        where it is not, what to copy from the destination afterwards.

    Raises:
        InvalidInputError: The live tensor is sharded, but this rank holds no region of it.

    Example:
        >>> import torch
        >>> columns = torch.zeros(2, 3).t()
        >>> destination, copy = target_in("w", columns, "float32")
        >>> destination.shape, destination.is_contiguous(), copy[0] is columns
        (torch.Size([3, 2]), True, True)
    """
    try:
        shard = shard_of(live)
    except UnsavableError as error:
        raise error.at(name, live) from None
    local = live if shard is None else shard.local
    copy: Copy | None = None
    if str(local.dtype).removeprefix("torch.") == dtype and is_direct(local):
        buffer = local.detach() if local.requires_grad else local
    else:
        buffer = allocate(dtype, local.shape)
        copy = (local, buffer)
    return (buffer if shard is None else Target(buffer, shard.region)), copy


def buffer_of(destination: Any) -> Any:
    """Returns the memory of a destination: a tensor or array."""
    return destination.buffer if isinstance(destination, Target) else destination


def describe_target(name: str, destination: Any) -> Described:
    """Describes the memory of a destination, to find what is one memory."""
    described = describe(name, buffer_of(destination))
    if not isinstance(destination, Target):
        return described
    offsets, lengths = destination.region
    return described._replace(region=(list(offsets), list(lengths)))
