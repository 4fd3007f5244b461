"""What the proxy can do to a request, and rules that say to which one."""

from __future__ import annotations

import datetime as dt
import email.utils
import fnmatch
import re
import tempfile
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from wire import Head, Request

SPOOL_LIMIT_BYTES = 1 << 20
"""A body that is sent twice is kept in memory up to here, in a file beyond."""


class Exchange(Protocol):
    """One request and its reply, as a fault plays them; the proxy has the only implementation."""

    request: Request
    closing: threading.Event
    listings: dict[str, bytes]

    def forward(self, *, share: float = 1.0, bytes_per_second: float | None = None) -> None:
        """Sends the request on, or a share of its body."""

    def keep(self, spool: tempfile.SpooledTemporaryFile[bytes]) -> None:
        """Reads the body of the request into a file."""

    def forward_kept(self, spool: tempfile.SpooledTemporaryFile[bytes]) -> None:
        """Sends the request on with the body in a file."""

    def drop_body(self) -> None:
        """Reads the body of the request and throws it away."""

    def hear(self) -> None:
        """Waits until the server has answered."""

    def drop_reply(self) -> None:
        """Reads the server's reply to its end and throws it away."""

    def relay(
        self,
        *,
        share: float = 1.0,
        bytes_per_second: float | None = None,
        edit: Callable[[Head, bytes], tuple[Head, bytes]] | None = None,
    ) -> None:
        """Sends the server's reply to the client, or a share of it, or changed."""

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Answers in place of the server."""

    def close(self, *, reset: bool) -> None:
        """Ends the client's connection."""

    def wait_until_client_goes(self) -> None:
        """Says nothing until the client gives up."""


class Fault:
    """Something that happens to a request."""

    @property
    def name(self) -> str:
        """Name for the log."""
        return type(self).__name__

    def can_play(self, exchange: Exchange) -> bool:
        """Whether it has any effect on this request; else the request passes, and the rule has not fired."""
        return True

    def play(self, exchange: Exchange) -> None:
        """Has it happen."""
        raise NotImplementedError


@dataclass(frozen=True)
class Answer(Fault):
    """An error that the server never heard of: a status, and the code of S3."""

    status: int
    code: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.status} {self.code}"

    def play(self, exchange: Exchange) -> None:
        exchange.drop_body()
        error = f"<Error><Code>{self.code}</Code><Message>a fault of the test</Message></Error>"
        text = f'<?xml version="1.0" encoding="UTF-8"?>{error}'
        exchange.answer(self.status, text.encode(), {"Content-Type": "application/xml", **self.headers})


SLOW_DOWN = Answer(503, "SlowDown")
TOO_MANY = Answer(429, "TooManyRequests", {"Retry-After": "0"})
INTERNAL = Answer(500, "InternalError")
ERROR_IN_SUCCESS = Answer(200, "InternalError")
"""An error in the body of an answer of status 200, as S3 gives to the end of an upload in parts."""
EXPIRED = Answer(400, "ExpiredToken")
DENIED = Answer(403, "AccessDenied")
CONFLICTING = Answer(409, "ConditionalRequestConflict")
SKEWED = Answer(403, "RequestTimeTooSkewed")


class ResetBefore(Fault):
    """The connection breaks before the body of the request is read."""

    def play(self, exchange: Exchange) -> None:
        exchange.close(reset=True)


class ResetInRequest(Fault):
    """The connection breaks in the middle of the body of the request, for the server too."""

    def play(self, exchange: Exchange) -> None:
        exchange.forward(share=0.5)
        exchange.close(reset=True)


class LostReply(Fault):
    """The server does it, and the client never hears."""

    def play(self, exchange: Exchange) -> None:
        exchange.forward()
        exchange.drop_reply()
        exchange.close(reset=True)


class HalfReply(Fault):
    """The connection breaks in the middle of the reply."""

    def play(self, exchange: Exchange) -> None:
        exchange.forward()
        exchange.relay(share=0.5)
        exchange.close(reset=True)


class ShortReply(Fault):
    """The reply ends in its middle, in an orderly way."""

    def play(self, exchange: Exchange) -> None:
        exchange.forward()
        exchange.relay(share=0.5)
        exchange.close(reset=False)


@dataclass(frozen=True)
class Slow(Fault):
    """Bodies move at so many bytes a second, both ways."""

    bytes_per_second: float

    def play(self, exchange: Exchange) -> None:
        exchange.forward(bytes_per_second=self.bytes_per_second)
        exchange.relay(bytes_per_second=self.bytes_per_second)


