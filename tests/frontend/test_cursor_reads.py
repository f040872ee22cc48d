"""Reads through a named cursor (api §10) whose shard is late, or whose client has gone: the frontend's own routes and a
real shard on one event loop, so that it is late exactly when the test says.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.frontend.live import DEADLINE_S, Live, on_loop, until
from tests.frontend.test_watch import cram, posts
from topics.core.errors import TopicsError
from topics.frontend.asgi import DELIVER, Send
from topics.frontend.queues import cursor_routes
from topics.frontend.queues.cursor_routes import CursorRoutes
from topics.frontend.reads.catching_up import CatchingUp, RouterSight
from topics.frontend.reads.diff import MAX_BATCH_BYTES
from topics.frontend.reads.reading import Page
from topics.shm.cursor_messages import CursorList, CursorLook, CursorPut, CursorReply

WAIT_S = 0.05
"""For a shard that has stopped."""


class Reader:
    """Who reads through cursor `c` of topic `t`. With `stall` the shard stops working between telling where the cursor
    is and being asked to move it.
    """

    def __init__(self, live: Live) -> None:
        self.live = live
        catching_up = CatchingUp(RouterSight(live.rig.shared), live.reader, live.gateway)
        self.routes = CursorRoutes(live.gateway, live.reader, catching_up, live.rig.settings, live.cell)
        self.stall = False
        self.pages = 0
        """That were made."""
        self.wait_s = live.gateway._wait_s = DEADLINE_S
        fetch_page = live.reader.fetch_page

        async def fetch_and_stall(*args: Any) -> Page:
            self.pages += 1
            if self.stall:
                live.shard_up = False
                live.gateway._wait_s = self.wait_s
            return await fetch_page(*args)

        live.reader.fetch_page = fetch_and_stall  # type: ignore[assignment, method-assign]

    async def make(self, records: int, **config: Any) -> None:
        await self.live.write("t", records)
        put = CursorPut("t", "c", config.get("consistency", "at_least_once"), config.get("persist_every", 1), 0, False)
        await self.live.gateway.call(0, put, CursorReply)

    async def read(self, limit: int) -> list[int]:
        """The seqs of one answer."""
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b'{"limit":%d}' % limit, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        async def deliver(send: Send, body: bytes) -> None:
            await send({"type": "http.response.body", "body": body})

        scope = {
            "headers": [(b"content-type", b"application/json")],
            "path_params": {"topic": "t", "cursor": "c"},
            "extensions": {DELIVER: deliver},
        }
        await self.routes.read(scope, receive, send)
        return [record["$seq"] for record in msgspec.json.decode(sent[1]["body"])["records"]]

    async def at(self) -> CursorReply:
        (cursor,) = (await self.live.gateway.call(0, CursorLook("t", "c"), CursorList)).cursors
        return cursor

    async def persisted(self, seq: int) -> None:
        while (await self.at()).persisted_seq != seq:
            await asyncio.sleep(0)

    def go_on(self) -> None:
        self.stall = False
        self.live.shard_up = True
        self.live.gateway._wait_s = DEADLINE_S


def test_pages_that_wait_for_a_slow_shard_have_a_bound_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds no room for a page does not make it, and is served when there is."""
    monkeypatch.setattr(cursor_routes, "MOVING_MAX_BYTES", 3 * MAX_BATCH_BYTES[0])

    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(20)
        reader.stall = True
        reads = [asyncio.create_task(reader.read(1)) for _ in range(10)]
        await until(lambda: reader.pages == 3)
        for _ in range(100):
            await asyncio.sleep(0)
        assert reader.pages == 3
        reads.pop().cancel()  # one that waits: in nobody's way
        reader.go_on()
        read = [seq for seqs in await asyncio.gather(*reads) for seq in seqs]
        assert sorted(read) == list(range(1, 10))

    on_loop(tmp_path, test)


def test_records_whose_answer_was_late_are_read_again_and_the_position_is_kept(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(5)
        assert await reader.read(2) == [1, 2]
        reader.stall, reader.wait_s = True, WAIT_S
        with pytest.raises(TopicsError) as late:
            await reader.read(2)
        assert late.value.code == "shard_unavailable"
        reader.go_on()
        assert await reader.read(2) == [3, 4]
        assert await reader.read(2) == [5]
        await reader.persisted(5)

    on_loop(tmp_path, test)


def test_records_whose_client_has_gone_are_read_again(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(3)
        reader.stall = True
        read = asyncio.create_task(reader.read(2))
        requests = live.rig.shared.rings[0][0].requests
        await until(lambda: not live.shard_up and requests.pending_bytes)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        reader.go_on()
        assert await reader.read(2) == [1, 2]
        assert await reader.read(2) == [3]
        await reader.persisted(3)

    on_loop(tmp_path, test)


def test_reads_that_a_full_ring_refuses_leave_nothing_behind(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(3)
        fetch_page = live.reader.fetch_page

        async def fetch_and_cram(*args: Any) -> Page:
            cram(live)
            return await fetch_page(*args)

        live.reader.fetch_page = fetch_and_cram  # type: ignore[assignment, method-assign]
        with pytest.raises(TopicsError) as refused:
            await reader.read(2)
        assert refused.value.code == "throttled"
        assert posts(live) == 0

    on_loop(tmp_path, test)


def test_what_a_late_answer_takes_back_is_only_what_it_had(tmp_path: Path) -> None:
    """The shard was late for a read that it never took part in: another one had moved the cursor meanwhile."""

    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(4)
        reader.stall = True
        first, second = (asyncio.create_task(reader.read(2)) for _ in range(2))
        await until(lambda: not live.shard_up and len(live.gateway._unanswered._requests) == 2)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        reader.go_on()
        assert await first == [1, 2]
        assert await reader.read(2) == [3, 4]
        await reader.persisted(4)

    on_loop(tmp_path, test)


def test_a_strict_cursor_gives_nothing_twice_however_late_its_shard_is(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(3, consistency="strictly_at_once")
        reader.stall, reader.wait_s = True, WAIT_S
        with pytest.raises(TopicsError):
            await reader.read(2)
        reader.go_on()
        assert await reader.read(2) == [3]
        assert (await reader.at()).persisted_seq == 3

    on_loop(tmp_path, test)
