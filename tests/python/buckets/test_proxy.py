"""The fault proxy by itself: each fault as a client that tries once sees it, and what the server has then."""

from __future__ import annotations

import datetime as dt
import threading
import time

import botocore.exceptions
import faults
import pytest
from faults import Rule, from_on, only
from servers import BUCKET, client
from wire import Head, Request, unchunked

LARGE_BYTES = 3 << 20


@pytest.fixture
def far(bucket, proxy):
    """A client that talks through the proxy."""
    made = client(proxy.endpoint, timeout_seconds=5)
    yield made
    made.close()


def key(bucket, name: str) -> str:
    return f"{bucket.prefix}/{name}"


def put(far, bucket, name: str, data: bytes, **more):
    return far.put_object(Bucket=BUCKET, Key=key(bucket, name), Body=data, **more)


def get(far, bucket, name: str, **more) -> bytes:
    return far.get_object(Bucket=BUCKET, Key=key(bucket, name), **more)["Body"].read()


def listed(far, bucket) -> list[str]:
    rows = far.list_objects_v2(Bucket=BUCKET, Prefix=key(bucket, "")).get("Contents", [])
    return [row["Key"].removeprefix(key(bucket, "")) for row in rows]


def error_of(call) -> tuple[int, str]:
    """Returns status and code of the error that a call gets; without an answer 0 and its class."""
    try:
        call()
    except botocore.exceptions.ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    except botocore.exceptions.BotoCoreError as error:
        return 0, type(error).__name__
    return 200, ""


