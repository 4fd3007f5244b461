"""The tables: Markdown, so that what a terminal shows can stand in a page as it is."""

from __future__ import annotations

import statistics
from typing import Any

from comparison import raw_limits
from comparison.buckets_report import render_buckets
from comparison.figures import MIB, figures
from comparison.peers import PEERS
from comparison.ranks_report import render_ranks
from comparison.summary import (
    Median,
    Summary,
    layer_parts,
    others,
    summaries,
    summarize_goodput,
    summarize_layer,
    summarize_steps,
)
from comparison.workloads import WORKLOADS


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with aligned columns: text left, numbers right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: list[str]) -> str:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *map(line, rows)])


def render(results: dict[str, Any]) -> str:
    """The whole report."""
    found = summaries(results)
    sections = [_machine(results), _figures(results, found)]
    sections += [_workload(name, results, found.get(name, {})) for name in results["runs"]]
    if results["goodput"]:
        sections.append(_goodput(results))
    if "training" in results:
        sections.append(_training(results["training"]))
    if "ratios" in results:
        sections.append(_ratios(results["ratios"]))
    if "ranks" in results:
        sections.append(render_ranks(results["ranks"], table))
    if "buckets" in results:
        sections.append(render_buckets(results["buckets"], table))
    if "repository" in results:
        sections.append(_repository(results))
    if results["failures"]:
        failed = "\n\n".join(f"**{what}**\n\n```\n{why}\n```" for what, why in results["failures"])
        sections.append(f"## Failed to run\n\n{failed}")
    return "\n\n".join(sections)


def _machine(results: dict[str, Any]) -> str:
    machine, settings = results["machine"], results["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        (
            f"{machine['processor']}, {machine['cores']} cores, "
            f"{machine['memory_bytes'] / 1e9:.0f} GB, Linux {machine['kernel']}, "
            f"{machine['file_system']}, Python {machine['python']}."
        ),
        f"{versions}.",
        f"Scale {settings['scale']:g}; load average at the start {machine['load_average']:.2f}.",
    ]
    lines += [f"Left out: {name} ({why})." for name, why in results["left_out"].items()]
    return "\n".join(lines)


def _workload(name: str, results: dict[str, Any], found: dict[str, Summary]) -> str:
    parts = [f"### {name}: {WORKLOADS[name].title}"]
    raw = results["raw_limits"].get(name)
    if found:
        first = next(iter(found.values()))
        parts.append(
            f"{first.payload_bytes / 1e6:.1f} MB in {first.tensor_count:,} tensors, "
            f"{first.changed_bytes / 1e6:.1f} MB of them changed between two saves."
        )
    if raw:
        parts.append(_limits(raw))
    if found:
        parts += [_saves(found, raw), _loads(found, raw)]
    if "varvite" in found and others(found):
        parts.append(_against_peers(found))
    if name in results["steps"]:
        parts.append(_steps(results["steps"][name], raw))
    return "\n\n".join(parts)


def _limits(raw: dict[str, Any]) -> str:
    rows = []
    for name, seconds in raw["seconds"].items():
        kind, _, count = name.rpartition("_")
        if not count.isdigit():
            kind, count = name, "1"
        taken = raw["samples"][name]
        rows.append(
            [
                raw_limits.TITLES[kind],
                count,
                f"{seconds * 1e3:.1f}",
                f"{raw['length_bytes'] / seconds / 1e9:.2f}",
                f"{statistics.median(taken) * 1e3:.1f}",
                f"{max(taken) * 1e3:.1f}",
            ]
        )
    return table(["raw limit", "threads", "best ms", "GB/s", "median ms", "worst ms"], rows)


def _ratio(seconds: float, raw: dict[str, Any] | None, name: str) -> str:
    if raw is None or name not in raw["seconds"]:
        return "-"
    return f"{seconds / raw['seconds'][name]:.2f}"


def _memcpy_name(raw: dict[str, Any] | None) -> str:
    return f"memcpy_{raw['threads']}" if raw else ""


def _saves(found: dict[str, Summary], raw: dict[str, Any] | None) -> str:
    rows = []
    for name, summary in found.items():
        growth = "-" if summary.growth_bytes is None else f"{summary.growth_bytes / MIB:.1f}"
        rows.append(
            [
                PEERS[name].title,
                f"{summary.first_blocked_seconds * 1e3:.1f}",
                f"{summary.blocked_seconds * 1e3:.1f}",
                _ratio(summary.blocked_seconds, raw, _memcpy_name(raw)),
                f"{summary.durable_seconds * 1e3:.0f}",
                _ratio(summary.durable_seconds, raw, "write"),
                f"{summary.cpu_seconds:.2f}",
                f"{summary.written_bytes / 1e6:.2f}",
                str(summary.file_count),
                f"{summary.save_peak_bytes / MIB:.0f}",
                f"{growth} / {summary.growth_saves}",
            ]
        )
    head = [
        "save",
        "first blocked ms",
        "blocked ms",
        "x memcpy",
        "durable ms",
        "x write",
        "CPU s",
        "MB written",
        "files",
        "peak MiB beyond the state",
        "growth MiB / saves",
    ]
    return table(head, rows)


