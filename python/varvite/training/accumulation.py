"""Steps whose gradients are summed over several micro-batches, none of which is saved half done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from varvite.errors import InvalidInputError
from varvite.training.checks import check_count, check_counts

__all__ = ["GradientAccumulation", "exchanging"]


def exchanging(module: Any, is_last: bool) -> contextlib.AbstractContextManager[Any]:
    """Returns what surrounds a micro-batch, so that ranks exchange gradients after the last one alone.

    Args:
        module: A module; its `no_sync()` is used where it has one, as `DistributedDataParallel` does.
        is_last: Whether the step ends with this micro-batch.

    Example:
        >>> with exchanging(None, is_last=False):
        ...     pass
    """
    no_sync = getattr(module, "no_sync", None)
    return contextlib.nullcontext() if is_last or no_sync is None else no_sync()


class GradientAccumulation:
    """Counts the micro-batches of a step, and refuses a save in the middle of one.

    Gradients are not saved: a resume in the middle of a step would lose those of the micro-batches before.
    Save it with the run, and a save at the wrong place is an error instead.

    Args:
        every: Number of micro-batches of a step.

    Raises:
        InvalidInputError: It is no whole number from 1.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulation = GradientAccumulation(2)
        >>> for batch in torch.ones(4, 8, 1):
        ...     with accumulation.microbatch(model) as is_last:
        ...         (model(batch).mean() / accumulation.every).backward()
        ...         if is_last:
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...     print(accumulation.pending)
        1
        0
        1
        0
    """

    def __init__(self, every: int) -> None:
        """Makes a counter at the start of a step."""
        check_count("every", every, least=1)
        self.every = every
        self.pending = 0
        self._deferred: list[Callable[[], object]] = []

    every: int
    """Number of micro-batches of a step."""

    pending: int
    """Number of micro-batches whose gradients no optimizer's step has used yet."""

    @contextlib.contextmanager
    def microbatch(self, module: Any = None, *, is_last: bool | None = None) -> Iterator[bool]:
        """Surrounds a micro-batch's forward and backward pass and, for the last one, the optimizer's step.

        After the last one, what was deferred is run. A micro-batch that raises is not counted.

        Args:
            module: A module whose ranks need not exchange gradients before the last micro-batch: its
                `no_sync()` is used where it has one, as `DistributedDataParallel` does.
            is_last: Overrides the count, to end a step early where the data ends.

        Yields:
            Whether it is the last one of the step.
        """
        ends_step = self.pending + 1 >= self.every if is_last is None else is_last
        with exchanging(module, ends_step):
            self.pending += 1
            try:
                yield ends_step
            except BaseException:
                # A load or a discard within the block has started the step again.
                self.pending = max(self.pending - 1, 0)
                raise
        if ends_step:
            self.pending = 0
            self._run_deferred()

    def when_complete(self, action: Callable[[], object]) -> None:
        """Runs an action now at a step's end, or else as soon as the step that is under way has ended.

        Args:
            action: What to do, such as a save. What it raises, the call that ran it raises.

        Example:
            >>> accumulation = GradientAccumulation(2)
            >>> for _ in range(2):
            ...     with accumulation.microbatch() as is_last:
            ...         if not is_last:
            ...             accumulation.when_complete(lambda: print("save"))
            ...     print("micro-batch done")
            micro-batch done
            save
            micro-batch done
        """
        if self.pending == 0:
            action()
        else:
            self._deferred.append(action)

    def discard(self) -> None:
        """Starts the step again, where its gradients were dropped; what was deferred is run."""
        self.pending = 0
        self._run_deferred()

    def state_dict(self) -> dict[str, int]:
        """Returns the number of micro-batches of a step.

        Raises:
            InvalidInputError: Micro-batches are pending.
        """
        if self.pending:
            reason = f"{self.pending} of {self.every} micro-batches are pending, and gradients are not saved"
            raise InvalidInputError(
                f"cannot save in the middle of a step: {reason}",
                hint="save after the last micro-batch, or with `accumulation.when_complete(...)`",
                what="accumulation",
                reason=reason,
                pending=self.pending,
            )
        return {"every": self.every}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks a state without taking it.

        Raises:
            CorruptionError: No `state_dict` gave it.
        """
        check_counts("accumulation", state, {"every": 1})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Starts a step. The live `every` stays: with another number of ranks it may be another one.

        Raises:
            CorruptionError: No `state_dict` gave it; nothing was changed.
        """
        self.check_state_dict(state)
        self.pending = 0
        self._deferred.clear()

    def _run_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()
