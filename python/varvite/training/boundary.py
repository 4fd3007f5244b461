"""`Boundary`: everything that is decided at the end of a step, in one collective.

Example:
    >>> from varvite.training.autosave import Autosave
    >>> boundary = Boundary(autosave=Autosave(every_steps=2))
    >>> [boundary.decide(step).save for step in range(4)]
    [False, True, False, True]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varvite.training.agreement import Agreement
from varvite.training.autosave import Autosave
from varvite.training.reasons import StopReason
from varvite.training.stop import StopSignal, check_steps

__all__ = ["Boundary", "Decision"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What all ranks do at the end of a step.

    Attributes:
        stop: Why to leave the loop, or `None` to go on.
        save: Whether to save now; true where the run stops, unless this step is saved already.
        votes: The largest of each vote over the ranks.

    Example:
        >>> Decision().save
        False
    """

    stop: StopReason | None = None
    save: bool = False
    votes: tuple[int, ...] = ()


class Boundary:
    """Decides at the end of each step whether to save and whether to stop, alike on all ranks.

    Args:
        stop: What asks for a stop.
        autosave: What asks for a save. Tell it of every save.
        agreement: How ranks agree; by default as `stop` does, or all ranks.

    Example:
        >>> import signal
        >>> with StopSignal(slurm=False) as stop:
        ...     boundary = Boundary(stop)
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     decision = boundary.decide(7)
        >>> print(decision.save, decision.stop)
        True SIGUSR1 came to rank 0
    """

    def __init__(
        self,
        stop: StopSignal | None = None,
        autosave: Autosave | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        """Keeps what decides."""
        self._stop = stop
        self._autosave = autosave
        if agreement is None:
            agreement = Agreement() if stop is None else stop.agreement
        self._agreement = agreement

    def decide(self, step: int, *, save: bool = False, votes: Sequence[int] = ()) -> Decision:
        """Returns what to do after a step. Call it on every rank at the end of each step.

        Args:
            step: The step just finished; all ranks must be at the same one.
            save: Whether this rank asks for a save for a reason of its own.
            votes: At most 9 integers of 64 bits for other decisions, as many on each rank.

        Returns:
            The decision, equal on all ranks.

        Raises:
            MismatchError: The ranks are at different steps.
            CheckpointError: A rank was lost, or did not come in time.
        """
        stop, autosave = self._stop, self._autosave
        is_saved = autosave is not None and autosave.is_saved(step)
        is_due = (autosave is not None and autosave.due(step)) or save
        mine = [step, -step, 0 if stop is None else stop.poll(), int(is_due), int(not is_saved), *votes]
        most, least, code, due, unsaved, *agreed = self._agreement.maximum(mine)
        check_steps(step, -least, most)
        reason = None if stop is None else stop.settle(code)
        must_save = bool(due) or (reason is not None and bool(unsaved))
        return Decision(stop=reason, save=must_save, votes=tuple(agreed))
