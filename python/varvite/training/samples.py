"""Random augmentation that depends on the sample alone, not on workers or on restarts.

A data loader seeds its workers anew for each pass, so what they draw can't go on after a restart. Seeded
for each sample, the draws need no state at all.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, Self

from varvite.errors import InvalidInputError
from varvite.plain import loaded
from varvite.training.checks import check_count
from varvite.training.generators.of_numpy import numpy_in_use
from varvite.training.seeds import hashed

__all__ = ["EpochIndex", "PerSampleRandom", "takes_epoch"]


class EpochIndex(int):
    """The index of a sample that knows its epoch, so that it reaches workers that outlive an epoch.

    Attributes:
        epoch: The epoch the sample is drawn for.

    Example:
        >>> index = EpochIndex(7, epoch=2)
        >>> (index, index.epoch)
        (7, 2)
    """

    epoch: int

    def __new__(cls, index: int, epoch: int) -> Self:
        """Makes the index."""
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the index and its epoch."""
        return EpochIndex, (int(self), self.epoch)


class PerSampleRandom:
    """A dataset whose samples are drawn with the global generators seeded from seed, epoch and index.

    Covered are Python's `random`, NumPy's global generator and torch on the CPU. In the main process
    (`num_workers=0`) they are afterwards where they were before, so that the training's own draws are
    untouched. What the dataset draws from generators of its own is not covered.

    The epoch comes with the index from a `ResumableSampler`. With another sampler, call `set_epoch` before
    each epoch; it reaches workers that run already.

    Args:
        dataset: Gives the samples by index, and draws from the global generators.
        seed: Other seeds give other draws; from 0 below 2**64.

    Raises:
        InvalidInputError: The seed is none.

    Example:
        >>> import random
        >>> class Noise:
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return index + random.random()
        >>> noise = PerSampleRandom(Noise(), seed=7)
        >>> noise.set_epoch(0)
        >>> first = noise[3]
        >>> (len(noise), noise[3] == first, noise[EpochIndex(3, epoch=1)] == first)
        (4, True, False)
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        """Wraps a dataset."""
        import torch

        self.dataset = dataset
        self._seed = check_count("seed", seed, limit=1 << 64)
        self._epoch = torch.full((), -1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of indices that carry none. Call it in the main process, before each epoch.

        Args:
            epoch: The epoch, from 0.

        Raises:
            InvalidInputError: It is no number, or below 0.
        """
        self._epoch.fill_(check_count("epoch", epoch))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        from torch.utils.data import get_worker_info

        epoch = index.epoch if isinstance(index, EpochIndex) else self._epoch_set(index)
        seed = hashed("varvite.sample", self._seed, epoch, int(index), length_bytes=24)
        # In a worker there is no stream to protect, and to read NumPy's state takes longer than the rest.
        with contextlib.nullcontext() if get_worker_info() is not None else _given_back():
            _seed_all(seed)
            return self.dataset[int(index)]

    def _epoch_set(self, index: int) -> int:
        epoch = int(self._epoch)
        if epoch < 0:
            reason = "neither the index nor `set_epoch` says which epoch it is"
            raise InvalidInputError(
                f"cannot draw sample {index}: {reason}",
                hint="iterate with a ResumableSampler, or call set_epoch(epoch) before each epoch",
                what="epoch",
                reason=reason,
            )
        return epoch


def takes_epoch(dataset: Any) -> bool:
    """Tells whether a dataset, or one that it wraps as its `dataset`, wants indices with their epoch.

    Example:
        >>> takes_epoch(range(4)), takes_epoch(PerSampleRandom(range(4)))
        (False, True)
    """
    for _ in range(16):
        if isinstance(dataset, PerSampleRandom):
            return True
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            return False
    return False


def _seed_all(seed: bytes) -> None:
    numpy_random, torch = numpy_in_use(), loaded("torch")
    random.seed(int.from_bytes(seed[:8], "little"))
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(seed[8:12], "little"))
    if torch is not None:
        # Not `torch.manual_seed`: that seeds every accelerator too, which nobody would set back.
        torch.default_generator.manual_seed(int.from_bytes(seed[16:24], "little"))


@contextlib.contextmanager
def _given_back() -> Iterator[None]:
    """Gives the global generators back the states they had.

    For each sample: `rng.unmoved` would read accelerators and registered generators too, which nobody seeds.
    """
    numpy_random, torch = numpy_in_use(), loaded("torch")
    python_state = random.getstate()
    numpy_state = None if numpy_random is None else numpy_random.get_state(legacy=False)
    torch_state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
