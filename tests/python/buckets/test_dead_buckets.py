"""A bucket that is away, wrong, or not ours: saves go on, and the error says what a person needs to know."""

from __future__ import annotations

import datetime as dt
import json
import signal
import ssl
import threading
import time

import certificates
import faults
import pytest
from looks import assert_loads, assert_pushed, save_steps, state_of
from servers import HOST, SECRET_KEY, free_ports
from support import assert_same, child, run_child

from varvite import CheckpointManager, keep
from varvite.errors import CheckpointError, InvalidInputError, StoreError

GIVES_UP = {"retry_seconds": 0.3, "timeout_seconds": 2.0}
pytestmark = pytest.mark.timeout(60)
"""The bound in which each error has to come."""


def text_of(caught) -> str:
    """Returns what a person reads, having checked that it tells no secret."""
    text = str(caught.value)
    assert SECRET_KEY not in text
    return text


# Away


@pytest.mark.filterwarnings("ignore:pushing to:RuntimeWarning")
def test_saves_go_on_beside_a_dead_bucket_and_everything_is_pushed_when_it_is_back(bucket, proxy, tmp_path):
    manager = bucket.manager(
        tmp_path / "a", endpoint=proxy.endpoint, keep=keep.last(2), remote_options=GIVES_UP
    )
    save_steps(manager, 0)
    manager.sync_now()
    proxy.go_down()
    save_steps(manager, 1)
    with pytest.raises(StoreError) as caught:
        manager.sync_now()
    text = text_of(caught)
    assert "refused" in text
    assert f"{HOST}:{proxy.port}" in text
    assert bucket.prefix in text
    state = manager.stats().sync
    assert "refused" in state.last_error
    assert (state.newest_pushed_seq, state.unpushed) == (1, [2])
    assert "failing: " in str(state)
    with pytest.warns(RuntimeWarning, match="pushing to .* fails, and is tried again: .*refused"):
        save_steps(manager, 2, 3)
    manager.flush()
    manager.prune()
    assert_loads(manager, 1, 2, 3)  # retention keeps what is only here
    assert manager.stats().errors == []
    with pytest.raises(StoreError, match="refused"):
        manager.sync_now()
    with pytest.raises(StoreError, match="refused") as caught:
        manager.close()
    assert "varvite push" in caught.value.hint
    manager.close()

    manager = bucket.manager(tmp_path / "a", endpoint=proxy.endpoint, remote_options=GIVES_UP)
    save_steps(manager, 4)
    proxy.come_back()
    assert manager.sync_now().pending_objects == 0
    assert manager.stats().sync.last_error is None
    manager.close()
    assert_pushed(bucket, tmp_path / "a")
    assert bucket.check_whole(tmp_path / "look") == [1, 2, 3, 4]


def test_a_final_save_is_here_where_only_its_push_failed(quick_bucket, proxy_before, tmp_path):
    proxy = proxy_before(quick_bucket)
    manager = quick_bucket.manager(tmp_path / "a", endpoint=proxy.endpoint, remote_options=GIVES_UP)
    proxy.go_down()
    with pytest.raises(StoreError, match="refused"):
        manager.save_final(0, state_of(0), rng=False)
    assert_loads(manager, 0)
    proxy.come_back()
    manager.sync_now()
    manager.close()
    assert quick_bucket.check_whole(tmp_path / "look") == [0]


@pytest.mark.filterwarnings("ignore:pushing to:RuntimeWarning")
def test_a_close_tries_nothing_again_that_the_running_push_fails_of(quick_bucket, proxy_before, tmp_path):
    proxy, hold, raised = proxy_before(quick_bucket), faults.Hold(), []
    manager = quick_bucket.manager(tmp_path / "a", endpoint=proxy.endpoint, remote_options=GIVES_UP)
    manager.sync_now()  # what opening has begun
    proxy.add(hold, operation="put", key="*/packs/*")
    denied = proxy.add(faults.DENIED, operation="put", key="*/snapshots/*")
    save_steps(manager, 0)
    assert hold.reached.wait(30)

    def close():
        try:
            manager.close()
        except StoreError as error:
            raised.append(error)

    closing = threading.Thread(target=close)
    closing.start()
    hold.let_go()
    closing.join(30)
    assert "AccessDenied" in str(raised[0])
    assert denied.fired == 1


def await_request(rule):
    """Waits until a request has met a fault."""
    deadline = time.monotonic() + 30
    while not rule.fired and time.monotonic() < deadline:
        time.sleep(0.01)
    assert rule.fired


