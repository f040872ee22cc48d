"""api §11 by key, and what one connection may cost: streams, requests, connections, slow and large bodies."""

from __future__ import annotations

import gzip
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidHandshake, InvalidMessage, InvalidStatus

from tests.contract.asking import diff, envelope, ok, put, refused, write
from tests.contract.socket_client import Socket
from tests.contract.stream import Stream, held_by_frontends, watch
from tests.harness import Service, poll
from topics.frontend.entry.limits import LONG_BODIES

pytestmark = pytest.mark.long


@pytest.fixture
def start() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda **env: stack.enter_context(
            Service(env={f"TOPICS_{name.upper()}": str(value) for name, value in env.items()})
        )


def by(service: Service, key: str) -> httpx.Client:
    return httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {key}"}, timeout=35)


def throttled(answer: httpx.Response, limit: str, most: int) -> None:
    error = refused(answer, 429, "throttled")
    assert error["detail"] == {"limit": limit, "max": most}
    assert int(answer.headers["retry-after"]) >= 1


def test_event_streams_by_key_over_all_frontends(start: Any) -> None:
    service = start(api_keys="one,other", max_sse_connections_per_key=4)
    with by(service, "one") as one, by(service, "other") as other, ExitStack() as stack:
        put(one, "t")

        def open_by(client: httpx.Client, key: str) -> Stream:
            wid = watch(client, {"t": {}})["wid"]
            return stack.enter_context(Stream(service.url, wid, {"Authorization": f"Bearer {key}"}))

        streams = [open_by(one, "one") for _ in range(12)]
        admitted = [stream for stream in streams if stream.response.status_code == 200]
        assert len(admitted) == 4
        for stream in streams:
            if stream not in admitted:
                throttled(stream.response, "max_sse_connections_per_key", 4)
        with pytest.raises(InvalidStatus) as failed:
            Socket(service, key="one")
        assert failed.value.response.status_code == 429
        assert open_by(other, "other").response.status_code == 200
        admitted[0].close()
        poll("the place to be free", lambda: open_by(one, "one").response.status_code == 200)


@pytest.mark.parametrize("killing", [False, True])
def test_limits_by_key_under_churn(start: Any, killing: bool) -> None:
    """Streams, sockets and long polls of two keys come and go on both frontends: none holds more than its limit, and
    when all is over nothing is left counted, also when one of the frontends was killed again and again.
    """
    most, threads_each, turns = 2, 4, 6
    service = start(api_keys="one,other", max_sse_connections_per_key=most, max_inflight_per_key=most)
    with by(service, "one") as client:
        put(client, "t")
    held = {"one": 0, "other": 0}
    held_most, granted, refusals = dict(held), 0, 0
    lock = threading.Lock()

    def hold(key: str, by_how_much: int) -> None:
        nonlocal granted
        with lock:
            held[key] += by_how_much
            held_most[key] = max(held_most[key], held[key])
            granted += by_how_much > 0

    def come_and_go(key: str, seed: int) -> None:
        nonlocal refusals
        random_ = random.Random(seed)
        headers = {"Authorization": f"Bearer {key}"}
        client = by(service, key)
        ends_s = time.monotonic() + PATIENCE_S
        turn = 0
        # A request is refused at once: all turns may be over before a place that was given back is free.
        while turn < turns or (granted <= turns and time.monotonic() < ends_s):
            turn += 1
            try:
                with ExitStack() as stack:
                    if random_.random() < 0.5:
                        made = client.post("/v0/watch", json={"topics": {"t": {}}})
                        if made.status_code == 429:
                            raise RefusedError
                        stream = stack.enter_context(Stream(service.url, ok(made)["wid"], headers))
                        if stream.response.status_code == 429:
                            raise RefusedError
                        assert stream.response.status_code == 200
                    else:
                        stack.enter_context(Socket(service, key=key))
                    hold(key, 1)
                    stack.callback(hold, key, -1)
                    if client.post("/v0/topics/t/diff", json={"wait_ms": random_.randrange(60)}).status_code == 429:
                        raise RefusedError
            except (RefusedError, InvalidStatus):
                with lock:
                    refusals += 1
            except (httpx.TransportError, OSError, EOFError, InvalidMessage, InvalidHandshake):
                assert killing
        client.close()

    with ThreadPoolExecutor(2 * threads_each) as pool:
        jobs = [pool.submit(come_and_go, key, seed) for seed in range(threads_each) for key in ("one", "other")]
        for _ in range(3 if killing else 0):
            service.wait_healed(service.kill("frontend", 1))
        for job in jobs:
            job.result()
    assert granted > turns, granted
    assert refusals > 0
    assert not any(held.values())
    if not killing:  # what a client holds of a frontend that died counts for nobody
        assert max(held_most.values()) <= most, held_most

    def free(key: str) -> bool:
        """All of its places at once."""
        with ExitStack() as stack:
            headers = {"Authorization": f"Bearer {key}"}
            client = stack.enter_context(by(service, key))
            try:
                wids = [watch(client, {"t": {}})["wid"] for _ in range(most)]
            except AssertionError:  # throttled
                return False
            streams = [stack.enter_context(Stream(service.url, wid, headers)) for wid in wids]
            return all(stream.response.status_code == 200 for stream in streams)

    for key in ("one", "other"):
        poll(f"every place of {key!r} to be free", lambda: free(key), 20, 0.1)


