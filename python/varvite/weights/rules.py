"""Rules for names: which saved tensor goes to which live one, decided before a byte is read.

A rule is a prefix and what stands in its place, `None` to leave those names out. Names are those that
`varvite show` prints, the keyword of the object first. One pass goes over the saved names: of the rules
whose prefix fits, the most specific one decides, and no other is applied after it. A prefix fits whole
parts of a path: `enc` never fits `encoder`. The empty prefix fits every name.

Nothing is done by halves without a word: two names for one place, and a rule that no name needs, are
errors; a shape that differs is told apart from a name that is missing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from varvite.errors import InvalidInputError, MismatchError, first_lines
from varvite.plain import type_name

__all__ = ["KeyPlan", "KeyRules", "plain_name", "plan_keys"]

KeyRules = Mapping[str, str | None] | Iterable[tuple[str, str | None]]
"""Prefixes of saved names, and what stands in their place; `None` leaves those names out."""

Names = Mapping[str, Sequence[int] | None] | Iterable[str]
"""Names, with the shape of each in elements where shapes are to be compared."""

_SHOWN_COUNT = 8
_QUOTED_PATH = re.compile(r'(?:(?<=\.)|^)"([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)"(?=\.|$)')


@dataclass(frozen=True, kw_only=True)
class KeyPlan:
    """Which saved name goes to which live one. Printing it says all that a load would do.

    Attributes:
        mapping: Saved name by live name, of what would be loaded.
        missing: Live names that no saved one goes to.
        unexpected: Saved names that go to no live one.
        mismatched: `(live name, live shape, saved shape)` of what has a name and does not fit.
        dropped: Saved names that a rule leaves out.
        renamed: New name by saved name, where a rule has changed it.
        rule_counts: Number of names that each rule has decided, by its prefix.
        left_empty: Keywords, of those asked for, that have names and would get nothing.

    Example:
        >>> plan = plan_keys(["model.a", "model.b"], ["model.a", "model.c"], {"model.b": None})
        >>> print(plan)
        1 of 2 names would be loaded
          rule `model.b` drops: 1 name
          missing: model.c
    """

    mapping: dict[str, str]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    rule_counts: dict[str, int] = field(default_factory=dict)
    left_empty: list[str] = field(default_factory=list)
    _replacements: dict[str, str | None] = field(default_factory=dict, repr=False)

    @property
    def unused_rules(self) -> list[str]:
        """Prefixes of rules that have decided no name: a typing error, most likely."""
        return [prefix for prefix, count in self.rule_counts.items() if count == 0]

    def check(self, *, strict: bool = True, skip_shape_mismatches: bool = False) -> None:
        """Raises what stands against the load, all of it at once.

        Args:
            strict: Names must match both ways, and every rule must decide one.
            skip_shape_mismatches: What does not fit keeps its value.

        Raises:
            MismatchError: Names or shapes differ and that is not allowed; or, whatever is allowed,
                nothing would be loaded to one of the keywords.

        Example:
            >>> plan_keys(["model.a"], ["model.a", "model.b"]).check(strict=False)
            >>> plan_keys(["old.a"], ["model.a"]).check(strict=False)
            Traceback (most recent call last):
                ...
            varvite.errors.MismatchError: no saved name fits: nothing would be loaded
              missing: model.a
              unexpected: old.a
            hint: print the plan, and pass rules from saved names to live ones
        """
        lines: list[str] = []
        if strict:
            lines += [
                *_listed("missing", self.missing),
                *_listed("unexpected", map(self._arrow, self.unexpected)),
                *_listed("no name needs the rule", map(_quoted, self.unused_rules)),
            ]
        if not skip_shape_mismatches or self.left_empty:
            lines += _shape_lines(self.mismatched)
        if self.left_empty:
            where = ", ".join(_quoted(keyword) for keyword in self.left_empty if keyword)
            message = f"no saved name fits{' ' + where if where else ''}: nothing would be loaded"
            names = [*_listed("missing", self.missing), *_listed("unexpected", self.unexpected)]
            lines = lines if strict else [*names, *lines]
            hint = "print the plan, and pass rules from saved names to live ones"
        elif lines:
            message = "the saved weights do not fit, and nothing was changed:"
            hint = self._advice()
        else:
            return
        raise MismatchError(
            "\n".join([message, *lines]),
            hint=hint,
            missing=self.missing,
            unexpected=self.unexpected,
            mismatched=[(name, "shape", expected, found) for name, expected, found in self.mismatched],
        )

    def _advice(self) -> str:
        if self.mismatched:
            return (
                "pass skip_shape_mismatches=True to keep what does not fit, "
                "or drop it with a rule of None and strict=False"
            )
        if self.unused_rules and not (self.missing or self.unexpected):
            return "mend or remove the rule; a more specific one decides before it"
        return "pass rules from saved names to live ones, or strict=False to load what matches"

    def _arrow(self, saved: str) -> str:
        return f"{saved} -> {self.renamed[saved]}" if saved in self.renamed else saved

    def __str__(self) -> str:
        """Returns the plan: a line, and one more for each rule and each thing to look at."""
        total = len(self.mapping) + len(self.missing) + len(self.mismatched)
        lines = [f"{len(self.mapping)} of {_counted(total)} would be loaded"]
        for prefix, count in self.rule_counts.items():
            replacement = self._replacements.get(prefix)
            does = "drops" if replacement is None else f"gives `{replacement}`"
            lines.append(f"  rule `{prefix}` {does}: {_counted(count)}")
        lines += _listed("missing", self.missing)
        lines += _listed("unexpected", map(self._arrow, self.unexpected))
        return "\n".join([*lines, *_shape_lines(self.mismatched)])


def plan_keys(
    saved: Names, live: Names, rules: KeyRules | None = None, *, within: Collection[str] = ()
) -> KeyPlan:
    """Decides which saved name goes to which live one. Nothing is read or changed.

    A part of a saved name that is quoted because it is a path itself, as the keys of a state dict saved as
    a plain dict are, counts as that path.

    Args:
        saved: Names the snapshot has; with shapes, as a mapping, these are compared where both sides have
            them.
        live: Names of the tensors to load.
        rules: Prefixes of saved names and what stands in their place; the most specific one decides.
        within: Keywords of what is asked for. Saved names that end up elsewhere are left alone, and not
            unexpected. By default everything is asked for.

    Returns:
        The plan; call its `check` to have raised what stands against it.

    Raises:
        InvalidInputError: A rule is not legal or leaves nothing of a name.
        MismatchError: Two saved names go to one place; names both.

    Example:
        >>> plan = plan_keys(
        ...     {"model.head.weight": [10, 4], "model.body.weight": [4, 4]},
        ...     {"model.head.weight": [2, 4], "model.body.weight": [4, 4]},
        ... )
        >>> plan.mapping
        {'model.body.weight': 'model.body.weight'}
        >>> plan.mismatched
        [('model.head.weight', [2, 4], [10, 4])]
    """
    replacements = _read_rules(rules)
    saved_shapes, live_shapes = _with_shapes(saved), _with_shapes(live)
    live_names = {plain_name(name): name for name in live_shapes}
    scopes = [plain_name(keyword) for keyword in within] or [""]
    renaming = _rename(saved_shapes, replacements, scopes)
    mapping: dict[str, str] = {}
    unexpected: list[str] = []
    mismatched: list[tuple[str, list[int], list[int]]] = []
    for target, source in renaming.sources.items():
        name = live_names.get(target)
        if name is None:
            unexpected.append(source)
            continue
        expected, found = live_shapes[name], saved_shapes[source]
        if expected is None or found is None or list(expected) == list(found):
            mapping[name] = source
        else:
            mismatched.append((name, list(expected), list(found)))
    missing = [name for plain, name in live_names.items() if plain not in renaming.sources]
    loaded = [plain_name(name) for name in mapping]
    return KeyPlan(
        mapping=mapping,
        missing=missing,
        unexpected=unexpected,
        mismatched=mismatched,
        dropped=renaming.dropped,
        renamed=renaming.renamed,
        rule_counts=renaming.counts,
        left_empty=[
            scope
            for scope in scopes
            if any(_fits(scope, name) for name in live_names)
            and not any(_fits(scope, name) for name in loaded)
        ],
        _replacements=replacements,
    )


@dataclass
class _Renaming:
    """What the rules make of the saved names: saved name by its target, and the rest."""

    sources: dict[str, str]
    dropped: list[str]
    renamed: dict[str, str]
    counts: dict[str, int]


def _rename(saved: Iterable[str], replacements: Mapping[str, str | None], scopes: list[str]) -> _Renaming:
    # Of two prefixes that fit one name, the longer has more parts.
    by_length = sorted(replacements, key=len, reverse=True)
    renaming = _Renaming({}, [], {}, dict.fromkeys(replacements, 0))
    clashes: dict[str, list[str]] = defaultdict(list)
    for source in saved:
        plain = plain_name(source)
        target: str | None = plain
        prefix = next((prefix for prefix in by_length if _fits(prefix, plain)), None)
        if prefix is not None:
            renaming.counts[prefix] += 1
            target = _replace(plain, prefix, replacements[prefix])
        if target is None:
            renaming.dropped.append(source)
            continue
        if not any(_fits(scope, target) for scope in scopes):
            continue
        if target in renaming.sources:
            clashes[target].append(source)
            continue
        renaming.sources[target] = source
        if target != plain:
            renaming.renamed[source] = target
    if clashes:
        raise _clash({target: [renaming.sources[target], *more] for target, more in clashes.items()})
    return renaming


def _fits(prefix: str, name: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _replace(name: str, prefix: str, replacement: str | None) -> str | None:
    if replacement is None:
        return None
    rest = name[len(prefix) :].removeprefix(".")
    target = ".".join(part for part in (replacement, rest) if part)
    if not target:
        raise _refuse(f"`{prefix}`", f"it leaves nothing of the name `{name}`")
    return target


def _clash(clashes: Mapping[str, list[str]]) -> MismatchError:
    lines = [
        f"`{target}` would be given {' and '.join(map(_quoted, sources))}"
        for target, sources in clashes.items()
    ]
    target, sources = next(iter(clashes.items()))
    return MismatchError(
        "\n  ".join(
            ["two saved names go to one place, and nothing was changed:", *first_lines(lines, _SHOWN_COUNT)]
        ),
        hint="leave one of them out with a rule of None for its prefix",
        name=target,
        field="source",
        expected="one saved name",
        found=sources,
    )


def _read_rules(rules: KeyRules | None) -> dict[str, str | None]:
    """Checks rules, and returns them in their order."""
    if rules is None:
        return {}
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise _refuse(
            "rules", f"must be a mapping or pairs of prefix and replacement, not {type_name(rules)}"
        )
    replacements: dict[str, str | None] = {}
    for pair in rules.items() if isinstance(rules, Mapping) else rules:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _refuse(f"`{pair}`", "must be a pair of a prefix and its replacement")
        prefix, replacement = pair
        _check_path(prefix, prefix)
        if replacement is not None:
            _check_path(prefix, replacement)
        prefix = plain_name(prefix)
        if prefix in replacements:
            raise _refuse(f"`{prefix}`", "it is given twice")
        replacements[prefix] = replacement
    return replacements


def _check_path(prefix: Any, path: Any) -> None:
    if not isinstance(path, str) or (path and not all(path.split("."))):
        reason = "prefix and replacement must be parts joined by single dots, empty, or None to drop"
        raise _refuse(f"`{prefix}`", f"{reason}, not {path!r}")


def _refuse(which: str, reason: str) -> InvalidInputError:
    return InvalidInputError(f"invalid key rule {which}: {reason}", what="rules", reason=reason)


def plain_name(name: str) -> str:
    """Returns a name in which the quoted keys that are paths are these paths.

    Example:
        >>> plain_name('model."layers.0.weight"'), plain_name('model."a b"')
        ('model.layers.0.weight', 'model."a b"')
    """
    return _QUOTED_PATH.sub(r"\1", name) if '"' in name else name


def _with_shapes(names: Names) -> dict[str, Sequence[int] | None]:
    return dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)


def _listed(heading: str, names: Iterable[str]) -> list[str]:
    """Returns one line of names, cut where there are many; none where there is no name."""
    names = list(names)
    more = f" and {len(names) - _SHOWN_COUNT} more" if len(names) > _SHOWN_COUNT else ""
    return [f"  {heading}: {', '.join(names[:_SHOWN_COUNT])}{more}"] if names else []


def _shape_lines(mismatched: list[tuple[str, list[int], list[int]]]) -> list[str]:
    lines = [
        f"`{name}` has another shape: expected {expected}, but the snapshot has: {found}"
        for name, expected, found in mismatched
    ]
    return [f"  {line}" for line in first_lines(lines, _SHOWN_COUNT)]


def _counted(count: int) -> str:
    return f"{count} {'name' if count == 1 else 'names'}"


def _quoted(name: str) -> str:
    return f"`{name}`"
