"""Varvite, with its defaults and in the other configurations that tell something."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

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
    arguments: ClassVar[dict[str, Any]] = {}

    @classmethod
    def load_modes(cls, *, is_table: bool) -> tuple[LoadMode, ...]:
        """`resume` for live objects, `load_into` for tensors by name, `load` for fresh ones."""
        return (LOAD, LOAD_INTO) if is_table else (RESUME, LOAD_INTO, LOAD)

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        from varvite import CheckpointManager

        self._manager = CheckpointManager(folder, **self.arguments)
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


class Staging(Varvite):
    """Another way to stage: only what a loop waits for differs, the files are the same."""

    loads_like: ClassVar[str | None] = Varvite.name
    workloads: ClassVar[tuple[str, ...]] = ()


class StagingCow(Staging):
    """Clones of torch that are copied when something writes to them."""

    name: ClassVar[str] = "varvite-cow"
    title: ClassVar[str] = "Varvite, staging cow"
    arguments: ClassVar[dict[str, Any]] = {"staging": "cow"}


class StagingOverlap(Staging):
    """Copied during forward and backward, joined before the optimizer's step."""

    name: ClassVar[str] = "varvite-overlap"
    title: ClassVar[str] = "Varvite, staging overlap"
    arguments: ClassVar[dict[str, Any]] = {"staging": "overlap"}


class Compression(Varvite):
    """Another level of compression; one way to load shows what decoding takes."""

    workloads: ClassVar[tuple[str, ...]] = ("W1", "W3")

    @classmethod
    def load_modes(cls, *, is_table: bool) -> tuple[LoadMode, ...]:
        """The usual one."""
        return (LOAD,) if is_table else (RESUME,)


class CompressionNone(Compression):
    """Chunks as they are."""

    name: ClassVar[str] = "varvite-none"
    title: ClassVar[str] = "Varvite, compression none"
    arguments: ClassVar[dict[str, Any]] = {"compression": "none"}


class CompressionFast(Compression):
    """Always coded, at the speed that costs little."""

    name: ClassVar[str] = "varvite-fast"
    title: ClassVar[str] = "Varvite, compression fast"
    arguments: ClassVar[dict[str, Any]] = {"compression": "fast"}


class CompressionMax(Compression):
    """Always coded, as small as it gets."""

    name: ClassVar[str] = "varvite-max"
    title: ClassVar[str] = "Varvite, compression max"
    arguments: ClassVar[dict[str, Any]] = {"compression": "max"}


class OptimizerCast(Compression):
    """The moments rounded to bf16, weights as they are: the one configuration that loses bits."""

    name: ClassVar[str] = "varvite-cast"
    title: ClassVar[str] = "Varvite, optimizer as bf16"
    arguments: ClassVar[dict[str, Any]] = {"save_dtype": {"optimizer.**": "bf16"}}
    workloads: ClassVar[tuple[str, ...]] = ("W1",)

    def expected(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The moments rounded, in their own dtype; a count of steps is never rounded."""
        return {
            key: value.to(torch.bfloat16).to(value.dtype)
            if key.startswith("optimizer.") and value.ndim
            else value
            for key, value in tensors.items()
        }


def _by_name(nest: dict[str, Any]) -> dict[str, Tensor]:
    tensors = {f"model.{name}": value for name, value in nest["model"].items()}
    for name, moments in nest["optimizer"]["state"].items():
        for key, value in moments.items():
            tensors[f"optimizer.state.{name}.{key}"] = value
    return tensors
