"""The figures to reach, each as a row: what, target, measured, verdict.

A figure whose parts were not all measured in this run says so; it is never left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from comparison.buckets_report import BUCKET_FIGURES, BucketFigure
from comparison.peers import PEERS
from comparison.ranks_report import RANK_FIGURES, RankFigure
from comparison.summary import (
    LoadSummary,
    StepSummary,
    Summary,
    others,
    summarize_goodput,
    summarize_layer,
    summarize_steps,
)
from comparison.workloads import WORKLOADS

MIB = 1 << 20
# A tiny save takes part of a millisecond: less than this much dearer is the noise of its median.
GROWTH_LIMIT = 1.2
STEP_SECONDS = 0.05


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
    """What a run found, with `KeyError`, `IndexError` or `ValueError` for what it did not measure."""

    def __init__(self, results: dict[str, Any], table: dict[str, dict[str, Summary]]) -> None:
        self.results = results
        self.table = table

    def varvite(self, workload: str) -> Summary:
        """Varvite's summary on a workload."""
        return self.table[workload]["varvite"]

    def limit(self, workload: str, name: str) -> float:
        """Seconds of a raw limit for the bytes of a workload."""
        return float(self.results["raw_limits"][workload]["seconds"][name])

    def steps(self, workload: str, name: str) -> StepSummary:
        """A configuration in a training loop."""
        return summarize_steps(self.results["steps"][workload][name])

    def part(self, name: str, learning_rate: float, steps: int) -> dict[str, int]:
        """Bytes of a part of the trained state, so many steps after the base."""
        for row in self.results["ratios"]["second_saves"]:
            if (row["learning_rate"], row["steps"]) == (learning_rate, steps):
                found: dict[str, int] = row["parts"][name]
                return found
        raise KeyError(name)

    def memcpy(self, workload: str) -> float:
        """Seconds of a copy by as many threads as the engine uses."""
        return self.limit(workload, f"memcpy_{self.results['raw_limits'][workload]['threads']}")


def figures(results: dict[str, Any], table: dict[str, dict[str, Summary]]) -> list[Figure]:
    """All figures, in the order of the table."""
    findings = Findings(results, table)
    rows: list[Figure] = []
    for name, target, measure in _FIGURES:
        try:
            met, measured = measure(findings)
        except (KeyError, IndexError, ValueError):
            met, measured = None, "-"
        rows.append(Figure(name, target, measured, met))
    return rows


def as_json(rows: list[Figure]) -> list[dict[str, Any]]:
    """The rows for the JSON file."""
    return [asdict(row) for row in rows]


Outcome = tuple[bool | None, str]
Row = tuple[str, str, Callable[["Findings"], Outcome]]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _against(seconds: float, limit_seconds: float, factor: float, also: str = "") -> Outcome:
    ratio = seconds / limit_seconds
    text = f"{ratio:.2f} x ({_milliseconds(seconds)} / {_milliseconds(limit_seconds)}){also}"
    return ratio <= factor, text


def _blocked_w1(found: Findings) -> Outcome:
    return _against(found.varvite("W1").blocked_seconds, found.memcpy("W1"), 1.15)


def _blocked_w2(found: Findings) -> Outcome:
    return _against(found.varvite("W2").blocked_seconds, found.varvite("W1").blocked_seconds, 0.6)


def _waited(name: str, limit_share: float) -> Callable[[Findings], Outcome]:
    def measure(found: Findings) -> Outcome:
        steps = found.steps("W1", name)
        memcpy_seconds = found.memcpy("W1")
        share = steps.waited_seconds / memcpy_seconds
        text = (
            f"{share:.1%} ({steps.waited_seconds * 1e3:.2f} ms / {_milliseconds(memcpy_seconds)}); "
            f"the update {_milliseconds(steps.update_seconds)}, "
            f"{_milliseconds(steps.update_alone_seconds)} without a save"
        )
        # Where the copy has no time to hide in, the figure says nothing.
        decided = steps.forward_backward_alone_seconds > memcpy_seconds
        return (share <= limit_share if decided else None), text

    return measure


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


