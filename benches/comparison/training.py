"""What the training layer adds to the steps, the restart and the saves of a plain training loop.

`run_training` and a plain loop train the same model on the same data, in turns within one process: a
hook of the run does the plain loop's steps, so that a drift of the machine meets both alike. Nothing is
saved meanwhile, but whether a save is due is asked at each step. Torch has one thread: what the layer
does is Python, and threads that wait for a busy core would drown it.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
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
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
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


class Clocks:
    """Seconds of some functions: of each call of a part, and of all calls that both loops make alike."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}
        self._alike_seconds = 0.0

    def part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, each call timed."""
        taken = self.parts.setdefault(name, [])

        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments, **keywords)
            taken.append(time.perf_counter() - begin)
            return result

        return timed

    def iteration(self, name: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """The same generator function, with what it takes to each value timed."""
        taken = self.parts.setdefault(name, [])

        @functools.wraps(function)
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

    def alike(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with its time added to that of all such calls."""

        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments, **keywords)
            self._alike_seconds += time.perf_counter() - begin
            return result

        return timed

    def take_alike(self) -> float:
        """The sum since the last call."""
        seconds, self._alike_seconds = self._alike_seconds, 0.0
        return seconds


class Turns(Hook):
    """Lets the plain loop do as many steps after each turn of the run, and times all.

    A step of the run lasts from one call of this hook to the next, so the boundary before it is in it.
    """

    def __init__(self, plain: PlainLoop, turn_steps: int, clocks: Clocks) -> None:
        self.plain = plain
        self.turn_steps = turn_steps
        self.clocks = clocks
        self.taken: dict[str, list[float]] = {
            name: [] for name in ("layer", "layer alike", "plain", "plain alike")
        }
        self._begin = 0.0

    def restored(self, *_: Any) -> None:
        self.clocks.take_alike()
        self._begin = time.perf_counter()

    def stepped(self, *_: Any) -> None:
        self._take("layer", time.perf_counter() - self._begin)
        if len(self.taken["layer"]) % self.turn_steps == 0:
            for _ in range(self.turn_steps):
                self._take("plain", _seconds(self.plain.step))
        self._begin = time.perf_counter()

    def _take(self, kind: str, seconds: float) -> None:
        self.taken[kind].append(seconds)
        self.taken[f"{kind} alike"].append(self.clocks.take_alike())


def measure_steps(arguments: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step with the layer and without, of its parts, and of what both do alike.

    Forward, backward, clipping and update are calls of torch that both loops make alike. They take nearly
    all of a step and vary by more than the layer takes, so they are timed apart.
    """
    torch.set_num_threads(1)
    recipe = RECIPES[arguments["recipe"]](arguments["scale"])
    clocks = Clocks()
    recipe = replace(recipe, loss=clocks.alike(recipe.loss))
    step_fn = clocks.part("step", training_step)
    with contextlib.ExitStack() as stack:
        for owner, name, timed in _timed_functions(clocks):
            stack.enter_context(mock.patch.object(owner, name, timed))
        hook = Turns(PlainLoop(recipe), recipe.turn_steps, clocks)
        job = recipe.job(Path(arguments["folder"]), WARM_STEPS + recipe.turns * recipe.turn_steps)
        result = run_training(job, step_fn=step_fn, hooks=[hook])
    assert result.exit_code is ExitCode.FINISHED, result.reason
    return {
        "title": recipe.title,
        "parameter_count": sum(value.numel() for value in recipe.model().parameters()),
        "turn_steps": recipe.turn_steps,
        "seconds": {name: taken[WARM_STEPS:] for name, taken in (hook.taken | clocks.parts).items()},
    }


def _timed_functions(clocks: Clocks) -> list[tuple[Any, str, Callable[..., Any]]]:
    return [
        (torch.Tensor, "backward", clocks.alike(torch.Tensor.backward)),
        (torch.nn.utils, "clip_grad_norm_", clocks.alike(torch.nn.utils.clip_grad_norm_)),
        (torch.optim.AdamW, "step", clocks.alike(torch.optim.AdamW.step)),
        (torch.optim.Optimizer, "zero_grad", clocks.alike(torch.optim.Optimizer.zero_grad)),
        (NonFiniteGuard, "check", clocks.part("guard", NonFiniteGuard.check)),
        (HealthMonitor, "observe", clocks.part("monitor", HealthMonitor.observe)),
        (Boundary, "decide", clocks.part("boundary", Boundary.decide)),
        (ResumableLoader, "__iter__", clocks.iteration("batch", ResumableLoader.__iter__)),
        (PlainLoop, "forever", clocks.iteration("plain batch", PlainLoop.forever)),
        (PlainLoop, "learn", clocks.part("plain step", PlainLoop.learn)),
    ]


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
