"""Named cursors of a topic (api §10): make, change, show, list, delete them, and read through one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from topics.api import answers
from topics.api.requests import CursorBody, ReadBody
from topics.core.errors import TopicsError, invalid, throttled
from topics.core.keys import KeyScope
from topics.core.names import check_topic_name
from topics.frontend.asgi import DELIVER, Deliver, Message, Receive, Scope, Send, disconnected_before
from topics.frontend.entry import limits, wire
from topics.frontend.entry.bodies import ClientGoneError, read_body
from topics.frontend.entry.budget import Budget, Reservation
from topics.frontend.entry.responses import elapsed_ms, reserve_room, send_json
from topics.frontend.entry.wire import name_cursor
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.diff import LIMIT_DEFAULT, MAX_BATCH_BYTES
from topics.frontend.reads.node_sets import node_set
from topics.frontend.reads.reading import PAGE_MEMBERS, RecordPage, TopicReader, TopicRef, page_values
from topics.frontend.reads.records import CorruptRecordError, PageOptions
from topics.frontend.routes import operations as api
from topics.frontend.routes.operations import ApiRequest, JsonReply
from topics.frontend.shards.gateway import Gateway
from topics.frontend.shards.pending_requests import is_outcome_unknown
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

_PATH: Final = f"{api.TOPIC_PATH}/cursors/{{cursor}}"
_MISSING: Final = ("topic_not_found", "cursor_not_found", *api.LOST)
LIMIT_MAX: Final = 2000
STUCK_RETRY_AFTER_MS: Final = 1000
TRIES_MAX: Final = 100
"""Tries of a read, each lost to a faster reader at another frontend, before its client has to ask again."""

TakeRoom = Callable[[], Awaitable[None]]
"""Returns when there is room for the page of this read."""

_ANSWER: Final = (
    b'{"topic":"%b","cursor":"%b","cursor_seq":%d,'
    + PAGE_MEMBERS
    + b',"performance":{"server_total_ms":%b,"records_scanned":%d%b%b}}'
)


@dataclass(eq=False)
class CursorLock:
    """The lock of one cursor, for as long as a reader has it or waits for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    readers: int = 0
    served: int = 0
    """The number of readers that had the lock and got an answer."""
    left_at: CursorMoved | None = None
    """The cursor as the last reader left it. A reader at another frontend, or a `PUT`, may have moved it since."""


class CursorLocks:
    """The locks of named cursors: the readers of one cursor at one frontend have it one after the other (api §10).

    A reader holds its lock from finding the cursor until the cursor is moved. Only one reader can have the next page,
    so others that read at the same time would throw theirs away. Readers at other frontends do not wait for each other:
    there are never more of those in conflict than there are frontends.
    """

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._locks: dict[tuple[str, str], CursorLock] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @asynccontextmanager
    async def hold(self, topic: str, cursor: str) -> AsyncIterator[CursorLock]:
        """Hold the lock of a cursor. `throttled` if too many readers wait, or if the wait is too long."""
        held = self._locks.get((topic, cursor))
        if held is None:
            held = self._locks[topic, cursor] = CursorLock()
        elif held.readers >= limits.CURSOR_READERS.most_count:
            raise too_many_readers(topic, cursor)
        held.readers += 1
        try:
            if held.readers > 1:  # others wait, even if the lock is free for a moment between two readers
                await self._wait(held, topic, cursor)
            else:
                await held.lock.acquire()  # at once
            try:
                yield held
                held.served += 1
            finally:
                held.lock.release()
        finally:
            held.readers -= 1
            if not held.readers:
                del self._locks[topic, cursor]

    async def _wait(self, wanted: CursorLock, topic: str, cursor: str) -> None:
        served = wanted.served
        try:
            async with asyncio.timeout(self.wait_s):
                await wanted.lock.acquire()
        except TimeoutError:
            if wanted.served == served:
                # The shard or the cold store does not answer. The code must say that nothing of this read was done:
                # after another code a client must not repeat the read by itself.
                raise throttled(
                    f"the reader of cursor {cursor!r} of topic {topic!r} before this one gets no answer; nothing of"
                    " this read was done",
                    retry_after_ms=STUCK_RETRY_AFTER_MS,
                ) from None
            raise too_many_readers(topic, cursor) from None


def too_many_readers(topic: str, cursor: str) -> TopicsError:
    """Return the refusal of a reader that may ask again a moment later."""
    return throttled(f"too many readers move cursor {cursor!r} of topic {topic!r}", retry_after_ms=10)


