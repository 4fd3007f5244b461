"""What only a repository has: many snapshots in it, opening it; and the cost of the import."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FEW_SNAPSHOTS = 10
TIMED_SAVES = 50
IMPORT_RUNS = 10
TINY_ELEMENTS = 16


def measure_many_snapshots(arguments: dict[str, Any]) -> dict[str, Any]:
    """Fill one repository with many snapshots and one with few, then save to both in turns.

    In turns, so that a drift of the machine meets both alike; without fsync, so that the disk
    does not hide what grows.
    """
    import torch

    folder, count = Path(arguments["folder"]), int(arguments["count"])
    values = torch.arange(TINY_ELEMENTS, dtype=torch.float32)
    begin = time.perf_counter()
    made = _fill(folder / "many", count, values, begin + arguments["budget_seconds"])
    fill_seconds = time.perf_counter() - begin
    _fill(folder / "few", FEW_SNAPSHOTS, values, None)
    few, many = _open(folder / "few"), _open(folder / "many")
    samples: dict[str, list[float]] = {"few": [], "many": []}
    for turn in range(TIMED_SAVES):
        for name, manager in (("few", few), ("many", many)):
            values += 1
            begin = time.perf_counter()
            manager.save_sync(made + turn, {"values": values})
            samples[name].append(time.perf_counter() - begin)
    few.close()
    many.close()
    return {
        "snapshot_count": made,
        "fill_seconds": fill_seconds,
        "few_seconds": statistics.median(samples["few"]),
        "many_seconds": statistics.median(samples["many"]),
    }


def _open(folder: Path) -> Any:
    from varvite import CheckpointManager

    return CheckpointManager(folder, fsync=False)


def _fill(folder: Path, count: int, values: Any, deadline: float | None) -> int:
    manager = _open(folder)
    made = 0
    while made < count and (deadline is None or time.perf_counter() < deadline):
        values += 1
        manager.save_sync(made, {"values": values})
        made += 1
    manager.close()
    return made


def measure_open(arguments: dict[str, Any]) -> dict[str, Any]:
    """Open a repository in this fresh process, up to knowing its newest snapshot."""
    from varvite import CheckpointManager

    folder = Path(arguments["folder"]) / "many"
    begin = time.perf_counter()
    manager = CheckpointManager(folder)
    opened = time.perf_counter()
    info = manager.info()
    end = time.perf_counter()
    manager.close()
    return {"open_seconds": opened - begin, "known_seconds": end - begin, "seq": info.seq}


def measure_import() -> dict[str, Any]:
    """Median seconds that `import varvite` adds to the start of a fresh interpreter."""
    samples: dict[str, list[float]] = {"pass": [], "import varvite": []}
    for _ in range(IMPORT_RUNS):
        for statement, taken in samples.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            taken.append(time.perf_counter() - begin)
    bare_seconds = statistics.median(samples["pass"])
    with_import_seconds = statistics.median(samples["import varvite"])
    return {"bare_seconds": bare_seconds, "import_seconds": with_import_seconds - bare_seconds}
