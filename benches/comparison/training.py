"""What the training layer adds to the steps, the restart and the saves of a plain training loop.

`run_training` and a plain loop train the same model on the same data, in turns within one process: a
hook of the run does the plain loop's steps, so that a drift of the machine meets both alike. Nothing is
saved meanwhile, but whether a save is due is asked at each step. Torch has one thread: what the layer
does is Python, and threads that wait for a busy core would drown it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from comparison.workloads import Transformer
from varvite import CheckpointManager
from varvite.training import (
    Boundary,
    ExitCode,
    HealthMonitor,
    Hook,
    Job,
    NonFiniteGuard,
    ResumableLoader,
    ResumableSampler,
    run_training,
)
from varvite.training.run.step import training_step

TARGET_SECONDS = 0.05
SAMPLES = 16_384
TINY_WIDTH = 16
TINY_BATCH = 8
WIDTH, LAYERS, VOCABULARY, SEQUENCE_TOKENS = 128, 4, 1024, 32
EMBEDDING_DEVIATION = 0.02
FIRST_BATCH = 8
CALIBRATIONS = 3
CALIBRATION_STEPS = 25
CLIP_NORM = 1.0
# Until the monitor's window is full, a step does less than all later ones.
WARM_STEPS = 40
TIMED_SAVES = 20
TIMED_RESTARTS = 10
# No save falls due, but the layer asks at each step whether one does.
NO_SAVES = {"mean_time_between_failures_seconds": 86_400.0, "least_seconds": 3600.0}

StepFunction = Callable[[Any, Any], Any]
LossFunction = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """A model, its data and how it learns, for both kinds of loop."""

    title: str
    model: Callable[[], nn.Module]
    samples: Tensor
    batch_size: int
    loss: LossFunction
    # Short steps are many to a turn: a single one would find the caches full of the other loop.
    turn_steps: int
    turns: int

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW, as most have it."""
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def job(self, folder: Path, steps: int) -> Job:
        """The job for `run_training`."""
        return Job(
            folder=folder,
            steps=steps,
            model=self.model,
            optimizer=self.optimizer,
            data=lambda: DataLoader(
                self.samples, batch_size=self.batch_size, sampler=ResumableSampler(self.samples)
            ),
            loss=self.loss,
            clip_grad_norm=CLIP_NORM,
            autosave=NO_SAVES,
        )


