"""What tests of buckets look at: states, what a folder would send, what a machine finds that starts anew."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from processes import states
from support import assert_same, files_of

if TYPE_CHECKING:
    from pathlib import Path

    from bucket import Bucket

    from varvite import CheckpointManager

LENGTH_BYTES = 2_000

state_of = partial(states.state_of, length_bytes=LENGTH_BYTES)
"""A state of a few kilobytes that follows from its step."""


def save_steps(manager: CheckpointManager, *steps: int) -> None:
    """Saves some steps, each durable before the next."""
    for step in steps:
        manager.save_sync(step, state_of(step), rng=False)


def sent_from(folder: Path) -> dict[str, bytes]:
    """Returns what of a folder belongs into its bucket."""
    files = files_of(folder)
    return {name: data for name, data in files.items() if not name.startswith(("sync/", "tmp/"))}


def ours_in(bucket: Bucket) -> dict[str, bytes]:
    """Returns what lies in a bucket but for the lease."""
    return {name: data for name, data in bucket.content().items() if name != "lease.json"}


def assert_pushed(bucket: Bucket, folder: Path) -> None:
    """Asserts that a bucket holds what a folder holds, byte for byte, and nothing else."""
    found, expected = ours_in(bucket), sent_from(folder)
    assert sorted(found) == sorted(expected)
    assert found == expected


def assert_loads(manager: CheckpointManager, *steps: int) -> None:
    """Asserts that a manager lists exactly these steps, and that each is the state it was, to the bit."""
    assert [info.step for info in manager.snapshots()] == list(steps)
    for info in manager.snapshots():
        assert_same(dict(manager.load(f"seq:{info.seq}")), state_of(info.step))
    newest: Any = manager.load_latest()
    assert (None if newest is None else newest.step) == (steps[-1] if steps else None)
