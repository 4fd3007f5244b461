"""How many requests a run makes, as the guide on buckets says it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from varvite import keep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucket import Bucket
    from proxy import Proxy

SAVES = 4


def kinds(proxy: Proxy) -> Counter[str]:
    """Returns how many requests there were: those that are billed as writes, and others."""
    return Counter(
        "write" if one.method in ("PUT", "POST") or "list-type" in one.target else "read"
        for one in proxy.matching()
    )


def pushes(bucket: Bucket, proxy: Proxy, folder: Path, elements: int, **arguments: object) -> Counter[str]:
    """Saves and pushes several times and returns the most requests that one of the later saves made."""
    weights = {"w": torch.zeros(elements)}
    most: Counter[str] = Counter()
    # Without the renewals, which come by the clock.
    options = {"lease_seconds": 600.0}
    with bucket.manager(folder, endpoint=proxy.endpoint, remote_options=options, **arguments) as manager:
        for step in range(SAVES):
            weights["w"].normal_()
            if step == SAVES // 2:
                most.clear()
            proxy.clear()
            manager.save_sync(step, weights, rng=False)
            manager.sync_now()
            most |= kinds(proxy)
    return most


def test_requests_of_a_save(quick_bucket: Bucket, proxy_before: Callable[..., Proxy], tmp_path: Path) -> None:
    found = pushes(quick_bucket, proxy_before(quick_bucket), tmp_path / "run", 1000)
    assert found["write"] + found["read"] <= 20, found


def test_requests_of_a_save_with_retention(
    quick_bucket: Bucket, proxy_before: Callable[..., Proxy], tmp_path: Path
) -> None:
    found = pushes(quick_bucket, proxy_before(quick_bucket), tmp_path / "run", 1000, keep=keep.last(2))
    assert found["write"] + found["read"] <= 30, found


def test_requests_of_a_save_in_parts(
    quick_bucket: Bucket, proxy_before: Callable[..., Proxy], tmp_path: Path
) -> None:
    small = pushes(quick_bucket, proxy_before(quick_bucket), tmp_path / "small", 1000)
    large = pushes(quick_bucket, proxy_before(quick_bucket), tmp_path / "large", 6 << 20)
    parts = 2
    # Each part is a request; beginning, noting and completing an upload is a dozen at most.
    assert large["write"] + large["read"] - small["write"] - small["read"] <= parts + 12, (small, large)
