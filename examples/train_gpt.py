"""Train a small byte-level GPT on Python's own source text, and survive being killed.

Run it, kill it in any way you like, run it again: it goes on where its newest snapshot stands, and
every loss it logs is, bit for bit, the one that an undisturbed run would have logged. Stop it with Ctrl-C
or SIGTERM, and it saves the step in hand before it ends, with exit code 75: run it again.

    python examples/train_gpt.py ~/gpt-run
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody knows)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from varvite import keep
from varvite.training import Hook, Job, ResumableSampler, run_training

if TYPE_CHECKING:
    from varvite.handles import SaveHandle
    from varvite.records import ResumeReport
    from varvite.training import Run, RunResult, StepOutcome

CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 64, 256, 4, 4, 0.1
BATCH, LEARNING_RATE, WARMUP_STEPS, SAVE_EVERY = 8, 1e-3, 20, 20


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(up, nn.GELU(), down)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations of shape (batch, context, width) to the same shape."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=DROPOUT if self.training else 0.0
        )
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Predicts the next byte at every position of a context."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(nn.Dropout(DROPOUT), *(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.embedding.weight  # tied: one tensor under two names

    def forward(self, tokens: Tensor) -> Tensor:
        """Map byte values of shape (batch, context) to logits of shape (batch, context, 256)."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Corpus(Dataset[tuple[Tensor, Tensor]]):
    """The standard library's source as windows of CONTEXT bytes."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: file.name)
        text = b"\n".join(file.read_bytes() for file in files)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        """Return the number of windows, each CONTEXT bytes from the next."""
        return len(self.text) // CONTEXT - 2

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return input and target of one window, each of shape (CONTEXT,)."""
        # The shift comes from the global generator: a resume that forgets it trains on other bytes.
        start = index * CONTEXT + int(torch.randint(CONTEXT, ()))
        tokens = self.text[start : start + CONTEXT + 1].long()
        return tokens[:-1], tokens[1:]


def build_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW that decays matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, *, steps: int) -> LambdaLR:
    """Return a schedule of linear warm-up, then cosine, over so many steps."""

    def scale(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, scale)


def build_data(*, seed: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return shuffled batches whose position can be saved and found again by index."""
    corpus = Corpus()
    sampler = ResumableSampler(corpus, seed=seed)
    return DataLoader(corpus, batch_size=BATCH, sampler=sampler, drop_last=True)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch, in nats a byte."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Log(Hook):
    """Writes the events of a run to a file of JSON lines, and some of them to the console."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.began = 0.0

    def write(self, **fields: object) -> None:
        """Append a line; it is with the kernel when this returns, so no kill takes it back."""
        self.file.write(json.dumps(fields) + "\n")
        self.file.flush()

    def restoring(self, run: Run) -> None:
        """Note that a process begins."""
        self.write(event="start")

    def restored(self, run: Run, report: ResumeReport) -> None:
        """Note where it goes on."""
        receipt = report.receipt.number if report.receipt else None
        skipped = report.skipped_snapshots
        self.write(event="resume", step=report.next_step, skipped=skipped, receipt=receipt)
        print("fresh start" if report.fresh else f"resumed, next step: {report.next_step}")

    def stepped(self, run: Run, outcome: StepOutcome) -> None:
        """Note the loss, exactly."""
        self.write(step=run.progress.step, loss=outcome.loss.hex())

    def saving(self, run: Run, step: int) -> None:
        """Note that a save begins."""
        self.write(event="save", step=step)
        self.began = time.perf_counter()

    def staged(self, run: Run, handle: SaveHandle) -> None:
        """Note how long training waited for the save."""
        blocked_seconds = time.perf_counter() - self.began
        self.write(event="staged", step=handle.step, blocked_seconds=blocked_seconds)
        print(f"step {handle.step}, loss: {run.metrics['loss']:.4f}")

    def ended(self, run: Run, result: RunResult) -> None:
        """Show what the saves cost, and what a failure would have lost."""
        run.manager.print_stats()
        print(run.autosave.describe())


def set_up() -> None:
    """Make equal bits possible: one order of additions, and no kernel that is free to choose."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def make_job(folder: Path, steps: int, seed: int) -> Job:
    """Return the job: functions that make its parts, and when to save."""
    return Job(
        folder=folder / "checkpoints",
        steps=steps,
        seed=seed,
        set_up=set_up,
        model=GPT,
        optimizer=build_optimizer,
        scheduler=partial(build_scheduler, steps=steps),
        data=partial(build_data, seed=seed),
        loss=loss_of,
        clip_grad_norm=1.0,
        autosave={"every_steps": SAVE_EVERY},
        manager={"keep": keep.last(3)},
    )


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where checkpoints/ and log.jsonl go")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with (options.folder / "log.jsonl").open("a", encoding="utf-8") as file:
        job = make_job(options.folder, options.steps, options.seed)
        result = run_training(job, hooks=[Log(file)])
    result.exit()


if __name__ == "__main__":
    main()
