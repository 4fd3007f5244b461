"""Saves inside a training loop: what a step after a save waits for, and what saving costs a run.

Here torch trains with all cores while a save goes on, as in a real run: threads of a save that
take a core from a step cost something although nobody waits for them. The last save of each loop is
loaded at its end and compared with what was there when it was asked for.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comparison.peers import PEERS
from comparison.peers.base import Peer
from comparison.workloads import LOOP_BATCH, WORKLOADS, TrainingState, assert_equal, digests

WARM_STEPS = 2


@dataclass
class StepSample:
    """One step of a loop; `join_seconds` is the part of `update_seconds` before the optimizer starts."""

    forward_backward_seconds: float
    update_seconds: float
    join_seconds: float


@dataclass
class SavedStep:
    """A save, the step after it, and a step with no save in sight."""

    blocked_seconds: float
    after: StepSample
    without: StepSample


class Loop:
    """A peer and the state that it saves, both warm."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        state = WORKLOADS[arguments["workload"]].build(arguments["scale"])
        assert isinstance(state, TrainingState)
        self.state = state
        for _ in range(WARM_STEPS):
            self.step()
        folder = Path(arguments["folder"])
        folder.mkdir(parents=True)
        self.peer: Peer = PEERS[arguments["peer"]](folder, state)
        self.expected: dict[str, str] = {}
        self._numbers = itertools.count()

    def step(self) -> None:
        """One step of training."""
        self.state.forward_backward(LOOP_BATCH)
        self.state.update()

    def save(self) -> None:
        """Ask for a save."""
        self.peer.save(next(self._numbers))

    def remember(self) -> None:
        """Note what the next save has to hold."""
        self.expected = digests(self.peer.expected(self.state.flat()))

    def check(self) -> None:
        """Load the last save and compare."""
        mode = self.peer.load_modes(is_table=False)[0]
        assert_equal(digests(self.peer.load(mode.name)), self.expected)
        self.peer.close()


def measure_steps(arguments: dict[str, Any]) -> dict[str, Any]:
    """A save and the step after it, in turns with a step alone; the first turn is left out.

    The first save allocates what the later ones use again.
    """
    loop = Loop(arguments)
    samples: list[SavedStep] = []
    for _ in range(arguments["repeat"] + 1):
        without = _timed_step(loop.state)
        loop.remember()
        begin = time.perf_counter()
        loop.save()
        blocked_seconds = time.perf_counter() - begin
        after = _timed_step(loop.state)
        loop.peer.wait()
        loop.peer.drop_older()
        samples.append(SavedStep(blocked_seconds, after, without))
    loop.check()
    return {"samples": [asdict(sample) for sample in samples[1:]]}


def _timed_step(state: TrainingState) -> StepSample:
    begin = time.perf_counter()
    state.forward_backward(LOOP_BATCH)
    gradients_end = time.perf_counter()
    # Hooks run in the order of their registration: when the last is called, all others are through.
    hooks_end: list[float] = []
    hook = state.optimizer.register_step_pre_hook(lambda *_: hooks_end.append(time.perf_counter()))
    update_begin = time.perf_counter()
    state.update()
    update_end = time.perf_counter()
    hook.remove()
    return StepSample(gradients_end - begin, update_end - update_begin, hooks_end[0] - update_begin)


def measure_goodput(arguments: dict[str, Any]) -> dict[str, Any]:
    """Stretches of steps without a save and with one, in the order without, with, with, without.

    In that order a steady drift of the machine meets both alike. A stretch with a save begins
    with it, and ends when its last step is done and the save is durable: the next could start.
    """
    loop = Loop(arguments)
    interval_steps = int(arguments["interval_steps"])
    deadline = time.perf_counter() + arguments["budget_seconds"]
    rounds: list[dict[str, list[float]]] = []
    with ThreadPoolExecutor(1) as thread:
        # The first save allocates what the later ones use again.
        _stretch_with_save(loop, 1, thread)
        while not rounds or time.perf_counter() < deadline:
            taken: dict[str, list[float]] = {"without": [], "with": []}
            taken["without"].append(_stretch(loop, interval_steps))
            for _ in range(2):
                taken["with"].append(_stretch_with_save(loop, interval_steps, thread))
            taken["without"].append(_stretch(loop, interval_steps))
            rounds.append(taken)
    loop.check()
    return {"interval_steps": interval_steps, "rounds": rounds}


def _stretch(loop: Loop, steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        loop.step()
    return time.perf_counter() - begin


def _stretch_with_save(loop: Loop, steps: int, thread: ThreadPoolExecutor) -> float:
    loop.remember()
    begin = time.perf_counter()
    loop.save()
    pending = thread.submit(loop.peer.wait) if loop.peer.works_in_wait else None
    for _ in range(steps):
        loop.step()
    if pending is None:
        loop.peer.wait()
    else:
        pending.result()
    seconds = time.perf_counter() - begin
    loop.peer.drop_older()
    return seconds
