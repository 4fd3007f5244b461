"""Deadlines on the monotonic clock."""

from __future__ import annotations

import pytest

from varvite.errors import InvalidInputError
from varvite.training.deadlines import (
    needed_seconds,
    on_monotonic_clock,
    slurm_end_seconds,
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1700000000", 1.7e9), (" 12 ", 12.0), ("", None), ("  ", None)]
)
def test_the_end_of_a_slurm_job(text, seconds):
    assert slurm_end_seconds({"SLURM_JOB_END_TIME": text}) == seconds


def test_outside_of_slurm_there_is_no_end():
    assert slurm_end_seconds({}) is None


@pytest.mark.parametrize("text", ["soon", "-5", "1e9", "12.5", "N/A", "9" * 16, "١٢"])
def test_a_slurm_end_that_is_no_time(text):
    with pytest.raises(InvalidInputError, match="SLURM_JOB_END_TIME") as caught:
        slurm_end_seconds({"SLURM_JOB_END_TIME": text})
    assert caught.value.what == "SLURM_JOB_END_TIME"


def test_a_wall_time_on_the_monotonic_clock():
    assert on_monotonic_clock(1000.0, wall_now=900.0, monotonic_now=7.0) == 107.0
    assert on_monotonic_clock(1000.0, wall_now=1100.0, monotonic_now=7.0) == -93.0


@pytest.mark.parametrize(
    ("least", "saved", "step", "margin"),
    [(60, 0, 0, 60), (60, 20, 0, 60), (60, 21, 0, 63), (60, 0, 300, 360), (0, 10, 2, 32)],
)
def test_the_margin_holds_a_slow_save_and_one_more_step(least, saved, step, margin):
    assert needed_seconds(least, saved, step) == margin