def test_without_rules_it_passes_everything_and_counts_it(far, bucket, proxy):
    large = bytes(range(256)) * (LARGE_BYTES // 256)
    put(far, bucket, "a b&ä", b"1234")
    put(far, bucket, "large", large)
    assert get(far, bucket, "large") == large
    assert get(far, bucket, "large", Range="bytes=10-19") == large[10:20]
    assert listed(far, bucket) == ["a b&ä", "large"]
    far.head_object(Bucket=BUCKET, Key=key(bucket, "large"))
    far.delete_object(Bucket=BUCKET, Key=key(bucket, "large"))
    assert error_of(lambda: get(far, bucket, "large")) == (404, "NoSuchKey")
    assert [(one.operation, one.key, one.status) for one in proxy.requests] == [
        ("put", key(bucket, "a b&ä"), 200),
        ("put", key(bucket, "large"), 200),
        ("get", key(bucket, "large"), 200),
        ("get", key(bucket, "large"), 206),
        ("list", key(bucket, ""), 200),
        ("head", key(bucket, "large"), 200),
        ("delete", key(bucket, "large"), 204),
        ("get", key(bucket, "large"), 404),
    ]
    puts = proxy.matching("put", "put_part")
    assert [one.up_bytes for one in puts] == [4, LARGE_BYTES]
    assert [one.down_bytes for one in proxy.matching("get")[:2]] == [LARGE_BYTES, 10]
    assert proxy.moved_bytes()[0] == 4 + LARGE_BYTES
    assert [one.operation for one in proxy.writes()] == ["put", "put", "delete"]
    assert bucket.objects() == {"a b&ä": 4}


def test_an_upload_in_parts_goes_through(far, bucket, proxy):
    where = {"Bucket": BUCKET, "Key": key(bucket, "big")}
    identity = far.create_multipart_upload(**where)["UploadId"]
    sent = [
        far.upload_part(**where, UploadId=identity, PartNumber=number, Body=bytes(5 << 20))["ETag"]
        for number in (1, 2)
    ]
    assert len(far.list_parts(**where, UploadId=identity)["Parts"]) == 2
    assert len(far.list_multipart_uploads(Bucket=BUCKET, Prefix=where["Key"])["Uploads"]) == 1
    parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(sent, 1)]
    far.complete_multipart_upload(**where, UploadId=identity, MultipartUpload={"Parts": parts})
    second = far.create_multipart_upload(**where)["UploadId"]
    far.abort_multipart_upload(**where, UploadId=second)
    far.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": where["Key"]}]})
    assert [one.operation for one in proxy.requests] == [
        "begin_upload",
        "put_part",
        "put_part",
        "list_parts",
        "list_uploads",
        "complete_upload",
        "begin_upload",
        "abort_upload",
        "delete_many",
    ]
    assert bucket.objects() == {}


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (faults.SLOW_DOWN, (503, "SlowDown")),
        (faults.TOO_MANY, (429, "TooManyRequests")),
        (faults.INTERNAL, (500, "InternalError")),
        (faults.EXPIRED, (400, "ExpiredToken")),
        (faults.DENIED, (403, "AccessDenied")),
        (faults.CONFLICTING, (409, "ConditionalRequestConflict")),
        (faults.SKEWED, (403, "RequestTimeTooSkewed")),
        (faults.ResetBefore(), (0, "ConnectionClosedError")),
        (faults.ResetInRequest(), (0, "ConnectionClosedError")),
    ],
    ids=lambda value: value.name if isinstance(value, faults.Fault) else "",
)
@pytest.mark.parametrize("length_bytes", [4, LARGE_BYTES], ids=["small", "large"])
def test_a_put_that_the_server_never_gets_whole(far, bucket, proxy, fault, seen, length_bytes):
    rule = proxy.add(fault, operation="put", when=only(2))
    put(far, bucket, "a", bytes(length_bytes))
    assert error_of(lambda: put(far, bucket, "b", bytes(length_bytes))) == seen
    assert (rule.matched, rule.fired) == (2, 1)
    assert bucket.objects() == {"a": length_bytes}
    put(far, bucket, "b", bytes(length_bytes))
    assert bucket.objects() == {"a": length_bytes, "b": length_bytes}
    assert [one.fault for one in proxy.requests] == [None, fault.name, None]
    assert [one.status for one in proxy.requests] == [200, seen[0] or None, 200]
    assert proxy.requests[1].up_bytes == (length_bytes // 2 if fault.name == "ResetInRequest" else 0)


def test_the_headers_of_an_answer_are_sent(far, bucket, proxy):
    proxy.add(faults.Answer(429, "TooManyRequests", {"Retry-After": "7"}))
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        put(far, bucket, "a", b"")
    assert caught.value.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "7"


@pytest.mark.parametrize("fault", [faults.LostReply(), faults.HalfReply(), faults.ShortReply()])
def test_a_put_that_is_done_and_not_told(far, bucket, proxy, fault):
    proxy.add(fault, operation="put")
    assert error_of(lambda: put(far, bucket, "a", b"1"))[0] == 0
    assert bucket.content() == {"a": b"1"}
    assert proxy.requests[0].status is None
    assert proxy.requests[0].up_bytes == 1


@pytest.mark.parametrize("fault", [faults.HalfReply(), faults.ShortReply()])
def test_half_a_reply_is_half_of_it(far, bucket, proxy, fault):
    bucket.put("a", bytes(LARGE_BYTES))
    rule = proxy.add(fault, operation="get", when=only(1))
    assert error_of(lambda: get(far, bucket, "a"))[0] == 0
    assert rule.fired == 1
    assert proxy.requests[0].down_bytes == LARGE_BYTES // 2
    assert get(far, bucket, "a") == bytes(LARGE_BYTES)


def test_a_put_that_arrives_twice_is_seen_as_the_second_one(far, bucket, proxy):
    rule = proxy.add(faults.Twice(), key="*/a", when=only(1))
    assert error_of(lambda: put(far, bucket, "a", b"1", IfNoneMatch="*")) == (412, "PreconditionFailed")
    assert rule.fired == 1
    assert bucket.content() == {"a": b"1"}
    assert proxy.requests[0].up_bytes == 2
    assert error_of(lambda: put(far, bucket, "b", bytes(LARGE_BYTES), IfNoneMatch="*")) == (200, "")


def test_an_error_in_a_success(far, bucket, proxy):
    proxy.add(faults.ERROR_IN_SUCCESS, operation="complete_upload")
    where = {"Bucket": BUCKET, "Key": key(bucket, "big")}
    identity = far.create_multipart_upload(**where)["UploadId"]
    tag = far.upload_part(**where, UploadId=identity, PartNumber=1, Body=b"1")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    found = error_of(lambda: far.complete_multipart_upload(**where, UploadId=identity, MultipartUpload=parts))
    assert found[1] == "InternalError"
    assert bucket.objects() == {}
    assert bucket.uploads() == ["big"]
    bucket.client.abort_multipart_upload(**where, UploadId=identity)


def test_slow_bodies_take_their_time_both_ways(far, bucket, proxy):
    proxy.add(faults.Slow(bytes_per_second=1_000_000))
    started = time.monotonic()
    put(far, bucket, "a", bytes(100_000))
    assert get(far, bucket, "a") == bytes(100_000)
    # Not that it is quick, but that it is not: a lower bound holds on any machine.
    assert time.monotonic() - started >= 0.2


def test_a_silent_server_is_left_by_the_client(bucket, proxy):
    impatient = client(proxy.endpoint, timeout_seconds=0.2)
    proxy.add(faults.Silent())
    assert error_of(lambda: put(impatient, bucket, "a", b"1")) == (0, "ReadTimeoutError")
    impatient.close()
    assert bucket.objects() == {}
    assert (proxy.requests[0].fault, proxy.requests[0].status) == ("Silent", None)


def test_a_stale_listing_is_the_first_one_again(far, bucket, proxy):
    rule = proxy.add(faults.StaleList(), operation="list", when=only(1, 3))
    bucket.put("a", b"")
    assert listed(far, bucket) == ["a"]
    assert rule.fired == 0  # nothing older was there to answer with
    bucket.put("b", b"")
    assert listed(far, bucket) == ["a", "b"]
    bucket.delete("a")
    assert listed(far, bucket) == ["a"]
    assert rule.fired == 1
    assert listed(far, bucket) == ["b"]


def test_a_skewed_clock_is_off_in_headers_and_listings(far, bucket, proxy):
    bucket.put("a", b"12")
    near = bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=bucket.prefix)["Contents"][0]["LastModified"]
    proxy.add(faults.Skew(seconds=86_400))
    row = far.list_objects_v2(Bucket=BUCKET, Prefix=bucket.prefix)["Contents"][0]
    day = dt.timedelta(days=1)
    assert row["LastModified"] == near.replace(microsecond=0) + day
    assert row["Size"] == 2
    head = far.head_object(Bucket=BUCKET, Key=key(bucket, "a"))
    assert abs(head["LastModified"] - day - near) < dt.timedelta(seconds=2)
    assert get(far, bucket, "a") == b"12"