@pytest.mark.parametrize("what", ["open", "list", "load", "sync"])
def test_an_interrupt_ends_the_wait_for_a_bucket_that_answers_nothing(
    quick_bucket, proxy_before, tmp_path, what
):
    if what in ("list", "load"):
        with quick_bucket.manager(tmp_path / "first") as manager:
            save_steps(manager, 0)
    proxy = proxy_before(quick_bucket)
    patient = {"retry_seconds": 1000.0, "timeout_seconds": 1000.0, "endpoint": proxy.endpoint}
    options = json.dumps(quick_bucket.options(**patient))
    with child("asks_bucket", tmp_path / "a", quick_bucket.url, options, what) as process:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        silent = proxy.add(faults.Silent())
        process.stdin.write("go on\n")
        process.stdin.flush()
        await_request(silent)
        process.send_signal(signal.SIGINT)
        # Nobody else would end it before this test is over.
        assert process.stdout.readline() == "interrupted\n", process.stderr.read()


def test_a_silent_bucket_keeps_no_save_waiting(quick_bucket, proxy_before, tmp_path):
    proxy = proxy_before(quick_bucket)
    options = {"retry_seconds": 1000.0, "timeout_seconds": 1000.0}
    manager = quick_bucket.manager(
        tmp_path / "a", endpoint=proxy.endpoint, remote_options=options, keep=keep.last(1)
    )
    # Nothing is ever answered: a save that waited for an answer would wait until the test ends.
    silent = proxy.add(faults.Silent())
    save_steps(manager, 0, 1, 2)
    manager.prune()
    assert_loads(manager, 0, 1, 2)
    manager.flush()
    assert manager.stats().sync.unpushed == [1, 2, 3]
    await_request(silent)  # the push has begun, and hangs
    with CheckpointManager(tmp_path / "a", read_only=True) as reader:
        assert_loads(reader, 0, 1, 2)
    proxy.clear()
    proxy.go_down()
    proxy.come_back()
    manager.sync_now()
    manager.close()
    assert quick_bucket.seqs()[-1] == 3


@pytest.mark.filterwarnings("ignore:pushing to:RuntimeWarning")
def test_a_bucket_that_is_away_at_the_start(quick_bucket, proxy_before, tmp_path):
    proxy = proxy_before(quick_bucket)
    proxy.go_down()
    # With nothing here it can't be known whether this is a fresh start.
    with pytest.raises(StoreError) as caught:
        quick_bucket.manager(tmp_path / "empty", endpoint=proxy.endpoint, remote_options=GIVES_UP)
    assert "refused" in text_of(caught)
    with pytest.raises(StoreError, match="refused"):
        quick_bucket.reader(endpoint=proxy.endpoint, **GIVES_UP).snapshots()
    with CheckpointManager(tmp_path / "a") as manager:
        save_steps(manager, 0)
    manager = quick_bucket.manager(tmp_path / "a", endpoint=proxy.endpoint, remote_options=GIVES_UP)
    save_steps(manager, 1, 2)
    assert_loads(manager, 0, 1, 2)
    proxy.come_back()
    manager.sync_now()
    manager.close()
    assert_pushed(quick_bucket, tmp_path / "a")


# Wrong


def opens(bucket, tmp_path, url: str | None = None, **options):
    """Opens a manager on an empty folder, and a reader; returns the text that each failed with."""
    given = {**bucket.options(), **GIVES_UP, **options}
    given["spool"] = tmp_path / "spool"

    def look(*, read_only: bool) -> None:
        CheckpointManager(url or bucket.url, read_only=read_only, remote_options=given).snapshots()

    texts = []
    for read_only in (False, True):
        with pytest.raises(StoreError) as caught:
            look(read_only=read_only)
        texts.append(text_of(caught))
    return texts


def test_a_bucket_that_does_not_exist(bucket, tmp_path):
    for text in opens(bucket, tmp_path, "s3://no-such-bucket-of-ours/run"):
        assert "NoSuchBucket" in text
        assert "no-such-bucket-of-ours" in text
        assert "404" in text


def test_a_wrong_secret_key(seaweedfs, bucket_on, tmp_path):
    for text in opens(bucket_on(seaweedfs), tmp_path, secret_access_key="not-the-one"):
        assert "SignatureDoesNotMatch" in text
        assert "secret_access_key" in text
        assert "not-the-one" not in text


def test_an_unknown_access_key(seaweedfs, bucket_on, tmp_path):
    for text in opens(bucket_on(seaweedfs), tmp_path, access_key_id="nobody"):
        assert "InvalidAccessKeyId" in text


def test_no_credentials_at_all(quick_bucket, tmp_path):
    options = quick_bucket.options(**GIVES_UP)
    for name in ("access_key_id", "secret_access_key"):
        options.pop(name)
    with pytest.raises(StoreError) as caught:
        CheckpointManager(tmp_path / "a", remote=quick_bucket.url, remote_options=options)
    assert "no credentials" in text_of(caught)


