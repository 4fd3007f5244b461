"""The figures to reach with a bucket, and the tables of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from comparison import raw_limits
from comparison.buckets_peers import FILE_PEERS, INTO_MEMORY, PARALLEL, PART_BYTES
from comparison.summary import Median, median_of

Outcome = tuple[bool | None, str]
Found = dict[str, Any]
BucketFigure = tuple[str, str, Callable[[Found], Outcome]]
Table = Callable[[list[str], list[list[str]]], str]

MIB = 1 << 20
RATE_SHARE = 0.8
# Beside the parts in flight: the engine's own tables, connections, and what Python imports meanwhile.
MEMORY_BYTES = PARALLEL * PART_BYTES + 64 * MIB
FEW_SHARE, FEW_BYTES = 1.1, MIB
TITLES = {
    "varvite": "Varvite: open + sync_now",
    "load_into": "Varvite: open + load_into",
    "resume": "Varvite: open + resume",
    "command": "varvite pull, to a folder",
    **{name: peer.title for name, peer in FILE_PEERS.items()},
    **{f"{name}{INTO_MEMORY}": f"{peer.title}, into memory" for name, peer in FILE_PEERS.items()},
}
FIRST_TITLES = {
    "resume": "Varvite: resume from the url",
    **{name: f"{peer.title} + torch.load" for name, peer in FILE_PEERS.items()},
}
VARIANT_TITLES = {
    "none": "no bucket",
    "pushing": "a bucket, pushing behind",
    "dead": "refuses connections",
    "silent": "accepts, never answers",
}
OURS = frozenset({"varvite", "load_into", "resume", "command"})
LIMIT_TITLES = {**raw_limits.TITLES, "loopback": "plain sockets over loopback"}


def median_seconds(samples: list[Found]) -> float:
    """Of the samples of one row."""
    return statistics.median(sample["seconds"] for sample in samples)


def fastest_peer(samples: dict[str, list[Found]]) -> tuple[float, str]:
    """Median seconds and title of the fastest that is not Varvite; `ValueError` where there is none."""
    return min((median_seconds(taken), name) for name, taken in samples.items() if name not in OURS)


def _rate(found: Found, kind: str, name: str) -> Outcome:
    ours = median_seconds(found[kind][name])
    theirs, rival = fastest_peer(found[kind])
    ratio = theirs / ours
    rates = f"{_gigabytes(found, ours)} / {_gigabytes(found, theirs)} GB/s ({TITLES[rival]})"
    return ratio >= RATE_SHARE, f"{ratio:.2f} x: {rates}"


def _gigabytes(found: Found, seconds: float) -> str:
    return f"{found['pack_bytes'] / seconds / 1e9:.2f}"


def _memory(found: Found, kind: str, name: str) -> Outcome:
    peak_bytes = max(sample["peak_bytes"] for sample in found[kind][name])
    return peak_bytes <= MEMORY_BYTES, f"{peak_bytes / MIB:.0f} MiB"


def _few(found: Found) -> Outcome:
    rows = [(_moved(one), one["tensor_bytes"], title) for title, one in found["few"].items()]
    most = max(rows, key=lambda row: row[0] - FEW_SHARE * row[1])
    moved, tensor_bytes, title = most
    text = f"{title}: {moved / MIB:.3f} MiB for {tensor_bytes / MIB:.3f} MiB"
    return moved <= FEW_SHARE * tensor_bytes + FEW_BYTES, text


def _moved(one: Found) -> int:
    moved: int = one["counts"]["up_bytes"] + one["counts"]["down_bytes"]
    return moved


def save_median(found: Found, name: str, what: str) -> Median:
    """Of all saves of a variant."""
    return median_of([sample[f"{what}_seconds"] for run in found["saves"][name] for sample in run["samples"]])


def _blocked(name: str, what: str) -> Callable[[Found], Outcome]:
    def measure(found: Found) -> Outcome:
        bare, beside = save_median(found, "none", what), save_median(found, name, what)
        # Not slower as far as this many saves can tell.
        return beside.low <= bare.high, f"{_interval(beside)} / {_interval(bare)} ms"

    return measure


BUCKET_FIGURES: tuple[BucketFigure, ...] = (
    ("push to a bucket, rate", ">= 0.8 x the fastest peer", lambda found: _rate(found, "push", "varvite")),
    *(
        (
            f"pull into tensors, {name}, rate",
            ">= 0.8 x the fastest peer",
            lambda found, name=name: _rate(found, "pull", name),
        )
        for name in ("load_into", "resume")
    ),
    *(
        (
            f"memory of a {what}",
            f"<= {PARALLEL} x {PART_BYTES // MIB} + 64 MiB",
            lambda found, kind=kind, name=name: _memory(found, kind, name),
        )
        for what, kind, name in (
            ("push", "push", "varvite"),
            ("pull, load_into", "pull", "load_into"),
            ("pull, resume", "pull", "resume"),
        )
    ),
    ("a few tensors from a bucket, bytes moved", "<= 1.1 x theirs + 1 MiB", _few),
    *(
        (f"{what} by a save, bucket {VARIANT_TITLES[name]}", "as without, within noise", _blocked(name, what))
        for name in ("dead", "silent")
        for what in ("blocked", "durable")
    ),
)
"""Each with what measures it in what `BucketRun` found: `KeyError` or `ValueError` if that is not there."""


def render_buckets(found: Found, table: Table) -> str:
    """The tables."""
    parts = ["### Buckets"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    server = f"SeaweedFS on loopback, its data in {found.get('server_data', '-')}"
    parts.append(f"{server}; {versions}. Each sample is a process of its own; all times in ms.")
    if "limits" in found:
        parts.append(_limits(found["limits"], table))
    for kind, verb in (("push", "push"), ("pull", "pull")):
        if found[kind]:
            parts.append(_transfers(found, kind, verb, table))
    renderers = (("few", _few_rows), ("first", _first_rows), ("saves", _save_rows))
    parts += [render(found, table) for kind, render in renderers if found[kind]]
    if found["left_out"]:
        rows = [f"- {what}: {_last_line(reason)}" for what, reason in found["left_out"].items()]
        parts.append("\n".join(["Left out:", "", *rows]))
    return "\n\n".join(parts)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def _number(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _interval(median: Median) -> str:
    return f"{_number(median.value)} ({_number(median.low)} to {_number(median.high)})"


def _limits(limits: Found, table: Table) -> str:
    rows = []
    for name, taken in limits["samples"].items():
        kind, _, count = name.rpartition("_")
        if not count.isdigit():
            kind, count = name, "1"
        if taken:
            numbers = [_number(min(taken)), _number(statistics.median(taken)), _number(max(taken))]
            rate = f"{limits['length_bytes'] / min(taken) / 1e9:.2f}"
            rows.append([LIMIT_TITLES[kind], count, *numbers, rate])
    head = ["raw limit", "threads or connections", "best", "median", "worst", "best GB/s"]
    return table(head, rows)


def _transfers(found: Found, kind: str, verb: str, table: Table) -> str:
    fastest, _ = fastest_peer(found[kind])
    rows = []
    for name, samples in sorted(found[kind].items(), key=lambda row: median_seconds(row[1])):
        seconds = [sample["seconds"] for sample in samples]
        median = statistics.median(seconds)
        peak_bytes = max(sample["peak_bytes"] for sample in samples)
        rows.append(
            [
                TITLES[name],
                _number(min(seconds)),
                _number(median),
                _number(max(seconds)),
                _open(samples),
                str(len(seconds)),
                _gigabytes(found, median),
                f"{fastest / median:.2f}",
                f"{statistics.median(sample['cpu_seconds'] for sample in samples):.2f}",
                f"{peak_bytes / MIB:.0f}",
            ]
        )
    head = [
        f"{verb} of {found['pack_bytes'] / 1e6:.0f} MB",
        "best",
        "median",
        "worst",
        "of it open",
        "samples",
        "GB/s",
        "x fastest peer",
        "CPU s",
        "peak MiB",
    ]
    return table(head, rows)


def _open(samples: list[Found]) -> str:
    if "open_seconds" not in samples[0]:
        return "-"
    return _number(statistics.median(sample["open_seconds"] for sample in samples))


def _few_rows(found: Found, table: Table) -> str:
    rows = []
    for title, one in found["few"].items():
        counts = one["counts"]
        allowed = FEW_SHARE * one["tensor_bytes"] + FEW_BYTES
        rows.append(
            [
                title,
                f"{one['tensor_bytes'] / MIB:.3f}",
                f"{_moved(one) / MIB:.3f}",
                f"{allowed / MIB:.3f}",
                str(counts["requests"]),
                str(counts["connections"]),
                _number(median_seconds(one["samples"])),
            ]
        )
    head = [
        f"tensors of {found['pack_bytes'] / 1e6:.0f} MB",
        "their MiB",
        "moved MiB",
        "allowed MiB",
        "requests",
        "connections",
        "open + load",
    ]
    return table(head, rows)


def _first_rows(found: Found, table: Table) -> str:
    rows = []
    for name, samples in found["first"].items():
        seconds = [sample["seconds"] for sample in samples]
        imports = statistics.median(sample["import_seconds"] for sample in samples)
        cells = [min(seconds), statistics.median(seconds), max(seconds), imports]
        rows.append([FIRST_TITLES[name], *map(_number, cells)])
    title = f"a model of {found['small_bytes'] / 1e6:.0f} MB, from an empty folder"
    head = [title, "best", "median", "worst", "of it import"]
    return table(head, rows)


def _save_rows(found: Found, table: Table) -> str:
    rows = []
    for name, runs in found["saves"].items():
        samples = [sample for run in runs for sample in run["samples"]]
        rows.append(
            [
                VARIANT_TITLES[name],
                *(_interval(save_median(found, name, what)) for what in ("blocked", "durable", "step")),
                f"{statistics.median(run['open_seconds'] for run in runs) * 1e3:.0f}",
                f"{sum(sample['was_pushing'] for sample in samples)} of {len(samples)}",
            ]
        )
    payload_bytes = next(iter(found["saves"].values()))[0]["payload_bytes"]
    head = [
        f"saves of {payload_bytes / 1e6:.0f} MB",
        "blocked",
        "durable",
        "a step",
        "open",
        "while it pushed",
    ]
    return table(head, rows)
