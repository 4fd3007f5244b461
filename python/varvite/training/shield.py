"""Data-loader workers that outlive the signal that stops the run.

A scheduler signals every process of a job at once. A worker that dies of it takes the trainer with it: the
next batch raises, and the last save is never made. Three times of a worker's life have to be covered:

- Until it runs `worker_init_fn` it has the handlers it was born with, and then torch's own, which end it on
  SIGTERM. So it is started with the signals blocked, a state that processes inherit.
- While it works it ignores them, and system calls that they interrupt go on. At its end it goes on to do so,
  when the interpreter that is taken down has no handlers any more.
- When the trainer ends or lets it go, SIGTERM has to end it, for that is how `multiprocessing` ends workers
  before it waits for them: one that ignored it would keep the trainer from ever ending.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.util  # its exit function, which ends workers, has to be registered before ours
import os
import select
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import (
    ForkContext,
    ForkProcess,
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from multiprocessing.process import BaseProcess
from typing import Any

from varvite.errors import InvalidInputError
from varvite.plain import type_name

__all__ = ["WorkerShield"]


class WorkerShield:
    """Shields the workers of data loaders until it is released.

    Args:
        signals: The signals that workers are to ignore.

    Example:
        >>> import signal, torch
        >>> shield = WorkerShield((signal.SIGTERM,))
        >>> loader = torch.utils.data.DataLoader(range(4), num_workers=2, multiprocessing_context="fork")
        >>> loader = shield.cover(loader)
        >>> [int(batch) for batch in loader]
        [0, 1, 2, 3]
        >>> shield.release()
    """

    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        """Makes the pipe that workers look at."""
        self._signals = signals
        self._process = os.getpid()
        self._released, self._writer = multiprocessing.Pipe(duplex=False)
        atexit.register(self.release)

    def cover(self, loader: Any) -> Any:
        """Shields the workers that a loader will start; see `StopSignal.shield`."""
        if not hasattr(loader, "worker_init_fn") or not hasattr(loader, "num_workers"):
            reason = "must have `num_workers` and `worker_init_fn`, as `torch.utils.data.DataLoader` has"
            raise InvalidInputError(
                f"invalid loader of type `{type_name(loader)}`: {reason}", what="loader", reason=reason
            )
        if loader.num_workers == 0 or isinstance(loader.worker_init_fn, _ShieldedInit):
            return loader
        if getattr(loader, "_iterator", None) is not None:
            reason = "its workers run already"
            raise InvalidInputError(
                f"cannot shield a loader: {reason}",
                hint="shield the loader before its first iteration",
                what="loader",
                reason=reason,
            )
        loader.worker_init_fn = _ShieldedInit(loader.worker_init_fn, self._signals, self._released)
        context = loader.multiprocessing_context or multiprocessing.get_context()
        shielded = _CONTEXTS.get(context.get_start_method())
        if shielded is not None:
            loader.multiprocessing_context = shielded(self._signals)
        return loader

    def release(self) -> None:
        """Lets SIGTERM end the workers again; a second time, or in a forked child, it does nothing."""
        atexit.unregister(self.release)
        if self._process == os.getpid() and not self._writer.closed:
            # A byte that nobody takes out: the end of the pipe would not be seen by forked workers, which
            # hold its writing end too.
            os.write(self._writer.fileno(), b".")
            self._writer.close()


class _ShieldedInit:
    """A `worker_init_fn` that ignores signals, then runs the loader's own. It can be pickled to a worker."""

    def __init__(
        self,
        init_fn: Callable[[int], None] | None,
        signals: tuple[signal.Signals, ...],
        released: Connection,
    ) -> None:
        self._init_fn = init_fn
        self._signals = signals
        self._released = released

    def __call__(self, worker_id: int) -> None:
        for number in self._signals:
            # Not `SIG_IGN`, which programs that a worker starts would inherit.
            signal.signal(number, self._ignore)
            signal.siginterrupt(number, False)
        atexit.register(self._ignore_to_the_end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        if self._init_fn is not None:
            self._init_fn(worker_id)

    def _ignore(self, _number: int, _frame: object) -> None:
        poll = select.poll()
        poll.register(self._released.fileno(), select.POLLIN)
        if poll.poll(0):
            os._exit(0)  # as torch's own handler does when the trainer ends a worker

    def _ignore_to_the_end(self) -> None:
        # The interpreter puts handlers back to the default when it ends, and leaves what is ignored alone.
        for number in self._signals:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _blocked(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Blocks signals in this thread and in what it starts; those that come are delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _StartsBlocked(BaseProcess):
    """A process that starts with signals blocked."""

    shielded_signals: tuple[signal.Signals, ...] = ()

    def start(self) -> None:
        """Starts the process."""
        # Its start would unblock SIGTERM and SIGINT, as it does around a process of its own.
        multiprocessing.resource_tracker.ensure_running()
        with _blocked(self.shielded_signals):
            super().start()


class _Fork(_StartsBlocked, ForkProcess):
    pass


class _Spawn(_StartsBlocked, SpawnProcess):
    pass


class _ForkServer(_StartsBlocked, ForkServerProcess):
    pass


def _starter(kind: type[_StartsBlocked], signals: tuple[signal.Signals, ...]) -> Callable[..., BaseProcess]:
    def make(*arguments: Any, **named: Any) -> BaseProcess:
        process = kind(*arguments, **named)
        process.shielded_signals = signals
        return process

    return make


class _ForkShielded(ForkContext):
    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        self.Process = _starter(_Fork, signals)  # type: ignore[assignment,misc]


class _SpawnShielded(SpawnContext):
    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        self.Process = _starter(_Spawn, signals)  # type: ignore[assignment,misc]


class _ForkServerShielded(ForkServerContext):
    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        self.Process = _starter(_ForkServer, signals)  # type: ignore[assignment,misc]


_CONTEXTS: dict[str, Callable[[tuple[signal.Signals, ...]], Any]] = {
    "fork": _ForkShielded,
    "spawn": _SpawnShielded,
    "forkserver": _ForkServerShielded,
}
