"""What is saved: four training states with real steps between their saves.

A state hands itself out in three forms: ``nest()`` for systems that take nested dicts,
``flat()`` for those that take name to tensor, and ``objects`` for those that take the live
model and optimizer. The names in ``flat()`` are the ones Varvite gives the same tensors.
Everything is seeded, so a second process builds a state of the same names and shapes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from comparison import host

HEAD_WIDTH = 64
# Sequences and tokens of a step where only its effect on the state counts, and where its time does.
SHORT_BATCH = (1, 16)
LOOP_BATCH = (2, 96)


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """For work that is not measured: torch's threads wait for each other by spinning.

    Where another program has a core, such a wait takes longer than the work on one thread.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


class Transformer(nn.Module):
    """A decoder of the usual shape, the output tied to the embedding.

    The tie matters: through it every embedding row gets a gradient at every step, so a dense
    workload has no rows that stay as they were.
    """

    def __init__(self, width: int, layer_count: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                width // HEAD_WIDTH,
                4 * width,
                dropout=0.0,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layer_count)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, tokens, vocabulary)."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.linear(self.norm(hidden), self.embedding.weight)


@dataclass
class TrainingState:
    """A model and its AdamW, with `step` as one real optimizer step on random tokens."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    vocabulary: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @property
    def objects(self) -> dict[str, Any]:
        """The live objects, under the keywords a checkpoint manager takes."""
        return {"model": self.model, "optimizer": self.optimizer}

    @one_torch_thread()
    def step(self) -> None:
        """Forward, backward and update: every trained parameter and moment changes."""
        self.forward_backward(SHORT_BATCH)
        self.update()

    def forward_backward(self, batch: tuple[int, int]) -> float:
        """Gradients for a batch of (sequences, tokens); the loss."""
        tokens = self.tokens(batch)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return float(loss.item())

    def tokens(self, batch: tuple[int, int]) -> Tensor:
        """Random tokens of shape (sequences, tokens + 1): the input, and shifted by one the target."""
        sequences, length = batch
        return torch.randint(self.vocabulary, (sequences, length + 1), generator=self.generator)

    def update(self) -> None:
        """The optimizer's step; the gradients are let go of."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def nest(self) -> dict[str, Any]:
        """The two state dicts as torch makes them."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def flat(self) -> dict[str, Tensor]:
        """The live tensors by name."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.state.{name}.{key}"] = value
        return tensors

    def flatten(self, nest: dict[str, Any]) -> dict[str, Tensor]:
        """A nest that was loaded, under the names of `flat`."""
        tensors = {f"model.{name}": value for name, value in nest["model"].items()}
        # AdamW numbers the parameters it was given: here, the trained ones in their order.
        trained = [name for name, value in self.model.named_parameters() if value.requires_grad]
        for index, moments in nest["optimizer"]["state"].items():
            for key, value in moments.items():
                tensors[f"optimizer.state.{trained[index]}.{key}"] = value
        return tensors


@dataclass
class TensorTable:
    """Many small tensors under one key; `step` changes every one."""

    tensors: dict[str, Tensor]

    @property
    def objects(self) -> None:
        """None: there is no model here."""
        return

    @one_torch_thread()
    def step(self) -> None:
        """Add one to everything."""
        torch._foreach_add_(list(self.tensors.values()), 1.0)

    def nest(self) -> dict[str, Any]:
        """The table under its key."""
        return {"t": self.tensors}

    def flat(self) -> dict[str, Tensor]:
        """The live tensors by name."""
        return {f"t.{name}": value for name, value in self.tensors.items()}

    def flatten(self, nest: dict[str, Any]) -> dict[str, Tensor]:
        """A nest that was loaded, under the names of `flat`."""
        return {f"t.{name}": value for name, value in nest["t"].items()}


State = TrainingState | TensorTable


@dataclass(frozen=True)
class Workload:
    """A named state: `build` makes it at a scale, where 1.0 is the size of the issue."""

    name: str
    title: str
    build: Callable[[float], State]


@one_torch_thread()
def _transformer(width: int, layer_count: int, vocabulary: int, scale: float) -> Transformer:
    # Parameters grow with the square of the width, so the number of tensors stays as it is.
    scaled = max(HEAD_WIDTH, round(width * math.sqrt(scale) / HEAD_WIDTH) * HEAD_WIDTH)
    torch.manual_seed(0)
    return Transformer(scaled, layer_count, vocabulary)


def _with_adamw(model: Transformer, learning_rate: float) -> TrainingState:
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, fused=True)
    return TrainingState(model, optimizer, model.embedding.num_embeddings)


def _dense(scale: float) -> TrainingState:
    return _with_adamw(_transformer(512, 14, 1024, scale), 3e-4)


def _frozen(scale: float) -> TrainingState:
    model = _transformer(768, 16, 4096, scale)
    parameters = list(model.parameters())
    trainable_left = sum(value.numel() for value in parameters) // 20
    for value in parameters:
        value.requires_grad_(False)
    for value in reversed(parameters):
        if value.numel() > trainable_left:
            break
        trainable_left -= value.numel()
        value.requires_grad_(True)
    return _with_adamw(model, 3e-4)


def _bf16(scale: float) -> TrainingState:
    return _with_adamw(_transformer(768, 11, 8192, scale).to(torch.bfloat16), 1e-5)


def _small_tensors(scale: float) -> TensorTable:
    count = max(1, round(50_000 * scale))
    torch.manual_seed(0)
    values = torch.randn(count, 32)
    return TensorTable({f"tensor_{index:05d}": values[index].clone() for index in range(count)})


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("W1", "dense 45M-parameter fp32 transformer + AdamW", _dense),
        Workload("W2", "fp32 transformer + AdamW, 95 % of the parameters frozen", _frozen),
        Workload("W3", "bf16 full fine-tune at lr 1e-5", _bf16),
        Workload("W4", "50,000 tensors of 32 floats", _small_tensors),
    )
}


def payload_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of the values alone."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """A digest of dtype, shape and bytes for each tensor, to compare across processes."""
    result = {name: _digest(value) for name, value in tensors.items() if not _is_large(value)}
    large = {name: value for name, value in tensors.items() if _is_large(value)}
    with ThreadPoolExecutor(host.thread_count()) as pool:
        result.update(zip(large, pool.map(_digest, large.values()), strict=True))
    return result


def _is_large(value: Tensor) -> bool:
    # Below, handing it to a thread takes longer than its digest.
    return bool(value.nbytes >= 1 << 20)


def _digest(value: Tensor) -> str:
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    digest.update(flat)
    return digest.hexdigest()[:32]


@one_torch_thread()
def scramble(tensors: dict[str, Tensor]) -> None:
    """Overwrite every value: a load that does nothing must not pass for a load."""
    with torch.no_grad():
        for value in tensors.values():
            value.fill_(-1)


def assert_equal(found: dict[str, str], expected: dict[str, str]) -> None:
    """Raise with the name of the first tensor that was not loaded as it was saved."""
    for name, digest in expected.items():
        if name not in found:
            raise AssertionError(f"tensor is missing after the load: `{name}`")
        if found[name] != digest:
            raise AssertionError(f"tensor differs from the saved one after the load: `{name}`")
    if surplus := sorted(found.keys() - expected.keys()):
        raise AssertionError(f"load gave a tensor that was not saved: `{surplus[0]}`")
