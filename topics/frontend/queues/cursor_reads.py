"""Named cursors of a topic (api §10): to make, change, show, list and delete them, and to read through one.

Only one reader of a cursor can have what is next: the others would read the same page and throw it away. So the readers
at one frontend wait for each other, first come, first served (`Turns`), from looking where the cursor is until it is
moved; the answers go out side by side. Readers at other frontends are not waited for: no more can be in each other's
way than there are frontends.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec
from starlette.datastructures import QueryParams

from topics.api import answers as answer
from topics.api.requests import (
    CursorBody,
    ReadBody,
)
from topics.core.errors import TopicsError, invalid
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name, owner_shard
from topics.frontend.asgi import DELIVER, Deliver, Message, Receive, Scope, Send
from topics.frontend.entry import limits, wire
from topics.frontend.entry.bodies import ClientGoneError, read_body
from topics.frontend.entry.budget import Budget, Reservation
from topics.frontend.entry.query import name_after, name_cursor, page_size
from topics.frontend.entry.responses import LIST_BYTES_MAX, elapsed_ms, reserve_room, send_json, send_object
from topics.frontend.live.push import gone_before
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.diff import LIMIT_DEFAULT, MAX_BATCH_BYTES
from topics.frontend.reads.node_sets import node_set
from topics.frontend.reads.reading import PAGE_MEMBERS, ReadPage, TopicReader, page_values
from topics.frontend.reads.records import CorruptRecordError, PageOptions
from topics.frontend.routes.operations import (
    LOST,
    ApiOperation,
    Binding,
    Query,
    json_answer,
    made_or_there,
)
from topics.frontend.shards.gateway import Gateway
from topics.frontend.shards.pending_calls import is_outcome_unknown
from topics.settings import Settings
from topics.shm.control import ProcessCell
from topics.shm.durations import Route
from topics.shm.queue_messages import (
    CursorAdvance,
    CursorDelete,
    CursorGet,
    CursorMoved,
    CursorPassedOn,
    CursorPut,
    CursorReply,
)

STUCK_RETRY_AFTER_MS: Final = 1000


class CursorTurn:
    """The turn at one cursor, for as long as somebody has it or waits for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.readers = 0
        self.served = 0
        """The number of readers that had it and were not stuck in it."""
        self.left_at: CursorMoved | None = None
        """The cursor as the last reader left it. A reader at another frontend, or a `PUT`, may have moved it since."""