@pytest.mark.parametrize("after", [False, True], ids=["before the server", "after the server"])
def test_a_held_request_stands_still_until_it_is_let_go(far, bucket, proxy, after):
    hold = faults.Hold(after=after)
    proxy.add(hold, operation="put")
    thread = threading.Thread(target=put, args=(far, bucket, "a", b"1"))
    thread.start()
    assert hold.reached.wait(10)
    assert bucket.names() == (["a"] if after else [])
    assert thread.is_alive()
    hold.let_go()
    thread.join(10)
    assert bucket.content() == {"a": b"1"}
    assert proxy.requests[0].status == 200


def test_a_proxy_that_goes_down_refuses_and_comes_back(far, bucket, proxy):
    put(far, bucket, "a", b"1")
    proxy.go_down()
    for _ in range(2):
        assert error_of(lambda: put(far, bucket, "b", b"1"))[0] == 0
    assert error_of(lambda: put(far, bucket, "b", b"1")) == (0, "EndpointConnectionError")
    assert bucket.names() == ["a"]
    proxy.come_back()
    put(far, bucket, "b", b"1")
    assert bucket.names() == ["a", "b"]


def test_going_down_ends_what_is_under_way(far, bucket, proxy):
    hold = faults.Hold()
    proxy.add(hold)
    found = []
    thread = threading.Thread(target=lambda: found.append(error_of(lambda: put(far, bucket, "a", b"1"))))
    thread.start()
    assert hold.reached.wait(10)
    proxy.go_down()
    thread.join(10)
    assert found == [(0, "ConnectionClosedError")]
    hold.let_go()


