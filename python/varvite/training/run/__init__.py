"""`run_training`: a training job from its set-up to its exit code, in phases that can be swapped.

Example:
    >>> import torch
    >>> from varvite.training import Job
    >>> job = Job(
    ...     folder="runs/demo",
    ...     steps=100,
    ...     model=lambda: torch.nn.Linear(1, 1),
    ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data=lambda: [torch.ones(2, 1)],
    ...     loss=lambda model, batch: model(batch).square().mean(),
    ... )
    >>> job.micro_batches
    1
"""

from varvite.training.run.context import Progress, Run, RunResult, StepOutcome
from varvite.training.run.entry import run_training
from varvite.training.run.hooks import Hook
from varvite.training.run.job import Job
from varvite.training.run.phases import Phases

__all__ = ["Hook", "Job", "Phases", "Progress", "Run", "RunResult", "StepOutcome", "run_training"]
