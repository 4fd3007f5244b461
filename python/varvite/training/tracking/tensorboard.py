"""Metrics as TensorBoard's event files, by `torch.utils.tensorboard`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from varvite.training.tracking.base import check_step, last_before, number, refuse

if TYPE_CHECKING:
    from varvite.training.identity import RunIdentity, TrackerRecord

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker:
    """Writes each metric as a scalar to event files in a folder.

    Args:
        folder: Where the event files lie.
        mode: `new`: TensorBoard hides what the folder holds already. `append`: it hides steps from
            `next_step` on, which are done again. Files can't be forked.
        next_step: First step that will be logged.
        make_writer: Makes the writer, called as `SummaryWriter` is; by default that of torch.

    Raises:
        InvalidInputError: An argument is not legal, or TensorBoard is not installed.

    Example:
        >>> class Printing:
        ...     def __init__(self, folder, purge_step):
        ...         print(f"steps from {purge_step} on are hidden")
        ...     def add_scalar(self, name, value, step):
        ...         print(step, name, value)
        >>> tracker = TensorBoardTracker("runs/a", mode="append", next_step=7, make_writer=Printing)
        steps from 7 on are hidden
        >>> tracker.log(7, {"loss": 0.5})
        7 loss 0.5
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        mode: str = "new",
        next_step: int = 0,
        make_writer: Callable[..., Any] | None = None,
    ) -> None:
        """Opens a new event file in the folder."""
        if mode not in ("new", "append"):
            reason = "must be `new` or `append`: event files can't branch off"
            raise refuse("mode", mode, reason, 'pass mode="new" and a folder of its own')
        self._folder = os.fspath(folder)
        self._last_step: int | None = None
        make = _summary_writer() if make_writer is None else make_writer
        self._writer: Any = make(self._folder, purge_step=next_step if mode == "append" else 0)

    @classmethod
    def open(
        cls,
        identity: RunIdentity,  # noqa: ARG003 - other trackers need it
        mode: str,
        record: TrackerRecord | None,
        next_step: int,
        *,
        folder: str | os.PathLike[str],
        make_writer: Callable[..., Any] | None = None,
    ) -> Self:
        """Opens the tracker of a run; `open_tracker` calls it."""
        tracker = cls(folder, mode=mode, next_step=next_step, make_writer=make_writer)
        tracker._last_step = last_before(record, next_step)
        return tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step.

        Raises:
            InvalidInputError: The step or a metric is not legal, or the tracker is closed.
        """
        step = check_step(step)
        if self._writer is None:
            raise refuse("folder", self._folder, "the tracker is closed")
        numbers = {name: number(name, value) for name, value in metrics.items()}
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._last_step = step

    def close(self) -> None:
        """Writes what is pending, and closes the file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def record(self) -> TrackerRecord:
        """Returns the folder and the last step, and writes what is pending.

        A snapshot that says a step was logged must not be committed before that step lies in the file.
        """
        if self._writer is not None:
            self._writer.flush()
        return {"backend": "tensorboard", "folder": self._folder, "last_step": self._last_step}


def _summary_writer() -> Callable[..., Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        reason = f"a library is missing: {error}"
        raise refuse("kind", "tensorboard", reason, "install it: pip install torch tensorboard") from None
    return SummaryWriter  # type: ignore[no-any-return]
