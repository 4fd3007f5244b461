"""Varvite, with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from comparison.peers.base import KEPT_SAVES, LoadMode, Peer
from comparison.workloads import State, TensorTable

if TYPE_CHECKING:
    from torch import Tensor

RESUME = LoadMode("resume", in_place=True)
LOAD_INTO = LoadMode("load_into", in_place=True)
LOAD = LoadMode("load", in_place=False)


class Varvite(Peer):
    """A repository: a pack and a manifest a save."""

    name: ClassVar[str] = "varvite"
    title: ClassVar[str] = "Varvite"
    package: ClassVar[str] = "varvite"

    @classmethod
    def load_modes(cls, *, is_table: bool) -> tuple[LoadMode, ...]:
        """`resume` for live objects, `load_into` for tensors by name, `load` for fresh ones."""
        return (LOAD, LOAD_INTO) if is_table else (RESUME, LOAD_INTO, LOAD)

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        from varvite import CheckpointManager

        self._manager = CheckpointManager(folder, staging="copy")
        self._pending: Any = None

    def save(self, step: int) -> None:
        """Stage the state and return; a table is saved to the end at once."""
        if isinstance(self.state, TensorTable):
            self._manager.save_sync(step, self.state.nest())
        else:
            self._pending = self._manager.save(step, **self.state.objects)

    def wait(self) -> None:
        """Wait for the commit."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def load(self, mode: str) -> dict[str, Tensor]:
        """Load the newest snapshot in one of the three ways."""
        if mode == RESUME.name:
            assert not isinstance(self.state, TensorTable)
            self._manager.resume(**self.state.objects)
            return self.state.flat()
        if mode == LOAD_INTO.name:
            target = self.state.flat()
            report = self._manager.load_into(target)
            if report.missing:
                raise AssertionError(f"tensor was not found by its name: `{report.missing[0]}`")
            return target
        nest = self._manager.load()
        if isinstance(self.state, TensorTable):
            return self.state.flatten(nest)
        return _by_name(nest)

    def drop_older(self) -> None:
        """Delete all snapshots but the newest."""
        for snapshot in self._manager.snapshots()[:-KEPT_SAVES]:
            self._manager.delete(f"seq:{snapshot.seq}")

    def close(self) -> None:
        """Release the repository."""
        self._manager.close()


def _by_name(nest: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {f"model.{name}": value for name, value in nest["model"].items()}
    for name, moments in nest["optimizer"]["state"].items():
        for key, value in moments.items():
            tensors[f"optimizer.state.{name}.{key}"] = value
    return tensors
