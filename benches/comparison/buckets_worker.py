"""One measurement of a bucket: ``python -m comparison.buckets_worker KIND ARGUMENTS RESULT``.

torch is imported only by what needs it: a program that this process starts inherits the peak of its memory.
"""

from __future__ import annotations

import contextlib
import filecmp
import gc
import hashlib
import io
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison import host
from comparison.buckets_peers import FILE_PEERS, INTO_MEMORY, PARALLEL, PART_BYTES, Boto3
from comparison.buckets_server import Place

if TYPE_CHECKING:
    from torch import Tensor, nn

    from varvite import CheckpointManager

LAYER_INPUTS, LAYER_OUTPUTS = 1024, 2048
WEIGHT_BYTES = 4 * LAYER_INPUTS * LAYER_OUTPUTS
PIECE_BYTES = 1 << 20
DEAD_SECONDS = 2.0
TRANSFER = {"part_bytes": PART_BYTES, "parallel": PARALLEL}
"""Options of a manager, so that the bound of its memory is known; the tuned peers have the same."""
RUN = "s3://{bucket}/{prefix}"


# ---- what is saved -------------------------------------------------------------------------


def build_model(length_bytes: int) -> nn.Sequential:
    """Layers of 8 MiB with a bias of 8 KiB, not initialised."""
    from torch import nn
    from torch.nn.utils import skip_init

    count = max(4, round(length_bytes / WEIGHT_BYTES))
    return nn.Sequential(*(skip_init(nn.Linear, LAYER_INPUTS, LAYER_OUTPUTS) for _ in range(count)))


def named(model: nn.Module) -> dict[str, Tensor]:
    """Its tensors under the names that they have in a snapshot."""
    return {f"model.{name}": value for name, value in model.state_dict().items()}


def prepare(task: dict[str, Any]) -> dict[str, Any]:
    """Saves a model of random floats to a folder, and beside it as `torch.save` does."""
    import torch

    from comparison.workloads import digests
    from varvite import CheckpointManager

    folder = Path(task["folder"])
    torch.manual_seed(task["seed"])
    model = build_model(task["length_bytes"])
    for value in model.state_dict().values():
        value.normal_()
    with CheckpointManager(folder, compression="none") as manager:
        manager.save_sync(1, model=model)
    torch.save(model.state_dict(), f"{folder}.pt")
    tensors = named(model)
    Path(f"{folder}.digests.json").write_text(json.dumps(digests(tensors)))
    packs = sorted(path for path in (folder / "packs").iterdir() if path.is_file())
    return {
        "packs": {str(path.relative_to(folder)): path.stat().st_size for path in packs},
        "tensor_bytes": {name: value.nbytes for name, value in tensors.items()},
    }


def _check(folder: str, tensors: dict[str, Tensor]) -> None:
    from comparison.workloads import assert_equal, digests

    expected = json.loads(Path(f"{folder}.digests.json").read_text())
    assert_equal(digests(tensors), {name: expected[name] for name in tensors})


# ---- the clock -----------------------------------------------------------------------------


@dataclass
class Sample:
    """What a stretch took; `peak_bytes` is resident memory above what there was before it."""

    begin: float
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    def elapsed(self) -> float:
        """Seconds since its begin."""
        return time.perf_counter() - self.begin

    def as_json(self) -> dict[str, Any]:
        """For the result."""
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "peak_bytes": self.peak_bytes,
            **self.more,
        }


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


@contextlib.contextmanager
def _timed() -> Iterator[Sample]:
    """Measures the block; programs that it starts count."""
    gc.collect()
    gc.disable()
    before_bytes = host.resident_bytes()
    host.reset_peak()
    cpu_begin = _cpu_seconds()
    sample = Sample(time.perf_counter())
    yield sample
    sample.seconds = sample.elapsed()
    sample.cpu_seconds = _cpu_seconds() - cpu_begin
    sample.peak_bytes = host.peak_resident_bytes() - before_bytes
    gc.enable()


def _program_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


# ---- push and pull -------------------------------------------------------------------------


