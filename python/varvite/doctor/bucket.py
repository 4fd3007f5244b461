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
)
"""Key of the probe, name of the check, what is found where it fails, and what that means."""


def examine_bucket(remote: Remote) -> list[Check]:
    """Runs all checks of a bucket, which need not hold a repository yet.

    Returns:
        The checks, in the order in which they are to be read. The first one is `bad` where the bucket can't
        be used at all; then only what the connection goes by follows.
    """
    from varvite._native import connection, probe

    known: dict[str, str | None] = {}
    try:
        known = connection(remote.text, remote.credentials)
        found = probe(remote.text, remote.credentials)
    except CheckpointError as error:
        meaning = error.message if error.hint is None else f"{error.message}; {error.hint}"
        return [Check("bucket", "can't be used", "bad", meaning), *_sources(known)]
    return [_place(remote.url, known), *_sources(known), *_promises(found), *_rates(found)]


def _place(url: str, known: dict[str, str | None]) -> Check:
    facts = {"url": url, "endpoint": known["endpoint"], "region": known["region"]}
    endpoint = f" at {facts['endpoint']}" if facts["endpoint"] else ""
    region = f", region {facts['region']}" if facts["region"] else ""
    return Check("bucket", f"{url}{endpoint}{region}", facts=facts)


def _sources(known: dict[str, str | None]) -> list[Check]:
    """Where credentials and certificates come from, as far as that was told."""
    found = [(name, known.get(name)) for name in ("credentials", "certificates")]
    return [Check(name, source, facts={"from": source}) for name, source in found if source is not None]


def _promises(found: dict[str, Any]) -> list[Check]:
    return [
        Check(name, "works") if found[key] else Check(name, value, "bad", meaning)
        for key, name, value, meaning in _PROMISES
    ]


def _rates(found: dict[str, Any]) -> list[Check]:
    seconds = found["request_seconds"]
    is_slow = seconds > _SLOW_REQUEST_SECONDS
    meaning = "a push makes several requests for each snapshot; no save waits for them" if is_slow else ""
    value = f"{seconds * 1000:.1f} ms"
    checks = [Check("request time", value, "warn" if is_slow else "ok", meaning, {"seconds": seconds})]
    for key, name in (("put_bytes_per_second", "put rate"), ("get_bytes_per_second", "get rate")):
        rate = found[key]
        is_slow = rate < _SLOW_BYTES_PER_SECOND
        meaning = "pushes may fall behind the saves; raise `sync_every`" if is_slow else ""
        value = f"{format_bytes(round(rate))}/s, of one object of {format_bytes(found['measured_bytes'])}"
        facts = {"bytes_per_second": rate, "measured_bytes": found["measured_bytes"]}
        checks.append(Check(name, value, "warn" if is_slow else "ok", meaning, facts))
    return checks
