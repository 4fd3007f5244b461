"""Where the metrics of a run go, and how they go on when the run does.

A tracker is built after the run's identity was restored: then it is known whether its lines begin anew,
go on, or branch off. The three modes are always said, and none stands in for another: to append or to fork
without a saved record is an error.

Example:
    >>> import tempfile
    >>> from varvite.training.identity import RunIdentity
    >>> run = RunIdentity()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tracker = open_tracker("jsonl", run, "new", path=f"{folder}/metrics.jsonl")
    ...     tracker.log(0, {"loss": 2.5})
    ...     tracker.close()
    >>> run.trackers["jsonl"]["last_step"]
    0
"""

from __future__ import annotations

from varvite.training.tracking.base import NullTracker, Tracker, mode_after, open_tracker
from varvite.training.tracking.json_lines import JsonLinesTracker, read_rows
from varvite.training.tracking.tensorboard import TensorBoardTracker
from varvite.training.tracking.wandb import WandbTracker

__all__ = [
    "JsonLinesTracker",
    "NullTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "mode_after",
    "open_tracker",
    "read_rows",
]
