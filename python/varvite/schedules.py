"""Schedulers in a restore: whether a saved state is theirs, and their learning rates after an override.

After an override the schedule goes on from the new rate, in its own shape.

Some schedulers multiply the rate that the optimizer has, and follow an override by themselves. Others
compute each rate from one they keep since they were made; the next step of these would take an override
back. What they keep is scaled as the rate was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from varvite.plans import Problems

if TYPE_CHECKING:
    import torch

__all__ = ["compare_schedules", "learning_rates", "scale_schedules"]

_KEPT_RATES: Final = ("base_lrs", "max_lrs")
"""Attributes of schedulers with a rate for each group that others are computed from."""

_GROUP_RATES: Final = ("initial_lr", "max_lr", "min_lr", "swa_lr")
"""What schedulers keep in parameter groups for the same purpose."""


_OF_SOME_VERSIONS: Final = ("verbose",)
"""What schedulers of some versions of torch keep beside what makes the schedule."""


def compare_schedules(keyword: str, scheduler: Any, saved: Mapping[str, Any]) -> Problems:
    """Compares what a scheduler keeps with what was saved, by key.

    A scheduler takes over any state it is given. That of another class would leave it with a schedule that is
    half its own, and nothing would say so. Only classes of torch are looked at: those of a program may keep
    more after some steps than at first.

    Args:
        keyword: The keyword it is given under.
        scheduler: The live object; what is no scheduler of torch has no problem.
        saved: Its saved state.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> saved = torch.optim.lr_scheduler.StepLR(optimizer, 5).state_dict()
        >>> live = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        >>> compare_schedules("scheduler", live, saved).unexpected
        ['scheduler.step_size']
    """
    found = Problems()
    if type(scheduler).__module__ != "torch.optim.lr_scheduler" or not isinstance(saved, Mapping):
        return found
    live = scheduler.state_dict()
    found.missing = [f"{keyword}.{key}" for key in live if _is_of_schedule(key) and key not in saved]
    found.unexpected = [f"{keyword}.{key}" for key in saved if _is_of_schedule(key) and key not in live]
    parts, saved_parts = getattr(scheduler, "_schedulers", ()), saved.get("_schedulers", ())
    for index, (part, saved_part) in enumerate(zip(parts, saved_parts, strict=False)):
        found.add(compare_schedules(f"{keyword}.{index}", part, saved_part))
    return found


def _is_of_schedule(key: str) -> bool:
    return not key.startswith("_") and key not in _OF_SOME_VERSIONS


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float | None]:
    """Returns the rate of each group, `None` where a group has none."""
    return [float(group["lr"]) if "lr" in group else None for group in optimizer.param_groups]


def scale_schedules(
    optimizer: torch.optim.Optimizer,
    objects: Iterable[Any],
    before: list[float | None],
    *,
    overridden: Collection[str] = ("lr",),
) -> list[str]:
    """Scales what the schedulers of an optimizer keep as its rates were scaled.

    Args:
        optimizer: The optimizer whose rates were overridden.
        objects: Objects among which its schedulers are, those inside of a chain or sequence included.
        before: The rates before the override, by group.
        overridden: Keys of groups that were overridden; these stay as they are.

    Returns:
        A line for each list of rates that changed, or could not, because a rate was 0 before.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        >>> optimizer.param_groups[0]["lr"] = 0.25
        >>> scale_schedules(optimizer, [scheduler], [0.5])
        ['LambdaLR.base_lrs: [0.5] -> [0.25]']
        >>> optimizer.step()
        >>> scheduler.step()
        >>> optimizer.param_groups[0]["lr"]
        0.25
    """
    schedulers = list(_schedulers_of(optimizer, objects))
    after = learning_rates(optimizer)
    if not schedulers or after == before:
        return []
    ratios = [new / old if old and new is not None else None for old, new in zip(before, after, strict=True)]
    lines: list[str] = []
    for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
        for key in _GROUP_RATES:
            if key in group and key not in overridden and ratio is not None:
                group[key] = group[key] * ratio
    for scheduler in schedulers:
        lines += _scale(scheduler, ratios)
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # noqa: SLF001 - as its own step does
    if any(ratio is None for ratio in ratios):
        lines.append("a learning rate was 0: what its scheduler computes rates from is as it was saved")
    return lines


def _schedulers_of(optimizer: torch.optim.Optimizer, objects: Iterable[Any]) -> Iterator[Any]:
    """Yields the schedulers of an optimizer, and those that they are made of."""
    for value in objects:
        if getattr(value, "optimizer", None) is optimizer and hasattr(value, "get_last_lr"):
            yield value
            yield from _schedulers_of(optimizer, getattr(value, "_schedulers", ()))


def _scale(scheduler: Any, ratios: list[float | None]) -> Iterator[str]:
    for name in _KEPT_RATES:
        old = getattr(scheduler, name, None)
        if not isinstance(old, list) or len(old) != len(ratios):
            continue
        new = [rate if ratio is None else rate * ratio for rate, ratio in zip(old, ratios, strict=True)]
        setattr(scheduler, name, new)
        shown = [[float(rate) for rate in rates] for rates in (old, new)]
        yield f"{type(scheduler).__name__}.{name}: {shown[0]} -> {shown[1]}"
