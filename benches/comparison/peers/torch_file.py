"""`torch.save` with the fsync it does not do itself, and `torch.load`."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from comparison.peers.base import LoadMode, OneFilePeer

FRESH = LoadMode("torch.load", in_place=False)
MAPPED = LoadMode("torch.load(mmap) + copy", in_place=True)


class TorchSave(OneFilePeer):
    """One pickle-and-zip file a save."""

    name: ClassVar[str] = "torch"
    title: ClassVar[str] = "torch.save + fsync"
    package: ClassVar[str] = "torch"
    file_name: ClassVar[str] = "state.pt"

    @classmethod
    def load_modes(cls, *, is_table: bool) -> tuple[LoadMode, ...]:
        """The usual load, and for large tensors the fastest that torch can be made to do."""
        return (FRESH,) if is_table else (FRESH, MAPPED)

    def save(self, step: int) -> None:
        """`torch.save` of the state dicts."""
        torch.save(self.state.nest(), self.new_path(step))

    def load(self, mode: str) -> dict[str, Tensor]:
        """`torch.load`; mapped, then copied into the live tensors."""
        if mode == FRESH.name:
            return self.state.flatten(torch.load(self.newest_path(), weights_only=True))
        mapped = torch.load(self.newest_path(), weights_only=True, mmap=True)
        target = self.state.flat()
        for key, value in self.state.flatten(mapped).items():
            target[key].copy_(value)
        return target
