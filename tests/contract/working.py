"""Queues as consumers use them, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import httpx

from tests.contract.asking import ok, put, state, write
from tests.contract.stream import READ_TIMEOUT_S, Frame
from tests.harness import poll


def queue(client: httpx.Client, topic: str, *data: Any, **config: Any) -> None:
    """A queue with one job per `data`."""
    put(client, topic, type="queue", **config)
    if data:
        write(client, topic, *data)


def claim(client: httpx.Client, topic: str, node: str = "w", **body: Any) -> list[dict[str, Any]]:
    """A claim's jobs."""
    answer = ok(client.post(f"/v0/topics/{topic}/claim", json={"node": node, **body}))
    assert answer["topic"] == topic
    assert answer["count"] == len(answer["claimed"])
    jobs: list[dict[str, Any]] = answer["claimed"]
    return jobs


def seqs(jobs: list[dict[str, Any]]) -> list[int]:
    return [job["$seq"] for job in jobs]


def ask(client: httpx.Client, topic: str, verb: str, *named: int, node: str = "w", **body: Any) -> dict[str, Any]:
    """The answer to an ack, nack or extend."""
    return ok(client.post(f"/v0/topics/{topic}/{verb}", json={"node": node, "seqs": list(named), **body}))


def counts(client: httpx.Client, topic: str) -> tuple[int, int, int]:
    """(ready, in_flight, dead_lettered) as the topic's state says."""
    block = state(client, topic)["queue"]
    assert set(block) == {"ready", "in_flight", "dead_lettered"}
    return block["ready"], block["in_flight"], block["dead_lettered"]


def until_counts(client: httpx.Client, topic: str, *expected: int) -> None:
    """Waits until ready, in_flight, dead_lettered are these."""
    poll(f"{topic} to count {expected}", lambda: counts(client, topic) == expected or None)


class Work:
    """One open `/work` stream, read on demand."""

    def __init__(self, url: str, topic: str, node: str = "w", headers: Any = None, **query: Any) -> None:
        self._client = httpx.Client(base_url=url, timeout=httpx.Timeout(10.0, read=READ_TIMEOUT_S))
        request = self._client.build_request(
            "GET", f"/v0/topics/{topic}/work", params={"node": node, **query}, headers=headers
        )
        self.response = self._client.send(request, stream=True)
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

    def jobs(self, count: int) -> list[dict[str, Any]]:
        """The next so many jobs."""
        frames = [self.event("job") for _ in range(count)]
        for frame in frames:
            assert frame.id == str(frame.json["$seq"])
        return [frame.json for frame in frames]

    def close(self) -> None:
        self.response.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
