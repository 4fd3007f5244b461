"""The figures to reach, each as a row: what, target, measured, verdict.

A figure whose parts were not all measured in this run says so; it is never left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from comparison.summary import LoadSummary, Summary

MIB = 1 << 20
# A tiny save takes part of a millisecond: less than this much dearer is the noise of its median.
GROWTH_LIMIT = 1.2


@dataclass(frozen=True)
class Figure:
    """One figure. `met` is None where it was not measured."""

    name: str
    target: str
    measured: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """The last column."""
        return {True: "met", False: "not met", None: "not measured"}[self.met]


class Findings:
    """What a run found, with `KeyError` or `IndexError` for what it did not measure."""

    def __init__(self, results: dict[str, Any], table: dict[str, dict[str, Summary]]) -> None:
        self.results = results
        self.table = table

    def varvite(self, workload: str) -> Summary:
        """Varvite's summary on a workload."""
        return self.table[workload]["varvite"]

    def limit(self, workload: str, name: str) -> float:
        """Seconds of a raw limit for the bytes of a workload."""
        return float(self.results["raw_limits"][workload]["seconds"][name])

    def memcpy(self, workload: str) -> float:
        """Seconds of a copy by as many threads as the engine uses."""
        return self.limit(workload, f"memcpy_{self.results['raw_limits'][workload]['threads']}")


def figures(results: dict[str, Any], table: dict[str, dict[str, Summary]]) -> list[Figure]:
    """All figures of the issue, in its order."""
    findings = Findings(results, table)
    rows: list[Figure] = []
    for name, target, measure in _FIGURES:
        try:
            met, measured = measure(findings)
        except (KeyError, IndexError):
            met, measured = None, "-"
        rows.append(Figure(name, target, measured, met))
    return rows


def as_json(rows: list[Figure]) -> list[dict[str, Any]]:
    """The rows for the JSON file."""
    return [asdict(row) for row in rows]


Outcome = tuple[bool | None, str]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _against(seconds: float, limit_seconds: float, factor: float, also: str = "") -> Outcome:
    ratio = seconds / limit_seconds
    text = f"{ratio:.2f} x ({_milliseconds(seconds)} / {_milliseconds(limit_seconds)}){also}"
    return ratio <= factor, text


def _blocked_w1(found: Findings) -> Outcome:
    return _against(found.varvite("W1").blocked_seconds, found.memcpy("W1"), 1.3)


def _blocked_w2(found: Findings) -> Outcome:
    return _against(found.varvite("W2").blocked_seconds, found.varvite("W1").blocked_seconds, 1.0)


def _durable_w1(found: Findings) -> Outcome:
    seconds = found.varvite("W1").durable_seconds
    raw = found.results["raw_limits"]["W1"]
    limits = raw["seconds"]
    also = f"; {seconds / statistics.median(raw['samples']['write']):.2f} x its median"
    if "write_direct" in limits:
        also += f", {seconds / limits['write_direct']:.2f} x O_DIRECT"
    return _against(seconds, limits["write"], 1.15, also)


def _second_save_w2(found: Findings) -> Outcome:
    summary = found.varvite("W2")
    limit_bytes = summary.changed_bytes * 1.01 + 64 * 1024
    over_bytes = summary.second_written_bytes - summary.changed_bytes
    return summary.second_written_bytes <= limit_bytes, (
        f"{summary.second_written_bytes / 1e6:.2f} MB for {summary.changed_bytes / 1e6:.2f} MB "
        f"changed ({over_bytes / 1024:+.0f} KiB)"
    )


def _mode(summary: Summary, name: str) -> LoadSummary:
    return {load.name: load for load in summary.loads}[name]


def _warm(name: str) -> Callable[[Findings], Outcome]:
    def measure(found: Findings) -> Outcome:
        load = _mode(found.varvite("W1"), name)
        limits = found.results["raw_limits"]["W1"]["seconds"]
        fastest = min(value for key, value in limits.items() if key.startswith("read_warm"))
        also = f"; {load.warm_seconds / fastest:.2f} x the fastest raw read"
        met, text = _against(load.warm_seconds, found.memcpy("W1"), 1.3, also)
        if load.in_place_share < 1.0:
            return False, f"{text}; only {load.in_place_share:.0%} of the bytes in place"
        return met, text

    return measure


def _cold(name: str) -> Callable[[Findings], Outcome]:
    def measure(found: Findings) -> Outcome:
        load = _mode(found.varvite("W1"), name)
        raw = found.results["raw_limits"]["W1"]
        limits = raw["seconds"]
        typical_seconds = statistics.median(raw["samples"]["read_cold_1"])
        fastest = min(value for key, value in limits.items() if key.startswith("read_cold"))
        also = (
            f"; {load.cold_seconds / typical_seconds:.2f} x its median, "
            f"{load.cold_seconds / fastest:.2f} x the fastest of all"
        )
        return _against(load.cold_seconds, limits["read_cold_1"], 1.15, also)

    return measure


