"""Requests that every contract test makes, and checks of their answers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import msgspec

from tests.harness import Service, poll

JSON = {"Content-Type": "application/json"}
NO_SUCH_PREFIX = "no-such-topic-"
COPIES_DEADLINE_S = 60.0


class Record(NamedTuple):
    """One delivered record; `data` and `meta` are the very bytes of the answer."""

    seq: int
    ts: int
    data: bytes
    meta: bytes | None
    node: str | None
    tag: str | None


class _Delivered(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    meta: msgspec.Raw = msgspec.Raw(b"")
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)


class _Page(msgspec.Struct):
    records: list[_Delivered]


def put(client: httpx.Client, topic: str, **config: Any) -> dict[str, Any]:
    """PUT a topic; the answer."""
    return ok(client.put(f"/v0/topics/{topic}", json=config))


def write(client: httpx.Client, topic: str, *data: Any, **extra: Any) -> dict[str, Any]:
    """Write one record per `data`; the answer."""
    records = [{"data": value} for value in data]
    return ok(client.post(f"/v0/topics/{topic}", json={"records": records, **extra}))


def write_raw(client: httpx.Client, topic: str, body: bytes, **headers: str) -> httpx.Response:
    """POST these very bytes as a write."""
    return client.post(f"/v0/topics/{topic}", content=body, headers=JSON | headers)


def diff(client: httpx.Client, topic: str, **body: Any) -> dict[str, Any]:
    """A diff's answer."""
    return ok(whole(lambda: client.post(f"/v0/topics/{topic}/diff", json=body)))


def diff_records(client: httpx.Client, topic: str, **body: Any) -> list[Record]:
    """A diff's records with their bytes."""
    return records_of(whole(lambda: client.post(f"/v0/topics/{topic}/diff", json=body)).content)


def whole(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """The success that a read ends with, asked again for as long as it says that a router's copies are not in it yet:
    their shard did not answer within the time for which a read waits (api §6), as on a machine that is busy.
    """

    def answer() -> httpx.Response | None:
        found = ask()
        return None if ok(found)["performance"].get("copies_pending") else found

    return poll("an answer with all that routers copy", answer, COPIES_DEADLINE_S)


def records_of(content: bytes) -> list[Record]:
    """The records of a diff's answer or of a `record` frame's data."""
    return [
        Record(one.seq, one.ts, bytes(one.data), bytes(one.meta) or None, one.node, one.tag)
        for one in msgspec.json.decode(content, type=_Page).records
    ]


def state(client: httpx.Client, topic: str) -> dict[str, Any]:
    """A topic's state, without leaving a trace of having read it."""
    return ok(whole(lambda: client.get(f"/v0/topics/{topic}", params={"touch": "false"})))


def head_seq(client: httpx.Client, topic: str) -> int:
    return int(state(client, topic)["head_seq"])


def long_polls(service: Service) -> int:
    """Return the number of reads of the whole service that wait for news right now."""
    metrics = ok(service.client.get("/v0/metrics", headers={"Accept": "application/json"}))
    return int(sum(metrics["topics_frontend_long_polls"].values()))


def ok(response: httpx.Response) -> dict[str, Any]:
    """The body of a success: JSON that carries a true `performance` block (api §0.7)."""
    assert response.status_code in (200, 201), f"{response.status_code}: {response.text[:500]}"
    assert response.headers["content-type"].partition(";")[0] == "application/json"
    body: dict[str, Any] = response.json()
    total_ms = body["performance"]["server_total_ms"]
    assert isinstance(total_ms, int | float), body["performance"]
    assert total_ms >= 0, body["performance"]
    return body


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The `error` of a failure, its envelope checked (api §0.6)."""
    assert response.status_code == status, f"{response.status_code}: {response.text[:500]}"
    return envelope(response.content, response.headers.get("content-type", ""), code)


def envelope(content: bytes, content_type: str, code: str) -> dict[str, Any]:
    assert content_type.partition(";")[0] == "application/json", content_type
    body = json.loads(content)
    assert set(body) <= {"error", "performance"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) <= {"code", "message", "detail"}, error
    assert error["code"] == code, error
    assert isinstance(error["message"], str), error
    assert error["message"], error
    assert isinstance(error.get("detail", {}), dict), error
    return error


def missing(client: httpx.Client, topic: str) -> None:
    """Asserts that the topic does not exist."""
    refused(client.get(f"/v0/topics/{topic}"), 404, "topic_not_found")


class Connection:
    """One TCP connection: says whether the service kept it, which a pooling client hides."""

    def __init__(self, service: Service) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
        self._http.connect()
        self._socket = self._http.sock

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, str]:
        """(status, body, content type) of one exchange."""
        self._http.request(method, path, body=body, headers=JSON | headers)
        answer = self._http.getresponse()
        return answer.status, answer.read(), answer.getheader("Content-Type", "")

    @property
    def kept(self) -> bool:
        """True while the first socket is still the one in use."""
        return self._socket is not None and self._http.sock is self._socket

    def close(self) -> None:
        self._http.close()
