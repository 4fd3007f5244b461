"""What a restore will do with one object, and what stands against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from varvite.errors import MismatchError, first_lines

__all__ = ["Mismatched", "ObjectPlan", "Problems", "may_convert"]

Mismatched = tuple[str, str, Any, Any]

_EXACT_WIDENINGS = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
    "float8_e4m3fn": ("float16", "bfloat16", "float32", "float64"),
    "float8_e5m2": ("float16", "bfloat16", "float32", "float64"),
    "complex32": ("complex64", "complex128"),
    "complex64": ("complex128",),
    "uint8": ("uint16", "uint32", "uint64", "int16", "int32", "int64"),
    "uint16": ("uint32", "uint64", "int32", "int64"),
    "uint32": ("uint64", "int64"),
    "int8": ("int16", "int32", "int64"),
    "int16": ("int32", "int64"),
    "int32": ("int64",),
}
"""Dtypes that hold every value of a dtype: a load may go there without asking."""


@dataclass
class Problems:
    """What a restore found, by names, over all objects.

    Attributes:
        matched: Entries that are restored.
        missing: Names that the live side has and the snapshot lacks.
        unexpected: Names that the snapshot has and the live side lacks.
        mismatched: `(name, field, expected, found)` of what differs.
        defaulted: Hyper-parameters that keep the live value.
        never_stepped: Parameters that had no optimizer state when they were saved.
        kept: A line for each hyper-parameter whose live value was kept although the saved one differs.
    """

    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatched] = field(default_factory=list)
    defaulted: list[str] = field(default_factory=list)
    never_stepped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def add(self, other: Any) -> None:
        """Adds what another finding lists, an `OptimizerPlan` included."""
        for name in (
            "matched",
            "missing",
            "unexpected",
            "mismatched",
            "defaulted",
            "never_stepped",
            "kept",
        ):
            getattr(self, name).extend(getattr(other, name))

    def check(self, *, strict: bool, in_whole: bool = False) -> None:
        """Raises what stands against the restore, all of it at once.

        Args:
            strict: Names, shapes and dtypes must match.
            in_whole: A shape or dtype that differs can't be left alone, even where not strict.

        Raises:
            MismatchError: `strict`, and a shape or dtype differs or one side lacks names; or nothing
                matched at all; or objects differ as a whole, such as an optimizer's class.
        """
        nothing = not self.matched and bool(self.missing or self.unexpected or self.mismatched)
        lines = [
            f"`{name}` has another {what}: expected {_show(expected)}, but the snapshot has: {_show(found)}"
            for name, what, expected, found in self.mismatched
            if strict or nothing or in_whole or what not in _LEFT_ALONE
        ]
        if strict:
            lines += [f"the snapshot lacks `{name}`" for name in self.missing]
            lines += [f"only the snapshot has `{name}`" for name in self.unexpected]
        elif nothing:
            lines += ["no name of the snapshot matches: nothing would be loaded"]
        if not lines:
            return
        raise MismatchError(
            "\n  ".join(["cannot restore, and nothing was changed:", *first_lines(lines, 12)]),
            hint=_advice(self.mismatched),
            missing=self.missing,
            unexpected=self.unexpected,
            mismatched=self.mismatched,
        )


_LEFT_ALONE = ("shape", "dtype")
"""What may differ of one tensor in a restore that is not strict: it keeps its value and is reported."""


def _show(value: Any) -> str:
    return str(list(value)) if isinstance(value, (list, tuple)) else str(value)


def _advice(mismatched: list[Mismatched]) -> str:
    if any(what == "dtype" for _, what, _, _ in mismatched):
        return (
            'to round values on load, pass override={"allow_narrowing": True} to a resume, '
            "or allow_narrowing=True to a fork"
        )
    if mismatched:
        return "build the objects as they were saved, or begin another run on the weights with warm_start"
    return "pass the objects that were saved, or strict=False to load what matches"


@dataclass
class ObjectPlan:
    """What a restore will do with one object.

    Attributes:
        destinations: What to fill, by name of the entry: a dense CPU tensor or array with all of it, or a
            `Target` with a region.
        found: What matched and what did not.
        commit: Installs what was read; called once all destinations are filled.
        may_alias: Whether two destinations may be one memory.
    """

    destinations: dict[str, Any]
    found: Problems
    commit: Callable[[], None]
    may_alias: bool = False


def may_convert(saved: str, live: str, *, allow_narrowing: bool) -> bool:
    """True where values of a saved dtype may be loaded into a live tensor of another one.

    Example:
        >>> may_convert("bfloat16", "float32", allow_narrowing=False)
        True
        >>> may_convert("float32", "bfloat16", allow_narrowing=False)
        False
    """
    if live in _EXACT_WIDENINGS.get(saved, ()):
        return True
    both_floats = all(name.startswith(("float", "bfloat")) and "x2" not in name for name in (saved, live))
    both_complex = all(name.startswith("complex") for name in (saved, live))
    return allow_narrowing and (both_floats or both_complex)