@dataclass(frozen=True, order=True)
class _Fastest:
    """The shortest time of a system, and the way of loading that took it."""

    seconds: float
    peer: str
    way: str

    def __str__(self) -> str:
        return f"{_milliseconds(self.seconds)} ({self.way})"


def _fastest(summary: Summary, what: str) -> _Fastest:
    title = PEERS[summary.peer].title
    if what == "durable":
        return _Fastest(summary.durable_seconds, summary.peer, title)
    return min(
        (
            _Fastest(
                load.warm_seconds if what == "load warm" else load.cold_seconds,
                summary.peer,
                f"{title}: {load.name}",
            )
            for load in summary.loads
        ),
        default=_Fastest(math.inf, summary.peer, title),
    )


def _ahead(workload: str, what: str) -> Callable[[Findings], Outcome]:
    def measure(found: Findings) -> Outcome:
        ours = _fastest(found.varvite(workload), what)
        theirs = min(
            (_fastest(rival, what) for rival in others(found.table[workload]).values()), default=None
        )
        if theirs is None or math.isinf(theirs.seconds):
            raise KeyError(workload)
        return ours.seconds < theirs.seconds, f"{ours} / {theirs}"

    return measure


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


def _bytes(raw_bytes: int, stored_bytes: int, factor: float, also: str = "") -> Outcome:
    sizes = f"{raw_bytes / 1e6:.2f} / {stored_bytes / 1e6:.2f} MB"
    return stored_bytes * factor <= raw_bytes, f"{raw_bytes / stored_bytes:.2f} x ({sizes}){also}"


def _coded_w1(found: Findings) -> Outcome:
    def ratio(name: str) -> float:
        summary = found.table["W1"][name]
        return summary.payload_bytes / summary.written_bytes

    also = f"; fast {ratio('varvite-fast'):.2f} x, auto {ratio('varvite'):.2f} x"
    summary = found.table["W1"]["varvite-max"]
    return _bytes(summary.payload_bytes, summary.written_bytes, 1.20, also)


def _alone(name: str, factor: float) -> Callable[[Findings], Outcome]:
    def measure(found: Findings) -> Outcome:
        sizes = [row["parts"][name] for row in found.results["ratios"]["second_saves"]]
        worst = max(sizes, key=lambda size: float(size["alone_bytes"]))
        return _bytes(worst["raw_bytes"], worst["alone_bytes"], factor)

    return measure


def _delta(name: str, learning_rate: float, steps: int, factor: float) -> Callable[[Findings], Outcome]:
    def measure(found: Findings) -> Outcome:
        sizes = found.part(name, learning_rate, steps)
        return _bytes(sizes["raw_bytes"], sizes["delta_bytes"], factor)

    return measure


def _rounded_copy(found: Findings) -> Outcome:
    sizes = found.results["ratios"]["rounded_copy"]
    extra_bytes = sizes["with_bytes"] - sizes["without_bytes"]
    share = extra_bytes / sizes["raw_bytes"]
    return share <= 0.01, f"{share:.2%} ({extra_bytes / 1024:.0f} KiB for {sizes['raw_bytes'] / 1e6:.2f} MB)"


def _goodput(found: Findings) -> Outcome:
    summary = summarize_goodput(found.results["goodput"]["varvite-cow"])
    return summary.share >= 0.97, f"{summary.share:.2%} ({summary.lost_seconds * 1e3:.0f} ms lost a save)"


def _goodput_ahead(found: Findings) -> Outcome:
    ours = summarize_goodput(found.results["goodput"]["varvite-cow"]).share
    rivals = others(found.results["goodput"])
    if not rivals:
        raise KeyError("goodput")
    theirs, name = max((summarize_goodput(rival).share, name) for name, rival in rivals.items())
    return ours > theirs, f"{ours:.2%} / {theirs:.2%}: {PEERS[name].title}"


