"""From samples to one number each: medians over all saves but the first, and over all loads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from comparison.measure import SETTLED_SAVES
from comparison.peers import OTHERS


@dataclass(frozen=True)
class LoadSummary:
    """One way of one peer to load."""

    name: str
    in_place: bool
    in_place_share: float
    warm_seconds: float
    cold_seconds: float
    cached_share: float
    peak_bytes: int


@dataclass(frozen=True)
class Summary:
    """One peer on one workload."""

    peer: str
    payload_bytes: int
    tensor_count: int
    changed_bytes: int
    first_blocked_seconds: float
    blocked_seconds: float
    durable_seconds: float
    cpu_seconds: float
    written_bytes: int
    second_written_bytes: int
    file_count: int
    save_peak_bytes: int
    growth_bytes: int | None
    growth_saves: int
    open_seconds: float
    loads: tuple[LoadSummary, ...]

    @property
    def best_load(self) -> LoadSummary | None:
        """The fastest way to load, warm; None where loads were only checked."""
        return min(self.loads, key=lambda load: load.warm_seconds, default=None)


@dataclass(frozen=True)
class StepSummary:
    """A save in a training loop, and the step after it beside a step alone."""

    blocked_seconds: float
    join_seconds: float
    forward_backward_seconds: float
    update_seconds: float
    forward_backward_alone_seconds: float
    update_alone_seconds: float

    @property
    def waited_seconds(self) -> float:
        """All that the loop waits for: the call, and what is left of it before the next update."""
        return self.blocked_seconds + self.join_seconds


@dataclass(frozen=True)
class GoodputSummary:
    """Training time without saves by that with them, over all rounds, and by the worst and best round."""

    share: float
    worst_share: float
    best_share: float
    step_seconds: float
    lost_seconds: float
    save_count: int


@dataclass(frozen=True)
class Median:
    """A median, and the values between which it lies at 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LayerSummary:
    """A step of a plain loop, and what the training layer adds to it, turn by turn.

    `added` is without the calls of torch that both loops make alike, `whole_added` with them.
    """

    plain_seconds: float
    added: Median
    whole_added: Median


@dataclass(frozen=True)
class LayerPart:
    """Seconds of a part of a step, with the layer and in the plain loop."""

    name: str
    layer_seconds: float
    plain_seconds: float


def summarize_steps(found: dict[str, Any]) -> StepSummary:
    """Medians over the turns of one loop."""

    def median(*keys: str) -> float:
        values = found["samples"]
        for key in keys:
            values = [value[key] for value in values]
        return float(statistics.median(values))

    return StepSummary(
        blocked_seconds=median("blocked_seconds"),
        # What the empty list of hooks takes is no wait.
        join_seconds=max(0.0, median("after", "join_seconds") - median("without", "join_seconds")),
        forward_backward_seconds=median("after", "forward_backward_seconds"),
        update_seconds=median("after", "update_seconds"),
        forward_backward_alone_seconds=median("without", "forward_backward_seconds"),
        update_alone_seconds=median("without", "update_seconds"),
    )


def summarize_goodput(found: dict[str, Any]) -> GoodputSummary:
    """The sums of all stretches, not medians: a save that now and then costs much costs that."""
    rounds = [(sum(taken["without"]), sum(taken["with"])) for taken in found["rounds"]]
    shares = [without / with_saves for without, with_saves in rounds]
    without = sum(pair[0] for pair in rounds)
    with_saves = sum(pair[1] for pair in rounds)
    save_count = sum(len(taken["with"]) for taken in found["rounds"])
    return GoodputSummary(
        share=without / with_saves,
        worst_share=min(shares),
        best_share=max(shares),
        step_seconds=without / (save_count * found["interval_steps"]),
        lost_seconds=(with_saves - without) / save_count,
        save_count=save_count,
    )


def summarize_layer(found: dict[str, Any]) -> LayerSummary:
    """The two kinds of steps of one model against each other."""
    taken = found["seconds"]
    whole = _differences(taken["layer"], taken["plain"])
    alike = _differences(taken["layer alike"], taken["plain alike"])
    return LayerSummary(
        plain_seconds=statistics.median(taken["plain"]),
        added=median_of(_turn_medians(_differences(whole, alike), found["turn_steps"])),
        whole_added=median_of(_turn_medians(whole, found["turn_steps"])),
    )


