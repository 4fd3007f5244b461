"""How a run can have gone on after a restart, as the monitor finds it and a receipt keeps it."""

from __future__ import annotations

import enum

__all__ = ["Verdict"]


class Verdict(enum.Enum):
    """Whether the steps after a restart continue those before the snapshot.

    Example:
        >>> Verdict("not evaluated").name
        'NOT_EVALUATED'
    """

    CONTINUOUS = "continuous"
    DISCONTINUOUS = "discontinuous"
    NOT_EVALUATED = "not evaluated"
