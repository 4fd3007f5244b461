"""What is checked when ranks begin to work together."""

from __future__ import annotations

import time

import pytest
import ranks

from varvite.distributed.coordination import Coordination
from varvite.distributed.launch import check_alike, check_shared_folder
from varvite.errors import MismatchError, StoreError


def are_alike(by_rank):
    coordination = Coordination.join()
    try:
        check_alike(coordination, by_rank[coordination.rank])
    except MismatchError as error:
        return error.message, error.values
    return None


def test_the_same_facts_pass():
    facts = {"version": "1", "sizes": {"b": [1, 2.5], "a": None}}
    other_order = {"sizes": {"a": None, "b": [1, 2.5]}, "version": "1"}
    assert ranks.run(2, are_alike, [facts, other_order]) == [None, None]


def test_facts_that_differ_are_named_with_values_and_ranks():
    by_rank = [{"version": "1", "chunk_bytes": 5, "same": 0}, {"version": "2", "chunk_bytes": 5, "same": 0}]
    by_rank += [{"version": "1", "same": 0}]
    text = (
        'ranks do not run the same: `version` is "1" on ranks 0, 2; "2" on ranks 1, and '
        "`chunk_bytes` is 5 on ranks 0, 1; nothing on ranks 2"
    )
    values = {"version": {'"1"': [0, 2], '"2"': [1]}, "chunk_bytes": {"5": [0, 1], "nothing": [2]}}
    assert ranks.run(3, are_alike, by_rank) == [(text, values)] * 3


def shares(folders, seconds, delays):
    """What a rank sees comes late by its delay; a delay that is no number is raised."""
    coordination = Coordination.join()
    folder, delay = folders[coordination.rank], delays[coordination.rank]
    begun = time.monotonic()

    def see(name):
        if isinstance(delay, Exception):
            raise delay
        return time.monotonic() - begun >= delay and (folder / name).exists()

    try:
        check_shared_folder(
            coordination,
            "runs/1",
            put=lambda name: (folder / name).touch(),
            see=see,
            remove=lambda name: (folder / name).unlink(),
            seconds=seconds,
        )
    except StoreError as error:
        return error.message, error.facts
    return "shared"


def test_a_folder_that_all_see_late_or_soon_is_shared(tmp_path):
    assert ranks.run(3, shares, [tmp_path] * 3, 30.0, [0, 0.3, 0]) == ["shared"] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blind", [[1], [1, 3]])
def test_ranks_with_a_folder_of_their_own_are_named(tmp_path, blind):
    folders = [tmp_path / ("own" if rank in blind else "all") for rank in range(4)]
    for folder in set(folders):
        folder.mkdir()
    found = ranks.run(4, shares, folders, 0.1, [0] * 4)
    assert found == [found[0]] * 4
    message, facts = found[0]
    assert message.startswith("cannot share `runs/1`: a file of rank 0 on `")
    assert [message.rpartition("by ranks: ")[2].count(f"{rank} on `") for rank in blind] == [1] * len(blind)
    assert (facts["ranks"], len(facts["hosts"])) == (blind, len(blind))
    assert [list(folder.iterdir()) for folder in set(folders)] == [[], []]


def test_a_rank_that_cannot_look_fails_all_and_the_mark_goes(tmp_path):
    error = StoreError("cannot look", errno=5)
    found = ranks.run(2, shares, [tmp_path] * 2, 5.0, [0, error])
    assert [one[0] for one in found] == [
        "rank 1 failed in `see the mark in the folder`: cannot look",
        "cannot look",
    ]
    assert list(tmp_path.iterdir()) == []
