"""Train a small byte-level GPT on Python's own source text, and survive being killed.

Run it, kill it in any way you like, run it again: it goes on where its newest snapshot stands, and
every loss it prints is, bit for bit, the one that an undisturbed run would have printed.

    python examples/train_gpt.py ~/gpt-run
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import math
import random
import sysconfig
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the name everybody knows)
from torch.optim.lr_scheduler import LambdaLR

from varvite import CheckpointManager, keep

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


class Corpus:
    """The standard library's source as shuffled windows, with a cursor that can be saved.

    The order of an epoch follows from seed and epoch alone, so the position is all of the state.
    """

    def __init__(self, seed: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: file.name)
        text = b"\n".join(file.read_bytes() for file in files)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.digest = hashlib.sha256(text).hexdigest()
        self.seed, self.epoch, self.position = seed, 0, 0
        self.order = self.shuffle()

    def shuffle(self) -> Tensor:
        """Return the order of this epoch's windows, each CONTEXT bytes from the next."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.text) // CONTEXT - 2, generator=generator)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each of shape (BATCH, CONTEXT), and move the cursor on."""
        if self.position + BATCH > len(self.order):
            self.epoch, self.position = self.epoch + 1, 0
            self.order = self.shuffle()
        windows = self.order[self.position : self.position + BATCH]
        self.position += BATCH
        # The shift comes from the global generator: a resume that forgets it trains on other bytes.
        starts = windows * CONTEXT + torch.randint(CONTEXT, (BATCH,))
        tokens = self.text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        return tokens[:, :-1], tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and the digest of the text that it is a position in."""
        return {"epoch": self.epoch, "position": self.position, "digest": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move the cursor to a saved position; raise ValueError if the text is another one."""
        if state["digest"] != self.digest:
            raise ValueError("cursor belongs to another text: resume with the Python it began with")
        self.epoch, self.position = state["epoch"], state["position"]
        self.order = self.shuffle()


def write_line(log: TextIO, **fields: object) -> None:
    """Append one JSON line; it is with the kernel when this returns, so no kill takes it back."""
    log.write(json.dumps(fields) + "\n")
    log.flush()


def build_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.AdamW, LambdaLR]:
    """Return AdamW that decays matrices only, and a schedule of linear warm-up, then cosine."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)

    def scale(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return optimizer, LambdaLR(optimizer, scale)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Corpus) -> float:
    """Do one update and return its loss, in nats a byte."""
    inputs, targets = data.next_batch()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def train(folder: Path, steps: int, seed: int) -> None:
    """Train to `steps` updates in all, going on from the newest snapshot if there is one."""
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):  # a snapshot holds NumPy's generator where there is one
        importlib.import_module("numpy").random.seed(seed)
    data, model = Corpus(seed), GPT()
    optimizer, scheduler = build_optimizer(model, steps)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    folder.mkdir(parents=True, exist_ok=True)

    with (
        (folder / "log.jsonl").open("a", encoding="utf-8") as log,
        CheckpointManager(folder / "checkpoints", keep=keep.last(3)) as mgr,
    ):
        write_line(log, event="start")
        report = mgr.resume(**objects)
        write_line(log, event="resume", step=report.next_step, skipped=report.skipped_snapshots)
        print("fresh start" if report.fresh else f"resumed, next step: {report.next_step}")
        for step in range(report, steps):
            loss = train_step(model, optimizer, data)
            scheduler.step()
            write_line(log, step=step, loss=loss.hex())
            if step + 1 == steps:
                write_line(log, event="save", step=step)
                mgr.save_final(step, metrics={"loss": loss}, **objects)
            elif (step + 1) % SAVE_EVERY == 0:
                write_line(log, event="save", step=step)
                began = time.perf_counter()
                mgr.save(step, metrics={"loss": loss}, **objects)
                blocked_seconds = time.perf_counter() - began
                write_line(log, event="staged", step=step, blocked_seconds=blocked_seconds)
                print(f"step {step}, loss: {loss:.4f}")
        mgr.print_stats()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where checkpoints/ and log.jsonl go")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # Equal bits need an equal order of additions: one thread, and no kernel that is free to choose.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    train(options.folder, options.steps, options.seed)


if __name__ == "__main__":
    main()
