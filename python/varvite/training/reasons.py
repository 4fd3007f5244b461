"""Why a run is to stop, as ranks tell each other."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import IntEnum

from varvite.training.exits import ExitCode

__all__ = ["StopKind", "StopReason"]

_RANK_LIMIT = 1 << 32


class StopKind(IntEnum):
    """What asks a run to stop. Where several do at one step, the last of this list is the reason.

    Attributes:
        FILE: The stop file is there.
        BUDGET: The time that the run was given is used up.
        TIME_LIMIT: The scheduler ends the job soon.
        SPOT: The cloud takes the machine away.
        SIGNAL: A signal came.

    Example:
        >>> max(StopKind.SIGNAL, StopKind.BUDGET).name
        'SIGNAL'
    """

    FILE = 1
    BUDGET = 2
    TIME_LIMIT = 3
    SPOT = 4
    SIGNAL = 5


@dataclass(frozen=True, kw_only=True)
class StopReason:
    """Why the run stops; equal on all ranks.

    Attributes:
        kind: What asked for it.
        rank: The first rank that saw it.
        signal: Name of the signal, for `StopKind.SIGNAL`.

    Example:
        >>> print(StopReason(kind=StopKind.SIGNAL, rank=3, signal="SIGTERM"))
        SIGTERM came to rank 3
        >>> StopReason(kind=StopKind.BUDGET).exit_code
        <ExitCode.RESUMABLE: 75>
    """

    kind: StopKind
    rank: int = 0
    signal: str | None = None

    @property
    def exit_code(self) -> ExitCode:
        """The code to end with once the last save is durable."""
        return ExitCode.RESUMABLE

    def __str__(self) -> str:
        """Returns the reason in words."""
        if self.kind is StopKind.SIGNAL:
            return f"{self.signal} came to rank {self.rank}"
        return f"{_WORDS[self.kind]} (rank {self.rank})"

    def to_code(self) -> int:
        """Returns the reason as a number above 0; the larger one is the reason of all.

        Example:
            >>> reason = StopReason(kind=StopKind.SPOT, rank=1)
            >>> StopReason.from_code(reason.to_code()) == reason
            True
        """
        number = 0 if self.signal is None else int(signal.Signals[self.signal])
        return (int(self.kind) << 40) + (number << 32) + _RANK_LIMIT - 1 - self.rank

    @classmethod
    def from_code(cls, code: int) -> StopReason:
        """Returns the reason of a number that `to_code` returned."""
        number = (code >> 32) & 0xFF
        return cls(
            kind=StopKind(code >> 40),
            rank=_RANK_LIMIT - 1 - code % _RANK_LIMIT,
            signal=signal.Signals(number).name if number else None,
        )


_WORDS = {
    StopKind.FILE: "the stop file is there",
    StopKind.BUDGET: "the time budget is used up",
    StopKind.TIME_LIMIT: "the scheduler's time limit is near",
    StopKind.SPOT: "the cloud takes the machine away",
}
