"""A push needs memory for the parts that are under way, not for the pack."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from support import packs, run_child

from varvite import CheckpointManager

MIB = 1 << 20
LENGTH_BYTES = 300 * MIB
LIMIT_BYTES = 150 * MIB
PARTS = {"part_bytes": 16 * MIB, "parallel": 4, "timeout_seconds": 60.0, "retry_seconds": 60.0}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in other units elsewhere")
@pytest.mark.timeout(300)
def test_the_memory_of_a_push_does_not_follow_the_pack(quick_bucket, tmp_path):
    # Each chunk another one: equal chunks would be stored once.
    values = np.zeros(LENGTH_BYTES // 8, np.uint64)
    values[:: MIB // 8] = np.arange(1, LENGTH_BYTES // MIB + 1)
    with CheckpointManager(tmp_path / "run", compression="none") as manager:
        manager.save_sync(0, {"w": values}, rng=False)
    (pack,) = packs(tmp_path / "run")
    assert pack.stat().st_size > LENGTH_BYTES
    options = quick_bucket.options(**PARTS)
    done = run_child("pushes_large", tmp_path / "run", quick_bucket.url, json.dumps(options))
    assert done.stderr == ""
    assert int(done.stdout) < LIMIT_BYTES
    assert quick_bucket.objects()[f"packs/{pack.name}"] == pack.stat().st_size
