"""Servers of the session, and for each test a bucket of its own and a proxy before it."""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import TYPE_CHECKING

import pytest
import servers
from bucket import Bucket
from proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _session_server(name: str):
    @pytest.fixture(scope="session", name=name)
    def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
        with getattr(servers, name)(tmp_path_factory.mktemp(name)) as server:
            yield server

    return started


moto = _session_server("moto")
seaweedfs = _session_server("seaweedfs")
rclone = _session_server("rclone")


@pytest.fixture(params=["moto", "seaweedfs"])
def server(request: pytest.FixtureRequest) -> servers.Server:
    """Each server that keeps the protocol."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def bucket_on() -> Iterator[Callable[..., Bucket]]:
    """Makes a bucket on a server, under a prefix that no other test has."""
    with contextlib.ExitStack() as stack:

        def make(server: servers.Server, prefix: str = "run") -> Bucket:
            made = Bucket(server, f"{uuid.uuid4().hex[:12]}/{prefix}")
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def bucket(server, bucket_on) -> Bucket:
    """A bucket on each server that keeps the protocol."""
    return bucket_on(server)


@pytest.fixture
def quick_bucket(seaweedfs, bucket_on) -> Bucket:
    """A bucket on the server whose requests are quickest, for tests of what doesn't depend on the server."""
    return bucket_on(seaweedfs)


@pytest.fixture
def open_bucket(moto, bucket_on) -> Bucket:
    """A bucket on a server that takes any credentials."""
    return bucket_on(moto)


@pytest.fixture
def proxy_before() -> Iterator[Callable[..., Proxy]]:
    """Makes a proxy before the server of a bucket."""
    with contextlib.ExitStack() as stack:
        yield lambda bucket, **arguments: stack.enter_context(Proxy(bucket.server.port, **arguments))


@pytest.fixture
def proxy(server, proxy_before, bucket) -> Proxy:
    """A proxy before the server of `bucket`."""
    return proxy_before(bucket)


@pytest.fixture(scope="session", autouse=True)
def no_syncs() -> Iterator[None]:
    """Doesn't wait for disks: what these tests kill are processes, not machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VARVITE_FSYNC", "0")
        yield


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch, tmp_path) -> None:
    """Hides what the environment and the home folder say about clouds."""
    for name in os.environ:
        if name.upper().startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
