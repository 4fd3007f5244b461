"""What a manager does with the other ranks of a run: nothing, where it is alone.

`varvite.distributed.together` has the other kind, for ranks of `torch.distributed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from varvite.casting import refuse_idle
from varvite.errors import InvalidInputError

if TYPE_CHECKING:
    from varvite._native import Engine
    from varvite.native_types import Report
    from varvite.plans import Problems
    from varvite.saving import Payload
    from varvite.settings import Settings
    from varvite.staging import Staging

__all__ = ["Alone", "Started", "facts_of", "in_step"]

Started = tuple[Any, "Report | None"]
"""The job of a save that runs, and the report of one that has ended."""


class Alone:
    """The only rank, or one of several that the program itself brings together."""

    is_coordinator = True

    def __init__(self, settings: Settings) -> None:
        """Knows who this is."""
        self._settings = settings

    def open(self, make: Callable[[], Engine]) -> Engine:
        """Opens the engine of this rank."""
        return make()

    def close(self) -> None:
        """Lets go of what connects this rank with others."""

    def start(self, engine: Engine, describe: Callable[[], Payload], staging: Staging | None) -> Started:
        """Starts or does a save.

        Args:
            engine: The engine of this rank.
            describe: Gives the state, or raises what stands against the save.
            staging: When bytes are taken; `None` where the caller waits for the whole save.

        Raises:
            InvalidInputError: Several ranks save together, and nothing connects them.
        """
        payload = describe()
        self._refuse_several()
        refuse_idle(payload.idle_patterns, payload.tensors)
        if self._settings.casts is not None:
            self._settings.casts.settle()
        given = {**payload.labels, **payload.structures}
        if staging is None:
            return None, engine.save_sync(payload.step, payload.tensors, **given)
        staging.mark(payload.tensors)
        job = engine.save(payload.step, payload.tensors, **given)
        staging.started(job)
        return job, None

    def decide(self, what: str, make: Callable[[], Any]) -> Any:
        """Returns what the coordinator makes, on every rank.

        Args:
            what: The decision, for messages.
            make: Called on the coordinator alone; gives plain data.
        """
        del what
        return make()

    def together(self, what: str, error: Exception | None = None) -> None:
        """Goes on only where every rank does: an error of one is raised on all.

        Args:
            what: What was done, for messages.
            error: What kept this rank from it.
        """
        del what
        if error is not None:
            raise error

    def unite(self, problems: Problems) -> Problems:
        """Returns what stands against a restore, seen over all ranks."""
        return problems

    def _refuse_several(self) -> None:
        settings = self._settings
        if settings.world_size == 1:
            return
        which = f"this manager is rank {settings.rank} of {settings.world_size}"
        reason = f"{which}, and nothing connects it with the others"
        raise InvalidInputError(
            f"cannot save: {reason}",
            hint="set up torch.distributed before the manager is made, or hand the id of a create_snapshot() "
            "to each rank's save_rank() and call finalize_snapshot()",
            what="world_size",
            reason=reason,
            rank=settings.rank,
            world_size=settings.world_size,
        )


@contextlib.contextmanager
def in_step(ranks: Alone | None, what: str) -> Iterator[None]:
    """Does one phase, after which every rank goes on or none.

    Args:
        ranks: All that do the same; `None` where this one does it alone.
        what: The phase, for messages.

    Example:
        >>> with in_step(None, "look"):
        ...     pass
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        if ranks is None:
            raise
        error = failure
    if ranks is not None:
        ranks.together(what, error)
    if error is not None:
        raise error


def facts_of(settings: Settings, version: str) -> Mapping[str, Any]:
    """Returns what must be the same on all ranks of a run."""
    return {
        "varvite version": version,
        "chunk_bytes": settings.chunk_bytes,
        "save_dtype": None if settings.casts is None else settings.casts.rules(),
        "read_only": settings.access == "read",
    }
