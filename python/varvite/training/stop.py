"""`StopSignal`: notices that a run has to stop, and stops all ranks at the same step.

A handler only takes note; what is to be done is done by the loop, at the end of a step, where the state is
whole. Whatever asks for the stop, all ranks learn of it at the same step: a rank that left the loop by what
it alone knows would leave the others waiting in their next collective, and nothing would be saved.

Example:
    >>> import signal
    >>> with StopSignal(slurm=False) as stop:
    ...     for step in range(10):
    ...         if step == 3:
    ...             signal.raise_signal(signal.SIGTERM)
    ...         reason = stop.check(step)
    ...         if reason is not None:
    ...             break
    ...     stop.done()
    >>> print(step, reason)
    3 SIGTERM came to rank 0
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from varvite._native import Watchdog
from varvite.errors import InvalidInputError, MismatchError
from varvite.notices import warn
from varvite.training.agreement import Agreement, is_first_on_machine
from varvite.training.checks import check_positive
from varvite.training.deadlines import (
    needed_seconds,
    on_monotonic_clock,
    slurm_end_seconds,
    usual_longest,
)
from varvite.training.exits import ExitCode
from varvite.training.reasons import StopKind, StopReason
from varvite.training.spot import SpotPoller

if TYPE_CHECKING:
    from varvite.training.shield import WorkerShield

__all__ = ["StopSignal"]

Handler = Callable[[int, FrameType | None], Any] | int | None

_FILE_INTERVAL_SECONDS = 1.0
_MEASURED_STEPS = 64


class StopSignal:
    """Notices signals, time limits, a file and spot notices, and says at a step boundary when to stop.

    Enter it as a context in the main thread, outside of the manager's, on every rank. Handlers that were
    there before are called too, and come back at the end. The first Ctrl-C asks for a stop at the next
    boundary, the second one interrupts as always. A handler runs when the main thread is next in Python: a
    call of a library that never returns is not ended by it.

    Once a stop is asked for, a hard timer runs until `done`: a save that hangs ends the process with
    `ExitCode.TIMED_OUT` instead of keeping its machines.

    Args:
        signals: Names of the signals that ask for a stop.
        budget_seconds: Time that the run is given, from here on.
        stop_file: A path; the run stops when something is there. Only the first rank looks, once a second.
            Remove the file before the next run.
        slurm: Whether to stop before the time that Slurm ends the job at, `SLURM_JOB_END_TIME`.
        spot: `aws`, `gcp` or `azure` to ask that cloud for notices, or a `SpotPoller`. The launcher's first
            process on each machine asks.
        margin_seconds: Least time to leave before a deadline for the last save; three times the save that
            `saved_in` was told of is left, if that is more. The time of a step comes on top. An evaluation
            that comes more seldom than every 32 steps is not counted as a step: leave time for it here.
        hard_timeout_seconds: From a stop being asked for until the process is ended; less where a scheduler
            or cloud ends it sooner, but never less than the margin. `None` for no timer.
        agreement: How ranks agree; one of all ranks by default.

    Raises:
        InvalidInputError: An argument is not legal.

    Example:
        >>> stop = StopSignal(signals=(), budget_seconds=3600, slurm=False)
        >>> stop.check(0) is None
        True
    """

    def __init__(
        self,
        signals: Iterable[str] = ("SIGTERM", "SIGINT", "SIGUSR1"),
        *,
        budget_seconds: float | None = None,
        stop_file: str | os.PathLike[str] | None = None,
        slurm: bool = True,
        spot: str | SpotPoller | None = None,
        margin_seconds: float = 60.0,
        hard_timeout_seconds: float | None = 600.0,
        agreement: Agreement | None = None,
    ) -> None:
        """Checks the arguments and reads the clocks; nothing is installed before it is entered."""
        self._signals = _read_signals(signals)
        self._margin_seconds = check_positive("margin_seconds", margin_seconds, or_zero=True)
        if hard_timeout_seconds is not None:
            check_positive("hard_timeout_seconds", hard_timeout_seconds)
        self._hard_timeout_seconds = hard_timeout_seconds
        self._budget_at = _read_budget(budget_seconds, self._margin_seconds)
        self._limit_at = _read_slurm() if slurm else None
        self._stop_file = None if stop_file is None else os.fspath(stop_file)
        self._file_asked_at: float | None = None
        self._poller = SpotPoller(spot) if isinstance(spot, str) else spot
        self._agreement = Agreement() if agreement is None else agreement
        self._saved_seconds = 0.0
        self._boundary_at: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=_MEASURED_STEPS)
        self._signal: signal.Signals | None = None
        self._interrupt_count = 0
        self._reason: StopReason | None = None
        self._watchdogs: list[Watchdog] = []
        self._is_done = False
        self._process = 0
        self._is_installed = False
        self._earlier: dict[signal.Signals, Handler] = {}
        self._shield: WorkerShield | None = None

    # ---- handlers ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Installs the handlers and starts to ask for spot notices.

        Raises:
            InvalidInputError: This is not the main thread, or it is entered already.
        """
        if self._is_installed:
            reason = "it is entered already"
            raise InvalidInputError(f"cannot enter a stop signal: {reason}", what="stop", reason=reason)
        if self._signals and threading.current_thread() is not threading.main_thread():
            reason = "only the main thread can install them"
            raise InvalidInputError(
                f"cannot install signal handlers in thread `{threading.current_thread().name}`: {reason}",
                hint="enter the stop signal in the main thread, or pass signals=()",
                what="signals",
                reason=reason,
            )
        self._process = os.getpid()
        self._is_installed = True
        for number in self._signals:
            earlier = signal.getsignal(number)
            # Whoever started us without SIGINT, as a shell does in the background, means us not to have it.
            if number is signal.SIGINT and earlier is signal.SIG_IGN:
                continue
            self._earlier[number] = earlier
            signal.signal(number, self._handle)
        if self._poller is not None and is_first_on_machine():
            self._poller.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Puts the earlier handlers back, ends the hard timer, and lets go of the shielded workers."""
        for number, earlier in self._earlier.items():
            # Handlers that were installed over ours stay, and those that Python did not install can't be put
            # back. Ours only passes on what it gets from now on.
            if signal.getsignal(number) == self._handle and earlier is not None:
                signal.signal(number, earlier)
        self._is_installed = False
        self.done()
        if self._poller is not None:
            self._poller.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Takes note of a signal. It may interrupt any line of the main thread, so it takes no lock."""
        if os.getpid() != self._process:
            # A forked child: none of this is its business, but `terminate()` of its parent must end it.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        came = signal.Signals(number)
        if self._is_installed and self._signal is None:
            self._signal = came
            self._start_timer()
        if self._is_installed and came is signal.SIGINT:
            self._interrupt_count += 1
        earlier = self._earlier.get(came)
        if earlier is signal.default_int_handler and self._is_installed and self._interrupt_count < 2:
            return
        if callable(earlier):
            earlier(number, frame)

    # ---- the step boundary ---------------------------------------------------------------------

    @property
    def agreement(self) -> Agreement:
        """How the ranks agree."""
        return self._agreement

    @property
    def requested(self) -> bool:
        """True if a signal or a spot notice came to this rank, or the ranks agreed to stop.

        To leave an evaluation early in a run of one process. Under several ranks it differs from rank to
        rank: there ask `check`.
        """
        _hear_signals()
        return self._reason is not None or self._signal is not None or self._spot_notice() is not None

    def check(self, step: int) -> StopReason | None:
        """Returns why to stop now, or `None` to go on. Call it on every rank at the end of each step.

        It is one small collective, and none once a stop is agreed. It may be called more than once a step,
        such as in an evaluation, as long as all ranks do.

        Args:
            step: The step just finished; all ranks must be at the same one.

        Returns:
            The reason, equal on all ranks; at every later call too.

        Raises:
            MismatchError: The ranks are at different steps.
            CheckpointError: A rank was lost, or did not come in time.
        """
        if self._reason is None:
            code, most, least = self._agreement.maximum([self.poll(), step, -step])
            check_steps(step, -least, most)
            self.settle(code)
        return self._reason

    def poll(self) -> int:
        """Returns what this rank sees, as a number for `settle`; 0 if it sees no reason to stop.

        For those who agree by a collective of their own, such as `Boundary`. Call it once a step.

        Raises:
            InvalidInputError: It was never entered, so that its signals would not be heard.
        """
        if self._signals and self._process == 0:
            reason = "it was not entered, and would hear no signal"
            raise InvalidInputError(
                f"cannot ask a stop signal: {reason}",
                hint="put `with StopSignal() as stop:` around the training loop, or pass signals=()",
                what="stop",
                reason=reason,
            )
        _hear_signals()
        now = time.monotonic()
        if self._boundary_at is not None:
            self._step_seconds.append(now - self._boundary_at)
        self._boundary_at = now
        kind = self._look(now)
        if kind is None:
            return 0
        name = self._signal.name if kind is StopKind.SIGNAL and self._signal is not None else None
        return StopReason(kind=kind, rank=self._agreement.rank, signal=name).to_code()

    def settle(self, code: int) -> StopReason | None:
        """Takes the number that the ranks agreed on and returns the reason it stands for.

        Args:
            code: The largest of the ranks' numbers.
        """
        if self._reason is None and code > 0:
            self._reason = StopReason.from_code(code)
            if not self._watchdogs:
                self._start_timer()
        return self._reason

    def saved_in(self, seconds: float) -> None:
        """Takes note of how long a save took until it was durable, for the margin before a deadline.

        Raises:
            InvalidInputError: The time is negative or no time.
        """
        self._saved_seconds = check_positive("seconds", seconds, or_zero=True)

    def done(self) -> None:
        """Ends the hard timer and lets go of shielded workers: the last save is durable.

        Call it when `handle.wait()`, `flush` or `save_final` has returned, not before. No timer starts
        after it.
        """
        self._is_done = True
        while self._watchdogs:
            self._watchdogs.pop().cancel()
        if self._shield is not None:
            self._shield.release()
            self._shield = None

    def shield(self, loader: Any) -> Any:
        """Makes the workers of a data loader ignore the signals, from their very start.

        Without it a signal to the whole job ends the workers, and the trainer's next batch raises before
        anything is saved. Workers end as always with their loader, and at the latest with this process.

        Args:
            loader: A `torch.utils.data.DataLoader`, or another with `num_workers` and `worker_init_fn`,
                before its first iteration. Any start method will do.

        Returns:
            The same loader.

        Raises:
            InvalidInputError: It is no such loader, or its workers run already.
        """
        if self._shield is None:
            from varvite.training.shield import WorkerShield

            self._shield = WorkerShield(self._signals)
        return self._shield.cover(loader)

    # ---- what this rank sees -------------------------------------------------------------------

    def _look(self, now: float) -> StopKind | None:
        if self._signal is not None:
            return StopKind.SIGNAL
        if self._spot_notice() is not None:
            return StopKind.SPOT
        if self._limit_at is not None or self._budget_at is not None:
            step_seconds = usual_longest(self._step_seconds)
            margin = needed_seconds(self._margin_seconds, self._saved_seconds, step_seconds)
            if self._limit_at is not None and self._limit_at - now <= margin:
                return StopKind.TIME_LIMIT
            if self._budget_at is not None and self._budget_at - now <= margin:
                return StopKind.BUDGET
        return StopKind.FILE if self._sees_file(now) else None

    def _spot_notice(self) -> Any:
        return None if self._poller is None else self._poller.notice

    def _sees_file(self, now: float) -> bool:
        if self._stop_file is None or self._agreement.rank != 0:
            return False
        if self._file_asked_at is not None and now - self._file_asked_at < _FILE_INTERVAL_SECONDS:
            return False
        is_first_look, self._file_asked_at = self._file_asked_at is None, now
        is_there = os.path.lexists(self._stop_file)
        if is_there and is_first_look:
            warn(f"the stop file is there from the start, and stops the run at once: {self._stop_file}")
        return is_there

    def _start_timer(self) -> None:
        """Starts the hard timer. A signal may come between its lines: then there are two, and both end."""
        if self._hard_timeout_seconds is None or self._is_done:
            return
        notice = self._spot_notice()
        ends = [self._limit_at, None if notice is None else notice.at_seconds]
        left_seconds = min((end - time.monotonic() for end in ends if end is not None), default=None)
        seconds = self._hard_timeout_seconds
        if left_seconds is not None:
            seconds = min(seconds, max(left_seconds, self._margin_seconds, 1.0))
        message = f"varvite: asked to stop, and the last save was not durable within {seconds:.0f} s"
        self._watchdogs.append(Watchdog(seconds, int(ExitCode.TIMED_OUT), message))


