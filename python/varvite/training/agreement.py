"""Decisions that all ranks take alike: made once, in one small collective on a group of our own.

A signal reaches the ranks at different steps, a clock or a file system shows them different things. A rank
that acts on what it alone sees leaves the others waiting in their next collective for ever.

Example:
    >>> agreement = Agreement()
    >>> agreement.maximum([3, 0])
    [3, 0]
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from varvite.distributed.group import RankGroup
from varvite.errors import CheckpointError, InvalidInputError, MismatchError
from varvite.settings import joined_distributed
from varvite.training.checks import check_positive

__all__ = ["Agreement"]

_SLOTS = 16
"""Numbers of a collective: always as many, so that ranks that ask for different things still meet."""
_VALUE_LIMIT = _SLOTS - 2
_LEAST = -(2**63)


class Agreement:
    """Agrees on a few numbers over the ranks of a run.

    The first call under `torch.distributed` makes a gloo group of its own, so that nothing mixes with the
    collectives of training and no device is waited for. Without `torch.distributed`, or with one rank, every
    call returns what it was given and imports nothing.

    Call on every rank of the group, in the same order. Not for several threads at once.

    Args:
        process_group: The `torch.distributed` group whose ranks agree; `None` for all ranks.
        timeout_seconds: How long to wait for the other ranks.

    Raises:
        InvalidInputError: The timeout is no time.

    Example:
        >>> Agreement().from_first(41)
        41
    """

    def __init__(self, process_group: Any = None, *, timeout_seconds: float = 600.0) -> None:
        """Keeps the arguments; the group is made by the first call that needs it."""
        self._over = process_group
        self._timeout_seconds = check_positive("timeout_seconds", timeout_seconds)
        self._group: RankGroup | None = None
        self._call = 0
        self._failure: CheckpointError | None = None

    @property
    def rank(self) -> int:
        """This process's place among those that agree, from 0."""
        distributed = joined_distributed()
        return 0 if distributed is None else int(distributed.get_rank(self._over))

    @property
    def world_size(self) -> int:
        """Number of processes that agree; 1 without `torch.distributed`."""
        distributed = joined_distributed()
        return 1 if distributed is None else int(distributed.get_world_size(self._over))

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Returns the largest of each value over the ranks.

        Args:
            values: At most 14 integers of 64 bits, as many on every rank.

        Returns:
            As many integers, equal on all ranks.

        Raises:
            InvalidInputError: Too many values, or one that is no integer of 64 bits; or this process is not
                in the group.
            MismatchError: Ranks gave different numbers of values.
            CheckpointError: The other ranks did not come in time, or one was lost; `missing_ranks` names
                those, where it is known. Every later call raises it again.
        """
        mine = _checked(values)
        distributed = joined_distributed()
        if distributed is None:
            return mine
        if self._failure is not None:
            raise self._failure
        group = self._prepared(distributed)
        return mine if group.size == 1 else self._agree(distributed, group, mine)

    def from_first(self, value: int) -> int:
        """Returns the value of the first rank; the others' are not looked at.

        Args:
            value: An integer of 64 bits.

        Raises:
            CheckpointError: As `maximum`.
        """
        is_first = self.rank == 0
        return self.maximum([value if is_first else _LEAST])[0]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns the numbers of every rank, by rank; bit for bit the same on all of them.

        Args:
            values: At most 14 numbers, as many on every rank; NaN and infinities are allowed.

        Returns:
            A list of as many numbers for each rank.

        Raises:
            InvalidInputError: Too many numbers; or this process is not in the group.
            MismatchError: Ranks gave different numbers of values.
            CheckpointError: As `maximum`.

        Example:
            >>> Agreement().gather([0.5, 2.0])
            [[0.5, 2.0]]
        """
        mine = [float(value) for value in values]
        _check_count(mine)
        distributed = joined_distributed()
        if distributed is None:
            return [mine]
        if self._failure is not None:
            raise self._failure
        group = self._prepared(distributed)
        if group.size == 1:
            return [mine]
        import torch

        padded = [float(len(mine)), *mine, *[0.0] * (_SLOTS - 1 - len(mine))]
        slots = torch.tensor(padded, dtype=torch.float64, device="cpu")
        rows = [torch.empty_like(slots) for _ in range(group.size)]
        with self._failing_once(group):
            group.gloo.allgather([rows], [slots]).wait()
        found = [row.tolist() for row in rows]
        counts = [int(row[0]) for row in found]
        _check_alike(len(mine), max(counts), min(counts))
        return [row[1 : 1 + len(mine)] for row in found]

    def _prepared(self, distributed: Any) -> RankGroup:
        """Returns the group, made again where the program has set up `torch.distributed` anew."""
        if self._group is None or self._group.world is not distributed.group.WORLD:
            self._group = RankGroup(distributed, self._over, timeout_seconds=self._timeout_seconds)
        return self._group

    def _agree(self, distributed: Any, group: RankGroup, mine: list[int]) -> list[int]:
        import torch

        count = len(mine)
        padding = [_LEAST] * (_VALUE_LIMIT - count)
        slots = torch.tensor([count, -count, *mine, *padding], dtype=torch.int64, device="cpu")
        largest = distributed.AllreduceOptions()
        largest.reduceOp = distributed.ReduceOp.MAX
        with self._failing_once(group):
            group.gloo.allreduce([slots], largest).wait()
        agreed: list[int] = slots.tolist()
        _check_alike(count, agreed[0], -agreed[1])
        return agreed[2 : 2 + count]

    @contextlib.contextmanager
    def _failing_once(self, group: RankGroup) -> Iterator[None]:
        """Surrounds a collective; where it fails, every later call raises the same error."""
        self._call += 1
        try:
            yield
        except RuntimeError as error:
            problem = f"cannot agree with the other ranks within {self._timeout_seconds:g} s"
            self._failure = group.lost(problem, group.missing_ranks(f"agreement/{self._call}"))
            raise self._failure from error


def is_first_on_machine() -> bool:
    """Returns whether this process is the launcher's first on this machine, by `LOCAL_RANK`.

    Example:
        >>> is_first_on_machine() in (True, False)
        True
    """
    return os.environ.get("LOCAL_RANK", "0") in ("", "0")


def _check_count(values: Sequence[object]) -> None:
    if len(values) > _VALUE_LIMIT:
        reason = f"at most {_VALUE_LIMIT} at once"
        raise InvalidInputError(f"too many values: {len(values)}", what="values", reason=reason)


def _check_alike(count: int, most: int, least: int) -> None:
    """Refuses ranks that gave different numbers of values."""
    if most != least:
        raise MismatchError(
            f"ranks ask for different decisions: {least} to {most} values, here {count}",
            hint="call the same methods in the same order on every rank",
            name="values",
            field="length",
            expected=count,
            found=most if most != count else least,
        )


def _checked(values: Sequence[int]) -> list[int]:
    mine = list(values)
    _check_count(mine)
    for value in mine:
        if not isinstance(value, int) or not _LEAST <= value < -_LEAST:
            reason = "must be integers of 64 bits"
            raise InvalidInputError(f"invalid value `{value!r}`: {reason}", what="values", reason=reason)
    return [int(value) for value in mine]
