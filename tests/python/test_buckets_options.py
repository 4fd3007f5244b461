"""What a caller may say of a bucket: urls, options, rates and local folders. No bucket is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from varvite import CheckpointManager
from varvite.buckets import SCHEMES, is_bucket_url, options_of_texts, read_remote, spool_folder
from varvite.errors import InvalidInputError

URL = "s3://bucket/run"
SECRET = "do-not-show"


def engine(options: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Returns what the engine is told."""
    return json.loads(read_remote(URL, options, **{"sync_every": 1, **settings}).text)


def refusal(options: dict[str, Any], **settings: Any) -> InvalidInputError:
    """Returns the error that options are refused with."""
    with pytest.raises(InvalidInputError) as caught:
        read_remote(URL, options, **{"sync_every": 1, **settings})
    return caught.value


def test_what_the_engine_is_told_where_nothing_is_said() -> None:
    assert engine(sync_every=3) == {
        "url": URL,
        "sync_every": 3,
        "diverged": "raise",
        "lease_seconds": 30.0,
        "orphan_hours": 24.0,
        "prune_unpushed": False,
        "takeover": False,
        "limit_bytes_per_second": None,
        "options": {},
    }
    assert engine(is_spooled=True)["diverged"] == "discard"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("endpoint", "http://127.0.0.1:9000", "http://127.0.0.1:9000"),
        ("region", "eu-west-1", "eu-west-1"),
        ("access_key_id", "AKIA", "AKIA"),
        ("secret_access_key", SECRET, SECRET),
        ("session_token", SECRET, SECRET),
        ("profile", "work", "work"),
        ("ca_bundle", Path("/etc/ca.pem"), "/etc/ca.pem"),
        ("anonymous", True, "true"),
        ("virtual_hosted", False, "false"),
        ("single_writer", True, "true"),
        ("part_bytes", 5 << 20, "5242880"),
        ("part_bytes", 1 << 30, "1073741824"),
        ("parallel", 1, "1"),
        ("parallel", 256, "256"),
        ("timeout_seconds", 90, "90.0"),
        ("retry_seconds", 0.5, "0.5"),
        ("aws_request_payer", True, "true"),
        ("google_service_account", "/key.json", "/key.json"),
        ("azure_storage_account_name", "mine", "mine"),
    ],
)
def test_options_of_the_store_reach_it_as_texts(name: str, value: Any, text: str) -> None:
    assert engine({name: value})["options"] == {name: text}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lease_seconds", 5, ("lease_seconds", 5.0)),
        ("orphan_hours", 0.5, ("orphan_hours", 0.5)),
        ("prune_unpushed", True, ("prune_unpushed", True)),
        ("takeover", True, ("takeover", True)),
        ("diverged", "discard", ("diverged", "discard")),
        ("bandwidth", None, ("limit_bytes_per_second", None)),
        ("bandwidth", 1, ("limit_bytes_per_second", 1)),
        ("bandwidth", 2.5e6, ("limit_bytes_per_second", 2_500_000)),
        ("bandwidth", "50MB", ("limit_bytes_per_second", 50_000_000)),
        ("bandwidth", "50MB/s", ("limit_bytes_per_second", 50_000_000)),
        ("bandwidth", "1.5 GiB/s", ("limit_bytes_per_second", 3 << 29)),
        ("bandwidth", "800k", ("limit_bytes_per_second", 800_000)),
    ],
)
def test_options_of_the_engine(name: str, value: Any, told: tuple[str, Any]) -> None:
    found = engine({name: value})
    assert found[told[0]] == told[1]
    assert found["options"] == {}


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        *((name, value, "name of a region") for name, value in [("region", ""), ("region", 3)]),
        ("endpoint", None, "the url of a server"),
        ("anonymous", "true", "True or False"),
        ("virtual_hosted", 1, "True or False"),
        ("takeover", "yes", "True or False"),
        ("prune_unpushed", None, "True or False"),
        ("part_bytes", (5 << 20) - 1, "a whole number from 5242880 to 1073741824"),
        ("part_bytes", (1 << 30) + 1, "a whole number from 5242880 to 1073741824"),
        ("part_bytes", "16MiB", "a whole number"),
        ("parallel", 0, "from 1 to 256"),
        ("parallel", 257, "from 1 to 256"),
        ("parallel", True, "from 1 to 256"),
        ("timeout_seconds", 0, "a number above 0"),
        ("retry_seconds", -1, "a number above 0"),
        ("retry_seconds", float("nan"), "a number above 0"),
        ("lease_seconds", "30", "a number above 0"),
        ("orphan_hours", False, "a number above 0"),
        ("diverged", "keep", "`raise` or `discard`"),
        ("diverged", None, "`raise` or `discard`"),
        ("bandwidth", 0, "bytes in a second"),
        ("bandwidth", 0.5, "bytes in a second"),
        ("bandwidth", -1.0, "bytes in a second"),
        ("bandwidth", float("inf"), "bytes in a second"),
        ("bandwidth", float("nan"), "bytes in a second"),
        ("bandwidth", True, "bytes in a second"),
        ("bandwidth", "fast", "bytes in a second"),
        ("bandwidth", "50 MB per second", "bytes in a second"),
        ("credentials", "a text", "a function that returns"),
        ("spool", "/scratch", "left out where the run has a folder of its own"),
        ("aws_request_payer", None, "a text"),
    ],
)
def test_a_value_that_is_not_legal_is_refused_by_name(name: str, value: Any, legal: str) -> None:
    error = refusal({name: value})
    assert error.what == f'remote_options["{name}"]'
    assert error.reason is not None
    assert legal in error.reason