PATIENCE_S = 30.0
"""A place is free again after that."""


class RefusedError(Exception):
    """429."""


def test_requests_in_flight_by_key_over_all_frontends(start: Any) -> None:
    service = start(api_keys="one,other", max_inflight_per_key=3)
    with by(service, "one") as one, by(service, "other") as other, ThreadPoolExecutor(3) as pool:
        put(one, "t")

        def poll_long() -> int:
            headers = {"Authorization": "Bearer one"}
            body = {"wait_ms": 30_000}
            return httpx.post(f"{service.url}/v0/topics/t/diff", json=body, headers=headers, timeout=35).status_code

        polls = [pool.submit(poll_long) for _ in range(3)]

        def waiting() -> int:
            # Not by the key in question, whose requests are what is counted.
            metrics = other.get("/v0/metrics", headers={"Accept": "application/json"}).json()
            return sum(metrics["topics_frontend_long_polls"].values())

        poll("the long polls to wait", lambda: waiting() == 3)
        throttled(one.get("/v0/topics/t"), "max_inflight_per_key", 3)
        throttled(one.post("/v0/topics/t", json={"records": [{"data": 1}]}), "max_inflight_per_key", 3)
        assert one.get("/v0/health").status_code == 200
        with Socket(service, key="one") as ws:
            assert ws.ask("publish", topic="t", records=[{"data": 1}])["code"] == "throttled"
        assert write(other, "t", "wakes them")["first_seq"] == 1
        assert [answer.result() for answer in polls] == [200] * 3
        # Refused and failed requests have given back what they took.
        for _ in range(5):
            ok(one.get("/v0/topics/t"))
            refused(one.get("/v0/topics/absent"), 404, "topic_not_found")
            refused(one.post("/v0/topics/t", content=b"{"), 415, "unsupported_media_type")


def test_connections_over_all_frontends(start: Any) -> None:
    service = start(max_connections=12)
    poll("connections of the start to be over", lambda: held_by_frontends(service, "connections_admitted") == 0)
    with ExitStack() as stack:
        refusals = 0
        opened: list[http.client.HTTPConnection] = []
        for _ in range(30):
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
            stack.callback(connection.close)
            # Nobody reads the request of one too many: its answer must not be lost to a reset for that.
            try:
                connection.request("GET", "/v0/health", body=b"x" * 100_000)
                answer = connection.getresponse()
            except OSError:  # it was refused, and this process then took longer to send than its rest was read
                assert len(opened) == 12
                refusals += 1
                continue
            body = answer.read()
            if answer.status == 429:
                error = envelope(body, answer.getheader("content-type", ""), "throttled")
                assert error["detail"] == {"limit": "max_connections", "max": 12}
                assert "TOPICS_MAX_CONNECTIONS" in error["message"]
                assert int(answer.getheader("retry-after", "0")) >= 1
                refusals += 1
            else:
                assert answer.status == 200
                opened.append(connection)
        assert len(opened) == 12
        assert refusals == 30 - len(opened)
        opened[0].close()

        def room() -> bool:
            try:
                return httpx.get(f"{service.url}/v0/health", timeout=20).status_code == 200
            except httpx.TransportError:
                return False

        poll("the place of a closed connection to be free", room)
        opened[1].request("GET", "/v0/health")
        assert opened[1].getresponse().status == 200


