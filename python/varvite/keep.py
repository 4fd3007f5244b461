"""Retention policies as values: which snapshots to keep.

Policies are joined with `|`: a snapshot is kept if any part of the policy keeps it. Always kept,
whatever the policy: the newest durable snapshot, the newest healthy one, the one resumed from, pins and
tags, what an open reader holds, and packs that kept snapshots refer to.

Example:
    >>> from varvite import keep
    >>> policy = keep.last(3) | keep.best("val_loss", "min", n=2)
    >>> policy
    keep.last(3) | keep.best("val_loss", "min", n=2)
    >>> policy.rules()[0]
    {'rule': 'last', 'count': 3}
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Final

from varvite.errors import InvalidInputError
from varvite.sizes import parse_bytes

__all__ = ["Keep", "best", "daily", "every", "hourly", "last", "max_bytes", "tagged", "within"]

_COUNT_LIMIT: Final = 1 << 31
_HOUR_MILLISECONDS: Final = 3_600_000
_DAY_MILLISECONDS: Final = 24 * _HOUR_MILLISECONDS


@dataclass(frozen=True)
class Rule:
    """One part of a policy.

    Attributes:
        call: The call that makes it, for messages.
        facts: What the engine's planner reads, as pairs of a JSON name and value.
    """

    call: str
    facts: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Keep:
    """A retention policy: a set of rules, each of which keeps snapshots.

    Make one with the functions of this module. Policies compare equal when their rules are the same in
    the same order.

    Attributes:
        parts: The rules, each once.
    """

    parts: tuple[Rule, ...]

    def __or__(self, other: Keep) -> Keep:
        """Returns the policy that keeps what either keeps."""
        if not isinstance(other, Keep):
            return NotImplemented
        return Keep(tuple(dict.fromkeys(self.parts + other.parts)))

    def __repr__(self) -> str:
        """Returns the calls that make this policy."""
        return " | ".join(f"keep.{part.call}" for part in self.parts)

    def rules(self) -> list[dict[str, Any]]:
        """Returns the rules as plain JSON, for the engine.

        Example:
            >>> hourly(24).rules()
            [{'rule': 'bucket', 'milliseconds': 3600000, 'count': 24}]
        """
        return [dict(part.facts) for part in self.parts]


def last(n: int) -> Keep:
    """Keeps the `n` newest snapshots, by commit.

    Raises:
        InvalidInputError: `n` is not a whole number from 1.

    Example:
        >>> last(3)
        keep.last(3)
    """
    return _policy(f"last({n})", rule="last", count=_count("n", n))


def every(steps: int) -> Keep:
    """Keeps every snapshot whose step is a multiple of `steps`.

    Raises:
        InvalidInputError: `steps` is not a whole number from 1.

    Example:
        >>> every(5000).rules()
        [{'rule': 'every', 'steps': 5000}]
    """
    return _policy(f"every({steps})", rule="every", steps=_count("steps", steps))


def best(metric: str, mode: str = "min", n: int = 1) -> Keep:
    """Keeps the `n` snapshots with the best value of a metric. One that is NaN is never best.

    Args:
        metric: Name of the metric, as in `save(metrics=...)`.
        mode: `min` where less is better, `max` where more is.
        n: Number of snapshots to keep.

    Raises:
        InvalidInputError: The metric has no name, the mode is another, or `n` is not a whole number
            from 1.

    Example:
        >>> best("accuracy", "max").rules()
        [{'rule': 'best', 'metric': 'accuracy', 'mode': 'max', 'count': 1}]
    """
    if not isinstance(metric, str) or not metric:
        raise _refuse("metric", metric, "a name that is not empty")
    if mode not in ("min", "max"):
        raise _refuse("mode", mode, "`min` or `max`")
    name = json.dumps(metric, ensure_ascii=False)
    count = _count("n", n)
    return _policy(f'best({name}, "{mode}", n={n})', rule="best", metric=metric, mode=mode, count=count)


def within(*, days: float = 0, hours: float = 0, minutes: float = 0) -> Keep:
    """Keeps snapshots made at most the sum of the times given before the newest one.

    Raises:
        InvalidInputError: A time is negative or not a number, or all are zero.

    Example:
        >>> within(hours=1, minutes=30).rules()
        [{'rule': 'within', 'milliseconds': 5400000}]
    """
    times = {"days": days, "hours": hours, "minutes": minutes}
    for name, value in times.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0 <= value < _COUNT_LIMIT:
            raise _refuse(name, value, "a number from 0")
    milliseconds = round(days * _DAY_MILLISECONDS + hours * _HOUR_MILLISECONDS + minutes * 60_000)
    if milliseconds == 0:
        raise _refuse("time", milliseconds, "more than nothing: give days, hours or minutes")
    given = ", ".join(f"{name}={value}" for name, value in times.items() if value)
    return _policy(f"within({given})", rule="within", milliseconds=milliseconds)


def hourly(n: int) -> Keep:
    """Keeps the newest snapshot of each of the last `n` hours that have one.

    Raises:
        InvalidInputError: `n` is not a whole number from 1.

    Example:
        >>> hourly(24)
        keep.hourly(24)
    """
    return _policy(f"hourly({n})", rule="bucket", milliseconds=_HOUR_MILLISECONDS, count=_count("n", n))


def daily(n: int) -> Keep:
    """Keeps the newest snapshot of each of the last `n` days (UTC) that have one.

    Raises:
        InvalidInputError: `n` is not a whole number from 1.

    Example:
        >>> daily(7).rules()
        [{'rule': 'bucket', 'milliseconds': 86400000, 'count': 7}]
    """
    return _policy(f"daily({n})", rule="bucket", milliseconds=_DAY_MILLISECONDS, count=_count("n", n))


def tagged() -> Keep:
    """Keeps pinned and tagged snapshots and nothing else but what is always kept.

    Those are kept by every policy; this is the policy for a run that keeps nothing more.

    Example:
        >>> tagged().rules()
        [{'rule': 'tagged'}]
    """
    return _policy("tagged()", rule="tagged")


def max_bytes(size: int | str) -> Keep:
    """Keeps the newest snapshots whose stored bytes fit in a number together.

    Args:
        size: Bytes, or a text with a unit: `200GB` is 200 * 10**9 bytes, `200GiB` is 200 * 2**30.

    Raises:
        InvalidInputError: It is no such text, or less than one byte.

    Example:
        >>> max_bytes("1.5GB").rules()
        [{'rule': 'max_bytes', 'bytes': 1500000000}]
    """
    length_bytes = parse_bytes(size)
    if length_bytes is None:
        raise _refuse("size", size, "a whole number of bytes from 1, or a text such as `200GB` or `1.5TiB`")
    call = f"max_bytes({json.dumps(size)})"
    return _policy(call, rule="max_bytes", bytes=length_bytes)


def _policy(call: str, **facts: Any) -> Keep:
    return Keep((Rule(call, tuple(facts.items())),))


def _refuse(what: str, value: object, legal: str) -> InvalidInputError:
    reason = f"must be {legal}"
    return InvalidInputError(f"invalid {what} `{value!r}`: {reason}", what=what, reason=reason)


def _count(what: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < _COUNT_LIMIT:
        raise _refuse(what, value, "a whole number from 1")
    return value
