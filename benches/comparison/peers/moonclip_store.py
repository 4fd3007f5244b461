"""moonclip, with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from comparison.peers.base import LoadMode, Peer
from comparison.workloads import State, TensorTable

RESUME = LoadMode("resume", in_place=True)
FRESH = LoadMode("load_latest", in_place=False)


class Moonclip(Peer):
    """A store of full snapshots and differences to them, written in the background."""

    name: ClassVar[str] = "moonclip"
    title: ClassVar[str] = "moonclip"
    package: ClassVar[str] = "moonclip"

    @classmethod
    def load_modes(cls, *, is_table: bool) -> tuple[LoadMode, ...]:
        """Its own resume; raw bytes for a table of tensors."""
        return (FRESH,) if is_table else (RESUME,)

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        import moonclip

        manager = moonclip.MoonclipManager if isinstance(state, TensorTable) else moonclip.CheckpointManager
        self._manager: Any = manager(str(folder))

    def save(self, step: int) -> None:
        """Copy the state; its coding and writing starts."""
        if isinstance(self.state, TensorTable):
            self._manager.save_tensors(step, self.state.flat())
        else:
            self._manager.save(step, **self.state.objects)

    def wait(self) -> None:
        """Wait for the background save."""
        self._manager.flush()

    def load(self, mode: str) -> dict[str, Tensor]:
        """Resume the objects; or read the bytes and view them as tensors."""
        if mode == RESUME.name:
            assert not isinstance(self.state, TensorTable)
            self._manager.resume(**self.state.objects)
            return self.state.flat()
        _, raw = self._manager.load_latest()
        return {
            key: torch.frombuffer(raw[key], dtype=value.dtype).reshape(value.shape)
            for key, value in self.state.flat().items()
        }

    def drop_older(self) -> None:
        """Its own retention decides: nothing else can delete from its store."""

    def close(self) -> None:
        """Wait for what is running; it has no other end."""
        self._manager.flush()
