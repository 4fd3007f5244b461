"""Tensors of an accelerator, on their way to memory that the engine reads.

A side stream copies them into pinned memory that is kept from save to save. Who trains goes on meanwhile;
its stream waits on the device, not the program, and only before it may write what is still copied.

Everything that depends on a device stands in `Accelerator`, on the interface that torch has for all of them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from varvite.plain import loaded
from varvite.tensors import Described, describe_other

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

__all__ = ["Accelerator", "Device", "PinnedPool", "Transfers"]

_SLAB_BYTES = 64 << 20
_ALIGNMENT_BYTES = 64


class Device(Protocol):
    """What transfers need of a device layer; streams and events are as torch has them."""

    def has(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that lies on such a device."""

    def pinned(self, length_bytes: int) -> torch.Tensor:
        """Returns bytes of host memory that the device copies to by itself."""

    def current_stream(self, device: torch.device) -> Any:
        """Returns the stream that training uses."""

    def new_stream(self, device: torch.device) -> Any:
        """Returns a stream beside it."""

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Has the work inside go to a stream."""


class Accelerator:
    """The accelerator of this process, whichever it is, through torch's device-agnostic interface."""

    def has(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that lies on it."""
        if tensor.is_cpu or tensor.is_meta:
            return False
        import torch

        accelerator = torch.accelerator.current_accelerator()
        return accelerator is not None and accelerator.type == tensor.device.type

    def pinned(self, length_bytes: int) -> torch.Tensor:
        """Returns bytes of pinned host memory."""
        import torch

        return torch.empty(length_bytes, dtype=torch.uint8, pin_memory=True)

    def current_stream(self, device: torch.device) -> Any:
        """Returns the stream that training uses."""
        import torch

        return torch.accelerator.current_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        """Returns a stream beside it."""
        import torch

        return torch.Stream(device)

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Has the work inside go to a stream."""
        import torch

        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


class PinnedPool:
    """Pinned memory that is used again by each save; never more than the last save used, and a slab.

    Small tensors share slabs; a tensor larger than a slab has a block of its own length.
    """

    def __init__(self, device: Device, slab_bytes: int = _SLAB_BYTES) -> None:
        """Starts without memory."""
        self._device = device
        self._slab_bytes = slab_bytes
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._used: dict[int, list[torch.Tensor]] = {}
        self._slab: torch.Tensor | None = None
        self._slab_used_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(
            length_bytes * len(blocks)
            for kept in (self._idle, self._used)
            for length_bytes, blocks in kept.items()
        )

    def restart(self) -> None:
        """Takes all memory back; what the last save did not use is given up."""
        self._idle, self._used = self._used, {}
        self._slab, self._slab_used_bytes = None, 0

    def take(self, length_bytes: int) -> torch.Tensor:
        """Returns a tensor of bytes that nobody else has until `restart`."""
        if length_bytes > self._slab_bytes:
            return self._block(length_bytes)
        if self._slab is None or self._slab_used_bytes + length_bytes > self._slab_bytes:
            self._slab, self._slab_used_bytes = self._block(self._slab_bytes), 0
        start = self._slab_used_bytes
        self._slab_used_bytes = -(-(start + length_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._slab[start : start + length_bytes]

    def _block(self, length_bytes: int) -> torch.Tensor:
        idle = self._idle.get(length_bytes)
        block = idle.pop() if idle else self._device.pinned(length_bytes)
        self._used.setdefault(length_bytes, []).append(block)
        return block


class _Copy(NamedTuple):
    """One copy to be made: bytes of the device to bytes of the host."""

    source: torch.Tensor
    target: torch.Tensor
    is_promised: bool


class Transfers:
    """The copies from devices of one save after the other."""

    def __init__(self, device: Device | None = None) -> None:
        """Starts nothing and asks no device anything.

        Args:
            device: The device layer; by default that of torch.
        """
        self._device: Device = device or Accelerator()
        self._pool = PinnedPool(self._device)
        self._streams: dict[torch.device, Any] = {}
        self._copies: list[_Copy] = []
        self._promised: dict[int, int] = {}
        self._events: dict[torch.device, Any] = {}

    def begin(self, promised: Iterable[torch.Tensor] = ()) -> None:
        """Starts a save; the one before has ended.

        Args:
            promised: Tensors that nobody writes until `join`.
        """
        self.arrive()
        self._pool.restart()
        on_device = filter(self._device.has, promised)
        self._promised = {tensor.data_ptr(): tensor.nbytes for tensor in on_device}

    def describe(self, name: str, value: Any) -> Described:
        """Describes as `varvite.tensors.describe_other`, with device tensors going to pinned memory.

        Their values are there after `launch` and `arrive`.
        """
        return describe_other(name, value, bring=self._bring)

    def _bring(self, dense: torch.Tensor) -> torch.Tensor | None:
        if not self._device.has(dense) or 0 in dense.shape:
            return None
        import torch

        source = dense.reshape(-1).view(torch.uint8)
        target = self._pool.take(source.nbytes)
        is_promised = self._promised.get(source.data_ptr(), 0) >= source.nbytes
        self._copies.append(_Copy(source, target, is_promised))
        return target.view(dense.dtype).reshape(dense.shape)

    def launch(self) -> None:
        """Starts the copies. The training stream waits for those that nobody promised to leave alone."""
        by_device: dict[torch.device, list[_Copy]] = {}
        for copy in self._copies:
            by_device.setdefault(copy.source.device, []).append(copy)
        for device, copies in by_device.items():
            training = self._device.current_stream(device)
            side = self._streams.get(device) or self._device.new_stream(device)
            self._streams[device] = side
            side.wait_stream(training)
            with self._device.on_stream(side):
                _start([copy for copy in copies if not copy.is_promised])
                written_from_now_on = side.record_event()
                _start([copy for copy in copies if copy.is_promised])
                self._events[device] = side.record_event()
            training.wait_event(written_from_now_on)

    def join(self) -> None:
        """Has the training streams wait for all copies, on the device."""
        for device, event in list(self._events.items()):
            self._device.current_stream(device).wait_event(event)

    def arrive(self) -> None:
        """Waits until all copies are there, and lets go of their sources. Any thread may call it."""
        for event in list(self._events.values()):
            event.synchronize()
        # Until here they are held: memory given back to the device could be written by others.
        self._copies, self._events = [], {}


def _start(copies: list[_Copy]) -> None:
    for copy in copies:
        copy.target.copy_(copy.source, non_blocking=True)


def refuse_capture(what: str) -> str | None:
    """Returns why a save can't be made now: a graph is being captured. `None` where none is.

    Args:
        what: The staging mode, for the message.
    """
    torch = loaded("torch")
    if torch is None or not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return None
    return f"a CUDA graph is being captured, and it writes to addresses that staging=`{what}` doesn't see"
