"""What the ranks save: a GPT under FSDP2 with AdamW, and sums that tell whether a load gave it back.

The model is made without memory, sharded, and only then filled, so that no rank ever holds all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

NOISE_ELEMENTS = 1_048_583
"""A prime: no two chunks get the same gradients, and so the same moments."""


@dataclass(frozen=True)
class Size:
    """How large a model is."""

    width: int
    layers: int
    vocabulary: int

    @classmethod
    def scaled(cls, scale: float) -> Size:
        """About so many times 203M parameters."""
        root = scale**0.5
        return cls(
            max(1, round(16 * root)) * 64, max(2, round(12 * min(root, 1))), max(101, int(50_257 * root))
        )


class Block(nn.Module):
    """A block of a GPT; only its parameters matter here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Model(nn.Module):
    """A GPT with tied embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.width, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)


class RankState:
    """One rank's shards of a model and its optimizer, one step old."""

    def __init__(self, size: Size, rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        with torch.device("meta"):
            self.model = Model(size)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cpu")
        self._generator = torch.Generator().manual_seed(rank)
        for parameter in self.model.parameters():
            _local(parameter).normal_(std=0.02, generator=self._generator)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._noise = torch.randn(NOISE_ELEMENTS, generator=self._generator)
        self._noise_begin = 0
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        """Changes every tensor, as a step of training does; gradients are noise and take no backward pass."""
        for parameter in self.model.parameters():
            gradient = torch.empty_like(parameter)
            self._fill(_local(gradient).view(-1))
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _fill(self, values: Tensor) -> None:
        """Fills with noise, going on where the last call ended."""
        end = 0
        while end < len(values):
            begin = end
            end = min(begin + NOISE_ELEMENTS - self._noise_begin, len(values))
            values[begin:end] = self._noise[self._noise_begin : self._noise_begin + end - begin]
            self._noise_begin = (self._noise_begin + end - begin) % NOISE_ELEMENTS

    def tensors(self) -> dict[str, Tensor]:
        """All sharded tensors by name."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                if value.dim():
                    found[f"{name}.{key}"] = value
        return found

    def local_bytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(_local(value).nbytes for value in self.tensors().values())

    @torch.no_grad()
    def scramble(self) -> None:
        """Forgets all values."""
        for value in self.tensors().values():
            _local(value).fill_(7.0)

    @torch.no_grad()
    def sums(self) -> list[int]:
        """Sums over the bits of this rank's rows, plain and weighted by row.

        Added over the ranks they are the same in any sharding of the same values.
        """
        rows = []
        for value in self.tensors().values():
            local = _local(value)
            if not local.numel():
                rows.append((0, 0))
                continue
            by_row = (
                local.view(torch.int32).flatten(1) if local.dim() > 1 else local.view(torch.int32)[:, None]
            )
            sums = by_row.sum(1, dtype=torch.int64)
            mesh = value.device_mesh
            start, _ = rows_of(value.shape[0], mesh.get_local_rank(), mesh.size())
            places = torch.arange(start + 1, start + 1 + len(sums))
            rows.append((int(sums.sum()), int((sums * places).sum())))
        return [number for row in rows for number in row]


def rows_of(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rows that FSDP2 gives to a rank, half-open: pieces as those of `torch.chunk`."""
    piece = -(-length // world_size)
    return min(piece * rank, length), min(piece * (rank + 1), length)


def chunk_bytes_needed(value: Any, saved_by: int, chunk_bytes: int = 1 << 20) -> int:
    """Bytes of the chunks that this rank's shard lies in, where so many ranks have saved.

    Each shard was cut into chunks from its first byte on; the last one may be shorter.
    """
    row_bytes = value.numel() // value.shape[0] * value.element_size()
    begin, end = rows_of(value.shape[0], value.device_mesh.get_local_rank(), value.device_mesh.size())
    needed = 0
    for rank in range(saved_by):
        shard_begin, shard_end = rows_of(value.shape[0], rank, saved_by)
        first, last = max(begin, shard_begin), min(end, shard_end)
        if first < last:
            first_chunk = (first - shard_begin) * row_bytes // chunk_bytes
            end_chunk = -(-(last - shard_begin) * row_bytes // chunk_bytes)
            end_bytes = min(end_chunk * chunk_bytes, (shard_end - shard_begin) * row_bytes)
            needed += end_bytes - first_chunk * chunk_bytes
    return needed


def _local(value: Any) -> Tensor:
    local: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()
