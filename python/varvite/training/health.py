"""Whether training goes on as it did: anomalies of loss and gradient norm, and a verdict after each restart.

Each value is compared with a baseline of the values before it. The baseline is saved with the snapshot:
a process that starts with an empty one could take any loss for normal.

What a verdict can tell: that the first steps after a resume look like those before the snapshot. A wrong
model, lost data or a wrong learning rate show; lost moments of an optimizer show where the loss has little
noise. It can't compare steps that are done again with what they gave the first time, since the baseline
ends at the saved step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from varvite.errors import InvalidInputError
from varvite.plain import corrupt
from varvite.training.checks import check_count, check_positive
from varvite.training.verdicts import Verdict

__all__ = ["Anomaly", "Continuity", "HealthMonitor", "Verdict"]

_METRICS: Final = ("loss", "grad_norm")

_MAD_TO_DEVIATION: Final = 1.4826
"""A median absolute deviation times this is the standard deviation of a normal distribution."""

_SMALLEST_SCALE: Final = 1e-9
"""Spread that a baseline has at least: one of zeros has neither deviation nor level."""


@dataclass(frozen=True)
class Anomaly:
    """A value that the baseline does not explain.

    Attributes:
        step: The training step.
        metric: `loss` or `grad_norm`.
        kind: `nonfinite`, `spike` (above the baseline) or `drop` (below it).
        value: The value.
        expected: What the baseline expected, or NaN where it has too few values to tell.
        score: Distance from it in robust standard deviations; infinite for a value that is not finite.

    Example:
        >>> print(Anomaly(7, "loss", "spike", 9.0, 2.5, 31.0))
        step 7: spike of loss, 9 where 2.5 was expected
    """

    step: int
    metric: str
    kind: str
    value: float
    expected: float
    score: float

    def __str__(self) -> str:
        """Returns one line."""
        if self.kind == "nonfinite":
            return f"step {self.step}: {self.metric} is {self.value}"
        return (
            f"step {self.step}: {self.kind} of {self.metric}, "
            f"{self.value:.6g} where {self.expected:.6g} was expected"
        )


@dataclass(frozen=True)
class Continuity:
    """A verdict and what it rests on.

    Attributes:
        verdict: One of three.
        reason: One sentence for a person.
        steps: The steps that were compared, in the order they came.
        scores: By metric, the median distance of these steps from the baseline, in robust standard
            deviations; above 0 where the values lie higher.

    Example:
        >>> print(Continuity(Verdict.NOT_EVALUATED, "no step was observed since", (), {}))
        not evaluated: no step was observed since
    """

    verdict: Verdict
    reason: str
    steps: tuple[int, ...]
    scores: Mapping[str, float]

    def __str__(self) -> str:
        """Returns one line."""
        return f"{self.verdict.value}: {self.reason}"


class HealthMonitor:
    """Watches loss and gradient norm, and says after each restart whether they go on as before.

    A value is an anomaly where it lies more than `threshold` robust standard deviations (of the median
    absolute deviation) from the median of the last `window` values, and as far from the line through them:
    so neither a loss that falls steadily nor one that stops falling is one. It is judged before it joins
    the baseline. A value that is not finite is an anomaly at once, and never joins.

    Every rank may have one, with values that are equal on all ranks, or the coordinator alone.

    Args:
        window: Number of values in the baseline of a metric.
        warm_up: Number of values it must have before it judges.
        threshold: Robust standard deviations from which a value is an anomaly.
        floor: Least spread of a baseline as a share of its level. With a `threshold` of 8, a floor of 0.02
            lets a constant loss move by 16 % before it is an anomaly.
        verdict_steps: Number of steps after a restart that the verdict is taken from. It is
            `Verdict.DISCONTINUOUS` where the median of one metric over them is more than half the
            `threshold` away, so one odd batch does not decide.

    Raises:
        InvalidInputError: A value is not legal.

    Example:
        >>> monitor = HealthMonitor()
        >>> for step in range(30):
        ...     found = monitor.observe(step, loss=2.0 + 0.01 * (step % 3))
        >>> [anomaly.kind for anomaly in monitor.observe(30, loss=0.1)]
        ['drop']
        >>> resumed = HealthMonitor()
        >>> resumed.load_state_dict(monitor.state_dict())
        >>> for step in range(31, 36):
        ...     found = resumed.observe(step, loss=2.02)
        >>> resumed.verdict.value
        'continuous'
    """

    def __init__(
        self,
        *,
        window: int = 30,
        warm_up: int = 20,
        threshold: float = 8.0,
        floor: float = 0.02,
        verdict_steps: int = 5,
    ) -> None:
        """Makes a monitor with an empty baseline."""
        check_count("warm_up", warm_up, least=2)
        check_count("window", window, least=warm_up)
        check_count("verdict_steps", verdict_steps, least=1)
        self._window = window
        self._warm_up = warm_up
        self._threshold = check_positive("threshold", threshold)
        self._floor = check_positive("floor", floor)
        self._verdict_steps = verdict_steps
        self._baselines = {metric: deque[_Value](maxlen=window) for metric in _METRICS}
        self._restart: _Restart | None = None
        self._continuity = Continuity(Verdict.NOT_EVALUATED, "no restart", (), {})
        self._on_verdict: Callable[[Continuity], None] | None = None

    def observe(
        self, step: int, *, loss: Any, grad_norm: Any | None = None, restarted: bool = False
    ) -> list[Anomaly]:
        """Judges the values of a step, and adds them to the baseline.

        Args:
            step: The step. One that is not above the last takes the values from it on out of the baseline.
            loss: Its loss, a number or a tensor with one element; reading one waits for its device.
            grad_norm: Norm of its gradients before clipping, where it is known.
            restarted: The same as calling `after_resume` before.

        Returns:
            What the baseline does not explain; empty while it has too few values.

        Raises:
            InvalidInputError: The step is no whole number from 0, or a value is no number.
        """
        check_count("step", step)
        values = {"loss": _number("loss", loss)}
        if grad_norm is not None:
            values["grad_norm"] = _number("grad_norm", grad_norm)
        if restarted:
            self.after_resume(self._on_verdict)
        self._rewind(step)
        found = []
        for metric, value in values.items():
            judged = self._judge(metric, step, value)
            if judged is not None and abs(judged.score) > self._threshold:
                found.append(judged)
            if self._restart is not None and judged is not None:
                self._restart.scores[metric].append(judged.score)
            if math.isfinite(value):
                self._baselines[metric].append(_Value(step, value))
        if self._restart is not None:
            self._restart.steps.append(step)
            if len(self._restart.steps) == self._verdict_steps:
                self._decide(self._restart)
        return found

    def after_resume(self, on_verdict: Callable[[Continuity], None] | None = None) -> None:
        """Takes the next steps for the first after a restart. `load_state_dict` does it too.

        Args:
            on_verdict: Called once, from `observe`, with the verdict.
        """
        self._on_verdict = on_verdict
        self._restart = _Restart([], {metric: [] for metric in _METRICS})
        self._continuity = Continuity(Verdict.NOT_EVALUATED, "no step was observed since", (), {})

    @property
    def verdict(self) -> Verdict:
        """The verdict on the last restart; `NOT_EVALUATED` until enough steps were observed."""
        return self.continuity.verdict

    @property
    def continuity(self) -> Continuity:
        """The verdict on the last restart with its reason."""
        if self._restart is None or not self._restart.steps:
            return self._continuity
        seen = tuple(self._restart.steps)
        reason = f"{len(seen)} of {self._verdict_steps} steps were observed since"
        return Continuity(Verdict.NOT_EVALUATED, reason, seen, {})

    def state_dict(self) -> dict[str, Any]:
        """Returns the baseline: by metric, its steps and values, oldest first."""
        return {
            metric: {"steps": [one.step for one in baseline], "values": [one.value for one in baseline]}
            for metric, baseline in self._baselines.items()
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks a state without taking it.

        Raises:
            CorruptionError: No `state_dict` gave it.
        """
        _read_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a baseline back, and the next steps for the first after a restart.

        Of a longer window than this one's, the newest values are taken.

        Raises:
            CorruptionError: No `state_dict` gave it; nothing was changed.
        """
        baselines = _read_state(state)
        self._baselines = {metric: deque(baselines[metric], maxlen=self._window) for metric in _METRICS}
        self.after_resume(self._on_verdict)

    def _rewind(self, step: int) -> None:
        for baseline in self._baselines.values():
            while baseline and baseline[-1].step >= step:
                baseline.pop()

    def _judge(self, metric: str, step: int, value: float) -> Anomaly | None:
        """Returns how a value compares with the baseline; `None` where it has too few values to tell."""
        baseline = self._baselines[metric]
        is_warm = len(baseline) >= self._warm_up
        if not math.isfinite(value):
            expected = statistics.median(one.value for one in baseline) if is_warm else math.nan
            return Anomaly(step, metric, "nonfinite", value, expected, math.inf)
        if not is_warm:
            return None
        # Only a verdict needs to know how far a value lies that is no anomaly.
        enough = self._threshold if self._restart is None else 0.0
        expected, score = _compare([one.value for one in baseline], value, self._floor, enough)
        return Anomaly(step, metric, "spike" if score > 0 else "drop", value, expected, score)

    def _decide(self, restart: _Restart) -> None:
        """Gives the verdict, and tells it to who asked."""
        medians = {
            metric: statistics.median(scores)
            for metric, scores in restart.scores.items()
            if len(scores) == self._verdict_steps
        }
        far = [metric for metric, score in medians.items() if abs(score) > self._threshold / 2]
        if far:
            verdict = Verdict.DISCONTINUOUS
            reason = "; ".join(
                f"{metric} lies {abs(medians[metric]):.3g} robust deviations "
                f"{'above' if medians[metric] > 0 else 'below'} its baseline"
                for metric in far
            )
        elif medians:
            verdict = Verdict.CONTINUOUS
            reason = f"{' and '.join(medians)} as before over {self._verdict_steps} steps"
        else:
            verdict = Verdict.NOT_EVALUATED
            reason = f"the restored baseline has fewer than {self._warm_up} values"
        self._restart = None
        self._continuity = Continuity(verdict, reason, tuple(restart.steps), medians)
        if self._on_verdict is not None:
            self._on_verdict(self._continuity)


class _Value(NamedTuple):
    """A value of a baseline."""

    step: int
    value: float


class _Restart(NamedTuple):
    """The steps since a restart, and by metric how far each is from the baseline."""

    steps: list[int]
    scores: dict[str, list[float]]


def _compare(values: list[float], value: float, floor: float, enough: float) -> tuple[float, float]:
    """Compares a value with those before it.

    Two expectations are tried, the level of the values and the line through them; the one that explains
    the value better counts. The line is not tried where the level explains it to within `enough`.

    Returns:
        The expectation, and the distance from it in robust standard deviations.
    """
    level = statistics.median(values)
    least_scale = max(floor * abs(level), _SMALLEST_SCALE)
    from_level = (value - level) / max(_spread(values, level), least_scale)
    if abs(from_level) <= enough:
        return level, from_level
    half = len(values) // 2
    slope = (statistics.median(values[-half:]) - statistics.median(values[:half])) / (len(values) - half)
    centre = (len(values) - 1) / 2
    flattened = [one - slope * (position - centre) for position, one in enumerate(values)]
    line = statistics.median(flattened)
    expected = line + slope * (len(values) - centre)
    from_line = (value - expected) / max(_spread(flattened, line), least_scale)
    return (level, from_level) if abs(from_level) < abs(from_line) else (expected, from_line)


def _spread(values: list[float], middle: float) -> float:
    return _MAD_TO_DEVIATION * statistics.median(abs(one - middle) for one in values)


def _number(what: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = f"must be a number, or a tensor with one element ({error})"
        message = f"invalid {what} of type `{type(value).__qualname__}`: {reason}"
        raise InvalidInputError(message, what=what, reason=reason) from error


def _read_state(state: Any) -> dict[str, list[_Value]]:
    """Reads a saved baseline: steps that rise, and finite values."""
    if not isinstance(state, Mapping) or set(state) != set(_METRICS):
        raise corrupt("baseline", "`loss` and `grad_norm`", state)
    baselines = {}
    for metric in _METRICS:
        match state[metric]:
            case {"steps": list(steps), "values": list(values)} if len(steps) == len(values):
                pass
            case found:
                raise corrupt(f"baseline of {metric}", "as many `steps` as `values`", found)
        last = -1
        for step, value in zip(steps, values, strict=True):
            if type(step) is not int or step <= last:
                raise corrupt(f"baseline of {metric}", f"a step above {last}", step)
            if type(value) is not float or not math.isfinite(value):
                raise corrupt(f"baseline of {metric}", "a finite float", value)
            last = step
        baselines[metric] = [_Value(*pair) for pair in zip(steps, values, strict=True)]
    return baselines
