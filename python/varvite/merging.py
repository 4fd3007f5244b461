"""Merges of old packs: asking for one, waiting for the one in the background, hearing of its failure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from varvite.errors import CheckpointError
from varvite.notices import warn
from varvite.records import Finding, MergeReport

if TYPE_CHECKING:
    from varvite._native import Engine

__all__ = ["BackgroundMerge"]

_KEPT_ERRORS = 1000
"""Failures whose texts are kept."""


class BackgroundMerge:
    """The merges of a manager; at most one runs, on a thread of the engine."""

    def __init__(self, engine: Engine, *, on_error: str) -> None:
        """Starts nothing.

        Args:
            engine: The engine that merges.
            on_error: `raise` or `warn`: what the next call does with a failure.
        """
        self._engine = engine
        self._on_error = on_error
        self._unheard: deque[CheckpointError] = deque()
        self._errors: deque[str] = deque(maxlen=_KEPT_ERRORS)

    def now(self) -> MergeReport:
        """Waits for the merge that runs, merges everything of which something is gained, and reports."""
        done = self._engine.merge_now()
        return MergeReport(
            merged_packs=done["merged_packs"],
            written_bytes=done["written_bytes"],
            freed_bytes=done["freed_bytes"],
            stood_down=done["stood_down"],
            findings=[Finding(*row) for row in done["findings"]],
        )

    def wait(self) -> None:
        """Waits until no merge runs."""
        self._engine.wait_merge()

    def stop(self) -> None:
        """Ends the merge that runs, waits for its end, and lets no other start."""
        self._engine.stop_merge()

    def raise_failure(self) -> None:
        """Raises the oldest failure that no call has raised, and warns of damage that a merge has met."""
        self._collect()
        for row in self._engine.take_merge_findings():
            finding = Finding(*row)
            where = f"`{finding.object}` at byte {finding.offset_bytes}"
            steps = ", ".join(map(str, finding.steps)) or "unknown"
            warn(f"a merge found damage in {where}, {finding.what}; snapshots of steps: {steps}")
        if not self._unheard:
            return
        failure = self._unheard.popleft()
        if self._on_error == "raise":
            raise failure
        warn(f"a merge failed: {failure}")

    def errors(self) -> list[str]:
        """Returns the texts of the merges that failed, oldest first."""
        self._collect()
        return list(self._errors)

    def _collect(self) -> None:
        while True:
            try:
                self._engine.raise_merge_failure()
            except CheckpointError as failure:
                self._unheard.append(failure)
                self._errors.append(f"merge: {failure}")
            else:
                return
