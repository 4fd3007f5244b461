"""From the arguments of a save to what crosses into the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from varvite._native import SaveTensors, Walk
from varvite.casting import CastRules
from varvite.errors import InvalidInputError
from varvite.objects import LABELS_KEY, RNG_KEYWORD, flatten_state, split_labels, split_rank_local
from varvite.plain import type_name
from varvite.staging import Staging
from varvite.state import flatten
from varvite.training import rng as rng_state

__all__ = ["Payload", "describe_save", "read_metadata", "read_metrics", "read_step"]

_STEP_LIMIT = 1 << 63


class Payload(NamedTuple):
    """What crosses into the engine.

    Attributes:
        step: The training step.
        tensors: Tensors and arrays, described; they keep the memory alive.
        labels: `metrics` and `metadata` of the snapshot.
        structures: `structure` and `rank_structure`.
        idle_patterns: Patterns of `save_dtype` that match nothing here, at the first save.
    """

    step: int
    tensors: SaveTensors
    labels: dict[str, Any]
    structures: dict[str, Any]
    idle_patterns: list[str]


def describe_save(
    step: int,
    state: dict[Any, Any] | None,
    metrics: Mapping[str, float] | None,
    metadata: Mapping[str, Any] | None,
    objects: Mapping[str, Any],
    *,
    rng: bool,
    rank: int,
    rank_local: Collection[str] = (),
    casts: CastRules | None = None,
    staging: Staging | None = None,
) -> Payload:
    """Describes everything that a save writes; copies plain values, not tensors.

    Args:
        step: The training step.
        state: The positional nest.
        metrics: Numbers by name.
        metadata: A dict of plain values.
        objects: Objects by keyword.
        rng: Whether the random number generators belong to it.
        rank: Rank of this process, which they are local to.
        rank_local: Keywords of objects that belong to this rank alone, beside those that are known to.
        casts: Which tensors are stored in a narrower dtype.
        staging: When the bytes are taken; `None` where the caller waits for all of it.

    Raises:
        InvalidInputError: Something can't be saved; names the argument or the path.
    """
    step = read_step(step)
    labels, others = split_labels(objects)
    shared, own = split_rank_local(others, rank_local)
    tensors = SaveTensors() if staging is None else staging.begin(others)
    walk, own_walk = Walk(), Walk()
    structure = flatten_state(walk, state, shared)
    if rng:
        own = {RNG_KEYWORD: rng_state.capture(), **own}
    rank_structure = flatten_state(own_walk, None, own) if own else None
    tensors.add(walk)
    idle_patterns: list[str] = []
    if casts is not None:
        names = tensors.names()
        tensors.store_as(casts.wishes(names))
        idle_patterns = casts.idle_patterns(names)
    tensors.add(own_walk, rank)
    return Payload(
        step,
        tensors,
        {"metrics": read_metrics(metrics), "metadata": read_metadata(metadata, labels)},
        {"structure": structure, "rank_structure": rank_structure},
        idle_patterns,
    )


def read_step(step: int) -> int:
    """Reads a step.

    Raises:
        InvalidInputError: It is no whole number from 0 to 2^63 - 1.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step.__index__() < _STEP_LIMIT:
        reason = f"must be a whole number from 0 to 2^63 - 1, not {type_name(step)} {step!r}"
        raise InvalidInputError(f"invalid step: {reason}", what="step", reason=reason)
    return step.__index__()


def read_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Reads numbers, also those of tensors and NumPy scalars with one element."""
    if metrics is not None and not isinstance(metrics, Mapping):
        reason = f"must be a dict of numbers by name, not {type_name(metrics)}"
        raise InvalidInputError(f"invalid metrics: {reason}", what="metrics", reason=reason)
    read: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise InvalidInputError(f"invalid metric name `{name!r}`: must be a text", what="metrics")
        number = None if isinstance(value, (str, bytes)) else _as_float(value)
        if number is None:
            reason = f"must be a number, not {type_name(value)}"
            raise InvalidInputError(
                f"invalid metric `{name}`: {reason}", what=f"metrics.{name}", reason=reason
            )
        read[name] = number
    return read


def _as_float(value: Any) -> float | None:
    try:
        # A loss is usually given as it is, and torch warns where a tensor with a gradient becomes a number.
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one: a tensor of many elements
        return None


def read_metadata(metadata: Mapping[str, Any] | None, labels: Mapping[str, Any]) -> str:
    """Reads metadata, and the labels of a run beside it, as JSON text.

    Raises:
        InvalidInputError: It is no dict of plain values, or uses the key that labels are kept under.
    """
    if metadata is not None and not isinstance(metadata, dict):
        reason = f"must be a dict of plain values, not {type_name(metadata)}"
        raise InvalidInputError(f"invalid metadata: {reason}", what="metadata", reason=reason)
    known = dict(metadata or {})
    if LABELS_KEY in known:
        reason = "Varvite keeps what says whose a snapshot is under this key"
        raise InvalidInputError(
            f"invalid metadata `{LABELS_KEY}`: {reason}", what=f"metadata.{LABELS_KEY}", reason=reason
        )
    if labels:
        known[LABELS_KEY] = {keyword: label.state_dict() for keyword, label in labels.items()}
    flat = flatten(known, prefix=("metadata",))
    if flat.leaves:
        reason = "metadata is read with the header: put tensors and arrays in the state"
        raise InvalidInputError(
            f"invalid metadata `{flat.leaves[0].name}`: {reason}", what=flat.leaves[0].name, reason=reason
        )
    return flat.text
