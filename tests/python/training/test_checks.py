"""Checks of arguments and of saved state: what is legal, and what the message says of the rest."""

from __future__ import annotations

import math

import pytest

from varvite.errors import CorruptionError, InvalidInputError
from varvite.training.checks import check_count, check_counts, check_positive


@pytest.mark.parametrize("value", [0, 5, -1, True, 1.0, "1", None])
def test_what_is_no_count_in_its_range_is_refused(value):
    with pytest.raises(InvalidInputError, match=r"must be a whole number from 1 below 5$") as caught:
        check_count("rank", value, least=1, limit=5)
    assert caught.value.what == "rank"


def test_a_count_is_returned():
    assert check_count("rank", 4, least=1, limit=5) == 4


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 10**400, True, "5", None])
def test_what_is_no_positive_number_is_refused(value):
    with pytest.raises(InvalidInputError, match=r"must be a finite number, above 0$") as caught:
        check_positive("budget_seconds", value)
    assert caught.value.what == "budget_seconds"


def test_zero_where_it_is_legal():
    assert check_positive("margin_seconds", 0, or_zero=True) == 0.0


@pytest.mark.parametrize("state", [None, {}, {"step": 1, "more": 0}, {"step": True}, {"step": -2}])
def test_a_state_of_other_counts_is_refused(state):
    check_counts("progress", {"step": -1}, {"step": -1})
    with pytest.raises(CorruptionError, match="progress"):
        check_counts("progress", state, {"step": -1})
