"""The figures to reach with several ranks, and the tables of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Outcome = tuple[bool | None, str]
Found = dict[str, Any]
RankFigure = tuple[str, str, Callable[[Found], Outcome]]

TITLES = {
    "varvite": "Varvite",
    "varvite-none": "Varvite, compression none",
    "varvite-sync": "Varvite, save_sync, none",
    "varvite-dcp": "Varvite behind dcp, none",
    "dcp": "DCP sync",
    "dcp-async": "DCP async",
}
LIMIT_TITLES = {
    "memcpy": "memcpy of a share",
    "write": "write + fsync of a share",
    "write_direct": "write + fsync of a share, O_DIRECT",
}
SAVE_LIMIT, READ_LIMIT, COMMIT_SECONDS = 1.2, 1.05, 0.05
RIVALS = ("dcp", "dcp-async")


def median_save(found: Found, name: str, what: str) -> float:
    """Seconds of all saves of a system but the first, of the slowest rank."""
    return statistics.median(sample[f"{what}_seconds"] for sample in found["saves"]["samples"][name][1:])


def median_load(found: Found, change: str, name: str, temperature: str) -> float:
    """Seconds of the loads of a system, of the slowest rank."""
    taken = found["loads"][change]["samples"][name][temperature]
    return statistics.median(sample["seconds"] for sample in taken)


def read_share(found: Found, change: str, name: str) -> float:
    """Bytes read by those that are needed, rounded up to chunks; of the rank where it is most."""
    load = found["loads"][change]
    return max(
        read / needed
        for sample in load["samples"][name]["warm"][1:] + load["samples"][name]["cold"]
        for read, needed in zip(sample["read_bytes"], load["needed_bytes"], strict=True)
    )


def best_limit(found: Found, name: str) -> float:
    """Seconds of a raw limit: its best sample; the first one is left out, as that of the systems is."""
    return min(found["saves"]["raw"][name][1:])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _save_against(name: str, limit: str) -> Callable[[Found], Outcome]:
    def measure(found: Found) -> Outcome:
        seconds, limit_seconds = median_save(found, name, "durable"), best_limit(found, limit)
        typical_seconds = statistics.median(found["saves"]["raw"][limit][1:])
        ratio = seconds / limit_seconds
        text = f"{ratio:.2f} x ({_milliseconds(seconds)} / {_milliseconds(limit_seconds)})"
        return ratio <= SAVE_LIMIT, f"{text}; {seconds / typical_seconds:.2f} x its median"

    return measure


def _save_ahead(what: str) -> Callable[[Found], Outcome]:
    def measure(found: Found) -> Outcome:
        ours = median_save(found, "varvite", what)
        theirs, name = min((median_save(found, name, what), name) for name in RIVALS)
        return ours < theirs, f"{_milliseconds(ours)} / {_milliseconds(theirs)} ({TITLES[name]})"

    return measure


def _load_ahead(change: str, temperature: str) -> Callable[[Found], Outcome]:
    def measure(found: Found) -> Outcome:
        ours = median_load(found, change, "varvite", temperature)
        theirs = median_load(found, change, "dcp", temperature)
        return ours < theirs, f"{_milliseconds(ours)} / {_milliseconds(theirs)}"

    return measure


def _reads(change: str) -> Callable[[Found], Outcome]:
    def measure(found: Found) -> Outcome:
        share = read_share(found, change, "varvite-none")
        return share <= READ_LIMIT, f"{share:.4f} x; DCP {read_share(found, change, 'dcp'):.2f} x"

    return measure


def _commit(found: Found) -> Outcome:
    largest = max(found["commit"], key=lambda one: int(one["entries"]))
    seconds = median_commit(largest)
    text = f"{_milliseconds(seconds)} at {largest['entries']:,} entries"
    met = seconds <= COMMIT_SECONDS
    return (met if largest["entries"] >= 10_000 else None), text


def median_commit(one: Found, what: str = "commit") -> float:
    """Seconds of the saves but the first."""
    return statistics.median(sample[f"{what}_seconds"] for sample in one["samples"][1:])


RANK_FIGURES: tuple[RankFigure, ...] = (
    (
        "4 ranks: save against one share alone",
        "<= 1.2 x write + fsync",
        _save_against("varvite-none", "write_alone"),
    ),
    (
        "4 ranks: save against all shares at once",
        "<= 1.2 x write + fsync",
        _save_against("varvite-none", "write_all"),
    ),
    *(
        (f"4 ranks: {what} against DCP, sync and async", "faster", _save_ahead(what))
        for what in ("blocked", "durable")
    ),
    *(
        (f"ranks {change}: load {temperature} against DCP", "faster", _load_ahead(change, temperature))
        for change in ("4 to 4", "4 to 2", "2 to 4")
        for temperature in ("warm", "cold")
    ),
    *(
        (f"ranks {change}: bytes read", "<= 1.05 x the chunks needed", _reads(change))
        for change in ("4 to 2", "2 to 4")
    ),
    ("the coordinator's commit for 4 ranks", "<= 50 ms at 10,000 entries", _commit),
)
"""Each with what measures it in what `RankRun` found: `KeyError` or `ValueError` if that is not there."""

Table = Callable[[list[str], list[list[str]]], str]


def render_ranks(found: Found, table: Table) -> str:
    """The tables."""
    parts = ["### Several ranks"]
    if "saves" in found:
        saves = found["saves"]
        size = f"{saves['parameter_count'] / 1e6:.1f}M parameters with AdamW"
        share = f"{saves['share_bytes'] / 1e6:.1f} MB in {saves['tensor_count']} tensors a rank"
        parts += [
            f"{found['rank_count']} ranks, FSDP2, {size}: {share}. All times in ms.",
            _limits(saves, table),
            _saves(found, table),
        ]
    if found["loads"]:
        parts += [_loads(found, table), _read_bytes(found, table)]
    if found["commit"]:
        parts.append(_commits(found, table))
    if found["rounds"]:
        parts.append(_rounds(found, table))
    return "\n\n".join(parts)


def _number(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _limits(saves: Found, table: Table) -> str:
    rows = []
    for kind, title in LIMIT_TITLES.items():
        cells = []
        for who in ("alone", "all"):
            taken = saves["raw"][f"{kind}_{who}"][1:]
            cells += [_number(min(taken)), _number(statistics.median(taken)), _number(max(taken))]
        rows.append([title, *cells])
    times = [f"{who}, {what}" for who in ("one rank", "all at once") for what in ("best", "median", "worst")]
    return table(["raw limit", *times], rows)


def _saves(found: Found, table: Table) -> str:
    rows = []
    for name, samples in found["saves"]["samples"].items():
        durable = [sample["durable_seconds"] for sample in samples[1:]]
        rows.append(
            [
                TITLES[name],
                _number(samples[0]["blocked_seconds"]),
                _number(median_save(found, name, "prepare")),
                _number(median_save(found, name, "blocked")),
                _number(min(sample["blocked_seconds"] for sample in samples[1:])),
                _number(median_save(found, name, "durable")),
                _number(min(durable)),
                f"{statistics.median(durable) / best_limit(found, 'write_alone'):.2f}",
                f"{statistics.median(durable) / best_limit(found, 'write_all'):.2f}",
            ]
        )
    head = [
        "save",
        "first blocked",
        "state dict",
        "blocked",
        "best",
        "durable",
        "best",
        "x one alone",
        "x all at once",
    ]
    return table(head, rows)


def _loads(found: Found, table: Table) -> str:
    changes = list(found["loads"])
    rows = []
    for name in found["loads"][changes[0]]["samples"]:
        cells = [
            _number(median_load(found, change, name, temperature))
            for change in changes
            for temperature in ("warm", "cold")
        ]
        rows.append([TITLES[name], *cells])
    head = [f"{change}, {temperature}" for change in changes for temperature in ("warm", "cold")]
    return table(["load, ranks", *head], rows)


def _read_bytes(found: Found, table: Table) -> str:
    changes = list(found["loads"])
    rows = [
        [TITLES[name], *(f"{read_share(found, change, name):.4f}" for change in changes)]
        for name in found["loads"][changes[0]]["samples"]
    ]
    return table(["bytes read by those of the chunks needed", *changes], rows)


def _commits(found: Found, table: Table) -> str:
    rows = []
    for one in found["commit"]:
        first, commit = one["samples"][0], median_commit(one)
        cells = [
            first["blocked_seconds"],
            median_commit(one, "blocked"),
            median_commit(one, "durable"),
            commit,
        ]
        rows.append([f"{one['entries']:,}", *map(_number, cells), f"{commit / one['entries'] * 1e6:.2f}"])
    head = ["tiny sharded entries", "first blocked", "blocked", "durable", "commit", "commit us an entry"]
    return table(head, rows)


def _rounds(found: Found, table: Table) -> str:
    rows = []
    for one in found["rounds"]:
        for length_bytes, seconds in one["seconds"].items():
            cells = [f"{seconds[what] * 1e6:.0f}" for what in ("median", "best")]
            rows.append([f"{one['ranks']} ranks", f"{int(length_bytes):,}", *cells])
    return table(["a round", "bytes a rank", "median us", "best us"], rows)
