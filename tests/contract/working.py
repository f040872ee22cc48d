"""Queues as consumers use them, for tests."""

from __future__ import annotations

from typing import Any

import httpx

from tests.contract.asking import ok, put, state, write
from tests.contract.stream import READ_TIMEOUT_S, EventStream
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
    assert set(block) == {"ready", "in_flight", "dead_lettered", "scheduled"}
    return block["ready"], block["in_flight"], block["dead_lettered"]


def until_counts(client: httpx.Client, topic: str, *expected: int) -> None:
    """Waits until ready, in_flight, dead_lettered are these."""
    poll(f"{topic} to count {expected}", lambda: counts(client, topic) == expected or None)


class Work(EventStream):
    """One open `/work` stream."""

    def __init__(self, url: str, topic: str, node: str = "w", headers: Any = None, **query: Any) -> None:
        client = httpx.Client(base_url=url, timeout=httpx.Timeout(10.0, read=READ_TIMEOUT_S))
        params = {"node": node, **query}
        super().__init__(
            client, client.build_request("GET", f"/v0/topics/{topic}/work", params=params, headers=headers)
        )

    def jobs(self, count: int) -> list[dict[str, Any]]:
        """The next so many jobs."""
        frames = [self.event("job") for _ in range(count)]
        for frame in frames:
            assert frame.id == str(frame.json["$seq"])
        return [frame.json for frame in frames]
