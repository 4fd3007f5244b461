"""Measurements of a bucket: a real server on loopback, and each sample in a process of its own.

The peers take turns with Varvite, so that a drift of the machine meets all alike. A peer that fails is left
out with the reason, and the run goes on.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from comparison import buckets_peers, buckets_server, worker
from comparison.buckets_peers import INTO_MEMORY, Boto3Tuned
from comparison.buckets_relay import relayed, silent
from comparison.buckets_server import Place, Server
from comparison.worker import MeasurementError

LARGE_BYTES, SMALL_BYTES, LIMIT_BYTES = 1 << 30, 100_000_000, 256 << 20
SAVES_SCALE, SAVES_A_TURN = 0.25, 9
VARIANTS = ("none", "pushing", "dead", "silent")
FEW = {
    "one of 8 MiB": ["1.weight"],
    "three of 8 MiB": ["0.weight", "2.weight", "3.weight"],
    "three of 8 KiB": ["0.bias", "1.bias", "3.bias"],
}
FEW_LOADS = 5
FIRST = ("resume", "boto3", "boto3-tuned")
# A kind of sample has no more turns when it has used this up, but two at least.
BUDGET_SECONDS = {"push": 40.0, "pull": 40.0, "first": 12.0, "saves": 40.0}
LEAST_TURNS, CONTENDERS = 2, 2
TORCH_KEY = "small.pt"
TIMEOUT_SECONDS = 300.0
_WORKER = "comparison.buckets_worker"

Attempt = Callable[[str, Callable[[], None]], None]


class BucketRun:
    """All measurements of buckets.

    Attributes:
        found: What was measured so far.
    """

    def __init__(self, folder: Path, scale: float, repeat: int, attempt: Attempt) -> None:
        """Nothing runs yet.

        Args:
            folder: For repositories and what is fetched; removed at the end.
            scale: Of the states.
            repeat: Turns of a push, and of a pull.
            attempt: Runs a part under a title, and notes if it fails.
        """
        self._folder = folder
        self._scale = scale
        self._repeat = repeat
        self._attempt = attempt
        self._peers, versions, left_out = buckets_peers.installed()
        self._saved: dict[str, dict[str, Any]] = {}
        self.found: dict[str, Any] = {
            "versions": versions,
            "left_out": left_out,
            "push": {},
            "pull": {},
            "few": {},
            "first": {},
            "saves": {},
        }

    def everything(self) -> None:
        """All of it."""
        if reason := buckets_server.why_not():
            self.found["left_out"]["server"] = reason
            return
        room_bytes = round(3 * LARGE_BYTES * self._scale)
        try:
            with buckets_server.started(self._folder / "server", room_bytes) as server:
                self.found["server_data"] = server.data
                self._all_of(server)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _all_of(self, server: Server) -> None:
        self._attempt("bucket raw limits", self._limits)
        self._attempt("bucket states", partial(self._prepare, server))
        if len(self._saved) != 2:
            return
        kept = self._kept
        self._attempt("bucket pushes", partial(self._pushes, server))
        self._attempt("bucket pulls", partial(self._pulls, kept))
        self._attempt("bucket few tensors", partial(self._few, kept))
        self._attempt("bucket first values", partial(self._first, kept))
        server.drop(kept)
        for name in ("large", "small"):
            shutil.rmtree(self._folder / name)
        self._attempt("saves beside a bucket", partial(self._saves, server))

    # ---- parts -----------------------------------------------------------------------------

    def _limits(self) -> None:
        length_bytes = round(LIMIT_BYTES * self._scale)
        task = {"length_bytes": length_bytes, "folder": str(self._folder / "raw"), "repeat": 2}
        self.found["limits"] = self._run("limits", task)

    def _prepare(self, server: Server) -> None:
        """Saves what is pushed and pulled, and fills the bucket that all pulls are from."""
        self._kept = server.bucket("kept")
        peer = Boto3Tuned(self._kept)
        for seed, name in enumerate(("large", "small")):
            folder = self._folder / name
            task = {"folder": str(folder), "length_bytes": self._length_bytes(name), "seed": seed}
            saved = self._run("prepare", task)
            # A run in a bucket is the files of a folder; what fills it for all is not what is measured.
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    peer.push(path, f"{name}/{path.relative_to(folder)}")
            self._saved[name] = saved
        peer.push(self._folder / "small.pt", TORCH_KEY)
        self.found["pack_bytes"] = sum(self._saved["large"]["packs"].values())
        self.found["small_bytes"] = sum(self._saved["small"]["tensor_bytes"].values())

    def _pushes(self, server: Server) -> None:
        self._take_turns("push", ("varvite", *self._peers), partial(self._push, server))

    def _push(self, server: Server, name: str) -> Any:
        place = server.bucket(f"push-{time.time_ns()}")
        folder = self._folder / "large"
        try:
            # What the folder remembers of the bucket before would be taken for what this one holds.
            shutil.rmtree(folder / "sync", ignore_errors=True)
            sample = self._run("push", self._task("large", name, place))
            sent = sum(self._saved["large"]["packs"].values())
            stored = sum(length for key, length in server.objects(place).items() if "packs/" in key)
            if stored != sent:
                raise MeasurementError(f"bytes in the bucket: {stored}, not {sent}")
            return sample
        finally:
            server.drop(place)

    def _pulls(self, kept: Place) -> None:
        into_memory = [Boto3Tuned.name + INTO_MEMORY] if Boto3Tuned.name in self._peers else []
        names = ("load_into", "resume", "command", *self._peers, *into_memory)
        self._take_turns("pull", names, lambda name: self._run("pull", self._task("large", name, kept)))

    def _few(self, kept: Place) -> None:
        """Counts what is moved in a process of its own; the clock is another one's, without the relay."""
        tensor_bytes = self._saved["large"]["tensor_bytes"]
        for title, ends in FEW.items():
            names = [f"model.{end}" for end in ends]
            with relayed(kept.endpoint) as relay:
                place = Place(**kept.as_json() | {"endpoint": relay.endpoint})
                self._run("few", self._task("large", "load", place) | {"loads": [names]})
                counts = asdict(relay.counts())
            task = self._task("large", "load", kept) | {"loads": [names] * FEW_LOADS}
            self.found["few"][title] = {
                "tensor_bytes": sum(tensor_bytes[name] for name in names),
                "counts": counts,
                "samples": self._run("few", task)["samples"],
            }

    def _first(self, kept: Place) -> None:
        names = [name for name in FIRST if name == "resume" or name in self._peers]

        def one(name: str) -> Any:
            return self._run("first", self._task("small", name, kept) | {"torch_key": TORCH_KEY})

        self._take_turns("first", names, one)

    def _saves(self, server: Server) -> None:
        with silent() as silent_endpoint:
            endpoints = {
                "none": server.place.endpoint,
                "pushing": server.place.endpoint,
                "dead": f"http://127.0.0.1:{buckets_server.free_port()}",
                "silent": silent_endpoint,
            }
            self._take_turns("saves", VARIANTS, lambda name: self._saves_of(server, name, endpoints[name]))

    def _saves_of(self, server: Server, name: str, endpoint: str) -> Any:
        place = server.bucket(f"saves-{time.time_ns()}")
        try:
            task = {
                "name": name,
                "place": place.as_json() | {"endpoint": endpoint},
                "scale": self._scale * SAVES_SCALE,
                "saves": SAVES_A_TURN,
            }
            return self._run("saves", task)
        finally:
            server.drop(place)

    # ---- turns -----------------------------------------------------------------------------

    def _take_turns(self, kind: str, names: tuple[str, ...] | list[str], one: Callable[[str], Any]) -> None:
        """Takes samples in turns, each turn from another place in the row.

        After the first turn only the fastest peers go on: the others would take time and decide nothing.
        """
        begin = time.perf_counter()
        left, failed = list(names), []
        for turn in range(self._repeat):
            if turn >= LEAST_TURNS and time.perf_counter() - begin > BUDGET_SECONDS[kind]:
                break
            first = turn % max(1, len(left))
            for name in left[first:] + left[:first]:
                try:
                    self.found[kind].setdefault(name, []).append(one(name))
                except MeasurementError as error:
                    left.remove(name)
                    self.found[kind].pop(name)
                    failed.append((name, error))
            left = self._contenders(kind, left)
        self._leave_out(kind, failed)

    def _contenders(self, kind: str, names: list[str]) -> list[str]:
        peers = [name for name in names if self._is_peer(name)]
        peers.sort(key=lambda name: min(sample["seconds"] for sample in self.found[kind][name]))
        return [name for name in names if not self._is_peer(name) or name in peers[:CONTENDERS]]

    def _is_peer(self, name: str) -> bool:
        return name.removesuffix(INTO_MEMORY) in self._peers

    def _leave_out(self, kind: str, failed: list[tuple[str, MeasurementError]]) -> None:
        """Notes which peers have failed; raises if Varvite has."""
        ours = []
        for name, error in failed:
            if self._is_peer(name):
                self.found["left_out"][f"{kind}, {name}"] = str(error)
                print(f"{kind}, {name}: left out", file=sys.stderr, flush=True)
            else:
                ours.append(f"{name}: {error}")
        if ours:
            raise MeasurementError("\n".join(ours))

    def _task(self, state: str, name: str, place: Place) -> dict[str, Any]:
        return {
            "name": name,
            "place": place.as_json(),
            "folder": str(self._folder / state),
            "prefix": state,
            "packs": self._saved[state]["packs"],
            "length_bytes": self._length_bytes(state),
        }

    def _length_bytes(self, state: str) -> int:
        return round({"large": LARGE_BYTES, "small": SMALL_BYTES}[state] * self._scale)

    def _run(self, kind: str, task: dict[str, Any]) -> Any:
        """One sample; what it fetches is gone afterwards."""
        scratch = self._folder / f"scratch-{time.time_ns()}"
        try:
            return worker.run(kind, task | {"scratch": str(scratch)}, _WORKER, TIMEOUT_SECONDS)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            with contextlib.suppress(IsADirectoryError):
                scratch.unlink(missing_ok=True)