class Silent(Fault):
    """The request is read and never answered; the server does not hear of it."""

    def play(self, exchange: Exchange) -> None:
        exchange.drop_body()
        exchange.wait_until_client_goes()


class Twice(Fault):
    """The server gets it twice; the client sees what it said the second time."""

    def play(self, exchange: Exchange) -> None:
        with tempfile.SpooledTemporaryFile(SPOOL_LIMIT_BYTES) as spool:
            exchange.keep(spool)
            exchange.forward_kept(spool)
            exchange.drop_reply()
            exchange.forward_kept(spool)
            exchange.relay()


class StaleList(Fault):
    """A listing is answered with what the proxy saw when it was asked for the first time."""

    def can_play(self, exchange: Exchange) -> bool:
        return exchange.request.target in exchange.listings

    def play(self, exchange: Exchange) -> None:
        exchange.drop_body()
        older = exchange.listings[exchange.request.target]
        exchange.answer(200, older, {"Content-Type": "application/xml"})


@dataclass(frozen=True)
class Skew(Fault):
    """The server's clock is off by so many seconds, in headers and in listings."""

    seconds: float

    def _later(self, time: dt.datetime) -> dt.datetime:
        return time + dt.timedelta(seconds=self.seconds)

    def _in_listing(self, match: re.Match[bytes]) -> bytes:
        time = dt.datetime.fromisoformat(match[2].decode())
        text = self._later(time).astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        return match[1] + text.encode() + match[3]

    def _edit(self, head: Head, body: bytes) -> tuple[Head, bytes]:
        for name in ("Date", "Last-Modified"):
            if (value := head.get(name.lower())) is not None:
                time = self._later(email.utils.parsedate_to_datetime(value))
                head = head.with_header(name, email.utils.format_datetime(time, usegmt=True))
        if (head.get("content-type") or "").startswith("application/xml"):
            body = re.sub(rb"(<LastModified>)([^<]*)(</LastModified>)", self._in_listing, body)
        return head, body

    def play(self, exchange: Exchange) -> None:
        exchange.forward()
        exchange.relay(edit=self._edit)


class Hold(Fault):
    """The request stands still until it is let go: a moment in which a test can do something else.

    Attributes:
        reached: Set when the request is there.
        after: Whether the server has done it already, and only the reply stands still.
    """

    def __init__(self, *, after: bool = False) -> None:
        self.after = after
        self.reached = threading.Event()
        self._let_go = threading.Event()

    def let_go(self) -> None:
        """Has it pass."""
        self._let_go.set()

    def _wait(self, exchange: Exchange) -> None:
        self.reached.set()
        while not self._let_go.wait(0.02):
            if exchange.closing.is_set():
                return

    def play(self, exchange: Exchange) -> None:
        if self.after:
            exchange.forward()
            exchange.hear()
            self._wait(exchange)
        else:
            self._wait(exchange)
            exchange.forward()
        exchange.relay()


def only(*numbers: int) -> Callable[[int], bool]:
    """Of the requests that match, those of these numbers, from 1 on."""
    return lambda number: number in numbers


def from_on(first: int) -> Callable[[int], bool]:
    """Of the requests that match, all from this number on."""
    return lambda number: number >= first


def always(_number: int) -> bool:
    """All requests that match."""
    return True


@dataclass
class Rule:
    """Which requests meet a fault.

    Attributes:
        fault: What happens.
        operation: Glob over the operation (`put`, `put_part`, `list`, ...; see `wire.operation_of`).
        key: Glob over the key.
        when: Which of the requests that match, by their number.
        where: A further condition on the request.
        matched: How many requests matched.
        fired: To how many the fault happened.
    """

    fault: Fault
    operation: str = "*"
    key: str = "*"
    when: Callable[[int], bool] = always
    where: Callable[[Request], bool] = lambda _request: True
    matched: int = 0
    fired: int = 0

    def matches(self, request: Request) -> bool:
        """Returns whether the rule is about such a request."""
        return (
            fnmatch.fnmatchcase(request.operation, self.operation)
            and fnmatch.fnmatchcase(request.key, self.key)
            and self.where(request)
        )

    def takes(self, exchange: Exchange) -> bool:
        """Counts a request, and returns whether the fault happens to it."""
        if not self.matches(exchange.request):
            return False
        self.matched += 1
        fires = self.when(self.matched) and self.fault.can_play(exchange)
        self.fired += fires
        return fires
