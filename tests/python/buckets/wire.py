"""HTTP/1.1 as the fault proxy needs it: heads that are read and written, bodies that pass in blocks."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE_LIMIT_BYTES = 65_536
BLOCK_BYTES = 262_144
HOP_HEADERS = ("connection", "keep-alive", "expect")
"""Headers that are for one connection and not for the whole way."""


class ConnectionGoneError(Exception):
    """The other side has closed its connection in the middle of something."""


class Wire:
    """One connection, read through a buffer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reader = connection.makefile("rb", buffering=BLOCK_BYTES)

    def line(self) -> bytes:
        """Reads a line with its end."""
        line = self.reader.readline(LINE_LIMIT_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionGoneError
        return line

    def block(self, limit_bytes: int) -> bytes:
        """Reads what is there, at most so much and at least a byte."""
        block = self.reader.read1(min(limit_bytes, BLOCK_BYTES))
        if not block:
            raise ConnectionGoneError
        return block

    def send(self, data: bytes) -> None:
        """Sends all of it."""
        self.connection.sendall(data)

    def wait_until_gone(self) -> None:
        """Returns when the other side closes, or this one is cut."""
        while self.reader.read1(BLOCK_BYTES):
            pass

    def cut(self) -> None:
        """Ends both ways at once; whoever reads from it in another thread goes on."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def reset(self) -> None:
        """Closes with a reset: the other side gets `connection reset by peer`."""
        # Linger of zero seconds: what was not sent is thrown away, and the close is a reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self.reader.close()
        self.connection.close()


@dataclass
class Head:
    """First line and headers of a request or a reply."""

    first: str
    headers: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, wire: Wire) -> Head:
        """Reads a head, up to its empty line."""
        first = wire.line().decode("latin-1").rstrip("\r\n")
        head = cls(first)
        while (line := wire.line().decode("latin-1").rstrip("\r\n")) != "":
            name, _, value = line.partition(":")
            head.headers.append((name.strip(), value.strip()))
        return head

    def get(self, name: str) -> str | None:
        """Returns the value of a header."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def without(self, *names: str) -> Head:
        """Returns the head without some headers."""
        return Head(self.first, [pair for pair in self.headers if pair[0].lower() not in names])

    def with_header(self, name: str, value: str) -> Head:
        """Returns the head with a header in place of those of the name."""
        return Head(self.first, [*self.without(name.lower()).headers, (name, value)])

    def encode(self) -> bytes:
        """Returns the bytes, with the empty line."""
        lines = [self.first, *(f"{name}: {value}" for name, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    @property
    def status(self) -> int:
        """Status of a reply."""
        return int(self.first.split(" ")[1])

    @property
    def length_bytes(self) -> int | None:
        """Length of the body where the head tells it."""
        value = self.get("content-length")
        return None if value is None else int(value)

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks that tell their lengths."""
        return (self.get("transfer-encoding") or "").lower() == "chunked"


def body(wire: Wire, head: Head, *, until_closed: bool) -> Iterator[bytes]:
    """Yields the body after a head in blocks, as it is on the wire.

    Args:
        wire: Where it comes from.
        head: The head before it.
        until_closed: Whether a body of no stated length ends with the connection; else there is none.
    """
    if head.is_chunked:
        yield from _chunks(wire)
    elif head.length_bytes is not None:
        left = head.length_bytes
        while left:
            block = wire.block(left)
            left -= len(block)
            yield block
    elif until_closed:
        while block := wire.reader.read1(BLOCK_BYTES):
            yield block


def _chunks(wire: Wire) -> Iterator[bytes]:
    while True:
        line = wire.line()
        yield line
        left = int(line.split(b";")[0], 16)
        if left == 0:
            break
        left += 2
        while left:
            block = wire.block(left)
            left -= len(block)
            yield block
    while True:
        line = wire.line()
        yield line
        if line == b"\r\n":
            return


def unchunked(raw: bytes) -> bytes:
    """Returns the content of a body in chunks.

    Example:
        >>> unchunked(b"3\\r\\nabc\\r\\n2\\r\\nde\\r\\n0\\r\\n\\r\\n")
        b'abcde'
    """
    content, offset = b"", 0
    while True:
        line_end = raw.index(b"\r\n", offset)
        length = int(raw[offset:line_end].split(b";")[0], 16)
        if length == 0:
            return content
        content += raw[line_end + 2 : line_end + 2 + length]
        offset = line_end + 2 + length + 2


@dataclass
class Request:
    """One request as it came through, and what became of it.

    Attributes:
        number: Place among all requests of the proxy, from 1 on.
        method: `GET`, `PUT`, ...
        target: Path and query as they were sent.
        headers: Of the request.
        fault: Name of the fault that it met, if any.
        status: Status of the answer that the client was sent, `None` where it got none.
        up_bytes: Bytes of its body that went to the server.
        down_bytes: Bytes of the answer's body that went to the client.
    """

    number: int
    method: str
    target: str
    headers: Head
    fault: str | None = None
    status: int | None = None
    up_bytes: int = 0
    down_bytes: int = 0

    @property
    def query(self) -> dict[str, str]:
        """Parameters of the query, decoded."""
        pairs = parse_qs(urlsplit(self.target).query, keep_blank_values=True)
        return {name: values[0] for name, values in pairs.items()}

    @property
    def key(self) -> str:
        """Key of the object, decoded and without the bucket; the prefix asked for in a listing."""
        _, _, key = unquote(urlsplit(self.target).path).lstrip("/").partition("/")
        return key or self.query.get("prefix", "")

    @property
    def operation(self) -> str:
        """What it does, as one word: see `operation_of`."""
        path = self.target.lstrip("/").partition("?")[0].rstrip("/")
        return operation_of(self.method, is_object="/" in path, query=self.query)

    @property
    def is_write(self) -> bool:
        """Whether it changes something."""
        return self.operation not in READS

    def __str__(self) -> str:
        fault = f" [{self.fault}]" if self.fault else ""
        return f"{self.number} {self.operation} {self.key} {self.status}{fault}"


READS = ("get", "head", "list", "list_uploads", "list_parts")


def operation_of(method: str, *, is_object: bool, query: dict[str, str]) -> str:
    """Returns what a request of S3 does.

    Example:
        >>> operation_of("PUT", is_object=True, query={"partNumber": "1", "uploadId": "x"})
        'put_part'
        >>> operation_of("GET", is_object=False, query={"list-type": "2"})
        'list'
    """
    if method == "GET" and "uploadId" in query:
        return "list_parts"
    if method == "GET" and not is_object:
        return "list_uploads" if "uploads" in query else "list"
    if method == "PUT":
        return "put_part" if "partNumber" in query else "put" if is_object else "create_bucket"
    if method == "POST":
        return next(
            (
                name
                for word, name in (
                    ("uploads", "begin_upload"),
                    ("uploadId", "complete_upload"),
                    ("delete", "delete_many"),
                )
                if word in query
            ),
            "post",
        )
    if method == "DELETE" and "uploadId" in query:
        return "abort_upload"
    return method.lower()
