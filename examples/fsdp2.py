"""Train a small transformer with FSDP2 on four ranks, then go on with it on two ranks and on one.

Starts the ranks itself: processes of this machine, on CPU, connected by gloo. Four ranks train, and save
in the background while they do; their last losses are the reference. Then two ranks take up a snapshot
from the middle, and then one process, without FSDP: each compares every value of the state with that of
the four, and trains on. Ends with a verdict.

    python examples/fsdp2.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812 (the name everybody knows)

from varvite import CheckpointManager

CONTEXT, WIDTH, HEADS, LAYERS, LETTERS = 32, 64, 4, 3, 128
STEPS, SAVE_EVERY, RESUMED_FROM, BATCH = 12, 3, 5, 8
TOLERANCE = 1e-5
"""Of a loss on another number of ranks: gradients are then added up in another order."""


class GPT(nn.Module):
    """Predicts the next letter at every position of a context."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = partial(nn.TransformerEncoderLayer, WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(layer(norm_first=True) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map letters of shape (batch, context) to logits of shape (batch, context, letters)."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return model, optimizer and scheduler; on several ranks the model is sharded over them."""
    torch.manual_seed(0)
    model: Any = GPT()
    if dist.is_initialized():
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def batch_of(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the batch of a step: the same text, however many ranks share it."""
    text = torch.frombuffer(bytearray(Path(json.__file__).read_bytes()), dtype=torch.uint8).long() % LETTERS
    starts = range(step * BATCH * CONTEXT, (step + 1) * BATCH * CONTEXT, CONTEXT)
    windows = torch.stack([text[start % 8192 : start % 8192 + CONTEXT + 1] for start in starts])
    mine = windows[rank * BATCH // world_size : (rank + 1) * BATCH // world_size]
    return mine[:, :-1], mine[:, 1:]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> float:
    """Do one step, and return its loss over all ranks."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    inputs, targets = batch_of(step, rank, world_size)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    mean = loss.detach() / world_size
    if dist.is_initialized():
        dist.all_reduce(mean)
    return mean.item()


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the digest of all weights and moments, put together from their shards. All ranks call it."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for value in (
            parameter,
            *(optimizer.state[parameter][key] for key in ("step", "exp_avg", "exp_avg_sq")),
        ):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(whole.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train_first(folder: Path) -> dict[str, Any]:
    """Train from the start, and save in the background."""
    model, optimizer, scheduler = build()
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    losses, digest = {}, ""
    with CheckpointManager(folder) as manager:
        for step in range(manager.resume(**objects), STEPS):
            losses[step] = train(model, optimizer, scheduler, step)
            if step % SAVE_EVERY == SAVE_EVERY - 1:
                manager.save(step, metrics={"loss": losses[step]}, **objects)
            if step == RESUMED_FROM:
                digest = digest_of(model, optimizer)
    return {"losses": losses, "digest": digest}


def train_on(folder: Path) -> dict[str, Any]:
    """Take up the snapshot of a step in the middle, and train to the end."""
    model, optimizer, scheduler = build()
    # Only to look at: what this run would save is not for the folder of the first.
    with CheckpointManager(folder, read_only=True) as manager:
        report = manager.resume(RESUMED_FROM, model=model, optimizer=optimizer, scheduler=scheduler)
    digest = digest_of(model, optimizer)
    losses = {step: train(model, optimizer, scheduler, step) for step in range(report, STEPS)}
    return {"losses": losses, "digest": digest, "verified": report.verified_bytes}


def be_rank(rank: int, world_size: int, what: str, folder: Path) -> None:
    """Live the life of one rank; the first one writes down what it saw."""
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(folder / f"store-{what}-{world_size}"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = {"train_first": train_first, "train_on": train_on}[what](folder / "checkpoints")
    if rank == 0:
        (folder / f"{what}-{world_size}.json").write_text(json.dumps(found))
    if world_size > 1:
        dist.destroy_process_group()


def on_ranks(world_size: int, what: str, folder: Path) -> dict[str, Any]:
    """Run a function on so many ranks, and return what the first one saw."""
    # Forks need not load torch again; on a GPU it has to be `spawn`, or torchrun.
    processes.start_processes(
        be_rank, args=(world_size, what, folder), nprocs=world_size, start_method="fork"
    )
    found: dict[str, Any] = json.loads((folder / f"{what}-{world_size}.json").read_text())
    found["losses"] = {int(step): loss for step, loss in found["losses"].items()}
    return found


def compare(first: dict[str, Any], other: dict[str, Any]) -> tuple[bool, float]:
    """Return whether the state is that of the four ranks, bit for bit, and how far losses are off."""
    off = max(abs(loss - first["losses"][step]) for step, loss in other["losses"].items())
    return other["digest"] == first["digest"], off


def main() -> int:
    """Train on four ranks, on two, and on one, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        first = on_ranks(4, "train_first", folder)
        begin, end = first["losses"][0], first["losses"][STEPS - 1]
        print(f"4 ranks trained {STEPS} steps, loss {begin:.4f} to {end:.4f}")
        is_well = end < begin
        for world_size in (2, 1):
            other = on_ranks(world_size, "train_on", folder)
            is_same, off = compare(first, other)
            is_well = is_well and is_same and off < TOLERANCE
            state = "equal bit for bit" if is_same else "NOT EQUAL"
            ranks = "1 process" if world_size == 1 else f"{world_size} ranks"
            print(
                f"{ranks} resumed after step {RESUMED_FROM}: state {state}, losses off by at most {off:.1e}"
            )
        with CheckpointManager(folder / "checkpoints", read_only=True) as manager:
            for info in manager.snapshots():
                print(f"  {info}")
    print("verdict: " + ("the state is the same on 4, 2 and 1 ranks" if is_well else "FAILED"))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
