"""A small GPT that is really trained: how small a state can be coded depends on its values.

Weights and moments of random tokens say little about coding. This model learns the source text of
Python's own standard library, cut into words, so that nothing has to be downloaded; the same
version of Python gives the same tokens.
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from comparison.workloads import TrainingState

VOCABULARY = 4096
WIDTH = 256
LAYERS = 6
HEADS = 4
CONTEXT_TOKENS = 128
BATCH = (4, CONTEXT_TOKENS)
PEAK_LEARNING_RATE = 1e-3
WARM_UP_STEPS = 20
# Of the peak, at the end of the cosine.
FINAL_SHARE = 0.1
INITIAL_DEVIATION = 0.02


def corpus() -> Tensor:
    """The modules directly in the standard library's folder, one after another, as token numbers.

    A token is a word, a run of white space, or one other character; the rarest share number 0.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    common = Counter(words).most_common(VOCABULARY - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, start=1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


class Block(nn.Module):
    """Causal attention and a two-layer network, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.network_norm = nn.LayerNorm(WIDTH)
        self.network_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.network_out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """From and to (sequences, tokens, width)."""
        shape = (*hidden.shape[:2], 3, HEADS, WIDTH // HEADS)
        query, key, value = self.attention_in(self.attention_norm(hidden)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(hidden.shape))
        inner = nn.functional.gelu(self.network_in(self.network_norm(hidden)))
        return hidden + self.network_out(inner)


class LanguageModel(nn.Module):
    """A GPT with the output tied to the embedding, initialised like GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # What is added to the residual stream is smaller, as there are two of it a block.
                depth = 2 * LAYERS if name.endswith("_out.weight") else 1
                nn.init.normal_(parameter, std=INITIAL_DEVIATION / math.sqrt(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (sequences, tokens, vocabulary)."""
        hidden = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.linear(self.norm(hidden), self.embedding.weight)


@dataclass
class LanguageModelState(TrainingState):
    """A training state whose tokens are those of `corpus`."""

    corpus: Tensor = field(kw_only=True)

    def tokens(self, batch: tuple[int, int]) -> Tensor:
        """Windows of the corpus at random places."""
        sequences, length = batch
        starts = torch.randint(len(self.corpus) - length, (sequences,), generator=self.generator)
        return torch.stack([self.corpus[start : start + length + 1] for start in starts.tolist()])

    def learn(self, learning_rate: float) -> float:
        """One step at a learning rate, with all cores; the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self.forward_backward(BATCH)
        self.update()
        return loss


def build() -> LanguageModelState:
    """The untrained model with its AdamW."""
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return LanguageModelState(model, optimizer, VOCABULARY, corpus=corpus())


def train(state: LanguageModelState, steps: int) -> list[float]:
    """Warm up, then a cosine down to a tenth of the peak; the loss of every step."""
    losses = []
    for step in range(steps):
        progress = max(0, step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
        cosine = FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * progress)) / 2
        warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
        losses.append(state.learn(PEAK_LEARNING_RATE * warm_up * cosine))
    return losses
