"""A proxy between a client and a server that has named requests meet faults, and counts what moved.

Bodies are passed on in blocks, so that large ones cost no memory. Rules are looked at in their order, and the
first that takes a request decides; without one the request passes.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Self

from faults import Fault, Rule
from servers import HOST
from wire import HOP_HEADERS, ConnectionGoneError, Head, Request, Wire, body, unchunked

if TYPE_CHECKING:
    import tempfile
    from collections.abc import Callable, Iterable, Iterator

NO_BODY = (204, 304)
"""Statuses whose reply has no body."""
JOIN_SECONDS = 10.0


class Connection:
    """A client's connection: one request after the other, each on a connection of its own to the server."""

    def __init__(self, proxy: Proxy, client: Wire) -> None:
        self._proxy = proxy
        self._client = client
        self._server: Wire | None = None
        self._reply: Head | None = None
        self._is_open = True
        self.closing = proxy.closing
        self.listings = proxy.listings

    def serve(self) -> None:
        """Serves requests until either side closes."""
        while self._is_open:
            try:
                self._head = Head.read(self._client)
            except (ConnectionGoneError, OSError):
                return
            method, target, _ = self._head.first.split(" ")
            self.request, fault = self._proxy.enter(
                self, Request(number=0, method=method, target=target, headers=self._head)
            )
            try:
                if fault is None:
                    self.forward()
                    self.relay()
                else:
                    fault.play(self)
            finally:
                self._drop_server()

    # What faults are made of

    def forward(self, *, share: float = 1.0, bytes_per_second: float | None = None) -> None:
        """Sends the request on, or a share of its body."""
        self._send_request(self._request_body(), share=share, bytes_per_second=bytes_per_second)

    def keep(self, spool: tempfile.SpooledTemporaryFile[bytes]) -> None:
        """Reads the body of the request into a file."""
        for block in self._request_body():
            spool.write(block)

    def forward_kept(self, spool: tempfile.SpooledTemporaryFile[bytes]) -> None:
        """Sends the request on with the body in a file."""
        self._drop_server()
        spool.seek(0)
        self._send_request(iter(lambda: spool.read(1 << 18), b""))

    def drop_body(self) -> None:
        """Reads the body of the request and throws it away."""
        for _ in self._request_body():
            pass

    def hear(self) -> None:
        """Waits until the server has answered: whatever it does is done then."""
        assert self._server is not None
        head = Head.read(self._server)
        while head.status == 100:
            head = Head.read(self._server)
        self._reply = head

    def drop_reply(self) -> None:
        """Reads the server's reply to its end and throws it away."""
        head = self._take_reply()
        for _ in self._reply_body(head):
            pass

    def relay(
        self,
        *,
        share: float = 1.0,
        bytes_per_second: float | None = None,
        edit: Callable[[Head, bytes], tuple[Head, bytes]] | None = None,
    ) -> None:
        """Sends the server's reply to the client, or a share of it, or changed."""
        head = self._take_reply()
        blocks = self._reply_body(head)
        head = head.without(*HOP_HEADERS)
        if edit is not None or self.request.operation == "list":
            head, blocks = self._whole(head, blocks, edit)
        has_body = self.request.method != "HEAD" and head.status not in NO_BODY and head.length_bytes != 0
        encoded = head.encode()
        if share < 1.0 and not has_body:
            # Not half of the head: some clients take a head that ends early for a whole one.
            self._client.send(encoded[: int(len(head.first) * share)])
            return
        # Noted before they are sent: a client that has its answer finds it in the log.
        self.request.status = head.status
        self._client.send(encoded)
        # Half of a body of unknown length: its first byte.
        limit = None if share == 1.0 else int((head.length_bytes or 2) * share)
        for block in self._paced(blocks, limit, bytes_per_second):
            self.request.down_bytes += len(block)
            self._client.send(block)
        if has_body and head.length_bytes is None and not head.is_chunked:
            self.close(reset=False)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Answers in place of the server."""
        has_body = self.request.method != "HEAD"
        pairs = [*headers.items(), ("Content-Length", str(len(body)))]
        self.request.status = status
        self.request.down_bytes += len(body) if has_body else 0
        self._client.send(Head(f"HTTP/1.1 {status} Fault", pairs).encode() + (body if has_body else b""))

    def close(self, *, reset: bool) -> None:
        """Ends the client's connection."""
        self._is_open = False
        if reset:
            self._client.reset()
        else:
            self._client.cut()

    def wait_until_client_goes(self) -> None:
        """Says nothing until the client gives up."""
        self._is_open = False
        self._client.wait_until_gone()

    # Inside

    def _request_body(self) -> Iterator[bytes]:
        if (self._head.get("expect") or "").lower() == "100-continue":
            self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return body(self._client, self._head, until_closed=False)

    def _send_request(
        self, blocks: Iterator[bytes], *, share: float = 1.0, bytes_per_second: float | None = None
    ) -> None:
        self._server = self._proxy.connect()
        head = self._head.without(*HOP_HEADERS).with_header("Connection", "close")
        self._server.send(head.encode())
        limit = None if share == 1.0 else int((head.length_bytes or 0) * share)
        for block in self._paced(blocks, limit, bytes_per_second):
            self.request.up_bytes += len(block)
            self._server.send(block)

    def _take_reply(self) -> Head:
        if self._reply is None:
            self.hear()
        assert self._reply is not None
        head, self._reply = self._reply, None
        return head

    def _reply_body(self, head: Head) -> Iterator[bytes]:
        assert self._server is not None
        if self.request.method == "HEAD" or head.status in NO_BODY:
            return iter(())
        return body(self._server, head, until_closed=True)

    def _whole(
        self, head: Head, blocks: Iterator[bytes], edit: Callable[[Head, bytes], tuple[Head, bytes]] | None
    ) -> tuple[Head, Iterator[bytes]]:
        """Reads a short reply to its end, remembers it if it is a listing, and has it changed."""
        whole = b"".join(blocks)
        if head.is_chunked:
            whole = unchunked(whole)
            head = head.without("transfer-encoding").with_header("Content-Length", str(len(whole)))
        if self.request.operation == "list" and head.status == 200:
            self.listings.setdefault(self.request.target, whole)
        if edit is not None:
            head, whole = edit(head, whole)
            if self.request.method != "HEAD" and head.length_bytes is not None:
                head = head.with_header("Content-Length", str(len(whole)))
        return head, iter([whole] if whole else [])

    def _paced(
        self, blocks: Iterable[bytes], limit: int | None, bytes_per_second: float | None
    ) -> Iterator[bytes]:
        """Yields blocks up to a limit, at most so many bytes a second."""
        started, moved = time.monotonic(), 0
        for block in blocks:
            # Slow means slow from the first byte on: pieces of a tenth of a second.
            piece_bytes = len(block) if bytes_per_second is None else max(1, int(bytes_per_second / 10))
            for offset in range(0, len(block), piece_bytes):
                piece = block[offset : offset + piece_bytes]
                if limit is not None:
                    piece = piece[: limit - moved]
                moved += len(piece)
                if bytes_per_second is not None:
                    self.closing.wait(max(0.0, started + moved / bytes_per_second - time.monotonic()))
                if self.closing.is_set():
                    raise ConnectionGoneError
                if piece:
                    yield piece
                if moved == limit:
                    return

    def _drop_server(self) -> None:
        if self._server is not None:
            self._proxy.leave(self._server)
            self._server = None


