"""Ranks that work in the background, and meet at the coordinator when each is done.

Their threads can't use collectives: those of training run at the same time. So they talk through the store of
the launcher, which asks nobody to wait. Ranks show that they live by counters that change, judged by the
clock of who looks, because clocks differ between machines.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from varvite.distributed import failures
from varvite.distributed.group import store_lost
from varvite.errors import CheckpointError, IncompleteSaveError

__all__ = ["Meeting"]

_GIVEN, _FAILED = b"g", b"f"


class Meeting:
    """One piece of work of all ranks: each reports, the coordinator collects and concludes.

    Made by `Coordination.meeting`. Each rank calls from one thread, which may be another than that of the
    rounds. Nothing here waits for another rank: `collect` and `conclusion` are called again and again, and
    show meanwhile that this rank lives.

    Attributes:
        name: The name, alike on all ranks.
        rank: This process.
        world_size: Number of ranks.

    Example:
        >>> from varvite.distributed.coordination import Coordination
        >>> meeting = Coordination.join().meeting("save 1")
        >>> meeting.report(b"mine")
        >>> meeting.collect()
        [b'mine']
        >>> meeting.conclude(b"committed")
        >>> meeting.conclusion()
        b'committed'
    """

    LOST_SECONDS: ClassVar[float] = 20.0
    """A rank that shows no sign of life for so long is lost."""
    BEAT_SECONDS: ClassVar[float] = 0.5
    """More frequent beats are not sent."""
    LOOK_SECONDS: ClassVar[float] = 1.0
    """More frequently is not looked for signs of life."""

    def __init__(self, name: str, store: Any, *, rank: int, hosts: Sequence[str]) -> None:
        """Shows the first sign of life.

        Args:
            name: The name; none that was used before.
            store: What the ranks talk through: a store of `torch.distributed` or one that does as much.
            rank: This process.
            hosts: The machine of each rank.

        Raises:
            CheckpointError: The store is lost.
        """
        self.name, self.rank, self.world_size = name, rank, len(hosts)
        self._store, self._hosts = store, list(hosts)
        self._reports: list[bytes | None] = [None] * self.world_size
        self._own: BaseException | None = None
        self._first: CheckpointError | None = None
        self._end: bytes | None = None
        self._beaten_at = -self.BEAT_SECONDS
        self._looked_at = time.monotonic()
        self._counts = dict.fromkeys(range(self.world_size), -1)
        self._silent_seconds = dict.fromkeys(range(self.world_size), 0.0)
        self.beat()

    def beat(self) -> None:
        """Shows that this rank lives. Its thread calls it every 2 s at least while it works.

        Raises:
            CheckpointError: The store is lost.
        """
        now = time.monotonic()
        if self._end is None and now - self._beaten_at >= self.BEAT_SECONDS:
            self._beaten_at = now
            with self._talking():
                self._store.add(self._key("beat", self.rank), 1)

    def report(self, message: bytes | BaseException) -> None:
        """Tells the coordinator what this rank has done, or why it failed.

        Raises:
            CheckpointError: The store is lost.
        """
        if isinstance(message, BaseException):
            self._own = message
            record = _FAILED + failures.encode(message, rank=self.rank)
        else:
            record = _GIVEN + message
        with self._talking():
            self._store.set(self._key("report", self.rank), record)
            if self._own is not None:
                self._store.set(self._key("failed"), b"")

    def collect(self) -> list[bytes] | None:
        """At the coordinator: returns what each rank has reported, `None` while some are missing.

        Call it once more before what can't be taken back: a rank may have given up since.

        Raises:
            CheckpointError: A rank has failed: an error of the same class of Varvite, naming rank and cause;
                its own exception if that is this rank. Or the store is lost.
            IncompleteSaveError: Ranks show no sign of life; `missing_ranks` names them.
        """
        self.beat()
        keys = [self._key("report", rank) for rank in range(self.world_size)]
        with self._talking():
            missing = [rank for rank, report in enumerate(self._reports) if report is None]
            if self._store.check([self._key("failed")]):
                # Also one that has reported may have given up since.
                for rank, key in enumerate(keys):
                    if self._store.check([key]):
                        self._take(rank, bytes(self._store.get(key)))
            elif missing and not self._store.check([keys[rank] for rank in missing]):
                self._look([rank for rank in missing if not self._store.check([keys[rank]])])
            else:
                for rank in missing:
                    self._take(rank, bytes(self._store.get(keys[rank])))
        if any(report is None for report in self._reports):
            return None
        return [report for report in self._reports if report is not None]

    def conclude(self, message: bytes | BaseException) -> None:
        """At the coordinator: tells all how it ended.

        Args:
            message: What `conclusion` gives to all; or the exception that it raises. One that `collect`
                raised reads alike on all ranks.

        Raises:
            CheckpointError: The store is lost.
        """
        if isinstance(message, BaseException):
            is_known = message is self._first or isinstance(message, IncompleteSaveError)
            whose = None if is_known else self.rank
            self._own = message
            record = _FAILED + failures.encode(message, rank=whose)
        else:
            record = _GIVEN + message
        self._end = record
        if self.world_size > 1:
            with self._talking():
                self._store.set(self._key("end"), record)
        else:
            self._forget(everything=True)

    def conclusion(self) -> bytes | None:
        """Returns what the coordinator has told, `None` while it has not.

        Raises:
            CheckpointError: What the coordinator told; but a rank that has failed itself raises its own
                exception. Or the coordinator shows no sign of life, or the store is lost.
        """
        self.beat()
        if self._end is None:
            with self._talking():
                if not self._store.check([self._key("end")]):
                    self._look([0])
                    return None
                self._end = bytes(self._store.get(self._key("end")))
                # The last one to hear of it leaves nothing behind.
                heard = self._store.add(self._key("heard"), 1)
                self._forget(everything=heard == self.world_size - 1)
        if self._end.startswith(_FAILED):
            raise self._own or failures.decode(self._end[1:], self.name)
        return self._end[1:]

    @property
    def is_concluded(self) -> bool:
        """Whether this rank knows what the coordinator has told."""
        return self._end is not None

    def is_heard(self) -> bool:
        """At the coordinator, after it has concluded: whether all others have heard of it.

        Raises:
            CheckpointError: The store is lost.
        """
        with self._talking():
            return self.world_size == 1 or not self._store.check([self._key("end")])

    def _take(self, rank: int, record: bytes) -> None:
        if record.startswith(_FAILED):
            self._first = failures.decode(record[1:], self.name)
            if rank == self.rank and self._own is not None:
                raise self._own
            raise self._first
        self._reports[rank] = record[1:]

    def _look(self, ranks: Sequence[int]) -> None:
        """Raises if ranks have shown no sign of life for long."""
        now = time.monotonic()
        passed = now - self._looked_at
        if passed < self.LOOK_SECONDS:
            return
        self._looked_at = now
        for rank in ranks:
            count = self._store.add(self._key("beat", rank), 0)
            is_alive = count != self._counts[rank]
            # While this process itself stood still, it can't tell what others did.
            silence = self._silent_seconds[rank] + min(passed, self.LOST_SECONDS / 10)
            self._silent_seconds[rank] = 0.0 if is_alive else silence
            self._counts[rank] = count
        lost = [rank for rank in ranks if self._silent_seconds[rank] >= self.LOST_SECONDS]
        if lost:
            raise self._lost(lost)

    def _lost(self, lost: list[int]) -> CheckpointError:
        who = ", ".join(f"{rank} on `{self._hosts[rank]}`" for rank in lost)
        hint = "look at the log of the missing rank: it ended or hangs"
        if self.rank == 0:
            message = f"no sign of life for {self.LOST_SECONDS:g} s in `{self.name}`; missing ranks: {who}"
            return IncompleteSaveError(message, hint=hint, missing_ranks=lost)
        message = f"no sign of life from the coordinator for {self.LOST_SECONDS:g} s in `{self.name}`: {who}"
        error = CheckpointError(message, hint=hint, missing_ranks=lost)
        # Should it live after all, it must not publish what this rank takes for lost.
        self.report(error)
        return error

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self.name, *parts)))

    def _forget(self, *, everything: bool) -> None:
        """Deletes this rank's keys, or also those that are of all."""
        keys = [self._key(what, self.rank) for what in ("beat", "report")]
        if everything:
            keys += [self._key(what, 0) for what in ("beat", "report")]
            keys += [self._key(what) for what in ("failed", "heard", "end")]
        for key in keys:
            self._store.delete_key(key)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise store_lost(self.name, error) from error


class LocalStore(dict[str, Any]):
    """As much of a store as a meeting needs, for one rank alone."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which begins with 0, and returns it."""
        self[key] = self.get(key, 0) + amount
        return int(self[key])

    def set(self, key: str, value: bytes) -> None:
        """Keeps a value."""
        self[key] = value

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are there."""
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> bool:
        """Forgets a key; returns whether it was there."""
        return self.pop(key, None) is not None
