"""`varvite ls`, `show`, `verify` and `du`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import damage, document, save, tree, varvite

from varvite import CheckpointManager, errors
from varvite.cli import exits
from varvite.cli.outline import plain_values, split_name, value_text


def test_ls_json_has_the_facts_of_every_snapshot_that_is_not_superseded(run: Path) -> None:
    found = document("ls", run)
    with CheckpointManager(run, read_only=True) as manager:
        infos = manager.snapshots()
    assert [row["seq"] for row in found["snapshots"]] == [1, 3, 4]
    for row, info in zip(found["snapshots"], infos, strict=True):
        assert (row["seq"], row["step"], row["parent"]) == (info.seq, info.step, info.parent)
        assert (row["raw_bytes"], row["stored_bytes"]) == (info.raw_bytes, info.stored_bytes)
        assert (row["kind"], row["digest"], row["tags"]) == (info.kind, info.digest, info.tags)
        assert row["created_at"] == info.created_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    last = found["snapshots"][-1]
    assert last["metrics"] == {"val_loss": "NaN"}
    assert (last["healthy"], last["nonfinite"]) == (False, {"model.bias": 1})
    assert found["repository"]["path"] == str(run)
    assert found["damaged"] == []


def test_ls_lists_superseded_snapshots_only_when_asked(run: Path) -> None:
    rows = document("ls", run, "--all")["snapshots"]
    assert [(row["seq"], row["superseded"]) for row in rows] == [
        (1, False),
        (2, True),
        (3, False),
        (4, False),
    ]
    assert varvite("ls", run, "-q").stdout == "seq:1\nseq:3\nseq:4\n"
    assert varvite("ls", run, "-q", "-a").stdout == "seq:1\nseq:2\nseq:3\nseq:4\n"
    assert varvite("ls", run).stderr == "1 superseded snapshot not shown; `--all` shows them\n"


def test_ls_writes_plain_columns_into_a_pipe(run: Path) -> None:
    lines = varvite("ls", run, "--iso", "--bytes").stdout.splitlines()
    titles = ["seq", "step", "kind", "created", "raw", "stored", "metrics", "healthy", "tags"]
    assert lines[0].split() == titles
    facts = document("ls", run)["snapshots"][0]
    expected = (
        f"1 10 base {facts['created_at']} {facts['raw_bytes']} {facts['stored_bytes']} val_loss 3 yes first"
    )
    assert lines[1].split() == expected.split()
    assert lines[3].split()[6:] == ["val_loss", "nan", "1", "not", "finite"]


def test_ls_lists_a_damaged_snapshot_as_damaged_and_warns(run: Path) -> None:
    damage(run / "snapshots" / "3.json", 40)
    result = varvite("ls", run)
    assert result.exit_code == 0
    assert [line.split()[:3] for line in result.stdout.splitlines()[2:]] == [
        ["2", "20", "delta"],
        ["3", "?", "damaged"],
        ["4", "30", "delta"],
    ]
    assert result.stderr.startswith("warning: snapshot 3 is damaged: corrupt ")
    assert [row["seq"] for row in document("ls", run)["damaged"]] == [3]


def test_ls_of_a_repository_without_snapshots_says_so(tmp_path: Path) -> None:
    CheckpointManager(tmp_path / "run").close()
    result = varvite("ls", tmp_path / "run")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no snapshots yet\n")


def test_what_a_terminal_would_obey_is_escaped(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", fsync=False) as manager:
        manager.save_sync(0, {"a": "\x1b[2J"}, metrics={"x\n\x1b[31m": 1.0}, metadata={"k\x07": 1}, rng=False)
    listed = varvite("ls", tmp_path / "run").stdout
    assert len(listed.splitlines()) == 2
    assert "x\\n\\x1b[31m 1" in listed
    shown = varvite("show", tmp_path / "run", "--structure").stdout
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_show_json_has_every_entry(run: Path) -> None:
    found = document("show", run, "10")
    assert found["snapshot"]["seq"] == 1
    assert found["snapshot"]["metadata"] == {"commit": "abc", "dtype": {"dtype": "bfloat16"}}
    entries = {entry["name"]: entry for entry in found["entries"]}
    statistics = [entries["model.weight"].pop(name) for name in ("abs_max", "l2_norm")]
    assert 0 < statistics[0] <= statistics[1] <= statistics[0] * 6**0.5
    assert entries["model.weight"] == {
        "name": "model.weight",
        "rank": None,
        "dtype": "float32",
        "stored_dtype": "float32",
        "shape": [2, 3],
        "tied_to": None,
        "nonfinite": None,
        "raw_bytes": 24,
        "stored_bytes": 24,
    }
    assert entries["rng.torch"]["rank"] == 0
    packs = [(pack["name"], pack["length_bytes"]) for pack in found["packs"]]
    assert packs == [(pack.name, pack.stat().st_size) for pack in (run / "packs").glob("1-*")]


@pytest.mark.parametrize(
    ("reference", "seq"),
    [
        ("latest", 4),
        ("latest~1", 3),
        ("20", 3),
        ("step:20", 3),
        ("seq:2", 2),
        ("tag:first", 1),
        ("healthy", 3),
        ("best:val_loss", 3),
        ("best:val_loss:max", 1),
    ],
)
def test_show_takes_every_kind_of_reference(run: Path, reference: str, seq: int) -> None:
    assert document("show", run, reference)["snapshot"]["seq"] == seq


def test_show_without_a_reference_is_about_the_latest(run: Path) -> None:
    lines = varvite("show", run).stdout.splitlines()
    assert lines[0] == "snapshot         seq 4, step 30"
    assert "healthy          no, not finite: model.bias (1)" in lines
    assert 'metadata commit  "abc"' in lines


def test_show_tree_sums_by_segments(run: Path) -> None:
    rows = {row["name"]: row for row in document("show", run, "10", "--tree")["tree"]}
    assert rows["model"] == {
        "name": "model",
        "level": 0,
        "tensor_count": 2,
        "raw_bytes": 32,
        "stored_bytes": 32,
        "nonfinite": 0,
    }
    assert rows["optimizer.state.weight"]["raw_bytes"] == 24 + 24 + 4
    assert rows["optimizer.state.weight"]["level"] == 2
    shallow = document("show", run, "10", "--tree", "--depth", 1)["tree"]
    assert [row["name"] for row in shallow] == ["model", "optimizer", "rng"]
    text = varvite("show", run, "latest", "--tree", "-q").stdout
    assert "\n  bias " in text


def test_a_tie_counts_once_in_sums(tmp_path: Path) -> None:
    shared = torch.arange(8.0)
    save(tmp_path / "run", {"a": shared, "b": shared})
    row = {row["name"]: row["raw_bytes"] for row in document("show", tmp_path / "run", "--tree")["tree"]}
    assert row == {"a": 32, "b": 0}
    assert document("show", tmp_path / "run")["entries"][1]["tied_to"] == "a"


def test_show_structure_has_the_plain_values(run: Path) -> None:
    values = document("show", run, "10", "--structure")["values"]
    assert values["config.width"] == 3
    assert values["config.betas"] == [0.9, None]
    assert values["optimizer.param_groups.0.lr"] == 0.1
    assert "model.weight" not in values
    lines = varvite("show", run, "10", "--structure", "-q").stdout.splitlines()
    assert ["config.betas", "(0.9, None)"] in [line.split(maxsplit=1) for line in lines]


def test_show_of_a_damaged_snapshot_never_falls_back(run: Path) -> None:
    damage(run / "snapshots" / "4.json", 40)
    result = varvite("show", run)
    assert result.exit_code == exits.FINDINGS
    assert result.stdout == ""
    assert result.stderr.startswith("error: corrupt ")
    assert "\nhint: run `varvite verify`" in result.stderr


def test_names_split_into_their_parts() -> None:
    assert split_name("a.0.weight") == ["a", "0", "weight"]
    assert split_name('a."b.\\"c.".("t.", 1.5).d') == ["a", '"b.\\"c."', '("t.", 1.5)', "d"]


def test_plain_values_are_named_as_tensors_are() -> None:
    structure = {
        "dict": [["a.b", {"dict": [[7, 1], ["x", [1, {"tensor": '"a.b".x.1'}]]]}], ["e", {"dict": []}]]
    }
    text = json.dumps({"state": structure, "objects": []})
    assert plain_values(text, {}) == {'"a.b".7': 1, '"a.b".x.0': 1, "e": {"dict": []}}
    assert value_text({"bytes": "AAAA"}) == "3 bytes"
    assert value_text({"float": "nan:7ff8000000000000"}) == "nan"
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    with pytest.raises(errors.CorruptionError):
        plain_values(json.dumps({"state": deep, "objects": []}), {})


def test_verify_of_a_whole_repository_finds_nothing(run: Path) -> None:
    before = tree(run)
    found = document("verify", run)
    assert (found["ok"], found["findings"], found["seq"]) == (True, [], None)
    with CheckpointManager(run, read_only=True) as manager:
        assert found["checked_bytes"] == manager.verify().checked_bytes
    assert varvite("verify", run, "latest").stdout.startswith("no damage found; ")
    assert tree(run) == before


def test_verify_names_the_damage_and_exits_with_findings(tmp_path: Path) -> None:
    save(tmp_path / "run", {"w": torch.arange(4096.0)}, {"w": torch.arange(4096.0) + 1})
    pack = next((tmp_path / "run" / "packs").glob("2-*"))
    damage(pack, pack.read_bytes().index(np.arange(1, 4097, dtype="<f4").tobytes()) + 5)
    found = document("verify", tmp_path / "run", code=exits.FINDINGS)
    assert [row["object"] for row in found["findings"]] == [f"packs/{pack.name}"]
    assert found["findings"][0]["steps"] == [1]
    assert document("verify", tmp_path / "run", 0)["ok"]
    result = varvite("verify", tmp_path / "run", 1)
    assert result.exit_code == exits.FINDINGS
    assert f"packs/{pack.name}" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("damaged: 1 finding; ")
    assert varvite("verify", tmp_path / "run", 1, "-q").stdout.count("\n") == 1


@pytest.mark.parametrize(("text", "share"), [("0.5", 0.5), ("10%", 0.1), ("1", 1.0)])
def test_verify_takes_a_share(run: Path, text: str, share: float) -> None:
    assert document("verify", run, "--sample", text)["sample"] == pytest.approx(share)


@pytest.mark.parametrize("text", ["0", "1.5", "200%", "much", "nan"])
def test_verify_refuses_what_is_no_share(run: Path, text: str) -> None:
    result = varvite("verify", run, "--sample", text)
    assert (result.exit_code, result.stdout) == (exits.USAGE, "")
    assert f"`{text}` is not a share" in result.stderr


def test_du_by_snapshot_foretells_what_a_deletion_frees(tmp_path: Path) -> None:
    frozen = torch.randn(4096)
    save(tmp_path / "run", *({"frozen": frozen, "w": torch.full((2048,), float(step))} for step in range(3)))
    found = document("du", tmp_path / "run")
    lengths = {path.name: path.stat().st_size for path in (tmp_path / "run" / "packs").iterdir()}
    assert found["stored_bytes"] == sum(lengths.values())
    first, second, third = found["rows"]
    assert (first["freed_bytes"], first["shared_bytes"]) == (0, first["own_bytes"])
    assert second["freed_bytes"] == second["own_bytes"]
    assert second["shared_bytes"] == first["own_bytes"]
    before = sum(lengths.values())
    with CheckpointManager(tmp_path / "run") as manager:
        manager.delete("seq:2")
    after = sum(path.stat().st_size for path in (tmp_path / "run" / "packs").iterdir())
    assert before - after == second["freed_bytes"]
    assert third["seq"] == 3


def test_du_by_kind_and_layer(run: Path) -> None:
    kinds = {row["name"]: row for row in document("du", run, "10")["rows"]}
    assert kinds["model"]["raw_bytes"] == 32
    assert kinds["optimizer"]["raw_bytes"] == 2 * 32 + 2 * 4
    assert set(kinds) == {"model", "optimizer", "other"}
    layers = [row["name"] for row in document("du", run, "--by", "layer", "--depth", 2)["rows"]]
    assert set(layers) >= {"model.weight", "model.bias", "optimizer.state", "rng.torch"}
    text = varvite("du", run, "10", "--bytes").stdout.splitlines()
    assert ["model", "2", "32", "32"] in [line.split() for line in text]
