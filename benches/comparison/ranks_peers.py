"""Who saves and loads the state of several ranks, each rank with one of these.

PyTorch's own checkpoint is called as its documents say: `get_model_state_dict` and
`get_optimizer_state_dict`, then `dcp`. Making that state dict is timed apart, and only what comes after it is
set against Varvite, which is given the model and the optimizer themselves.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from comparison import host
from comparison.peers.dcp import make_stager
from comparison.ranks_state import RankState
from varvite import CheckpointManager, keep
from varvite.distributed.dcp import VarviteReader, VarviteWriter


class RankPeer:
    """One system on one rank. `prepare`, `save` and `wait` are timed apart; so are `prepare` and `load`."""

    title: ClassVar[str]
    loads: ClassVar[bool] = True

    def __init__(self, folder: Path, state: RankState) -> None:
        self.folder = folder
        self.state = state

    def prepare(self) -> None:
        """What has to be done with the objects before the call."""

    def save(self, step: int) -> None:
        """The call that a training loop waits for."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until what was saved is on the disk, for all ranks."""

    def load(self) -> int:
        """Load the newest into the live state; the bytes that the system says it has read, or 0."""
        raise NotImplementedError

    def drop_older(self) -> None:
        """Remove all but the newest; called on all ranks, outside the clock."""

    def close(self) -> None:
        """Give back what was held."""


class Varvite(RankPeer):
    """A manager of all ranks."""

    title: ClassVar[str] = "Varvite"
    compression: ClassVar[str] = "auto"

    def __init__(self, folder: Path, state: RankState) -> None:
        super().__init__(folder, state)
        self._manager = CheckpointManager(folder, compression=self.compression, keep=keep.last(1))
        self._pending: Any = None

    def save(self, step: int) -> None:
        self._pending = self._manager.save(step, model=self.state.model, optimizer=self.state.optimizer)

    def wait(self) -> None:
        self._pending.wait()

    def load(self) -> int:
        report = self._manager.resume(require=True, model=self.state.model, optimizer=self.state.optimizer)
        return report.verified_bytes

    def close(self) -> None:
        self._manager.close()


class VarviteNone(Varvite):
    """The same, stored as it is."""

    title: ClassVar[str] = "Varvite, compression none"
    compression: ClassVar[str] = "none"


class VarviteSync(VarviteNone):
    """Straight from the tensors, without a copy of them."""

    title: ClassVar[str] = "Varvite, save_sync, none"
    loads: ClassVar[bool] = False

    def save(self, step: int) -> None:
        self._manager.save_sync(step, model=self.state.model, optimizer=self.state.optimizer)

    def wait(self) -> None:
        """It is durable."""


class _Dcp(RankPeer):
    """What all that go through `torch.distributed.checkpoint` do alike."""

    def __init__(self, folder: Path, state: RankState) -> None:
        super().__init__(folder, state)
        self._values: dict[str, Any] = {}

    def prepare(self) -> None:
        model, optimizer = self.state.model, self.state.optimizer
        self._values = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }

    def step_folder(self, step: int) -> Path:
        """Where DCP writes a save."""
        return self.folder / f"step-{step:04}"

    def saved_folders(self) -> list[Path]:
        """All saves, oldest first."""
        return sorted(self.folder.glob("step-*"))


class VarviteAdapter(_Dcp):
    """A repository behind `dcp.save` and `dcp.load`."""

    title: ClassVar[str] = "Varvite behind dcp.save, none"

    def save(self, step: int) -> None:
        writer = VarviteWriter(self.folder, step=step, compression="none", keep=keep.last(1))
        dcp.save(self._values, storage_writer=writer)

    def load(self) -> int:
        reader = VarviteReader(self.folder)
        dcp.load(self._values, storage_reader=reader)
        return reader.verified_bytes


class DcpSync(_Dcp):
    """`dcp.save`, which syncs its files itself but not their folder."""

    title: ClassVar[str] = "DCP sync"

    def save(self, step: int) -> None:
        writer = dcp.FileSystemWriter(self.step_folder(step), sync_files=True)
        dcp.save(self._values, storage_writer=writer)

    def wait(self) -> None:
        if dist.get_rank() == 0:
            host.sync_folder(self.saved_folders()[-1])
            host.sync_folder(self.folder)

    def load(self) -> int:
        dcp.load(self._values, storage_reader=dcp.FileSystemReader(self.saved_folders()[-1]))
        return 0

    def drop_older(self) -> None:
        if dist.get_rank() == 0:
            for folder in self.saved_folders()[:-1]:
                shutil.rmtree(folder)


class DcpAsync(DcpSync):
    """`dcp.async_save`: copy in the call, plan and write on a thread, which has a group of its own."""

    title: ClassVar[str] = "DCP async"
    loads: ClassVar[bool] = False

    def __init__(self, folder: Path, state: RankState) -> None:
        super().__init__(folder, state)
        self._group = dist.new_group(backend="gloo")
        self._stager = make_stager()
        self._pending: Future[Any] | None = None

    def save(self, step: int) -> None:
        writer = dcp.FileSystemWriter(self.step_folder(step), sync_files=True)
        pending = dcp.async_save(
            self._values, storage_writer=writer, process_group=self._group, async_stager=self._stager
        )
        assert isinstance(pending, Future)
        self._pending = pending

    def wait(self) -> None:
        assert self._pending is not None
        self._pending.result()
        super().wait()

    def close(self) -> None:
        self._stager.close()


RANK_PEERS: dict[str, type[RankPeer]] = {
    "varvite": Varvite,
    "varvite-none": VarviteNone,
    "varvite-sync": VarviteSync,
    "varvite-dcp": VarviteAdapter,
    "dcp": DcpSync,
    "dcp-async": DcpAsync,
}
