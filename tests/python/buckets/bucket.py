"""The prefix of one test in the bucket of a server, and a client to look at what lies there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Server, client

from varvite import CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path

QUICK = {"retry_seconds": 5.0, "timeout_seconds": 10.0}
"""Options of a client that gives up soon, for tests."""
BESIDE = ("lease.json", "uploads/")
"""What a bucket has and a folder has not."""


class Bucket:
    """A prefix of its own in a bucket.

    Attributes:
        server: The server that holds it.
        prefix: Without slashes at its ends; may be empty.
        client: A boto3 client of the server itself, past any proxy.
    """

    def __init__(self, server: Server, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self.client = client(server.endpoint)

    @property
    def url(self) -> str:
        """What a manager is opened on."""
        return f"s3://{BUCKET}/{self.prefix}"

    def options(self, endpoint: str | None = None, **more: Any) -> dict[str, Any]:
        """Returns `remote_options`, for the server itself or for a proxy before it."""
        return {
            "endpoint": endpoint or self.server.endpoint,
            "region": REGION,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            **QUICK,
            **more,
        }

    def manager(self, folder: Path, *, endpoint: str | None = None, **arguments: Any) -> CheckpointManager:
        """Opens a manager on a folder that is pushed here; `remote_options` come on top of the usual ones."""
        options = self.options(endpoint, **arguments.pop("remote_options", {}))
        return CheckpointManager(folder, remote=self.url, remote_options=options, **arguments)

    def reader(self, *, endpoint: str | None = None, **options: Any) -> CheckpointManager:
        """Opens the url for reading."""
        return CheckpointManager(self.url, read_only=True, remote_options=self.options(endpoint, **options))

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def objects(self) -> dict[str, int]:
        """Returns the length of every object by its name below the prefix."""
        return self.at(self.prefix)

    def at(self, prefix: str) -> dict[str, int]:
        """Returns the length of every object below a prefix of the same bucket, by its name below it."""
        start = f"{prefix}/" if prefix else ""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=start)
        rows = [row for page in pages for row in page.get("Contents", [])]
        return {row["Key"].removeprefix(start): row["Size"] for row in rows}

    def names(self, start: str = "") -> list[str]:
        """Returns the names of objects below the prefix that start so, in order."""
        return sorted(name for name in self.objects() if name.startswith(start))

    def seqs(self) -> list[int]:
        """Returns the commit numbers of the manifests, in order."""
        found = (re.fullmatch(r"snapshots/(\d+)\.json", name) for name in self.objects())
        return sorted(int(match[1]) for match in found if match)

    def get(self, name: str) -> bytes:
        """Reads an object."""
        return self.client.get_object(Bucket=BUCKET, Key=self._key(name))["Body"].read()

    def put(self, name: str, data: bytes) -> None:
        """Writes an object, whatever lies there."""
        self.client.put_object(Bucket=BUCKET, Key=self._key(name), Body=data)

    def delete(self, name: str) -> None:
        """Deletes an object."""
        self.client.delete_object(Bucket=BUCKET, Key=self._key(name))

    def content(self) -> dict[str, bytes]:
        """Returns every object by its name."""
        return {name: self.get(name) for name in self.names()}

    def uploads(self) -> list[str]:
        """Returns the names of the objects that are being sent in parts."""
        found = self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=self._key(""))
        return sorted(row["Key"].removeprefix(self._key("")) for row in found.get("Uploads", []))

    def download(self, folder: Path) -> Path:
        """Copies what a folder of a repository would have, by boto3 alone: our client has no part in it."""
        for name, data in self.content().items():
            if not name.startswith(BESIDE):
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        return folder

    def check_whole(self, folder: Path) -> list[int]:
        """Asserts that every manifest here has all its packs whole; returns the steps of the snapshots.

        Args:
            folder: An empty folder for the copy that is looked at.
        """
        if "varvite.json" not in self.objects():
            assert self.seqs() == []
            return []
        with CheckpointManager(self.download(folder), read_only=True) as reader:
            report = reader.verify()
            assert report.ok, report.findings
            infos = reader.snapshots()
        assert {info.seq for info in infos} <= set(self.seqs())
        return [info.step for info in infos]

    def close(self) -> None:
        """Closes the client's connections."""
        self.client.close()