def push(task: dict[str, Any]) -> dict[str, Any]:
    """Sends a repository, or its packs by a program, to an empty bucket."""
    place, folder = Place(**task["place"]), Path(task["folder"])
    host.warm_page_cache(folder)
    if task["name"] == "varvite":
        return _push_run(place, folder)
    peer_type = FILE_PEERS[task["name"]]
    peer = peer_type(place)
    with _timed() as sample:
        for pack in task["packs"]:
            peer.push(folder / pack, pack)
    if peer_type.is_program:
        sample.peak_bytes = _program_peak_bytes()
    return sample.as_json()


def _push_run(place: Place, folder: Path) -> dict[str, Any]:
    from varvite import CheckpointManager

    url = RUN.format(bucket=place.bucket, prefix="run")
    with _timed() as sample:
        manager = CheckpointManager(folder, remote=url, remote_options=place.options(**TRANSFER))
        sample.more["open_seconds"] = sample.elapsed()
        manager.sync_now()
    state = manager.stats().sync
    manager.close()
    if state is None or state.unpushed or state.pending_objects:
        raise AssertionError(f"push has left something behind: `{state}`")
    sample.more["moved_bytes"] = state.moved_bytes
    return sample.as_json()


def pull(task: dict[str, Any]) -> dict[str, Any]:
    """Fetches a snapshot into tensors, or its packs to files or into memory."""
    place = Place(**task["place"])
    name = task["name"]
    if name in _PULLS:
        return _PULLS[name](place, task)
    if name.endswith(INTO_MEMORY):
        return _pull_into_memory(place, task, name.removesuffix(INTO_MEMORY))
    peer_type = FILE_PEERS[name]
    peer = peer_type(place)
    target = Path(task["scratch"])
    target.mkdir()
    paths = {pack: target / Path(pack).name for pack in task["packs"]}
    with _timed() as sample:
        for pack, path in paths.items():
            peer.pull(f"{task['prefix']}/{pack}", path)
    if peer_type.is_program:
        sample.peak_bytes = _program_peak_bytes()
    for pack, path in paths.items():
        if not filecmp.cmp(path, Path(task["folder"]) / pack, shallow=False):
            raise AssertionError(f"`{name}` has fetched other bytes: `{pack}`")
    return sample.as_json()


def _pull_into_memory(place: Place, task: dict[str, Any], name: str) -> dict[str, Any]:
    peer = FILE_PEERS[name](place)
    assert isinstance(peer, Boto3)
    sinks = {pack: io.BytesIO() for pack in task["packs"]}
    with _timed() as sample:
        for pack, sink in sinks.items():
            peer.read(f"{task['prefix']}/{pack}", sink)
    sample.peak_bytes -= sum(task["packs"].values())
    for pack, sink in sinks.items():
        with (Path(task["folder"]) / pack).open("rb") as file:
            if hashlib.file_digest(file, "sha256").digest() != hashlib.sha256(sink.getbuffer()).digest():
                raise AssertionError(f"`{name}` has fetched other bytes: `{pack}`")
    return sample.as_json()


def _target(task: dict[str, Any]) -> nn.Sequential:
    from comparison.workloads import scramble

    model = build_model(task["length_bytes"])
    scramble(model.state_dict())
    return model


def _pull_load_into(place: Place, task: dict[str, Any]) -> dict[str, Any]:
    from varvite import CheckpointManager

    model = _target(task)
    with _timed() as sample:
        manager = CheckpointManager(
            _url(place, task), read_only=True, remote_options=place.options(**TRANSFER)
        )
        sample.more["open_seconds"] = sample.elapsed()
        report = manager.load_into(named(model))
    manager.close()
    if report.missing:
        raise AssertionError(f"tensor was not found by its name: `{report.missing[0]}`")
    _check(task["folder"], named(model))
    return sample.as_json()


