"""What a run consists of while it runs, how far it is, and what comes of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from varvite.training.checks import check_counts
from varvite.training.exits import ExitCode

if TYPE_CHECKING:
    import torch

    from varvite import CheckpointManager
    from varvite.handles import SaveHandle
    from varvite.records import ResumeReport, SnapshotInfo
    from varvite.training.agreement import Agreement
    from varvite.training.autosave import Autosave
    from varvite.training.finite import Action, NonFiniteGuard
    from varvite.training.health import HealthMonitor
    from varvite.training.identity import RunIdentity
    from varvite.training.loader import ResumableLoader
    from varvite.training.run.hooks import Hook
    from varvite.training.run.job import Job
    from varvite.training.run.phases import Phases
    from varvite.training.stop import StopSignal
    from varvite.training.tracking import Tracker
    from varvite.training.trainable import TrainableMask

__all__ = ["Ending", "Progress", "Run", "RunResult", "StepOutcome"]


class Progress:
    """How far a run is. Steps and updates are counted apart: a skipped step is a step without an update.

    Attributes:
        step: The last step that was done, -1 before the first.
        updates: Updates of the optimizer.
        batches: Batches that were trained on, those of skipped steps included.

    Example:
        >>> progress = Progress()
        >>> progress.advance(batches=2, updated=True)
        >>> progress.state_dict()
        {'step': 0, 'updates': 1, 'batches': 2}
    """

    def __init__(self) -> None:
        """Stands before the first step."""
        self.step = -1
        self.updates = 0
        self.batches = 0

    @property
    def next_step(self) -> int:
        """The step to do next."""
        return self.step + 1

    def advance(self, *, batches: int, updated: bool) -> None:
        """Counts one step."""
        self.step += 1
        self.batches += batches
        self.updates += updated

    def state_dict(self) -> dict[str, int]:
        """Returns the counters."""
        return {"step": self.step, "updates": self.updates, "batches": self.batches}

    def check_state_dict(self, state: dict[str, int]) -> None:
        """Refuses what is no state of counters.

        Raises:
            CorruptionError: It is none.
        """
        check_counts("progress", state, {"step": -1, "updates": 0, "batches": 0})

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes back, or forward, to saved counters.

        Raises:
            CorruptionError: They are none.
        """
        self.check_state_dict(state)
        self.step, self.updates, self.batches = state["step"], state["updates"], state["batches"]


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What came of one step.

    Attributes:
        loss: Mean loss over the batches of the step. Of several ranks the loop takes the mean.
        grad_norm: Norm of all gradients together before clipping, `None` where it was not taken. Of several
            ranks the loop takes the largest.
        action: What the guard against non-finite numbers said.
        updated: Whether the optimizer changed the weights.
        metrics: More numbers to log and to save.
    """

    loss: float
    grad_norm: float | None
    action: Action
    updated: bool
    metrics: dict[str, float] = field(default_factory=dict)


StepFunction = Callable[["Run", Sequence[Any]], StepOutcome]


class Ending(NamedTuple):
    """Why the loop of a run ended.

    Attributes:
        exit_code: What to tell the scheduler.
        reason: Why before its end, or `None`.
    """

    exit_code: ExitCode
    reason: str | None = None


@dataclass
class Run:
    """The parts of a run. Each is there once its phase is over; asking for it before is an `AttributeError`.

    Attributes:
        job: What to do.
        hooks: Told of the events.
        step_function: Does one step on a list of micro-batches.
        phases: The functions that make its parts.
        agreement: Makes decisions equal on all ranks.
        stop: Knows when to stop.
        guard: Looks for NaN and infinity.
        loss: Loss of a model on a batch.
        model: The model.
        optimizer: The optimizer.
        scheduler: The scheduler, or `None`.
        scaler: The gradient scaler, or `None`.
        average: The average of the weights, or `None`.
        manager: The checkpoint manager.
        autosave: Knows when to save.
        monitor: Knows whether loss and gradients are as they were.
        trainable: Which parameters are trained.
        progress: How far the run is.
        identity: Which run it is.
        report: What was restored.
        tracker: Where metrics go.
        data: Gives batches, and knows how many it gave.
        until: The loop ends before this step; at first the job's `steps`.
        pending: A save that runs in the background.
        committed_step: The step that was saved last.
        judged: The last restore, which the verdict is about.
        verdict: Whether it goes on as before that, once it is known.
        metrics: Metrics of the newest step.
        has_joined: Whether this run has joined the process group, and is to leave it.
    """

    job: Job
    hooks: tuple[Hook, ...]
    step_function: StepFunction
    phases: Phases
    agreement: Agreement = field(init=False)
    stop: StopSignal = field(init=False)
    guard: NonFiniteGuard = field(init=False)
    loss: Callable[[Any, Any], torch.Tensor] = field(init=False)
    model: torch.nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: Any = field(init=False)
    scaler: Any = field(init=False)
    average: Any = field(init=False)
    manager: CheckpointManager = field(init=False)
    autosave: Autosave = field(init=False)
    monitor: HealthMonitor = field(init=False)
    trainable: TrainableMask = field(init=False)
    progress: Progress = field(init=False)
    identity: RunIdentity = field(init=False)
    report: ResumeReport = field(init=False)
    tracker: Tracker = field(init=False)
    data: ResumableLoader = field(init=False)
    until: int = field(init=False)
    pending: SaveHandle | None = None
    committed_step: int | None = None
    judged: ResumeReport = field(init=False)
    verdict: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    has_joined: bool = False

    def __post_init__(self) -> None:
        """Takes over the length of the job."""
        self.until = self.job.steps

    def objects(self) -> dict[str, Any]:
        """Returns what is saved and restored, by keyword.

        Nothing in it differs after an exact resume but for the identity, which counts restarts.
        """
        parts = {
            "run": self.identity,
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "average": self.average,
            "trainable": self.trainable,
            "health": self.monitor,
            "guard": self.guard,
            "progress": self.progress,
            "data": self.data,
        }
        return {keyword: part for keyword, part in parts.items() if part is not None}

    @property
    def tracker_mode(self) -> str:
        """How a tracker goes on: `append` after a resume or a rollback, `new` at the start of a run."""
        from varvite.training.tracking import mode_after

        return mode_after(self.judged)

    def tell(self, event: str, *arguments: Any) -> None:
        """Tells all hooks of an event."""
        for hook in self.hooks:
            getattr(hook, event)(self, *arguments)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        exit_code: What to tell the scheduler.
        reason: Why it stopped before its end, or `None`.
        step: The last step that was done, -1 where none was.
        report: What was restored at its start.
        snapshot: The newest snapshot, `None` where there is none.
        verdict: Whether it went on as it was before the restart: `continuous`, `discontinuous` or `not
            evaluated`; `None` on a fresh start.
    """

    exit_code: ExitCode
    reason: str | None
    step: int
    report: ResumeReport
    snapshot: SnapshotInfo | None
    verdict: str | None

    def __str__(self) -> str:
        """Returns one line."""
        how = self.exit_code.name.lower().replace("_", " ")
        why = "" if self.reason is None else f", {self.reason}"
        where = "no snapshot" if self.snapshot is None else f"newest snapshot: {self.snapshot}"
        verdict = "" if self.verdict is None else f"; restart {self.verdict}"
        return f"{how} ({int(self.exit_code)}) after step {self.step}{why}{verdict}; {where}"

    def exit(self) -> NoReturn:
        """Ends the process with the exit code, also where the scheduler sends its signal once more."""
        if self.exit_code is not ExitCode.FINISHED:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(int(self.exit_code))
