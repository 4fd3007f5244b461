"""Compare Varvite with what people use today, end to end, on the same states in one run.

Each measurement runs in a process of its own. The machine's raw limits are taken in the same
run. Speed is reported, never asserted; that every load equals what was saved is asserted. The
exit code is 0 unless something failed to run.

Example:
    python benches/compare.py --scale 0.1 --only W1,goodput --peers varvite,torch
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from comparison import buckets, host, ranks, raw_limits, repository, worker
from comparison.figures import as_json, figures
from comparison.measure import SETTLED_SAVES
from comparison.peers import PEERS
from comparison.report import render
from comparison.summary import summaries
from comparison.workloads import WORKLOADS

PARTS = (*WORKLOADS, "goodput", "training", "ratios", "ranks", "buckets", "repository")
# Measured in a training loop: what a step after a save waits for, and what saving costs a run.
STAGINGS = ("varvite", "varvite-cow", "varvite-overlap")
STEPPED = ("W1", "W2")
GOODPUT = (*STAGINGS, "torch", "dcp-async", "safetensors", "moonclip")
GOODPUT_INTERVAL_STEPS = 20
TRAINING_RECIPES = ("tiny", "small")
STEPPED_SAVES = 6
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / "benchmark-run"
GROWTH_SAVES = 20
# A loop of one kind of sample ends early when it has used this up; the peers, whose growth has
# no figure to reach, get less of it than Varvite.
BUDGET_SECONDS = 3.0
LOAD_BUDGET_SECONDS = {True: 8.0, False: 3.0}
SAVE_BUDGET_SECONDS = {True: 90.0, False: 8.0}
GOODPUT_BUDGET_SECONDS = {True: 40.0, False: 12.0}
FILL_BUDGET_SECONDS = 90.0
SHORT_LOADS = 3
LIMIT_REPEATS = 3
OPEN_RUNS = 5
RANK_REPEAT = 3
BUCKET_REPEAT = 3


def main() -> int:
    """Run what was asked for; print the report; 1 if something failed to run."""
    settings = _arguments()
    # Whoever ends a run is spared what it has written: a server of buckets holds it in memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    begin = time.perf_counter()
    run = Run(settings)
    try:
        run.everything()
    finally:
        run.clean_up()
    results = run.results
    results["wall_seconds"] = time.perf_counter() - begin
    results["figures"] = as_json(figures(results, summaries(results)))
    print(render(results))
    print(f"\n{results['wall_seconds'] / 60:.1f} minutes.")
    if settings.json:
        settings.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if results["failures"] else 0


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no such name: `{name}`; known: {', '.join(known)}")
        return names

    return parse


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full sizes")
    parser.add_argument("--only", type=_names(PARTS), default=list(PARTS), help=f"of {','.join(PARTS)}; all")
    parser.add_argument(
        "--peers", type=_names(PEERS), default=None, help=f"of {','.join(PEERS)}; all that are here"
    )
    parser.add_argument("--repeat", type=int, default=5, help="saves and loads of each kind")
    parser.add_argument("--snapshots", type=int, default=10_000, help="in the large repository")
    parser.add_argument("--json", type=Path, default=None, help="write every sample to this file")
    parser.add_argument(
        "--folder", type=Path, default=DEFAULT_FOLDER, help="where to save; a new folder in it"
    )
    settings = parser.parse_args()
    if settings.scale <= 0 or settings.repeat < 1:
        parser.error("--scale and --repeat must be positive")
    return settings


class Run:
    """One run: its folder, its results so far, and what failed."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        settings.folder.mkdir(parents=True, exist_ok=True)
        self.folder = (settings.folder / f"run-{time.time_ns()}").resolve()
        self.folder.mkdir()
        self.results: dict[str, Any] = {
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": host.describe_machine(self.folder),
            "settings": {"scale": settings.scale, "repeat": settings.repeat},
            "versions": {},
            "left_out": {},
            "raw_limits": {},
            "runs": {},
            "steps": {},
            "goodput": {},
            "failures": [],
        }

    def clean_up(self) -> None:
        """Remove what was written, and the folder around it if that was ours alone."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()

    def everything(self) -> None:
        """All parts that were asked for."""
        peers = self._installed()
        for part in self.settings.only:
            if part in WORKLOADS:
                self._workload(part, peers)
            elif part == "goodput":
                self._goodput(peers)
            elif "varvite" in peers:
                self._varvite_alone(part, peers)

    def _varvite_alone(self, part: str, peers: list[str]) -> None:
        if part == "ratios":
            self._attempt(part, partial(self._ratios, peers))
            return
        if part == "training":
            self._training()
            return
        if part == "ranks":
            self._ranks()
            return
        if part == "buckets":
            self._buckets()
            return
        self._attempt("import", self._import)
        self._attempt("many snapshots", self._many_snapshots)

    def _installed(self) -> list[str]:
        wanted = self.settings.peers or list(PEERS)
        present = []
        for name in wanted:
            reason = PEERS[name].missing()
            if reason is None:
                present.append(name)
                self.results["versions"][PEERS[name].package] = PEERS[name].version()
                continue
            self.results["left_out"][name] = reason
            # Not to find what was asked for by name, or what this is all about, is a failure.
            if self.settings.peers or name == "varvite":
                self.results["failures"].append((name, reason))
        return present

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        print(f"{what} ...", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        try:
            action()
        except (worker.MeasurementError, subprocess.CalledProcessError) as error:
            self.results["failures"].append((what, str(error)))
            print(f"{what}: failed", file=sys.stderr, flush=True)
        else:
            seconds = time.perf_counter() - begin
            print(f"{what}: {seconds:.1f} s", file=sys.stderr, flush=True)

    def _workload(self, workload: str, peers: list[str]) -> None:
        runs: dict[str, Any] = self.results["runs"].setdefault(workload, {})
        taken: list[dict[str, Any]] = []
        self._attempt(f"{workload} raw limits", lambda: taken.append(self._limits(workload)))
        for name in peers:
            if workload in PEERS[name].workloads:
                run = runs.setdefault(name, {})
                self._attempt(f"{workload} {name}", partial(self._peer, workload, name, run))
        for name in STAGINGS:
            if workload in STEPPED and name in peers:
                self._attempt(f"{workload} {name} in a loop", partial(self._steps, workload, name))
        if workload == "W1":
            # The longest, and the one with figures for the disk, which may have drifted
            # meanwhile: its limits are those of before and after.
            self._attempt(f"{workload} raw limits", lambda: taken.append(self._limits(workload)))
        if taken:
            self.results["raw_limits"][workload] = raw_limits.merge(taken)

    def _limits(self, workload: str) -> dict[str, Any]:
        arguments = {
            "workload": workload,
            "scale": self.settings.scale,
            "folder": str(self.folder / "raw"),
            "repeat": LIMIT_REPEATS,
        }
        limits: dict[str, Any] = worker.run("raw_limits", arguments)
        return limits

    def _peer(self, workload: str, name: str, run: dict[str, Any]) -> None:
        folder = self.folder / f"{workload}-{name}"
        is_long = workload == "W1"
        repeat = self.settings.repeat
        task = {
            "peer": name,
            "workload": workload,
            "scale": self.settings.scale,
            "folder": str(folder),
        }
        saves = {
            "repeat": SETTLED_SAVES + GROWTH_SAVES - 1 if is_long else repeat,
            "budget_seconds": SAVE_BUDGET_SECONDS[name == "varvite"] if is_long else BUDGET_SECONDS,
        }
        loads = {
            "repeat": repeat if is_long else min(repeat, SHORT_LOADS),
            "budget_seconds": LOAD_BUDGET_SECONDS[name == "varvite"],
        }
        try:
            run["save"] = worker.run("save", task | saves)
            run["load"] = worker.run("load", task | loads)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _steps(self, workload: str, name: str) -> None:
        found = self._loop("steps", workload, name, {"repeat": STEPPED_SAVES})
        self.results["steps"].setdefault(workload, {})[name] = found

    def _goodput(self, peers: list[str]) -> None:
        for name in GOODPUT:
            if name in peers:
                self._attempt(f"goodput {name}", partial(self._goodput_of, name))

    def _goodput_of(self, name: str) -> None:
        settings = {
            "interval_steps": GOODPUT_INTERVAL_STEPS,
            "budget_seconds": GOODPUT_BUDGET_SECONDS[name in STAGINGS],
        }
        self.results["goodput"][name] = self._loop("goodput", "W1", name, settings)

    def _loop(self, kind: str, workload: str, name: str, settings: dict[str, Any]) -> Any:
        folder = self.folder / f"{kind}-{workload}-{name}"
        task = {"peer": name, "workload": workload, "scale": self.settings.scale, "folder": str(folder)}
        try:
            return worker.run(kind, task | settings)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _ratios(self, peers: list[str]) -> None:
        folder = self.folder / "ratios"
        arguments = {
            "folder": str(folder),
            "scale": self.settings.scale,
            # Those that write the files of another write as many bytes.
            "peers": [name for name in peers if not PEERS[name].loads_like],
        }
        try:
            self.results["ratios"] = worker.run("ratios", arguments)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _training(self) -> None:
        found = self.results["training"] = {"steps": {}}
        for recipe in TRAINING_RECIPES:
            self._attempt(f"training {recipe}", partial(self._training_steps, recipe, found["steps"]))
        self._attempt("training saves", partial(self._training_saves, found))

    def _training_steps(self, recipe: str, found: dict[str, Any]) -> None:
        found[recipe] = self._training_worker("training_steps", {"recipe": recipe})

    def _training_saves(self, found: dict[str, Any]) -> None:
        found["saves"] = self._training_worker("training_saves", {})

    def _training_worker(self, kind: str, task: dict[str, Any]) -> Any:
        folder = self.folder / kind
        try:
            return worker.run(kind, task | {"scale": self.settings.scale, "folder": str(folder)})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _ranks(self) -> None:
        settings = self.settings
        repeat = min(settings.repeat, RANK_REPEAT)
        run = ranks.RankRun(self.folder / "ranks", settings.scale, repeat, self._attempt)
        self.results["ranks"] = run.found
        run.everything()

    def _buckets(self) -> None:
        settings = self.settings
        repeat = min(settings.repeat, BUCKET_REPEAT)
        run = buckets.BucketRun(self.folder / "buckets", settings.scale, repeat, self._attempt)
        self.results["buckets"] = run.found
        run.everything()

    def _import(self) -> None:
        self.results["import"] = repository.measure_import()

    def _many_snapshots(self) -> None:
        folder = str(self.folder / "snapshots")
        arguments = {
            "folder": folder,
            "count": self.settings.snapshots,
            "budget_seconds": FILL_BUDGET_SECONDS,
        }
        filled = worker.run("many_snapshots", arguments)
        opened = [worker.run("open", {"folder": folder}) for _ in range(OPEN_RUNS)]
        opened.sort(key=lambda sample: float(sample["known_seconds"]))
        self.results["repository"] = filled | opened[OPEN_RUNS // 2]


if __name__ == "__main__":
    sys.exit(main())