def _turn_medians(seconds: list[float], turn_steps: int) -> list[float]:
    return [
        statistics.median(seconds[begin : begin + turn_steps]) for begin in range(0, len(seconds), turn_steps)
    ]


def median_of(values: list[float]) -> Median:
    """The median with what it lies between at 95 %."""
    ordered, count = sorted(values), len(values)
    # Ranks between which a median lies, from the normal approximation of the binomial distribution.
    reach = 1.96 * math.sqrt(count) / 2
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return Median(statistics.median(ordered), ordered[low], ordered[high])


def layer_parts(found: dict[str, Any]) -> list[LayerPart]:
    """The medians of the parts without the calls that both make alike; the rest is what is in none."""
    taken = found["seconds"]
    around = _differences(taken["step"], taken["layer alike"], taken["guard"])
    rest = _differences(taken["layer"], taken["batch"], taken["step"], taken["monitor"], taken["boundary"])
    rows = [
        ("next batch", taken["batch"], taken["plain batch"]),
        ("around the calls of torch", around, _differences(taken["plain step"], taken["plain alike"])),
        ("guard", taken["guard"], [0.0]),
        ("monitor", taken["monitor"], [0.0]),
        ("boundary", taken["boundary"], [0.0]),
        ("the rest", rest, _differences(taken["plain"], taken["plain batch"], taken["plain step"])),
    ]
    return [LayerPart(name, statistics.median(ours), statistics.median(plain)) for name, ours, plain in rows]


def _differences(whole: list[float], *parts: list[float]) -> list[float]:
    return [seconds - sum(taken) for seconds, *taken in zip(whole, *parts, strict=True)]


def others(found: dict[str, Any]) -> dict[str, Any]:
    """The rows that are not of Varvite, in any of its configurations."""
    return {name: value for name, value in found.items() if name in OTHERS}


def summarize(peer: str, saves: dict[str, Any], loads: dict[str, Any]) -> Summary:
    """The summary of one peer's two measurements."""
    first, *later = saves["samples"]

    def median(key: str) -> Any:
        return statistics.median(sample[key] for sample in later)

    every = saves["samples"]
    growth_saves = max(0, len(every) - SETTLED_SAVES)
    growth_bytes = None
    if growth_saves:
        growth_bytes = every[-1]["resident_bytes"] - every[SETTLED_SAVES - 1]["resident_bytes"]
    return Summary(
        peer=peer,
        payload_bytes=saves["payload_bytes"],
        tensor_count=saves["tensor_count"],
        changed_bytes=saves["changed_bytes"],
        first_blocked_seconds=first["blocked_seconds"],
        blocked_seconds=median("blocked_seconds"),
        durable_seconds=median("durable_seconds"),
        cpu_seconds=median("cpu_seconds"),
        written_bytes=round(median("written_bytes")),
        second_written_bytes=later[0]["written_bytes"],
        file_count=round(median("file_count")),
        save_peak_bytes=max(sample["peak_bytes"] for sample in every) - saves["baseline_bytes"],
        growth_bytes=growth_bytes,
        growth_saves=growth_saves,
        open_seconds=loads["open_seconds"],
        loads=tuple(_load_summary(mode) for mode in loads["modes"] if mode["cold"]),
    )


def _load_summary(mode: dict[str, Any]) -> LoadSummary:
    every = mode["warm"] + mode["cold"]
    return LoadSummary(
        name=mode["name"],
        in_place=mode["in_place"],
        in_place_share=min(sample["in_place_share"] for sample in every),
        warm_seconds=statistics.median(sample["seconds"] for sample in mode["warm"]),
        cold_seconds=statistics.median(sample["seconds"] for sample in mode["cold"]),
        cached_share=max(sample["cached_share"] for sample in mode["cold"]),
        # Below zero means that the load got by with memory the process had freed before.
        peak_bytes=max(0, *(sample["peak_bytes"] for sample in every)),
    )


def summaries(results: dict[str, Any]) -> dict[str, dict[str, Summary]]:
    """All summaries by workload and peer; what failed is absent."""
    table: dict[str, dict[str, Summary]] = {}
    for workload, peer, run in _runs(results):
        if "save" in run and "load" in run:
            table.setdefault(workload, {})[peer] = summarize(peer, run["save"], run["load"])
    return table


def _runs(results: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for workload, peers in results["runs"].items():
        for peer, run in peers.items():
            yield workload, peer, run