@dataclass(eq=False)
class CursorRoutes:
    """The requests about named cursors, a method for each."""

    _gateway: Gateway
    _reader: TopicReader
    _catching_up: CatchingUp
    _settings: Settings
    _cell: ProcessCell
    _require_leader: Callable[[KeyScope], None]
    _note_read: Callable[[TopicRef], None]
    moving: Budget = field(default_factory=lambda: Budget(limits.CURSOR_PAGES))
    _reads: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.locks = CursorLocks(self._gateway.shard_wait_s)

    @api.json_route("GET", f"{api.TOPIC_PATH}/cursors", Route.OTHER_CURSOR, KeyScope.READ, "cursors")
    @api.describe(
        "List the cursors of a topic by name", api.ok("A page of cursors", answers.CursorListAnswer), *api.TOPIC_LOST
    )
    @api.takes(*api.PAGED)
    async def list_all(self, request: ApiRequest) -> JsonReply:
        name = request.topic
        size, after = await request.list_page(check_topic_name)
        found = (await self._gateway.ask(CursorGet(name, None, after, size + 1))).cursors
        answer: dict[str, Any] = {"topic": name, "cursors": [shown_cursor(cursor) for cursor in found[:size]]}
        if len(found) > size:
            answer["next_cursor"] = name_cursor(found[size - 1].cursor)
        return JsonReply(answer)

    @api.json_route("GET", _PATH, Route.OTHER_CURSOR, KeyScope.READ, "cursors")
    @api.describe("Where a cursor is", api.ok("The cursor", answers.CursorAnswer), *_MISSING)
    async def get(self, request: ApiRequest) -> JsonReply:
        name, cursor = _names(request.scope)
        return JsonReply({"topic": name, **shown_cursor(await self._find(name, cursor))})

    @api.json_route("PUT", _PATH, Route.OTHER_CURSOR, KeyScope.WRITE, "cursors")
    @api.describe("Make a cursor, or change or move it", api.made_or_there(answers.PutCursorAnswer), *api.TOPIC_LOST)
    @api.takes(body=CursorBody, body_required=False)
    async def put(self, request: ApiRequest) -> JsonReply:
        name, cursor = _names(request.scope)
        given = await request.decoded(CursorBody, self._settings.max_command_bytes, b"{}")
        if given.persist_every is not None and given.persist_every < 1:
            raise invalid("persist_every must be at least 1", field="persist_every")
        if given.tail and given.from_seq is not None:
            raise invalid("from_seq and tail exclude each other: give one of them", field="tail")
        await self._catching_up.wait_for(name)
        call = CursorPut(name, cursor, given.consistency, given.persist_every, given.from_seq, given.tail)
        reply = await self._gateway.ask(call)
        answer = {"topic": name, **shown_cursor(reply), "created": reply.created}
        return JsonReply(answer, 201 if reply.created else 200)

    @api.json_route("DELETE", _PATH, Route.OTHER_CURSOR, KeyScope.DELETE, "cursors")
    @api.describe("Delete a cursor", api.ok("It is gone, or never was", answers.DeleteCursorAnswer), *api.LOST)
    async def delete(self, request: ApiRequest) -> JsonReply:
        name, cursor = _names(request.scope)
        reply = await self._gateway.ask(CursorDelete(name, cursor))
        return JsonReply({"topic": name, "cursor": cursor, "deleted": reply.deleted})

    @api.asgi_route("POST", f"{_PATH}/read", Route.READ_CURSOR, KeyScope.READ, "cursors")
    @api.describe("Read, and move the cursor", api.ok("A page", answers.ReadCursorAnswer), *_MISSING, "not_leader")
    @api.takes(body=ReadBody, body_required=False)
    async def read(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, cursor = _names(scope)
        headers = dict(scope["headers"])
        body = await read_body(receive, headers, self._settings.max_command_bytes)
        request = wire.decode_as(ReadBody, body or b"{}")
        if request.checkpoint:
            self._require_leader(KeyScope.WRITE)
        options = PageOptions(
            min(request.limit or LIMIT_DEFAULT, LIMIT_MAX),
            min(request.max_bytes or MAX_BATCH_BYTES[0], MAX_BATCH_BYTES[1]),
            node_set(request.node),
            request.include_tags,
            request.include_meta,
            payload_bytes=True,
            verify=True,
        )
        copies = b"" if await self._catching_up.wait_for(name) else b',"copies_pending":true'
        most_bytes = max(options.max_batch_bytes, MAX_BATCH_BYTES[0])
        await reserve_room(scope, most_bytes)
        moving = Reservation(self.moving)
        take_page_room = partial(_take_page_room, moving, most_bytes, receive, self._gateway.shard_wait_s)
        try:
            if request.checkpoint:
                async with self.locks.hold(name, cursor) as lock:
                    page, seq, lost = await self._advance(name, cursor, options, lock, take_page_room)
            else:
                page, seq, lost = await self._peek(name, cursor, options, take_page_room)
        finally:
            moving.close()
        passed_on = False
        try:
            self._cell.add("records_out", page.count)
            if lost is not None:
                send = _delivering(scope["extensions"][DELIVER], send)
            took_ms = str(elapsed_ms(started_ns)).encode()
            cold = b',"cold_segments_read":%d' % page.cold_segments if page.cold_segments else b""
            costs = took_ms, page.scanned, cold, copies
            answer = _ANSWER % (name.encode(), cursor.encode(), seq, *page_values(page), *costs)
            answering = send_json(send, headers, 200, answer)
            del page, answer  # as in `DiffRoute`
            await answering
            passed_on = True
        finally:
            if lost is not None:
                self._gateway.post(self._gateway.owner(name), msgspec.structs.replace(lost, passed_on=passed_on))

    async def _peek(
        self, name: str, cursor: str, options: PageOptions, take_page_room: TakeRoom
    ) -> tuple[RecordPage, int, None]:
        """Read a page as `_advance` does, without moving the cursor."""
        at = await self._find(name, cursor)
        await take_page_room()
        cursor_seq, page = at.seq, await self._page(name, at, options)
        for _ in range(TRIES_MAX):
            if page.is_news or at.up_to_seq is None or page.next_from_seq <= at.seq:
                break
            at = await self._find(name, cursor, page.next_from_seq)
            page = await self._page(name, at, options)
        return page, cursor_seq, None

    async def _find(self, name: str, cursor: str, passed_seq: int = 0) -> CursorReply:
        get = CursorGet(name, cursor, passed_seq=passed_seq)
        (found,) = (await self._gateway.ask(get)).cursors
        return found

    async def _advance(
        self, name: str, cursor: str, options: PageOptions, lock: CursorLock, take_page_room: TakeRoom
    ) -> tuple[RecordPage, int, CursorPassedOn | None]:
        """Read a page and move the cursor. Return (page, cursor, message for a shard that waits for delivery)."""
        owner = self._gateway.owner(name)
        left_at, lock.left_at = lock.left_at, None
        looked = left_at is None
        at: CursorReply | CursorMoved = left_at or await self._find(name, cursor)
        # Take room only after the shard's answer: readers at a shard that hangs must not keep it from others.
        await take_page_room()
        for _ in range(TRIES_MAX):
            page = await self._page(name, at, options)
            if page.next_from_seq <= at.seq:
                if looked:
                    return page, at.seq, None
                at, looked = await self._find(name, cursor), True
                continue
            read = next(self._reads)
            lost = CursorPassedOn(name, cursor, at.revision, read, False)
            call = CursorAdvance(name, cursor, at.revision, at.seq, page.next_from_seq, read)
            try:
                moved = await self._gateway.call(owner, call)
            except (TopicsError, asyncio.CancelledError) as error:
                if is_outcome_unknown(error):
                    # The shard may still move the cursor. This message, behind that request, says that nobody got it.
                    self._gateway.post(owner, lost)
                    if isinstance(error, asyncio.CancelledError):
                        # `shutting_down` would say that nothing was done, and a client would repeat the read by itself.
                        raise self._gateway.no_answer(owner) from error
                raise
            if moved.moved:
                if page.is_news or at.up_to_seq is None:
                    lock.left_at = moved
                    return page, page.next_from_seq, lost if moved.under_way else None
                # All records to be read again are deleted or filtered out. Go on with those behind them.
                if moved.under_way:
                    self._gateway.post(owner, msgspec.structs.replace(lost, passed_on=True))
            at, looked = moved, True
        raise too_many_readers(name, cursor)

    async def _page(self, name: str, at: CursorReply | CursorMoved, options: PageOptions) -> RecordPage:
        ref = self._reader.get(name)
        try:
            page = await self._reader.fetch_page(ref, at.seq, options, at.up_to_seq)
            self._note_read(ref)
            return page if at.up_to_seq is None else _up_to(page, at.up_to_seq)
        except CorruptRecordError as error:
            raise TopicsError(
                "internal",
                f"topic {name!r}: record {error.seq} is damaged, its checksum does not match ({error.file}, offset"
                f" {error.offset}); `topics verify` lists all damage, move the cursor to go on behind the record",
                {"topic": name, "reason": "corrupt", "seq": error.seq, "file": error.file, "offset": error.offset},
            ) from None


async def _take_page_room(moving: Reservation, most_bytes: int, receive: Receive, wait_s: float) -> None:
    """Wait for room for a page. Raise `throttled`, and ClientGoneError if the client leaves: its cursor stays."""
    if moving.try_grow(most_bytes):
        return
    entering = asyncio.create_task(moving.grow(most_bytes))
    try:
        async with asyncio.timeout(wait_s):
            if await disconnected_before(entering, receive):
                raise ClientGoneError
        entering.result()
    except TimeoutError:
        raise throttled(
            "the pages of other cursors leave no room for this one; nothing of this read was done, send it again later",
            retry_after_ms=STUCK_RETRY_AFTER_MS,
        ) from None
    finally:
        entering.cancel()


def _up_to(page: RecordPage, seq: int) -> RecordPage:
    """Cut a page, and its gap, at `seq`: the reader has not lost records behind it."""
    if page.next_from_seq <= seq:
        return page
    gap = page.tombstone
    if gap is not None and gap.gap_to > seq:
        gap = msgspec.structs.replace(gap, gap_to=seq, missed_estimate=seq - gap.gap_from + 1)
    return msgspec.structs.replace(page, next_from_seq=seq, tombstone=gap)


def _delivering(deliver: Deliver, send: Send) -> Send:
    """Return a `send` that returns only when the body, one message, has left this process."""

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


def shown_cursor(cursor: CursorReply) -> dict[str, Any]:
    settings = {"consistency": cursor.consistency, "persist_every": cursor.persist_every}
    return {"cursor": cursor.cursor, **settings, "cursor_seq": cursor.seq, "persisted_seq": cursor.persisted_seq}
