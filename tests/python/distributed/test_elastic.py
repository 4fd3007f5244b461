"""Ranks that a launcher starts again: what those before them left in its store does not mislead them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from support import clean_environment

from varvite.distributed.joining import fresh_token

EXAMPLES = Path(__file__).parents[3] / "examples"


class Rank(threading.Thread):
    """A rank that looks for the others in a store."""

    def __init__(self, store, rank, size, seconds=30.0):
        super().__init__(daemon=True)
        self.given = (store, "run", rank, size)
        self.seconds = seconds
        self.token = None
        self.start()

    def run(self):
        self.token = fresh_token(*self.given, timeout_seconds=self.seconds)

    def found(self):
        self.join()
        return self.token


def wait_for_another(store, key, value):
    while store.get(key) == value:
        pass


def test_ranks_that_are_started_again_in_one_store_find_the_living():
    store = dist.HashStore()
    first = [Rank(store, rank, 3).found for rank in range(3)]
    tokens = {found() for found in first}
    assert len(tokens) == 1
    (old,) = tokens
    # Those of the second life come first, and find the call of the first life, and that it was heard.
    answer = store.get(f"run/answer/{old}/1")
    early = Rank(store, 1, 2)
    wait_for_another(store, f"run/answer/{old}/1", answer)
    assert early.is_alive()
    late = Rank(store, 0, 2)
    assert early.found() == late.found() != old


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match=r"ranks did not come to `run`: 1, 2$"):
        fresh_token(store, "run", 0, 3, timeout_seconds=0.0)
    with pytest.raises(TimeoutError, match=r"the first rank did not come to `other`$"):
        fresh_token(store, "other", 1, 3, timeout_seconds=0.0)


@pytest.mark.skipif(os.environ.get("VARVITE_TEST_EVERYTHING") != "1", reason="starts torchrun: a minute")
@pytest.mark.parametrize(
    ("name", "verdict"), [("fsdp2", "the same on 4, 2 and 1"), ("elastic", "nothing was lost")]
)
def test_the_examples_of_several_ranks(name, verdict):
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=clean_environment(PYTHONPATH=os.pathsep.join(sys.path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdict in done.stdout.splitlines()[-1]