class PlainLoop:
    """What a trainer writes without the layer."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(0)
        self.model = recipe.model()
        self.optimizer = recipe.optimizer(self.model)
        self.loss = recipe.loss
        self.loader = DataLoader(recipe.samples, batch_size=recipe.batch_size, shuffle=True)
        self.batches = self.forever()

    def forever(self) -> Iterator[Tensor]:
        while True:
            yield from self.loader

    def step(self) -> float:
        """A batch, and the step on it."""
        return self.learn(next(self.batches))

    def learn(self, batch: Tensor) -> float:
        """One step; the loss."""
        loss = self.loss(self.model, batch)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _tiny(scale: float) -> Recipe:
    torch.manual_seed(1)
    return Recipe(
        title="two linear layers",
        model=lambda: nn.Sequential(
            nn.Linear(TINY_WIDTH, TINY_WIDTH), nn.Tanh(), nn.Linear(TINY_WIDTH, TINY_WIDTH)
        ),
        samples=torch.randn(SAMPLES, TINY_WIDTH),
        batch_size=TINY_BATCH,
        loss=lambda model, batch: (model(batch) - batch).square().mean(),
        turn_steps=10,
        turns=_turns(500, scale),
    )


def _small(scale: float) -> Recipe:
    torch.manual_seed(1)
    samples = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE_TOKENS + 1))

    def recipe(batch_size: int) -> Recipe:
        return Recipe(
            title=f"a transformer, batches of {batch_size} times {SEQUENCE_TOKENS} tokens",
            model=_transformer,
            samples=samples,
            batch_size=batch_size,
            loss=_next_token_loss,
            turn_steps=1,
            turns=_turns(250, scale),
        )

    return recipe(_batch_size_for(TARGET_SECONDS, recipe))


def _transformer() -> nn.Module:
    model = Transformer(WIDTH, LAYERS, VOCABULARY)
    # From torch's own embedding, tied to the output, come gradients below the normal floats. They take a
    # processor several times as long, until some steps are learned.
    nn.init.normal_(model.embedding.weight, std=EMBEDDING_DEVIATION)
    return model


def _next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _turns(count: int, scale: float) -> int:
    return max(10, round(count * min(scale, 1.0)))


RECIPES: dict[str, Callable[[float], Recipe]] = {"small": _small, "tiny": _tiny}


def _batch_size_for(target_seconds: float, recipe: Callable[[int], Recipe]) -> int:
    """The batch whose step takes about that long here."""
    batch_size = FIRST_BATCH
    for _ in range(CALIBRATIONS):
        loop = PlainLoop(recipe(batch_size))
        seconds = statistics.median(_seconds(loop.step) for _ in range(CALIBRATION_STEPS))
        batch_size = max(1, round(batch_size * target_seconds / seconds))
    return batch_size


def _seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


# ---- steps -------------------------------------------------------------------------------------


class Turns(Hook):
    """Lets the plain loop do as many steps after each turn of the run, and times all.

    A step of the run lasts from one call of this hook to the next, so the boundary before it is in it.
    """

    def __init__(self, plain: PlainLoop, turn_steps: int) -> None:
        self.plain = plain
        self.turn_steps = turn_steps
        self.layer_seconds: list[float] = []
        self.plain_seconds: list[float] = []
        self._begin = 0.0

    def restored(self, *_: Any) -> None:
        self._begin = time.perf_counter()

    def stepped(self, *_: Any) -> None:
        self.layer_seconds.append(time.perf_counter() - self._begin)
        if len(self.layer_seconds) % self.turn_steps == 0:
            self.plain_seconds += [_seconds(self.plain.step) for _ in range(self.turn_steps)]
        self._begin = time.perf_counter()


def measure_steps(arguments: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step with the layer and without; then of the parts of both."""
    torch.set_num_threads(1)
    folder = Path(arguments["folder"])
    recipe = RECIPES[arguments["recipe"]](arguments["scale"])
    return {
        "title": recipe.title,
        "parameter_count": sum(value.numel() for value in recipe.model().parameters()),
        "turn_steps": recipe.turn_steps,
        "steps": _take_turns(recipe, folder / "steps", recipe.turns),
        "parts": _measure_parts(recipe, folder / "parts"),
    }


def _take_turns(
    recipe: Recipe, folder: Path, turns: int, step_fn: StepFunction = training_step
) -> dict[str, list[float]]:
    steps = WARM_STEPS + turns * recipe.turn_steps
    hook = Turns(PlainLoop(recipe), recipe.turn_steps)
    result = run_training(recipe.job(folder, steps), step_fn=step_fn, hooks=[hook])
    assert result.exit_code is ExitCode.FINISHED, result.reason
    return {"layer": hook.layer_seconds[WARM_STEPS:], "plain": hook.plain_seconds[WARM_STEPS:]}