def _faster(workload: str, peer: str, temperature: str) -> Callable[[Findings], Outcome]:
    def seconds(load: LoadSummary) -> float:
        return load.warm_seconds if temperature == "warm" else load.cold_seconds

    def measure(found: Findings) -> Outcome:
        # The usual load of the peer is the first it lists.
        theirs = seconds(found.table[workload][peer].loads[0])
        ours = seconds(found.varvite(workload).loads[0])
        return ours <= theirs, f"{_milliseconds(ours)} / {_milliseconds(theirs)}"

    return measure


def _small_save(found: Findings) -> Outcome:
    ours = found.varvite("W4").durable_seconds
    theirs = found.table["W4"]["torch"].durable_seconds
    return ours <= theirs, f"{_milliseconds(ours)} / {_milliseconds(theirs)}"


def _small_files(found: Findings) -> Outcome:
    count = found.varvite("W4").file_count
    return count <= 3, f"{count} a save"


def _small_stored(found: Findings) -> Outcome:
    summary = found.varvite("W4")
    ratio = summary.written_bytes / summary.payload_bytes
    sizes = f"{summary.written_bytes / 1e6:.2f} / {summary.payload_bytes / 1e6:.2f} MB"
    return ratio <= 3, f"{ratio:.2f} x ({sizes})"


def _load_peak(found: Findings) -> Outcome:
    measured = {
        (workload, load.name): load.peak_bytes
        for workload, peers in found.table.items()
        for load in (peers["varvite"].loads if "varvite" in peers else ())
    }
    if not measured:
        raise KeyError("varvite")
    (workload, name), peak_bytes = max(measured.items(), key=lambda item: item[1])
    return peak_bytes <= 64 * MIB, f"{peak_bytes / MIB:.1f} MiB ({name} on {workload})"


def _growth(found: Findings) -> Outcome:
    summary = found.varvite("W1")
    if summary.growth_bytes is None:
        return None, "-"
    text = f"{summary.growth_bytes / MIB:.1f} MiB over {summary.growth_saves} saves"
    met = summary.growth_bytes < 60 * MIB
    return (met if summary.growth_saves >= 20 or not met else None), text


def _open_many(found: Findings) -> Outcome:
    repository = found.results["repository"]
    seconds = repository["known_seconds"]
    count = repository["snapshot_count"]
    met = seconds <= 0.1
    return (met if count >= 10_000 else None), f"{_milliseconds(seconds)} with {count:,}"


def _cost_of_many(found: Findings) -> Outcome:
    repository = found.results["repository"]
    met, text = _against(repository["many_seconds"], repository["few_seconds"], GROWTH_LIMIT)
    count = repository["snapshot_count"]
    return (met if count >= 10_000 else None), f"{text}, {count:,} / 10 snapshots"


def _import(found: Findings) -> Outcome:
    seconds = found.results["import"]["import_seconds"]
    return seconds <= 0.06, _milliseconds(seconds)


_FIGURES: tuple[tuple[str, str, Callable[[Findings], Outcome]], ...] = (
    ("W1 blocked by a save", "<= 1.3 x memcpy", _blocked_w1),
    ("W2 blocked by a save", "<= W1", _blocked_w2),
    ("W1 durable", "<= 1.15 x write + fsync", _durable_w1),
    ("W2 second save, bytes written", "<= changed x 1.01 + 64 KiB", _second_save_w2),
    ("W1 load warm, resume", "<= 1.3 x memcpy", _warm("resume")),
    ("W1 load warm, load_into", "<= 1.3 x memcpy", _warm("load_into")),
    ("W1 load cold, resume", "<= 1.15 x raw read", _cold("resume")),
    ("W1 load cold, load_into", "<= 1.15 x raw read", _cold("load_into")),
    ("W1 load warm against torch.load", "faster", _faster("W1", "torch", "warm")),
    ("W1 load cold against torch.load", "faster", _faster("W1", "torch", "cold")),
    ("W1 load warm against DCP", "faster", _faster("W1", "dcp", "warm")),
    ("W1 load cold against DCP", "faster", _faster("W1", "dcp", "cold")),
    ("W4 save against torch.save + fsync", "no slower", _small_save),
    ("W4 load warm against torch.load", "no slower", _faster("W4", "torch", "warm")),
    ("W4 load cold against torch.load", "no slower", _faster("W4", "torch", "cold")),
    ("W4 files", "<= 3", _small_files),
    ("W4 stored", "<= 3 x payload", _small_stored),
    ("extra memory of a load, the worst of all", "<= 64 MiB", _load_peak),
    ("W1 growth of memory over 20 saves after the fifth", "< 60 MiB", _growth),
    ("open a repository of 10,000 snapshots", "<= 100 ms", _open_many),
    ("a save among 10,000 snapshots against 10", f"<= {GROWTH_LIMIT} x", _cost_of_many),
    ("import varvite", "<= 60 ms", _import),
)
