"""What stands on loopback between a client and a server: a relay that counts, a server that never answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 18
# Ends the first line of every request. A body that holds it would count as well: reads have none.
_REQUEST = b" HTTP/1.1\r\n"


@dataclass
class Counts:
    """What went through a relay; whole headers and bodies, both ways."""

    connections: int = 0
    requests: int = 0
    up_bytes: int = 0
    down_bytes: int = 0


class Relay:
    """A relay to a server on loopback.

    Attributes:
        endpoint: Its own url.
    """

    def __init__(self, endpoint: str, listener: socket.socket) -> None:
        target = urlsplit(endpoint)
        self._target = (target.hostname or HOST, target.port or 80)
        self._lock = threading.Lock()
        self._counts = Counts()
        self.endpoint = f"http://{HOST}:{listener.getsockname()[1]}"

    def counts(self) -> Counts:
        """What went through so far."""
        with self._lock:
            return Counts(**vars(self._counts))

    def serve(self, client: socket.socket) -> None:
        """Carries the bytes of one connection until both sides have ended it."""
        tail = b""

        def up(piece: bytes) -> None:
            nonlocal tail
            seen = tail + piece
            tail = seen[-(len(_REQUEST) - 1) :]
            self._count(up_bytes=len(piece), requests=seen.count(_REQUEST))

        def down(piece: bytes) -> None:
            self._count(down_bytes=len(piece))

        with client, socket.create_connection(self._target) as server:
            self._count(connections=1)
            back = threading.Thread(target=_carry, args=(server, client, down), daemon=True)
            back.start()
            _carry(client, server, up)
            back.join()

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                setattr(self._counts, name, getattr(self._counts, name) + number)


def _carry(source: socket.socket, sink: socket.socket, count: Callable[[bytes], None]) -> None:
    # A side that goes away ends the connection of both, as it would without a relay.
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            count(piece)
            sink.sendall(piece)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def relayed(endpoint: str) -> Iterator[Relay]:
    """Runs a relay to the end of the block."""
    with socket.create_server((HOST, 0), backlog=64) as listener:
        relay = Relay(endpoint, listener)
        with _accepting(listener, relay.serve):
            yield relay


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Runs a server that takes every connection and every byte, and never answers; yields its url."""
    with socket.create_server((HOST, 0), backlog=64) as listener:

        def swallow(client: socket.socket) -> None:
            with client, contextlib.suppress(OSError):
                while client.recv(_PIECE_BYTES):
                    pass

        with _accepting(listener, swallow):
            yield f"http://{HOST}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _accepting(listener: socket.socket, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield
    finally:
        # Closing alone doesn't wake the thread that waits in `accept`.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
