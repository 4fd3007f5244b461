"""Fixtures of the Python tests: a stand-in for the engine that keeps the bytes of entries in memory."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support import raw_bytes

from varvite.state import flatten, from_text, to_text, unflatten
from varvite.tensors import TensorSpec, allocate, allocate_array, describe, find_ties

if TYPE_CHECKING:
    from collections.abc import Callable

# Helpers of the tests of buckets assert, too, and say what differs.
pytest.register_assert_rewrite("bucket", "looks")


def fill(target: Any, raw: bytes) -> None:
    """Writes bytes to a dense tensor or array, as the engine does."""
    import torch

    if len(raw) == 0:
        return
    if isinstance(target, torch.Tensor):
        target.detach().reshape(-1).view(torch.uint8).copy_(
            torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        )
    else:
        target.reshape(-1).view("uint8")[:] = memoryview(raw)


class Vault:
    """A saved state: JSON text, and by name dtype, shape, bytes and tie of each entry."""

    def __init__(self, state: Any, prefix: tuple[Any, ...] = ()) -> None:
        flat = flatten(state, prefix=prefix)
        described = [describe(leaf.name, leaf.value) for leaf in flat.leaves]
        self.text = to_text(flat.structure)
        self.ties = find_ties(described)
        self.specs = {one.name: TensorSpec(one.name, one.dtype, tuple(one.shape)) for one in described}
        self.arrays = {one.name for one in described if not hasattr(one.value, "detach")}
        self.raw = {one.name: raw_bytes(one.value) for one in described}

    @property
    def structure(self) -> Any:
        return from_text(self.text)

    def specified(self) -> Any:
        """Returns the nest with a spec in place of each tensor."""
        return unflatten(self.structure, self.specs.__getitem__)

    def load(self) -> Any:
        """Returns the nest with new tensors, tied names sharing one."""
        made: dict[str, Any] = {}

        def leaf(name: str) -> Any:
            first = self.ties.get(name, name)
            if first not in made:
                spec = self.specs[first]
                make = allocate_array if first in self.arrays else allocate
                made[first] = make(spec.dtype, spec.shape)
                fill(made[first], self.raw[first])
            return made[first]

        return unflatten(self.structure, leaf)

    def read(self, destinations: dict[str, Any]) -> None:
        """Fills destinations by name."""
        for name, destination in destinations.items():
            fill(destination, self.raw[name])


@pytest.fixture
def save() -> Callable[..., Vault]:
    """Saves a nest to memory."""
    return Vault


@pytest.fixture
def round_trip() -> Callable[[Any], Any]:
    """Saves a nest to memory and loads it."""
    return lambda state: Vault(state).load()


@pytest.fixture
def run_python() -> Callable[[str], str]:
    """Runs a program in a fresh interpreter and returns its output."""

    def run(program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
