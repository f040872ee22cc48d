"""api §2 `disable_backpressure`, §0.6: while a shard stands still and its ring is full a write is told to come back,
one with that flag waits for room, and what was refused was not done.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bench.crowd import Answer, Client
from tests.harness import Service

pytestmark = pytest.mark.long

DEADLINE_S = 60.0
SIZES = (15_000, 5_000, 1_000, 200, 1)
"""Sizes of records: the rest of a ring of 64 KiB beside one size has no room for four of the next larger one."""


class Stopped:
    """A service whose only shard stands still, and whose ring has no room for another write."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._shard_pid = service.pid_of("walshard")
        self._clients: list[Client] = []
        self.in_ring: list[asyncio.Task[Answer]] = []
        """Writes that were sent on; their data is a string of x."""

    def write(self, data: str, **fields: Any) -> asyncio.Task[Answer]:
        client = Client(self._service.port)
        self._clients.append(client)
        body = json.dumps({"records": [{"data": data}], "create": False, **fields}).encode()
        return asyncio.create_task(client.ask("POST", "/v0/topics/t", body))

    async def fill(self) -> None:
        os.kill(self._shard_pid, signal.SIGSTOP)
        for size_bytes in SIZES:
            refused = False
            while not refused:
                writes = [self.write("x" * size_bytes) for _ in range(5)]
                # Who does not fit is told so; the others are in the ring, or are refused as well a moment later.
                await asyncio.wait(writes, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait([one_more := self.write("x" * size_bytes)])
                done = [write for write in (*writes, one_more) if write.done()]
                turned_away = [write for write in done if not was_sent_on(write.result())]
                for write in turned_away:
                    nothing_was_done(write.result())
                self.in_ring += [write for write in (*writes, one_more) if write not in turned_away]
                refused = bool(turned_away)

    def go_on(self) -> None:
        os.kill(self._shard_pid, signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        for client in self._clients:
            client.close()


def was_sent_on(answer: Answer) -> bool:
    """It is in the ring, and was given up when the shard had not answered for as long as a request waits for it: that
    may be over before others have been refused, on a machine that stood still.
    """
    return answer.status == 503 and answer.json["error"]["code"] == "shard_unavailable"


def nothing_was_done(answer: Answer) -> None:
    """`429` as §0.6 has it."""
    assert answer.status == 429, answer
    error = answer.json["error"]
    assert error["code"] == "throttled"
    assert error["detail"]["retry_after_ms"] > 0
    assert b"\r\nretry-after: " in answer.head.lower()
    assert "nothing of this request was done" in error["message"]


def stopped(shard_wait_ms: int, test: Callable[[Stopped, Client], Awaitable[None]]) -> None:
    async def main(service: Service) -> None:
        client = Client(service.port)
        assert (await client.ask("PUT", "/v0/topics/t", b"{}")).status == 201
        shard = Stopped(service)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await shard.fill()
                await test(shard, client)
        finally:
            shard.close()
            client.close()

    env = {"TOPICS_RING_BYTES": "65536", "TOPICS_SHARD_WAIT_MS": str(shard_wait_ms)}
    with Service(shards=1, frontends=1, env=env) as service:
        asyncio.run(main(service))


async def committed(client: Client) -> list[str]:
    """The data of all records."""
    answer = await client.ask("POST", "/v0/topics/t/diff", b'{"limit":1000}')
    assert answer.json["caught_up"]
    return [record["data"] for record in answer.json["records"]]


def test_a_write_with_the_flag_waits_where_another_is_throttled() -> None:
    async def test(shard: Stopped, client: Client) -> None:
        patient = shard.write("patient", disable_backpressure=True)
        for _ in range(3):
            nothing_was_done(await shard.write("refused"))
        assert not patient.done()
        assert not any(write.done() for write in shard.in_ring)
        shard.go_on()
        answer = await patient
        assert answer.status == 200
        assert answer.json["performance"]["throttle_wait_ms"] > 0
        sent = await asyncio.gather(*shard.in_ring)
        assert {one.status for one in sent} == {200}
        data = await committed(client)
        assert data[-1] == "patient"
        assert len(data) == len(sent) + 1
        assert "refused" not in data

    stopped(10 * int(DEADLINE_S) * 1000, test)


def test_a_write_with_the_flag_that_never_finds_room_is_unavailable_and_not_done() -> None:
    async def test(shard: Stopped, client: Client) -> None:
        answer = await shard.write("patient", disable_backpressure=True)
        assert answer.status == 503
        error = answer.json["error"]
        assert error["code"] == "shard_unavailable"
        assert "nothing of this request was done" in error["message"]
        assert b"\r\nretry-after: " in answer.head.lower()
        nothing_was_done(await shard.write("refused"))
        shard.go_on()
        assert (await shard.write("later", disable_backpressure=True)).status == 200
        data = await committed(client)
        assert data[-1] == "later"
        assert not {"patient", "refused"} & set(data)

    stopped(3000, test)
