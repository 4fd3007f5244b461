"""Buckets as a caller names them: the url, the options, and the local folder of a run that lives in one."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from varvite.errors import InvalidInputError
from varvite.plain import type_name
from varvite.sizes import parse_bytes

__all__ = ["SCHEMES", "Remote", "is_bucket_url", "options_of_texts", "read_remote", "spool_folder"]

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "adl", "azure")
"""Schemes of the urls of buckets."""

_TEXTS = {
    "endpoint": "the url of a server, such as http://127.0.0.1:9000",
    "region": "the name of a region",
    "access_key_id": "a text",
    "secret_access_key": "a text",
    "session_token": "a text",
    "profile": "the name of a profile in ~/.aws/config",
    "ca_bundle": "the path of a file of PEM certificates",
}
_SWITCHES = ("anonymous", "single_writer", "virtual_hosted")
_COUNTS = {"part_bytes": (5 << 20, 1 << 30), "parallel": (1, 256)}
_SECONDS = ("timeout_seconds", "retry_seconds")
_ENGINE_SECONDS = {"lease_seconds": 30.0, "orphan_hours": 24.0}
_ENGINE_SWITCHES = ("prune_unpushed", "takeover")
_DIVERGED = ("raise", "discard")

_LEGAL_OPTIONS = sorted(
    {*_TEXTS, *_SWITCHES, *_COUNTS, *_SECONDS, *_ENGINE_SECONDS, *_ENGINE_SWITCHES}
    | {"bandwidth", "credentials", "diverged", "spool"}
)


@dataclass(frozen=True)
class Remote:
    """A bucket, and how it is talked to.

    Attributes:
        url: The url as the caller gave it.
        text: All that the engine needs to know, as JSON. It may hold secrets.
        credentials: Gives credentials when they are needed, or `None` for the usual places.
        options: The options as the caller gave them, to open the bucket again.
        is_spooled: Whether the bucket is the repository, and the folder only its spool.
    """

    url: str
    text: str
    credentials: Callable[[], Mapping[str, Any]] | None
    options: Mapping[str, Any]
    is_spooled: bool

    def __repr__(self) -> str:
        """Returns the url, and no secret."""
        return f"Remote({self.url!r})"


def is_bucket_url(path: object) -> bool:
    """Whether a path is the url of a bucket.

    Example:
        >>> is_bucket_url("s3://bucket/run"), is_bucket_url("runs/demo")
        (True, False)
    """
    return isinstance(path, str) and "://" in path and path.partition("://")[0].lower() in SCHEMES


def read_remote(
    url: str, options: Mapping[str, Any] | None, *, sync_every: int, is_spooled: bool = False
) -> Remote:
    """Checks the url and the options of a bucket.

    Args:
        url: Such as `s3://bucket/prefix`.
        options: The caller's `remote_options`.
        sync_every: Commits between two pushes.
        is_spooled: Whether the bucket is the repository and the folder only its spool.

    Raises:
        InvalidInputError: The url names no bucket, or an option is not legal; the message lists what is.
    """
    _check_url(url)
    given = dict(options or {})
    credentials = given.pop("credentials", None)
    if credentials is not None and not callable(credentials):
        # Not shown: somebody may have given the keys themselves.
        legal = "a function that returns access_key_id and secret_access_key"
        raise _refuse("credentials", type_name(credentials), legal)
    spool = given.pop("spool", None)
    if spool is not None and not is_spooled:
        raise _refuse("spool", spool, "left out where the run has a folder of its own")
    engine: dict[str, Any] = {"url": url, "sync_every": sync_every}
    engine["diverged"] = given.pop("diverged", "discard" if is_spooled else "raise")
    if engine["diverged"] not in _DIVERGED:
        raise _refuse("diverged", engine["diverged"], "`raise` or `discard`")
    for name, default in _ENGINE_SECONDS.items():
        engine[name] = _seconds(name, given.pop(name, default))
    for name in _ENGINE_SWITCHES:
        engine[name] = _switch(name, given.pop(name, False))
    engine["limit_bytes_per_second"] = _rate(given.pop("bandwidth", None))
    engine["options"] = {name: _option(name, value) for name, value in given.items()}
    return Remote(
        url=url,
        text=json.dumps(engine),
        credentials=credentials,
        options=dict(options or {}),
        is_spooled=is_spooled,
    )


def options_of_texts(texts: Iterable[str]) -> dict[str, Any]:
    """Returns options that were written as `NAME=VALUE`, as on a command line.

    Raises:
        InvalidInputError: One has no `=`, names an option that only a program can give, or its value can't be
            read. What else is not legal `read_remote` finds.

    Example:
        >>> options_of_texts(["region=eu-west-1", "parallel=4", "anonymous=true", "part_bytes=32MiB"])
        {'region': 'eu-west-1', 'parallel': 4, 'anonymous': True, 'part_bytes': 33554432}
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            # The text may be a secret whose name was forgotten.
            reason = "must be NAME=VALUE, such as region=eu-west-1"
            raise InvalidInputError(f"invalid option of a bucket: {reason}", what="option", reason=reason)
        options[name] = _value_of_text(name, value)
    return options


