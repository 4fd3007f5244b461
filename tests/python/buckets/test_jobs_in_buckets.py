"""`run_training` and `prove_resume` of jobs that live in a bucket, or beside one."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from processes import jobs

from varvite import CheckpointManager
from varvite.errors import StoreError
from varvite.training import prove_resume, run_training

if TYPE_CHECKING:
    from pathlib import Path

    from bucket import Bucket


def place(kind: str, bucket: Bucket, machine: Path, **options: Any) -> dict[str, Any]:
    """Returns where a job saves: in the bucket by its url, or in a folder with the bucket behind it."""
    spoken = bucket.options(**options)
    if kind == "url":
        spool = str(machine / "spool")
        return {"folder": bucket.url, "manager": {"remote_options": {**spoken, "spool": spool}}}
    return {"folder": str(machine / "run"), "manager": {"remote": bucket.url, "remote_options": spoken}}


@pytest.mark.parametrize("kind", ["url", "folder"])
def test_a_job_goes_on_elsewhere_as_if_it_had_never_moved(
    tmp_path: Path, quick_bucket: Bucket, kind: str
) -> None:
    whole = run_training(jobs.job(tmp_path / "whole"))
    first = run_training(jobs.job(**place(kind, quick_bucket, tmp_path / "first"), steps=8))
    assert (first.exit_code, quick_bucket.seqs()) == (0, [1, 2])
    shutil.rmtree(tmp_path / "first")
    second = run_training(jobs.job(**place(kind, quick_bucket, tmp_path / "second")))
    assert second.snapshot.digest == whole.snapshot.digest
    with quick_bucket.reader() as reader:
        assert reader.info().digest == whole.snapshot.digest
        assert [receipt.next_step for receipt in reader.receipts()] == [8]


@pytest.mark.parametrize("kind", ["url", "folder"])
def test_a_proof_reads_the_bucket_and_writes_nothing_there(
    tmp_path: Path, quick_bucket: Bucket, kind: str
) -> None:
    job = jobs.job(**place(kind, quick_bucket, tmp_path / "machine"))
    run_training(job)
    before = quick_bucket.content()
    proof = prove_resume(job, steps=5)
    assert (proof.equal, proof.compared_with, proof.from_step) == (True, "recorded", 4)
    assert quick_bucket.content() == before


def test_a_job_whose_last_push_fails_says_so_and_has_its_snapshot(
    tmp_path: Path, quick_bucket: Bucket
) -> None:
    run_training(jobs.job(**place("url", quick_bucket, tmp_path), steps=8))
    dead = place("url", quick_bucket, tmp_path, endpoint="http://127.0.0.1:1", retry_seconds=0.1)
    with pytest.raises(StoreError, match="refused"), pytest.warns(RuntimeWarning, match="^pushing to `s3://"):
        run_training(jobs.job(**dead))
    with CheckpointManager(tmp_path / "spool", read_only=True) as manager:
        assert manager.info().step == 11
    assert quick_bucket.seqs() == [1, 2]
    again = run_training(jobs.job(**place("url", quick_bucket, tmp_path)))
    assert (again.exit_code, quick_bucket.seqs()[-1]) == (0, 4)
