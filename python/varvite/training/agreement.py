"""Decisions that all ranks take alike: made once, in one small collective on a group of our own.

A signal reaches the ranks at different steps, a clock or a file system shows them different things. A rank
that acts on what it alone sees leaves the others waiting in their next collective for ever.

Example:
    >>> agreement = Agreement()
    >>> agreement.maximum([3, 0])
    [3, 0]
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from varvite.errors import CheckpointError, InvalidInputError, MismatchError
from varvite.settings import joined_distributed
from varvite.training.checks import check_positive

__all__ = ["Agreement"]

_SLOTS = 16
"""Numbers of a collective: always as many, so that ranks that ask for different things still meet."""
_VALUE_LIMIT = _SLOTS - 2
_LEAST = -(2**63)
_GRACE_SECONDS = 5.0
"""How long after a failure a rank waits for the others to say that they were there."""


class Agreement:
    """Agrees on small integers over the ranks of a run.

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
        self._group: Any = None
        self._world: Any = None
        self._ranks: list[int] = [0]
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
        self._prepare(distributed)
        if len(self._ranks) == 1:
            return mine
        return self._agree(distributed, mine)

    def from_first(self, value: int) -> int:
        """Returns the value of the first rank; the others' are not looked at.

        Args:
            value: An integer of 64 bits.

        Raises:
            CheckpointError: As `maximum`.
        """
        is_first = self.rank == 0
        return self.maximum([value if is_first else _LEAST])[0]

    def _prepare(self, distributed: Any) -> None:
        """Makes the group, or makes it again where the program has set up `torch.distributed` anew."""
        world = distributed.group.WORLD
        if self._group is not None and self._world is world:
            return
        if self._over is None:
            ranks = list(range(distributed.get_world_size()))
        elif distributed.get_rank(self._over) < 0:
            reason = "this process is not in it"
            raise InvalidInputError(f"invalid process_group: {reason}", what="process_group", reason=reason)
        else:
            ranks = list(distributed.get_process_group_ranks(self._over))
        if len(ranks) > 1:
            from datetime import timedelta

            self._group = distributed.new_group(
                ranks,
                timeout=timedelta(seconds=self._timeout_seconds),
                backend="gloo",
                # Ranks outside of the group need not know of it.
                use_local_synchronization=self._over is not None,
            )
        self._world, self._ranks = world, ranks

    def _agree(self, distributed: Any, mine: list[int]) -> list[int]:
        import torch

        count = len(mine)
        self._call += 1
        padding = [_LEAST] * (_VALUE_LIMIT - count)
        slots = torch.tensor([count, -count, *mine, *padding], dtype=torch.int64, device="cpu")
        try:
            distributed.all_reduce(slots, op=distributed.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            self._failure = self._failed(distributed)
            raise self._failure from error
        agreed: list[int] = slots.tolist()
        most, least = agreed[:2]
        if most != -least:
            raise MismatchError(
                f"ranks ask for different decisions: {-least} to {most} values, here {count}",
                hint="call the same methods in the same order on every rank",
                name="values",
                field="length",
                expected=count,
                found=most if most != count else -least,
            )
        return agreed[2 : 2 + count]

    def _failed(self, distributed: Any) -> CheckpointError:
        missing = self._missing_ranks(distributed)
        who = (
            "not known which" if missing is None else ", ".join(map(str, missing)) or "none, but one was lost"
        )
        return CheckpointError(
            f"cannot agree with the other ranks within {self._timeout_seconds:g} s; missing ranks: {who}",
            hint="look at the log of the missing rank: it ended, hangs, or does not call this at each step",
            missing_ranks=missing,
        )

    def _missing_ranks(self, distributed: Any) -> list[int] | None:
        """Returns the ranks that never came to this call.

        A rank whose collective failed says so in the store of the launcher; one that never called can't.
        """
        try:
            store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way
            prefix = f"varvite/agreement/{self._group.group_name}/{self._call}"
            keys = {rank: f"{prefix}/{rank}" for rank in self._ranks}
            store.set(keys[distributed.get_rank()], "here")
            until = time.monotonic() + _GRACE_SECONDS
            while True:
                missing = [rank for rank, key in keys.items() if not store.check([key])]
                if not missing or time.monotonic() > until:
                    return missing
                time.sleep(0.05)
        except (AttributeError, RuntimeError):  # another torch, or the store went with its rank
            return None


def is_first_on_machine() -> bool:
    """Returns whether this process is the launcher's first on this machine, by `LOCAL_RANK`.

    Example:
        >>> is_first_on_machine() in (True, False)
        True
    """
    return os.environ.get("LOCAL_RANK", "0") in ("", "0")


def _checked(values: Sequence[int]) -> list[int]:
    mine = list(values)
    if len(mine) > _VALUE_LIMIT:
        reason = f"at most {_VALUE_LIMIT} at once"
        raise InvalidInputError(f"too many values: {len(mine)}", what="values", reason=reason)
    for value in mine:
        if not isinstance(value, int) or not _LEAST <= value < -_LEAST:
            reason = "must be integers of 64 bits"
            raise InvalidInputError(f"invalid value `{value!r}`: {reason}", what="values", reason=reason)
    return [int(value) for value in mine]
