"""The data position of a run: how many samples of an epoch all ranks together have consumed.

An epoch has one order, a function of the seed and the epoch. What has been consumed is always a prefix of
it, so the position is one number, whatever the number of ranks, workers or samples in a batch, and any
number of ranks can take up exactly the rest: of what remains, rank `r` of `n` takes every `n`-th sample
from the `r`-th.

The order of epoch `e` under seed `s` is `torch.randperm(length)` of a CPU generator whose seed is the
little-endian number `hashed("varvite.order", s, e)`. It is part of the format: it never changes.

Example:
    >>> cursor = Cursor(seed=0, epoch=0, position=0, length=10)
    >>> order = epoch_order(cursor, shuffle=False)
    >>> [sum(indices(cursor, order, rank, 2, drop_last=False), []) for rank in range(2)]
    [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    >>> cursor = cursor.advance(4)
    >>> [sum(indices(cursor, order, rank, 3, drop_last=False), []) for rank in range(3)]
    [[4, 7], [5, 8], [6, 9]]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from varvite.errors import InvalidInputError
from varvite.plain import corrupt
from varvite.training.checks import check_count
from varvite.training.seeds import hashed

if TYPE_CHECKING:
    import torch

__all__ = ["Cursor", "SamplerState", "epoch_order", "first_of_pass", "indices", "read_state", "share"]

_BLOCK = 4096
"""Indices that are turned into Python integers at a time."""

_FIELDS = ("seed", "epoch", "position", "length")
_FLAGS = ("shuffle", "drop_last", "keeps_iterator")


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where in its data a run is. It belongs to no rank: on every rank it is the same.

    Attributes:
        seed: Seed of the orders of all epochs, from 0 below 2**64.
        epoch: Epoch of the next sample, from 0.
        position: Samples of that epoch that all ranks together have consumed; below `length`.
        length: Samples of the dataset, at least 1.

    Raises:
        InvalidInputError: A number is none, or out of its range.

    Example:
        >>> Cursor(seed=0, epoch=3, position=6, length=8).advance(2)
        Cursor(seed=0, epoch=4, position=0, length=8)
    """

    seed: int
    epoch: int
    position: int
    length: int

    def __post_init__(self) -> None:
        check_count("seed", self.seed, limit=1 << 64)
        check_count("epoch", self.epoch)
        check_count("length", self.length, least=1)
        check_count("position", self.position, limit=self.length)

    @property
    def remaining(self) -> int:
        """Samples of the epoch that no rank has consumed, at least 1."""
        return self.length - self.position

    def advance(self, samples: int) -> Cursor:
        """Returns the cursor behind so many more samples.

        Args:
            samples: Samples that all ranks together have consumed. What goes over the epoch's end is
                padding: the cursor then stands at the start of the next epoch.

        Raises:
            InvalidInputError: It is no number, or below 0.
        """
        check_count("samples", samples)
        if samples >= self.remaining:
            return self.next_epoch()
        return dataclasses.replace(self, position=self.position + samples)

    def next_epoch(self) -> Cursor:
        """Returns the cursor at the start of the next epoch."""
        return dataclasses.replace(self, epoch=self.epoch + 1, position=0)


def share(cursor: Cursor, world_size: int, *, drop_last: bool) -> int:
    """Returns how many samples each rank takes of what remains of the epoch; all ranks take as many.

    Args:
        cursor: Where the pass begins.
        world_size: Number of ranks.
        drop_last: Leave out up to `world_size - 1` samples, instead of giving some twice.

    Example:
        >>> cursor = Cursor(seed=0, epoch=0, position=3, length=10)
        >>> share(cursor, 4, drop_last=True), share(cursor, 4, drop_last=False)
        (1, 2)
    """
    return cursor.remaining // world_size if drop_last else -(-cursor.remaining // world_size)


