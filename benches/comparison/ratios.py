"""How small a really trained state is stored: alone, as a difference, and over ten saves of a run.

From one trained base the model goes on at a constant learning rate. The bytes of a save that many
steps after the base are what its new files hold, manifest included. Nothing here is timed. Each
save is loaded and compared bit for bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comparison import host, language_model
from comparison.language_model import LanguageModelState
from comparison.peers import PEERS
from comparison.peers.base import Peer
from comparison.workloads import assert_equal, digests, payload_bytes

BASE_STEPS = 600
LEARNING_RATES = (3e-4, 3e-5, 1e-6)
STEPS_BETWEEN = (1, 10, 100)
# The run whose saves are counted for every peer: ten, ten steps apart.
RUN_LEARNING_RATE = 3e-4
RUN_INTERVAL_STEPS = 10
SHOWN_LOSSES = 10

Tensors = dict[str, Tensor]


def measure(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train the base; the bytes of each part at each learning rate and distance; ten saves of each peer."""
    folder = Path(arguments["folder"])
    state = language_model.build()
    losses = language_model.train(state, max(SHOWN_LOSSES, round(BASE_STEPS * arguments["scale"])))
    base = _copy(state.flat())
    found: dict[str, Any] = {
        "parameter_count": sum(value.numel() for value in state.model.parameters()),
        "corpus_tokens": len(state.corpus),
        "base_steps": len(losses),
        "first_loss": losses[0],
        "last_loss": sum(losses[-SHOWN_LOSSES:]) / SHOWN_LOSSES,
        "second_saves": [],
        "rounded_copy": _rounded_copy(folder / "rounded", base),
    }
    for learning_rate in LEARNING_RATES:
        _restore(state, base)
        saves = (
            TenSaves(folder / "runs", state, arguments["peers"])
            if learning_rate == RUN_LEARNING_RATE
            else None
        )
        for step in range(1, max(STEPS_BETWEEN) + 1):
            state.learn(learning_rate)
            if saves is not None and step % RUN_INTERVAL_STEPS == 0:
                saves.save(step)
            if step in STEPS_BETWEEN:
                row = {"learning_rate": learning_rate, "steps": step}
                found["second_saves"].append(row | _second_saves(folder / "pair", base, state.flat()))
        if saves is not None:
            found["ten_saves"] = saves.close()
    return found


def _copy(tensors: Tensors) -> Tensors:
    return {name: value.detach().clone() for name, value in tensors.items()}


def _restore(state: LanguageModelState, base: Tensors) -> None:
    with torch.no_grad():
        for name, value in state.flat().items():
            value.copy_(base[name])
    state.generator.manual_seed(2)


def parts(tensors: Tensors) -> dict[str, Tensors]:
    """What a state consists of, each part as a state of its own."""
    weights = {name: value for name, value in tensors.items() if name.startswith("model.")}
    return {
        "fp32 weights": weights,
        "bf16 weights": {name: value.to(torch.bfloat16) for name, value in weights.items()},
        "exp_avg": {name: value for name, value in tensors.items() if name.endswith(".exp_avg")},
        "exp_avg_sq": {name: value for name, value in tensors.items() if name.endswith(".exp_avg_sq")},
        "whole state": tensors,
    }


def _second_saves(folder: Path, base: Tensors, now: Tensors) -> dict[str, Any]:
    before, after = parts(base), parts(now)
    sizes = {}
    for name, tensors in after.items():
        sizes[name] = {
            "raw_bytes": payload_bytes(tensors),
            "alone_bytes": stored_bytes(folder, [tensors], delta=False),
            "delta_bytes": stored_bytes(folder, [before[name], tensors], delta=True),
        }
    return {"parts": sizes}


def _rounded_copy(folder: Path, base: Tensors) -> dict[str, int]:
    """A bf16 model beside the fp32 weights it is rounded from, against those weights alone."""
    found = parts(base)
    copies = {f"bf16.{name}": value for name, value in found["bf16 weights"].items()}
    return {
        "raw_bytes": payload_bytes(copies),
        "with_bytes": stored_bytes(folder, [found["fp32 weights"] | copies], delta=True),
        "without_bytes": stored_bytes(folder, [found["fp32 weights"]], delta=True),
    }


def stored_bytes(folder: Path, states: list[Tensors], *, delta: bool) -> int:
    """Bytes of the files that the last of some saves to an empty repository adds; it is loaded too."""
    from varvite import CheckpointManager

    with CheckpointManager(folder, compression="max", delta=delta, fsync=False) as manager:
        for step, tensors in enumerate(states):
            before = host.folder_files(folder)
            manager.save_sync(step, {"tensors": tensors}, rng=False)
        written_bytes, _ = host.written_between(before, host.folder_files(folder))
        assert_equal(digests(manager.load()["tensors"]), digests(states[-1]))
    shutil.rmtree(folder)
    return written_bytes


class TenSaves:
    """The same saves of one run by every peer that was asked for."""

    def __init__(self, folder: Path, state: LanguageModelState, names: list[str]) -> None:
        self.state = state
        self.peers: dict[str, Peer] = {}
        self.written: dict[str, list[int]] = {name: [] for name in names}
        for name in names:
            (folder / name).mkdir(parents=True)
            self.peers[name] = PEERS[name](folder / name, state)

    def save(self, step: int) -> None:
        """One save by each, until it is durable."""
        for name, peer in self.peers.items():
            before = host.folder_files(peer.folder)
            peer.save(step)
            peer.wait()
            written_bytes, _ = host.written_between(before, host.folder_files(peer.folder))
            self.written[name].append(written_bytes)

    def close(self) -> dict[str, Any]:
        """Load and compare the last save of each; the bytes of all."""
        raw_bytes = payload_bytes(self.state.flat())
        last = _copy(self.state.flat())
        for peer in self.peers.values():
            mode = peer.load_modes(is_table=False)[0]
            assert_equal(digests(peer.load(mode.name)), digests(peer.expected(last)))
            peer.close()
            shutil.rmtree(peer.folder)
        return {"raw_bytes": raw_bytes, "interval_steps": RUN_INTERVAL_STEPS, "written": self.written}
