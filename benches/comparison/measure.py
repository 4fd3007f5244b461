"""Timed saves and loads of one peer on one workload, each in a process of its own.

The loads run in another process than the saves: as after a restart, nothing that the save left
in memory helps, and the memory of one is not counted for the other.
"""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison import host
from comparison.peers import PEERS
from comparison.peers.base import LoadMode, Peer
from comparison.workloads import (
    WORKLOADS,
    State,
    TensorTable,
    assert_equal,
    digests,
    payload_bytes,
    scramble,
)

if TYPE_CHECKING:
    from torch import Tensor

SETTLED_SAVES = 5


@dataclass(frozen=True)
class Task:
    """What one worker process measures."""

    peer: str
    workload: str
    scale: float
    folder: str
    repeat: int
    budget_seconds: float

    def build(self) -> State:
        """The state, one step old: the moments of the optimizer exist after the first."""
        state = WORKLOADS[self.workload].build(self.scale)
        state.step()
        return state

    @property
    def digest_path(self) -> Path:
        """Where the saving process leaves the digests of what it saved last."""
        return Path(f"{self.folder}.digests.json")


@dataclass
class SaveSample:
    """One save: `durable_seconds` counts from the call, like `blocked_seconds`."""

    blocked_seconds: float
    durable_seconds: float
    cpu_seconds: float
    written_bytes: int
    file_count: int
    peak_bytes: int
    resident_bytes: int


@dataclass
class LoadSample:
    """One load, checked against what was saved. `cached_share` is of the pages before it."""

    seconds: float
    cached_share: float
    peak_bytes: int
    in_place_share: float


def measure_saves(arguments: dict[str, Any]) -> dict[str, Any]:
    """The first save apart, then `repeat` more with a real step before each."""
    task = Task(**arguments)
    state = task.build()
    folder = Path(task.folder)
    folder.mkdir(parents=True)
    os.sync()
    baseline_bytes = _settled_resident_bytes()
    peer = PEERS[task.peer](folder, state)
    samples: list[SaveSample] = []
    changed_bytes = 0
    previous = digests(state.flat())
    deadline = time.perf_counter() + task.budget_seconds
    for step in range(task.repeat + 1):
        if len(samples) > 1 and time.perf_counter() > deadline:
            break
        state.step()
        if step == 1:
            changed_bytes = _changed_bytes(state.flat(), previous)
        elif step == 0:
            previous = digests(state.flat())
        samples.append(_timed_save(peer, step, folder))
        peer.drop_older()
    peer.close()
    last = digests(peer.expected(state.flat()))
    task.digest_path.write_text(json.dumps(last))
    return {
        "payload_bytes": payload_bytes(state.flat()),
        "tensor_count": len(last),
        "changed_bytes": changed_bytes,
        "baseline_bytes": baseline_bytes,
        "samples": [asdict(sample) for sample in samples],
    }


def _settled_resident_bytes() -> int:
    gc.collect()
    return host.resident_bytes()


def _changed_bytes(tensors: dict[str, Tensor], previous: dict[str, str]) -> int:
    found = digests(tensors)
    return payload_bytes({name: value for name, value in tensors.items() if found[name] != previous[name]})


def _timed_save(peer: Peer, step: int, folder: Path) -> SaveSample:
    before = host.folder_files(folder)
    gc.collect()
    gc.disable()
    host.reset_peak()
    cpu_begin = time.process_time()
    begin = time.perf_counter()
    peer.save(step)
    blocked_end = time.perf_counter()
    peer.wait()
    durable_end = time.perf_counter()
    cpu_end = time.process_time()
    peak_bytes = host.peak_resident_bytes()
    gc.enable()
    written_bytes, file_count = host.written_between(before, host.folder_files(folder))
    return SaveSample(
        blocked_end - begin,
        durable_end - begin,
        cpu_end - cpu_begin,
        written_bytes,
        file_count,
        peak_bytes,
        _settled_resident_bytes(),
    )


def measure_loads(arguments: dict[str, Any]) -> dict[str, Any]:
    """Every way of the peer to load, warm and cold; each load is checked tensor by tensor."""
    task = Task(**arguments)
    state = task.build()
    folder = Path(task.folder)
    expected = json.loads(task.digest_path.read_text())
    begin = time.perf_counter()
    peer = PEERS[task.peer](folder, state)
    open_seconds = time.perf_counter() - begin
    modes = []
    for mode in peer.load_modes(is_table=isinstance(state, TensorTable)):
        samples: dict[str, list[LoadSample]] = {"warm": [], "cold": []}
        for temperature, taken in samples.items():
            if temperature == "cold" and peer.loads_like:
                continue
            deadline = time.perf_counter() + task.budget_seconds
            while len(taken) < (1 if peer.loads_like else task.repeat):
                if taken and time.perf_counter() > deadline:
                    break
                taken.append(_timed_load(peer, mode, expected, cold=temperature == "cold"))
        modes.append(
            {
                "name": mode.name,
                "in_place": mode.in_place,
                **{key: [asdict(sample) for sample in taken] for key, taken in samples.items()},
            }
        )
    peer.close()
    return {"open_seconds": open_seconds, "modes": modes}


def _timed_load(peer: Peer, mode: LoadMode, expected: dict[str, str], *, cold: bool) -> LoadSample:
    target = peer.state.flat()
    scramble(target)
    addresses = {value.data_ptr() for value in target.values() if value.numel()}
    target.clear()
    if cold:
        cached_share = host.drop_page_cache(peer.folder)
    else:
        host.warm_page_cache(peer.folder)
        cached_share = 1.0
    before_bytes = _settled_resident_bytes()
    host.reset_peak()
    gc.disable()
    begin = time.perf_counter()
    loaded = peer.load(mode.name)
    seconds = time.perf_counter() - begin
    peak_bytes = host.peak_resident_bytes() - before_bytes
    gc.enable()
    held_bytes = _settled_resident_bytes() - before_bytes
    assert_equal(digests(loaded), expected)
    length_bytes = payload_bytes(loaded)
    same = {key: value for key, value in loaded.items() if value.data_ptr() in addresses}
    if not mode.in_place:
        # Fresh tensors are what was asked for, and 50,000 small ones take far more than their
        # values; only what the load needed beside what it left is extra.
        peak_bytes -= max(length_bytes, held_bytes)
    return LoadSample(seconds, cached_share, peak_bytes, payload_bytes(same) / length_bytes)
