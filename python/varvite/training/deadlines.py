"""Deadlines on the monotonic clock: pure functions of an environment, two clocks and what was measured.

The wall clock is read once, when a run starts. After that a clock that is set back or forward changes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from varvite.errors import InvalidInputError

__all__ = [
    "needed_seconds",
    "on_monotonic_clock",
    "slurm_end_seconds",
    "usual_longest",
]

_SAVE_FACTOR = 3.0
"""Times the duration of the last save to leave before a deadline: storage is slow when all jobs stop."""


def slurm_end_seconds(environment: Mapping[str, str]) -> float | None:
    """Returns when Slurm ends this job, in seconds of the wall clock, or `None` where that is not known.

    Args:
        environment: The variables of the process; `SLURM_JOB_END_TIME` is read.

    Raises:
        InvalidInputError: The variable holds something else than a time.

    Example:
        >>> slurm_end_seconds({"SLURM_JOB_END_TIME": "1700000000"})
        1700000000.0
        >>> slurm_end_seconds({}) is None
        True
    """
    text = environment.get("SLURM_JOB_END_TIME", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        reason = "must be a Unix time in whole seconds"
        raise InvalidInputError(
            f"invalid SLURM_JOB_END_TIME `{text[:40]}`: {reason}", what="SLURM_JOB_END_TIME", reason=reason
        )
    return float(text)


def on_monotonic_clock(wall_seconds: float, *, wall_now: float, monotonic_now: float) -> float:
    """Returns a time of the wall clock as a time of the monotonic clock.

    Example:
        >>> on_monotonic_clock(1700000060.0, wall_now=1700000000.0, monotonic_now=5.0)
        65.0
    """
    return monotonic_now + (wall_seconds - wall_now)


def needed_seconds(least_seconds: float, saved_seconds: float, step_seconds: float) -> float:
    """Returns how long before a deadline a run has to stop.

    A boundary at which more than this is left may go on: the next one comes a step later, and then there
    is still time for the save.

    Args:
        least_seconds: The margin that was asked for.
        saved_seconds: Time until the last save was durable; 0 if there was none.
        step_seconds: The usual time between two boundaries; 0 if it is not known.

    Example:
        >>> needed_seconds(60.0, 5.0, 0.5)
        60.5
        >>> needed_seconds(60.0, 40.0, 0.5)
        120.5
    """
    return max(least_seconds, _SAVE_FACTOR * saved_seconds) + step_seconds


def usual_longest(step_seconds: Sequence[float]) -> float:
    """Returns the second longest of some steps: one that was long for once, by compiling, is no measure.

    Args:
        step_seconds: The durations of recent steps.

    Returns:
        Seconds; 0 for fewer than two steps.

    Example:
        >>> usual_longest([0.5, 300.0, 0.6])
        0.6
    """
    return sorted(step_seconds)[-2] if len(step_seconds) > 1 else 0.0
