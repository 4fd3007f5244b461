"""The data position as plain numbers: every sample once, whatever ranks, batches and cuts there are."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varvite.errors import CorruptionError, InvalidInputError
from varvite.training.cursor import (
    Cursor,
    SamplerState,
    epoch_order,
    first_of_pass,
    indices,
    read_state,
    share,
)

GOLDEN = [8, 7, 6, 3, 2, 1, 0, 4, 9, 5]


def take(cursor: Cursor, world_size: int, *, drop_last: bool, shuffle: bool = True) -> list[list[int]]:
    """Returns what each rank takes of the rest of the epoch."""
    order = epoch_order(cursor, shuffle=shuffle)
    return [
        [index for block in indices(cursor, order, rank, world_size, drop_last=drop_last) for index in block]
        for rank in range(world_size)
    ]


def start(length: int, *, seed: int = 0, epoch: int = 0) -> Cursor:
    return Cursor(seed=seed, epoch=epoch, position=0, length=length)


def test_the_order_of_an_epoch_never_changes():
    assert epoch_order(start(10), shuffle=True).tolist() == GOLDEN
    later = epoch_order(start(10, seed=1 << 63, epoch=3), shuffle=True).tolist()
    assert later == [5, 2, 3, 7, 8, 1, 9, 0, 4, 6]
    large = epoch_order(start(100_000, seed=1, epoch=2), shuffle=True).numpy().tobytes()
    assert hashlib.sha256(large).hexdigest()[:16] == "f2e0ee364fd40175"


def test_seed_and_epoch_are_not_added_up():
    orders = {
        tuple(epoch_order(start(50, seed=seed, epoch=epoch), shuffle=True).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


@given(
    length=st.integers(1, 60),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 8), min_size=5, max_size=5),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_any_sequence_of_world_sizes_takes_each_sample_of_the_epoch_once(
    length, sizes, cuts, drop_last, shuffle
):
    cursor = start(length)
    order = list(epoch_order(cursor, shuffle=shuffle))
    taken: list[int] = []
    for world_size, cut in zip(sizes, cuts, strict=False):
        if cursor.epoch or share(cursor, world_size, drop_last=drop_last) == 0:
            break
        rows = take(cursor, world_size, drop_last=drop_last, shuffle=shuffle)
        steps = min(cut, len(rows[0]))
        # Step by step, as the ranks run: the r-th of each step is the rank's.
        taken += [rows[rank][step] for step in range(steps) for rank in range(world_size)]
        cursor = cursor.advance(steps * world_size)
    if cursor.epoch == 0:  # the rest, by one rank
        assert taken == [int(index) for index in order[: cursor.position]]
        taken += take(cursor, 1, drop_last=False, shuffle=shuffle)[0]
        assert Counter(taken) == Counter(range(length))
    else:  # the last ranks ended the epoch
        surplus = len(taken) - length
        assert -max(sizes) < surplus < max(sizes)
        assert taken[:length] == [int(index) for index in order[: len(taken)]]
        assert surplus >= 0 or drop_last


@given(
    length=st.integers(1, 60),
    position=st.integers(0, 59),
    world_size=st.integers(1, 70),
    drop_last=st.booleans(),
)
def test_all_ranks_take_as_many(length, position, world_size, drop_last):
    cursor = Cursor(seed=3, epoch=1, position=position % length, length=length)
    rows = take(cursor, world_size, drop_last=drop_last)
    assert {len(row) for row in rows} == {share(cursor, world_size, drop_last=drop_last)}
    rest = set(epoch_order(cursor, shuffle=True).tolist()[cursor.position :])
    given_out = {index for row in rows for index in row}
    assert given_out <= rest if drop_last else given_out >= rest


def test_padding_wraps_around_to_the_start_of_the_order():
    cursor = Cursor(seed=0, epoch=0, position=8, length=10)
    assert take(cursor, 4, drop_last=False, shuffle=False) == [[8], [9], [0], [1]]
    assert take(start(2), 5, drop_last=False, shuffle=False) == [[0], [1], [0], [1], [0]]


def test_more_indices_than_a_block_are_all_there():
    rows = take(start(10_001), 2, drop_last=True)
    assert [len(row) for row in rows] == [5000, 5000]
    (row,) = take(start(10_000), 1, drop_last=False)
    assert row == epoch_order(start(10_000), shuffle=True).tolist()
    assert sorted(row) == list(range(10_000))


def test_an_advance_over_the_end_is_the_start_of_the_next_epoch():
    cursor = Cursor(seed=7, epoch=2, position=5, length=10)
    assert cursor.advance(4) == Cursor(seed=7, epoch=2, position=9, length=10)
    assert cursor.advance(5) == cursor.advance(8) == Cursor(seed=7, epoch=3, position=0, length=10)
    assert cursor.advance(0) == cursor


def test_a_rest_that_is_too_small_is_left_for_the_next_epoch():
    cursor = Cursor(seed=0, epoch=2, position=7, length=10)
    assert first_of_pass(cursor, 3, drop_last=True) == cursor
    assert first_of_pass(cursor, 4, drop_last=True) == cursor.next_epoch()
    assert first_of_pass(cursor, 4, drop_last=False) == cursor
    assert first_of_pass(cursor, 1, drop_last=False, least=4) == cursor.next_epoch()
    with pytest.raises(InvalidInputError, match="gives each of 11 ranks 0") as caught:
        first_of_pass(cursor, 11, drop_last=True)
    assert "fewer ranks" in caught.value.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("seed", 1 << 64),
        ("seed", True),
        ("epoch", -1),
        ("epoch", 1.0),
        ("position", 10),
        ("position", -1),
        ("position", "3"),
        ("length", 0),
        ("length", True),
    ],
)
def test_numbers_that_are_no_position_are_refused(field, value):
    numbers = {"seed": 0, "epoch": 0, "position": 0, "length": 10, field: value}
    with pytest.raises(InvalidInputError) as caught:
        Cursor(**numbers)
    assert caught.value.what == field
    state = {**SamplerState(start(10), True, False, False).to_dict(), field: value}
    with pytest.raises(CorruptionError, match=field):
        read_state(state)


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"kind": "sampler"},
        {**SamplerState(start(10), True, False, False).to_dict(), "more": 1},
        {**SamplerState(start(10), True, False, False).to_dict(), "kind": "epoch"},
        {**SamplerState(start(10), True, False, False).to_dict(), "shuffle": 1},
        {**SamplerState(start(10), True, False, False).to_dict(), "keeps_iterator": None},
    ],
)
def test_a_state_of_another_form_is_corrupt(state):
    with pytest.raises(CorruptionError, match="data position"):
        read_state(state)