def _pull_resume(place: Place, task: dict[str, Any]) -> dict[str, Any]:
    from varvite import CheckpointManager

    model = _target(task)
    with _timed() as sample:
        options = place.options(spool=task["scratch"], **TRANSFER)
        manager = CheckpointManager(_url(place, task), remote_options=options)
        sample.more["open_seconds"] = sample.elapsed()
        report = manager.resume(model=model)
    manager.close()
    if report.step != 1:
        raise AssertionError(f"resumed at another step than was saved: {report.step}")
    _check(task["folder"], named(model))
    return sample.as_json()


def _pull_command(place: Place, task: dict[str, Any]) -> dict[str, Any]:
    Path(task["scratch"]).mkdir()
    command = [sys.executable, "-m", "varvite", "pull", _url(place, task), task["scratch"]]
    for name, value in place.options(**TRANSFER).items():
        command += ["-o", f"{name}={value}"]
    with _timed() as sample:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"`varvite pull` has failed: {ended.stderr.strip()[-500:]}")
    sample.peak_bytes = _program_peak_bytes()
    for pack in task["packs"]:
        if not filecmp.cmp(Path(task["scratch"]) / pack, Path(task["folder"]) / pack, shallow=False):
            raise AssertionError(f"`varvite pull` has fetched other bytes: `{pack}`")
    return sample.as_json()


_PULLS: dict[str, Callable[[Place, dict[str, Any]], dict[str, Any]]] = {
    "load_into": _pull_load_into,
    "resume": _pull_resume,
    "command": _pull_command,
}


def _url(place: Place, task: dict[str, Any]) -> str:
    return RUN.format(bucket=place.bucket, prefix=task["prefix"])


# ---- parts of a snapshot, and the first values of one --------------------------------------


def few(task: dict[str, Any]) -> dict[str, Any]:
    """Loads a few tensors of a large snapshot by their names, several times, by a new manager each."""
    import torch  # noqa: F401 - what a caller has imported long before

    from varvite import CheckpointManager

    place = Place(**task["place"])
    samples = []
    for names in task["loads"]:
        with _timed() as sample:
            manager = CheckpointManager(
                _url(place, task), read_only=True, remote_options=place.options(**TRANSFER)
            )
            found = manager.load(names=names)
        manager.close()
        if sorted(found) != sorted(names):
            raise AssertionError(f"loaded other tensors than were asked for: `{sorted(found)}`")
        _check(task["folder"], found)
        samples.append(sample.as_json())
    return {"samples": samples}


def first(task: dict[str, Any]) -> dict[str, Any]:
    """From an empty folder to a model with its values, from a process that has imported torch only."""
    import torch

    place, name = Place(**task["place"]), task["name"]
    model = _target(task)
    with _timed() as sample:
        if name == "resume":
            from varvite import CheckpointManager

            sample.more["import_seconds"] = sample.elapsed()
            options = place.options(spool=task["scratch"], **TRANSFER)
            manager: CheckpointManager = CheckpointManager(_url(place, task), remote_options=options)
            manager.resume(model=model)
        else:
            import boto3  # noqa: F401 - the client is part of what it takes

            sample.more["import_seconds"] = sample.elapsed()
            peer = FILE_PEERS[name](place)
            peer.pull(task["torch_key"], Path(task["scratch"]))
            model.load_state_dict(torch.load(task["scratch"], weights_only=True))
    if name == "resume":
        manager.close()
    _check(task["folder"], named(model))
    return sample.as_json()


# ---- saves beside a bucket -----------------------------------------------------------------


def saves(task: dict[str, Any]) -> dict[str, Any]:
    """Saves with a step before each, in a folder that has a bucket or not; the first one is left out."""
    from comparison.workloads import WORKLOADS, TrainingState, payload_bytes
    from varvite import CheckpointManager, keep

    state = WORKLOADS["W1"].build(task["scale"])
    assert isinstance(state, TrainingState)
    state.step()
    settings: dict[str, Any] = {"compression": "none", "keep": keep.last(1)}
    with CheckpointManager(task["scratch"], **settings) as manager:
        # A folder that holds a snapshot is one that a run goes on in when its bucket is away.
        manager.save_sync(0, **state.objects)
    begin = time.perf_counter()
    manager = CheckpointManager(task["scratch"], **settings, **_remote(task))
    open_seconds = time.perf_counter() - begin
    samples = [_timed_save(manager, state, step) for step in range(1, task["saves"] + 2)][1:]
    return {
        "payload_bytes": payload_bytes(state.flat()),
        "open_seconds": open_seconds,
        "samples": samples,
        "bucket": _end(manager, task["name"]),
    }


