"""Damaged repositories: never a wrong value in silence; `latest` falls back and says so, the rest raises."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import assert_same, files_of, flip, manifests, packs

from varvite import CheckpointManager
from varvite.errors import (
    CheckpointError,
    CorruptionError,
    NotARepositoryError,
    SnapshotNotFoundError,
    StoreError,
    UnsupportedFormatError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Damage = Callable[[Path], None]

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
HEADER_BYTES = 64
TRAILER_BYTES = 64


def state(step: int) -> dict[str, Any]:
    generator = np.random.default_rng(step)
    return {
        "w": generator.standard_normal(3000),
        "small": generator.integers(0, 255, 100, dtype=np.uint8),
        "step": step,
        "text": ["a", None, 1.5],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two snapshots that share no chunk, so that each pack is needed by one."""
    with CheckpointManager(tmp_path, chunk_bytes=4096) as manager:
        for step in (1, 2):
            manager.save_sync(
                step, state(step), rng=False, metrics={"loss": 0.5 / step}, metadata={"s": step}
            )
    return tmp_path


def open_reader(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, read_only=True)


def names_newest(name: str) -> bool:
    """True for the key, or the path, of an object of the newest snapshot."""
    return "/packs/2-r0-" in f"/{name}" or f"/{name}".endswith("/snapshots/2.json")


def check_never_wrong(folder: Path) -> str:
    """Reads a repository whose newest snapshot may be damaged; returns `same` or `noticed`.

    Whatever is loaded is right; what can't be loaded raises an error that names the object; `latest`
    gives the older snapshot then and says what it skipped.
    """
    with open_reader(folder) as reader:
        try:
            assert_same(dict(reader.load("seq:2")), state(2))
        except (CorruptionError, StoreError, UnsupportedFormatError) as error:
            caught_object = error.object
        else:
            return "same"
        assert names_newest(caught_object)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loaded = reader.load()
            except UnsupportedFormatError:
                return "noticed"
        assert_same(dict(loaded), state(1))
        assert [str(one.message)[:31] for one in caught] == ["snapshot 2 can't be used, going"]
        report = reader.verify()
        assert not report.ok
        assert any(names_newest(finding.object) for finding in report.findings)
        assert_same(dict(reader.load("seq:1")), state(1))
    return "noticed"


# Packs


def pack_fields() -> list[tuple[str, int, str]]:
    """Fields of header and trailer, and of the footer's frame (FORMAT.md, "Pack"), each by one byte."""
    header = {"magic": 0, "version": 4, "flags": 6, "repository": 8, "session": 24, "seq": 40, "rank": 48}
    header |= {"kind": 52, "reserved": 53, "checksum": 56}
    footer = {"magic": 0, "version": 4, "flags": 6, "chunk count": 8, "table length": 16, "encoding": 24}
    footer |= {"reserved": 28, "part length": 32, "reserved 2": 40, "table": 64, "part": 700}
    trailer = {
        "footer offset": 0,
        "footer length": 8,
        "footer digest": 16,
        "reserved": 32,
        "checksum": 48,
        "magic": 56,
    }
    places = [("header", offset, name) for name, offset in header.items()]
    places += [("footer", offset, name) for name, offset in footer.items()]
    return places + [("trailer", offset, name) for name, offset in trailer.items()]


def footer_offset(pack: Path) -> int:
    return int.from_bytes(pack.read_bytes()[-TRAILER_BYTES:][:8], "little")


@pytest.mark.parametrize(("part", "offset", "field"), pack_fields(), ids=str)
def test_a_flipped_byte_of_a_packs_frame_is_found_by_verify_and_harms_no_load(folder, part, offset, field):
    pack = packs(folder)[1]
    start = {"header": 0, "footer": footer_offset(pack), "trailer": pack.stat().st_size - TRAILER_BYTES}[part]
    flip(pack, start + offset, bit=2)
    # A load needs no more than the manifest; what is around the chunks is for recovery.
    with open_reader(folder) as reader:
        assert_same(dict(reader.load(2)), state(2))
        report = reader.verify()
    assert not report.ok
    assert {finding.object for finding in report.findings} == {f"packs/{pack.name}"}
    assert {tuple(finding.steps) for finding in report.findings} == {(2,)}
    assert f"`packs/{pack.name}` at byte " in str(report)