@pytest.mark.parametrize("h2", [False, True])
def test_a_body_beyond_the_limit_is_413_on_every_protocol(start: Any, h2: bool) -> None:
    service = start(max_body_bytes=100_000)
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=service.url, http1=not h2, http2=h2, timeout=20) as client:

        def pieces(count: int) -> Iterator[bytes]:
            yield b'{"records":[{"data":"'
            for _ in range(count):
                yield b"x" * 10_000
            yield b'"}]}'

        def send(content: Any) -> None:
            try:
                answer = client.post("/v0/topics/t", content=content, headers=headers)
            except httpx.TransportError:
                return  # an answer before the end of the request may be lost with the connection
            assert refused(answer, 413, "payload_too_large")["detail"] == {"max_body_bytes": 100_000}

        send(b"x" * 100_001)
        send(pieces(50))
    # Of their own: the server may be about to close the ones that were answered early.
    with httpx.Client(base_url=service.url, http1=not h2, http2=h2, timeout=20) as client:
        refused(client.get("/v0/topics/t"), 404, "topic_not_found")
        assert write(client, "t", "x" * 99_000)["first_seq"] == 1


@pytest.mark.parametrize("http2", [False, True])
def test_a_body_that_no_route_reads_holds_nothing_up(service: Service, http2: bool) -> None:
    """Hypercorn would wait for ever with what nobody takes, and with it every other stream of HTTP/2."""
    with httpx.Client(base_url=service.url, http1=not http2, http2=http2, timeout=20) as client:
        for _ in range(3):
            try:
                answer = client.request("GET", "/v0/health", content=b"x" * 3_000_000)
                assert answer.status_code == 200
            except httpx.TransportError:
                assert not http2
        assert write(client, "t", 1)["count"] == 1


def test_every_limit_of_a_write_and_of_a_read_has_a_setting(start: Any) -> None:
    """api §2.3, §3: each of them narrowed, and said in the refusal."""
    service = start(
        max_batch_records=2, max_record_bytes=100, max_meta_bytes=40, max_tag_bytes=3, max_node_bytes=4, max_limit=3
    )
    client = service.client

    def post(*records: dict[str, Any], **more: Any) -> httpx.Response:
        return client.post("/v0/topics/t", json={"records": list(records), **more})

    ok(post({"data": "x" * 50, "tag": "tag", "node": "node", "meta": {"k": "v" * 10}}, {"data": 2}, node="four"))
    for answer, code, most in (
        (post({"data": 1}, {"data": 2}, {"data": 3}), "batch_too_large", "2"),
        (post({"data": "x" * 99}), "record_too_large", "100"),
        (post({"data": "x" * 60, "meta": {"k": "v" * 31}}), "record_too_large", "100"),
        (post({"data": 1, "meta": {"k": "v" * 40}}), "invalid_request", "40"),
        (post({"data": 1, "tag": "four"}), "invalid_request", "3"),
        (post({"data": 1, "node": "fives"}), "invalid_request", "4"),
        (post({"data": 1}, node="fives"), "invalid_request", "4"),
    ):
        assert most in refused(answer, 400, code)["message"]
    for n in range(4):
        ok(post({"data": n}))
    assert diff(client, "t")["next_from_seq"] == 3
    assert len(diff(client, "t", limit=1000)["records"]) == 3


def test_the_limits_of_watches_and_claims_have_settings(start: Any) -> None:
    service = start(max_watch_topics=2, max_claim=3)
    client = service.client
    names = ["a", "b", "c"]
    for name in names:
        put(client, name, type="queue")
    assert (
        "2"
        in refused(client.post("/v0/watch", json={"topics": {name: {} for name in names}}), 400, "invalid_request")[
            "message"
        ]
    )
    ok(client.post("/v0/watch", json={"topics": {name: {} for name in names[:2]}}))
    with Socket(service) as ws:
        assert ws.ask("subscribe", topics=names)["code"] == "invalid_request"
        assert ws.ask("subscribe", topics=names[:2])["op"] == "subscribed"
        assert ws.ask("subscribe", topic="c")["code"] == "invalid_request", "what is followed already counts"
    write(client, "a", *range(5))
    assert ok(client.post("/v0/topics/a/claim", json={"node": "w", "max": 1000}))["count"] == 3