def _loads(found: dict[str, Summary], raw: dict[str, Any] | None) -> str:
    rows = []
    for name, summary in found.items():
        for load in summary.loads:
            place = f"in place {load.in_place_share:.0%}" if load.in_place else "fresh"
            cold = f"{load.cold_seconds * 1e3:.1f}"
            if load.cached_share > 0.05:
                cold += f" ({load.cached_share:.0%} was cached)"
            rows.append(
                [
                    f"{PEERS[name].title}: {load.name}",
                    place,
                    f"{load.warm_seconds * 1e3:.1f}",
                    _ratio(load.warm_seconds, raw, _memcpy_name(raw)),
                    cold,
                    _ratio(load.cold_seconds, raw, "read_cold_1"),
                    f"{load.peak_bytes / MIB:.1f}",
                ]
            )
    head = ["load", "into", "warm ms", "x memcpy", "cold ms", "x raw read", "peak MiB extra"]
    return table(head, rows)


def _against_peers(found: dict[str, Summary]) -> str:
    ours = found["varvite"]
    rows = []
    for name, theirs in others(found).items():
        pairs: list[tuple[float, float] | None] = [
            (theirs.blocked_seconds, ours.blocked_seconds),
            (theirs.durable_seconds, ours.durable_seconds),
            (theirs.cpu_seconds, ours.cpu_seconds),
            None,
            None,
            (theirs.written_bytes, ours.written_bytes),
        ]
        if theirs.best_load and ours.best_load:
            pairs[3] = (theirs.best_load.warm_seconds, ours.best_load.warm_seconds)
            pairs[4] = (theirs.best_load.cold_seconds, ours.best_load.cold_seconds)
        cells = [f"{pair[0] / pair[1]:.2f}" if pair and pair[1] else "-" for pair in pairs]
        rows.append([PEERS[name].title, *cells])
    head = ["times Varvite", "blocked", "durable", "CPU", "load warm", "load cold", "written"]
    return table(head, rows)


def _steps(found: dict[str, Any], raw: dict[str, Any] | None) -> str:
    rows = []
    for name, samples in found.items():
        steps = summarize_steps(samples)
        rows.append(
            [
                PEERS[name].title,
                f"{steps.blocked_seconds * 1e3:.2f}",
                f"{steps.join_seconds * 1e3:.2f}",
                f"{steps.waited_seconds / raw['seconds'][_memcpy_name(raw)]:.1%}" if raw else "-",
                f"{steps.forward_backward_seconds * 1e3:.0f}",
                f"{steps.forward_backward_alone_seconds * 1e3:.0f}",
                f"{steps.update_seconds * 1e3:.1f}",
                f"{steps.update_alone_seconds * 1e3:.1f}",
            ]
        )
    head = [
        "in a training loop",
        "call ms",
        "join ms",
        "of memcpy",
        "forward + backward ms",
        "alone ms",
        "update with the join ms",
        "alone ms",
    ]
    return table(head, rows)


def _goodput(results: dict[str, Any]) -> str:
    rows = []
    for name, found in results["goodput"].items():
        summary = summarize_goodput(found)
        rows.append(
            [
                PEERS[name].title,
                f"{summary.share:.2%}",
                f"{summary.worst_share:.2%}",
                f"{summary.best_share:.2%}",
                f"{summary.lost_seconds * 1e3:.0f}",
                f"{summary.step_seconds * 1e3:.0f}",
                str(summary.save_count),
            ]
        )
    interval_steps = next(iter(results["goodput"].values()))["interval_steps"]
    head = [
        f"W1, a save every {interval_steps} steps",
        "goodput",
        "worst round",
        "best round",
        "lost ms a save",
        "step ms",
        "saves",
    ]
    return f"### Goodput\n\n{table(head, rows)}"


def _training(found: dict[str, Any]) -> str:
    parts = ["### The training layer"]
    if found["steps"]:
        parts += [_layer_steps(found["steps"]), _layer_parts(found["steps"])]
    if "saves" in found:
        parts.append(_layer_saves(found["saves"]))
    return "\n\n".join(parts)


def _layer_steps(steps: dict[str, Any]) -> str:
    rows = []
    for name, found in steps.items():
        summary = summarize_layer(found)
        rows.append(
            [
                f"{name}: {found['title']}",
                f"{found['parameter_count']:,}",
                f"{summary.plain_seconds * 1e3:.2f}",
                _microseconds(summary.added),
                f"{summary.added.value / summary.plain_seconds:.2%}",
                _microseconds(summary.whole_added),
            ]
        )
    head = [
        "a step without a save",
        "parameters",
        "plain ms",
        "the layer adds us",
        "of the step",
        "whole steps apart us",
    ]
    return table(head, rows)


