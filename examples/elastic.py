"""Train under torchrun while ranks are killed, and go on with another number of ranks.

Two ranks train; one is killed with SIGKILL in the middle of a step, later the other one in the middle of a
save. Each time torchrun starts both of them again (`--max-restarts`), and they go on from the newest
snapshot. Then three ranks take over. Ends with a verdict: every sample of every epoch was trained on exactly
once, the schedule stands at the number of updates, the receipts tell what happened, and up to the change
of ranks the weights are, bit for bit, those of a run that nobody disturbed.

    python examples/elastic.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from varvite import CheckpointManager
from varvite.training import Hook, Job, ResumableSampler, run_training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from varvite.handles import SaveHandle
    from varvite.records import ResumeReport
    from varvite.training import Run, StepOutcome

SAMPLES, BATCH, WIDTH, SAVE_EVERY = 96, 2, 256, 5
RANKS, RANKS_LATER = 2, 3
STEPS = 30
"""Of two ranks: an epoch and a quarter."""
STEPS_LATER = 12 + 16
"""Of three ranks: the rest of that epoch, and one more."""
KILLS = [
    {"restarts": 0, "rank": 1, "step": 8, "where": "step"},
    {"restarts": 1, "rank": 0, "step": 14, "where": "save"},
]


class Numbers:
    """A data set in which a sample says which one it is."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        """Return the number of a sample, and its values."""
        return index, torch.linspace(0, index / SAMPLES, WIDTH)


class Log(Hook):
    """Writes each step of this rank to a file of its own, and kills the rank where it is to be killed."""

    def __init__(self, folder: Path, kills: Sequence[dict[str, Any]]) -> None:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.kills = [kill for kill in kills if kill["restarts"] == restarts]
        self.folder = folder
        self.step = 0
        self.samples: list[int] = []

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch, and note its samples."""
        numbers, values = batch
        loss = (model(values) - values).square().mean()
        self.samples += numbers.tolist()
        self.die("step", self.step)  # between forward and backward
        return loss

    def restored(self, run: Run, report: ResumeReport) -> None:
        """Note where it goes on; what was done after that does not count any more."""
        self.step = report.next_step
        world_size = run.agreement.world_size
        name = f"{len(list(self.folder.glob('*.jsonl')))}-{run.agreement.rank}-{os.getpid()}.jsonl"
        # By rank and process: no two write to one file.
        self.file = (self.folder / name).open("a", encoding="utf-8")
        self.write(from_step=report.next_step, started=run.identity.restart_count, ranks=world_size)

    def stepped(self, run: Run, outcome: StepOutcome) -> None:
        """Note the samples of a step."""
        self.write(step=run.progress.step, samples=self.samples, loss=outcome.loss)
        self.step, self.samples = run.progress.next_step, []

    def staged(self, run: Run, handle: SaveHandle) -> None:
        """Die while the pack of this rank is being written."""
        self.die("save", handle.step)

    def write(self, **fields: Any) -> None:
        """Append a line; it is with the kernel when this returns, so no kill takes it back."""
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()

    def die(self, where: str, step: int) -> None:
        """End this process, if it is its turn, as the kernel does where memory is short."""
        rank = dist.get_rank()
        if any((kill["rank"], kill["step"], kill["where"]) == (rank, step, where) for kill in self.kills):
            os.kill(os.getpid(), signal.SIGKILL)


def set_up() -> None:
    """Make equal bits possible."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def build_model() -> nn.Module:
    """Return a model that averages gradients over all ranks."""
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
    return DistributedDataParallel(layers)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def build_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule that falls with each update."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)


def build_data() -> DataLoader[Any]:
    """Return batches of this rank; the position counts the samples of all ranks, so it outlives a change."""
    samples = Numbers()
    return DataLoader(samples, batch_size=BATCH, sampler=ResumableSampler(samples, seed=1))  # type: ignore[arg-type]


def work(folder: Path, steps: int, kills: Sequence[dict[str, Any]]) -> None:
    """Be one rank: train from wherever the newest snapshot stands."""
    log = Log(folder / "log", kills)
    job = Job(
        folder=folder / "checkpoints",
        steps=steps,
        set_up=set_up,
        model=build_model,
        optimizer=build_optimizer,
        scheduler=build_scheduler,
        data=build_data,
        loss=log.loss,
        autosave={"every_steps": SAVE_EVERY},
    )
    run_training(job, hooks=[log])


def be_undisturbed(rank: int, folder: Path) -> None:
    """Be one rank of the run that nobody disturbs."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    work(folder, STEPS, [])