def test_an_option_that_is_none_lists_those_that_are() -> None:
    for name in ("Region", "secret", 3):
        error = refusal({name: "x"})  # type: ignore[dict-item]
        assert str(error).startswith(f"invalid remote_options `{name}`: must be one of `access_key_id`, ")
        assert "`bandwidth`, `ca_bundle`, `credentials`" in str(error)


@pytest.mark.parametrize(
    "options",
    [
        {"secret_access_key": 7},
        {"session_token": [SECRET]},
        {"access_key_id": {"id": SECRET}},
        {"credentials": {"secret_access_key": SECRET}},
        {"aws_secret_access_key": [SECRET]},
        {"secret_key": SECRET},
    ],
)
def test_no_refusal_shows_a_secret(options: dict[str, Any]) -> None:
    assert SECRET not in str(refusal({"secret_access_key": SECRET, **options}))


def test_a_remote_shows_its_url_alone() -> None:
    remote = read_remote(URL, {"secret_access_key": SECRET}, sync_every=1)
    assert (repr(remote), SECRET in remote.text) == ("Remote('s3://bucket/run')", True)


def test_a_function_that_gives_credentials_is_kept_beside_the_text() -> None:
    def give() -> dict[str, str]:
        return {}

    remote = read_remote(URL, {"credentials": give, "region": "x"}, sync_every=1)
    assert remote.credentials is give
    assert json.loads(remote.text)["options"] == {"region": "x"}
    assert read_remote(URL, None, sync_every=1).credentials is None


