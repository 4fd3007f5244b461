"""One rank of a measurement: ``python -m comparison.ranks_worker KIND ARGUMENTS RESULT``.

The launcher sets the environment as `torchrun` does. All ranks start a timed call from a barrier, and the
slowest one counts; the first rank writes the result.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from comparison import host, raw_limits
from comparison.ranks_peers import RANK_PEERS, RankPeer
from comparison.ranks_state import RankState, Size, chunk_bytes_needed
from varvite import CheckpointManager
from varvite.distributed.coordination import Coordination

ROUND_COUNT = 300
ROUND_BYTES = (16, 3000, 100_000)
COMMIT_SAVES = 6


class Ranks:
    """All ranks of this measurement, seen from one of them."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def worst(self, seconds: list[float]) -> list[float]:
        """The largest over the ranks, of each of some numbers."""
        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()

    def alone(self, action: Callable[[], float]) -> float:
        """Seconds of something that the first rank does while the others wait."""
        dist.barrier()
        seconds = action() if self.rank == 0 else 0.0
        return self.worst([seconds])[0]

    def at_once(self, action: Callable[[], float]) -> float:
        """Seconds of the slowest when all do something at the same time."""
        dist.barrier()
        return self.worst([action()])[0]

    def sums(self, state: RankState) -> list[int]:
        """The sums of a state over all ranks."""
        values = torch.tensor(state.sums(), dtype=torch.int64)
        dist.all_reduce(values)
        return values.tolist()


# ---- saves ---------------------------------------------------------------------------------


def measure_saves(ranks: Ranks, task: dict[str, Any]) -> dict[str, Any]:
    """Rounds in which each system saves once, after a step; the raw limits take part as the systems do."""
    state = RankState(Size.scaled(task["scale"]), ranks.rank, ranks.size)
    folder = Path(task["folder"])
    peers = {name: RANK_PEERS[name](folder / name, state) for name in task["peers"]}
    limits = Limits(ranks, folder, state.local_bytes())
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    raw: dict[str, list[float]] = {name: [] for name in limits.actions}
    sums = {}
    for step in range(task["rounds"]):
        for name, action in limits.actions.items():
            raw[name].append(action())
        for name, peer in peers.items():
            state.step()
            samples[name].append(_timed_save(ranks, peer, step))
            if step == task["rounds"] - 1:
                sums[name] = ranks.sums(state)
    for peer in peers.values():
        peer.close()
    return {
        "share_bytes": state.local_bytes(),
        "tensor_count": len(state.tensors()),
        "parameter_count": sum(parameter.numel() for parameter in state.model.parameters()),
        "raw": raw,
        "samples": samples,
        "sums": sums,
    }