def _remote(task: dict[str, Any]) -> dict[str, Any]:
    if task["name"] == "none":
        return {}
    place = Place(**task["place"])
    # What is not pushed has to go all the same, or the disk would fill.
    more: dict[str, Any] = TRANSFER | {"prune_unpushed": True}
    if task["name"] != "pushing":
        more |= {"timeout_seconds": DEAD_SECONDS, "retry_seconds": DEAD_SECONDS}
    return {
        "remote": RUN.format(bucket=place.bucket, prefix="run"),
        "remote_options": place.options(**more),
    }


def _timed_save(manager: CheckpointManager, state: Any, step: int) -> dict[str, Any]:
    begin = time.perf_counter()
    state.step()
    step_seconds = time.perf_counter() - begin
    sync = manager.stats().sync
    gc.collect()
    gc.disable()
    begin = time.perf_counter()
    handle = manager.save(step, **state.objects)
    blocked_seconds = time.perf_counter() - begin
    handle.wait()
    durable_seconds = time.perf_counter() - begin
    gc.enable()
    return {
        "blocked_seconds": blocked_seconds,
        "durable_seconds": durable_seconds,
        "step_seconds": step_seconds,
        "was_pushing": sync is not None and sync.is_running,
    }


def _end(manager: CheckpointManager, name: str) -> dict[str, Any] | None:
    """Closes the manager; what its bucket has come to must be what the variant is about."""
    from varvite.errors import StoreError

    failure = None
    try:
        manager.close()
    except StoreError as error:
        failure = str(error)
    if (failure is not None) != (name in ("dead", "silent")):
        raise AssertionError(f"close of a manager whose bucket is `{name}` has said: `{failure}`")
    sync = manager.stats().sync
    return None if sync is None else {"pushed_bytes": sync.pushed_bytes, "failure": failure}


# ---- raw limits ----------------------------------------------------------------------------


def limits(task: dict[str, Any]) -> dict[str, Any]:
    """Copy, write and read of so many bytes, and what plain sockets carry over loopback."""
    from comparison import raw_limits

    found = raw_limits.measure(task["length_bytes"], Path(task["folder"]), task["repeat"])
    for count in (1, PARALLEL):
        taken = [_loopback(task["length_bytes"], count) for _ in range(task["repeat"] + 1)]
        found["samples"][f"loopback_{count}"] = taken[1:]
    return raw_limits.merge([found])


_SINK = """
import socket, sys, threading
def swallow(connection):
    buffer = bytearray(1 << 20)
    while connection.recv_into(buffer):
        pass
    connection.sendall(b"!")
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
for _ in range(int(sys.argv[1])):
    threading.Thread(target=swallow, args=(listener.accept()[0],)).start()
"""


def _loopback(length_bytes: int, count: int) -> float:
    """Seconds to send bytes to another process over so many connections."""
    import threading

    piece = bytes(PIECE_BYTES)
    share = length_bytes // count

    def send(connection: socket.socket) -> None:
        for start in range(0, share, PIECE_BYTES):
            connection.sendall(piece[: min(PIECE_BYTES, share - start)])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)

    with (
        subprocess.Popen(
            [sys.executable, "-c", _SINK, str(count)], stdout=subprocess.PIPE, text=True
        ) as sink,
        contextlib.ExitStack() as stack,
    ):
        assert sink.stdout is not None
        port = int(sink.stdout.readline())
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)
        ]
        threads = [threading.Thread(target=send, args=(connection,)) for connection in connections]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    kind.__name__: kind for kind in (prepare, push, pull, few, first, saves, limits)
}

if __name__ == "__main__":
    result = KINDS[sys.argv[1]](json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(result))