def first_of_pass(cursor: Cursor, world_size: int, *, drop_last: bool, least: int = 1) -> Cursor:
    """Returns where the next pass begins: here, or in the next epoch if this one has too little left.

    So no pass is empty.

    Args:
        cursor: Where the last pass ended.
        world_size: Number of ranks.
        drop_last: As in `share`.
        least: Samples of a rank without which it would get nothing: a batch, where a loader leaves out
            the incomplete one.

    Raises:
        InvalidInputError: A whole epoch has too little.

    Example:
        >>> first_of_pass(Cursor(seed=0, epoch=0, position=9, length=10), 2, drop_last=True)
        Cursor(seed=0, epoch=1, position=0, length=10)
    """
    if share(cursor, world_size, drop_last=drop_last) >= least:
        return cursor
    following = cursor.next_epoch()
    found = share(following, world_size, drop_last=drop_last)
    if found < least:
        reason = f"an epoch of {cursor.length} samples gives each of {world_size} ranks {found}"
        raise InvalidInputError(
            f"cannot iterate: {reason}, and a pass needs at least: {least}",
            hint="use a smaller batch or fewer ranks, or pass drop_last=False",
            what="drop_last",
            reason=reason,
        )
    return following


def epoch_order(cursor: Cursor, *, shuffle: bool) -> torch.Tensor | range:
    """Returns the order of the cursor's epoch, the same on every rank. No global stream is touched.

    Args:
        cursor: Gives seed, epoch and length.
        shuffle: Whether the order is random.

    Returns:
        Shuffled, a tensor of 8 bytes a sample; else a range.

    Example:
        >>> epoch_order(Cursor(seed=0, epoch=0, position=0, length=8), shuffle=True).tolist()
        [0, 1, 2, 5, 4, 3, 6, 7]
    """
    if not shuffle:
        return range(cursor.length)
    import torch

    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(hashed("varvite.order", cursor.seed, cursor.epoch), "little"))
    return torch.randperm(cursor.length, generator=generator)


def indices(
    cursor: Cursor, order: torch.Tensor | range, rank: int, world_size: int, *, drop_last: bool
) -> Iterator[list[int]]:
    """Yields the samples that one rank takes of what remains of the epoch, some thousands at a time.

    Nothing is replayed: the first index costs the same wherever the cursor stands. Padding wraps around
    to the start of the order.

    Args:
        cursor: Where the pass begins.
        order: The epoch's order.
        rank: Rank of this process, below `world_size`.
        world_size: Number of ranks.
        drop_last: As in `share`.
    """
    first = cursor.position + rank
    count = share(cursor, world_size, drop_last=drop_last)
    # A view: an operation of torch for each block would wake its threads up each time.
    own = order[first : cursor.length : world_size]
    for start in range(0, min(count, len(own)), _BLOCK):
        block = own[start : min(start + _BLOCK, count)]
        yield list(block) if isinstance(block, range) else block.tolist()
    if count > len(own):  # by one: the padding of all ranks together is less than one for each
        yield [int(order[(first + len(own) * world_size) % cursor.length])]


class SamplerState(NamedTuple):
    """What a sampler saves.

    Attributes:
        cursor: Where it is.
        shuffle: Whether its orders are random.
        drop_last: Whether it leaves samples out instead of padding.
        keeps_iterator: Whether its loader has an iterator that the next epoch uses again, as one with
            persistent workers does: then that epoch begins without a draw.
    """

    cursor: Cursor
    shuffle: bool
    drop_last: bool
    keeps_iterator: bool

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data, for `read_state`."""
        fields = dataclasses.asdict(self.cursor)
        return {"kind": "sampler", **fields, **{name: getattr(self, name) for name in _FLAGS}}


def read_state(state: Any) -> SamplerState:
    """Reads what `SamplerState.to_dict` returned.

    Raises:
        CorruptionError: It never returned this.

    Example:
        >>> state = SamplerState(Cursor(0, 2, 3, 10), True, False, False)
        >>> read_state(state.to_dict()) == state
        True
    """
    expected = ("kind", *_FIELDS, *_FLAGS)
    if not isinstance(state, Mapping) or set(state) != set(expected) or state["kind"] != "sampler":
        raise corrupt("data position", f"`{'`, `'.join(expected)}`", state)
    for name in _FLAGS:
        if type(state[name]) is not bool:
            raise corrupt(f"data position, `{name}`", "a bool", state[name])
    try:
        cursor = Cursor(**{name: state[name] for name in _FIELDS})
    except InvalidInputError as error:
        raise corrupt(f"data position, `{error.what}`", str(error.reason), state.get(error.what)) from error
    return SamplerState(cursor, *(state[name] for name in _FLAGS))
