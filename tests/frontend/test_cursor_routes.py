"""Reads through a named cursor (api §10) whose shard is late, or whose client has gone: the frontend's own routes and a
real shard on one event loop, so that it is late exactly when the test says.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.frontend.live import DEADLINE_S, Live, on_loop, until
from tests.frontend.test_watch import cram, posts
from topics.core.errors import TopicsError
from topics.frontend.asgi import DELIVER, Send
from topics.frontend.entry import limits
from topics.frontend.entry.bodies import ClientGoneError
from topics.frontend.entry.budget import Reservation
from topics.frontend.queues import cursor_routes
from topics.frontend.queues.cursor_routes import CursorRoutes
from topics.frontend.reads.catching_up import CatchingUp, RouterSight
from topics.frontend.reads.diff import MAX_BATCH_BYTES
from topics.frontend.reads.reading import RecordPage
from topics.shm.queue_messages import CursorAdvance, CursorGet, CursorPassedOn, CursorPut, CursorReply
from topics.shm.topic_messages import DeleteRecords

WAIT_S = 0.05
"""For a shard that has stopped."""


class Reader:
    """A reader through cursor `c` of topic `t`. With `stall` the shard stops working between telling where the cursor
    is and being asked to move it.
    """

    def __init__(self, live: Live) -> None:
        self.live = live
        self.catching_up = CatchingUp(RouterSight(live.rig.shared), live.reader, live.gateway)
        self.routes = CursorRoutes(
            live.gateway,
            live.reader,
            self.catching_up,
            live.rig.settings,
            live.cell,
            lambda _needed: None,
            lambda _ref: None,
        )
        self.before_page: Callable[[], Awaitable[None]] | None = None
        self.stall = False
        self.pages = 0
        """Pages that were made."""
        self.wait_s = live.gateway.shard_wait_s = DEADLINE_S
        fetch_page = live.reader.fetch_page

        async def fetch_and_stall(*args: Any) -> RecordPage:
            self.pages += 1
            if self.before_page is not None:
                await self.before_page()
            if self.stall:
                live.shard_up = False
                live.gateway.shard_wait_s = self.wait_s
            return await fetch_page(*args)

        live.reader.fetch_page = fetch_and_stall  # type: ignore[assignment, method-assign]

    async def make(self, records: int, **config: Any) -> None:
        await self.live.write("t", records)
        put = CursorPut("t", "c", config.get("consistency", "at_least_once"), config.get("persist_every", 1), 0, False)
        await self.live.gateway.call(0, put)

    async def read(
        self, limit: int, routes: CursorRoutes | None = None, cursor: str = "c", gone: asyncio.Event | None = None
    ) -> list[int]:
        """The seqs of one answer; `gone`: its client closes the connection."""
        answer = await self.answer(b'{"limit":%d}' % limit, routes, cursor, gone)
        return [record["$seq"] for record in answer["records"]]

    async def peek(self, limit: int) -> tuple[list[int], int, int]:
        """The seqs of one answer that moves nothing, where the cursor stands, where to go on."""
        answer = await self.answer(b'{"limit":%d,"checkpoint":false}' % limit)
        return [record["$seq"] for record in answer["records"]], answer["cursor_seq"], answer["next_from_seq"]

    async def answer(
        self, body: bytes, routes: CursorRoutes | None = None, cursor: str = "c", gone: asyncio.Event | None = None
    ) -> dict[str, Any]:
        sent: list[Any] = []
        came = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not came:
                await (gone or asyncio.Event()).wait()
                return {"type": "http.disconnect"}
            return came.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        async def deliver(send: Send, body: bytes) -> None:
            await send({"type": "http.response.body", "body": body})

        scope = {
            "headers": [(b"content-type", b"application/json")],
            "path_params": {"topic": "t", "cursor": cursor},
            "extensions": {DELIVER: deliver},
        }
        await (routes or self.routes).read(scope, receive, send)
        answer: dict[str, Any] = msgspec.json.decode(sent[1]["body"])
        return answer

    async def at(self) -> CursorReply:
        (cursor,) = (await self.live.gateway.call(0, CursorGet("t", "c"))).cursors
        return cursor

    async def persisted(self, seq: int) -> None:
        while (await self.at()).persisted_seq != seq:
            await asyncio.sleep(0)

    def go_on(self) -> None:
        self.stall = False
        self.live.shard_up = True
        self.live.gateway.shard_wait_s = DEADLINE_S


def test_a_read_of_the_cold_tier_says_of_how_many_segments(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(4)
        await live.checkpoint("t", records_max=2)
        await live.relocate("t")
        for body in (b'{"limit":1,"checkpoint":false}', b'{"limit":1}'):
            assert (await reader.answer(body))["performance"]["cold_segments_read"] == 1

    on_loop(tmp_path, test)


def test_pages_that_wait_for_a_slow_shard_have_a_bound_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that finds no room for a page does not make it, and is served when there is room."""
    monkeypatch.setattr(limits, "CURSOR_PAGES", limits.CURSOR_PAGES._replace(most_bytes=3 * MAX_BATCH_BYTES[0]))

    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(20)
        names = [f"c{n}" for n in range(10)]
        for name in names:
            await live.gateway.call(0, CursorPut("t", name, None, None, 0, False))
        reader.stall = True
        reads = [asyncio.create_task(reader.read(1, cursor=name)) for name in names]
        await until(lambda: reader.pages == 3)
        for _ in range(100):
            await asyncio.sleep(0)
        assert reader.pages == 3
        reads.pop().cancel()  # one that waits: in nobody's way
        reader.go_on()
        assert await asyncio.gather(*reads) == [[1]] * 9

    on_loop(tmp_path, test)