def torchrun(folder: Path, ranks: int, steps: int, kills: Sequence[dict[str, Any]]) -> int:
    """Have torchrun start the ranks, and start them again after each failure; return its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
    command += [
        f"--nproc-per-node={ranks}",
        f"--max-restarts={len(kills)}",
        __file__,
        "--worker",
        str(folder),
    ]
    command += [f"--steps={steps}", f"--kills={json.dumps(kills)}"]
    with (folder / "torchrun.log").open("ab") as errors:
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, stderr=errors, env=environment, check=False).returncode


def history(folder: Path) -> dict[int, Counter[int]]:
    """Return the samples of each step that counts, of all ranks together: the last time that it was done."""
    lives = []
    for path in (folder / "log").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lives.append((lines[0]["started"], lines[0]["from_step"], lines[1:]))
    steps: dict[int, Counter[int]] = {}
    for started in sorted({life[0] for life in lives}):
        now = [life for life in lives if life[0] == started]
        steps = {step: samples for step, samples in steps.items() if step < now[0][1]}
        for _, _, lines in now:
            for line in lines:
                steps.setdefault(line["step"], Counter()).update(line["samples"])
    return steps


def judge(folder: Path, reference: Path) -> list[tuple[str, bool]]:
    """Return what is to hold, and whether it does."""
    steps = history(folder)
    total = STEPS + STEPS_LATER
    epochs = [Counter[int]() for _ in range(3)]
    seen = 0
    for step in sorted(steps):
        epochs[seen // SAMPLES].update(steps[step])
        seen += steps[step].total()
    with CheckpointManager(folder / "checkpoints", read_only=True) as manager:
        saved = manager.load()
        receipts = manager.receipts()
        digest = manager.info(STEPS - 1).digest
    with CheckpointManager(reference / "checkpoints", read_only=True) as manager:
        undisturbed = manager.info(STEPS - 1).digest
    for receipt in receipts:
        print(f"  {receipt}; ranks {receipt.saved_world_size} to {receipt.world_size}")
    ranks = [(one.saved_world_size, one.world_size, one.rng) for one in receipts]
    told = [(RANKS, RANKS, "restored")] * len(KILLS) + [(RANKS, RANKS_LATER, "derived")]
    return [
        (f"{total} steps count, of all that were done", sorted(steps) == list(range(total))),
        ("each sample exactly once in each of 3 epochs", epochs == [Counter(range(SAMPLES))] * 3),
        (
            f"updates and schedule: {saved['progress']['updates']}, {saved['scheduler']['last_epoch']}",
            saved["progress"]["updates"] == saved["scheduler"]["last_epoch"] == total,
        ),
        ("a receipt of each restart, and of the change of ranks", ranks == told),
        (f"state after step {STEPS - 1} is that of the undisturbed run, bit for bit", digest == undisturbed),
    ]


def main() -> int:
    """Train, kill, train on, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.steps, options.kills)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        reference, folder = Path(temporary, "undisturbed"), Path(temporary, "killed")
        for one in (reference, folder):
            (one / "log").mkdir(parents=True)
        start = partial(processes.start_processes, nprocs=RANKS, start_method="fork")
        start(be_undisturbed, args=(reference,))
        print(f"{RANKS} ranks trained {STEPS} steps, undisturbed")
        codes = [torchrun(folder, RANKS, STEPS, KILLS)]
        print(f"{RANKS} ranks did the same under torchrun, {len(KILLS)} times killed; exit code {codes[0]}")
        codes += [torchrun(folder, RANKS_LATER, STEPS + STEPS_LATER, [])]
        print(f"{RANKS_LATER} ranks trained {STEPS_LATER} steps more; exit code {codes[1]}")
        if any(codes):
            print((folder / "torchrun.log").read_text(), file=sys.stderr)
        found = [] if any(codes) else judge(folder, reference)
    for what, holds in found:
        print(f"  {'yes' if holds else 'NO '} {what}")
    is_well = bool(found) and all(holds for _, holds in found)
    print("verdict: " + ("nothing was lost, and nothing done twice" if is_well else "FAILED"))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