def test_a_flipped_byte_anywhere_in_a_payload_names_pack_and_offset(folder):
    pack = packs(folder)[1]
    original = pack.read_bytes()
    payload = np.random.default_rng(2).standard_normal(3000).tobytes()
    # Chunks of 4,096 bytes may lie apart from one another: find where each one starts.
    chunks = [payload[start : start + 4096] for start in range(0, len(payload), 4096)]
    starts = [original.index(chunk) for chunk in chunks]
    rng = random.Random(4)
    for start, chunk in zip(starts, chunks, strict=True):
        for place in {0, len(chunk) - 1, rng.randrange(len(chunk))}:
            flip(pack, start + place, bit=rng.randrange(8))
            with open_reader(folder) as reader, pytest.raises(CorruptionError) as caught:
                reader.load(2)
            assert caught.value.object == f"packs/{pack.name}"
            assert caught.value.offset_bytes == start
            assert "`w`" in str(caught.value)
            assert "varvite verify" in caught.value.hint
            assert check_never_wrong(folder) == "noticed"
            pack.write_bytes(original)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("how", ["truncate", "zero", "lengthen"])
def test_a_pack_that_lost_its_end_is_noticed(folder, how, share):
    pack = packs(folder)[1]
    data = pack.read_bytes()
    kept = int(len(data) * share)
    pack.write_bytes(
        {"truncate": data[:kept], "zero": data[:kept] + bytes(len(data) - kept), "lengthen": data + b"\0"}[
            how
        ]
    )
    with open_reader(folder) as reader:
        assert not reader.verify().ok
    outcome = check_never_wrong(folder)
    if share < 0.9 and how != "lengthen":
        assert outcome == "noticed"


def make_directory(pack: Path) -> None:
    pack.unlink()
    pack.mkdir()


def make_fifo(pack: Path) -> None:
    pack.unlink()
    os.mkfifo(pack)


def make_link(pack: Path) -> None:
    pack.rename(pack.with_name("elsewhere"))
    pack.symlink_to(pack.with_name("elsewhere"))


def make_loop(pack: Path) -> None:
    pack.unlink()
    pack.symlink_to(pack)


@pytest.mark.parametrize(
    "damage",
    [os.unlink, make_directory, make_fifo, make_link, make_loop],
    ids=["missing", "directory", "fifo", "link", "loop"],
)
def test_what_stands_in_place_of_a_pack_is_noticed_and_never_waited_for(folder, damage):
    damage(packs(folder)[1])
    assert check_never_wrong(folder) == "noticed"
    with CheckpointManager(folder) as manager:  # a writer recovers and goes on
        assert manager.save_sync(3, state(3), rng=False).seq == 3
        assert_same(dict(manager.load()), state(3))


def test_swapped_packs_are_noticed(folder):
    first, second = packs(folder)
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    with open_reader(folder) as reader:
        for ref in ("seq:1", "seq:2"):
            with pytest.raises(CorruptionError):
                reader.load(ref)
        with pytest.warns(RuntimeWarning), pytest.raises(CorruptionError) as caught:
            reader.load_latest()
        assert [seq for seq, _ in caught.value.skipped] == [2, 1]
        assert len({finding.object for finding in reader.verify().findings}) == 2


# Manifests


def header_fields(manifest: Path) -> dict[str, int]:
    """Where the value of each field of the header line starts."""
    line = manifest.read_bytes().split(b"\n", 1)[0]
    return {name: line.index(f'"{name}":'.encode()) + len(name) + 3 for name in json.loads(line)}


