"""safetensors with the fsync it does not do itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from comparison.peers.base import LoadMode, OneFilePeer

if TYPE_CHECKING:
    from torch import Tensor

COPIED = LoadMode("safe_open + copy", in_place=True)


class Safetensors(OneFilePeer):
    """One file of tensors a save; no other state."""

    name: ClassVar[str] = "safetensors"
    title: ClassVar[str] = "safetensors + fsync"
    package: ClassVar[str] = "safetensors"
    file_name: ClassVar[str] = "state.safetensors"

    @classmethod
    def load_modes(cls, *, is_table: bool) -> tuple[LoadMode, ...]:
        """Copied out of the mapped file: `load_file` alone may not have touched a byte yet."""
        del is_table
        return (COPIED,)

    def save(self, step: int) -> None:
        """`save_file` of all tensors."""
        from safetensors.torch import save_file

        save_file(self.state.flat(), self.new_path(step))

    def load(self, mode: str) -> dict[str, Tensor]:
        """Map the file and copy each tensor into the live one."""
        del mode
        from safetensors import safe_open

        target = self.state.flat()
        with safe_open(self.newest_path(), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no dict)
                target[key].copy_(file.get_tensor(key))
        return target