def test_a_bucket_of_another_region(quick_bucket, proxy_before, tmp_path):
    proxy = proxy_before(quick_bucket)
    proxy.add(faults.Answer(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-north-7"}))
    for text in opens(quick_bucket, tmp_path, endpoint=proxy.endpoint):
        assert "region" in text
        assert "eu-north-7" in text


def test_rights_that_are_missing(quick_bucket, proxy_before, tmp_path):
    proxy = proxy_before(quick_bucket)
    proxy.add(faults.DENIED)
    for text in opens(quick_bucket, tmp_path, endpoint=proxy.endpoint):
        assert "403" in text
        assert "AccessDenied" in text


def test_a_clock_that_is_wrong(quick_bucket, proxy_before, tmp_path):
    proxy = proxy_before(quick_bucket)
    proxy.add(faults.SKEWED)
    for text in opens(quick_bucket, tmp_path, endpoint=proxy.endpoint):
        assert "clock" in text


def test_an_endpoint_where_nobody_listens(quick_bucket, tmp_path):
    endpoint = f"http://{HOST}:{free_ports(1)[0]}"
    for text in opens(quick_bucket, tmp_path, endpoint=endpoint):
        assert "refused" in text
        assert endpoint.removeprefix("http://") in text


def test_an_endpoint_whose_name_is_not_known(quick_bucket, tmp_path):
    for text in opens(quick_bucket, tmp_path, endpoint="http://no-such-host.invalid:9000"):
        assert "the host is not known" in text
        assert "no-such-host.invalid" in text


def test_an_endpoint_that_never_answers(quick_bucket, proxy_before, tmp_path):
    proxy = proxy_before(quick_bucket)
    proxy.add(faults.Silent())
    for text in opens(quick_bucket, tmp_path, endpoint=proxy.endpoint, timeout_seconds=0.3):
        assert "time" in text


def test_an_endpoint_that_is_no_bucket(quick_bucket, proxy_before, tmp_path):
    proxy = proxy_before(quick_bucket)
    proxy.add(faults.Answer(200, "Welcome"))
    # What lies in the place of the lease may be that of a writer: it is watched for so long.
    for text in opens(quick_bucket, tmp_path, endpoint=proxy.endpoint, lease_seconds=0.3):
        assert quick_bucket.prefix in text


def test_a_server_that_ignores_conditions_is_refused_and_nothing_stays_there(rclone, bucket_on, tmp_path):
    bucket = bucket_on(rclone)
    with pytest.raises(StoreError) as caught:
        bucket.manager(tmp_path / "a", remote_options=GIVES_UP)
    text = text_of(caught)
    assert "If-None-Match" in text
    assert bucket.url in text
    assert "single_writer" in text
    assert bucket.names() == []


def test_a_server_that_ignores_conditions_is_used_by_one_who_says_so(rclone, bucket_on, tmp_path):
    bucket = bucket_on(rclone)
    with bucket.manager(tmp_path / "a", remote_options={"single_writer": True}) as manager:
        save_steps(manager, 0, 1)
        manager.sync_now()
        assert_pushed(bucket, tmp_path / "a")
    # Not read by ranges: this server ignores those as well.
    assert bucket.check_whole(tmp_path / "look") == [0, 1]


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("certificate"), HOST)


def test_a_server_whose_certificate_nobody_knows(quick_bucket, proxy_before, certificate, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.chain, certificate.key)
    proxy = proxy_before(quick_bucket, tls=context)
    assert proxy.endpoint.startswith("https://")
    for text in opens(quick_bucket, tmp_path, endpoint=proxy.endpoint):
        assert "certificate" in text
        assert "ca_bundle" in text
    with quick_bucket.manager(
        tmp_path / "a", endpoint=proxy.endpoint, remote_options={"ca_bundle": certificate.authority}
    ) as manager:
        save_steps(manager, 0)
        manager.sync_now()
    assert_pushed(quick_bucket, tmp_path / "a")


def test_a_bundle_that_is_not_there(quick_bucket, tmp_path):
    with pytest.raises((StoreError, InvalidInputError), match=r"ca_bundle|nothing\.pem"):
        quick_bucket.manager(tmp_path / "a", remote_options={"ca_bundle": str(tmp_path / "nothing.pem")})


# Credentials that end


class Source:
    """Gives credentials, the next ones at each call."""

    def __init__(self, bucket, *tokens: str, **more) -> None:
        options = bucket.options()
        self._keys = {name: options[name] for name in ("access_key_id", "secret_access_key")}
        self._tokens, self._more = tokens, more
        self.calls = 0

    def __call__(self) -> dict:
        self.calls += 1
        token = self._tokens[min(self.calls, len(self._tokens)) - 1]
        return {**self._keys, "session_token": token, **self._more}


def by(source: Source, bucket, endpoint: str, **more) -> dict:
    options = bucket.options(endpoint, credentials=source, **more)
    for name in ("access_key_id", "secret_access_key"):
        options.pop(name)
    return options


def token_of(request) -> str | None:
    return request.headers.get("x-amz-security-token")


def test_credentials_that_have_ended_are_fetched_again(open_bucket, proxy_before, tmp_path):
    proxy = proxy_before(open_bucket)
    source = Source(open_bucket, "first", "second")
    options = by(source, open_bucket, proxy.endpoint)
    with CheckpointManager(tmp_path / "a", remote=open_bucket.url, remote_options=options) as manager:
        save_steps(manager, 0)
        manager.sync_now()
        assert source.calls == 1
        assert {token_of(one) for one in proxy.requests} == {"first"}
        expired = proxy.add(faults.EXPIRED, where=lambda request: token_of(request) == "first")
        proxy.requests.clear()
        save_steps(manager, 1)
        manager.sync_now()
        assert (source.calls, expired.fired >= 1) == (2, True)
        assert token_of(proxy.requests[-1]) == "second"
    assert_pushed(open_bucket, tmp_path / "a")


def test_credentials_that_are_about_to_end_are_fetched_before(open_bucket, proxy_before, tmp_path):
    proxy = proxy_before(open_bucket)
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)
    source = Source(open_bucket, *map(str, range(1000)), expires_at=soon)
    options = by(source, open_bucket, proxy.endpoint)
    with CheckpointManager(tmp_path / "a", remote=open_bucket.url, remote_options=options) as manager:
        save_steps(manager, 0)
        manager.sync_now()
    assert source.calls > 1
    assert len({token_of(one) for one in proxy.requests}) > 1
    assert [one for one in proxy.requests if one.status in (400, 403)] == []


