"""api §0: transport, JSON, names, numbers, errors, the performance block."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cases import case
from tests.contract.asking import (
    JSON,
    NO_SUCH_PREFIX,
    Connection,
    diff,
    diff_records,
    envelope,
    head_seq,
    missing,
    ok,
    put,
    refused,
    state,
    write,
    write_raw,
)
from tests.contract.auth_table import ROUTES
from tests.contract.socket_client import Socket
from tests.harness import Service
from topics.settings import COMMAND_BYTES_MAX

RECORD = b'{"records":[{"data":1}]}'


# --- 0.1 transport


def test_http2_prior_knowledge_on_the_same_port(service: Service, topic: str) -> None:
    with httpx.Client(base_url=service.url, http1=False, http2=True, timeout=20) as h2:
        answer = h2.post(f"/v0/topics/{topic}", json={"records": [{"data": {"over": "h2"}}]})
        assert answer.http_version == "HTTP/2"
        assert ok(answer)["first_seq"] == 1
        refused(h2.get(f"/v0/topics/{NO_SUCH_PREFIX}h2"), 404, "topic_not_found")
    assert diff_records(service.client, topic)[0].data == b'{"over":"h2"}'


def test_bodies_without_records_are_short(service: Service, topic: str) -> None:
    """Decoded, they take 25 times their length: 60 MB of lists of seqs or writers took a frontend to 1.6 GB."""
    with_records = {"/v0/topics/{topic}", "/v0/stage/{topic}"}
    for row in ROUTES:
        if row.json is not None:
            with case(row.method, row.path):
                path = row.path.format(topic=topic, router=topic, sink=topic, cursor="c")
                answer = service.client.request(row.method, path, json={**row.json, "x": "y" * COMMAND_BYTES_MAX})
                if row.method == "POST" and row.path in with_records:
                    ok(answer)
                else:
                    error = refused(answer, 413, "payload_too_large")
                    assert error["detail"] == {"max_body_bytes": COMMAND_BYTES_MAX}
    with Socket(service) as socket:
        assert socket.ask("subscribe", topics=["x" * COMMAND_BYTES_MAX], request_id=1)["code"] == "payload_too_large"
        records = [{"data": "x" * 1_000_000}] * 3
        assert socket.ask("publish", topic=topic, records=records, request_id=2)["op"] == "ack"


def test_fields_of_a_configuration_that_are_not_known_are_not_decoded(service: Service, topic: str) -> None:
    config = b'{"ttl_ms": 7000000, "x": [1e400, {"y": []}]}'
    ok(service.client.put(f"/v0/topics/{topic}", content=config, headers=JSON))
    write_raw(service.client, f"{topic}.2", b'{"records":[{"data":1}],"config":%b}' % config)
    assert [state(service.client, name)["config"]["ttl_ms"] for name in (topic, f"{topic}.2")] == [7_000_000] * 2


@pytest.mark.parametrize("is_h2", [False, True])
def test_a_target_has_the_same_limit_over_both_protocols(service: Service, is_h2: bool) -> None:
    with httpx.Client(base_url=service.url, http1=not is_h2, http2=is_h2, timeout=20) as client:
        refused(client.get("/v0/topics/" + "a" * 17_000), 414, "uri_too_long")
        refused(client.get("/v0/topics?prefix=" + "a" * 17_000), 414, "uri_too_long")
        ok(client.get("/v0/topics?prefix=" + "a" * 16_000))


def test_a_connection_serves_many_requests(service: Service, topic: str) -> None:
    connection = Connection(service)
    for n in range(1, 51):
        status, body, _ = connection.send("POST", f"/v0/topics/{topic}", RECORD)
        assert status in (200, 201)
        assert json.loads(body)["last_seq"] == n
    assert connection.kept
    connection.close()


# --- 0.2 JSON: content types


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx", "json"]
)
@pytest.mark.parametrize("route", ["", "/diff"])
def test_a_body_needs_the_json_content_type(
    client: httpx.Client, topic: str, route: str, content_type: str | None
) -> None:
    put(client, topic)
    body = b'{"records":[{"data":1}],"from_seq":0}'
    headers = {} if content_type is None else {"Content-Type": content_type}
    refused(client.post(f"/v0/topics/{topic}{route}", content=body, headers=headers), 415, "unsupported_media_type")
    assert head_seq(client, topic) == 0


def test_put_and_watch_bodies_need_it_too(client: httpx.Client, topic: str) -> None:
    text = {"Content-Type": "text/plain"}
    refused(client.put(f"/v0/topics/{topic}", content=b"{}", headers=text), 415, "unsupported_media_type")
    missing(client, topic)
    refused(client.post("/v0/watch", content=b'{"topics":{}}', headers=text), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "content_type",
    ["application/json; charset=utf-8", "application/json;charset=UTF-8", "Application/JSON", "application/json ;x=y"],
)
def test_content_type_parameters_and_case_do_not_matter(client: httpx.Client, topic: str, content_type: str) -> None:
    ok(client.post(f"/v0/topics/{topic}", content=RECORD, headers={"Content-Type": content_type}))


def test_an_empty_put_body_is_an_empty_object(client: httpx.Client, topic: str) -> None:
    answer = client.put(f"/v0/topics/{topic}")
    assert answer.status_code == 201
    assert ok(answer)["created"] is True


def test_unknown_request_fields_are_ignored(client: httpx.Client, topic: str) -> None:
    put(client, topic, colour="blue")
    body = {"records": [{"data": 1, "shape": "round", "$seq": 77, "$ts": 5}], "later": {"x": [1]}}
    assert ok(client.post(f"/v0/topics/{topic}", json=body))["first_seq"] == 1
    record = diff_records(client, topic, mood="good")[0]
    assert record.seq == 1
    assert record.ts > 5


# --- 0.3 names

GOOD_NAMES = ["a", "Z9", "0", "a.b_c:d-e", "x" * 255, "A:B", "a..b", "9--"]
BAD_NAMES = ["-a", ".a", "_a", ":a", "a b", "a>b", "é", "a,b", "a+b", "x" * 256, "a*", "a\x00", "a\n", "a@b", "~"]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_good_names(client: httpx.Client, name: str) -> None:
    ok(client.delete(f"/v0/topics/{name}"))
    assert write(client, name, 1)["topic"] == name
    assert state(client, name)["topic"] == name
    ok(client.delete(f"/v0/topics/{name}"))


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_bad_names(client: httpx.Client, name: str) -> None:
    path = "/v0/topics/" + "".join(f"%{byte:02X}" for byte in name.encode())
    refused(client.put(path, json={}), 400, "invalid_request")
    refused(client.get(path), 400, "invalid_request")
    refused(client.post(path, json={"records": [{"data": 1}]}), 400, "invalid_request")
    refused(client.post(path + "/diff", json={}), 400, "invalid_request")
    refused(client.delete(path), 400, "invalid_request")
    refused(client.post("/v0/watch", json={"topics": {name: {}}}), 400, "invalid_request")


@pytest.mark.parametrize("name", ["a%2Fb", "a%2fdiff", "%2F", "a%2F"])
def test_a_slash_in_a_name_parts_nothing(client: httpx.Client, topic: str, name: str) -> None:
    write(client, topic, 1)
    name = f"{topic}{name}"
    for path in (f"/v0/topics/{name}", f"/v0/routers/{name}", f"/v0/topics/{topic}/cursors/{name}"):
        assert "is not valid" in refused(client.get(path), 400, "invalid_request")["message"]
    for path in (f"/v0/topics/{name}", f"/v0/topics/{name}/diff", f"/v0/stage/{name}"):
        refused(client.post(path, json={"records": [{"data": 1}]}), 400, "invalid_request")
    refused(client.get(f"/v0/topics/{topic}%2Fdiff/x"), 400, "invalid_request")
    refused(client.get("/v0%2Ftopics"), 404, "not_found")
    refused(client.post(f"/v0/topics/{topic}/diff%2F", json={}), 404, "not_found")
    assert state(client, topic)["head_seq"] == 1


def test_names_are_case_sensitive_and_percent_decoding_is_transparent(client: httpx.Client, topic: str) -> None:
    lower, upper = f"{topic}:a", f"{topic}:A"
    write(client, lower, "lower")
    missing(client, upper)
    write(client, upper, "upper")
    encoded = "".join(f"%{byte:02x}" for byte in lower.encode())
    assert diff_records(client, encoded)[0].data == b'"lower"'
    assert diff_records(client, upper)[0].data == b'"upper"'


# --- 0.4 numbers

NOT_COUNTS: list[Any] = [-1, 1.5, "1", 2**64, True, [], {}]


@pytest.mark.parametrize("field", ["from_seq", "limit", "wait_ms", "max_batch_bytes", "from_ts"])
@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
def test_a_diff_number_that_is_none_is_refused_by_name(
    client: httpx.Client, topic: str, field: str, value: Any
) -> None:
    put(client, topic)
    error = refused(client.post(f"/v0/topics/{topic}/diff", json={field: value}), 400, "invalid_request")
    assert field in error["message"] + json.dumps(error.get("detail", {}))


@pytest.mark.parametrize("field", ["ttl_ms", "cap_records", "cap_bytes", "idempotency_window_ms", "max_deliveries"])
@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
def test_a_config_number_that_is_none_is_refused_by_name(
    client: httpx.Client, topic: str, field: str, value: Any
) -> None:
    error = refused(client.put(f"/v0/topics/{topic}", json={field: value}), 400, "invalid_request")
    assert field in error["message"] + json.dumps(error.get("detail", {}))
    missing(client, topic)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ttl_ms", "1"), ("cap_bytes", 1.5), ("cap_records", None), ("ttl_ms", -1), ("durable", 1), ("discard", "x"),
     ("type", 3), ("priority", "high"), ("on_ack", "x"), ("dead_letter", 7), ("dead_letter", ""),
     ("dead_letter", "_x")],
)  # fmt: skip
def test_what_is_wrong_in_a_config_is_named_in_detail(client: httpx.Client, topic: str, field: str, value: Any) -> None:
    error = refused(client.put(f"/v0/topics/{topic}", json={field: value}), 400, "invalid_request")
    assert error["detail"] == {"field": field}
    body = {"records": [{"data": 1}], "config": {field: value}}
    error = refused(client.post(f"/v0/topics/{topic}", json=body), 400, "invalid_request")
    assert error["detail"] == {"field": field}


@pytest.mark.parametrize("meta", [{"k": 1}, [], {f"k{n}": "" for n in range(65)}, {"k": "v" * 16384}])
def test_what_is_wrong_in_a_meta_is_named_by_its_record(client: httpx.Client, topic: str, meta: Any) -> None:
    body = {"records": [{"data": 1}, {"data": 2, "meta": meta}]}
    error = refused(client.post(f"/v0/topics/{topic}", json=body), 400, "invalid_request")
    assert error["detail"] == {"field": "records[1].meta"}


@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
def test_if_head_seq_that_is_none_is_refused_by_name(client: httpx.Client, topic: str, value: Any) -> None:
    body = {"records": [{"data": 1}], "if_head_seq": value}
    error = refused(client.post(f"/v0/topics/{topic}", json=body), 400, "invalid_request")
    assert "if_head_seq" in error["message"] + json.dumps(error.get("detail", {}))
    missing(client, topic)


def test_a_number_that_is_too_large_is_named_with_what_it_is_in(client: httpx.Client, topic: str) -> None:
    producer = {"records": [{"data": 1}], "producer": {"id": "p", "epoch": 2**64, "n": 1}}
    error = refused(client.post(f"/v0/topics/{topic}", json=producer), 400, "invalid_request")
    assert error["detail"] == {"field": "producer.epoch"}
    put(client, topic)
    watch = {"topics": {topic: {"from_seq": 2**64}}}
    error = refused(client.post("/v0/watch", json=watch), 400, "invalid_request")
    assert error["detail"] == {"field": f"topics.{topic}.from_seq"}


@pytest.mark.parametrize("value", [value for value in NOT_COUNTS if value is not True], ids=repr)
def test_before_seq_that_is_none_is_refused_by_name(client: httpx.Client, topic: str, value: Any) -> None:
    write(client, topic, 1)
    error = refused(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": value}), 400, "invalid_request")
    assert "before_seq" in error["message"] + json.dumps(error.get("detail", {}))
    assert state(client, topic)["count"] == 1


@pytest.mark.parametrize("value", ["-1", "1.5", "x", str(2**64), ""])
@pytest.mark.parametrize("path", ["/v0/topics", "/v0/routers"])
def test_a_page_size_that_is_none_is_refused_by_name(client: httpx.Client, path: str, value: str) -> None:
    error = refused(client.get(path, params={"page_size": value}), 400, "invalid_request")
    assert "page_size" in error["message"] + json.dumps(error.get("detail", {}))


@pytest.mark.parametrize("field", ["priority", "lease_ms", "claim_jitter_ms"])
@pytest.mark.parametrize("value", [2**31, 2**53 + 1, 2**63, 2**64 - 1])
def test_what_is_clamped_is_never_an_error(client: httpx.Client, topic: str, field: str, value: int) -> None:
    most = {"priority": 1000, "lease_ms": 86_400_000, "claim_jitter_ms": 5_000}[field]
    assert put(client, topic, **{field: value})["config"][field] == most
    if field == "priority":
        assert put(client, topic, priority=-value)["config"]["priority"] == -1000


def test_seq_is_a_json_number_up_to_u64(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    for largest in (2**53 + 1, 2**64 - 1):
        answer = client.post(f"/v0/topics/{topic}/diff", json={"from_seq": largest})
        assert type(ok(answer)["head_seq"]) is int
        assert b'"head_seq":1,' in answer.content


# --- 0.5 record keys


def test_absent_keys_are_left_out_and_data_never_is(client: httpx.Client, topic: str) -> None:
    bare = {"data": None}
    full = {"data": 0, "node": "n", "tag": "t", "meta": {"k": "v"}}
    ok(client.post(f"/v0/topics/{topic}", json={"records": [bare, full]}))
    first, second = diff(client, topic, include_tags=True)["records"]
    assert set(first) == {"$seq", "$ts", "data"}
    assert first["data"] is None
    assert set(second) == {"$seq", "$ts", "$node", "$tag", "data", "meta"}
    assert (second["$node"], second["$tag"], second["meta"]) == ("n", "t", {"k": "v"})


# --- 0.6 errors


@pytest.mark.parametrize(
    "path", ["/", "/v0", "/v0/", "/v0/nothing", "/v1/topics", "/v0/topics/a/b/c", "/v0/topics/a/nothing", "/x%00y"]
)
def test_unknown_paths(client: httpx.Client, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        refused(client.request(method, path), 404, "not_found")


METHODS = [
    ("GET", "/v0/topics/{}/diff", {"POST"}),
    ("PUT", "/v0/topics/{}/diff", {"POST"}),
    ("DELETE", "/v0/topics/{}/diff", {"POST"}),
    ("PATCH", "/v0/topics/{}", {"GET", "PUT", "POST", "DELETE"}),
    ("POST", "/v0/topics", {"GET"}),
    ("DELETE", "/v0/topics", {"GET"}),
    ("GET", "/v0/watch", {"POST"}),
    ("POST", "/v0/watch/wid_AAAAAAAAAAAAAAAAAAAAAA", {"GET"}),
    ("POST", "/v0/health", {"GET"}),
    ("DELETE", "/v0/ready", {"GET"}),
]


@pytest.mark.parametrize(
    ("method", "path", "allowed"), METHODS, ids=[f"{method} {path}" for method, path, _ in METHODS]
)
def test_known_path_other_method_is_405_with_allow(
    client: httpx.Client, topic: str, method: str, path: str, allowed: set[str]
) -> None:
    put(client, topic)
    answer = client.request(method, path.format(topic))
    refused(answer, 405, "method_not_allowed")
    listed = {name.strip() for name in answer.headers["allow"].split(",")}
    assert allowed <= listed
    assert method not in listed


def test_topic_not_found_names_the_topic_everywhere(client: httpx.Client, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    watch: dict[str, Any] = {"topics": {topic: {}}}
    answers = [client.get(path), client.post(f"{path}/diff", json={}), client.post("/v0/watch", json=watch)]
    for answer in answers:
        assert refused(answer, 404, "topic_not_found")["detail"]["topic"] == topic
    missing(client, topic)


def test_a_head_request_has_no_body(client: httpx.Client) -> None:
    answer = client.head("/v0/health")
    assert answer.status_code in (200, 405)
    assert answer.content == b""


def test_a_body_declared_above_the_limit_is_413_before_it_is_sent(service: Service, topic: str) -> None:
    head = f"POST /v0/topics/{topic} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as raw:
        raw.sendall(f"{head}Content-Length: {(64 << 20) + 1}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413"), answer
    header, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in header.lower()
    envelope(body, "application/json", "payload_too_large")
    missing(service.client, topic)


@pytest.mark.parametrize("sent", [b"", b"x"])
@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_a_command_declared_above_its_own_limit_is_413_at_once(
    service: Service, topic: str, sent: bytes, expect: str
) -> None:
    """Only 2 MiB that had arrived were refused, though the head had said what would come."""
    head = f"POST /v0/topics/{topic}/diff HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{expect}"
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as raw:
        raw.sendall(f"{head}Content-Length: {COMMAND_BYTES_MAX + 1}\r\n\r\n".encode() + sent)
        answer = raw.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413"), answer
    assert b'"max_body_bytes":%d' % COMMAND_BYTES_MAX in answer.replace(b" ", b"")


@pytest.fixture(scope="module")
def narrow() -> Iterator[Service]:
    """A service with a body limit that a test can cross in full."""
    with Service(frontends=1, shards=1, env={"TOPICS_MAX_BODY_BYTES": "262144"}) as running:
        yield running


@pytest.mark.parametrize("transfer", ["length", "chunked"])
def test_a_body_above_the_limit_is_413_and_the_service_usable(narrow: Service, topic: str, transfer: str) -> None:
    put(narrow.client, topic)
    body = b'{"records":[{"data":"' + b"x" * 300_000 + b'"}]}'

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    content = body if transfer == "length" else chunks()
    with httpx.Client(base_url=narrow.url, timeout=10) as client:
        answer = client.post(f"/v0/topics/{topic}", content=content, headers=JSON)
        assert refused(answer, 413, "payload_too_large")["detail"] == {"max_body_bytes": 262_144}
        assert head_seq(client, topic) == 0
        assert write(client, topic, 1)["first_seq"] == 1


def test_a_body_at_the_limit_passes(narrow: Service, topic: str) -> None:
    frame = b'{"records":[{"data":""}]}'
    body = frame.replace(b'""', b'"' + b"x" * (262_144 - len(frame)) + b'"')
    assert len(body) == 262_144
    assert write_raw(narrow.client, topic, body).status_code == 201


# --- 0.7 performance


def test_performance_says_what_the_write_did(client: httpx.Client, topic: str) -> None:
    relaxed = write(client, topic, 1)["performance"]
    assert relaxed["fsync_ms"] == 0.0
    assert relaxed["wal_append_ms"] > 0
    assert relaxed["throttle_wait_ms"] == 0.0
    put(client, f"{topic}.synced", durability="fsync")
    synced = write(client, f"{topic}.synced", 1)["performance"]
    assert synced["fsync_ms"] > 0
    assert synced["server_total_ms"] >= synced["fsync_ms"]


def test_performance_says_what_the_read_did(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(30), node="me")
    write(client, topic, *range(5))
    performance = diff(client, topic, node="me")["performance"]
    assert performance["records_scanned"] == 35
    assert "cold_segments_read" not in performance


def test_every_route_reports_its_time(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    ok(client.get(f"/v0/topics/{topic}"))
    ok(client.get("/v0/topics"))
    ok(client.post("/v0/watch", json={"topics": {topic: {}}}))
    ok(client.delete(f"/v0/topics/{topic}"))


@pytest.mark.parametrize("is_h2", [False, True])
def test_a_header_with_two_values_is_refused(service: Service, topic: str, is_h2: bool) -> None:
    """One of two keys counted, and the other one was passed over."""
    put(service.client, topic)
    with httpx.Client(base_url=service.url, http1=not is_h2, http2=is_h2, timeout=20) as client:
        for name, one, other in (
            ("Idempotency-Key", "a", "b"),
            ("Content-Type", "application/json", "text/plain"),
            ("Last-Event-Id", "a", "b"),
            ("Authorization", "Bearer a", "Bearer b"),
        ):
            with case(name):
                headers = [(name, one), (name, other), *JSON.items()][: 2 if name == "Content-Type" else 3]
                answer = client.post(f"/v0/topics/{topic}", content=RECORD, headers=headers)
                assert f"header {name} is there twice" in refused(answer, 400, "invalid_request")["message"]
        same = [("Idempotency-Key", "a"), ("Idempotency-Key", "a"), *JSON.items()]
        assert ok(client.post(f"/v0/topics/{topic}", content=RECORD, headers=same))["first_seq"] == 1


def test_a_query_parameter_that_comes_twice_is_refused_on_every_route(client: httpx.Client, topic: str) -> None:
    put(client, topic, type="queue")
    wid = ok(client.post("/v0/watch", json={"topics": {topic: {"from_seq": 0}}}))["wid"]
    names = {
        "topic": topic,
        "wid": wid,
        "sink": topic,
        "cursor": topic,
        "router": topic,
        "name": topic,
        "pin": f"pin_{'A' * 22}",
    }
    asked = []
    query: dict[str, Any]
    for path, methods in client.get("/v0/openapi.json").json()["paths"].items():
        for method, operation in methods.items():
            for one in operation.get("parameters", ()):
                name = one["name"]
                if one["in"] != "query" or name == "token":  # without keys nobody looks at a token
                    continue
                query = {"node": "n"} if path.endswith("/work") else {}
                if name in ("order", "kind", "contains"):
                    query["sort"] = "topic"
                body = {"records": [{"data": 1}]} if method == "post" else None
                asked_twice = query | {name: ["1", "1"]}
                answer = client.request(method.upper(), path.format(**names), params=asked_twice, json=body)
                with case(method, path, name):
                    error = refused(answer, 400, "invalid_request")
                    assert error["message"] == f"?{name} is there 2 times: give it once"
                    assert error["detail"] == {"field": name}
                asked.append(name)
    assert {"sort", "prefix", "touch", "if_empty", "return_seqs", "from_seq", "max", "txn", "lenient"} <= {*asked}
    assert state(client, topic)["head_seq"] == 0
