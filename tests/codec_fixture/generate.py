"""Trains a small GPT on the source of Python's library and writes slices of its state as raw bytes.

Run it as `python tests/codec_fixture/generate.py FOLDER`. What it writes depends on the machine and on
the versions of Python and PyTorch; the files in the repository were made once and stay as they are.
"""

import copy
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

WIDTH = 128
HEADS = 4
LAYERS = 2
CONTEXT = 128
BATCH = 8
STEPS = 400
TEXT_BYTES = 3_000_000
LEARNING_RATE_PEAK = 1e-3
LEARNING_RATE_END = 3e-4
SLICE_ELEMENTS = 15_360
WRITTEN = (
    "weights-3e-4-1.bf16",
    "weights-3e-4-10.bf16",
    "weights-3e-4-10.f32",
    "weights-3e-4-100.bf16",
    "weights-1e-6-1.bf16",
)
SLICED = (
    "embedding.weight",
    "blocks.1.attention.weight",
    "blocks.1.expand.weight",
    "blocks.1.contract.weight",
)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, context, width) to the same."""
        batch, length, _ = x.shape
        heads = self.attention(self.norms[0](x)).view(batch, length, 3 * HEADS, WIDTH // HEADS)
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.contract(functional.gelu(self.expand(self.norms[1](x))))


class Model(nn.Module):
    """A GPT over bytes with a tied embedding."""

    def __init__(self) -> None:
        """Makes the layers; matrices start normal with deviation 0.02."""
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next byte."""
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T


def corpus() -> torch.Tensor:
    """Bytes of the library's modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(model: Model, optimizer: torch.optim.Optimizer, text: torch.Tensor, rates: list[float]) -> float:
    """Takes one step for each learning rate; returns the last loss."""
    loss = torch.zeros(())
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,)).tolist()
        windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        loss = functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def slices(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The slices of all chosen tensors, one after the other."""
    return torch.cat([tensors[name].detach().flatten()[:SLICE_ELEMENTS] for name in SLICED])


def write(folder: Path, name: str, values: torch.Tensor) -> None:
    """Writes the little-endian bytes of the values."""
    (folder / name).write_bytes(values.contiguous().view(torch.uint8).numpy().tobytes())


def main() -> None:
    """Trains, branches, and writes one file for each tensor and step."""
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    text = corpus()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    warm = [LEARNING_RATE_PEAK * (step + 1) / 20 for step in range(20)]
    falling = torch.linspace(LEARNING_RATE_PEAK, LEARNING_RATE_END, STEPS - len(warm)).tolist()
    loss = train(model, optimizer, text, warm + falling)
    print(f"loss after {STEPS} steps: {loss:.3f}")
    named = dict(model.named_parameters())
    write(folder, "weights.f32", slices(named))
    for moment in ("exp_avg", "exp_avg_sq"):
        state = {name: optimizer.state[parameter][moment] for name, parameter in named.items()}
        write(folder, f"{moment}.f32", slices(state))
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    for label, rate in (("3e-4", 3e-4), ("1e-6", 1e-6)):
        model.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))
        torch.set_rng_state(start[2])
        done = 0
        for steps in (1, 10, 100):
            train(model, optimizer, text, [rate] * (steps - done))
            done = steps
            after = slices(dict(model.named_parameters()))
            for suffix, values in (("f32", after), ("bf16", after.bfloat16())):
                name = f"weights-{label}-{steps}.{suffix}"
                if name in WRITTEN:
                    write(folder, name, values)


if __name__ == "__main__":
    main()
