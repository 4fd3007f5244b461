"""Spot notices, from a stand-in for the metadata endpoints of the clouds."""

from __future__ import annotations

import json
import threading
import time
import warnings
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from varvite.errors import InvalidInputError
from varvite.training.spot import SpotPoller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE_SECONDS = 20


class Cloud:
    """An endpoint whose answers the test sets by method and path; others are 404."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, str]] = {}
        self.required: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                cloud.asked.append((self.command, self.path))
                is_allowed = all(self.headers.get(name) == value for name, value in cloud.required.items())
                is_token = self.path.endswith("/token")
                status, body = cloud.answers.get((self.command, self.path), (404, "not here"))
                if not is_allowed and not is_token:
                    status, body = 401, "no"
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_PUT = answer  # noqa: N815 - the names that the library calls

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = Cloud()
    yield cloud
    cloud.close()


@pytest.fixture
def poll(cloud) -> Iterator[Callable[..., SpotPoller]]:
    """Starts a poller of the cloud."""
    pollers = []

    def start(provider: str, endpoint: str | None = None) -> SpotPoller:
        poller = SpotPoller(
            provider, endpoint=endpoint or cloud.url, interval_seconds=0.01, timeout_seconds=5
        )
        pollers.append(poller)
        poller.start()
        return poller

    yield start
    for poller in pollers:
        poller.close()
        assert not poller._thread.is_alive()


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def asked_again(cloud: Cloud, times: int = 3) -> None:
    """Waits for more requests, so that what was answered before has been read."""
    count = len(cloud.asked)
    wait_until(lambda: len(cloud.asked) >= count + times)


TOKEN = ("PUT", "/latest/api/token")
ACTION = ("GET", "/latest/meta-data/spot/instance-action")
PREEMPTED = ("GET", "/computeMetadata/v1/instance/preempted")
EVENTS = ("GET", "/metadata/scheduledevents?api-version=2020-07-01")
NAME = ("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text")


def test_aws_with_a_token(cloud, poll):
    cloud.answers[TOKEN] = (200, "secret==")
    cloud.required = {"X-aws-ec2-metadata-token": "secret=="}
    poller = poll("aws")
    asked_again(cloud)
    assert (poller.notice, poller.trouble) == (None, None)
    at = (datetime.now(UTC) + timedelta(seconds=120)).strftime("%Y-%m-%dT%H:%M:%SZ")
    cloud.answers[ACTION] = (200, json.dumps({"action": "terminate", "time": at}))
    wait_until(lambda: poller.notice)
    assert (poller.notice.provider, poller.notice.action) == ("aws", "terminate")
    assert 110 < poller.notice.at_seconds - time.monotonic() <= 121
    assert cloud.asked.count(TOKEN) == 1


def test_aws_renews_a_token_that_expired(cloud, poll):
    cloud.answers[TOKEN] = (200, "first")
    cloud.required = {"X-aws-ec2-metadata-token": "first"}
    poller = poll("aws")
    asked_again(cloud)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cloud.required = {"X-aws-ec2-metadata-token": "second"}
        cloud.answers[TOKEN] = (200, "second")
        cloud.answers[ACTION] = (200, '{"action": "stop", "time": "soon"}')
        wait_until(lambda: poller.notice)
    assert (poller.notice.action, poller.notice.at_seconds) == ("stop", None)
    assert cloud.asked.count(TOKEN) == 2


def test_gcp(cloud, poll):
    cloud.required = {"Metadata-Flavor": "Google"}
    cloud.answers[PREEMPTED] = (200, "FALSE")
    poller = poll("gcp")
    asked_again(cloud)
    assert (poller.notice, poller.trouble) == (None, None)
    cloud.answers[PREEMPTED] = (200, "TRUE\n")
    wait_until(lambda: poller.notice)
    assert str(poller.notice) == "gcp: preempted"


def azure(*events: dict[str, object]) -> tuple[int, str]:
    return 200, json.dumps({"DocumentIncarnation": 1, "Events": list(events)})


def test_azure_takes_the_events_of_this_machine_alone(cloud, poll):
    cloud.required = {"Metadata": "true"}
    cloud.answers[NAME] = (200, "node_2")
    cloud.answers[EVENTS] = azure()
    poller = poll("azure")
    asked_again(cloud)
    cloud.answers[EVENTS] = azure(
        {"EventType": "Reboot", "Resources": ["node_2"]}, {"EventType": "Preempt", "Resources": ["node_1"]}
    )
    asked_again(cloud, 5)
    assert (poller.notice, poller.trouble) == (None, None)
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    cloud.answers[EVENTS] = azure({"EventType": "Preempt", "Resources": ["node_2"], "NotBefore": at})
    wait_until(lambda: poller.notice)
    assert poller.notice.action == "Preempt"
    assert 20 < poller.notice.at_seconds - time.monotonic() <= 31


def test_azure_without_a_name_takes_any_event(cloud, poll):
    cloud.answers[EVENTS] = azure({"EventType": "Terminate", "Resources": ["node_1"], "NotBefore": ""})
    poller = poll("azure")
    wait_until(lambda: poller.notice)
    assert (poller.notice.action, poller.notice.at_seconds) == ("Terminate", None)


@pytest.mark.parametrize(
    ("provider", "answers"),
    [
        ("aws", {TOKEN: (200, "t"), ACTION: (200, "<html>")}),
        ("aws", {TOKEN: (200, "t"), ACTION: (200, "[1]")}),
        ("aws", {TOKEN: (200, "t"), ACTION: (200, '{"action": 5}')}),
        ("aws", {TOKEN: (200, "t"), ACTION: (200, "[" * 60_000)}),
        ("aws", {TOKEN: (200, "a\nb")}),
        ("aws", {TOKEN: (403, "")}),
        ("gcp", {PREEMPTED: (200, "MAYBE")}),
        ("gcp", {}),
        ("azure", {EVENTS: (200, '{"Events": {}}')}),
        ("azure", {EVENTS: (500, "")}),
    ],
)
def test_nonsense_is_reported_once_and_never_a_notice(cloud, poll, monkeypatch, provider, answers):
    told = []
    monkeypatch.setattr("varvite.training.spot.warn", told.append)
    cloud.answers.update(answers)
    poller = poll(provider)
    asked_again(cloud, 4 * len(answers) or 4)
    assert poller.notice is None
    assert poller.trouble
    assert len(told) == 1
    assert f"cannot read spot notices of {provider} at `{cloud.url}`" in told[0]


def test_after_trouble_a_notice_is_still_seen_even_where_warnings_are_errors(cloud, poll):
    poller = poll("gcp")  # pytest makes errors of warnings, which the thread has to survive
    wait_until(lambda: poller.trouble)
    cloud.answers[PREEMPTED] = (200, "TRUE")
    wait_until(lambda: poller.notice)
    assert poller.trouble is None


def test_an_endpoint_that_is_absent(cloud, poll, monkeypatch):
    told = []
    monkeypatch.setattr("varvite.training.spot.warn", told.append)
    poller = poll("aws", "http://127.0.0.1:9")
    wait_until(lambda: told)
    assert "ConnectionRefusedError" in poller.trouble
    assert poller.notice is None


def test_trouble_makes_it_ask_less_often(monkeypatch):
    poller = SpotPoller("gcp", interval_seconds=5)
    waits = []

    class Closed:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            if len(waits) == 7:
                answers.append((200, "FALSE"))
            return len(waits) == 8

    answers: list[tuple[int, str]] = []
    monkeypatch.setattr("varvite.training.spot.warn", lambda text: None)
    monkeypatch.setattr(poller, "_closed", Closed())
    monkeypatch.setattr(poller, "_ask", lambda *_: answers[0] if answers else (404, ""))
    poller._run()
    assert waits == [10, 20, 40, 80, 120, 120, 120, 5]


def test_no_proxy_is_used(cloud, poll, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    cloud.answers[PREEMPTED] = (200, "TRUE")
    poller = poll("gcp")
    wait_until(lambda: poller.notice)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"provider": "ibm"}, "spot"),
        ({"provider": "aws", "endpoint": "https://169.254.169.254"}, "endpoint"),
        ({"provider": "aws", "endpoint": "169.254.169.254"}, "endpoint"),
        ({"provider": "aws", "endpoint": "http://host:port"}, "endpoint"),
        ({"provider": "aws", "endpoint": "http://host/path"}, "endpoint"),
        ({"provider": "aws", "interval_seconds": 0}, "interval_seconds"),
        ({"provider": "aws", "timeout_seconds": -1}, "timeout_seconds"),
    ],
)
def test_arguments_that_are_not_legal(arguments, what):
    with pytest.raises(InvalidInputError) as caught:
        SpotPoller(**arguments)
    assert caught.value.what == what
