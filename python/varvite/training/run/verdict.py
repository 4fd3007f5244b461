"""The verdict on a restart: from the monitor into the receipt."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from varvite.errors import StoreError
from varvite.notices import warn

if TYPE_CHECKING:
    from varvite.records import ResumeReport
    from varvite.training.health import Continuity
    from varvite.training.run.context import Run

__all__ = ["conclude", "watch_for_verdict"]


def watch_for_verdict(run: Run, report: ResumeReport) -> None:
    """Has the monitor judge the first steps after a restore, and writes down what it finds."""
    run.verdict, run.judged = None, report
    if not report.fresh:
        # In a cycle of references a run that is over would keep its model and its workers.
        itself = weakref.proxy(run)
        run.monitor.after_resume(lambda continuity: _write_down(itself, continuity))


def conclude(run: Run) -> str | None:
    """Returns the verdict on the last restore; that the run ended before there was one is written down."""
    if not run.judged.fresh and run.verdict is None:
        _write_down(run, run.monitor.continuity)
    return run.verdict


def _write_down(run: Run, continuity: Continuity) -> None:
    run.verdict = continuity.verdict.value
    if run.judged.receipt is None:
        return
    evidence = {"steps": list(continuity.steps), "scores": dict(continuity.scores)}
    try:
        run.manager.record_verdict(run.verdict, continuity.reason, evidence)
    except StoreError as error:
        # A receipt that lacks its last line is no reason to end a run; a save that fails is one.
        warn(f"the verdict `{run.verdict}` can't be written into its receipt: {error}")