def test_a_flipped_byte_at_each_field_of_a_manifest_is_noticed(folder):
    manifest = manifests(folder)[1]
    original = manifest.read_bytes()
    fields = header_fields(manifest)
    assert {"magic", "format_version", "seq", "step", "metrics", "body", "header_digest"} <= set(fields)
    for name, offset in fields.items():
        for bit in (0, 6):
            flip(manifest, offset, bit)
            assert check_never_wrong(folder) == "noticed", name
            manifest.write_bytes(original)


def test_a_flipped_byte_anywhere_in_a_manifest_is_noticed(folder):
    manifest = manifests(folder)[1]
    original = manifest.read_bytes()
    rng = random.Random(5)
    for offset in {len(original) - 1, *rng.sample(range(len(original)), 40)}:
        flip(manifest, offset, rng.randrange(8))
        assert check_never_wrong(folder) == "noticed", offset
        manifest.write_bytes(original)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("how", ["truncate", "zero"])
def test_a_manifest_that_lost_its_end_is_noticed(folder, how, share):
    manifest = manifests(folder)[1]
    data = manifest.read_bytes()
    kept = int(len(data) * share)
    manifest.write_bytes(data[:kept] if how == "truncate" else data[:kept] + bytes(len(data) - kept))
    assert check_never_wrong(folder) == "noticed"
    with open_reader(folder) as reader:
        if kept <= data.index(b"\n"):  # else the header line is whole, and a list reads no more
            with pytest.warns(RuntimeWarning, match="snapshot 2 can't be listed"):
                assert [info.step for info in reader.snapshots()] == [1]
        with pytest.raises(CorruptionError) as caught:
            reader.info("seq:2")
        assert caught.value.object == "snapshots/2.json"


@pytest.mark.parametrize("damage", [make_fifo, make_link, make_loop], ids=["fifo", "link", "loop"])
def test_what_stands_in_place_of_a_manifest_is_noticed(folder, damage):
    damage(manifests(folder)[1])
    assert check_never_wrong(folder) == "noticed"


def test_swapped_manifests_are_noticed(folder):
    first, second = manifests(folder)
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    with open_reader(folder) as reader:
        for ref in ("seq:1", "seq:2"):
            with pytest.raises(CorruptionError, match="seq"):
                reader.load(ref)


def test_a_deleted_newest_manifest_is_rebuilt_from_its_pack_by_the_next_writer(folder):
    manifests(folder)[1].unlink()
    with open_reader(folder) as reader:
        assert_same(dict(reader.load()), state(1))
        with pytest.raises(SnapshotNotFoundError):
            reader.load("seq:2")
    with CheckpointManager(folder) as manager:
        info = manager.info("latest")
        assert (info.seq, info.step, info.metrics, info.metadata) == (2, 2, {"loss": 0.25}, {"s": 2})
        assert_same(dict(manager.load()), state(2))


def test_a_deleted_older_manifest_is_no_damage_of_the_others(folder):
    manifests(folder)[0].unlink()
    with CheckpointManager(folder) as manager:
        assert [info.seq for info in manager.snapshots()] == [2]
        assert_same(dict(manager.load()), state(2))
        assert manager.verify().ok


def test_a_damaged_snapshot_is_neither_deleted_nor_built_upon_by_the_next_run(folder):
    flip(packs(folder)[1], HEADER_BYTES + 5000, bit=1)
    damaged = packs(folder)[1].read_bytes()
    with CheckpointManager(folder, chunk_bytes=4096) as manager:
        info = manager.save_sync(3, state(2), rng=False)
        assert_same(dict(manager.load(3)), state(2))
        assert manager.verify(3).ok
        assert info.stored_bytes > 4096
    assert packs(folder)[1].read_bytes() == damaged


# Marker and tags


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 200, b'{"magic":"varvite-repository"}\n'])
def test_a_damaged_marker_harms_no_snapshot(folder, content):
    (folder / "varvite.json").write_bytes(content)
    with open_reader(folder) as reader:
        assert_same(dict(reader.load()), state(2))
        assert [finding.object for finding in reader.verify().findings] == ["varvite.json"]
    with CheckpointManager(folder) as manager:
        assert manager.save_sync(3, state(3), rng=False).seq == 3
        assert manager.verify().ok


