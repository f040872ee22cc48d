"""api §0.2: payloads byte for byte, what is not JSON, compression."""

from __future__ import annotations

import gzip
import json
import re

import httpx
import pytest

from tests.cases import case
from tests.contract.asking import (
    JSON,
    Connection,
    diff_records,
    envelope,
    head_seq,
    missing,
    put,
    refused,
    write,
    write_raw,
)
from tests.contract.socket_client import Socket
from tests.contract.stream import Stream, watch
from tests.harness import Service

RECORD = b'{"records":[{"data":1}]}'


# --- 0.2 JSON: payloads byte for byte

SPELLINGS = {
    "integer": b"7",
    "negative-zero": b"-0",
    "fraction-zeros": b"1.500",
    "exponents": b"[1E5,1e+5,1e-05,0.10e2]",
    "beyond-double": b"123456789012345678901234567890",
    "many-digits": b"0.1234567890123456789012345678901234567890",
    "beyond-range": b"1e400",
    "duplicate-keys": b'{"a":1,"a":2,"b":3,"a":{"a":1,"a":1}}',
    "key-order": b'{"z":1,"a":2,"m":3}',
    "escapes": rb'"\u0041\/\"\\\b\f\n\r\t\u00e9\ud83d\ude00"',
    "raw-unicode": '"é→😀"'.encode(),
    "escaped-controls": rb'"\u0000\u001f\u007f\u2028\u2029"',
    "inner-spaces": b'{ "a" : [ 1 ,\t2 , 3 ] , "b" :  null }',
    "inner-newlines": b'{\n  "a": 1,\r\n  "b": [\n    2\n  ]\n}',
    "empty-key": b'{"":{"":[]}}',
    "null": b"null",
    "false": b"false",
    "empty-string": b'""',
    "empty-object": b"{}",
    "empty-array": b"[]",
    "server-owned-names": b'{"$seq":9,"$ts":1,"data":2,"records":[{"data":3}]}',
    "nested": b"[" * 100 + b"]" * 100,
    "looks-like-framing": b'{"a":"\\"},{\\"$seq\\":99,\\"data\\":"}',
}


