"""Values as text for people: times, numbers, and texts from a repository that a terminal must not obey."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

__all__ = ["ago", "counted", "created_text", "metrics_text", "printable", "shape_text", "timestamp"]

_AGES: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def timestamp(unix_milliseconds: int) -> str:
    """Returns a time as ISO 8601 in UTC, to the second.

    Example:
        >>> timestamp(1_700_000_000_123)
        '2023-11-14T22:13:20Z'
    """
    moment = datetime.fromtimestamp(unix_milliseconds // 1000, tz=UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def ago(unix_milliseconds: int, now_unix_milliseconds: int) -> str:
    """Returns how long ago a time is, in its largest whole unit.

    A time in the future, by more than clocks differ, is shown as it is.

    Example:
        >>> ago(0, 7_200_000), ago(0, 90_000), ago(90_000, 0)
        ('2 h ago', '1 min ago', '1970-01-01T00:01:30Z')
    """
    seconds = (now_unix_milliseconds - unix_milliseconds) // 1000
    if seconds < -5:
        return timestamp(unix_milliseconds)
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return "now"


def created_text(created_at_unix_ms: int, now_unix_ms: int | None) -> str:
    """Returns when something was made: how long ago that is, or exactly where `now_unix_ms` is not given.

    Example:
        >>> created_text(0, 7_200_000), created_text(0, None)
        ('2 h ago', '1970-01-01T00:00:00Z')
    """
    return timestamp(created_at_unix_ms) if now_unix_ms is None else ago(created_at_unix_ms, now_unix_ms)


def counted(count: int, noun: str) -> str:
    """Returns a number and its noun.

    Example:
        >>> counted(1, "snapshot"), counted(2000, "tensor")
        ('1 snapshot', '2,000 tensors')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def metrics_text(metrics: dict[str, float]) -> str:
    """Returns metrics on one line.

    Example:
        >>> metrics_text({"val_loss": 0.25, "accuracy": 1.0})
        'val_loss 0.25, accuracy 1'
    """
    return ", ".join(f"{printable(name)} {value:.6g}" for name, value in metrics.items())


def shape_text(shape: list[int]) -> str:
    """Returns a shape.

    Example:
        >>> shape_text([2, 3]), shape_text([])
        ('2x3', 'scalar')
    """
    return "x".join(map(str, shape)) or "scalar"


def printable(text: str) -> str:
    r"""Returns a text with escapes in place of what could move the cursor or break the line.

    Example:
        >>> printable("a\x1b[31m\nb é")
        'a\\x1b[31m\\nb é'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