class Proxy:
    """Listens on loopback before a server.

    Attributes:
        rules: Which requests meet which fault; looked at in order.
        requests: All requests so far.
        listings: The first reply to each listing, by its target.
        closing: Set when it ends.
    """

    def __init__(self, server_port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.server_port = server_port
        self.rules: list[Rule] = []
        self.requests: list[Request] = []
        self.listings: dict[str, bytes] = {}
        self.closing = threading.Event()
        self._tls = tls
        self._lock = threading.Lock()
        self._wires: set[Wire] = set()
        self._threads: list[threading.Thread] = []
        self._is_down = False
        self._listener = socket.create_server((HOST, 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._start(self._accept, self._listener)

    @property
    def endpoint(self) -> str:
        """What a client is given in place of the server's address."""
        return f"{'https' if self._tls else 'http'}://{HOST}:{self.port}"

    def add(self, fault: Fault, **conditions: object) -> Rule:
        """Adds a rule, and returns it: see `Rule`."""
        rule = Rule(fault, **conditions)  # type: ignore[arg-type]
        with self._lock:
            self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forgets the rules and the requests so far."""
        with self._lock:
            self.rules.clear()
            self.requests.clear()

    def matching(self, *operations: str, key: str = "*") -> list[Request]:
        """Returns the requests of some operations, or all, whose key matches a glob."""
        probe = Rule(Fault(), key=key)
        with self._lock:
            found = list(self.requests)
        return [
            one for one in found if (not operations or one.operation in operations) and probe.matches(one)
        ]

    def writes(self) -> list[Request]:
        """Returns the requests that change something."""
        return [one for one in self.matching() if one.is_write]

    def moved_bytes(self) -> tuple[int, int]:
        """Returns how many bytes of bodies went up, and down."""
        found = self.matching()
        return sum(one.up_bytes for one in found), sum(one.down_bytes for one in found)

    def go_down(self) -> None:
        """Refuses connections and breaks those there are, as a machine that is gone."""
        with self._lock:
            self._is_down = True
            listener, wires = self._listener, list(self._wires)
        # A listener that is only closed would still take the connection that its thread waits for.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for wire in wires:
            wire.cut()

    def come_back(self) -> None:
        """Listens again, on the same port."""
        with self._lock:
            self._is_down = False
            self._listener = socket.create_server((HOST, self.port), backlog=128)
            self._start(self._accept, self._listener)

    def close(self) -> None:
        """Ends the proxy and every connection."""
        self.closing.set()
        self.go_down()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
            assert not thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # For connections

    def enter(self, connection: Connection, request: Request) -> tuple[Request, Fault | None]:
        """Notes a request, and returns it with the fault that it meets."""
        with self._lock:
            request.number = len(self.requests) + 1
            self.requests.append(request)
            connection.request = request
            fault = next((rule.fault for rule in self.rules if rule.takes(connection)), None)
            request.fault = None if fault is None else fault.name
        return request, fault

    def connect(self) -> Wire:
        """Connects to the server."""
        return self._join(Wire(socket.create_connection((HOST, self.server_port))))

    def leave(self, wire: Wire) -> None:
        """Closes a connection of either side."""
        with self._lock:
            self._wires.discard(wire)
        wire.close()

    # Inside

    def _join(self, wire: Wire) -> Wire:
        """Notes a connection, so that it ends with the proxy."""
        with self._lock:
            if not self._is_down:
                self._wires.add(wire)
                return wire
        wire.close()
        raise ConnectionGoneError

    def _start(self, call: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=call, args=arguments, daemon=True, name="proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._start(self._serve, accepted)

    def _serve(self, accepted: socket.socket) -> None:
        try:
            client = self._join(
                Wire(accepted if self._tls is None else self._tls.wrap_socket(accepted, server_side=True))
            )
        except (ConnectionGoneError, OSError):
            accepted.close()
            return
        try:
            Connection(self, client).serve()
        except (ConnectionGoneError, OSError):
            # Either side went away in the middle: the other one is told by the end of its connection.
            pass
        finally:
            self.leave(client)
