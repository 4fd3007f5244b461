"""Snapshots of several ranks that the program itself brings together, without `torch.distributed`."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from varvite.beginnings import Beginnings
from varvite.errors import InvalidInputError
from varvite.native_types import PartReport
from varvite.notices import warn
from varvite.records import SnapshotInfo
from varvite.saving import describe_save, read_metadata, read_metrics, read_step

__all__ = ["Session", "Sessions"]


@dataclass(frozen=True)
class Session:
    """A snapshot that the coordinator has begun and not committed.

    Attributes:
        id: What each rank needs to write its part: a text on one line, to be handed over whole.
        seq: Commit number that the snapshot will have.
        step: The step that was given.
        world_size: Number of ranks that it waits for.
    """

    id: str
    seq: int
    step: int
    world_size: int


class Sessions(Beginnings):
    """A repository to which several ranks save, each by its own manager or all by one."""

    def create_snapshot(
        self,
        step: int,
        *,
        world_size: int | None = None,
        metrics: dict[str, float] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Session:
        """Begins a snapshot of several ranks. For the coordinator, whose manager must stay open.

        What the snapshot may build on is kept until it is finalized or abandoned, or the manager is closed.

        Args:
            step: The training step just finished, from 0.
            world_size: Number of ranks that will save; by default that of the manager.
            metrics: Numbers to choose snapshots by.
            metadata: A small dict of plain values.

        Returns:
            The session; its `id` goes to each rank.

        Raises:
            InvalidInputError: An argument is not legal, or this rank does not coordinate.

        Example:
            >>> import tempfile, torch
            >>> from varvite import CheckpointManager
            >>> with CheckpointManager(tempfile.mkdtemp()) as manager:
            ...     session = manager.create_snapshot(7, world_size=2)
            ...     for rank in range(2):
            ...         part = manager.save_rank(session.id, rank, {f"stage{rank}": torch.ones(2)})
            ...     info = manager.finalize_snapshot(session.id)
            ...     info.world_size, sorted(manager.load())
            (2, ['stage0', 'stage1'])
        """
        self._must_be_open("begin a snapshot")
        self._refuse_collective("create_snapshot")
        self._settle()
        size = self._settings.world_size if world_size is None else world_size
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 1 << 20:
            reason = "must be a whole number from 1 to 1048576"
            raise InvalidInputError(
                f"invalid world_size `{size}`: {reason}", what="world_size", reason=reason
            )
        step = read_step(step)
        ticket = self._engine.begin_session(
            step, world_size=size, metrics=read_metrics(metrics), metadata=read_metadata(metadata, {})
        )
        return Session(ticket, json.loads(ticket)["seq"], step, size)

    def save_rank(
        self,
        session_id: str,
        rank: int,
        state: dict[Any, Any] | None = None,
        *,
        rng: bool = True,
        rank_local: Collection[str] = (),
        **objects: Any,
    ) -> PartReport:
        """Writes one rank's part of a snapshot; durable, though not committed, when it returns.

        Ranks may do so at the same time, from other processes or threads, and in any order. Tensors that
        several ranks give under one name must be equal, unless they are named in `rank_local`, or are shards.

        Args:
            session_id: The `id` of a session.
            rank: The rank that this is the state of.
            state: A nest of state, as of `save`.
            rng: Whether the state of this process's random number generators is the rank's.
            rank_local: Keywords of objects that each rank has for itself.
            **objects: Objects, as of `save`.

        Returns:
            Facts of the pack, such as its `length_bytes`.

        Raises:
            InvalidInputError: A value can't be saved, the id is not whole, or the session has no such rank.
            StoreError: The pack can't be written.
        """
        self._must_be_open("save")
        self._refuse_collective("save_rank")
        payload = describe_save(
            0,
            state,
            None,
            None,
            objects,
            rng=rng,
            rank=rank,
            rank_local=rank_local,
            casts=self._settings.casts,
        )
        return self._engine.write_part(session_id, rank, payload.tensors, **payload.structures)

    def finalize_snapshot(self, session_id: str) -> SnapshotInfo:
        """Commits a snapshot once every rank has saved. For the coordinator that created it.

        Returns:
            The committed snapshot.

        Raises:
            IncompleteSaveError: Ranks have not saved; `missing_ranks` names them. They still may.
            MismatchError: Ranks disagree on a tensor, or on a value; names it and them.
            InvalidInputError: This manager did not create the session, or it is over.
        """
        self._must_be_open("commit a snapshot")
        self._refuse_collective("finalize_snapshot")
        committed = self._engine.commit_session(session_id)
        if committed["retention_error"] is not None:
            step = committed["header"]["step"]
            warn(f"retention failed after the save of step {step}: {committed['retention_error']}")
        for rank in range(committed["header"]["world_size"]):
            self._engine.settle_part(session_id, rank, committed=True)
        return self._info(committed["header"])

    def abandon_snapshot(self, session_id: str) -> None:
        """Ends a snapshot that will not be finalized. What ranks have written of it, or still write, is lost.

        Raises:
            InvalidInputError: The id is not whole, or this rank does not coordinate.
        """
        self._must_be_open("abandon a snapshot")
        self._engine.abort_session(session_id)

    def _refuse_collective(self, what: str) -> None:
        if self._settings.together:
            reason = "the ranks of torch.distributed save together"
            raise InvalidInputError(
                f"cannot {what}: {reason}",
                hint="call save() on every rank, or make the manager with rank=0 and world_size=1",
                what=what,
                reason=reason,
            )
