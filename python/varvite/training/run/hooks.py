"""What a program can do at the events of a run, without taking over a phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varvite.handles import SaveHandle
    from varvite.records import ResumeReport, SnapshotInfo
    from varvite.training.run.context import Run, RunResult, StepOutcome

__all__ = ["Hook"]


class Hook:
    """Does nothing at each event: override those of interest. Hooks are called in order, on every rank.

    An error of a hook ends the run like any other.

    Example:
        >>> class Printer(Hook):
        ...     def stepped(self, run, outcome):
        ...         print(run.progress.step, outcome.loss)
    """

    def restoring(self, run: Run) -> None:
        """The manager is open; nothing is restored yet."""

    def restored(self, run: Run, report: ResumeReport) -> None:
        """The state is restored, or the run starts afresh; data and tracker are not made yet."""

    def stepped(self, run: Run, outcome: StepOutcome) -> None:
        """A step is done: update, scheduler, counters. What is saved at this step comes after it."""

    def saving(self, run: Run, step: int) -> None:
        """A save of this step begins."""

    def staged(self, run: Run, handle: SaveHandle) -> None:
        """The state is copied; the snapshot is not durable yet."""

    def saved(self, run: Run, info: SnapshotInfo) -> None:
        """A snapshot is durable. Called at a step boundary, so it may be a step late."""

    def ended(self, run: Run, result: RunResult) -> None:
        """The loop has ended regularly and everything is durable; not called after an error."""