def test_a_large_body_leaves_the_others_their_turn(service: Service, topic: str) -> None:
    """A body of 60 MB is decoded beside the event loop, in pieces between which others are served."""
    put(service.client, topic)
    body = json.dumps({"records": [{"data": "x" * 6_000} for _ in range(10_000)]}).encode()
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(
            lambda: httpx.post(
                f"{service.url}/v0/topics/{topic}",
                content=body,
                headers={"Content-Type": "application/json"},
                timeout=30,
            )
        )
        while not upload.done():
            assert write(service.client, f"{topic}.small", 1)["count"] == 1
            time.sleep(0.005)
        assert ok(upload.result())["count"] == 10_000
    assert len(diff(service.client, topic, limit=2)["records"]) == 2


def peak_bytes(pid: int) -> int:
    """The most memory that a process ever had."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def test_bombs_in_great_numbers_are_bounded_together(start: Any) -> None:
    """api §0.2: each of them is within the limit of a body, all of them unpacked would be 1.6 GB out of 1.6 MB."""
    service = start(frontends=1)
    body = gzip.compress(b'{"records":[{"data":1}]' + b" " * (64 * 2**20 - 100) + b"}")
    assert len(body) < 70_000
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    pid = service.pid_of("frontend")
    before_bytes = peak_bytes(pid)
    with ExitStack() as stack:
        connections = [http.client.HTTPConnection("127.0.0.1", service.port, timeout=60) for _ in range(24)]
        for connection in connections:
            stack.callback(connection.close)
            connection.request("POST", "/v0/topics/t", body=body, headers=headers)
        assert write(service.client, "small", 1)["count"] == 1
        accepted = 0
        for connection in connections:
            answer = connection.getresponse()
            content = answer.read()
            if answer.status == 429:
                error = envelope(content, answer.getheader("content-type", ""), "throttled")
                assert error["detail"] == {"limit": "body_bytes", "max": 4 * 64 * 2**20, "retry_after_ms": 1000}
                assert int(answer.getheader("retry-after", "0")) >= 1
            else:
                assert answer.status in (200, 201)
                accepted += 1
    assert accepted >= 4, "there is room for so many at once"
    assert diff(service.client, "t")["head_seq"] == accepted, "what was refused has done nothing"
    assert peak_bytes(pid) - before_bytes <= 3 * LONG_BODIES.most_bytes


def test_long_bodies_wait_for_room_and_short_ones_need_none(start: Any) -> None:
    """While others hold all there is: `throttled` on HTTP and on a WebSocket, which lives on."""
    service = start(frontends=1)
    long = [{"data": "x" * 700_000} for _ in range(3)]
    with ExitStack() as stack:
        socket_ = stack.enter_context(Socket(service))
        for _ in range(4):
            upload = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=20))
            upload.sendall(b"POST /v0/topics/t HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            upload.sendall(b"Content-Length: %d\r\n\r\n" % (64 * 2**20) + b" " * 1_500_000)

        def all_is_held() -> bool:
            answer = service.client.post("/v0/topics/t", json={"records": long})
            return answer.status_code == 429 and refused(answer, 429, "throttled")["detail"]["limit"] == "body_bytes"

        poll("every place to be held", all_is_held, 20)
        answer = socket_.ask("publish", topic="t", records=long, request_id="long")
        # Dropped as it came: nobody has read what it calls itself.
        assert (answer["op"], answer["code"], answer["request_id"]) == ("error", "throttled", None)
        assert socket_.ask("publish", topic="t", records=[{"data": 1}], request_id="short")["op"] == "ack"
        assert write(service.client, "t", 1)["count"] == 1

    def there_is_room() -> bool:
        return service.client.post("/v0/topics/t", json={"records": long}).status_code == 200

    poll("the uploads that were broken off to hold nothing", there_is_room, 20)
    with Socket(service) as again:
        for n in range(3):
            assert again.ask("publish", topic="t", records=long, request_id=n)["op"] == "ack"


def test_a_head_that_never_ends_is_cut(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as raw:
        raw.sendall(b"GET /v0/health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    envelope(answer.partition(b"\r\n\r\n")[2], "application/json", "request_timeout")
