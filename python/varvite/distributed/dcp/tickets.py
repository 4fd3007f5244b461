"""The way of a session's ticket from the coordinator to the ranks.

It is given to each rank with its plan, and PyTorch hands the plan to the planner first. A planner that caches
plans (`enable_plan_caching=True`) gives the storage an older plan in its place, with the ticket of an older
session. So a ticket notes its own arrival, in the thread in which PyTorch runs the save, and the storage asks
for what has arrived.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

__all__ = ["Ticket", "clear_arrived", "take_arrived"]

_thread = threading.local()


class Ticket(NamedTuple):
    """What one rank needs to write its part.

    Attributes:
        session: The ticket of the session, as the engine made it.
        rank: The rank whose plan it came with.
        world_size: Number of ranks.
    """

    session: str
    rank: int
    world_size: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles so that it notes its arrival."""
        return _arrive, tuple(self)


def clear_arrived() -> None:
    """Forgets what has arrived in this thread before."""
    _thread.ticket = None


def take_arrived() -> Ticket | None:
    """Returns the ticket that has arrived in this thread last, once; `None` where none came by message.

    Example:
        >>> import pickle
        >>> clear_arrived()
        >>> sent = pickle.dumps(Ticket("a session", 1, 2))
        >>> _ = pickle.loads(sent)
        >>> take_arrived(), take_arrived()
        (Ticket(session='a session', rank=1, world_size=2), None)
    """
    ticket: Ticket | None = getattr(_thread, "ticket", None)
    clear_arrived()
    return ticket


def _arrive(session: str, rank: int, world_size: int) -> Ticket:
    ticket = _thread.ticket = Ticket(session, rank, world_size)
    return ticket
