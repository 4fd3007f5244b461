"""From the arguments of a save to what crosses into the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from varvite._native import SaveTensors, Walk
from varvite.casting import CastRules
from varvite.errors import InvalidInputError
from varvite.objects import LABELS_KEY, flatten_state, split_labels
from varvite.plain import type_name
from varvite.staging import Staging
from varvite.state import flatten
from varvite.training import rng as rng_state

__all__ = ["Payload", "describe_save"]

_STEP_LIMIT = 1 << 63


class Payload(NamedTuple):
    """The arguments of `Engine.save`.

    Attributes:
        step: The training step.
        tensors: Tensors and arrays, described; they keep the memory alive.
        texts: Metrics, metadata and structures.
    """

    step: int
    tensors: SaveTensors
    texts: dict[str, Any]


def describe_save(
    step: int,
    state: dict[Any, Any] | None,
    metrics: Mapping[str, float] | None,
    metadata: Mapping[str, Any] | None,
    objects: Mapping[str, Any],
    *,
    rng: bool,
    rank: int,
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
        casts: Which tensors are stored in a narrower dtype.
        staging: When the bytes are taken; `None` where the caller waits for all of it.

    Raises:
        InvalidInputError: Something can't be saved; names the argument or the path.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step.__index__() < _STEP_LIMIT:
        reason = f"must be a whole number from 0 to 2^63 - 1, not {type_name(step)} {step!r}"
        raise InvalidInputError(f"invalid step: {reason}", what="step", reason=reason)
    labels, others = split_labels(objects)
    tensors = SaveTensors() if staging is None else staging.begin(others)
    walk = Walk()
    structure = flatten_state(walk, state, others)
    own_walk = Walk()
    rank_structure = own_walk.flatten({"rng": rng_state.capture()}, "") if rng else None
    tensors.add(walk)
    if casts is not None:
        tensors.store_as(casts.wishes(tensors.names()))
    tensors.add(own_walk, rank)
    if staging is not None:
        staging.mark(tensors)
    texts = {
        "metrics": _read_metrics(metrics),
        "metadata": _metadata_text(metadata, labels),
        "structure": structure,
        "rank_structure": rank_structure,
    }
    return Payload(step.__index__(), tensors, texts)


def _read_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
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


def _metadata_text(metadata: Mapping[str, Any] | None, labels: Mapping[str, Any]) -> str:
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
