"""States that follow from a step, for processes that are killed and for those that check what they left."""

from __future__ import annotations

import numpy as np


def state_of(step: int, length_bytes: int = 200_000) -> dict[str, object]:
    """Returns the state of a step: some of it changes with every step, some stays."""
    generator = np.random.default_rng(step)
    return {
        "changing": generator.integers(0, 256, length_bytes, dtype=np.uint8),
        "frozen": np.arange(length_bytes // 8),
        "step": step,
        "bytes": generator.bytes(30),
    }