def _microseconds(median: Median) -> str:
    return f"{median.value * 1e6:.0f} ({median.low * 1e6:.0f} to {median.high * 1e6:.0f})"


def _layer_parts(steps: dict[str, Any]) -> str:
    parts = {name: layer_parts(found) for name, found in steps.items()}
    rows = []
    for row in zip(*parts.values(), strict=True):
        cells = [
            f"{seconds * 1e6:.0f}" for part in row for seconds in (part.layer_seconds, part.plain_seconds)
        ]
        rows.append([row[0].name, *cells])
    head = [f"{name}, {loop}" for name in parts for loop in ("layer us", "plain us")]
    return table(["of it", *head], rows)


def _layer_saves(found: dict[str, Any]) -> str:
    rows = []
    titles = {
        "save_seconds": "blocked by a save",
        "restart_seconds": "from an open repository to the first batch",
    }
    for key, title in titles.items():
        everything, bare = (statistics.median(found[key][kind]) for kind in ("everything", "bare"))
        more = everything - bare
        rows.append([title, f"{everything * 1e3:.2f}", f"{bare * 1e3:.2f}", f"{more * 1e3:.2f}"])
    return table(["small", "all of a run ms", "model and optimizer ms", "more ms"], rows)


def _ratios(found: dict[str, Any]) -> str:
    model = (
        f"A GPT of {found['parameter_count'] / 1e6:.2f}M parameters after {found['base_steps']} steps "
        f"on {found['corpus_tokens'] / 1e6:.2f}M tokens, "
        f"loss {found['first_loss']:.2f} to {found['last_loss']:.2f}."
    )
    copy = found["rounded_copy"]
    extra_bytes = copy["with_bytes"] - copy["without_bytes"]
    rounded = (
        f"A bf16 copy of {copy['raw_bytes'] / 1e6:.2f} MB beside its fp32 weights "
        f"adds {extra_bytes / 1e6:.3f} MB."
    )
    parts = ["### Bytes of a trained state", model, _second_saves(found["second_saves"]), rounded]
    return "\n\n".join([*parts, _ten_saves(found["ten_saves"])])


def _second_saves(rows: list[dict[str, Any]]) -> str:
    cells = []
    for name in rows[0]["parts"]:
        sizes = [row["parts"][name] for row in rows]
        alone = [size["raw_bytes"] / size["alone_bytes"] for size in sizes]
        deltas = [size["raw_bytes"] / size["delta_bytes"] for size in sizes]
        raw = f"{sizes[0]['raw_bytes'] / 1e6:.2f}"
        cells.append(
            [name, raw, f"{min(alone):.3f} to {max(alone):.3f}", *(f"{ratio:.3g}" for ratio in deltas)]
        )
    distances = [f"{row['learning_rate']:.0e} N={row['steps']}".replace("e-0", "e-") for row in rows]
    return table(["times smaller than raw, max", "raw MB", "alone", *distances], cells)


def _ten_saves(found: dict[str, Any]) -> str:
    rows = []
    for name, written in found["written"].items():
        rows.append(
            [
                PEERS[name].title,
                f"{written[0] / 1e6:.2f}",
                f"{statistics.median(written[1:] or written) / 1e6:.2f}",
                f"{sum(written) / 1e6:.1f}",
                f"{len(written) * found['raw_bytes'] / sum(written):.3f}",
            ]
        )
    head = [
        f"saves {found['interval_steps']} steps apart",
        "first MB",
        "median of the others MB",
        "all MB",
        "times smaller than raw",
    ]
    return table(head, rows)


def _repository(results: dict[str, Any]) -> str:
    repository = results["repository"]
    rows = [
        [
            f"{repository['snapshot_count']:,}",
            f"{repository['open_seconds'] * 1e3:.1f}",
            f"{repository['known_seconds'] * 1e3:.1f}",
            f"{repository['few_seconds'] * 1e3:.2f}",
            f"{repository['many_seconds'] * 1e3:.2f}",
            f"{repository['fill_seconds']:.1f}",
        ]
    ]
    head = [
        "snapshots",
        "open ms",
        "open and newest known ms",
        "tiny save among 10 ms",
        "tiny save among all ms",
        "making them s",
    ]
    return f"### Many snapshots\n\n{table(head, rows)}"


def _figures(results: dict[str, Any], found: dict[str, dict[str, Summary]]) -> str:
    rows = [[row.name, row.target, row.measured, row.verdict] for row in figures(results, found)]
    note = ""
    if results["settings"]["scale"] != 1.0:
        note = "The figures are for scale 1; this run was scaled.\n\n"
    return f"## Figures to reach\n\n{note}" + table(["name", "target", "measured", "verdict"], rows)
