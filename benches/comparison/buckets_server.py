"""The server that the measurements of buckets talk to: SeaweedFS, as the tests start it, on loopback."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from comparison.worker import MeasurementError

_STARTER = Path(__file__).resolve().parents[2] / "tests" / "python" / "buckets" / "servers.py"
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Place:
    """A server with a bucket, and the keys to it; made for one run, so nothing of it is a secret.

    Attributes:
        endpoint: Url of the server, or of what stands before it.
        bucket: Name of the bucket.
        access_key: Of the only user.
        secret_key: Of the only user.
        region: What requests are signed for.
    """

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    region: str

    def as_json(self) -> dict[str, str]:
        """For the arguments of a worker."""
        return asdict(self)

    def client(self, **config: Any) -> Any:
        """A client of boto3; `config` goes to the one of botocore."""
        import boto3
        import botocore.config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=botocore.config.Config(s3={"addressing_style": "path"}, proxies={}, **config),
        )

    def options(self, **more: Any) -> dict[str, Any]:
        """`remote_options` of a manager."""
        return {
            "endpoint": self.endpoint,
            "region": self.region,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            **more,
        }


class Server:
    """A running server.

    Attributes:
        data: Where its objects lie: `memory` or `disk`.
    """

    def __init__(self, place: Place, data: str) -> None:
        self.place = place
        self.data = data
        self._client = place.client()

    def bucket(self, name: str) -> Place:
        """A new bucket that has a place for its first object already."""
        import botocore.exceptions

        try:
            self._client.create_bucket(Bucket=name)
            self._client.put_object(Bucket=name, Key="ready", Body=b"ready")
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            raise MeasurementError(f"the server makes no bucket `{name}`: {error}") from error
        return Place(**self.place.as_json() | {"bucket": name})

    def drop(self, place: Place) -> None:
        """Removes a bucket with all that lies in it, where the server still answers."""
        import botocore.exceptions

        failures = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
        # What has gone wrong before is what the caller has to hear of; the server ends with this run.
        with contextlib.suppress(*failures):
            self._client.delete_bucket(Bucket=place.bucket)

    def objects(self, place: Place) -> dict[str, int]:
        """Length of each object in a bucket by its key."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket)
        return {row["Key"]: row["Size"] for page in pages for row in page.get("Contents", [])}


def why_not() -> str | None:
    """Why no server can be started here."""
    missing = [name for name in ("boto3", "botocore") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not _STARTER.exists():
        return "the tests that start the server are not here"
    try:
        _starter().program("weed")
    except AssertionError as error:
        return str(error)
    return None


@contextlib.contextmanager
def started(folder: Path, room_bytes: int) -> Iterator[Server]:
    """Runs a server to the end of the block.

    Args:
        folder: For its data, where memory has no room for them.
        room_bytes: What it will hold at most. In memory, neither a disk nor the page cache stands between.
    """
    starter = _starter()
    in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * room_bytes
    parent = _MEMORY if in_memory else folder
    parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="varvite-bench-", dir=parent) as data,
        starter.seaweedfs(Path(data)) as running,
    ):
        place = Place(
            endpoint=running.endpoint,
            bucket=starter.BUCKET,
            access_key=starter.ACCESS_KEY,
            secret_key=starter.SECRET_KEY,
            region=starter.REGION,
        )
        yield Server(place, "memory" if in_memory else "disk")


def free_port() -> int:
    """A port that nobody listens on."""
    port: int = _starter().free_ports(1)[0]
    return port


def _starter() -> ModuleType:
    """The module of the tests, which no package holds: one piece of code starts the server."""
    name = "bucket_servers_of_tests"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, _STARTER)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import: `{os.fspath(_STARTER)}`")
    module = importlib.util.module_from_spec(spec)
    # A frozen dataclass looks its own module up while it is made.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
