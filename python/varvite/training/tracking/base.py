"""What a tracker is, and how one is opened for a run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from varvite.errors import InvalidInputError
from varvite.plain import type_name
from varvite.training import rng

if TYPE_CHECKING:
    from varvite.records import ResumeReport
    from varvite.training.identity import RunIdentity, TrackerRecord

__all__ = [
    "MODES",
    "NullTracker",
    "Tracker",
    "check_step",
    "last_before",
    "mode_after",
    "number",
    "open_tracker",
    "refuse",
    "unknown_mode",
]

MODES = ("new", "append", "fork")

_HOMES = {
    "jsonl": ("json_lines", "JsonLinesTracker"),
    "tensorboard": ("tensorboard", "TensorBoardTracker"),
    "wandb": ("wandb", "WandbTracker"),
}


@runtime_checkable
class Tracker(Protocol):
    """Takes the metrics of a run. One rank, the coordinator, has it.

    Example:
        >>> isinstance(NullTracker(), Tracker)
        True
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step; numbers, NaN and infinities included."""

    def close(self) -> None:
        """Makes what was logged last, and ends. Closing again does nothing."""

    def record(self) -> TrackerRecord:
        """Returns what a later run needs to go on, as plain data: `backend`, `last_step` and the rest."""


class NullTracker:
    """Takes metrics to nowhere: for ranks that track nothing.

    Example:
        >>> tracker = NullTracker()
        >>> tracker.log(3, {"loss": 1.0})
        >>> tracker.record()
        {'backend': 'null', 'last_step': 3}
    """

    def __init__(self) -> None:
        """Makes a tracker that has logged nothing."""
        self._last_step: int | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - it goes nowhere
        """Notes the step."""
        self._last_step = step

    def close(self) -> None:
        """Does nothing."""

    def record(self) -> TrackerRecord:
        """Returns the backend and the last step."""
        return {"backend": "null", "last_step": self._last_step}


def open_tracker(
    kind: str, identity: RunIdentity, mode: str, *, next_step: int = 0, **options: Any
) -> Tracker:
    """Opens a tracker for a run, and has its record saved with the run's identity.

    Call it on the coordinator alone, after the identity was restored. Random number generators are as they
    were when it returns: libraries draw names from them.

    Args:
        kind: `null`, `jsonl`, `tensorboard` or `wandb`.
        identity: The run's identity: its record is what `append` goes on from, and its origin's record what
            `fork` branches off from.
        mode: `new`, `append` or `fork`. None stands in for another.
        next_step: First step that will be logged. What lies at it or after it in an appended record is of
            steps that are done again.
        **options: Of the tracker: a `path`, a `folder`, a `project`.

    Returns:
        The tracker.

    Raises:
        InvalidInputError: An argument is not legal; a library is not installed; or there is no record to
            append to or to fork from.
        StoreError: A file can't be written.

    Example:
        >>> from varvite.training.identity import RunIdentity
        >>> open_tracker("jsonl", RunIdentity(), "append", path="metrics.jsonl")
        Traceback (most recent call last):
            ...
        varvite.errors.InvalidInputError: cannot append to a `jsonl` tracker: no record of one was saved \
        with this run
        hint: begin it with mode="new"
    """
    if kind != "null" and kind not in _HOMES:
        raise refuse("kind", kind, f"must be one of `null`, {', '.join(f'`{one}`' for one in _HOMES)}")
    if mode not in MODES:
        raise unknown_mode(mode)
    if kind == "null":
        tracker: Tracker = NullTracker()
    else:
        module, name = _HOMES[kind]
        record = _record_for(kind, identity, mode)
        with rng.unmoved():
            make = getattr(importlib.import_module(f"varvite.training.tracking.{module}"), name)
            tracker = make.open(identity, mode, record, next_step, **options)
    identity.attach(kind, tracker)
    return tracker


def mode_after(report: ResumeReport) -> str:
    """Returns the mode that a tracker goes on in after a restore: `append` after a resume, else `new`.

    To branch off a record in the service, where it can do that, pass `fork` yourself.

    Example:
        >>> from varvite.records import ResumeReport
        >>> mode_after(ResumeReport(step=None, next_step=0, fresh=True))
        'new'
        >>> mode_after(ResumeReport(step=4, next_step=5, fresh=False))
        'append'
    """
    return "append" if report.verb in ("resume", "rollback") and not report.fresh else "new"


def _record_for(kind: str, identity: RunIdentity, mode: str) -> TrackerRecord | None:
    """Returns the record that a mode needs."""
    if mode == "new":
        return None
    if mode == "append":
        record, where, hint = identity.trackers.get(kind), "with this run", 'begin it with mode="new"'
    else:
        origin = identity.origin
        record = None if origin is None else origin.trackers.get(kind)
        where, hint = "with the run that this one was forked from", 'pass mode="new"'
    if record is None:
        doing = "append to" if mode == "append" else "fork"
        reason = f"no record of one was saved {where}"
        raise InvalidInputError(
            f"cannot {doing} a `{kind}` tracker: {reason}", hint=hint, what="mode", reason=reason
        )
    return record


def refuse(what: str, value: object, reason: str, hint: str | None = None) -> InvalidInputError:
    """Returns the error for an argument of a tracker."""
    return InvalidInputError(
        f"invalid tracker {what} `{value}`: {reason}", hint=hint, what=what, reason=reason
    )


def unknown_mode(mode: object) -> InvalidInputError:
    """Returns the error for a mode that there is none of."""
    return refuse("mode", mode, f"must be one of {', '.join(f'`{known}`' for known in MODES)}")


def number(name: str, value: Any) -> float:
    """Returns a metric as a number: of Python, NumPy, or a tensor of one element.

    Raises:
        InvalidInputError: It is none.

    Example:
        >>> number("loss", 2), number("loss", float("nan"))
        (2, nan)
    """
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise refuse("metric", name, f"must be a number, not {type_name(value)}") from None


def last_before(record: TrackerRecord | None, next_step: int) -> int | None:
    """Returns the last step of a record that is not done again.

    Example:
        >>> last_before({"backend": "wandb", "last_step": 9}, next_step=8), last_before(None, next_step=8)
        (7, None)
    """
    last_step = None if record is None else record.get("last_step")
    return None if last_step is None or next_step == 0 else min(last_step, next_step - 1)


def check_step(step: Any) -> int:
    """Returns a step, which must be a whole number from 0.

    Raises:
        InvalidInputError: It is not.

    Example:
        >>> check_step(3)
        3
    """
    if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
        raise refuse("step", step, "must be a whole number from 0")
    return int(step)