def spool_folder(url: str, options: Mapping[str, Any] | None) -> Path:
    """Returns the local folder of a run in a bucket: `spool` of the options, else one in the cache.

    It is the same for the same url, so that a restart on this machine finds what was not pushed yet.

    Raises:
        InvalidInputError: `spool` is no path.

    Example:
        >>> spool_folder("s3://bucket/run", {"spool": "/scratch/run"})
        PosixPath('/scratch/run')
    """
    given = (options or {}).get("spool")
    if given is not None:
        if not isinstance(given, str | os.PathLike) or not os.fspath(given):
            raise _refuse("spool", given, "a folder")
        return Path(given).expanduser().absolute()
    parts = urlsplit(url)
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{parts.netloc}-{parts.path.rstrip('/').rpartition('/')[2]}")
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:12]
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "varvite" / f"{last.strip('-.')[:80]}-{digest}"


def _value_of_text(name: str, text: str) -> Any:
    if name == "credentials":
        raise _refuse_name(name)
    if name in (*_SWITCHES, *_ENGINE_SWITCHES):
        return {"true": True, "false": False}.get(text.lower(), text)
    if name in _COUNTS:
        return parse_bytes(text) or text
    if name in (*_SECONDS, *_ENGINE_SECONDS):
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _check_url(url: object) -> None:
    if not isinstance(url, str) or not is_bucket_url(url) or "\0" in url:
        raise _refuse_url(url)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _refuse_url(url) from error
    if parts.username is not None:
        # The url is shown in messages, so it must not be repeated here.
        reason = "must hold no credentials: they belong in the environment or in remote_options"
        raise InvalidInputError(f"invalid remote: {reason}", what="remote", reason=reason)
    if not parts.netloc or parts.query or parts.fragment:
        raise _refuse_url(url)


def _refuse_url(url: object) -> InvalidInputError:
    reason = "must be the url of a bucket: s3://, gs:// or az://, a name, and a prefix"
    return InvalidInputError(f"invalid remote `{url}`: {reason}", what="remote", reason=reason)


def _option(name: str, value: Any) -> str:
    """One option of the store as text, which is what the engine reads."""
    if name in _TEXTS:
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            raise _refuse(name, "..." if "key" in name or "token" in name else value, _TEXTS[name])
        return str(os.fspath(value))
    if name in _SWITCHES:
        return "true" if _switch(name, value) else "false"
    if name in _COUNTS:
        least, most = _COUNTS[name]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= most:
            raise _refuse(name, value, f"a whole number from {least} to {most}")
        return str(value)
    if name in _SECONDS:
        return str(_seconds(name, value))
    if isinstance(name, str) and name.lower().startswith(("aws_", "google_", "azure_")):
        if not isinstance(value, str | int | float):
            raise _refuse(name, type_name(value), "a text")
        return str(value).lower() if isinstance(value, bool) else str(value)
    raise _refuse_name(name)


def _seconds(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < 1e9:
        raise _refuse(name, value, "a number above 0")
    return float(value)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def _rate(value: Any) -> int | None:
    """Bytes in a second."""
    if value is None:
        return None
    whole = int(value) if isinstance(value, float) and 1 <= value < 2**62 else value
    rate = parse_bytes(whole.removesuffix("/s") if isinstance(whole, str) else whole)
    if rate is None:
        raise _refuse("bandwidth", value, "bytes in a second: a number, or a text such as `50MB`")
    return rate


def _refuse(name: str, value: object, reason: str) -> InvalidInputError:
    what = f'remote_options["{name}"]'
    return InvalidInputError(
        f"invalid {what} `{value}`: must be {reason}", what=what, reason=f"must be {reason}"
    )


def _refuse_name(name: str) -> InvalidInputError:
    legal = ", ".join(f"`{known}`" for known in _LEGAL_OPTIONS)
    reason = f"must be one of {legal}, or a name that starts with `aws_`, `google_` or `azure_`"
    return InvalidInputError(
        f"invalid remote_options `{name}`: {reason}", what="remote_options", reason=reason
    )
