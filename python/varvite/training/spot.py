"""Notices of spot machines that are about to be taken away, from the metadata endpoint of the cloud.

A thread asks the endpoint every few seconds and remembers the notice; it never stops a run by itself. An
endpoint that is absent or answers nonsense is reported once, and asked ever less often. Answers come over
plain HTTP from the machine's own host: no proxy is used, no redirect followed, no name resolved.

Example:
    >>> poller = SpotPoller("aws", endpoint="http://127.0.0.1:9")
    >>> poller.notice is None
    True
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from varvite.errors import InvalidInputError
from varvite.notices import warn
from varvite.training.checks import check_choice, check_positive
from varvite.training.deadlines import on_monotonic_clock

__all__ = ["SpotNotice", "SpotPoller"]

_ENDPOINT = "http://169.254.169.254"
"""The link-local address that all three clouds answer at."""
_BODY_LIMIT_BYTES = 1 << 16
_BACK_OFF_LIMIT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class SpotNotice:
    """The cloud takes this machine away.

    Attributes:
        provider: `aws`, `azure` or `gcp`.
        action: What will be done, in the cloud's word.
        at_seconds: When, on the monotonic clock; `None` where the cloud doesn't say.

    Example:
        >>> print(SpotNotice(provider="aws", action="terminate"))
        aws: terminate
    """

    provider: str
    action: str
    at_seconds: float | None = None

    def __str__(self) -> str:
        """Returns the cloud and its word."""
        return f"{self.provider}: {self.action}"


class _UnusableError(Exception):
    """The endpoint is absent, or its answer is not one that the cloud documents."""


Ask = Callable[..., tuple[int, str]]
"""Sends a request, `ask(method, path, headers)`, and returns status and body."""


class SpotPoller:
    """Asks the metadata endpoint of a cloud for a notice, in a thread.

    One process of a machine is enough. The machine must be allowed to reach its endpoint, which containers
    often are not (for AWS, the hop limit of the instance's metadata options must be 2).

    Args:
        provider: `aws`, `azure` or `gcp`.
        endpoint: Url of the endpoint, for tests and proxies of a cluster.
        interval_seconds: Time between two requests.
        timeout_seconds: How long a request may take.

    Raises:
        InvalidInputError: The provider, the url or a time is not legal.

    Example:
        >>> SpotPoller("cloud")
        Traceback (most recent call last):
            ...
        varvite.errors.InvalidInputError: invalid spot `cloud`: must be one of `aws`, `azure`, `gcp`
    """

    def __init__(
        self,
        provider: str,
        *,
        endpoint: str = _ENDPOINT,
        interval_seconds: float = 5.0,
        timeout_seconds: float = 2.0,
    ) -> None:
        """Checks the arguments; nothing is asked before `start`."""
        check_choice("spot", provider, sorted(_READERS))
        self._address = _address(endpoint)
        self._endpoint = endpoint
        self._interval_seconds = check_positive("interval_seconds", interval_seconds)
        self._timeout_seconds = check_positive("timeout_seconds", timeout_seconds)
        self._provider = provider
        self._read = _READERS[provider]()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._notice: SpotNotice | None = None
        self._trouble: str | None = None

    @property
    def notice(self) -> SpotNotice | None:
        """The notice, once there is one."""
        return self._notice

    @property
    def trouble(self) -> str | None:
        """Why the last request told nothing; `None` if it did."""
        return self._trouble

    def start(self) -> None:
        """Starts to ask; again, it does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="varvite-spot", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread; a request that is under way is waited for."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * self._timeout_seconds)

    def _run(self) -> None:
        wait_seconds, was_reported = self._interval_seconds, False
        while self._notice is None:
            try:
                self._notice = self._read(self._ask)
                self._trouble, wait_seconds = None, self._interval_seconds
            except _UnusableError as error:
                self._trouble = str(error)
                wait_seconds = min(2 * wait_seconds, max(_BACK_OFF_LIMIT_SECONDS, self._interval_seconds))
                if not was_reported:
                    was_reported = True
                    self._report()
            if self._notice is not None or self._closed.wait(wait_seconds):
                return

    def _report(self) -> None:
        # A program whose warnings are errors must not lose the thread by one that it can't hear of.
        with contextlib.suppress(RuntimeWarning):
            warn(
                f"cannot read spot notices of {self._provider} at `{self._endpoint}`, "
                f"asking on less often: {self._trouble}"
            )

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        import http.client

        host, port = self._address
        connection = http.client.HTTPConnection(host, port, timeout=self._timeout_seconds)
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            body = response.read(_BODY_LIMIT_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _UnusableError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        return response.status, body.decode("utf-8", "replace").strip()


def _address(endpoint: str) -> tuple[str, int]:
    from urllib.parse import urlsplit

    reason = "must be a url `http://HOST` or `http://HOST:PORT`"
    try:
        parts = urlsplit(endpoint)
        if parts.scheme == "http" and parts.hostname and parts.path in ("", "/"):
            return parts.hostname, parts.port or 80
    except ValueError:
        pass
    raise InvalidInputError(f"invalid endpoint `{endpoint}`: {reason}", what="endpoint", reason=reason)


# What the clouds answer


class _Aws:
    """`spot/instance-action` of IMDSv2: 404 until there is a notice, two minutes ahead.

    Source: Amazon EC2 User Guide, "Spot Instance interruption notices" and "Use IMDSv2".
    """

    def __init__(self) -> None:
        self._token: str | None = None

    def __call__(self, ask: Ask) -> SpotNotice | None:
        if self._token is None:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            status, token = ask("PUT", "/latest/api/token", ttl)
            if status != 200 or not token.isascii() or not token.isprintable() or not token:
                raise _UnusableError(f"no token, status {status}")
            self._token = token
        headers = {"X-aws-ec2-metadata-token": self._token}
        status, body = ask("GET", "/latest/meta-data/spot/instance-action", headers)
        if status == 404:
            return None
        if status == 401:  # it has expired
            self._token = None
        action = _object(status, body).get("action")
        if not isinstance(action, str):
            raise _UnusableError("no action in the answer")
        return SpotNotice(provider="aws", action=action, at_seconds=_time(_object(status, body).get("time")))


class _Gcp:
    """`instance/preempted`: `TRUE` once the machine is being taken away, 30 seconds ahead.

    Source: Google Cloud, "Preemptible VM instances" and "View and query VM metadata".
    """

    def __call__(self, ask: Ask) -> SpotNotice | None:
        path = "/computeMetadata/v1/instance/preempted"
        status, body = ask("GET", path, {"Metadata-Flavor": "Google"})
        if status != 200 or body not in ("TRUE", "FALSE"):
            raise _UnusableError(f"status {status}, neither TRUE nor FALSE")
        return SpotNotice(provider="gcp", action="preempted") if body == "TRUE" else None


class _Azure:
    """`scheduledevents`: a list for all machines of a scale set, 30 seconds ahead for `Preempt`.

    Source: Microsoft Azure, "Scheduled Events for Linux VMs" and "Azure Instance Metadata Service".
    """

    _HEADERS = {"Metadata": "true"}  # noqa: RUF012 - never changed

    def __init__(self) -> None:
        self._name: str | None = None

    def __call__(self, ask: Ask) -> SpotNotice | None:
        status, body = ask("GET", "/metadata/scheduledevents?api-version=2020-07-01", self._HEADERS)
        events = _object(status, body).get("Events")
        if not isinstance(events, list):
            raise _UnusableError("no list of events in the answer")
        for event in events:
            if not isinstance(event, dict) or event.get("EventType") not in ("Preempt", "Terminate"):
                continue
            if self._concerns_this_machine(ask, event.get("Resources")):
                at_seconds = _time(event.get("NotBefore"))
                return SpotNotice(provider="azure", action=event["EventType"], at_seconds=at_seconds)
        return None

    def _concerns_this_machine(self, ask: Ask, machines: Any) -> bool:
        """Returns whether this machine is listed; where its name is not known, any is taken for it."""
        if not isinstance(machines, list) or not machines:
            return True
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            try:
                status, name = ask("GET", path, self._HEADERS)
            except _UnusableError:
                return True
            if status != 200 or not name:
                return True
            self._name = name
        return self._name in machines


_READERS: dict[str, Callable[[], Callable[[Ask], SpotNotice | None]]] = {
    "aws": _Aws,
    "azure": _Azure,
    "gcp": _Gcp,
}


def _object(status: int, body: str) -> dict[str, Any]:
    if status != 200:
        raise _UnusableError(f"status {status}")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _UnusableError("the answer is not JSON") from error
    if not isinstance(value, dict):
        raise _UnusableError("the answer is no JSON object")
    return value


def _time(text: Any) -> float | None:
    """Returns a time of the wall clock on the monotonic one; `None` for what is none."""
    from datetime import UTC, datetime
    from email.utils import parsedate_to_datetime

    if not isinstance(text, str):
        return None
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = parse(text)
        except (ValueError, TypeError, IndexError):
            continue
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return on_monotonic_clock(moment.timestamp(), wall_now=time.time(), monotonic_now=time.monotonic())
    return None