def _layer(found: Findings) -> Outcome:
    summary = summarize_layer(found.results["training"]["steps"]["small"])
    added = summary.added
    text = f"{added.value * 1e3:.2f} ms in a step of {_milliseconds(summary.plain_seconds)}"
    limit_seconds = 0.01 * STEP_SECONDS
    return (None if added.low < limit_seconds <= added.high else added.value < limit_seconds), text


def _of_ranks(figure: RankFigure) -> Row:
    name, target, measure = figure
    return name, target, lambda found: measure(found.results["ranks"])


def _of_buckets(figure: BucketFigure) -> Row:
    name, target, measure = figure
    return name, target, lambda found: measure(found.results["buckets"])


def _ahead_rows() -> tuple[Row, ...]:
    return tuple(
        (f"{workload} {what} against the best peer", "faster", _ahead(workload, what))
        for workload in WORKLOADS
        for what in ("durable", "load warm", "load cold")
    )


_FIGURES: tuple[Row, ...] = (
    ("W1 blocked by a save, copy", "<= 1.15 x memcpy", _blocked_w1),
    ("W2 blocked by a save, copy", "<= 0.6 x W1", _blocked_w2),
    ("W1 call + join in a loop, cow", "<= 2 % of memcpy", _waited("varvite-cow", 0.02)),
    ("W1 call + join in a loop, overlap", "<= 5 % of memcpy", _waited("varvite-overlap", 0.05)),
    ("goodput with a save every 20 steps, cow", ">= 97 %", _goodput),
    ("the same against the best peer", "above", _goodput_ahead),
    ("added by the training layer to a step of 50 ms", "< 0.5 ms", _layer),
    ("W1 bytes, max", "<= raw / 1.20", _coded_w1),
    ("bf16 weights alone, the worst of all", "<= raw / 1.48", _alone("bf16 weights", 1.48)),
    ("bf16 weights, lr 3e-4, N = 1", "<= raw / 5", _delta("bf16 weights", 3e-4, 1, 5)),
    ("bf16 weights, lr 3e-4, N = 100", "<= raw / 1.95", _delta("bf16 weights", 3e-4, 100, 1.95)),
    ("bf16 weights, lr 1e-6, N = 1", "<= raw / 100", _delta("bf16 weights", 1e-6, 1, 100)),
    ("fp32 weights, lr 3e-4, N = 10", "<= raw / 1.44", _delta("fp32 weights", 3e-4, 10, 1.44)),
    ("a bf16 copy beside its fp32 weights", "<= 1 % of its bytes", _rounded_copy),
    ("W1 durable", "<= 1.15 x write + fsync", _durable_w1),
    ("W2 second save, bytes written", "<= changed x 1.01 + 64 KiB", _second_save_w2),
    ("W1 load warm, resume", "<= 1.3 x memcpy", _warm("resume")),
    ("W1 load warm, load_into", "<= 1.3 x memcpy", _warm("load_into")),
    ("W1 load cold, resume", "<= 1.15 x raw read", _cold("resume")),
    ("W1 load cold, load_into", "<= 1.15 x raw read", _cold("load_into")),
    *_ahead_rows(),
    ("W4 files", "<= 3", _small_files),
    ("W4 stored", "<= 3 x payload", _small_stored),
    ("extra memory of a load, the worst of all", "<= 64 MiB", _load_peak),
    ("W1 growth of memory over 20 saves after the fifth", "< 60 MiB", _growth),
    ("open a repository of 10,000 snapshots", "<= 100 ms", _open_many),
    ("a save among 10,000 snapshots against 10", f"<= {GROWTH_LIMIT} x", _cost_of_many),
    ("import varvite", "<= 60 ms", _import),
    *map(_of_ranks, RANK_FIGURES),
    *map(_of_buckets, BUCKET_FIGURES),
)
