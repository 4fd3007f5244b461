"""Which tensors of a save are stored in a narrower dtype: the rules of `save_dtype`."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from varvite.errors import InvalidInputError

if TYPE_CHECKING:
    from varvite._native import SaveTensors

__all__ = ["SAVE_DTYPES", "CastRules", "refuse_idle"]

SAVE_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Legal values of `save_dtype`, and the torch dtype of each."""


class CastRules:
    """Rules by glob over names; the first that matches decides.

    A rule only ever narrows: a tensor whose dtype is not a wider float than the rule's stays as it is, so a
    rule with the tensors' own dtype keeps them from later rules. Integers and tensors without a dimension
    (step counts, scales) are never cast.

    Example:
        >>> rules = CastRules({"model.norm.*": "fp32", "*": "bf16"})
        >>> rules.wishes(["model.norm.weight", "model.layer.weight"])
        ['float32', 'bfloat16']
    """

    def __init__(self, save_dtype: str | Mapping[str, str]) -> None:
        """Takes one dtype for all tensors, or dtypes by name or glob (`*` `?` `[...]`), in order.

        Args:
            save_dtype: Checked values of `SAVE_DTYPES`.
        """
        given = {"*": save_dtype} if isinstance(save_dtype, str) else save_dtype
        self._rules = [(pattern, SAVE_DTYPES[dtype]) for pattern, dtype in given.items()]
        self._known: dict[str, str | None] = {}
        self._is_new = True

    def wishes(self, names: Sequence[str]) -> list[str | None]:
        """Returns the dtype that each tensor is to be stored in, `None` where no rule matches.

        Args:
            names: Names of all tensors of a save.
        """
        known = self._known
        for name in names:
            if name not in known:
                known[name] = self._wish(name)
        return [known[name] for name in names]

    def _wish(self, name: str) -> str | None:
        for pattern, dtype in self._rules:
            if _matches(name, pattern):
                return dtype
        return None

    def idle_patterns(self, names: Sequence[str]) -> list[str]:
        """Returns the patterns that match no tensor; of later saves than the first, none.

        Args:
            names: Names of all tensors of a save.
        """
        if not self._is_new:
            return []
        return [pattern for pattern, _ in self._rules if not any(_matches(name, pattern) for name in names)]

    def settle(self) -> None:
        """Notes that every pattern has matched a tensor, on this rank or another."""
        self._is_new = False

    def rules(self) -> list[list[str]]:
        """Returns patterns and dtypes, in order."""
        return [list(rule) for rule in self._rules]


def refuse_idle(patterns: Sequence[str], tensors: SaveTensors) -> None:
    """Refuses a first save in which a pattern matches nothing: it would be a typing error that nobody sees.

    Args:
        patterns: What matched no tensor.
        tensors: What is saved.

    Raises:
        InvalidInputError: There is such a pattern. Lists what there is.
    """
    for pattern in patterns:
        raise InvalidInputError(
            f"invalid save_dtype pattern, which matches no tensor of this save: `{pattern}`",
            hint="names start with the keyword, as in `model.layers.0.weight` or "
            "`optimizer.state.layers.0.weight.exp_avg`; `*` matches any characters, dots too",
            what="save_dtype",
            pattern=pattern,
            names=tensors.names()[:20],
        )


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)