@pytest.mark.parametrize("data", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_data_comes_back_byte_for_byte(client: httpx.Client, topic: str, data: bytes) -> None:
    body = b'{ "records" : [ {"tag":"x", "data" : ' + data + b' , "node":"n"}, {"data":' + data + b"}] }"
    answer = write_raw(client, topic, body)
    assert answer.status_code == 201, answer.text
    assert [record.data for record in diff_records(client, topic)] == [data, data]


def test_meta_comes_back_as_it_was_written(client: httpx.Client, topic: str) -> None:
    meta = '{"trace": "a\\u0062c", "é":"→", "empty":""}'
    write_raw(client, topic, b'{"records":[{"data":0,"meta":' + meta.encode() + b"}]}")
    record = diff_records(client, topic)[0]
    assert record.meta is not None
    assert json.loads(record.meta) == json.loads(meta)


# --- 0.2 JSON: what is not JSON

MALFORMED = {
    "bare-word": (b'{"records":[{"data":nope}]}', 20),
    "nan": (b'{"records":[{"data":NaN}]}', 20),
    "infinity": (b'{"records":[{"data":-Infinity}]}', 20),
    "leading-zero": (b'{"records":[{"data":01}]}', 20),
    "hex": (b'{"records":[{"data":0x10}]}', 20),
    "single-quotes": (b"{'records':[]}", 1),
    "trailing-comma": (b'{"records":[{"data":1},]}', 23),
    "comment": (b'{"records":[{"data":1}]/*x*/}', 23),
    "cut-short": (b'{"records":[{"data":1}', 22),
    "trailing-garbage": (b'{"records":[{"data":1}]} x', 25),
    "second-document": (b'{"records":[{"data":1}]}{"records":[]}', 24),
    "bad-escape": (rb'{"records":[{"data":"\x"}]}', 21),
    "control-in-string": (b'{"records":[{"data":"\x01"}]}', 21),
    "invalid-utf8": (b'{"records":[{"data":"\xff\xfe"}]}', 21),
    "overlong-utf8": (b'{"records":[{"data":"\xc0\xaf"}]}', 21),
    "surrogate-utf8": (b'{"records":[{"data":"\xed\xa0\x80"}]}', 21),
    "byte-order-mark": (b"\xef\xbb\xbf" + RECORD, 0),
    "empty": (b"", 0),
    "only-space": (b"  ", 2),
}


@pytest.mark.parametrize(("body", "position"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_json_is_refused_with_its_position(
    client: httpx.Client, topic: str, body: bytes, position: int
) -> None:
    error = refused(write_raw(client, topic, body), 400, "invalid_request")
    named = [int(number) for number in re.findall(r"\d+", error["message"])]
    assert any(abs(number - position) <= 4 for number in named), f"{error['message']!r} does not say byte {position}"
    missing(client, topic)


@pytest.mark.parametrize("route", ["/v0/topics/{}/diff", "/v0/watch", "/v0/topics/{}"])
@pytest.mark.parametrize("body", [b"[]", b'"x"', b"7", b"null", b"[{}]"])
def test_a_body_must_be_an_object(client: httpx.Client, topic: str, route: str, body: bytes) -> None:
    put(client, topic)
    refused(client.post(route.format(topic), content=body, headers=JSON), 400, "invalid_request")


@pytest.mark.parametrize("opening", [b"[", b'{"a":'], ids=["arrays", "objects"])
def test_nesting_without_bound_is_refused(client: httpx.Client, topic: str, opening: bytes) -> None:
    put(client, topic)
    body = b'{"records":[{"data":' + opening * 100_000
    refused(write_raw(client, topic, body), 400, "invalid_request")
    assert head_seq(client, topic) == 0


def test_a_lone_surrogate_is_refused_or_kept(client: httpx.Client, topic: str) -> None:
    data = rb'"\ud800 and \udfff"'
    answer = write_raw(client, topic, b'{"records":[{"data":' + data + b"}]}")
    if answer.status_code == 400:
        refused(answer, 400, "invalid_request")
    else:
        assert diff_records(client, topic)[0].data == data


def test_after_bad_json_the_connection_lives_on(service: Service, topic: str) -> None:
    connection = Connection(service)
    for body, _ in MALFORMED.values():
        status, content, content_type = connection.send("POST", f"/v0/topics/{topic}", body)
        assert status == 400
        envelope(content, content_type, "invalid_request")
    status, content, _ = connection.send("POST", f"/v0/topics/{topic}", RECORD)
    assert (status, json.loads(content)["first_seq"]) == (201, 1)
    assert connection.kept
    connection.close()


# --- 0.2 JSON: compression


def test_gzip_request_body(client: httpx.Client, topic: str) -> None:
    body = gzip.compress(b'{"records":[{"data":{ "packed":1 }}]}')
    assert write_raw(client, topic, body, **{"Content-Encoding": "gzip"}).status_code == 201
    assert diff_records(client, topic)[0].data == b'{ "packed":1 }'


@pytest.mark.parametrize("damage", ["cut", "not-gzip", "bad-checksum"])
def test_damaged_gzip_is_refused(client: httpx.Client, topic: str, damage: str) -> None:
    whole = gzip.compress(RECORD)
    body = {"cut": whole[:-10], "not-gzip": RECORD, "bad-checksum": whole[:-8] + b"\0" * 8}[damage]
    refused(write_raw(client, topic, body, **{"Content-Encoding": "gzip"}), 400, "invalid_request")
    missing(client, topic)


def test_an_unknown_content_encoding_is_refused(client: httpx.Client, topic: str) -> None:
    refused(write_raw(client, topic, RECORD, **{"Content-Encoding": "br"}), 415, "unsupported_media_type")
    missing(client, topic)


def test_a_gzip_bomb_is_413_and_the_connection_lives_on(service: Service, topic: str) -> None:
    put(service.client, topic)
    bomb = gzip.compress(b" " * (65 << 20))
    connection = Connection(service)
    status, content, content_type = connection.send("POST", f"/v0/topics/{topic}", bomb, **{"Content-Encoding": "gzip"})
    assert status == 413
    envelope(content, content_type, "payload_too_large")
    assert connection.send("POST", f"/v0/topics/{topic}", RECORD)[0] == 200
    assert connection.kept
    connection.close()
    assert head_seq(service.client, topic) == 1


def test_responses_are_gzipped_for_those_who_ask(client: httpx.Client, topic: str) -> None:
    write(client, topic, *["x" * 200] * 200)
    path = f"/v0/topics/{topic}/diff"
    zipped = client.post(path, json={}, headers={"Accept-Encoding": "gzip"})
    assert zipped.headers["content-encoding"] == "gzip"
    for refusal in ("identity", "gzip;q=0"):
        plain = client.post(path, json={}, headers={"Accept-Encoding": refusal})
        assert "content-encoding" not in plain.headers
        assert plain.json()["records"] == zipped.json()["records"]


def test_short_answers_and_event_streams_are_never_packed(service: Service, topic: str) -> None:
    write(service.client, topic, *["x" * 200] * 50)
    short = service.client.get(f"/v0/topics/{topic}", headers={"Accept-Encoding": "gzip"})
    assert len(short.content) < 1024
    assert "content-encoding" not in short.headers
    wid = watch(service.client, {topic: {}})["wid"]
    with Stream(service.url, wid, {"Accept-Encoding": "gzip", "Accept": "text/event-stream"}) as stream:
        assert "content-encoding" not in stream.response.headers
        assert len(stream.records(50)) == 50


@pytest.mark.parametrize("body", [b"{}x", b'{"records": 5, x', b'{"topics": 5}]', b'{"limit": "a", "batch": []} "'])
def test_what_is_not_json_is_named_before_what_does_not_fit(service: Service, topic: str, body: bytes) -> None:
    """A write or a watch with text behind its JSON heard of a field that is missing."""
    writing = ("POST", f"/v0/topics/{topic}"), ("POST", f"/v0/stage/{topic}"), ("POST", "/v0/txn/s/commit")
    reading = ("POST", f"/v0/topics/{topic}/diff"), ("POST", "/v0/watch")
    changing = ("PUT", f"/v0/topics/{topic}"), ("PUT", "/v0/routers/r"), ("POST", f"/v0/topics/{topic}/claim")
    for method, path in (*writing, *reading, *changing):
        with case(method, path):
            error = refused(service.client.request(method, path, content=body, headers=JSON), 400, "invalid_request")
            assert set(error["detail"]) == {"position"}
            assert error["message"].startswith("the body is not JSON")
    with Socket(service) as socket:
        socket.wire.send('{"op": "publish", "request_id": 1}x')
        assert "position" in socket.next("error")["detail"]