class CursorTurns:
    """The turns at all cursors of one frontend."""

    def __init__(self, wait_s: float) -> None:
        """`wait_s` is the longest time that a reader waits."""
        self.wait_s = wait_s
        self._turns: dict[tuple[str, str], CursorTurn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    @asynccontextmanager
    async def of(self, topic: str, cursor: str) -> AsyncIterator[CursorTurn]:
        """Wait for the turn; `throttled` when too many wait, or when it does not come though others had theirs."""
        turn = self._turns.get((topic, cursor))
        if turn is None:
            turn = self._turns[topic, cursor] = CursorTurn()
        elif turn.readers >= limits.CURSOR_READERS.most_count:
            raise too_many_readers(topic, cursor)
        turn.readers += 1
        try:
            if turn.readers > 1:  # between two of them the lock seems to be free
                await self._wait(turn, topic, cursor)
            else:
                await turn.lock.acquire()  # at once
            try:
                yield turn
                turn.served += 1
            finally:
                turn.lock.release()
        finally:
            turn.readers -= 1
            if not turn.readers:
                del self._turns[topic, cursor]

    async def _wait(self, turn: CursorTurn, topic: str, cursor: str) -> None:
        served = turn.served
        try:
            async with asyncio.timeout(self.wait_s):
                await turn.lock.acquire()
        except TimeoutError:
            if turn.served == served:
                # They are not too many: the shard or the cold store does not answer. Nothing of this read was done,
                # and that has to be said: another code leaves it open, and a client must not ask again by itself.
                raise TopicsError(
                    "throttled",
                    f"who reads cursor {cursor!r} of topic {topic!r} before this one gets no answer; nothing of this"
                    " read was done",
                    {"retry_after_ms": STUCK_RETRY_AFTER_MS},
                ) from None
            raise too_many_readers(topic, cursor) from None


def too_many_readers(topic: str, cursor: str) -> TopicsError:
    """The refusal of a reader that may ask again a moment later."""
    return TopicsError(
        "throttled", f"too many readers move cursor {cursor!r} of topic {topic!r}", {"retry_after_ms": 10}
    )


LIMIT_MAX: Final = 2000
TRIES_MAX: Final = 100
"""How often a read may find that others, at other frontends, were faster before its client is told to come back."""


Room = Callable[[], Awaitable[None]]
"""Returns when there is room for the page of this read."""


_ANSWER: Final = (
    b'{"topic":"%b","cursor":"%b","cursor_seq":%d,'
    + PAGE_MEMBERS
    + b',"performance":{"server_total_ms":%b,"records_scanned":%d}}'
)


class CursorRoutes:
    """The requests about named cursors, a method for each."""

    def __init__(
        self, gateway: Gateway, reader: TopicReader, catching_up: CatchingUp, settings: Settings, cell: ProcessCell
    ) -> None:
        self._catching_up = catching_up
        self._gateway = gateway
        self._reader = reader
        self._settings = settings
        self._cell = cell
        self._reads = itertools.count(1)
        self.turns = CursorTurns(gateway.shard_wait_s)
        self.moving = Budget(limits.CURSOR_PAGES)

    async def put(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, cursor = _names(scope)
        headers = dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        request = wire.decode_as(CursorBody, body or b"{}")
        if request.persist_every is not None and request.persist_every < 1:
            raise invalid("persist_every must be at least 1", field="persist_every")
        if request.tail and request.from_seq is not None:
            raise invalid("from_seq and tail stand instead of each other: give one of them", field="tail")
        await self._catching_up.one(name)
        call = CursorPut(name, cursor, request.consistency, request.persist_every, request.from_seq, request.tail)
        reply = await self._gateway.call(self._owner(name), call)
        answer = {"topic": name, **_shown(reply), "created": reply.created}
        await send_object(send, headers, 201 if reply.created else 200, answer, started_ns)

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, cursor = _names(scope)
        (found,) = (await self._gateway.call(self._owner(name), CursorGet(name, cursor))).cursors
        await send_object(send, dict(scope["headers"]), 200, {"topic": name, **_shown(found)}, started_ns)

    async def list_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name = check_topic_name(scope["path_params"]["topic"])
        query = QueryParams(scope["query_string"])
        most = page_size(query)
        await reserve_room(scope, LIST_BYTES_MAX)
        look = CursorGet(name, None, name_after(query.get("cursor"), check_topic_name), most + 1)
        found = (await self._gateway.call(self._owner(name), look)).cursors
        answer: dict[str, Any] = {"topic": name, "cursors": [_shown(one) for one in found[:most]]}
        if len(found) > most:
            answer["next_cursor"] = name_cursor(found[most - 1].cursor)
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns)

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, cursor = _names(scope)
        reply = await self._gateway.call(self._owner(name), CursorDelete(name, cursor))
        answer: dict[str, Any] = {"topic": name, "cursor": cursor, "deleted": reply.deleted}
        await send_object(send, dict(scope["headers"]), 200, answer, started_ns)

    async def read(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, cursor = _names(scope)
        headers = dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        request = wire.decode_as(ReadBody, body or b"{}")
        options = PageOptions(
            min(request.limit or LIMIT_DEFAULT, LIMIT_MAX),
            min(request.max_bytes or MAX_BATCH_BYTES[0], MAX_BATCH_BYTES[1]),
            node_set(request.node),
            request.include_tags,
            request.include_meta,
            payload_bytes=True,
            verify=True,
        )
        await self._catching_up.one(name)
        most_bytes = max(options.max_batch_bytes, MAX_BATCH_BYTES[0])
        await reserve_room(scope, most_bytes)
        moving = Reservation(self.moving)
        room = partial(_enter, moving, most_bytes, receive, self._gateway.shard_wait_s)
        try:
            if request.checkpoint:
                async with self.turns.of(name, cursor) as turn:
                    page, seq, lost = await self._take(name, cursor, options, turn, room)
            else:
                page, seq, lost = await self._peek(name, cursor, options, room)
        finally:
            moving.close()
        passed_on = False
        try:
            self._cell.add("records_out", page.count)
            if lost is not None:
                send = _delivering(scope["extensions"][DELIVER], send)
            answering = send_json(send, headers, 200, _answer(name, cursor, page, seq, started_ns))
            del page  # as `DiffRoute`
            await answering
            passed_on = True
        finally:
            if lost is not None:
                self._gateway.post(self._owner(name), msgspec.structs.replace(lost, passed_on=passed_on))

    async def _peek(self, name: str, cursor: str, options: PageOptions, room: Room) -> tuple[ReadPage, int, None]:
        """Read a page as `_take` does, and move nothing."""
        at = await self._look(name, cursor)
        await room()
        cursor_seq, page = at.seq, await self._page(name, at, options)
        for _ in range(TRIES_MAX):
            if page.count or page.tombstone is not None or at.up_to_seq is None or page.next_from_seq <= at.seq:
                break
            at = await self._look(name, cursor, page.next_from_seq)
            page = await self._page(name, at, options)
        return page, cursor_seq, None

    async def _look(self, name: str, cursor: str, passed_seq: int = 0) -> CursorReply:
        look = CursorGet(name, cursor, passed_seq=passed_seq)
        (found,) = (await self._gateway.call(self._owner(name), look)).cursors
        return found

    async def _take(
        self, name: str, cursor: str, options: PageOptions, turn: CursorTurn, room: Room
    ) -> tuple[ReadPage, int, CursorPassedOn | None]:
        """Return the page, the cursor's place after it, and the message for a shard that has to know of its loss."""
        owner = self._owner(name)
        left_at, turn.left_at = turn.left_at, None
        looked = left_at is None
        at: CursorReply | CursorMoved = left_at or await self._look(name, cursor)
        # Not before its shard has answered: one that hangs is not to keep the room from the cursors of others.
        await room()
        for _ in range(TRIES_MAX):
            page = await self._page(name, at, options)
            if page.next_from_seq <= at.seq:
                if looked:
                    return page, at.seq, None
                at, looked = await self._look(name, cursor), True
                continue
            read = next(self._reads)
            lost = CursorPassedOn(name, cursor, at.revision, read, False)
            call = CursorAdvance(name, cursor, at.revision, at.seq, page.next_from_seq, read)
            try:
                moved = await self._gateway.call(owner, call)
            except (TopicsError, asyncio.CancelledError) as error:
                if is_outcome_unknown(error):
                    # Nobody waits for the answer now, but the shard may still move the cursor: it finds this behind.
                    self._gateway.post(owner, lost)
                    if isinstance(error, asyncio.CancelledError):
                        # Not `shutting_down`, which says that nothing was done: a client would read on by itself.
                        raise self._gateway.no_answer(owner) from error
                raise
            if moved.moved:
                if page.count or page.tombstone is not None or at.up_to_seq is None:
                    turn.left_at = moved
                    return page, page.next_from_seq, lost if moved.under_way else None
                # What was to be read again is gone, or not for this reader: there is more to read behind it.
                if moved.under_way:
                    self._gateway.post(owner, msgspec.structs.replace(lost, passed_on=True))
            at, looked = moved, True
        raise too_many_readers(name, cursor)

    async def _page(self, name: str, at: CursorReply | CursorMoved, options: PageOptions) -> ReadPage:
        ref = self._reader.get(name)
        try:
            page = await self._reader.fetch_page(ref, at.seq, options, self._reader.now_ms(), at.up_to_seq)
            return page if at.up_to_seq is None else _up_to(page, at.up_to_seq)
        except CorruptRecordError as error:
            raise TopicsError(
                "internal",
                f"topic {name!r}: record {error.seq} is damaged, its checksum does not match ({error.file}, offset"
                f" {error.offset}); `topics verify` tells what else is, move the cursor to go on behind it",
                {"topic": name, "reason": "corrupt", "seq": error.seq, "file": error.file, "offset": error.offset},
            ) from None

    def _owner(self, name: str) -> int:
        return owner_shard(name, self._gateway.shards)


async def _enter(moving: Reservation, most_bytes: int, receive: Receive, wait_s: float) -> None:
    """Room for a page. Raises ClientGoneError when nobody waits for it any more: no cursor is to move for that one; and
    `throttled`.
    """
    if moving.try_grow(most_bytes):
        return
    entering = asyncio.create_task(moving.grow(most_bytes))
    try:
        async with asyncio.timeout(wait_s):
            if await gone_before(entering, receive):
                raise ClientGoneError
        entering.result()
    except TimeoutError:
        raise TopicsError(
            "throttled",
            "pages that other cursors are moved over leave no room for this one; nothing of this read was done",
            {"retry_after_ms": STUCK_RETRY_AFTER_MS},
        ) from None
    finally:
        entering.cancel()


def _up_to(page: ReadPage, seq: int) -> ReadPage:
    """What floors took beyond `seq` is no loss of this reader."""
    if page.next_from_seq <= seq:
        return page
    gap = page.tombstone
    if gap is not None and gap.gap_to > seq:
        gap = msgspec.structs.replace(gap, gap_to=seq, missed_estimate=seq - gap.gap_from + 1)
    return msgspec.structs.replace(page, next_from_seq=seq, tombstone=gap)


def _delivering(deliver: Deliver, send: Send) -> Send:
    """For an answer in one message: it has been passed on when that returns."""

    async def send_or_deliver(message: Message) -> None:
        if message["type"] == "http.response.body":
            await deliver(send, message["body"])
        else:
            await send(message)

    return send_or_deliver


def _names(scope: Scope) -> tuple[str, str]:
    name = check_topic_name(scope["path_params"]["topic"])
    cursor: str = scope["path_params"]["cursor"]
    try:
        return name, check_topic_name(cursor)
    except TopicsError:
        raise invalid(
            f"cursor name {cursor[:300]!r} is not valid: the rules are those of topic names", field="cursor"
        ) from None


def _shown(cursor: CursorReply) -> dict[str, Any]:
    return {
        "cursor": cursor.cursor,
        "consistency": cursor.consistency,
        "persist_every": cursor.persist_every,
        "cursor_seq": cursor.seq,
        "persisted_seq": cursor.persisted_seq,
    }


def _answer(name: str, cursor: str, page: ReadPage, cursor_seq: int, started_ns: int) -> bytes:
    return _ANSWER % (
        name.encode(),
        cursor.encode(),
        cursor_seq,
        *page_values(page),
        str(elapsed_ms(started_ns)).encode(),
        page.scanned,
    )


_CURSORS: Final = "/v0/topics/{topic}/cursors"
_CURSOR: Final = f"{_CURSORS}/{{cursor}}"
_COUNT: Final = {"type": "integer", "minimum": 0}


def cursor_operations(cursors: CursorRoutes) -> list[ApiOperation]:
    """Read positions that the server keeps."""
    missing = ("topic_not_found", "cursor_not_found", *LOST)
    return [
        ApiOperation(
            Binding("GET", _CURSORS, cursors.list_all, Route.OTHER_CURSOR, KeyScope.READ, "cursors"),
            "List the cursors of a topic by name",
            {200: json_answer("A page of cursors", answer.CursorListAnswer)},
            ("topic_not_found", *LOST),
            query=(
                Query("page_size", _COUNT | {"default": 100}, "at most 1000"),
                Query("cursor", {"type": "string"}, "next_cursor of the page before"),
            ),
        ),
        ApiOperation(
            Binding("GET", _CURSOR, cursors.get, Route.OTHER_CURSOR, KeyScope.READ, "cursors"),
            "Where a cursor is",
            {200: json_answer("The cursor", answer.CursorAnswer)},
            missing,
        ),
        ApiOperation(
            Binding("PUT", _CURSOR, cursors.put, Route.OTHER_CURSOR, KeyScope.WRITE, "cursors"),
            "Make a cursor, or change or move it",
            made_or_there(answer.PutCursorAnswer),
            ("topic_not_found", *LOST),
            body=CursorBody,
            body_required=False,
        ),
        ApiOperation(
            Binding("DELETE", _CURSOR, cursors.delete, Route.OTHER_CURSOR, KeyScope.DELETE, "cursors"),
            "Delete a cursor",
            {200: json_answer("It is gone, or never was", answer.DeleteCursorAnswer)},
            LOST,
        ),
        ApiOperation(
            Binding("POST", f"{_CURSOR}/read", cursors.read, Route.READ_CURSOR, KeyScope.READ, "cursors"),
            "Read on, and move the cursor",
            {200: json_answer("A page of records", answer.ReadCursorAnswer)},
            missing,
            body=ReadBody,
            body_required=False,
        ),
    ]
