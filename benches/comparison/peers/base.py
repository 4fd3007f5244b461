"""What a compared system is asked to do."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from comparison import host
from comparison.workloads import State

if TYPE_CHECKING:
    from torch import Tensor

KEPT_SAVES = 2


@dataclass(frozen=True)
class LoadMode:
    """A way to load: into the tensors of the state, or into fresh ones."""

    name: str
    in_place: bool


class Peer(ABC):
    """One system on one folder and one state.

    `save` is what a training loop calls and waits for; `wait` returns when that save is on the
    disk for good. A peer that writes a plain file leaves its `fsync` to `wait`: the reading
    most favourable to it, as a trainer could do that part on a thread.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    package: ClassVar[str]
    # Another peer that reads the same files in the same way: one load is made, for the check.
    loads_like: ClassVar[str | None] = None
    # The workloads whose tables it stands in.
    workloads: ClassVar[tuple[str, ...]] = ("W1", "W2", "W3", "W4")
    # True where `wait` does the work of making a save durable, so that a loop has to start it.
    works_in_wait: ClassVar[bool] = False

    @classmethod
    def version(cls) -> str | None:
        """Version of the package, None if it is not installed."""
        try:
            return importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            pass
        # A checkout on the path has no metadata of a distribution.
        if importlib.util.find_spec(cls.package) is None:
            return None
        module = importlib.import_module(cls.package)
        return str(getattr(module, "__version__", "unknown"))

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be measured here, None if it can."""
        return "not installed" if cls.version() is None else None

    @classmethod
    @abstractmethod
    def load_modes(cls, *, is_table: bool) -> tuple[LoadMode, ...]:
        """The ways it can load a training state, or a table of tensors."""

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder
        self.state = state

    @abstractmethod
    def save(self, step: int) -> None:
        """Save the state; after the return the trainer may change it."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the last save is durable."""

    @abstractmethod
    def load(self, mode: str) -> dict[str, Tensor]:
        """Load the newest save; the loaded tensors by the names of `State.flat`."""

    def expected(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a load of these tensors has to give back: what was saved, bit for bit."""
        return tensors

    @abstractmethod
    def drop_older(self) -> None:
        """Remove all but the newest saves, to bound the disk that a run needs."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""


class FilePeer(Peer):
    """A system without a repository: each save has a folder of its own."""

    def step_folder(self, step: int) -> Path:
        """The folder of a save."""
        return self.folder / f"step-{step:08d}"

    def saved_folders(self) -> list[Path]:
        """The folders of all saves, oldest first."""
        return sorted(self.folder.glob("step-*"))

    def drop_older(self) -> None:
        """Remove the folders of all but the newest saves."""
        for old in self.saved_folders()[:-KEPT_SAVES]:
            shutil.rmtree(old)

    def close(self) -> None:
        """Nothing is held between the calls."""


class OneFilePeer(FilePeer):
    """A system that writes a save as one file, and leaves making it durable to its user."""

    file_name: ClassVar[str]
    works_in_wait: ClassVar[bool] = True

    def wait(self) -> None:
        """`fsync` of the file, its folder and the folder above, which got a new name too."""
        newest = self.saved_folders()[-1]
        with open(newest / self.file_name, "rb+") as file:
            host.sync_file(file)
        host.sync_folder(newest)
        host.sync_folder(self.folder)

    def new_path(self, step: int) -> Path:
        """The path to write a save to."""
        folder = self.step_folder(step)
        folder.mkdir()
        return folder / self.file_name

    def newest_path(self) -> Path:
        """The path to load from."""
        return self.saved_folders()[-1] / self.file_name
