"""Training state: what makes a resumed run equal to one that never stopped.

The public names are loaded when they are first used; `import varvite.training` imports neither torch nor
numpy and starts no thread.

Example:
    >>> from varvite import training
    >>> "rng" in dir(training)
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varvite.training import rng
    from varvite.training.accumulation import GradientAccumulation
    from varvite.training.agreement import Agreement
    from varvite.training.autosave import Autosave
    from varvite.training.boundary import Boundary, Decision
    from varvite.training.cursor import Cursor
    from varvite.training.environment import describe_environment
    from varvite.training.exits import ExitCode
    from varvite.training.finite import Action, NonFiniteGuard, roll_back
    from varvite.training.health import Anomaly, Continuity, HealthMonitor
    from varvite.training.identity import Origin, RunIdentity
    from varvite.training.loader import ResumableLoader
    from varvite.training.modes import OptimizerMode, evaluating
    from varvite.training.prove import Proof, prove_resume
    from varvite.training.reasons import StopKind, StopReason
    from varvite.training.receipts import Receipt
    from varvite.training.run import Hook, Job, Phases, Progress, Run, RunResult, StepOutcome, run_training
    from varvite.training.run.step import training_step
    from varvite.training.sampler import ResumableSampler
    from varvite.training.samples import PerSampleRandom
    from varvite.training.starting import plan_warm_start
    from varvite.training.stop import StopSignal
    from varvite.training.tracking import Tracker, mode_after, open_tracker, read_rows
    from varvite.training.trainable import TrainableMask
    from varvite.training.verdicts import Verdict

__all__ = [
    "Action",
    "Agreement",
    "Anomaly",
    "Autosave",
    "Boundary",
    "Continuity",
    "Cursor",
    "Decision",
    "ExitCode",
    "GradientAccumulation",
    "HealthMonitor",
    "Hook",
    "Job",
    "NonFiniteGuard",
    "OptimizerMode",
    "Origin",
    "PerSampleRandom",
    "Phases",
    "Progress",
    "Proof",
    "Receipt",
    "ResumableLoader",
    "ResumableSampler",
    "Run",
    "RunIdentity",
    "RunResult",
    "StepOutcome",
    "StopKind",
    "StopReason",
    "StopSignal",
    "Tracker",
    "TrainableMask",
    "Verdict",
    "describe_environment",
    "evaluating",
    "mode_after",
    "open_tracker",
    "plan_warm_start",
    "prove_resume",
    "read_rows",
    "rng",
    "roll_back",
    "run_training",
    "training_step",
]

_HOMES = {
    "Action": "finite",
    "Agreement": "agreement",
    "Anomaly": "health",
    "Autosave": "autosave",
    "Boundary": "boundary",
    "Continuity": "health",
    "Cursor": "cursor",
    "Decision": "boundary",
    "ExitCode": "exits",
    "GradientAccumulation": "accumulation",
    "HealthMonitor": "health",
    "Hook": "run",
    "Job": "run",
    "NonFiniteGuard": "finite",
    "OptimizerMode": "modes",
    "Origin": "identity",
    "PerSampleRandom": "samples",
    "Phases": "run",
    "Progress": "run",
    "Proof": "prove",
    "Receipt": "receipts",
    "ResumableLoader": "loader",
    "ResumableSampler": "sampler",
    "Run": "run",
    "RunIdentity": "identity",
    "RunResult": "run",
    "StepOutcome": "run",
    "StopKind": "reasons",
    "StopReason": "reasons",
    "StopSignal": "stop",
    "Tracker": "tracking",
    "TrainableMask": "trainable",
    "Verdict": "verdicts",
    "describe_environment": "environment",
    "evaluating": "modes",
    "mode_after": "tracking",
    "open_tracker": "tracking",
    "plan_warm_start": "starting",
    "prove_resume": "prove",
    "read_rows": "tracking",
    "roll_back": "finite",
    "run_training": "run",
    "training_step": "run.step",
}
_MODULES = ("rng",)


def __getattr__(name: str) -> Any:
    """Loads a public name on first use (PEP 562)."""
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"varvite.training.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"varvite.training.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module `varvite.training` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
