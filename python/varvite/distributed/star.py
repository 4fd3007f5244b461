"""Bytes from every rank to the coordinator and back, over gloo.

Star-shaped: each rank talks to the coordinator alone. So a rank that dies is found by the one process that
can tell all others, whatever the number of ranks, and the sockets of the others stay open for that.
"""

from __future__ import annotations

import contextlib
import struct
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from varvite.distributed.group import RankGroup

__all__ = ["MESSAGE_LIMIT_BYTES", "Star"]

MESSAGE_LIMIT_BYTES = 64 << 20
"""Length of one message."""

_FRAME_BYTES = 4096
"""Every message begins with a frame of this size, so that who receives needs to know nothing before."""
_LENGTH = struct.Struct("<Q")
_ROOM_BYTES = _FRAME_BYTES - _LENGTH.size
_UP, _UP_REST, _DOWN, _DOWN_REST = 11, 12, 13, 14
"""Tags of gloo."""


class Star:
    """The connections between the coordinator, rank 0 of the group, and all others.

    After a RuntimeError of gloo, or an interrupt, only `close` is left to call.
    """

    def __init__(self, group: RankGroup) -> None:
        """Takes the group, of two ranks or more, over."""
        self._group = group
        self._frames = [_Buffer(_FRAME_BYTES) for _ in range(group.size if group.rank == 0 else 1)]
        # Gloo reads from this memory until a message is sent, and does not keep it by itself.
        self._rests: dict[int, _Buffer] = {}

    def gather(self, own: bytes) -> tuple[list[bytes], list[int]]:
        """At the coordinator: returns what each rank has sent, and the ranks that are lost.

        Args:
            own: The coordinator's own message.

        Raises:
            RuntimeError: A rank did not come in time.
        """
        until = time.monotonic() + self._group.timeout_seconds
        messages = [own] * self._group.size
        lost: list[int] = []
        others = range(1, self._group.size)
        coming = {rank: self._receive(self._frames[rank], rank, _UP) for rank in others}
        for rank, work in coming.items():
            with _noting(rank, lost, until):
                work.wait(_left(until))
                messages[rank] = self._message(self._frames[rank], rank, _UP_REST, until)
        return messages, lost

    def scatter(self, messages: Sequence[bytes], *, seconds: float | None = None) -> list[int]:
        """At the coordinator: answers each other rank; returns the ranks that are lost.

        Args:
            messages: Answers by rank; the coordinator's own is left alone.
            seconds: How long to wait until the others take them; `None` for the timeout of the group.

        Raises:
            RuntimeError: A rank did not take its answer in time.
        """
        until = time.monotonic() + (self._group.timeout_seconds if seconds is None else seconds)
        lost: list[int] = []
        sent: dict[int, list[Any]] = {}
        for rank in range(1, self._group.size):
            with _noting(rank, lost, until):
                sent[rank] = self._send(self._frames[rank], messages[rank], rank, (_DOWN, _DOWN_REST))
        for rank, works in sent.items():
            with _noting(rank, lost, until):
                for work in works:
                    work.wait(_left(until))
        self._rests.clear()
        return lost

    def ask(self, message: bytes) -> bytes:
        """At every other rank: sends a message, and returns the answer."""
        # The coordinator may wait for another rank as long, and have come as much later than this one.
        until = time.monotonic() + 2 * self._group.timeout_seconds
        frame = self._frames[0]
        for work in self._send(frame, message, 0, (_UP, _UP_REST)):
            work.wait(_left(until))
        self._rests.clear()
        self._receive(frame, 0, _DOWN).wait(_left(until))
        return self._message(frame, 0, _DOWN_REST, until)

    def close(self, error: BaseException | None = None) -> None:
        """Closes the sockets, so that who waits for this rank hears of it.

        Args:
            error: What ended a call here, if that is why.
        """
        if error is not None:
            # Works under way hold sockets open, and the traceback holds works.
            traceback.clear_frames(error.__traceback__)
        self._group.close()

    def _send(self, frame: _Buffer, message: bytes, rank: int, tags: tuple[int, int]) -> list[Any]:
        _LENGTH.pack_into(frame.memory, 0, len(message))
        inside = message[:_ROOM_BYTES]
        frame.memory[_LENGTH.size : _LENGTH.size + len(inside)] = inside
        works = [self._group.gloo.send([frame.tensor], rank, tags[0])]
        if len(message) > _ROOM_BYTES:
            # One answer to many ranks is one object, and copied once.
            if id(message) not in self._rests:
                self._rests[id(message)] = _Buffer(memoryview(message)[_ROOM_BYTES:])
            rest = self._rests[id(message)]
            works.append(self._group.gloo.send([rest.tensor], rank, tags[1]))
        return works

    def _receive(self, buffer: _Buffer, rank: int, tag: int) -> Any:
        return self._group.gloo.recv([buffer.tensor], rank, tag)

    def _message(self, frame: _Buffer, rank: int, tag: int, until: float) -> bytes:
        """Returns the message that begins with a frame that was received."""
        (length_bytes,) = _LENGTH.unpack_from(frame.memory)
        if length_bytes <= _ROOM_BYTES:
            return bytes(frame.memory[_LENGTH.size : _LENGTH.size + length_bytes])
        rest = _Buffer(length_bytes - _ROOM_BYTES)
        self._receive(rest, rank, tag).wait(_left(until))
        return b"".join((memoryview(frame.memory)[_LENGTH.size :], rest.memory))


class _Buffer:
    """Memory that both gloo and Python write to."""

    def __init__(self, content: int | memoryview) -> None:
        """Takes a length in bytes, or a content that is copied."""
        import torch

        self.memory = bytearray(content)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)


@contextlib.contextmanager
def _noting(rank: int, lost: list[int], until: float) -> Iterator[None]:
    """Goes on without a rank that is lost. Not after a timeout: gloo has closed all sockets then."""
    try:
        yield
    except RuntimeError:
        if time.monotonic() >= until:
            raise
        lost.append(rank)


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(until - time.monotonic(), 0.001))
