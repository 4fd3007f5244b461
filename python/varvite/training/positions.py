"""The kinds of data loaders, and how each tells where it is and goes on there.

Used by `ResumableLoader` alone, which says what a user may rely on.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NoReturn, Protocol

from varvite.errors import InvalidInputError, MismatchError
from varvite.objects import is_torch_loader
from varvite.plain import corrupt, loaded, type_name
from varvite.training import rng
from varvite.training.checks import is_count
from varvite.training.cursor import read_state

__all__ = ["Position", "Record", "check_record", "position_of"]

Record = Mapping[str, Any]
"""What a loader's position saves: plain data with a `kind`."""

_FIELDS = {
    "stateful": ("kind", "epoch", "phase", "batches", "keeps_iterator", "num_workers", "state"),
    "epoch": ("kind", "epoch", "keeps_iterator"),
}

_PHASES = ("edge", "within", "last")
"""Between two epochs, within one, or behind the last batch of one, whose iterator has not ended yet."""


class Position(Protocol):
    """Where a loader of one kind is.

    Attributes:
        kind: The `kind` of its records.
        loader: The loader.
        batches: Batches of the epoch that the loop was given.
    """

    kind: ClassVar[str]
    loader: Any
    batches: int

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""

    @property
    def iteration(self) -> object:
        """The iteration that decides where the loader is, whoever began it; `None` where only this counts."""

    @property
    def goes_on(self) -> bool:
        """Whether the next iteration begins within an epoch, and may find nothing left of it."""

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch."""

    def begin(self) -> Iterator[Any]:
        """Returns an iterator over the rest of the epoch."""

    def end(self) -> None:
        """Notes that the iterator has ended."""

    def state(self) -> dict[str, Any]:
        """Returns the record."""

    def check(self, record: Record) -> None:
        """Raises where `load` would not take a record."""

    def load(self, record: Record) -> None:
        """Takes a checked record."""


def position_of(loader: Any) -> Position:
    """Returns the position of a loader of any kind, at the start of its first epoch.

    Raises:
        InvalidInputError: It is no iterable.

    Example:
        >>> position_of([1, 2]).kind
        'epoch'
    """
    if not hasattr(loader, "__iter__"):
        reason = "it is no iterable"
        message = f"invalid loader of type `{type_name(loader)}`: {reason}"
        raise InvalidInputError(message, what="loader", reason=reason)
    if is_torch_loader(loader):
        from varvite.training.sampler import sampler_of

        sampler = sampler_of(loader)
        if sampler is not None:
            return _BySampler(loader, sampler)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _ByState(loader)
    return _ByEpoch(loader)


class _BySampler:
    """A loader with a `ResumableSampler`: the sampler knows."""

    kind: ClassVar[str] = "sampler"

    def __init__(self, loader: Any, sampler: Any) -> None:
        self.loader = loader
        self.batches = 0
        self._sampler = sampler

    @property
    def epoch(self) -> int:
        return int(self._sampler.epoch)

    @property
    def iteration(self) -> object:
        return self._sampler._pass  # noqa: SLF001 - its other half

    @property
    def goes_on(self) -> bool:
        return False  # the sampler gives no empty pass

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def begin(self) -> Iterator[Any]:
        with rng.unmoved() if self._sampler.goes_on else contextlib.nullcontext():
            return _iterator(self.loader)

    def end(self) -> None:
        self._sampler.end_epoch()

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._sampler.state_dict()
        return state

    def check(self, record: Record) -> None:
        _check_kind(self.kind, record)
        self._sampler.check_state_dict(record)

    def load(self, record: Record) -> None:
        self._sampler.load_state_dict(record)


class _Counted:
    """What the kinds share that count epochs and batches themselves."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches = 0
        self._epoch = 0
        self._is_within = False  # from an iteration's begin to its end
        self._restored: Record | None = None  # until the first iteration after a restore

    @property
    def epoch(self) -> int:
        return self._epoch + self._is_last

    @property
    def _is_last(self) -> bool:
        """True behind the epoch's last batch, before the iterator has ended."""
        return self._is_within and self.batches == self._length()

    @property
    def iteration(self) -> object:
        return None

    def _length(self) -> int | None:
        """Returns the batches of an epoch, where the loader knows them."""
        # The length of a stream is a guess, and torch warns of a guess that somebody has asked for.
        if is_torch_loader(self.loader) and isinstance(self.loader.dataset, _streams()):
            return None
        return len(self.loader) if hasattr(self.loader, "__len__") else None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self.batches = 0
        self._is_within = False
        self._restored = None

    def end(self) -> None:
        self.set_epoch(self._epoch + 1)

    @property
    def _keeps_iterator(self) -> bool:
        """True where the next epoch uses the iterator that is there again."""
        if self._restored is not None:
            return bool(self._restored["keeps_iterator"])
        keeps = bool(getattr(self.loader, "persistent_workers", False))
        return keeps and _iterator_there(self.loader) is not None

    def _tell_epoch(self) -> None:
        """Sets the epoch of samplers whose order depends on it, such as `DistributedSampler`."""
        for holder in (self.loader, *(getattr(self.loader, name, None) for name in _SAMPLERS)):
            set_epoch = getattr(holder, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
                return


_SAMPLERS = ("sampler", "batch_sampler")


class _ByState(_Counted):
    """A loader with a state of its own."""

    kind: ClassVar[str] = "stateful"

    @property
    def iteration(self) -> object:
        return _iterator_there(self.loader) if is_torch_loader(self.loader) else None

    @property
    def goes_on(self) -> bool:
        return self._is_within if self._restored is None else self._restored["phase"] == "within"

    def begin(self) -> Iterator[Any]:
        record = self._restored
        if record is None and self._is_within:  # a loop that broke off goes on, too
            record = self.state()
            self.set_epoch(record["epoch"])
            self.loader.load_state_dict(record["state"])
        elif record is not None and record["state"] is not None and is_torch_loader(self.loader):
            self.loader.load_state_dict(record["state"])
        self._restored = None
        self._is_within = True
        if record is None or record["state"] is None:
            self._tell_epoch()
            return _iterator(self.loader)
        if record["phase"] == "edge":
            return self._begin_behind_an_end(keeps=record["keeps_iterator"])
        with rng.unmoved():
            iterator = _iterator(self.loader)
        if record["phase"] == "within":
            self.batches = record["batches"]
            return iterator
        left = list(itertools.islice(iterator, 1))
        if left:  # the loader has more than its length
            return itertools.chain(left, iterator)
        self._tell_epoch()
        return _iterator(self.loader)

    def _begin_behind_an_end(self, *, keeps: bool) -> Iterator[Any]:
        if not is_torch_loader(self.loader):
            return _iterator(self.loader)
        # torchdata makes the iterator that had ended again, and then that of the next epoch.
        with rng.unmoved():
            iterator = _iterator(self.loader)
        if not keeps and self.loader.generator is None:
            _draw_as_torch_does()
        return iterator

    def state(self) -> dict[str, Any]:
        if self._restored is not None:
            return dict(self._restored)
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "phase": "last" if self._is_last else "within" if self._is_within else "edge",
            "batches": 0 if self._is_last else self.batches,
            "keeps_iterator": self._keeps_iterator,
            "num_workers": getattr(self.loader, "num_workers", None),
            "state": self._loader_state(),
        }

    def _loader_state(self) -> Any:
        # Asked before its first iteration, torchdata's loader begins one, and draws.
        if is_torch_loader(self.loader) and _iterator_there(self.loader) is None:
            return None
        return self.loader.state_dict()

    def check(self, record: Record) -> None:
        _check_kind(self.kind, record)
        live = getattr(self.loader, "num_workers", None)
        if record["state"] is not None and record["num_workers"] != live:
            _mismatch("num_workers", live, record["num_workers"], "use as many workers as when it was saved")

    def load(self, record: Record) -> None:
        self.set_epoch(record["epoch"])
        self._restored = dict(record)
        # torchdata's loader takes a state for good: it gets this one when it is certain to use it.
        if record["state"] is not None and not is_torch_loader(self.loader):
            self._tell_epoch()
            self.loader.load_state_dict(record["state"])