def test_options_of_the_caller_are_left_as_they_are() -> None:
    options = {"bandwidth": "1MB", "spool": "/scratch"}
    read_remote(URL, options, sync_every=1, is_spooled=True)
    assert options == {"bandwidth": "1MB", "spool": "/scratch"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_urls_of_buckets(scheme: str) -> None:
    for url in (f"{scheme}://bucket", f"{scheme}://bucket/", f"{scheme}://bucket/a b/c&d+é"):
        assert is_bucket_url(url)
        assert read_remote(url, None, sync_every=1).url == url


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///run",
        "s3:bucket/run",
        "bucket/run",
        "http://host/bucket",
        "file:///run",
        "s3://bucket/run?version=1",
        "s3://bucket/run#1",
        "s3://bucket/\0",
        "s3://[bucket/run",
        "",
        None,
        Path("s3://bucket/run"),
    ],
)
def test_what_is_no_url_of_a_bucket(url: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be the url of a bucket: s3://, gs:// or az://"):
        read_remote(url, None, sync_every=1)


def test_a_url_holds_no_credentials_and_is_not_repeated() -> None:
    with pytest.raises(InvalidInputError, match="must hold no credentials") as caught:
        read_remote(f"s3://AKIA:{SECRET}@bucket/run", None, sync_every=1)
    assert SECRET not in str(caught.value)


def test_the_folder_of_a_run_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    found = spool_folder("s3://bucket/team a/run 7", None)
    assert found.parent == Path("/home/me/.cache/varvite")
    assert found.name.startswith("bucket-run-7-")
    assert found == spool_folder("s3://bucket/team a/run 7/", None)
    assert found != spool_folder("s3://bucket/team b/run 7", None)
    assert found != spool_folder("gs://bucket/team a/run 7", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert spool_folder("s3://bucket/run", {}).parent == Path("/scratch/cache/varvite")
    assert spool_folder("s3://bucket/run", {"spool": "~/spool"}) == Path("/home/me/spool")


@pytest.mark.parametrize("url", ["s3://b/..", "s3://b/" + "x" * 5000, "s3://b/\n\x1b[31m", "s3://b"])
def test_the_folder_of_any_url_is_one_legal_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    found = spool_folder(url, None)
    assert found.parent == Path("/cache/varvite")
    assert 0 < len(found.name) < 110
    assert found.name.isprintable()


@pytest.mark.parametrize("spool", ["", 3, ["a"]])
def test_a_spool_is_a_folder(spool: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be a folder"):
        spool_folder(URL, {"spool": spool})


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        ([], {}),
        (["region=eu", "region=us"], {"region": "us"}),
        (["endpoint=http://h:1/?a=b"], {"endpoint": "http://h:1/?a=b"}),
        (["anonymous=TRUE", "takeover=false"], {"anonymous": True, "takeover": False}),
        (["part_bytes=16MiB", "parallel=4"], {"part_bytes": 16 << 20, "parallel": 4}),
        (["lease_seconds=2.5", "retry_seconds=3"], {"lease_seconds": 2.5, "retry_seconds": 3.0}),
        (["bandwidth=50MB"], {"bandwidth": "50MB"}),
        (["aws_request_payer=true"], {"aws_request_payer": "true"}),
    ],
)
def test_options_of_a_command_line(texts: list[str], options: dict[str, Any]) -> None:
    assert options_of_texts(texts) == options
    read_remote(URL, options, sync_every=1)


@pytest.mark.parametrize(
    "text", ["anonymous=perhaps", "parallel=many", "part_bytes=0", "lease_seconds=soon", "diverged=x", "a=b"]
)
def test_options_of_a_command_line_that_mean_nothing(text: str) -> None:
    with pytest.raises(InvalidInputError, match=text.partition("=")[0]):
        read_remote(URL, options_of_texts([text]), sync_every=1)


@pytest.mark.parametrize("text", [SECRET, f"={SECRET}", f"credentials={SECRET}"])
def test_a_text_without_a_name_is_not_shown(text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        options_of_texts([text])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "arguments", "what"),
    [
        ("run", {"remote": "run"}, "remote"),
        ("run", {"remote": URL, "remote_options": {"color": 1}}, "remote_options"),
        ("run", {"remote": URL, "remote_options": "x"}, "remote_options"),
        ("run", {"remote_options": {"region": "x"}}, "remote_options"),
        ("run", {"remote": URL, "sync_every": 0}, "sync_every"),
        ("run", {"remote": URL, "sync_every": True}, "sync_every"),
        (URL, {"remote": URL}, "remote"),
        ("s3://", {}, "remote"),
    ],
)
def test_a_manager_refuses_them_before_it_makes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, arguments: dict[str, Any], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError) as caught:
        CheckpointManager(path, **arguments)
    assert caught.value.what == what
    assert list(tmp_path.iterdir()) == []
