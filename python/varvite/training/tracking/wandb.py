"""Metrics in a run of Weights & Biases, which a resumed run goes on with under its own id."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from varvite.training.tracking.base import check_step, last_before, number, refuse, unknown_mode

if TYPE_CHECKING:
    from varvite.training.identity import RunIdentity, TrackerRecord

__all__ = ["WandbTracker"]

_OWNED = ("id", "resume", "resume_from", "fork_from", "reinit")
"""Arguments of `wandb.init` that the mode decides."""


class WandbTracker:
    """Logs to a run of Weights & Biases.

    Rows are sent step by step, not held back until the next one. The service takes no row at or before one
    it has: where steps are done again after a resume, the first row of each stays.

    Args:
        project: The project.
        mode: `new`: a run with the id `run_id`. `append`: goes on with that run, which must exist. `fork`:
            a run with the id `run_id` that begins with the rows of `parent_id` before `next_step`; the
            service must have forks turned on for you.
        run_id: Id of the run in the service.
        next_step: First step that will be logged.
        parent_id: Id of the run to fork from.
        wandb_mode: What `wandb.init` calls its `mode`, such as `offline`; by default that of the environment.
        library: The module to use instead of `wandb`.
        **options: Further arguments of `wandb.init`, such as `name`, `entity` and `config`.

    Raises:
        InvalidInputError: An argument is not legal, the library is not installed, or it is offline, where
            nothing can be appended to or forked.

    Example:
        >>> from types import SimpleNamespace
        >>> run = SimpleNamespace(id="abc", name="calm-sea-1", log=lambda row, **_: print(row))
        >>> library = SimpleNamespace(init=lambda **given: run)
        >>> tracker = WandbTracker("demo", run_id="abc", library=library)
        >>> tracker.log(0, {"loss": 0.5})
        {'loss': 0.5}
        >>> tracker.record()["run_id"]
        'abc'
    """

    def __init__(
        self,
        project: str,
        *,
        run_id: str,
        mode: str = "new",
        next_step: int = 0,
        parent_id: str | None = None,
        wandb_mode: str | None = None,
        library: Any = None,
        **options: Any,
    ) -> None:
        """Opens the run in the service."""
        if taken := [name for name in _OWNED if name in options]:
            raise refuse("option", taken[0], "the mode and the run's identity decide it")
        wanted = {"project": project, "id": run_id}
        if mode == "new":
            # Else a variable of the environment, or a file left by a crash, could make it go on with another.
            wanted["resume"] = "never"
        elif mode == "append":
            wanted["resume"] = "must"
        elif mode == "fork":
            if parent_id is None or next_step < 1:
                raise refuse("parent_id", parent_id, "a fork needs the run and a step to branch off from")
            wanted["fork_from"] = f"{parent_id}?_step={next_step - 1}"
        else:
            raise unknown_mode(mode)
        if wandb_mode is not None:
            wanted["mode"] = wandb_mode
        how = wandb_mode or os.environ.get("WANDB_MODE") or "online"
        if mode != "new" and how not in ("online", "shared"):
            reason = f"the library is `{how}`, and only the service can {mode}"
            raise refuse("mode", mode, reason, 'go online, or pass mode="new"')
        self._project = project
        self._last_step: int | None = None
        self._run: Any = (_library() if library is None else library).init(**wanted, **options)
        self._run_id, self._name = self._run.id, self._run.name
        if mode != "new" and self._run_id != run_id:
            self._run.finish()
            raise refuse("run_id", run_id, f"the service has opened another run: {self._run_id}")

    @classmethod
    def open(
        cls,
        identity: RunIdentity,
        mode: str,
        record: TrackerRecord | None,
        next_step: int,
        *,
        project: str | None = None,
        library: Any = None,
        **options: Any,
    ) -> Self:
        """Opens the tracker of a run; `open_tracker` calls it."""
        saved = record or {}
        recorded = saved.get("project")
        if project is not None and recorded is not None and project != recorded:
            raise refuse("project", project, f"the recorded run is in another one: {recorded}")
        chosen = project if project is not None else recorded
        if chosen is None:
            raise refuse("project", project, "a new run needs one")
        if identity.name is not None:
            options.setdefault("name", identity.name)
        tracker = cls(
            chosen,
            run_id=saved["run_id"] if mode == "append" else identity.run_id,
            mode=mode,
            next_step=next_step,
            parent_id=saved["run_id"] if mode == "fork" else None,
            library=library,
            **options,
        )
        tracker._last_step = last_before(record, next_step)
        return tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step.

        Raises:
            InvalidInputError: The step or a metric is not legal, or the tracker is closed.
        """
        step = check_step(step)
        if self._run is None:
            raise refuse("run_id", self._run_id, "the tracker is closed")
        numbers = {name: number(name, value) for name, value in metrics.items()}
        # Without `commit` a row is held back until the next one, and a killed run loses it.
        self._run.log(numbers, step=step, commit=True)
        self._last_step = step

    def close(self) -> None:
        """Sends what is pending, and ends the run in the service."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def record(self) -> TrackerRecord:
        """Returns the project, id and name of the run, and the last step."""
        return {
            "backend": "wandb",
            "project": self._project,
            "run_id": self._run_id,
            "name": self._name,
            "last_step": self._last_step,
        }


def _library() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        reason = f"a library is missing: {error}"
        raise refuse("kind", "wandb", reason, "install it: pip install wandb") from None