def _hear_signals() -> None:
    """Runs the handlers of signals that a thread of a library took.

    CPython before 3.13 looks for them when the main thread has given up the interpreter's lock and taken it
    again, and a loop may never do so.
    """
    select.select((), (), (), 0)


def check_steps(step: int, least: int, most: int) -> None:
    """Refuses ranks that are at different steps.

    Args:
        step: This rank's step.
        least: The smallest of all ranks.
        most: The largest of all ranks.

    Raises:
        MismatchError: They differ.

    Example:
        >>> check_steps(3, 3, 3)
    """
    if least != most:
        raise MismatchError(
            f"ranks are at different steps: {least} to {most}, this one at {step}",
            hint="call it once a step on every rank, with the step they share",
            name="step",
            field="step",
            expected=step,
            found=most if most != step else least,
        )


def _read_signals(signals: Iterable[str]) -> tuple[signal.Signals, ...]:
    reason = "must be names of signals that can be handled, such as `SIGTERM`"
    if isinstance(signals, str):
        message = f"invalid signals `{signals}`: must be a sequence of names, not one"
        hint = f'pass signals=("{signals}",)'
        raise InvalidInputError(message, hint=hint, what="signals", reason=reason)
    numbers = []
    for name in signals:
        number = getattr(signal.Signals, name, None) if isinstance(name, str) else None
        if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
            raise InvalidInputError(f"invalid signal `{name}`: {reason}", what="signals", reason=reason)
        numbers.append(number)
    return tuple(dict.fromkeys(numbers))


def _read_budget(budget_seconds: float | None, margin: float) -> float | None:
    """Returns when the budget is used up, on the monotonic clock."""
    if budget_seconds is None:
        return None
    check_positive("budget_seconds", budget_seconds)
    if budget_seconds <= margin:
        reason = f"must be more than margin_seconds, which is {margin:g}"
        raise InvalidInputError(
            f"invalid budget_seconds `{budget_seconds:g}`: {reason}",
            hint="give the run more time, or pass a smaller margin_seconds",
            what="budget_seconds",
            reason=reason,
        )
    return time.monotonic() + budget_seconds


def _read_slurm() -> float | None:
    """Returns when Slurm ends the job, on the monotonic clock."""
    end_seconds = slurm_end_seconds(os.environ)
    if end_seconds is None:
        return None
    wall_now = time.time()
    if end_seconds <= wall_now:
        # That of another job, inherited by a shell that outlived it: a run would stop at its first step.
        warn(f"SLURM_JOB_END_TIME has passed already and is not used: {end_seconds:.0f}")
        return None
    return on_monotonic_clock(end_seconds, wall_now=wall_now, monotonic_now=time.monotonic())