class _ByEpoch(_Counted):
    """A loader without a state: it has a position only between two epochs."""

    kind: ClassVar[str] = "epoch"

    @property
    def goes_on(self) -> bool:
        return False

    def begin(self) -> Iterator[Any]:
        if self._is_last:
            self.end()
        keeps = self._restored is not None and self._keeps_iterator
        self._restored = None
        self._is_within = True
        self.batches = 0
        self._tell_epoch()
        with _seeded_apart(self.loader) if keeps else contextlib.nullcontext():
            return _iterator(self.loader)

    def state(self) -> dict[str, Any]:
        if self._is_within and not self._is_last:
            name = type_name(self.loader)
            reason = f"it has no state, and batches of this epoch that the loop was given: {self.batches}"
            raise InvalidInputError(
                f"cannot save the position of a `{name}` in the middle of an epoch: {reason}",
                hint="give it a ResumableSampler, use a loader with state_dict, or save between two epochs",
                what="loader",
                reason=reason,
            )
        return {"kind": self.kind, "epoch": self.epoch, "keeps_iterator": self._keeps_iterator}

    def check(self, record: Record) -> None:
        _check_kind(self.kind, record)

    def load(self, record: Record) -> None:
        self.set_epoch(record["epoch"])
        self._restored = dict(record)


