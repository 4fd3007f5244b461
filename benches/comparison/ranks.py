"""Measurements of several ranks: processes on this machine, launched as `torchrun` would, over gloo.

One launch of four ranks saves, in turns with the raw limits; others load what it left, on four ranks and on
two; two ranks save, and four load that. What is between two numbers of ranks is never in one process.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from comparison.worker import BENCHES, SHOWN_LINES, MeasurementError

SAVERS = ("varvite", "varvite-none", "varvite-sync", "varvite-dcp", "dcp", "dcp-async")
LOADERS = ("varvite", "varvite-none", "varvite-dcp", "dcp")
RANK_COUNT, OTHER_COUNT = 4, 2
COMMIT_ENTRIES = (1_000, 5_000, 10_000)
TIMEOUT_SECONDS = 400.0
_WORKER = "comparison.ranks_worker"


Attempt = Callable[[str, Callable[[], None]], None]


class RankRun:
    """All measurements of several ranks.

    Attributes:
        found: What was measured so far.
    """

    def __init__(self, folder: Path, scale: float, repeat: int, attempt: Attempt) -> None:
        """Nothing runs yet.

        Args:
            folder: For the saves; removed at the end.
            scale: Of the model.
            repeat: Saves of each system but the first, which is shown apart; loads of each kind.
            attempt: Runs a part under a title, and notes if it fails.
        """
        self._folder = folder
        self._scale = scale
        self._repeat = repeat
        self._attempt = attempt
        self._sums: dict[int, Any] = {}
        self.found: dict[str, Any] = {"rank_count": RANK_COUNT, "loads": {}, "commit": [], "rounds": []}

    def everything(self) -> None:
        """All of it."""
        try:
            for count in (OTHER_COUNT, RANK_COUNT):
                self._attempt(f"rounds of {count} ranks", partial(self._rounds, count))
            for entries in COMMIT_ENTRIES:
                self._attempt(f"ranks commit {entries} entries", partial(self._commit, entries))
            self._attempt("ranks save", self._saves)
            for saved_by, count in ((RANK_COUNT, RANK_COUNT), (RANK_COUNT, OTHER_COUNT)):
                self._attempt(f"ranks load {saved_by} to {count}", partial(self._loads, saved_by, count))
            shutil.rmtree(self._saved_by(RANK_COUNT), ignore_errors=True)
            self._attempt("fewer ranks save", self._resave)
            self._attempt("more ranks load", partial(self._loads, OTHER_COUNT, RANK_COUNT))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _saved_by(self, count: int) -> Path:
        return self._folder / f"of-{count}"

    def _task(self, saved_by: int, peers: tuple[str, ...]) -> dict[str, Any]:
        return {"folder": str(self._saved_by(saved_by)), "scale": self._scale, "peers": peers}

    def _rounds(self, count: int) -> None:
        self.found["rounds"].append(launch("rounds", {}, count))

    def _commit(self, entries: int) -> None:
        entries = max(1, round(entries * min(self._scale, 1.0)))
        task = {"folder": str(self._folder / f"commit-{entries}"), "entries": entries}
        self.found["commit"].append(launch("commit", task, RANK_COUNT))

    def _saves(self) -> None:
        task = self._task(RANK_COUNT, SAVERS) | {"rounds": self._repeat + 1}
        saves = launch("saves", task, RANK_COUNT)
        self._sums[RANK_COUNT] = saves.pop("sums")
        self.found["saves"] = saves
        for name in set(SAVERS) - set(LOADERS):
            # What is not loaded would only push out of the page cache what is.
            shutil.rmtree(self._saved_by(RANK_COUNT) / name)

    def _resave(self) -> None:
        saved = launch("resave", self._task(OTHER_COUNT, LOADERS), OTHER_COUNT)
        self._sums[OTHER_COUNT] = saved["sums"]

    def _loads(self, saved_by: int, count: int) -> None:
        if saved_by not in self._sums:
            raise MeasurementError("there is nothing to load: the save before it has failed")
        given = {"sums": self._sums[saved_by], "saved_by": saved_by, "repeat": self._repeat}
        task = self._task(saved_by, LOADERS) | given
        self.found["loads"][f"{saved_by} to {count}"] = launch("loads", task, count)


def launch(kind: str, task: dict[str, Any], count: int) -> Any:
    """Runs one measurement on so many ranks; what the first one found."""
    if "folder" in task:
        Path(task["folder"]).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        result_path, log_path = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", _WORKER, kind, json.dumps(task), str(result_path)]
        with log_path.open("w") as log:
            ranks = [
                subprocess.Popen(command, cwd=BENCHES, stdout=log, stderr=log, env=os.environ | environment)
                for environment in _environments(count)
            ]
            failed = _wait(ranks)
        if failed or not result_path.exists():
            lines = log_path.read_text(errors="replace").strip().splitlines()[-SHOWN_LINES:]
            raise MeasurementError("\n".join([failed or "no result", *lines]))
        return json.loads(result_path.read_text())


def _environments(count: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alike = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
    }
    return [alike | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _wait(ranks: list[subprocess.Popen[bytes]]) -> str | None:
    """Waits for all; ends the others where one has failed. Returns why it failed, if it did."""
    until = time.monotonic() + TIMEOUT_SECONDS
    reason = None
    while any(rank.poll() is None for rank in ranks):
        codes = [rank.poll() for rank in ranks]
        failed = [f"rank {number}: {code}" for number, code in enumerate(codes) if code]
        if failed:
            # Those that wait for it hear of it, and say more about it than its exit code.
            until = min(until, time.monotonic() + 5.0)
            reason = f"exit code of {', '.join(failed)}"
        if time.monotonic() > until:
            reason = reason or f"measurement ran out of time: {TIMEOUT_SECONDS:g} s"
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    codes = [rank.wait() for rank in ranks]
    return reason or (f"exit codes: {codes}" if any(codes) else None)
