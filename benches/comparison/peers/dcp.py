"""`torch.distributed.checkpoint` in a single process, synchronous and asynchronous."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from comparison import host
from comparison.peers.base import FilePeer, LoadMode
from comparison.workloads import State

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.staging import DefaultStager

IN_PLACE = LoadMode("dcp.load", in_place=True)


class DcpSync(FilePeer):
    """`dcp.save`, which syncs its files itself but not their folder."""

    name: ClassVar[str] = "dcp"
    title: ClassVar[str] = "DCP sync"
    package: ClassVar[str] = "torch"

    @classmethod
    def load_modes(cls, *, is_table: bool) -> tuple[LoadMode, ...]:
        """Always into the tensors it is given."""
        del is_table
        return (IN_PLACE,)

    def save(self, step: int) -> None:
        """Write and sync the files of a save."""
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(self.step_folder(step))
        dcp.save(self.state.flat(), storage_writer=writer, no_dist=True)

    def wait(self) -> None:
        """Sync the folders, which DCP leaves out."""
        host.sync_folder(self.saved_folders()[-1])
        host.sync_folder(self.folder)

    def load(self, mode: str) -> dict[str, Tensor]:
        """`dcp.load` into the live tensors."""
        del mode
        import torch.distributed.checkpoint as dcp

        reader = dcp.FileSystemReader(self.saved_folders()[-1])
        target = self.state.flat()
        dcp.load(target, storage_reader=reader, no_dist=True)
        return target


def make_stager() -> DefaultStager:
    """Makes a stager to be kept for the life of a run, as it keeps the memory that it copies to.

    Its other options all need an accelerator or a second process.
    """
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


class DcpAsync(DcpSync):
    """`dcp.async_save`: copy in the call, write on a thread."""

    name: ClassVar[str] = "dcp-async"
    title: ClassVar[str] = "DCP async"
    loads_like: ClassVar[str | None] = DcpSync.name

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        self._stager = make_stager()
        self._pending: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Copy the state; its writing starts."""
        import torch.distributed.checkpoint as dcp

        pending = dcp.async_save(
            self.state.flat(),
            checkpoint_id=self.step_folder(step),
            async_stager=self._stager,
            no_dist=True,
        )
        assert isinstance(pending, Future)
        self._pending = pending

    def wait(self) -> None:
        """Wait for the thread, then sync the folders."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        super().wait()

    def close(self) -> None:
        """Let go of the memory of the stager."""
        self._stager.close()
