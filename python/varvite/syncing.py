"""Pushes to a bucket: asking for one, hearing of failures, and what is known of the bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from varvite.errors import CheckpointError, InvalidInputError
from varvite.figures import SyncState
from varvite.notices import warn
from varvite.records import SyncReport

if TYPE_CHECKING:
    from varvite._native import Engine

__all__ = ["BackgroundSync"]


class BackgroundSync:
    """The pushes of a manager; at most one runs, on a thread of the engine."""

    def __init__(self, engine: Engine) -> None:
        """Starts nothing.

        Args:
            engine: The engine that pushes, if it has a bucket and is the one that writes.
        """
        self._engine = engine

    def now(self) -> SyncReport:
        """Waits for the push that runs, pushes everything that is pending, and reports.

        Raises:
            InvalidInputError: There is no bucket.
            StoreError: The bucket can't be reached, or refuses.
            CommitConflictError: Another writer has taken the bucket over.
        """
        self._require_remote()
        done = self._engine.sync_now()
        return SyncReport(
            pushed_objects=done["pushed_objects"],
            pushed_bytes=done["pushed_bytes"],
            removed_objects=done["removed_objects"],
            pending_objects=done["pending_objects"],
        )

    def state(self) -> SyncState | None:
        """Returns what is known of the bucket, `None` where there is none."""
        found = self._engine.sync_state()
        return None if found is None else SyncState(**found)

    def warn_of_discarded(self) -> None:
        """Warns of snapshots that were dropped here, because another writer had used their numbers."""
        state = self.state()
        if state is not None and state.discarded:
            dropped = ", ".join(map(str, state.discarded))
            warn(f"snapshots that were only here gave way to another writer's in `{state.url}`: {dropped}")

    def warn_once(self) -> None:
        """Warns of a push that failed: once for each cause, since pushes never fail a save."""
        # Asked for at each save: the whole state would be a listing of the folder.
        failure = self._engine.take_sync_failure()
        state = None if failure is None else self.state()
        # One that was taken over is not tried again: the call that follows raises.
        if state is not None and state.fenced_by is None:
            warn(f"pushing to `{state.url}` fails, and is tried again: {failure}")

    def finish(self) -> None:
        """Pushes what is pending, for the last time.

        Where the last push has failed already, it isn't tried again: the caller hears of it at once.

        Raises:
            StoreError: Something is not in the bucket; says why.
            CommitConflictError: Another writer has taken the bucket over.
        """
        state = self.state()
        if state is None:
            return
        has_work = state.unpushed or state.pending_objects or state.pending_removals
        # Tags and receipts come without a commit.
        has_work = has_work or self._engine.has_unsent()
        if not has_work and state.last_error is None:
            return
        try:
            if state.last_error is None:
                self._engine.sync_last()
            else:
                self._engine.raise_sync_failure()
        except CheckpointError as failure:
            left = self.state()
            if left is not None and left.unpushed and failure.hint is None:
                failure.hint = f"snapshots that are only here: {left.unpushed}; `varvite push` sends them"
            raise

    def stop(self) -> None:
        """Ends the push that runs, and lets no other start. What was sent stays sent."""
        self._engine.stop_sync()

    def _require_remote(self) -> None:
        if self._engine.sync_state() is None:
            reason = "this manager has no bucket"
            hint = 'pass remote="s3://bucket/run" when the manager is made'
            raise InvalidInputError(f"cannot push: {reason}", hint=hint, what="remote", reason=reason)