def test_credentials_that_are_never_good_are_an_error(open_bucket, proxy_before, tmp_path):
    proxy = proxy_before(open_bucket)
    proxy.add(faults.EXPIRED)
    source = Source(open_bucket, "old")
    with pytest.raises(StoreError) as caught:
        CheckpointManager(
            tmp_path / "a",
            remote=open_bucket.url,
            remote_options=by(source, open_bucket, proxy.endpoint, **GIVES_UP),
        )
    assert "ExpiredToken" in text_of(caught)
    assert 2 <= source.calls <= 10


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "it returned a NoneType, not a dict with `access_key_id`"),
        ({}, "access_key_id"),
        ({"access_key_id": 1, "secret_access_key": "x"}, "str"),
        ({"access_key_id": "a"}, "secret_access_key"),
        (
            {"access_key_id": "a", "secret_access_key": "b", "expires_at": "tomorrow"},
            "`expires_at` must be a datetime, or seconds since 1970",
        ),
    ],
    ids=["nothing", "an empty dict", "a number", "half", "a wrong time"],
)
def test_a_source_of_credentials_that_gives_none(open_bucket, tmp_path, given, told):
    options = by(lambda: given, open_bucket, open_bucket.server.endpoint, **GIVES_UP)
    with pytest.raises(CheckpointError, match="credentials") as caught:
        CheckpointManager(tmp_path / "a", remote=open_bucket.url, remote_options=options)
    assert told in str(caught.value)


def test_a_source_of_credentials_that_raises(open_bucket, tmp_path):
    def broken() -> dict:
        raise LookupError("the vault is sealed")

    options = by(broken, open_bucket, open_bucket.server.endpoint, **GIVES_UP)
    with pytest.raises(CheckpointError, match="the vault is sealed"):
        CheckpointManager(tmp_path / "a", remote=open_bucket.url, remote_options=options)


# Forks


def test_a_forked_child_neither_hangs_nor_writes(quick_bucket, proxy_before, tmp_path):
    proxy = proxy_before(quick_bucket)
    options = quick_bucket.options(proxy.endpoint, lease_seconds=0.6)
    arguments = [tmp_path / "a", tmp_path / "other", quick_bucket.url, json.dumps(options)]
    done = run_child("forks_with_bucket", *arguments)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "child sync refused: True",
        "child save refused: True",
        "child pushes elsewhere 0",
        "child ended 0",
        "child wrote to the parent's bucket: False",
        "parent pushed [1, 2]",
        "parent holds the place: True",
    ]
    assert quick_bucket.check_whole(tmp_path / "look") == [1, 2]
    with quick_bucket.manager(tmp_path / "b") as manager:
        assert_same(dict(manager.load()), state_of(2))
