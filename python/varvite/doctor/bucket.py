"""The checks of a bucket: the engine tries there what a run needs, with objects that are removed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from varvite.doctor.checks import Check
from varvite.errors import CheckpointError
from varvite.records import format_bytes

if TYPE_CHECKING:
    from varvite.buckets import Remote

__all__ = ["examine_bucket"]

_SLOW_REQUEST_SECONDS: Final = 1.0
_SLOW_BYTES_PER_SECOND: Final = 5e6

_TWO_WINNERS: Final = "two trainers could both believe that they hold the run: use a store that has it"
_PROMISES: Final = (
    ("put_if_absent", "put if absent", "the store ignores the condition", _TWO_WINNERS),
    ("swap", "compare and swap", "the store ignores the condition", _TWO_WINNERS),
    (
        "lists_at_once",
        "listing after a put",
        "the object was missing",
        "a resume could miss the newest snapshot",
    ),
    ("reads_ranges", "range reads", "other bytes came", "nothing can be read from it in parts"),
)
"""Key of the probe, name of the check, what is found where it fails, and what that means."""


def examine_bucket(remote: Remote) -> list[Check]:
    """Runs all checks of a bucket, which need not hold a repository yet.

    Returns:
        The checks, in the order in which they are to be read: the first alone where it can't be used at all.
    """
    from varvite._native import probe

    try:
        found = probe(remote.text, remote.credentials)
    except CheckpointError as error:
        meaning = error.message if error.hint is None else f"{error.message}; {error.hint}"
        return [Check("bucket", "can't be used", "bad", meaning)]
    return [_place(remote.url, found), *_facts(found), *_promises(found), *_rates(found)]


def _place(url: str, found: dict[str, Any]) -> Check:
    facts = {"url": url, "endpoint": found.get("endpoint"), "region": found.get("region")}
    endpoint = f" at {facts['endpoint']}" if facts["endpoint"] else ""
    region = f", region {facts['region']}" if facts["region"] else ""
    return Check("bucket", f"{url}{endpoint}{region}", facts=facts)


def _facts(found: dict[str, Any]) -> list[Check]:
    names = (("credentials", "from"), ("certificates", "from"))
    return [
        Check(name, str(found[name]), facts={word: found[name]})
        for name, word in names
        if found.get(name) is not None
    ]


def _promises(found: dict[str, Any]) -> list[Check]:
    return [
        Check(name, "works") if found[key] else Check(name, value, "bad", meaning)
        for key, name, value, meaning in _PROMISES
        if found.get(key) is not None
    ]


def _rates(found: dict[str, Any]) -> list[Check]:
    checks = []
    seconds = found.get("request_seconds")
    if seconds is not None:
        is_slow = seconds > _SLOW_REQUEST_SECONDS
        meaning = "a push makes several requests for each snapshot; no save waits for them" if is_slow else ""
        facts = {"median_seconds": seconds}
        value = f"{seconds * 1000:.1f} ms"
        checks.append(Check("request time", value, "warn" if is_slow else "ok", meaning, facts))
    for key, name in (("put_bytes_per_second", "put rate"), ("get_bytes_per_second", "get rate")):
        rate = found.get(key)
        if rate is None:
            continue
        is_slow = rate < _SLOW_BYTES_PER_SECOND
        meaning = "pushes may fall behind the saves; raise `sync_every`" if is_slow else ""
        value = f"{format_bytes(round(rate))}/s, of one object of {format_bytes(found['measured_bytes'])}"
        facts = {"bytes_per_second": rate, "measured_bytes": found["measured_bytes"]}
        checks.append(Check(name, value, "warn" if is_slow else "ok", meaning, facts))
    return checks
