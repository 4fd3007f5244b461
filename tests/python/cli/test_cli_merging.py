"""`varvite merge`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from commands import damage, document, save, tree, varvite

from varvite import CheckpointManager
from varvite.cli import exits


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A repository of three snapshots that share a tensor."""
    path = tmp_path / "chain"
    frozen = torch.arange(40_000.0)
    save(path, *({"frozen": frozen, "moving": torch.full((5_000,), float(step))} for step in range(3)))
    return path


def names(path: Path) -> list[str]:
    return sorted(one.name for one in (path / "packs").iterdir())


def test_merge_says_what_it_did_and_a_second_one_has_nothing_to_do(chain: Path) -> None:
    result = varvite("merge", chain)
    assert (result.exit_code, result.stderr) == (exits.OK, "")
    assert result.stdout.startswith("merged 3 packs: wrote ")
    assert len(names(chain)) == 1
    assert varvite("verify", chain).exit_code == exits.OK
    before = tree(chain)
    assert varvite("merge", chain).stdout == "nothing to merge\n"
    assert tree(chain) == before


def test_merge_as_json(chain: Path) -> None:
    lengths = sum(one.stat().st_size for one in (chain / "packs").iterdir())
    done = document("merge", chain)
    assert (done["merged_packs"], done["freed_bytes"], done["stood_down"]) == (3, lengths, None)
    assert done["written_bytes"] == (chain / "packs" / names(chain)[0]).stat().st_size
    assert done["findings"] == []


def test_merge_of_damage_is_a_finding_and_leaves_the_snapshot_alone(chain: Path) -> None:
    (first,) = [name for name in names(chain) if name.startswith("1-")]
    damage(chain / "packs" / first, 5_000)
    result = varvite("merge", chain)
    assert result.exit_code == exits.FINDINGS
    assert f"warning: `packs/{first}` at byte " in result.stderr
    assert first in names(chain)
    damage(chain / "snapshots" / "2.json", 900)
    done = document("merge", chain, code=exits.FINDINGS)
    assert done["stood_down"] == "snapshot 2 is damaged, and what it refers to is unknown"
    assert varvite("merge", chain).stdout.startswith("stood down: snapshot 2 is damaged")


def test_merge_needs_the_lock_and_a_repository(chain: Path, tmp_path: Path) -> None:
    with CheckpointManager(chain):
        result = varvite("merge", chain)
    assert result.exit_code == exits.LOCKED
    assert f"process {os.getpid()} on " in result.stderr
    assert varvite("merge", tmp_path / "none").exit_code == exits.NO_REPOSITORY