def test_a_shard_that_hangs_keeps_no_room_from_the_cursors_of_others(tmp_path: Path) -> None:
    """A reader that waits for the shard to tell where its cursor is makes no page yet."""

    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(5)
        live.shard_up = False
        reads = [asyncio.create_task(reader.read(1)) for _ in range(3)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not any(task.done() for task in reads)
        assert reader.routes.moving.held_bytes == 0
        reader.go_on()
        assert sorted(await asyncio.gather(*reads)) == [[1], [2], [3]]
        assert reader.routes.moving.held_bytes == 0

    on_loop(tmp_path, test)


def test_a_cursor_does_not_move_for_a_client_that_went_away_while_it_waited_for_room(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(5, consistency="strictly_at_once")
        others = Reservation(reader.routes.moving)
        await others.replace(limits.CURSOR_PAGES.most_bytes)
        gone = asyncio.Event()
        waiting = asyncio.create_task(reader.read(2, gone=gone))
        await until(lambda: bool(reader.routes.moving.waiting))
        gone.set()
        with pytest.raises(ClientGoneError):
            await waiting
        assert not reader.routes.moving.waiting
        others.close()
        assert (await reader.at()).seq == 0
        assert await reader.read(2) == [1, 2]
        assert reader.routes.moving.held_bytes == 0

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
        # At a stop the client is there: that nothing was done, which `shutting_down` says, would not be true.
        with pytest.raises(TopicsError) as left_open:
            await read
        assert left_open.value.code == "shard_unavailable"
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

        async def fetch_and_cram(*args: Any) -> RecordPage:
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
        other = CursorRoutes(
            live.gateway,
            live.reader,
            reader.catching_up,
            live.rig.settings,
            live.cell,
            lambda _needed: None,
            lambda _ref: None,
        )
        other._reads = itertools.count(100)  # as at another frontend: it waits for no turn at this one
        reader.stall = True
        first, second = (asyncio.create_task(reader.read(2, routes)) for routes in (reader.routes, other))
        await until(lambda: not live.shard_up and len(live.gateway.pending) == 2)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        reader.go_on()
        assert await first == [1, 2]
        assert await reader.read(2) == [3, 4]
        await reader.persisted(4)

    on_loop(tmp_path, test)


def test_a_read_that_moves_nothing_passes_over_what_is_to_be_read_again_and_is_gone(tmp_path: Path) -> None:
    """Answers were lost; then the records of some of them are deleted."""

    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(10)
        revision = (await reader.at()).revision
        for read in range(4):
            advance = CursorAdvance("t", "c", revision, 2 * read, 2 * read + 2, 1000 + read)
            assert (await live.gateway.call(0, advance)).moved
        for read in range(4):
            passed_on = CursorPassedOn("t", "c", revision, 1000 + read, passed_on=read in (1, 3))
            await live.gateway.call(0, passed_on)
        assert await reader.peek(9) == ([1, 2], 0, 2)
        await live.gateway.call(0, DeleteRecords("t", 3, None, b""))
        assert await reader.peek(1) == ([5], 0, 5)
        await live.gateway.call(0, DeleteRecords("t", 7, None, b""))
        assert await reader.peek(9) == ([9, 10], 0, 10), "3, 4, 7 and 8 were passed on"
        assert await reader.read(1) == [9]
        await live.gateway.call(0, DeleteRecords("t", 11, None, b""))
        assert await reader.peek(9) == ([], 9, 10)

    on_loop(tmp_path, test)


@pytest.mark.parametrize("consistency", ["at_least_once", "strictly_at_once"])
def test_readers_take_turns_and_no_page_is_read_in_vain(tmp_path: Path, consistency: str) -> None:
    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(100, consistency=consistency)
        reads = [asyncio.create_task(reader.read(2)) for _ in range(50)]
        assert await asyncio.gather(*reads) == [[n, n + 1] for n in range(1, 100, 2)], "first come, first served"
        assert reader.pages == 50
        assert not len(reader.routes.locks), "nothing is kept of a cursor that nobody reads"
        await reader.persisted(100)

    on_loop(tmp_path, test)


def test_who_gives_up_its_turn_is_in_nobodys_way(tmp_path: Path) -> None:
    """The reader may wait for its turn, or have it."""

    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(6)
        live.shard_up = False
        reads = [asyncio.create_task(reader.read(2)) for _ in range(5)]
        await until(lambda: live.gateway.pending)
        await asyncio.sleep(0)
        for one in (reads[0], reads[2]):
            one.cancel()
        await asyncio.gather(reads[0], reads[2], return_exceptions=True)
        live.shard_up = True
        assert await asyncio.gather(*[reads[n] for n in (1, 3, 4)]) == [[1, 2], [3, 4], [5, 6]]
        assert not len(reader.routes.locks)

    on_loop(tmp_path, test)


def test_readers_that_wait_for_their_turn_are_bounded_in_number_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CURSOR_READERS", limits.CURSOR_READERS._replace(most_count=20))

    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(6)
        reader.routes.locks.wait_s = 0.5
        live.shard_up = False
        reads = [asyncio.create_task(reader.read(2)) for _ in range(20)]
        await until(lambda: live.gateway.pending)
        await asyncio.sleep(0)
        with pytest.raises(TopicsError, match="too many readers") as refused:
            await reader.read(2)
        assert (refused.value.code, refused.value.detail) == ("throttled", {"retry_after_ms": 10})
        late = await asyncio.gather(*reads[1:], return_exceptions=True)
        # They have done nothing, and are not too many.
        stuck = ("throttled", {"retry_after_ms": cursor_routes.STUCK_RETRY_AFTER_MS})
        assert [(one.code, one.detail) for one in late if isinstance(one, TopicsError)] == [stuck] * 19
        live.shard_up = True
        assert await reads[0] == [1, 2]
        assert await reader.read(2) == [3, 4]

    on_loop(tmp_path, test)


def test_who_waits_behind_readers_that_fail_one_after_the_other_is_told_that_nothing_was_done(tmp_path: Path) -> None:
    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(6)
        reader.routes.locks.wait_s = live.gateway.shard_wait_s = WAIT_S
        live.shard_up = False
        reads = [asyncio.create_task(reader.read(2)) for _ in range(4)]
        late = await asyncio.gather(*reads, return_exceptions=True)
        refusals = [(one.code, one.detail) for one in late if isinstance(one, TopicsError)]
        stuck = ("throttled", {"retry_after_ms": cursor_routes.STUCK_RETRY_AFTER_MS})
        assert len(refusals) == 4
        assert refusals[0] == ("shard_unavailable", None), "it was asked, and did not answer"
        assert {code for code, _ in refusals[1:]} <= {"throttled", "shard_unavailable"}
        assert all(one == stuck for one in refusals if one[0] == "throttled")
        reader.go_on()
        assert await reader.read(2) == [1, 2]

    on_loop(tmp_path, test)


def test_where_the_reader_before_left_the_cursor_is_not_taken_for_where_it_is(tmp_path: Path) -> None:
    """It was put somewhere else while others waited for their turn, of whom one has nothing behind the old place."""

    async def test(live: Live) -> None:
        reader = Reader(live)
        await reader.make(2)
        put_back = CursorPut("t", "c", None, None, 0, False)

        async def between() -> None:
            if reader.pages == 2:
                await live.gateway.call(0, put_back)

        reader.before_page = between
        assert await asyncio.gather(*(reader.read(2) for _ in range(2))) == [[1, 2], [1, 2]]

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
