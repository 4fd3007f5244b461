"""A push that lasts longer than the lease may go without a sign of life."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from bucket import Bucket


def test_a_lease_that_is_due_is_renewed_between_the_parts_of_a_pack(
    quick_bucket: Bucket, tmp_path: Path
) -> None:
    # Due at each part, whatever the thread does that renews it beside the push.
    options = {"lease_seconds": 0.003, "part_bytes": 5 << 20, "parallel": 1}
    with quick_bucket.manager(tmp_path / "run", remote_options=options) as manager:
        manager.save_sync(1, {"w": torch.randn(4 << 20)})
        manager.sync_now()
        assert manager.stats().sync.unpushed == []
    assert quick_bucket.seqs() == [1]
