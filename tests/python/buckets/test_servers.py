"""What the servers of these tests keep of the protocol: the ground that the other tests stand on."""

from __future__ import annotations

import threading

import botocore.exceptions
import pytest
from servers import BUCKET, client, free_ports


def status_of(call) -> int:
    """Returns the status of the answer to a call."""
    try:
        return call()["ResponseMetadata"]["HTTPStatusCode"]
    except botocore.exceptions.ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"]


@pytest.fixture(params=["moto", "seaweedfs", "rclone"])
def any_bucket(request, bucket_on):
    return bucket_on(request.getfixturevalue(request.param))


def test_what_is_put_lies_below_the_prefix_and_nowhere_else(any_bucket, bucket_on):
    any_bucket.put("packs/a", b"1234")
    any_bucket.put("varvite.json", b"{}")
    assert any_bucket.objects() == {"packs/a": 4, "varvite.json": 2}
    assert any_bucket.content() == {"packs/a": b"1234", "varvite.json": b"{}"}
    assert any_bucket.names("packs/") == ["packs/a"]
    assert bucket_on(any_bucket.server).objects() == {}
    any_bucket.delete("packs/a")
    assert any_bucket.names() == ["varvite.json"]


def test_a_put_that_expects_no_object_loses_where_one_lies(any_bucket):
    any_bucket.put("a", b"first")
    key = f"{any_bucket.prefix}/a"
    put = any_bucket.client.put_object
    keeps = any_bucket.server.honours_conditions
    assert status_of(lambda: put(Bucket=BUCKET, Key=key, Body=b"2", IfNoneMatch="*")) == (
        412 if keeps else 200
    )
    assert any_bucket.get("a") == (b"first" if keeps else b"2")
    wrong = '"' + "0" * 32 + '"'
    assert status_of(lambda: put(Bucket=BUCKET, Key=key, Body=b"3", IfMatch=wrong)) == (412 if keeps else 200)
    right = any_bucket.client.head_object(Bucket=BUCKET, Key=key)["ETag"]
    assert status_of(lambda: put(Bucket=BUCKET, Key=key, Body=b"4", IfMatch=right)) == 200
    assert any_bucket.get("a") == b"4"


def test_of_eight_that_expect_no_object_one_wins(bucket):
    key = f"{bucket.prefix}/a"
    barrier = threading.Barrier(8)
    found: list[int] = []

    def race() -> None:
        barrier.wait()
        found.append(
            status_of(lambda: bucket.client.put_object(Bucket=BUCKET, Key=key, Body=b"", IfNoneMatch="*"))
        )

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(200) == 1
    assert set(found) <= {200, 409, 412}


def test_uploads_in_parts_are_listed_until_they_are_aborted(any_bucket):
    client_, key = any_bucket.client, f"{any_bucket.prefix}/big"
    identity = client_.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    client_.upload_part(Bucket=BUCKET, Key=key, UploadId=identity, PartNumber=1, Body=b"x" * 1000)
    assert any_bucket.uploads() == ["big"]
    client_.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=identity)
    assert any_bucket.uploads() == []
    assert any_bucket.objects() == {}


def test_a_wrong_key_is_refused_where_signatures_are_checked(any_bucket):
    stranger = client(any_bucket.server.endpoint, secret_key="another")
    found = status_of(lambda: stranger.list_objects_v2(Bucket=BUCKET))
    stranger.close()
    assert found == (403 if any_bucket.server.checks_keys else 200)


@pytest.mark.parametrize("name", ["a b", "a+b", "a&b", "a=b", "ä", "a%2Fb", "日本"])
def test_names_of_any_characters(bucket, name):
    bucket.put(f"{name}/x", b"1")
    assert bucket.content() == {f"{name}/x": b"1"}


def test_free_ports_differ():
    ports = free_ports(20)
    assert len(set(ports)) == 20
