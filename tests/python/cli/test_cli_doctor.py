"""`varvite doctor`."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import damage, document, tree, varvite

from varvite import CheckpointManager, errors
from varvite.cli import exits


def checks(path: Path, code: int = 0) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in document("doctor", path, code=code)["checks"]}


def test_doctor_measures_a_new_folder_and_leaves_nothing(tmp_path: Path) -> None:
    found = checks(tmp_path / "not" / "yet")
    assert found["folder"]["facts"] == {"exists": False}
    assert found["sync time"]["facts"]["median_seconds"] > 0
    assert found["write rate"]["facts"]["bytes_per_second"] > 0
    assert found["free space"]["facts"]["free_bytes"] > 0
    assert [found[name]["value"] for name in ("rename without replacing", "hard link", "flock")] == [
        "works"
    ] * 3
    assert (
        found["torch"]["value"] == torch.__version__.partition("+")[0]
        or found["torch"]["value"] == torch.__version__
    )
    assert found["repository"]["value"] == "none yet"
    assert list(tmp_path.iterdir()) == []


def test_doctor_knows_a_folder_that_the_first_save_would_refuse(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    found = checks(tmp_path)["repository"]
    assert (found["verdict"], "notes.txt" in found["meaning"]) == ("warn", True)
    with pytest.raises(errors.NotARepositoryError):
        CheckpointManager(tmp_path)


def test_doctor_tells_of_the_writer_and_of_leftovers(run: Path) -> None:
    with CheckpointManager(run):
        before = tree(run)
        writer = checks(run)["writer"]
        assert (writer["facts"]["is_held"], f"process {os.getpid()} on " in writer["value"]) == (True, True)
        assert tree(run) == before
    assert checks(run)["writer"]["value"] == "none"
    (run / "writer.lock").write_text("process 1 on host since 1700000000000 (unix milliseconds)")
    (run / "tmp" / "1-00-5.pack").write_bytes(b"x" * 2000)
    found = checks(run)
    assert found["writer"]["value"] == "none; the last was process 1 on host since 2023-11-14T22:13:20Z"
    assert (found["staged files"]["verdict"], found["staged files"]["value"]) == ("warn", "1, 2.00 kB")


def test_doctor_finds_damaged_manifests(run: Path) -> None:
    damage(run / "snapshots" / "3.json", 40)
    found = checks(run, code=exits.FINDINGS)["snapshots"]
    assert (found["verdict"], [row["seq"] for row in found["facts"]["damaged"]]) == ("bad", [3])
    quiet = varvite("doctor", run, "-q")
    assert quiet.exit_code == exits.FINDINGS
    assert "3 readable, 1 damaged" in quiet.stdout


def test_doctor_says_when_a_lock_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varvite.doctor.probes.fcntl.flock", lambda *_: None)
    found = checks(tmp_path, code=exits.FINDINGS)["flock"]
    assert (found["verdict"], found["value"]) == ("bad", "it let two writers in")


def test_doctor_accepts_links_where_rename_is_not_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("varvite.doctor.probes._rename_if_absent", lambda *_: errno.EINVAL)
    found = checks(tmp_path)["rename without replacing"]
    assert (found["verdict"], found["meaning"]) == ("warn", "hard links are used instead")
    monkeypatch.setattr("varvite.doctor.probes.probe_hard_link", lambda _: "not supported")
    monkeypatch.setattr("varvite.doctor.folder.probe_hard_link", lambda _: "not supported: no")
    assert checks(tmp_path, code=exits.FINDINGS)["hard link"]["verdict"] == "bad"


@pytest.mark.parametrize(
    ("kind", "options", "place", "verdict"),
    [
        ("nfs4", "rw,vers=4.2", "network", "ok"),
        ("nfs", "rw,nolock", "network", "warn"),
        ("fuse.sshfs", "rw", "user space", "warn"),
        ("tmpfs", "rw", "memory", "warn"),
        ("overlay", "rw", "container layer", "warn"),
        ("xfs", "rw", "local disk", "ok"),
        ("ext3", "rw", "local disk", "ok"),
        ("newfs", "rw", "unknown", "warn"),
    ],
)
def test_the_mount_table_tells_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: str, place: str, verdict: str
) -> None:
    from varvite.doctor import filesystem

    folder = tmp_path / "a b"
    folder.mkdir()
    table = (
        "1 0 8:1 / / rw - ext4 /dev/root rw\n"
        f"2 1 0:9 / {str(folder).replace(' ', chr(92) + '040')} rw shared:1 - {kind} source {options}\n"
        f"3 1 0:8 / {folder.parent}/a rw - xfs other rw\n"
    )
    monkeypatch.setattr(filesystem.Path, "read_text", lambda *_: table)
    monkeypatch.setattr(filesystem, "_magic_number", lambda _: 0)
    found = filesystem.describe_file_system(folder)
    assert (found.kind, found.place, found.verdict, found.mount_point) == (kind, place, verdict, str(folder))


def test_the_kernel_decides_where_the_mount_table_disagrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from varvite.doctor import filesystem

    monkeypatch.setattr(filesystem.Path, "read_text", lambda *_: "1 0 8:1 / / rw - ext4 /dev/root rw\n")
    monkeypatch.setattr(filesystem, "_magic_number", lambda _: 0x6969)
    assert filesystem.describe_file_system(tmp_path).kind == "nfs"
    monkeypatch.setattr(filesystem, "_magic_number", lambda _: 0xEF53)
    assert filesystem.describe_file_system(tmp_path).kind == "ext4"


def test_a_mount_beside_a_folder_does_not_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from varvite.doctor import filesystem

    (tmp_path / "abc").mkdir()
    table = f"1 0 8:1 / / rw - ext4 /dev/root rw\n2 1 0:9 / {tmp_path}/ab rw - nfs4 source rw\n"
    monkeypatch.setattr(filesystem.Path, "read_text", lambda *_: table)
    monkeypatch.setattr(filesystem, "_magic_number", lambda _: 0)
    assert filesystem.describe_file_system(tmp_path / "abc").kind == "ext4"
