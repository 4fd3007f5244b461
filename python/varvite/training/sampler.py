"""A sampler with a position: it goes on with exactly the samples that the loop has not been given."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader, Sampler

from varvite.errors import InvalidInputError, MismatchError
from varvite.notices import warn
from varvite.settings import joined_distributed
from varvite.training import rng
from varvite.training.checks import check_count
from varvite.training.cursor import (
    Cursor,
    SamplerState,
    epoch_order,
    first_of_pass,
    indices,
    read_state,
    share,
)
from varvite.training.passes import Pass, Source, find_source
from varvite.training.samples import EpochIndex, takes_epoch

__all__ = ["ResumableSampler", "sampler_of"]


class ResumableSampler(Sampler[int]):  # type: ignore[misc]
    """Gives each rank its samples of each epoch, and goes on where the training loop was.

    Use it as the `sampler` of a plain `DataLoader`, with any number of workers, and save it (or the
    loader) with the rest. What counts is what the loop was given, not what workers have fetched ahead.
    Restored, it goes on with the rest of the epoch, by index and without replay, on any number of ranks:
    no sample twice, none lost.

    Every rank makes one, with the same arguments but `rank`, and all ranks take as many batches. Its state
    is the same on every rank.

    An epoch ends with the last batch: the state is then at the start of the next epoch, and no pass is
    empty. A loop that breaks off goes on behind what it was given when it iterates again; `rewind` goes
    back to the epoch's start. A pass that begins after a restore in the middle of an epoch moves no
    generator that was restored, as the run that never stopped began none there.

    Iterated without a `DataLoader` of torch, what it has yielded counts. Where the batches of a loader
    can't be known (a `batch_sampler` of another kind, `in_order=False`), saving in the middle of an epoch is
    an error; see `advance`.

    Args:
        dataset: The dataset, or its length.
        shuffle: Whether the order of each epoch is random: a function of seed and epoch.
        seed: Seed of the orders, from 0 below 2**64.
        drop_last: Where the ranks can't share the samples evenly: leave up to `world_size - 1` out, or
            give some twice.
        rank: Rank of this process; by default that of `torch.distributed`, if it is initialised.
        world_size: Number of ranks, likewise.

    Raises:
        InvalidInputError: An argument is not legal, or an epoch has nothing for each rank.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sampler = ResumableSampler(6, shuffle=False)
        >>> for batch in DataLoader(range(6), batch_size=2, sampler=sampler):
        ...     if batch.tolist() == [2, 3]:
        ...         saved = sampler.state_dict()
        >>> resumed = ResumableSampler(6, shuffle=False)
        >>> resumed.load_state_dict(saved)
        >>> [batch.tolist() for batch in DataLoader(range(6), batch_size=2, sampler=resumed)]
        [[4, 5]]
        >>> resumed.epoch
        1
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Makes a sampler at the start of epoch 0."""
        self._shuffle = _flag("shuffle", shuffle)
        self._drop_last = _flag("drop_last", drop_last)
        self._rank, self._world_size = _topology(rank, world_size)
        self._dataset = dataset
        if isinstance(dataset, DataLoader):
            reason = "must be the dataset, not a loader of it: a loader counts batches, and a sampler samples"
            raise InvalidInputError(f"invalid dataset: {reason}", what="dataset", reason=reason)
        length = check_count("length", dataset if isinstance(dataset, int) else len(dataset), least=1)
        self._cursor = Cursor(seed=seed, epoch=0, position=0, length=length)
        first_of_pass(self._cursor, self._world_size, drop_last=drop_last)
        self._pass: Pass | None = None
        self._restored: SamplerState | None = None  # until the first pass after a restore

    # ---- position ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next sample; after the last batch of an epoch, the next one."""
        if self._pass is None:
            return self._cursor.epoch
        return self._pass.start.epoch + self._pass.is_over

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have been given.

        Raises:
            InvalidInputError: It can't be known; see the class.
        """
        return self._now().position

    @property
    def remaining(self) -> int:
        """Samples of the epoch that no rank has been given; errors as `position`."""
        return self._now().remaining

    @property
    def goes_on(self) -> bool:
        """True where the run that never stopped would begin no iterator before the next sample."""
        kept = self._restored is not None and self._restored.keeps_iterator
        return kept or self._next_start().position > 0

    def __len__(self) -> int:
        """Returns how many samples a whole epoch gives this rank."""
        whole = Cursor(self._cursor.seed, 0, 0, self._cursor.length)
        return share(whole, self._world_size, drop_last=self._drop_last)

    def _now(self) -> Cursor:
        return self._cursor if self._pass is None else self._pass.cursor()

    def _next_start(self) -> Cursor:
        return self._cursor if self._pass is None else self._pass.next_cursor()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, unless it is in that epoch already: then nothing changes.

        So a loop that calls this before each epoch keeps a restored position. It need not call it.

        Args:
            epoch: The epoch, from 0. Begin with `sampler.epoch` after a restore; to give up what was
                restored and not used yet is warned of.

        Raises:
            InvalidInputError: It is no number, or below 0.
        """
        check_count("epoch", epoch)
        if epoch == self.epoch:
            return
        if self._restored is not None and (epoch < self._cursor.epoch or self._cursor.position):
            at = f"epoch {self._cursor.epoch} at sample {self._cursor.position}"
            warn(f"the restored data position, {at}, is given up for the start of epoch: {epoch}")
        self._go_to(Cursor(self._cursor.seed, epoch, 0, self._cursor.length))

    def rewind(self) -> None:
        """Goes back to the start of the epoch, where a loop that broke off shall not go on."""
        self._go_to(Cursor(self._cursor.seed, self.epoch, 0, self._cursor.length))

    def advance(self, samples: int) -> None:
        """Says that this rank's loop was given so many more samples; from here on, only this counts.

        For loaders whose batches the sampler can't know. All ranks call it with the same number.

        Args:
            samples: Samples, counted from the start of the pass or from the last call in it.

        Raises:
            InvalidInputError: It is no number, or below 0.
        """
        check_count("samples", samples)
        if self._pass is not None:
            self._pass.advance(samples)
        else:
            self._go_to(self._cursor.advance(samples * self._world_size))

    def end_epoch(self) -> None:
        """Says that the loop has been given all of this pass: the next one begins the next epoch."""
        if self._pass is not None and not self._pass.is_over:
            self._pass.advance(self._pass.count)

    def _go_to(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._pass = None
        self._restored = None

    # ---- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as plain data, the same on every rank.

        Raises:
            InvalidInputError: It can't be known; see the class.
        """
        if self._pass is not None:
            keeps = self._pass.keeps_iterator
        else:
            keeps = self._restored is not None and self._restored.keeps_iterator
        return SamplerState(self._now(), self._shuffle, self._drop_last, keeps).to_dict()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that `load_state_dict` would take a state. Changes nothing.

        Args:
            state: What `state_dict` returned, on any rank of any number.

        Raises:
            MismatchError: It is that of another dataset length, seed, `shuffle` or `drop_last`.
            CorruptionError: `state_dict` never returned it.
        """
        saved = read_state(state)
        live = SamplerState(self._cursor, self._shuffle, self._drop_last, keeps_iterator=False)
        rows = [
            ("length", live.cursor.length, saved.cursor.length),
            ("seed", live.cursor.seed, saved.cursor.seed),
            ("shuffle", live.shuffle, saved.shuffle),
            ("drop_last", live.drop_last, saved.drop_last),
        ]
        differing = [(field, here, there) for field, here, there in rows if here != there]
        if differing:
            shown = ", ".join(f"`{field}` is {here} and was {there}" for field, here, there in differing)
            field, here, there = differing[0]
            raise MismatchError(
                f"the sampler differs from the saved one: {shown}",
                hint="make it as it was saved: its position says nothing in another order of samples",
                name="sampler",
                field=field,
                expected=here,
                found=there,
                mismatched=[("sampler", *row) for row in differing],
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position. Call it on every rank, with the same state.

        Args:
            state: What `state_dict` returned, on any rank of any number.

        Raises:
            MismatchError: It is that of another dataset length, seed, `shuffle` or `drop_last`.
            CorruptionError: `state_dict` never returned it. Nothing was changed.
        """
        self.check_state_dict(state)
        saved = read_state(state)
        self._go_to(saved.cursor)
        self._restored = saved

    # ---- iteration -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Yields this rank's samples of the rest of the epoch; see the class.

        Raises:
            InvalidInputError: The pass before was broken off where the position can't be known, or the
                position was set, or another pass begun, while this one ran.
        """
        # Nothing here may hold the iterator, which holds this generator: in a cycle of references, its
        # workers would live until the garbage is collected.
        begun = self._begin(find_source(self, sys._getframe(1)))  # noqa: SLF001 - see `find_source`
        order = epoch_order(begun.start, shuffle=self._shuffle)
        for block in indices(begun.start, order, self._rank, self._world_size, drop_last=self._drop_last):
            for index in block:
                if self._pass is not begun:
                    raise _overtaken()
                begun.handed_out += 1
                yield EpochIndex(index, begun.start.epoch) if begun.carries_epoch else index

    def _begin(self, source: Source | None) -> Pass:
        batch = source.batch_size if source is not None and source.drops_incomplete else None
        undo = self.goes_on and self._restored is not None
        start = first_of_pass(
            self._next_start(), self._world_size, drop_last=self._drop_last, least=batch or 1
        )
        begun = Pass(
            start, share(start, self._world_size, drop_last=self._drop_last), self._world_size, source
        )
        begun.carries_epoch = takes_epoch(self._dataset)
        if source is not None:
            begun.carries_epoch = begun.carries_epoch or takes_epoch(source.iterator._dataset)  # noqa: SLF001
            if undo:
                rng.take_back_draw(source.iterator._base_seed)  # noqa: SLF001
        self._pass = begun
        self._restored = None
        return begun

    def __repr__(self) -> str:
        where = f"epoch={self.epoch}, length={self._cursor.length}"
        return f"ResumableSampler({where}, rank={self._rank}, world_size={self._world_size})"


def sampler_of(loader: Any) -> ResumableSampler | None:
    """Returns the `ResumableSampler` inside a `DataLoader` of torch, or `None`.

    Example:
        >>> sampler = ResumableSampler(4)
        >>> sampler_of(DataLoader(range(4), batch_size=2, sampler=sampler)) is sampler
        True
    """
    if not isinstance(loader, DataLoader):
        return None
    inner = getattr(loader.batch_sampler, "sampler", None)
    return next((one for one in (loader.sampler, inner) if isinstance(one, ResumableSampler)), None)


def _overtaken() -> InvalidInputError:
    reason = "another pass was begun, or the position was set"
    message = f"cannot go on with this pass over the sampler: {reason}"
    return InvalidInputError(message, hint="leave this loop and iterate again", what="sampler", reason=reason)


def _flag(what: str, value: bool) -> bool:
    if isinstance(value, bool):
        return value
    reason = "must be True or False"
    raise InvalidInputError(f"invalid {what}: {reason}, not: {value!r}", what=what, reason=reason)


def _topology(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which rank of how many this process is; a launcher's word is never adopted silently."""
    if (rank is None) != (world_size is None):
        reason = "give both or neither"
        raise InvalidInputError(f"invalid rank and world_size: {reason}", what="rank", reason=reason)
    if rank is not None and world_size is not None:
        size = check_count("world_size", world_size, least=1, limit=1 << 31)
        return check_count("rank", rank, limit=size), size
    distributed = joined_distributed()
    if distributed is not None:
        return distributed.get_rank(), distributed.get_world_size()
    launched = os.environ.get("WORLD_SIZE", "")
    if launched.isdecimal() and int(launched) > 1:
        reason = f"this process was launched as one of {launched}, and torch.distributed is not initialised"
        raise InvalidInputError(
            f"invalid rank and world_size: {reason}",
            hint="call init_process_group first, or pass rank and world_size",
            what="rank",
            reason=reason,
        )
    return 0, 1
