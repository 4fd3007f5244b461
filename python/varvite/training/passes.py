"""One pass over a sampler, and how many of its samples the training loop has been given.

A data loader asks the sampler for more than it has given to the loop: workers fetch ahead. What the loop
has been given is known to the loader's iterator, which counts batches. So where such an iterator asks,
its count takes part in the pass: each time the iterator adds one, the pass notes how far it is.

What is used of torch: `_BaseDataLoaderIter` with `_index_sampler`, `_num_yielded`, `_num_workers`,
`_dataset`, `_base_seed`, its method `_next_index`; and of iterators with workers `_in_order`, `_rcvd_idx`,
`_persistent_workers`.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any, NamedTuple, Self

from varvite.errors import InvalidInputError
from varvite.training.cursor import Cursor

__all__ = ["Pass", "Source", "find_source"]

_FRAMES = 16
"""Callers that may stand between a sampler and the iterator that asks it, such as a sampler around it."""


class Source(NamedTuple):
    """The iterator of a data loader that asks a sampler for indices.

    Attributes:
        iterator: The iterator.
        batch_size: Samples it asks for in each batch, or `None` where that can't be known.
        drops_incomplete: Whether it leaves out an incomplete batch.
    """

    iterator: Any
    batch_size: int | None
    drops_incomplete: bool


def find_source(sampler: Any, frame: FrameType | None) -> Source | None:
    """Finds the iterator that asks a sampler for its first index, among the callers.

    Args:
        sampler: The sampler.
        frame: The frame that asks.

    Returns:
        The source, or `None` where no iterator of torch asks.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    for _ in range(_FRAMES):
        if frame is None:
            return None
        # `_next_index` alone asks for indices: a dataset may use a sampler, too.
        if frame.f_code.co_name == "_next_index":
            iterator = frame.f_locals.get("self")
            if isinstance(iterator, _BaseDataLoaderIter):
                return _describe(iterator, sampler)
        frame = frame.f_back
    return None


def _describe(iterator: Any, sampler: Any) -> Source:
    asked = iterator._index_sampler  # noqa: SLF001 - what is used of torch stands at the top
    if asked is sampler:
        return Source(iterator, 1, drops_incomplete=False)
    if _is_plain(asked) and asked.sampler is sampler:
        return Source(iterator, asked.batch_size, drops_incomplete=asked.drop_last)
    return Source(iterator, None, drops_incomplete=False)


def _is_plain(batch_sampler: Any) -> bool:
    """True for the batch samplers that loaders make themselves: another may batch in any way."""
    kinds = [sys.modules["torch.utils.data"].BatchSampler]
    torchdata = sys.modules.get("torchdata.stateful_dataloader.sampler")
    if torchdata is not None:
        kinds.append(torchdata.BatchSampler)
    return type(batch_sampler) in kinds


class _Count(int):
    """An iterator's number of batches given, which tells its pass when it grows."""

    pass_: Pass

    def __new__(cls, value: int, pass_: Pass) -> Self:
        count = super().__new__(cls, value)
        count.pass_ = pass_
        return count

    def __add__(self, other: int) -> _Count:
        grown = _Count(int(self) + other, self.pass_)
        self.pass_.given_batch(int(grown))
        return grown


class Pass:
    """What one pass gives this rank, and how much of that the loop has been given.

    Attributes:
        start: Where the pass begins.
        count: Samples that this rank takes.
        gives: Samples among them that reach the loop: fewer where a loader drops an incomplete batch.
        handed_out: Samples that the sampler has yielded.
        carries_epoch: Whether their indices carry the epoch.
    """

    def __init__(self, start: Cursor, count: int, world_size: int, source: Source | None) -> None:
        """Begins a pass, before its first index is handed out."""
        self.start = start
        self.count = self.gives = count
        self.handed_out = 0
        self.carries_epoch = False
        self._world_size = world_size
        self._consumed: int | None = None
        self._doubt: str | None = None
        self._batch_size = 1
        self._iterator: weakref.ref[Any] | None = None
        if source is not None:
            self._watch(source)

    def _watch(self, source: Source) -> None:
        iterator = source.iterator
        self._iterator = weakref.ref(iterator)
        if source.batch_size is None:
            self._doubt = "a batch sampler of another kind stands between, whose sizes are not known"
            return
        if int(iterator._num_yielded) != 0:  # noqa: SLF001
            self._doubt = "the loader counts its batches in a way that is not known"
            return
        self._batch_size = source.batch_size
        if source.drops_incomplete:
            self.gives -= self.count % source.batch_size
        self._consumed = 0
        iterator._num_yielded = _Count(0, self)  # noqa: SLF001

    def given_batch(self, batches: int) -> None:
        """Notes that the iterator gives the loop a batch, the `batches`-th of its pass.

        A batch that failed and that the program went past counts as consumed, as in the run that goes on;
        one that failed last does not.
        """
        iterator = None if self._iterator is None else self._iterator()
        if iterator is None or self._consumed is None:
            return
        if iterator._num_workers == 0:  # noqa: SLF001
            self._consumed = self.handed_out
        elif iterator._in_order:  # noqa: SLF001
            self._consumed = min(iterator._rcvd_idx * self._batch_size, self.count)  # noqa: SLF001
        else:
            self._consumed = min(batches * self._batch_size, self.count)
            self._doubt = "`in_order=False` gives batches in the order in which they are done"

    def advance(self, samples: int) -> None:
        """Notes what the program says: from here on, it counts."""
        self._consumed = min((self._consumed or 0) + samples, self.count)
        self._doubt = None
        self._iterator = None

    @property
    def is_over(self) -> bool:
        """True where the loop has been given all that the pass gives."""
        if self._iterator is None and self._consumed is None:
            return self.handed_out >= self.gives
        return self._consumed is not None and self._consumed >= self.gives

    @property
    def keeps_iterator(self) -> bool:
        """True where the next pass uses the same iterator again."""
        iterator = None if self._iterator is None else self._iterator()
        return bool(getattr(iterator, "_persistent_workers", False))

    def cursor(self) -> Cursor:
        """Returns where the loop is.

        Raises:
            InvalidInputError: It can't be known.
        """
        if self.is_over:
            return self.start.next_epoch()
        if self._doubt is not None:
            raise InvalidInputError(
                f"cannot tell how many samples the loop was given: {self._doubt}",
                hint="save between two epochs, or count yourself: sampler.advance(samples) after each batch",
                what="sampler",
                reason=self._doubt,
            )
        consumed = self.handed_out if self._consumed is None else self._consumed
        return self.start.advance(consumed * self._world_size)

    def next_cursor(self) -> Cursor:
        """Returns where the pass after this one begins.

        Raises:
            InvalidInputError: The pass was broken off where it can't be known.
        """
        nothing_counted = self._doubt is not None and self._consumed is None
        if nothing_counted and self.handed_out >= self.count:
            return self.start.next_epoch()
        return self.cursor()
