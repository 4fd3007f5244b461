"""What one check found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Check"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        value: What was found, for people.
        verdict: `ok`, `warn` where it costs something, `bad` where a run would fail or lose data.
        meaning: What it means, or nothing.
        facts: The figures behind the value; sizes in bytes and times in seconds, as their names say.
    """

    name: str
    value: str
    verdict: str = "ok"
    meaning: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