class Clocks:
    """Seconds of each call of some functions, by the name of the part."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""
        taken = self.seconds.setdefault(part, [])

        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments, **keywords)
            taken.append(time.perf_counter() - begin)
            return result

        return timed

    def wrap_iteration(self, part: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
        """The same generator function, with what it takes to the next value timed."""
        taken = self.seconds.setdefault(part, [])

        def timed(*arguments: Any) -> Iterator[Any]:
            values = function(*arguments)
            while True:
                begin = time.perf_counter()
                try:
                    value = next(values)
                except StopIteration:
                    return
                taken.append(time.perf_counter() - begin)
                yield value

        return timed


def _measure_parts(recipe: Recipe, folder: Path) -> dict[str, list[float]]:
    """The same turns with clocks in the calls, which take a little themselves: by part, one entry a step."""
    clocks = Clocks()
    patches = [
        (NonFiniteGuard, "check", clocks.wrap("guard", NonFiniteGuard.check)),
        (HealthMonitor, "observe", clocks.wrap("monitor", HealthMonitor.observe)),
        (Boundary, "decide", clocks.wrap("boundary", Boundary.decide)),
        (ResumableLoader, "__iter__", clocks.wrap_iteration("batch", ResumableLoader.__iter__)),
        (PlainLoop, "forever", clocks.wrap_iteration("plain batch", PlainLoop.forever)),
        (PlainLoop, "learn", clocks.wrap("plain step", PlainLoop.learn)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, timed in patches:
            stack.enter_context(mock.patch.object(owner, name, timed))
        step_fn = clocks.wrap("step", training_step)
        whole = _take_turns(recipe, folder, max(1, recipe.turns // 5), step_fn)
    return whole | {name: seconds[WARM_STEPS:] for name, seconds in clocks.seconds.items()}


# ---- saves and restarts ------------------------------------------------------------------------


def measure_saves(arguments: dict[str, Any]) -> dict[str, Any]:
    """Saves of all that a run consists of, in turns with its model and optimizer alone; restarts likewise."""
    torch.set_num_threads(1)
    folder = Path(arguments["folder"])
    recipe = _small(arguments["scale"])
    saves = Saves(folder / "bare saves")
    job = recipe.job(folder / "saves", WARM_STEPS + TIMED_SAVES + 1)
    assert run_training(job, hooks=[saves]).exit_code is ExitCode.FINISHED
    saves.bare.close()
    everything, bare = [], []
    first_step = WARM_STEPS + TIMED_SAVES + 1
    _bare_restart(recipe, folder / "bare saves")
    for step in range(first_step, first_step + TIMED_RESTARTS):
        everything.append(_restart(recipe, folder / "saves", step))
        bare.append(_bare_restart(recipe, folder / "bare saves"))
    return {
        "save_seconds": {"everything": saves.everything_seconds, "bare": saves.bare_seconds},
        "restart_seconds": {"everything": everything, "bare": bare},
    }


class Saves(Hook):
    """After each of the later steps, a save of all and a save of model and optimizer alone."""

    def __init__(self, folder: Path) -> None:
        self.bare = CheckpointManager(folder)
        self.everything_seconds: list[float] = []
        self.bare_seconds: list[float] = []

    def stepped(self, run: Any, *_: Any) -> None:
        step = run.progress.step
        if not WARM_STEPS <= step < WARM_STEPS + TIMED_SAVES:
            return
        objects = {"model": run.model, "optimizer": run.optimizer}
        everything = _blocked_seconds(lambda: run.manager.save(step, metrics=run.metrics, **run.objects()))
        bare = _blocked_seconds(lambda: self.bare.save(step, **objects))
        if step > WARM_STEPS:  # the first saves allocate what the later ones use again
            self.everything_seconds.append(everything)
            self.bare_seconds.append(bare)


def _blocked_seconds(save: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    handle = save()
    seconds = time.perf_counter() - begin
    handle.wait()
    return seconds


class Restoring(Hook):
    """Takes the time at which the restore begins."""

    begin = 0.0

    def restoring(self, *_: Any) -> None:
        self.begin = time.perf_counter()


def _restart(recipe: Recipe, folder: Path, step: int) -> float:
    """From an open repository to the first batch, with all that a run consists of."""
    hook = Restoring()
    end: list[float] = []

    def step_fn(run: Any, batches: Any) -> Any:
        end.append(time.perf_counter())
        return training_step(run, batches)

    result = run_training(recipe.job(folder, step + 1), step_fn=step_fn, hooks=[hook])
    assert result.step == step
    assert len(end) == 1
    return end[0] - hook.begin


def _bare_restart(recipe: Recipe, folder: Path) -> float:
    """The same with model and optimizer alone, and a loader that begins anew."""
    loop = PlainLoop(recipe)
    with CheckpointManager(folder) as manager:
        begin = time.perf_counter()
        manager.resume(require=True, model=loop.model, optimizer=loop.optimizer)
        next(loop.batches)
        return time.perf_counter() - begin
