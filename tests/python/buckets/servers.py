"""Real S3 servers on loopback: started on free ports, ready when they answer, ended with this process.

Three that differ in what they keep of the protocol:

* SeaweedFS, the strict one: checks signatures, checksums and every condition;
* moto, quick to start: every condition, no signatures, no checksums;
* rclone, the bad one: it ignores conditions, so that a put that should lose overwrites.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import botocore.config
import botocore.exceptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOST = "127.0.0.1"
ACCESS_KEY = "varvite-test"
SECRET_KEY = "varvite-test-secret"
REGION = "us-east-1"
BUCKET = "varvite-tests"
"""The bucket of each server; every test has a prefix of its own in it."""

READY_SECONDS = 60.0
ATTEMPTS = 3
"""A free port may be taken before the server binds it: then the server ends, and others are tried."""
POLL_SECONDS = 0.02
DIES_WITH_ITS_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Becomes the program of its arguments, which the kernel kills when the process that started it ends."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        name: `moto`, `seaweedfs` or `rclone`.
        port: Where it listens on `HOST`.
        process_id: Of the server.
        honours_conditions: Whether a put with `If-None-Match` or `If-Match` can lose.
        checks_keys: Whether a request with a wrong signature is refused.
        aborts_uploads: Whether uploads in parts can be listed and aborted.
    """

    name: str
    port: int
    process_id: int
    honours_conditions: bool = True
    checks_keys: bool = True
    aborts_uploads: bool = True

    @property
    def endpoint(self) -> str:
        """Address of the server as a client wants it."""
        return f"http://{HOST}:{self.port}"


def client(endpoint: str, *, secret_key: str = SECRET_KEY, timeout_seconds: float = 20.0):
    """Returns a boto3 client that tries each request once and asks the environment for nothing."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=secret_key,
        config=botocore.config.Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=timeout_seconds,
            proxies={},
        ),
    )


def program(name: str) -> str:
    """Returns the path of a program that a package of the group `dev` installs."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"`{name}` is not installed: install the group `dev` of pyproject.toml"
    return found


def free_ports(count: int) -> list[int]:
    """Returns different ports that nobody listens on right now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def running(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a program that is killed at the end of the block, or with this process."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", DIES_WITH_ITS_PARENT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _is_ready(process: subprocess.Popen[bytes], endpoint: str) -> bool:
    """Waits until a server takes an object; false where it ended instead."""
    deadline = time.monotonic() + READY_SECONDS
    probe = client(endpoint, timeout_seconds=2)
    with contextlib.closing(probe):
        while process.poll() is None:
            try:
                probe.create_bucket(Bucket=BUCKET)
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
                if "BucketAlreadyOwnedByYou" not in str(error) and time.monotonic() > deadline:
                    raise
            try:
                probe.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)
            else:
                return True
    return False


@contextlib.contextmanager
def _served(
    folder: Path, ports: int, arguments: Callable[[Path, list[int]], list[str]]
) -> Iterator[tuple[int, int]]:
    """Runs a server on free ports, the first of which talks S3; yields that port and the process id.

    Args:
        folder: Where its log lies, and its data in a folder of their own.
        ports: How many it needs.
        arguments: Returns its command line, of its data folder and its ports.
    """
    for attempt in range(ATTEMPTS):
        chosen = free_ports(ports)
        log, data = folder / f"log-{attempt}", folder / f"data-{attempt}"
        data.mkdir()
        try:
            with running(arguments(data, chosen), log) as process:
                if _is_ready(process, f"http://{HOST}:{chosen[0]}"):
                    yield chosen[0], process.pid
                    return
        finally:
            # Of the folders that pytest keeps, none holds what whole sessions have pushed.
            shutil.rmtree(data)
    raise AssertionError(f"the server ended by itself, see {log}:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """Runs moto's server; its objects lie in its memory."""

    def arguments(_data: Path, ports: list[int]) -> list[str]:
        return [sys.executable, program("moto_server"), "-H", HOST, "-p", str(ports[0])]

    with _served(folder, 1, arguments) as (port, process_id):
        yield Server("moto", port, process_id, checks_keys=False)


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[Server]:
    """Runs SeaweedFS: master, volume server, filer and S3 gateway in one process, data below `folder`."""
    identity = {
        "name": "varvite",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    used: list[int] = []

    def arguments(data: Path, ports: list[int]) -> list[str]:
        used.extend(ports)
        names = [
            f"{part}.port{kind}" for part in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")
        ]
        return [
            program("weed"),
            "-logtostderr=true",
            "server",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            f"-dir={data}",
            "-s3",
            f"-s3.config={folder / 's3.json'}",
            *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
            "-master.volumeSizeLimitMB=512",
            "-master.telemetry=false",
            "-volume.max=100",
            "-volume.minFreeSpace=0",
            "-s3.autoCreateBucket=false",
            # What it offers beside S3, on ports that are the same for everyone.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]

    try:
        with _served(folder, 8, arguments) as (port, process_id):
            yield Server("seaweedfs", port, process_id)
    finally:
        # Its sockets lie outside of `folder`, by the number of the port, and a kill leaves them there.
        for port in used:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """Runs rclone's S3 server over a folder: a put never loses."""

    def arguments(data: Path, ports: list[int]) -> list[str]:
        return [
            program("rclone"),
            "serve",
            "s3",
            "--config=/dev/null",
            f"--addr={HOST}:{ports[0]}",
            f"--auth-key={ACCESS_KEY},{SECRET_KEY}",
            str(data),
        ]

    with _served(folder, 1, arguments) as (port, process_id):
        yield Server("rclone", port, process_id, honours_conditions=False)