# What is known of the loaders of torch


def _streams() -> tuple[type, ...]:
    data = loaded("torch.utils.data")
    return () if data is None else (data.IterableDataset,)


def _iterator(loader: Any) -> Iterator[Any]:
    return iter(loader)


def _iterator_there(loader: Any) -> Any:
    """Returns the iterator that a `DataLoader` keeps for its next iteration, or `None`."""
    return loader._iterator  # noqa: SLF001 - torch has no public name for it


def _draw_as_torch_does() -> None:
    """Draws what the iterator of a `DataLoader` draws from the global generator when it is made."""
    import torch

    torch.empty((), dtype=torch.int64).random_()


@contextlib.contextmanager
def _seeded_apart(loader: Any) -> Iterator[None]:
    """Lets the iterator of a `DataLoader` draw its seed from a copy of the generator.

    What its sampler draws is drawn as ever.
    """
    import torch

    own = loader.generator
    copy = torch.Generator()
    copy.set_state((torch.default_generator if own is None else own).get_state())
    loader.generator = copy
    try:
        yield
    finally:
        loader.generator = own


# Records


def check_record(record: Any) -> None:
    """Checks the form of what a position's `state` returned, of any kind.

    Raises:
        CorruptionError: None returned it.

    Example:
        >>> check_record({"kind": "epoch", "epoch": 2, "keeps_iterator": False})
    """
    kind = record.get("kind") if isinstance(record, Mapping) else None
    if kind == "sampler":
        read_state(record)
        return
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or set(record) != set(fields):
        raise corrupt("loader position", "a record of one of sampler, stateful, epoch", record)
    for name in ("epoch", "batches"):
        if name in fields and not _is_count(record[name]):
            raise corrupt(f"loader position, `{name}`", "a whole number from 0", record[name])
    if type(record["keeps_iterator"]) is not bool:
        raise corrupt("loader position, `keeps_iterator`", "a bool", record["keeps_iterator"])
    if kind == "stateful":
        _check_stateful(record)


def _check_stateful(record: Record) -> None:
    if record["phase"] not in _PHASES:
        raise corrupt("loader position, `phase`", f"one of {', '.join(_PHASES)}", record["phase"])
    if record["num_workers"] is not None and not _is_count(record["num_workers"]):
        raise corrupt("loader position, `num_workers`", "a whole number or `None`", record["num_workers"])
    if record["phase"] != "edge" and record["state"] is None:
        raise corrupt("loader position, `state`", "the state of a loader within an epoch", None)


def _is_count(value: Any) -> bool:
    return is_count(value, limit=1 << 63)


def _check_kind(kind: str, record: Record) -> None:
    check_record(record)
    if record["kind"] != kind:
        _mismatch("kind", kind, record["kind"], "use a loader of the kind that was saved")


def _mismatch(field: str, here: Any, there: Any, hint: str) -> NoReturn:
    raise MismatchError(
        f"the loader has another `{field}`: expected {here}, but the snapshot has: {there}",
        hint=hint,
        name="loader",
        field=field,
        expected=here,
        found=there,
    )
