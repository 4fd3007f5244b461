"""When to save: by steps, by time, or as often as pays for what a save costs and how often machines fail.

Saving often costs time at every save; saving seldom loses more work at every failure. With the cost C of a
save to training and the mean time M between failures, the least is lost at an interval near sqrt(2 C M)
(J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM
17(9), 1974). J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22(3), 2006, gives the form for a cost that is not small beside M, which is
used here; for a small cost the two are the same.

Example:
    >>> autosave = Autosave(every_steps=100)
    >>> [step for step in range(300) if autosave.due(step)]
    [99, 199, 299]
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

from varvite.errors import InvalidInputError
from varvite.training.checks import check_count, check_positive

__all__ = ["Autosave", "best_interval_seconds", "overhead_share"]

_MEASURED_SAVES = 8
"""How many of the last saves the cost is the median of: the first ones make buffers, and one can be slow."""


def best_interval_seconds(cost_seconds: float, mean_time_between_failures_seconds: float) -> float:
    """Returns the training time between two saves that loses the least, by Daly's higher-order form.

    Args:
        cost_seconds: What one save costs training.
        mean_time_between_failures_seconds: Of the whole job: that of one machine divided by their number.

    Returns:
        Seconds from the end of one save to the start of the next. 0 where a save costs nothing.

    Example:
        >>> round(best_interval_seconds(2.0, 86_400.0))
        587
    """
    if cost_seconds >= 2 * mean_time_between_failures_seconds:
        return mean_time_between_failures_seconds
    ratio = cost_seconds / (2 * mean_time_between_failures_seconds)
    young = math.sqrt(2 * cost_seconds * mean_time_between_failures_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


def overhead_share(interval_seconds: float, cost_seconds: float) -> float:
    """Returns the share of the run that saves take, from 0 to 1.

    Example:
        >>> overhead_share(99.0, 1.0)
        0.01
    """
    total_seconds = interval_seconds + cost_seconds
    return cost_seconds / total_seconds if total_seconds > 0 else 0.0


class Autosave:
    """Says when a save is due. Of several rules the first that is due decides.

    Times are measured on the monotonic clock and differ from rank to rank: under several ranks let a
    `Boundary` decide, which agrees. Every save that is made is told by `saved`, whatever it was made for.

    Args:
        every_steps: A save after this many steps, counted from the start of the run and not from the last
            save, so that a resumed run saves at the same steps.
        every_seconds: A save when so much time has passed since the last one.
        mean_time_between_failures_seconds: A save at the interval that loses the least for this time between
            failures of the whole job and for the measured cost of the saves so far.
        least_seconds: The interval by cost is never below this; before the first save it is this.
        most_seconds: The interval by cost is never above this.

    Raises:
        InvalidInputError: No rule is given, or a number is not above 0.

    Example:
        >>> autosave = Autosave(mean_time_between_failures_seconds=86_400)
        >>> autosave.interval_seconds
        30.0
        >>> autosave.saved(0, blocked_seconds=2.0)
        >>> round(autosave.interval_seconds)
        587
        >>> print(autosave.describe())
        a save every 587 s, which costs 2.000 s: overhead 0.34 %, expected loss 293 s a failure
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        mean_time_between_failures_seconds: float | None = None,
        *,
        least_seconds: float = 30.0,
        most_seconds: float = 3600.0,
    ) -> None:
        """Checks the rules and starts the clock."""
        rules = {
            "every_seconds": every_seconds,
            "mean_time_between_failures_seconds": mean_time_between_failures_seconds,
            "least_seconds": least_seconds,
            "most_seconds": most_seconds,
        }
        for name, seconds in rules.items():
            if seconds is not None:
                check_positive(name, seconds)
        if every_steps is not None:
            check_count("every_steps", every_steps, least=1)
        if every_steps is None and every_seconds is None and mean_time_between_failures_seconds is None:
            reason = "pass every_steps, every_seconds or mean_time_between_failures_seconds"
            raise InvalidInputError(f"no rule for saving: {reason}", what="every_steps", reason=reason)
        if least_seconds > most_seconds:
            reason = f"must be at least least_seconds, which is {least_seconds:g}"
            message = f"invalid most_seconds `{most_seconds:g}`: {reason}"
            raise InvalidInputError(message, what="most_seconds", reason=reason)
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._failure_seconds = mean_time_between_failures_seconds
        self._bounds = (least_seconds, most_seconds)
        self._costs: deque[float] = deque(maxlen=_MEASURED_SAVES)
        self._saved_at = self._started_at = time.monotonic()
        self._saved_step: int | None = None
        self._boundary_count = 0
        self._boundary_at = self._started_at

    def is_saved(self, step: int) -> bool:
        """Returns whether the last save was made after this very step, and no other step was done since.

        A step that comes again after a rollback has another state, and is not saved yet.

        Args:
            step: The step just finished.
        """
        return step == self._saved_step

    @property
    def cost_seconds(self) -> float | None:
        """What a save costs training: the median of the last ones; `None` before the first."""
        return statistics.median(self._costs) if self._costs else None

    @property
    def interval_seconds(self) -> float | None:
        """Seconds between two saves by all rules together; `None` while a step has not been measured."""
        intervals = [self._interval_by_time(), self._interval_by_steps()]
        return min((seconds for seconds in intervals if seconds is not None), default=None)

    @property
    def expected_lost_seconds(self) -> float | None:
        """Work that a failure is expected to lose: half of an interval, for a failure comes at any time."""
        interval_seconds = self.interval_seconds
        return None if interval_seconds is None else interval_seconds / 2

    def due(self, step: int) -> bool:
        """Returns whether a save is due after this step. Call it once at each step.

        Args:
            step: The step just finished, from 0.

        Example:
            >>> autosave = Autosave(every_steps=2)
            >>> autosave.due(1), autosave.due(2)
            (True, False)
        """
        now = time.monotonic()
        self._boundary_count += 1
        self._boundary_at = now
        if self.is_saved(step):
            return False
        self._saved_step = None
        if self._every_steps is not None and (step + 1) % self._every_steps == 0:
            return True
        interval_seconds = self._interval_by_time()
        return interval_seconds is not None and now - self._saved_at >= interval_seconds

    def saved(self, step: int, blocked_seconds: float) -> None:
        """Takes note of a save that was made.

        Args:
            step: The step it was made after.
            blocked_seconds: How long training waited for it: `handle.timings.blocked`.

        Raises:
            InvalidInputError: The time is negative or no time.
        """
        self._costs.append(check_positive("blocked_seconds", blocked_seconds, or_zero=True))
        self.restored(step)

    def restored(self, step: int) -> None:
        """Takes note that the run stands at a step that is saved, as after a resume or a rollback.

        Args:
            step: The step of the snapshot.

        Example:
            >>> autosave = Autosave(every_steps=1)
            >>> autosave.restored(4)
            >>> autosave.due(4), autosave.due(5)
            (False, True)
        """
        self._saved_step = step
        self._saved_at = time.monotonic()

    def describe(self) -> str:
        """Returns a line for people: the interval, what it costs, and what a failure is expected to lose."""
        interval_seconds, cost_seconds = self.interval_seconds, self.cost_seconds
        if interval_seconds is None:
            return f"a save every {self._every_steps} steps; no step is measured yet"
        loss = f"expected loss {interval_seconds / 2:.0f} s a failure"
        if cost_seconds is None:
            return f"a save every {interval_seconds:.0f} s: {loss}; no save is measured yet"
        share = 100 * overhead_share(interval_seconds, cost_seconds)
        return (
            f"a save every {interval_seconds:.0f} s, which costs {cost_seconds:.3f} s: "
            f"overhead {share:.2f} %, {loss}"
        )

    def _interval_by_time(self) -> float | None:
        intervals = [] if self._every_seconds is None else [self._every_seconds]
        if self._failure_seconds is not None:
            least, most = self._bounds
            cost_seconds = self.cost_seconds
            best = (
                least if cost_seconds is None else best_interval_seconds(cost_seconds, self._failure_seconds)
            )
            intervals.append(min(max(best, least), most))
        return min(intervals, default=None)

    def _interval_by_steps(self) -> float | None:
        if self._every_steps is None or self._boundary_count == 0:
            return None
        # Without what the saves took: an interval is the training between two of them.
        spent = self._boundary_at - self._started_at
        return self._every_steps * spent / self._boundary_count