def test_clearing_forgets_rules_and_requests(far, bucket, proxy):
    proxy.add(faults.DENIED)
    assert error_of(lambda: put(far, bucket, "a", b"1")) == (403, "AccessDenied")
    proxy.clear()
    put(far, bucket, "a", b"1")
    assert [str(one) for one in proxy.requests] == [f"1 put {key(bucket, 'a')} 200"]


# Rules alone


def request(method: str = "PUT", target: str = "/b/k", **headers: str) -> Request:
    return Request(1, method, target, Head("", list(headers.items())))


class FakeExchange:
    def __init__(self, of: Request) -> None:
        self.request = of
        self.listings: dict[str, bytes] = {}


def taken(rule: Rule, requests: list[Request]) -> list[int]:
    """Returns the numbers of the requests that a rule takes, from 1 on."""
    return [number for number, one in enumerate(requests, 1) if rule.takes(FakeExchange(one))]


def test_rules_count_what_matches_them():
    puts = [request() for _ in range(5)]
    assert taken(Rule(faults.DENIED, when=only(2)), puts) == [2]
    assert taken(Rule(faults.DENIED, when=only(2, 5)), puts) == [2, 5]
    assert taken(Rule(faults.DENIED, when=from_on(3)), puts) == [3, 4, 5]
    assert taken(Rule(faults.DENIED), puts) == [1, 2, 3, 4, 5]
    mixed = [request("GET"), request(), request("GET"), request(target="/b/other"), request()]
    assert taken(Rule(faults.DENIED, operation="put", when=only(2)), mixed) == [4]
    assert taken(Rule(faults.DENIED, key="k", operation="p*", when=only(2)), mixed) == [5]
    assert taken(Rule(faults.DENIED, where=lambda one: one.method == "GET"), mixed) == [1, 3]


@pytest.mark.parametrize(
    ("method", "target", "operation", "key"),
    [
        ("GET", "/b/a%20b/c", "get", "a b/c"),
        ("GET", "/b?list-type=2&prefix=x%2F", "list", "x/"),
        ("GET", "/b/?prefix=x", "list", "x"),
        ("GET", "/b?uploads", "list_uploads", ""),
        ("GET", "/b/k?uploadId=1", "list_parts", "k"),
        ("HEAD", "/b/k", "head", "k"),
        ("PUT", "/b", "create_bucket", ""),
        ("PUT", "/b/k", "put", "k"),
        ("PUT", "/b/k?partNumber=2&uploadId=1", "put_part", "k"),
        ("POST", "/b/k?uploads", "begin_upload", "k"),
        ("POST", "/b/k?uploadId=1", "complete_upload", "k"),
        ("POST", "/b?delete", "delete_many", ""),
        ("DELETE", "/b/k?uploadId=1", "abort_upload", "k"),
        ("DELETE", "/b/k", "delete", "k"),
    ],
)
def test_operations_and_keys_of_requests(method, target, operation, key):
    one = request(method, target)
    assert (one.operation, one.key) == (operation, key)
    assert one.is_write == (method not in ("GET", "HEAD"))


def test_bodies_in_chunks():
    assert unchunked(b"3\r\nabc\r\nb;x=1\r\n0123456789a\r\n0\r\n\r\n") == b"abc0123456789a"
