"""Requests of any kind to any route: no 500, no hang, and nothing is left behind in the service.

Requests are made without regard to the contract, over raw sockets and by a client; `test_openapi.py` makes those that
fit it. `TOPICS_FUZZ_REQUESTS` sets how many.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.contract.asking import write
from tests.contract.socket_client import Socket
from tests.harness import Service, poll

REQUESTS = int(os.environ.get("TOPICS_FUZZ_REQUESTS", "1500"))
SEED = int(os.environ.get("TOPICS_FUZZ_SEED", "0")) or random.randrange(1, 2**32)
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"]
CONTENT_TYPES = ["application/json", "application/json; charset=utf-8", "text/plain", "", "application/json;;"]
GROWTH_MAX_BYTES = 64 << 20


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Service]:
    env = {"TOPICS_MAX_BODY_BYTES": "262144", "TOPICS_MAX_TOPICS": "500", "TOPICS_TEST_MIN_HEARTBEAT_MS": "20"}
    with Service(env=env) as running:
        write(running.client, "seed", *range(20))
        yield running


@pytest.fixture(scope="module")
def paths(fuzzed: Service) -> list[str]:
    """Return the paths of the document: a route that is added is fuzzed."""
    found = list(fuzzed.client.get("/v0/openapi.json").json()["paths"])
    assert len(found) >= 10
    return found


def scalar(rng: random.Random) -> Any:
    return rng.choice(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            1.5,
            2**53,
            2**64 - 1,
            2**64,
            -(2**63),
            10**30,
            "",
            "seed",
            "x" * rng.choice([1, 255, 256, 5000]),
            "\u0000",
            "\ud83d\ude00",
            "*",
            "a*",
            "é",
            "disk",
            "queue",
            "strong",
        ]
    )


FIELDS = [
    *("records", "data", "tag", "node", "meta", "idempotency_key", "create", "config", "if_head_seq", "producer"),
    *("from_seq", "limit", "wait_ms", "max_batch_bytes", "from_ts", "include_tags", "before_seq", "match", "topics"),
    *("heartbeat_ms", "consistency", "tail", "ttl_ms", "cap_records", "cap_bytes", "discard", "durability", "type"),
    *("priority", "dead_letter", "lease_ms", "seqs", "lease_ids", "max", "delay_ms", "source", "dest", "filter"),
    *("op", "topic", "request_id", "return_seqs", "seed", "$seq"),
]


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.5:
        return scalar(rng)
    if kind < 0.7:
        return [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3]))]
    return {rng.choice(FIELDS): value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3, 6]))}


def body(rng: random.Random) -> bytes:
    made = value(rng)
    if isinstance(made, dict):
        made["wait_ms"] = rng.choice([0, 1, 20])
    encoded = json.dumps(made).encode("utf-8", "surrogatepass")
    kind = rng.random()
    if kind < 0.1:
        return encoded[: rng.randrange(len(encoded) + 1)]
    if kind < 0.15:
        at = rng.randrange(len(encoded) + 1)
        return encoded[:at] + rng.randbytes(3) + encoded[at:]
    if kind < 0.18:
        return b"[" * 20_000
    if kind < 0.2:
        return b'{"records":[{"data":' + b"9" * 100_000 + b"}]}"
    if kind < 0.22:
        return rng.randbytes(300)
    return encoded


def target(rng: random.Random, paths: list[str]) -> str:
    names = ["seed", f"t{rng.randrange(30)}", "%00", "a%2Fb", "é", "x" * 300, "..", "wid_AAAAAAAAAAAAAAAAAAAAAA", "%"]
    path = rng.choice(paths)
    while "{" in path:
        path = path[: path.index("{")] + rng.choice(names) + path[path.index("}") + 1 :]
    if rng.random() < 0.1:
        path = rng.choice([path + "/", path + "//x", "/" + path, path.upper(), path + "%2e%2e"])
    queries = ["?touch=x", "?page_size=-1", "?cursor=%ff", "?limit=1&limit=2", "?lenient=1", "?=&&="]
    query = rng.choice(["", "", "", *queries])
    return path + query


def measured(service: Service) -> tuple[int, int, int]:
    """(sockets and files, bytes in memory, processes) of the whole service."""
    family = [psutil.Process(pid) for pid in service.family()]
    return (
        sum(process.num_fds() for process in family),
        sum(process.memory_info().rss for process in family),
        len(family),
    )


def restarts(service: Service) -> int:
    return sum(process["restarts"] for process in service.status()["processes"])


def settled(service: Service) -> None:
    def quiet() -> bool:
        frontends = service.status()["frontends"]
        return sum(one["connections"] for one in frontends) <= 1 and not sum(
            one["sse_connections"] for one in frontends
        )

    poll("all connections to be gone", quiet, deadline_s=20, every_s=0.1)


def ask(client: httpx.Client, rng: random.Random, paths: list[str]) -> int:
    headers = {}
    content = body(rng) if rng.random() < 0.8 else b""
    content_type = rng.choice(CONTENT_TYPES) if rng.random() < 0.2 else "application/json"
    if content_type:
        headers["Content-Type"] = content_type
    kind = rng.random()
    if kind < 0.05:
        content, headers["Content-Encoding"] = gzip.compress(content), "gzip"
    elif kind < 0.08:
        headers["Content-Encoding"] = rng.choice(["gzip", "br", "identity", ""])
    elif kind < 0.1:
        content, headers["Content-Encoding"] = gzip.compress(b"0" * 2_000_000), "gzip"
    if rng.random() < 0.1:
        headers["Accept"] = rng.choice(["text/event-stream", "application/json;q=0", "x", "*/*;q=0"])
    if rng.random() < 0.1:
        headers["Idempotency-Key"] = rng.choice(["", "k", "x" * 300])
    method, url = rng.choice(METHODS), target(rng, paths)
    request = client.build_request(method, str(client.base_url).rstrip("/") + url, content=content, headers=headers)
    answer = client.send(request, stream=True)
    try:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            answer.read()
            if answer.status_code >= 400 and method != "HEAD" and answer.content:
                assert set(answer.json()["error"]) <= {"code", "message", "detail"}, answer.text[:300]
    finally:
        answer.close()
    assert answer.status_code < 500, f"{method} {url} {content[:300]!r}: {answer.status_code} {answer.text[:300]}"
    return answer.status_code


@pytest.mark.timeout(3600)
def test_any_request_is_answered_and_leaves_nothing_behind(fuzzed: Service, paths: list[str]) -> None:
    print(f"TOPICS_FUZZ_SEED={SEED} TOPICS_FUZZ_REQUESTS={REQUESTS} pytest tests/e2e/test_fuzz.py")
    rng = random.Random(SEED)
    statuses: dict[int, int] = {}

    def round_of(count: int) -> None:
        for http2 in (False, True):
            with httpx.Client(base_url=fuzzed.url, http1=not http2, http2=http2, timeout=120) as client:
                for _ in range(count if not http2 else count // 5):
                    status = ask(client, rng, paths)
                    statuses[status] = statuses.get(status, 0) + 1

    round_of(REQUESTS // 3)  # what is made once is made now
    settled(fuzzed)
    fds, rss, processes = measured(fuzzed)
    round_of(REQUESTS)
    settled(fuzzed)
    fds_after, rss_after, processes_after = measured(fuzzed)
    assert processes_after == processes
    assert restarts(fuzzed) == 0
    # Log files are opened as they are written; connections are not files that stay.
    assert fds_after - fds < 40, (fds, fds_after)
    assert rss_after - rss < GROWTH_MAX_BYTES, (rss, rss_after)
    assert {200, 400, 404, 405} <= set(statuses), statuses
    assert write(fuzzed.client, "after-the-fuzz", 1)["first_seq"] == 1


def test_bytes_that_are_no_http(fuzzed: Service) -> None:
    """Garbage, and requests that are cut, mutated or doubled: an answer or an end, at once."""
    rng = random.Random(SEED)
    whole = (
        b"POST /v0/topics/raw HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 23\r\n\r\n"
        b'{"records":[{"data":1}]}'
    )
    for _ in range(REQUESTS // 5):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        with socket.create_connection(("127.0.0.1", fuzzed.port), timeout=120) as raw:
            try:
                raw.sendall(bytes(data))
                raw.shutdown(socket.SHUT_WR)
                answer = b""
                while piece := raw.recv(65536):
                    answer += piece
            except ConnectionError:
                continue
        assert not answer.startswith(b"HTTP/1.1 5") or answer.startswith(b"HTTP/1.1 505"), (bytes(data), answer[:300])
    assert write(fuzzed.client, "after-the-bytes", 1)["count"] == 1
    assert restarts(fuzzed) == 0


def loads(message: str | bytes) -> Any:
    """Decode a message whose records may hold a number of 100,000 digits, too long for an integer of Python."""
    return json.loads(message, parse_int=str)


def test_messages_that_are_no_commands(fuzzed: Service) -> None:
    rng = random.Random(SEED)
    with Socket(fuzzed) as ws:
        sent = 0
        for _ in range(REQUESTS // 3):
            message = value(rng)
            if isinstance(message, dict) and rng.random() < 0.9:
                message["op"] = rng.choice(["ping", "publish", "subscribe", "unsubscribe", "ack", 7])
                message.setdefault("topic", "seed")
            text = json.dumps(message)
            if rng.random() < 0.1:
                text = text[: rng.randrange(len(text) + 1)]
            ws.wire.send(text)
            sent += 1
            # Answers and records come as they come; what counts is that the socket lives.
            while True:
                try:
                    got = loads(ws.wire.recv(0))
                except TimeoutError:
                    break
                assert got.get("code") != "internal", (text, got)
        assert sent
        ws.send("ping", request_id="the last")
        while (last := loads(ws.text())).get("request_id") != "the last":
            assert last.get("code") != "internal", last
        assert last["op"] == "pong"
    assert restarts(fuzzed) == 0
