"""`POST /v0/topics/:t/diff`: the records that follow a cursor, at once or as soon as there are some (api §3)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec

from topics.api import answers
from topics.api.requests import DiffBody, FollowBody
from topics.core.clock import Clock
from topics.core.errors import TopicsError, invalid
from topics.core.keys import ApiKey, KeyScope
from topics.core.names import check_topic_name
from topics.frontend.asgi import ROUTE, Receive, Scope, Send, until_disconnect
from topics.frontend.entry import limits, wire
from topics.frontend.entry.access import caller_of
from topics.frontend.entry.bodies import ClientGoneError, read_request
from topics.frontend.entry.budget import Reservation
from topics.frontend.entry.leadership import Leadership
from topics.frontend.entry.responses import elapsed_ms, room_of, send_json
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.node_sets import node_set
from topics.frontend.reads.reading import PAGE_MEMBERS, RecordPage, TopicReader, TopicRef, page_values
from topics.frontend.reads.records import PageOptions
from topics.frontend.routes import operations as api
from topics.frontend.shards.gateway import Gateway
from topics.frontend.shards.notices import WatchHandle
from topics.settings import Settings
from topics.shm.control import ProcessCell
from topics.shm.durations import Route
from topics.shm.recency import RecencyWriter

LIMIT_DEFAULT: Final = 256
MAX_BATCH_BYTES: Final = (1 << 20, 8 << 20)
"""Default and maximum of `max_batch_bytes`."""
WAIT_MS_MAX: Final = 30_000
_PAGE: Final = api.ok("A page of records", answers.DiffAnswer)
_ANSWER: Final = (
    b'{"topic":"%b",' + PAGE_MEMBERS + b',"performance":{"server_total_ms":%b,"records_scanned":%d%b%b%b%b}}'
)


@dataclass(eq=False)
class DiffRoute:
    """The diffs of this frontend, answered from arena and files. Only a long poll asks the shard: to report changes."""

    reader: TopicReader
    gateway: Gateway
    recency: RecencyWriter
    settings: Settings
    cell: ProcessCell
    catching_up: CatchingUp
    clock: Clock
    leadership: Leadership
    _waiting: set[LongPoll] = field(default_factory=set)
    _find_key: Callable[[bytes], ApiKey | None] | None = None
    """The keys as their last change has left them; None before one."""
    _draining: bool = False

    @api.asgi_route("POST", f"{api.TOPIC_PATH}/diff", Route.DIFF, KeyScope.READ, "records")
    @api.describe("Read what follows a cursor, or wait for it", _PAGE, "topic_not_found", "storage_unavailable")
    @api.takes(body=DiffBody)
    async def post(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        name, headers = check_topic_name(scope["path_params"]["topic"]), dict(scope["headers"])
        request, options = await read_request(receive, headers, self.settings.max_command_bytes, self._wish)
        reader = self.reader
        with_copies = await self.catching_up.wait_for(name)
        room = room_of(scope)
        if room is not None:
            await room.replace(_room_bytes(options))
        ref = reader.get(name)
        page = await reader.fetch_page(ref, request.from_seq, options, from_ts=request.from_ts)
        self.recency.touch(ref.shard, ref.slot, ref.view.topic_id, self.clock.now_ms())
        if request.wait_ms and not page.is_news:
            scope[ROUTE] = Route.DIFF_WAIT
            page = await self._wait(ref, page, request, options, scope, receive)
        self.cell.add("records_out", page.count)
        took_ms = str(elapsed_ms(started_ns)).encode()
        cold = b',"cold_segments_read":%d' % page.cold_segments if page.cold_segments else b""
        copies = b"" if with_copies else b',"copies_pending":true'
        lag_ms = self.leadership.lag_ms(self.clock.now_ms())
        lag = b"" if lag_ms is None else b',"lag_ms":%d' % lag_ms
        archived = b"" if not self.settings.has_archive else b',"archived_seq":%d' % ref.view.archived_seq
        answer = _ANSWER % (name.encode(), *page_values(page), took_ms, page.scanned, cold, copies, archived, lag)
        answering = send_json(send, headers, 200, answer)
        # The page and the names of writers may be long: they are not kept while the client takes the answer.
        del page, options, answer
        await answering

    def drain(self) -> None:
        """Have every long poll answer now, as the process is to stop."""
        self._draining = True
        for poll in self._waiting:
            poll.end()

    def end_forbidden(self, find_key: Callable[[bytes], ApiKey | None]) -> None:
        """End the long polls that their keys do not allow any more. `find_key` returns a key as it is now."""
        self._find_key = find_key
        for poll in self._waiting:
            if (refusal := self._refusal(poll)) is not None:
                poll.end(refusal)

    def _refusal(self, poll: LongPoll) -> TopicsError | None:
        """Return the reason why a key does not allow a long poll any more, None if it does."""
        if self._find_key is None:
            return None
        try:
            key = self._find_key(poll.digest)
            if key is None:
                raise TopicsError("unauthorized", "the key of this long poll is no longer valid")
            key.require(KeyScope.READ, (poll.topic,))
        except TopicsError as refusal:
            return refusal.with_traceback(None)
        return None

    def _wish(self, body: bytes) -> tuple[DiffBody, PageOptions]:
        request = wire.decode_as(DiffBody, body)
        if request.from_ts is not None and request.from_seq:
            raise invalid("from_ts replaces from_seq: give one of the two", field="from_ts")
        options = page_options(request, self.settings)
        request.node = None  # a list may name the same writer many times
        return request, options

    async def _wait(
        self, ref: TopicRef, page: RecordPage, request: DiffBody, options: PageOptions, scope: Scope, receive: Receive
    ) -> RecordPage:
        """Return the first page with anything to deliver, or the last one before the deadline. Its costs are those of
        all pages. `from_ts` may be in the future: records written before it are not delivered. Raise `401` or `403` if
        the caller's key loses its right to the topic meanwhile.
        """
        room, scanned, cold_segments = room_of(scope), 0, 0
        poll = LongPoll(caller_of(scope).digest, ref.name)
        with self._listening(poll, ref, min(request.wait_ms, WAIT_MS_MAX), receive) as watch:
            while not (poll.is_over or page.is_news):
                if room is not None:
                    room.resize(0)
                if page.caught_up:
                    await poll.news.wait()
                else:
                    await asyncio.sleep(0)  # other requests have their turn between pages of filtered records
                poll.news.clear()
                if poll.is_gone:
                    raise ClientGoneError
                if room is not None and not await poll.enter(room, _room_bytes(options)):
                    break
                ref = self.reader.get(ref.name)
                watch.found(ref.view)
                scanned, cold_segments = scanned + page.scanned, cold_segments + page.cold_segments
                page = await self.reader.fetch_page(ref, page.next_from_seq, options, from_ts=request.from_ts)
        if poll.refused is not None:
            raise poll.refused
        return msgspec.structs.replace(
            page, scanned=scanned + page.scanned, cold_segments=cold_segments + page.cold_segments
        )

    @contextmanager
    def _listening(self, poll: LongPoll, ref: TopicRef, wait_ms: int, receive: Receive) -> Iterator[WatchHandle]:
        """Count a long poll among those that wait, and have it hear of records, of its deadline and of its client."""
        most = limits.LONG_POLLS.most_count
        if len(self._waiting) >= most:
            raise limits.LONG_POLLS.refused(f"{most} long polls are waiting already", most, retry_after_ms=None)
        loop = asyncio.get_running_loop()
        # Only the timer decides that time is over. It may fire early by another clock, and would not fire again.
        timer = loop.call_later(wait_ms / 1000, poll.end)
        watch = self.gateway.watches.add(ref.shard, ref.name, ref.view, poll.news.set)
        gone = loop.create_task(until_disconnect(receive))  # only a disconnect can follow the body
        gone.add_done_callback(poll.client_gone)
        self._waiting.add(poll)
        self.cell.set("long_polls", len(self._waiting))
        try:
            # `drain` and `end_forbidden` ended only the long polls before this one.
            refusal = self._refusal(poll)
            if self._draining or refusal is not None:
                poll.end(refusal)
            yield watch
        finally:
            timer.cancel()
            watch.cancel()
            gone.cancel()
            self._waiting.remove(poll)
            self.cell.set("long_polls", len(self._waiting))


class LongPoll:
    """One diff that waits for records. Owns whether its time is over, and why it was refused."""

    def __init__(self, digest: bytes, topic: str) -> None:
        """`digest` is that of the caller's key."""
        self.digest = digest
        self.topic = topic
        self.news = asyncio.Event()
        self.is_over = False
        self.is_gone = False
        """True once the client has disconnected."""
        self.refused: TopicsError | None = None
        self._entering: asyncio.Timeout | None = None

    def end(self, refusal: TopicsError | None = None) -> None:
        """Have it answer now: with this refusal, or with the page that it has."""
        self.refused = self.refused or refusal
        if self._entering is not None and not self.is_over:
            self._entering.reschedule(asyncio.get_running_loop().time())
        self.is_over = True
        self.news.set()

    def client_gone(self, _task: object) -> None:
        self.is_gone = True
        self.news.set()

    async def enter(self, room: Reservation, size_bytes: int) -> bool:
        """Wait for room for the next page. False if the time is over first: the last look is not worth a wait."""
        self._entering = asyncio.timeout(0 if self.is_over else None)
        try:
            async with self._entering:
                await room.replace(size_bytes)
        except TimeoutError:
            return False
        finally:
            self._entering = None
        return True


def page_options(request: DiffBody | FollowBody, settings: Settings) -> PageOptions:
    """Return the request's page options, clamped to the service's limits."""
    return PageOptions(
        min(request.limit or LIMIT_DEFAULT, settings.max_limit),
        min(request.max_batch_bytes or MAX_BATCH_BYTES[0], MAX_BATCH_BYTES[1]),
        node_set(request.node),
        request.include_tags,
        request.include_meta,
        not isinstance(request, FollowBody) or request.include_data,
    )


def _room_bytes(options: PageOptions) -> int:
    """Return the longest that a page may be: it has at least one record, however few bytes are asked for."""
    return max(options.max_batch_bytes, MAX_BATCH_BYTES[0])
