"""The writer for `torch.distributed.checkpoint`: one pack for each rank, one commit by the coordinator."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from varvite.distributed import failures
from varvite.distributed.dcp import sessions
from varvite.distributed.dcp.identifiers import is_step, step_of
from varvite.distributed.dcp.layout import describe_part
from varvite.distributed.dcp.tickets import Ticket, clear_arrived, take_arrived
from varvite.errors import InvalidInputError
from varvite.facts import make_info, read_tags
from varvite.notices import warn
from varvite.saving import read_metadata, read_metrics, read_step
from varvite.settings import joined_distributed, open_engine

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from varvite.keep import Keep
    from varvite.native_types import PartReport
    from varvite.records import SnapshotInfo

__all__ = ["VarviteWriter"]


class VarviteWriter(StorageWriter):  # type: ignore[misc]
    """Saves with `dcp.save` and `dcp.async_save` to a repository: one snapshot for each call.

    Every rank makes its own. One serves many saves, or each save gets a new one. It is picklable, so that
    `async_save` may run in a process of its own. While a save runs, the coordinator holds the lock of the
    repository; between saves nobody does, but a `CheckpointManager` that is open for writing holds it too.

    Args:
        path: Folder, or `file://` url. It is made, with a repository in it, if it is absent or empty.
        step: The training step. By default what `checkpoint_id` says, else one more than the newest
            snapshot's.
        metrics: Numbers to choose snapshots by. What the coordinator gives counts.
        metadata: A small dict of plain values, read with the header. What the coordinator gives counts.
        allow_pickle: Whether values that are neither tensors nor plain are stored as the planner pickles
            them. A reader must then allow it too, and loading them runs what the file says.
        keep: What to keep (`varvite.keep`); applied after each commit.
        save_dtype: A narrower dtype to store floats in, as for `CheckpointManager`.
        compression: `none`, `fast`, `max` or `auto`, as for `CheckpointManager`.
        delta: Whether a coded chunk may be stored as its difference to an older one.
        threads: Threads that digest and code; by default the cores of this process divided by the processes
            of this machine.
        chunk_bytes: Unit of reuse and verification in raw bytes, a power of two.
        fsync: `False` gives up durability against power loss, for tests.

    Raises:
        InvalidInputError: An argument is not legal.

    Attributes:
        checkpoint_id: The id of the save that comes or runs; `None` where none was given.
        snapshot: What the last save committed; only the coordinator knows it, elsewhere it is `None`.

    Example:
        >>> import tempfile, torch
        >>> import torch.distributed as dist
        >>> import torch.distributed.checkpoint as dcp
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> writer = VarviteWriter(tempfile.mkdtemp(), metrics={"loss": 0.5})
        >>> for step in (100, 200):
        ...     state = {"weight": torch.full((2,), step)}
        ...     metadata = dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
        >>> writer.snapshot.step, writer.snapshot.metrics
        (200, {'loss': 0.5})
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        keep: Keep | None = None,
        save_dtype: str | dict[str, str] | None = None,
        compression: str = "auto",
        delta: bool = True,
        threads: int | None = None,
        chunk_bytes: int = 1 << 20,
        fsync: bool = True,
    ) -> None:
        """Checks the arguments; nothing is opened before a save."""
        super().__init__()
        self._settings = sessions.read_options(
            path,
            keep=keep,
            save_dtype=save_dtype,
            compression=compression,
            delta=delta,
            threads=threads,
            chunk_bytes=chunk_bytes,
            fsync=fsync,
        )
        self._step = None if step is None else read_step(step)
        self._metrics = read_metrics(metrics)
        self._metadata = read_metadata(metadata, {})
        self._allow_pickle = allow_pickle
        self._begin_save(None)
        self.snapshot: SnapshotInfo | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickles what was asked for, and what this process has loaded, without what a running save has."""
        at = sessions.position(self._settings.path)
        return {**self.__dict__, "_session": None, "_position": at}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores it in another process, which goes on from there."""
        at = state.pop("_position")
        self.__dict__.update(state)
        if at is not None and sessions.position(self._settings.path) is None:
            sessions.note_position(self._settings.path, at)

    def _begin_save(self, checkpoint_id: str | os.PathLike[str] | int | None) -> None:
        self.checkpoint_id = checkpoint_id
        self._save_id = uuid.uuid4().hex
        self._session: sessions.Session | None = None

    # ---- what PyTorch calls, in this order -----------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for another save.

        Args:
            checkpoint_id: The step: a number, a text that ends with it, such as `step-1000`, or such a text
                in the folder of the repository. The repository itself says nothing.

        Raises:
            InvalidInputError: It is something else, or another step than the writer was made for.
        """
        if checkpoint_id is not None:
            found = step_of(checkpoint_id, self._settings.path)
            if found is not None and self._step not in (None, found):
                reason = f"the writer was made for step {self._step}"
                raise InvalidInputError(
                    f"invalid checkpoint_id `{checkpoint_id}`: {reason}", what="checkpoint_id", reason=reason
                )
        self._begin_save(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Returns what the planner may know of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learns which rank this is; nothing is opened yet.

        Args:
            is_coordinator: Whether this rank commits.
            *args: None are known.
            **kwargs: `rank` and `use_collectives`, where PyTorch gives them.

        Raises:
            InvalidInputError: Several ranks are to save without collectives.
        """
        del is_coordinator, args
        clear_arrived()
        if kwargs.get("use_collectives", True):
            return
        distributed = joined_distributed()
        if kwargs.get("rank") or (distributed is not None and distributed.get_world_size() > 1):
            reason = (
                "a snapshot is committed once for all ranks, and without collectives none hears of another"
            )
            raise InvalidInputError(
                f"cannot save with use_collectives=False: {reason}",
                hint="leave it out, or save with create_snapshot, save_rank and finalize_snapshot",
                what="use_collectives",
                reason=reason,
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the snapshot; on the coordinator.

        Args:
            plans: Those of all ranks, in their order.

        Returns:
            The plans, each with the ticket that its rank needs.

        Raises:
            RepositoryLockedError: Another process, or a manager of this one, writes here.
            CheckpointError: The repository can't be opened.
        """
        step = self._step
        if self.checkpoint_id is not None:
            step = step_of(self.checkpoint_id, self._settings.path) if step is None else step
        session = sessions.begin(
            self._settings, step, len(plans), metrics=self._metrics, metadata=self._metadata
        )
        self._session = session
        return [
            dataclasses.replace(plan, storage_data=Ticket(session.ticket, rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Writes the pack of this rank, also an empty one, and makes it durable.

        A failure is no exception here: it is given to the coordinator with the results, which then ends the
        session; all ranks hear of it there.

        Args:
            plan: The final plan of this rank.
            planner: Gives the data of its items.

        Returns:
            A future that is done, with one result for the whole pack.
        """
        ticket = self._ticket(plan)
        index = MetadataIndex(f"rank {ticket.rank}")
        try:
            report = self._write_part(ticket, plan, planner)
            result = WriteResult(index, report["length_bytes"], {"pack": report["pack"]})
        except Exception as error:  # noqa: BLE001 - the coordinator raises it, and by that all ranks
            result = WriteResult(index, 0, {"failure": failures.encode(error, rank=ticket.rank)})
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result([result])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the snapshot, or ends it where a rank has failed; on the coordinator.

        Args:
            metadata: Stands in the packs already.
            results: What `write_data` gave on each rank.

        Raises:
            CheckpointError: A rank could not write its part; of the class of its own error, with its rank and
                cause. Nothing was committed.
            MismatchError: The parts of two ranks disagree.
        """
        del metadata
        session, self._session = self._session, None
        if session is None:
            reason = "this writer has begun no save"
            raise InvalidInputError(f"cannot finish: {reason}", what="finish", reason=reason)
        outcomes = [result.storage_data for of_rank in results for result in of_rank]
        failed = [outcome["failure"] for outcome in outcomes if "failure" in outcome]
        if failed:
            error = failures.decode(failures.joined(failed), "dcp.save")
            session.abort(error)
            raise error
        try:
            report = session.commit([outcome["pack"] for outcome in outcomes])
            self.snapshot = make_info(report["header"], read_tags(session.engine))
        finally:
            session.close()
        if report["retention_error"] is not None:
            warn(f"the snapshot is saved, but older ones can't be removed: {report['retention_error']}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for an id that says a step.

        Example:
            >>> VarviteWriter.validate_checkpoint_id("step-7"), VarviteWriter.validate_checkpoint_id("s3://b/a")
            (True, False)
        """
        return is_step(os.fspath(checkpoint_id))

    # ---- the part of this rank -----------------------------------------------------------------

    def _ticket(self, plan: SavePlan) -> Ticket:
        ticket = take_arrived()
        if ticket is None and self._session is not None:
            # Nothing was sent: this process saves alone. A cached plan has the ticket of an older session.
            ticket = Ticket(self._session.ticket, 0, self._session.world_size)
        if ticket is None and isinstance(plan.storage_data, Ticket):
            ticket = plan.storage_data
        if ticket is None:
            reason = "its plan has come without the ticket of a session"
            raise InvalidInputError(
                f"cannot write data: {reason}",
                hint="save with dcp.save or dcp.async_save, which call prepare_global_plan first",
                what="plan",
                reason=reason,
            )
        return ticket

    def _write_part(self, ticket: Ticket, plan: SavePlan, planner: SavePlanner) -> PartReport:
        content = describe_part(
            plan,
            planner,
            allow_pickle=self._allow_pickle,
            casts=self._settings.casts,
            is_first=ticket.rank == 0,
        )
        session = self._session
        engine = (
            open_engine(self._settings, "rank", rank=ticket.rank, world_size=ticket.world_size)
            if session is None
            else session.engine
        )
        try:
            return engine.write_part(
                ticket.session,
                ticket.rank,
                content.tensors,
                structure=content.structure,
                rank_structure=content.rank_structure,
            )
        finally:
            if session is None:
                engine.close()