class Limits:
    """What the machine allows for the bytes of one rank's share, by one process and by all at once."""

    def __init__(self, ranks: Ranks, folder: Path, share_bytes: int) -> None:
        path = folder / f"raw-{ranks.rank}"
        pages_bytes = -(-share_bytes // raw_limits.PAGE_BYTES) * raw_limits.PAGE_BYTES
        source = raw_limits.Buffer(pages_bytes, 7)
        source.randomise()
        # Half of it is copied over the other half, twice: the systems need the memory.
        half_bytes = pages_bytes // 2

        def copy() -> float:
            begin = time.perf_counter()
            for _ in range(2):
                raw_limits.copy_memory(source.address, source.address + half_bytes, half_bytes)
            return time.perf_counter() - begin

        def write(flags: int) -> Callable[[], float]:
            def run() -> float:
                seconds = raw_limits.write_file(source, path, flags)
                path.unlink()
                return seconds

            return run

        kinds = {"memcpy": copy, "write": write(0), "write_direct": write(os.O_DIRECT)}
        self.actions: dict[str, Callable[[], float]] = {}
        for name, action in kinds.items():
            self.actions[f"{name}_alone"] = lambda action=action: ranks.alone(action)
            self.actions[f"{name}_all"] = lambda action=action: ranks.at_once(action)


def _timed_save(ranks: Ranks, peer: RankPeer, step: int) -> dict[str, float]:
    gc.collect()
    gc.disable()
    dist.barrier()
    begin = time.perf_counter()
    peer.prepare()
    prepared = time.perf_counter()
    peer.save(step)
    blocked = time.perf_counter()
    peer.wait()
    durable = time.perf_counter()
    gc.enable()
    found = ranks.worst([prepared - begin, blocked - prepared, durable - prepared])
    peer.drop_older()
    dist.barrier()
    return dict(zip(("prepare_seconds", "blocked_seconds", "durable_seconds"), found, strict=True))


# ---- loads ---------------------------------------------------------------------------------


def measure_loads(ranks: Ranks, task: dict[str, Any]) -> dict[str, Any]:
    """Loads what other ranks, perhaps of another number, have saved; warm and cold, each checked."""
    state = RankState(Size.scaled(task["scale"]), ranks.rank, ranks.size)
    folder = Path(task["folder"])
    peers = {name: RANK_PEERS[name](folder / name, state) for name in task["peers"]}
    samples: dict[str, Any] = {name: {"warm": [], "cold": []} for name in peers}
    for temperature in ["warm", "cold"] * task["repeat"]:
        for name, peer in peers.items():
            samples[name][temperature].append(_timed_load(ranks, peer, temperature))
            if ranks.sums(state) != task["sums"][name]:
                raise AssertionError(f"`{name}` has loaded other values than were saved")
    for peer in peers.values():
        peer.close()
    needed = [chunk_bytes_needed(value, task["saved_by"]) for value in state.tensors().values()]
    every: list[int] = [0] * ranks.size
    dist.all_gather_object(every, sum(needed))
    return {"samples": samples, "needed_bytes": every, "share_bytes": state.local_bytes()}


def _timed_load(ranks: Ranks, peer: RankPeer, temperature: str) -> dict[str, Any]:
    peer.state.scramble()
    if ranks.rank == 0:
        (host.drop_page_cache if temperature == "cold" else host.warm_page_cache)(peer.folder)
    gc.collect()
    gc.disable()
    dist.barrier()
    before_bytes = _characters_read()
    begin = time.perf_counter()
    peer.prepare()
    prepared = time.perf_counter()
    told_bytes = peer.load()
    end = time.perf_counter()
    read_bytes = _characters_read() - before_bytes
    gc.enable()
    prepare_seconds, seconds = ranks.worst([prepared - begin, end - prepared])
    every: list[tuple[int, int]] = [(0, 0)] * ranks.size
    dist.all_gather_object(every, (told_bytes, read_bytes))
    return {
        "prepare_seconds": prepare_seconds,
        "seconds": seconds,
        "told_bytes": [told for told, _ in every],
        "read_bytes": [read for _, read in every],
    }


def _characters_read() -> int:
    """Bytes this process has read by system calls, from the cache or not: proc(5), /proc/pid/io, rchar."""
    return int(Path("/proc/self/io").read_text().split()[1])


# ---- parts ---------------------------------------------------------------------------------


def resave(ranks: Ranks, task: dict[str, Any]) -> dict[str, Any]:
    """A save of each system, not timed, for other ranks to load."""
    state = RankState(Size.scaled(task["scale"]), ranks.rank, ranks.size)
    for name in task["peers"]:
        peer = RANK_PEERS[name](Path(task["folder"]) / name, state)
        peer.prepare()
        peer.save(0)
        peer.wait()
        peer.close()
    sums = ranks.sums(state)
    return {"sums": dict.fromkeys(task["peers"], sums)}


def measure_commit(ranks: Ranks, task: dict[str, Any]) -> dict[str, Any]:
    """Saves of many tiny tensors, each in a shard on every rank: what the coordinator does beside."""
    mesh = init_device_mesh("cpu", (ranks.size,))
    samples = []
    with CheckpointManager(task["folder"], compression="none") as manager:
        for step in range(COMMIT_SAVES):
            # New values at each save, so that every chunk is written.
            nest = {f"entry-{number:05}": _tiny(mesh, number + step) for number in range(task["entries"])}
            dist.barrier()
            begin = time.perf_counter()
            handle = manager.save(step, {"entries": nest})
            blocked = time.perf_counter() - begin
            handle.wait()
            durable = time.perf_counter() - begin
            commit = handle.timings.commit
            found = ranks.worst([blocked, durable, commit])
            samples.append(
                dict(zip(("blocked_seconds", "durable_seconds", "commit_seconds"), found, strict=True))
            )
    return {"entries": task["entries"], "samples": samples}


def _tiny(mesh: Any, value: int) -> DTensor:
    return DTensor.from_local(torch.full((1,), float(value)), mesh, [Shard(0)], run_check=False)


def measure_rounds(ranks: Ranks, task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a round at the first rank, by the bytes that each rank brings."""
    del task
    coordination = Coordination.join()
    found = {}
    for length_bytes in ROUND_BYTES:
        message = bytes(length_bytes)
        seconds = []
        for _ in range(ROUND_COUNT):
            begin = time.perf_counter()
            coordination.round("measure", message, lambda _: b"")
            seconds.append(time.perf_counter() - begin)
        found[str(length_bytes)] = {"median": statistics.median(seconds), "best": min(seconds)}
    coordination.close()
    return {"ranks": ranks.size, "seconds": found}


KINDS = {
    "saves": measure_saves,
    "loads": measure_loads,
    "resave": resave,
    "commit": measure_commit,
    "rounds": measure_rounds,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    here = Ranks()
    result = KINDS[sys.argv[1]](here, json.loads(sys.argv[2]))
    if here.rank == 0:
        Path(sys.argv[3]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
