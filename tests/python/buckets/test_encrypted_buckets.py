"""An encrypted repository in a bucket: as any other with the key, and of no use without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from commands import document, varvite
from looks import assert_loads, assert_pushed, ours_in, save_steps

from varvite import CheckpointManager
from varvite.encryption import KEY_VARIABLE
from varvite.errors import EncryptionKeyError

if TYPE_CHECKING:
    from bucket import Bucket

KEY = bytes(range(32))
ENCRYPTED = {"encryption": {"key": KEY}}


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_a_bucket_holds_what_the_folder_holds_and_another_machine_needs_the_key_alone(
    bucket: Bucket, tmp_path: Path
) -> None:
    with bucket.manager(tmp_path / "a", **ENCRYPTED) as manager:
        save_steps(manager, 0, 1, 2)
        manager.pin(1, "kept")
        manager.merge_now()
        manager.delete(0)
        report = manager.sync_now()
        assert report.pending_objects == 0
        assert_pushed(bucket, tmp_path / "a")
    assert all(data.startswith(b"VVEO") for name, data in ours_in(bucket).items() if "/" in name)
    with bucket.manager(tmp_path / "b", **ENCRYPTED) as manager:
        assert_loads(manager, 1, 2)
        assert manager.verify().ok
        assert manager.info("tag:kept").step == 1
        save_steps(manager, 3)
        manager.sync_now()
    with pytest.raises(EncryptionKeyError, match="no key is given"):
        bucket.manager(tmp_path / "c")
    wrong = {"encryption": {"key": KEY[::-1]}}
    with pytest.raises(EncryptionKeyError, match="another key"):
        bucket.manager(tmp_path / "d", **wrong)


def test_the_command_line_moves_it_by_the_key_of_the_environment(
    quick_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quick_bucket.manager(tmp_path / "a", **ENCRYPTED) as manager:
        save_steps(manager, 0, 1)
    at = [word for name, value in quick_bucket.options().items() for word in ("-o", f"{name}={value!s}")]
    shown = document("ls", quick_bucket.url, *at)
    assert (shown["encrypted"], [row["step"] for row in shown["snapshots"]]) == (True, [0, 1])
    failed = varvite("pull", quick_bucket.url, tmp_path / "copy", *at)
    assert (failed.exit_code, "VARVITE_KEY" in failed.stderr) == (1, True)
    assert not (tmp_path / "copy").exists()
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())
    done = varvite("pull", quick_bucket.url, tmp_path / "copy", "--all", *at)
    assert done.exit_code == 0, done.stderr
    with CheckpointManager(tmp_path / "copy", read_only=True) as reader:
        assert_loads(reader, 0, 1)
        assert reader.verify().ok
