"""Patience with names that show late."""

from __future__ import annotations

import pytest

from varvite import visibility
from varvite.errors import CorruptionError, SnapshotNotFoundError, StoreError


def looks(*outcomes):
    """Returns a function that raises or returns these, one a call."""
    left = list(outcomes)

    def look():
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, len(left)

    return look


@pytest.mark.parametrize("unseen", [SnapshotNotFoundError("no snapshot 3"), StoreError("no pack", errno=2)])
def test_what_shows_late_is_found(monkeypatch, unseen):
    monkeypatch.setattr(visibility, "_PAUSE_SECONDS", 0)
    assert visibility.when_visible(looks(unseen, unseen, "it", "more")) == ("it", 1)


@pytest.mark.parametrize("error", [CorruptionError("corrupt pack"), StoreError("no right", errno=13)])
def test_another_error_is_raised_at_once(error):
    with pytest.raises(type(error)) as caught:
        visibility.when_visible(looks(error, "it"))
    assert caught.value is error


def test_in_the_end_it_is_not_there():
    with pytest.raises(SnapshotNotFoundError):
        visibility.when_visible(looks(SnapshotNotFoundError("no snapshot 3"), "it"), seconds=0)
