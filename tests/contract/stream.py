"""The wire of an event stream, frame by frame, as strict as the contract is (api §7)."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

import httpx
import msgspec

from tests.contract.asking import ok, refused
from tests.harness import Service, poll
from topics.core.names import owner_shard
from topics.shm.control import ControlPage, Role
from topics.shm.shm_names import identity, shm_name

READ_TIMEOUT_S = 30.0
"""Time that a test waits for the next bytes before it fails: more than the 15 s after which an idle stream beats."""


class Frame(msgspec.Struct, frozen=True):
    """One block of the stream, its closing blank line taken off."""

    raw: bytes

    def field(self, name: str) -> bytes | None:
        """The values of one field joined by newlines, as a browser would; None without it."""
        opening = name.encode() + b": "
        values = [line[len(opening) :] for line in self.raw.split(b"\n") if line.startswith(opening)]
        return b"\n".join(values) if values else None

    @property
    def event(self) -> str:
        return (self.field("event") or b"").decode()

    @property
    def data(self) -> bytes:
        data = self.field("data")
        assert data is not None, self.raw
        return data

    @property
    def json(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.data)
        return body

    @property
    def id(self) -> str:
        identifier = self.field("id")
        assert identifier is not None, self.raw
        return identifier.decode()

    @property
    def positions(self) -> dict[str, int]:
        """The id decoded: base64url without padding of a JSON map from topic to seq."""
        assert "=" not in self.id
        assert "+" not in self.id
        assert "/" not in self.id
        decoded: dict[str, int] = json.loads(base64.urlsafe_b64decode(self.id + "=" * (-len(self.id) % 4)))
        return decoded


def position_id(positions: dict[str, int]) -> str:
    """A Last-Event-ID that says these positions."""
    return base64.urlsafe_b64encode(json.dumps(positions, separators=(",", ":")).encode()).decode().rstrip("=")


def watch(client: httpx.Client, topics: dict[str, Any], **body: Any) -> dict[str, Any]:
    """POST a watch; its answer."""
    return ok(client.post("/v0/watch", json={"topics": topics, **body}))


class EventStream:
    """One open event stream, read on demand. It owns its connection."""

    def __init__(self, client: httpx.Client, request: httpx.Request) -> None:
        self._client = client
        self.response = client.send(request, stream=True)
        if self.response.status_code != 200:
            self.response.read()
        self._blocks = self._split()

    def _split(self) -> Iterator[Frame]:
        pending = b""
        for chunk in self.response.iter_bytes():
            pending += chunk
            *whole, pending = pending.split(b"\n\n")
            for block in whole:
                yield Frame(block)
        assert pending == b"", f"the stream ended inside a frame: {pending!r}"

    def next(self) -> Frame:
        """The next block, heartbeats included; StopIteration at the end of the stream."""
        return next(self._blocks)

    def event(self, name: str | None = None) -> Frame:
        """The next block that is neither a comment nor the opening `retry`, asserted to be of this event."""
        while True:
            frame = self.next()
            if frame.raw.startswith((b":", b"retry:")):
                continue
            assert name in (None, frame.event), frame.raw
            return frame

    def close(self) -> None:
        self.response.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream(EventStream):
    """One open GET of a session."""

    def __init__(self, url: str, wid: str, headers: Mapping[str, str] | None = None, *, http2: bool = False) -> None:
        timeout = httpx.Timeout(10.0, read=READ_TIMEOUT_S)
        client = httpx.Client(base_url=url, http1=not http2, http2=http2, timeout=timeout)
        request = client.build_request("GET", f"/v0/watch/{wid}", headers=dict(headers or {}))
        if not headers or "Accept" not in headers:
            del request.headers["accept"]
        super().__init__(client, request)
        self._caught_up = 0

    def event(self, name: str | None = None) -> Frame:
        frame = super().event(name)
        self._caught_up += frame.event == "caught-up"
        return frame

    def records(self, count: int) -> list[dict[str, Any]]:
        """The next `count` records, from as many frames as they come in; other events are passed over."""
        got: list[dict[str, Any]] = []
        while len(got) < count:
            frame = self.event()
            if frame.event == "record":
                got += frame.json["records"]
        return got

    def records_to(self, seq: int) -> int:
        """Passes over events until a record frame reaches `seq`; its `to_seq`."""
        while True:
            frame = self.event()
            if frame.event == "record" and frame.json["to_seq"] >= seq:
                return int(frame.json["to_seq"])

    def until_caught_up(self, topics: int) -> None:
        """Passes over events until so many `caught-up` have been seen on this stream."""
        while self._caught_up < topics:
            self.event()


def follow(service: Service, topics: dict[str, Any], **body: Any) -> Stream:
    """A new session's stream."""
    return Stream(service.url, watch(service.client, topics, **body)["wid"])


def open_streams(service: Service) -> dict[int, int]:
    """Return the number of event streams of each frontend, as `status` counts them."""
    return {frontend["index"]: frontend["sse_connections"] for frontend in service.status()["frontends"]}


def held_by_frontends(service: Service, field: str) -> int:
    """A figure of the control page, all frontends together: as of now, which `status` is not of each."""
    page = ControlPage.attach(shm_name(identity(str(service.data_dir)), "control"))
    return sum(page.cell(Role.FRONTEND, index).get(field) for index in range(service.frontends))


def until_streams_are_over(service: Service, client: httpx.Client | None = None) -> None:
    """Waits until no stream is open, and the shards have heard how far each had come: sessions go on from there. It is
    on its way when the place of a stream is free again, and has arrived when the shard answers what was asked later.
    """
    poll("no stream to be open", lambda: held_by_frontends(service, "sse_admitted") == 0)
    for shard in range(service.shards):
        name = next(name for n in itertools.count() if owner_shard(name := f"no-such-{n}", service.shards) == shard)
        answer = (client or service.client).post(f"/v0/topics/{name}/delete", json={"before_seq": 1})
        refused(answer, 404, "topic_not_found")