def test_a_damaged_marker_of_an_empty_repository_is_an_error(tmp_path):
    CheckpointManager(tmp_path).close()
    (tmp_path / "varvite.json").write_bytes(b"")
    for read_only in (True, False):
        with pytest.raises(CorruptionError) as caught:
            CheckpointManager(tmp_path, read_only=read_only)
        assert caught.value.object == "varvite.json"


def test_a_damaged_tag_keeps_nothing_from_being_read_and_retention_from_deleting(folder):
    from varvite import keep

    with CheckpointManager(folder) as manager:
        manager.pin(1, "start")
    flip(folder / "tags" / "start", 40)
    with open_reader(folder) as reader:
        with pytest.warns(RuntimeWarning, match="names of snapshots can't be read") as caught:
            assert_same(dict(reader.load()), state(2))
        assert [one.filename for one in caught] == [__file__]
        with pytest.warns(RuntimeWarning):
            assert [info.step for info in reader.snapshots()] == [1, 2]
        with pytest.raises(CorruptionError) as error:
            reader.load("tag:start")
        assert error.value.object == "tags/start"
        assert [finding.object for finding in reader.verify().findings] == ["tags/start"]
    with CheckpointManager(folder, keep=keep.last(1)) as manager:
        with pytest.warns(RuntimeWarning):
            manager.save_sync(3, state(3))
        with pytest.warns(RuntimeWarning):
            assert [info.step for info in manager.snapshots()] == [1, 2, 3]


# What is no damage, and folders of others


def test_a_snapshot_of_a_newer_format_is_refused_by_name_and_never_passed_over(tmp_path):
    shutil.copytree(GOLDEN / "repository", tmp_path, dirs_exist_ok=True)
    shutil.copy(GOLDEN / "future.json", tmp_path / "snapshots" / "2.json")
    with open_reader(tmp_path) as reader:
        for ref in ("latest", "seq:2"):
            with pytest.raises(UnsupportedFormatError) as caught:
                reader.load(ref)
            assert caught.value.object == "snapshots/2.json"
            assert "upgrade Varvite" in caught.value.hint
            assert isinstance(caught.value, NotImplementedError)


def test_files_of_another_program_are_never_touched(folder):
    strangers = ["packs/notes.txt", "packs/1-r0-XYZ.pack", "snapshots/01.json", "snapshots/x", "tags/.hidden"]
    for name in strangers:
        (folder / name).write_text("mine")
    (folder / "packs" / "sub").mkdir()
    with CheckpointManager(folder) as manager:
        manager.save_sync(3, state(3))
        manager.delete(1)
        assert [info.step for info in manager.snapshots()] == [2, 3]
        assert manager.verify().ok
    assert all((folder / name).read_text() == "mine" for name in strangers)
    assert (folder / "packs" / "sub").is_dir()


def test_a_folder_of_another_program_is_refused_and_left_alone(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"weights")
    before = files_of(tmp_path)
    for read_only in (True, False):
        with pytest.raises(NotARepositoryError) as caught:
            CheckpointManager(tmp_path, read_only=read_only)
        assert caught.value.root == str(tmp_path)
    assert files_of(tmp_path) == before


def test_reading_a_folder_that_is_not_there_makes_none(tmp_path):
    for path in (tmp_path / "missing", tmp_path / "empty"):
        if path.name == "empty":
            path.mkdir()
        with pytest.raises(NotARepositoryError) as caught:
            CheckpointManager(path, read_only=True)
        assert isinstance(caught.value, FileNotFoundError)
    assert not (tmp_path / "missing").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        for read_only in (True, False):
            with pytest.raises(CheckpointError):
                CheckpointManager(path, read_only=read_only)
    assert (tmp_path / "file").read_bytes() == b"x"
