"""Exit codes that tell a scheduler how a run ended."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """How a run ended, as the exit code of its process.

    A scheduler or a script around the run starts it again on `RESUMABLE` and on nothing else: the other codes
    need no second start, or need a person first. Python itself ends with 1 on an exception, and a shell
    reports 128 and more for a signal, so none of these can be mistaken for those.

    `torchrun` ends with 1 whatever its workers ended with; see the guide on spot machines and Slurm.

    Attributes:
        FINISHED: The run did all it was asked to do.
        RESUMABLE: It was stopped before its end, and a snapshot is committed: run it again and it goes on.
            The value is that of `EX_TEMPFAIL` in `sysexits.h`.
        NOT_FINITE: It was stopped by a loss or gradient that is not finite. Run again, it would most likely
            do so again.
        TIMED_OUT: It was asked to stop, and its last save was not durable in time. Snapshots that were
            committed before are whole, so it may be run again; but something hangs.

    Example:
        >>> int(ExitCode.RESUMABLE), ExitCode(0).name
        (75, 'FINISHED')
    """

    FINISHED = 0
    RESUMABLE = 75
    NOT_FINITE = 76
    TIMED_OUT = 77
