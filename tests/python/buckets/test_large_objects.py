"""Objects longer than one request may carry: slow, and only where everything is tested."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest

from varvite import CheckpointManager

GIB = 1 << 30
CHUNK_BYTES = 1 << 20
LENGTH_BYTES = 5 * GIB + 64 * CHUNK_BYTES
"""S3 takes at most 5 GiB in one request."""


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("VARVITE_TEST_EVERYTHING") != "1",
    reason="needs minutes and 12 GB of disk: VARVITE_TEST_EVERYTHING=1",
)
@pytest.mark.timeout(3_600)
def test_a_pack_of_more_than_five_gibibytes(seaweedfs, bucket_on, proxy_before, tmp_path):
    bucket = bucket_on(seaweedfs)
    path = tmp_path / "state"
    with path.open("wb") as file:
        file.truncate(LENGTH_BYTES)
    # Sparse, but for a number in each chunk: equal chunks would be stored once.
    values = np.memmap(path, dtype=np.uint64, mode="r+")
    values[:: CHUNK_BYTES // 8] = np.arange(1, LENGTH_BYTES // CHUNK_BYTES + 1)
    values.flush()
    with CheckpointManager(tmp_path / "run", compression="none") as manager:
        manager.save_sync(0, {"w": values}, rng=False)
    pack = next((tmp_path / "run" / "packs").iterdir())
    assert pack.stat().st_size > LENGTH_BYTES
    subprocess.run(["fallocate", "--dig-holes", str(pack)], check=True)
    proxy = proxy_before(bucket)
    options = {"timeout_seconds": 300.0, "retry_seconds": 300.0}
    with bucket.manager(tmp_path / "run", endpoint=proxy.endpoint, remote_options=options) as manager:
        manager.sync_now()
    assert bucket.objects()[f"packs/{pack.name}"] == pack.stat().st_size
    parts = proxy.matching("put_part")
    assert sum(one.up_bytes for one in parts) == pack.stat().st_size
    assert max(one.up_bytes for one in parts) <= 64 << 20
    with bucket.reader() as reader:
        assert reader.verify().ok
