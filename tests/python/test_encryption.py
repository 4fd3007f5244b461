"""Encrypted repositories: where the key comes from, what they show without it, and what a wrong one says."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import document, varvite

from varvite import CheckpointManager
from varvite.encryption import KEY_VARIABLE, read_encryption
from varvite.errors import EncryptionKeyError, InvalidInputError

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
PRINTS = {"command": [sys.executable, "-c", f"print('{KEY.hex()}')"]}


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv("VARVITE_KEY_COMMAND", raising=False)


def save(path: Path, **options: Any) -> None:
    with CheckpointManager(path, fsync=False, **options) as manager:
        state = {"a secret name": torch.arange(5000.0), "text": "a secret text"}
        manager.save_sync(7, state, metrics={"secret_loss": 0.5}, rng=False)


def load(path: Path, **options: Any) -> Any:
    with CheckpointManager(path, read_only=True, **options) as manager:
        assert manager.verify().ok
        return manager.load(7)


def is_right(nest: Any) -> bool:
    return nest["text"] == "a secret text" and bool(torch.equal(nest["a secret name"], torch.arange(5000.0)))


def problem(path: Path, **options: Any) -> EncryptionKeyError:
    with pytest.raises(EncryptionKeyError) as caught, CheckpointManager(path, **options):
        pass
    assert isinstance(caught.value, PermissionError)
    return caught.value


@pytest.mark.parametrize(
    "encryption",
    [True, {"env": "MY_KEY"}, PRINTS, {"key": KEY}],
    ids=["environment", "env", "command", "key"],
)
def test_a_state_comes_back_by_the_key_alone_and_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encryption: Any
) -> None:
    monkeypatch.setenv("MY_KEY", base64.b64encode(KEY).decode())
    with monkeypatch.context() as context:
        context.setenv(KEY_VARIABLE, KEY.hex())
        save(tmp_path, encryption=encryption)
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"secret" not in written
    assert torch.arange(100.0, 104.0).numpy().tobytes() not in written
    assert problem(tmp_path).problem == "missing"
    assert is_right(load(tmp_path, encryption={"key": KEY}))
    # By default the environment is asked.
    monkeypatch.setenv("VARVITE_KEY_COMMAND", f"{sys.executable} -c \"print('{KEY.hex()}')\"")
    assert is_right(load(tmp_path))
    monkeypatch.setenv(KEY_VARIABLE, base64.urlsafe_b64encode(KEY).decode().rstrip("="))
    assert is_right(load(tmp_path))


def test_a_run_resumes_and_merges_under_its_key(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(10_000))
    with CheckpointManager(tmp_path, fsync=False, encryption={"key": KEY}) as manager:
        for step in range(4):
            with torch.no_grad():
                weight += 1
            manager.save(step, {"weight": weight}).wait()
        manager.merge_now()
        manager.pin(2, "kept")
    with CheckpointManager(tmp_path, fsync=False, encryption={"key": KEY}) as manager:
        state = {"weight": torch.zeros(10_000)}
        assert manager.load_into(state, 2).matched == ["weight"]
        assert torch.equal(state["weight"], torch.full((10_000,), 3.0))
        mapped = manager.load(3, mmap=True)["weight"]
        assert torch.equal(mapped, torch.full((10_000,), 4.0))
        assert manager.info("tag:kept").step == 2


def test_what_is_wrong_with_a_key_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "plain")
    save(tmp_path / "encrypted", encryption={"key": KEY})
    found = {
        "missing": problem(tmp_path / "encrypted"),
        "wrong": problem(tmp_path / "encrypted", encryption={"key": OTHER}),
        "plain": problem(tmp_path / "plain", encryption={"key": KEY}),
    }
    assert {name: error.problem for name, error in found.items()} == {name: name for name in found}
    assert "VARVITE_KEY" in str(found["missing"].hint)
    assert found["wrong"].root == str(tmp_path / "encrypted")
    # A key that only lies in the environment asks nothing of a repository in the clear.
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())
    assert is_right(load(tmp_path / "plain"))


def test_a_key_that_can_not_be_got_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    fails = [sys.executable, "-c", "import sys; print('the vault is sealed', file=sys.stderr); sys.exit(3)"]
    for encryption, why in (
        (True, "the variable `VARVITE_KEY` is not set"),
        ({"env": "NO_SUCH"}, "the variable `NO_SUCH` is not set"),
        ({"command": fails}, f"`{sys.executable}` ended with status 3: the vault is sealed"),
        ({"command": ["/no/such/program"]}, "`/no/such/program` can't be run"),
    ):
        error = problem(tmp_path / "new", encryption=encryption)
        assert error.problem == "unavailable"
        assert why in error.message
    assert not (tmp_path / "new" / "varvite.json").exists()


@pytest.mark.parametrize(
    "text", ["", "xyz", KEY.hex()[:-1], KEY[:-1].hex(), base64.b64encode(KEY * 2).decode()]
)
def test_what_is_no_key_is_refused_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("MY_KEY", text or " ")
    with pytest.raises(InvalidInputError) as caught:
        CheckpointManager(tmp_path, encryption={"env": "MY_KEY"})
    assert "the variable `MY_KEY` must hold 32 bytes" in str(caught.value)
    assert len(text) < 4 or text not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        "a-password",
        KEY,
        {},
        {"env": ""},
        {"command": "pass show"},
        {"command": []},
        {"key": KEY[1:]},
        {"other": 1},
        {"env": "A", "command": ["b"]},
    ],
)
def test_an_argument_that_means_nothing_is_refused_and_never_shown(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidInputError, match="invalid encryption: must be") as caught:
        CheckpointManager(tmp_path, encryption=value)
    assert "password" not in str(caught.value)


def test_a_placeholder_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="all of its bytes are the same"):
        CheckpointManager(tmp_path, encryption={"key": bytes(32)})


def test_a_source_does_not_show_the_key() -> None:
    assert KEY.hex() not in repr(read_encryption({"key": KEY}))
    assert repr(KEY) not in repr(read_encryption({"key": KEY}))


def test_ls_without_the_key_shows_what_stands_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, encryption={"key": KEY})
    shown = varvite("ls", tmp_path)
    assert shown.exit_code == 0
    assert "it is encrypted, and no key is given; nothing below is verified" in shown.stderr
    assert "secret" not in shown.stdout
    found = document("ls", tmp_path)
    assert found["encrypted"] is True
    [row] = found["snapshots"]
    assert (row["seq"], row["step"], row["world_size"]) == (1, 7, 1)
    assert row["raw_bytes"] == 20_000
    failed = varvite("show", tmp_path)
    assert failed.exit_code == 1
    assert "hint: set VARVITE_KEY" in failed.stderr
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())
    assert document("ls", tmp_path)["snapshots"][0]["metrics"] == {"secret_loss": 0.5}
    assert json.loads(varvite("verify", tmp_path, "--json").stdout)["ok"] is True
