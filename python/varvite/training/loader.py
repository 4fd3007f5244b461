"""Any data loader with a position that is saved and restored with the rest of the training state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from varvite.errors import InvalidInputError
from varvite.training.checks import check_count
from varvite.training.positions import Position, Record, check_record, position_of

__all__ = ["ResumableLoader"]


class ResumableLoader:
    """Iterates over a data loader, and knows how much of it the training loop was given.

    It takes three kinds of loaders:

    - A `DataLoader` of torch with a `ResumableSampler`: goes on exactly, on any number of ranks.
    - A loader with `state_dict` and `load_state_dict`, such as torchdata's `StatefulDataLoader`: goes on as
      that loader can.
    - Any other: saved between two epochs. In the middle of one a save is an error, since the restored
      run would see the epoch's first samples again.

    One iteration is the rest of an epoch, and never empty after a restore. An iteration that begins
    within an epoch moves no random generator; one at an epoch's start does what the loader does.

    State may arrive before there is a loader: it is checked and applied when one is attached. Every rank
    makes its own. The sampler's state is the same on every rank; that of another loader is the rank's own.

    Args:
        loader: The loader, or `None` to attach one later.
        shield: As in `attach`.

    Raises:
        InvalidInputError: The loader is no iterable.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from varvite.training.sampler import ResumableSampler
        >>> def loader():
        ...     sampler = ResumableSampler(6, shuffle=False)
        ...     return DataLoader(range(6), batch_size=2, sampler=sampler)
        >>> data = ResumableLoader(loader())
        >>> for batch in data:
        ...     if batch.tolist() == [0, 1]:
        ...         saved = data.state_dict()
        >>> resumed = ResumableLoader()
        >>> resumed.load_state_dict(saved)
        >>> [batch.tolist() for batch in resumed.attach(loader())]
        [[2, 3], [4, 5]]
    """

    def __init__(self, loader: Any = None, *, shield: Callable[[Any], object] | None = None) -> None:
        """Wraps a loader, or waits for one."""
        self._position: Position | None = None
        self._arrived: Record | None = None
        self._iteration: object = None
        if loader is not None:
            self.attach(loader, shield=shield)

    def attach(self, loader: Any, *, shield: Callable[[Any], object] | None = None) -> ResumableLoader:
        """Takes a loader, and applies the state that arrived before it.

        A loader that draws when it is made, as torchdata's does with `shuffle=True`, is to be made inside
        `rng.unmoved()` where the generators are restored already.

        Args:
            loader: The loader.
            shield: Called with the loader, once, before its first iteration.

        Returns:
            This object.

        Raises:
            InvalidInputError: There is a loader already, or this is none.
            MismatchError: The state that arrived is not one for this loader. It is dropped.
            CorruptionError: No loader returned the state that arrived. It is dropped.
        """
        if self._position is not None:
            reason = "there is a loader already"
            raise InvalidInputError(f"cannot attach a loader: {reason}", what="loader", reason=reason)
        position = position_of(loader)
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            position.check(arrived)
            position.load(arrived)
        if shield is not None:
            shield(loader)
        self._position = position
        return self

    @property
    def is_rank_local(self) -> bool:
        """True where the position is this rank's own: that of a loader with a state of its own."""
        if self._position is not None:
            return self._position.kind == "stateful"
        return self._arrived is not None and self._arrived["kind"] == "stateful"

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, also of a state that waits for a loader."""
        if self._position is not None:
            return self._position.epoch
        return 0 if self._arrived is None else int(self._arrived["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, unless it is in that epoch already: then nothing changes.

        A loop need not call it.

        Args:
            epoch: The epoch, from 0. Begin with the property `epoch` after a restore.

        Raises:
            InvalidInputError: It is no number, or below 0; or no loader is attached.
        """
        check_count("epoch", epoch)
        position = self._attached("set the epoch")
        if epoch != position.epoch:
            self._iteration = None
            position.set_epoch(epoch)

    @property
    def iteration(self) -> object:
        """What tells one iteration from another: another value once one is begun or the position is set.

        For a loop to see whether what it calls, such as an evaluation, has left its data alone.
        """
        return self._iteration, None if self._position is None else self._position.iteration

    def __len__(self) -> int:
        """Returns how many batches a whole epoch has, as the loader says."""
        return len(self._attached("count batches").loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of the rest of the epoch.

        Raises:
            InvalidInputError: No loader is attached, or while this ran, the position was set or another
                iteration begun.
        """
        position = self._attached("iterate")
        self._iteration = iteration = object()
        may_be_empty = position.goes_on
        batches = position.begin()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                position.end()
                if not may_be_empty:
                    return
                # What was saved behind the epoch's last batch: what goes on is the next epoch.
                may_be_empty = False
                batches = position.begin()
                continue
            may_be_empty = False
            position.batches += 1
            yield batch
            if self._iteration is not iteration:
                reason = "another iteration was begun, or the position was set"
                raise InvalidInputError(
                    f"cannot go on with this iteration over the loader: {reason}",
                    hint="leave this loop and iterate again",
                    what="loader",
                    reason=reason,
                )

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as plain data, and for a loader with a state of its own that state.

        Raises:
            InvalidInputError: The loader has no state and is in the middle of an epoch; or there is
                neither a loader nor a state.
        """
        if self._position is None and self._arrived is not None:
            return dict(self._arrived)
        return self._attached("save its position").state()

    def check_state_dict(self, state: Record) -> None:
        """Checks that `load_state_dict` would take a state. Changes nothing.

        Args:
            state: What `state_dict` returned.

        Raises:
            MismatchError: It is that of another kind of loader, or of another order of samples.
            CorruptionError: `state_dict` never returned it.
        """
        check_record(state)
        if self._position is not None:
            self._position.check(state)

    def load_state_dict(self, state: Record) -> None:
        """Goes to a saved position, or keeps it until a loader is attached.

        Args:
            state: What `state_dict` returned.

        Raises:
            MismatchError: It is that of another kind of loader, or of another order of samples.
            CorruptionError: `state_dict` never returned it.
        """
        self.check_state_dict(state)
        self._iteration = None
        if self._position is None:
            self._arrived = dict(state)
        else:
            self._position.load(state)

    def _attached(self, what: str) -> Position:
        if self._position is None:
            reason = "no loader is attached"
            hint = "call attach(loader) first"
            raise InvalidInputError(f"cannot {what}: {reason}", hint=hint, what="loader", reason=reason)
        return self._position

    def __repr__(self) -> str:
        inner = None if self._position is None else self._position.loader
        return f"ResumableLoader({inner!r}, epoch={self.epoch})"
