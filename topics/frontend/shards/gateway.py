"""The frontend's end of the rings: requests to shards, their answers, and the listeners for changes of topics.

Nothing here blocks the event loop for longer than the half millisecond of `lone_writes.py`. A request is pushed at
once, or waits (bounded) for room in the ring. Short requests pushed in one iteration of the loop are signalled once, so
that they reach the shard as one group. Answers are signalled by an eventfd. Requests to a dead shard wait for its
restart, until `shard_wait_ms` is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from topics.core.errors import TopicsError, throttled
from topics.core.names import owner_shard
from topics.frontend.shards.archive_acks import ArchiveAcks
from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.lone_writes import LoneWrites
from topics.frontend.shards.notices import JobListeners, Watches
from topics.frontend.shards.pending_requests import (
    ROOM_WAIT_S,
    SPILL_INLINE_BYTES_MAX,
    OnLate,
    PendingRequest,
    PendingRequests,
    QueuedMessage,
    SendOutcome,
    SendQueue,
    Spills,
    fail,
    take_long_reply,
)
from topics.log import LASTING_EVERY_S, SparseLines
from topics.shm import append_messages, messages
from topics.shm.append_messages import AppendOptions, AppendReply
from topics.shm.asks import Asks, Message, OfTopic, ReplyT
from topics.shm.control import ProcessCell, Role
from topics.shm.instance import SharedMemory
from topics.shm.messages import MessageKind, Part
from topics.shm.topic_messages import Hello
from topics.storage.frame import LaidOut

SWEEP_S: Final = 0.25
"""Time between two checks for time-outs and lost wake-ups."""
ROOM_RETRY_S: Final = 0.002
SIGNALLED_AT_ONCE_BYTES: Final = 4096
"""A request so long is signalled as soon as it is pushed: the shard works on it while this frontend parses the next."""


class _Link:
    """The shared memory between one shard and this frontend: rings, wake-up and cell."""

    __slots__ = ("cell", "generation", "replies", "requests", "signal_due", "wake")

    def __init__(self, shared: SharedMemory, index: int, shard: int) -> None:
        pair = shared.rings[index][shard]
        self.requests = SendQueue(pair.requests)
        self.replies = pair.replies
        self.wake = shared.shard_wakes[shard]
        self.cell = shared.control.cell(Role.WALSHARD, shard)
        self.generation = 0
        self.signal_due = False


class Gateway:
    """The connections of a frontend to all shards. It owns unanswered requests and all listeners, on one event loop."""

    def __init__(
        self,
        shared: SharedMemory,
        index: int,
        incarnation: int,
        arenas: Arenas,
        cell: ProcessCell,
        shard_wait_ms: int,
        archive_wait_ms: int,
        arrived: Callable[[], int],
    ) -> None:
        """`arrived` returns how many requests of clients this frontend has had so far."""
        self._loop = asyncio.get_running_loop()
        self._incarnation = incarnation
        self._cell = cell
        self.arenas = arenas
        self.shard_wait_s = shard_wait_ms / 1000  # the longest time that an answer may take
        self._wake = shared.frontend_wakes[index]
        self.links = [_Link(shared, index, shard) for shard in range(shared.shards)]
        self._last_id = incarnation << 40
        self._lone_writes = LoneWrites(self._wake, arrived)
        self._signals_at_once = False
        self.pending = PendingRequests()
        self._spills = Spills(shared.identity, index)
        self._no_room = SparseLines(LASTING_EVERY_S, self._loop.time)
        self._signals: list[_Link] = []
        self._retry_timer: asyncio.TimerHandle | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._spilling: set[asyncio.Task[None]] = set()
        self._renewals: set[asyncio.Task[None]] = set()
        self.watches = Watches(self._loop, arenas, self.post, lambda shard: self.links[shard].requests.posts_full)
        self._restart_listeners: list[Callable[[int], None]] = []
        self._closed = False
        self.job_listeners = JobListeners(incarnation)
        self.archive_acks = ArchiveAcks(shared.control, cell, archive_wait_ms)
        self.pressed = False
        """True under the greatest pressure: a request waits PRESSED_WAIT_S for room in the ring, not ROOM_WAIT_S."""
        self.retry_after_ms = 100

    def on_restart(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with each shard that was restarted, which has forgotten its streams and claims."""
        self._restart_listeners.append(listener)

    @property
    def shards(self) -> int:
        return len(self.links)

    def owner(self, name: str) -> int:
        """Return the shard of a topic, which need not exist."""
        return owner_shard(name, len(self.links))

    @property
    def fullness(self) -> float:
        """The fullness of the fullest request ring, 0 to 1; 1 when a request waits for room."""
        return max(link.requests.fullness for link in self.links)

    def start(self) -> None:
        """Say hello to every shard and listen for answers."""
        self._wake.end_look()  # a former incarnation may have been killed during a look
        self._spills.remove_leftovers()
        for shard, link in enumerate(self.links):
            link.generation = link.cell.get("generation")
            self.post(shard, Hello(self._incarnation))
        self._loop.add_reader(self._wake.fd, self._on_wake)
        self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        """Stop. Requests without an answer fail with `shutting_down`."""
        self._closed = True
        self._flush_signals()
        self._loop.remove_reader(self._wake.fd)
        for timer in (self._sweep_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        for task in self._spilling:
            task.cancel()
        self.pending.fail_all(stopping)

    # -- requests

    def submit_append(
        self, shard: int, options: AppendOptions, records: LaidOut, unthrottled: bool = False
    ) -> asyncio.Future[AppendReply]:
        """Send a write. The future fails with a TopicsError: the shard's own, `shard_unavailable` (the outcome is
        unknown), or `throttled` (nothing was sent). An `unthrottled` write waits for room in the ring for as long as
        for a shard that is restarted. Raise `not_ready` at once.
        """
        self.arenas.require(shard)
        self._last_id = request_id = self._last_id + 1
        laid_out = records.offset_len, records.flags, records.buffer
        parts = append_messages.encode_append(request_id, options, *laid_out)
        if not self._lone_writes.is_alone(len(self.pending), len(records.buffer)):
            return self._submit(shard, request_id, parts, MessageKind.APPEND, unthrottled, None)
        self._lone_writes.begin()
        self._signals_at_once = True
        try:
            future = self._submit(shard, request_id, parts, MessageKind.APPEND, unthrottled, None)
        finally:
            self._signals_at_once = False
            self._take_lone(shard, request_id)
        return future

    def submit(
        self, shard: int, request: Message | Asks[Any], on_late: OnLate | None = None, unthrottled: bool = False
    ) -> asyncio.Future[Any]:
        """Send any other request, which fails as `submit_append` does. `on_late` gets a reply that comes after that."""
        self.arenas.require(shard)
        self._last_id = request_id = self._last_id + 1
        parts = messages.encode_call(request_id, request)
        return self._submit(shard, request_id, parts, MessageKind.CALL, unthrottled, on_late)

    async def call(self, shard: int, request: Asks[ReplyT], unthrottled: bool = False) -> ReplyT:
        """Send a request as `submit` does, and wait for the reply, whose type the request names."""
        return request.checked(await self.submit(shard, request, unthrottled=unthrottled))

    async def ask(self, request: Asks[ReplyT], unthrottled: bool = False) -> ReplyT:
        """Send a request about a topic to the shard that owns it, and wait for the reply as `call` does."""
        assert isinstance(request, OfTopic), request
        shard = owner_shard(request.name, len(self.links))
        return request.checked(await self.submit(shard, request, unthrottled=unthrottled))

    def no_answer(self, shard: int) -> TopicsError:
        return TopicsError(
            "shard_unavailable",
            f"shard {shard} did not answer within {self.shard_wait_s:g} s; whether a write took effect is not known, a"
            " repeat with the same idempotency key is safe",
        )

    # -- sending

    def post(self, shard: int, request: Message, may_be_lost: bool = False) -> bool:
        """Send a request without awaiting its answer. It is kept, in order, for as long as the ring is full. False: it
        is not sent, as it is too long for the ring and /dev/shm has no room, or `may_be_lost` while too many wait.
        """
        requests = self.links[shard].requests
        if may_be_lost and requests.posts_full:
            return False
        self._last_id = request_id = self._last_id + 1
        parts = messages.encode_call(request_id, request)
        length = sum(map(len, parts))
        if length > requests.message_max_bytes:
            # This runs on the loop, not in a thread, so that later posts do not overtake it.
            try:
                parts = self._spills.put(MessageKind.CALL, request_id, parts, length)
            except OSError as error:
                self._no_room.warning("no room in shared memory for a long message", error=error.strerror)
                return False
        self._push(shard, QueuedMessage(parts, sum(map(len, parts)), request_id, self._loop.time(), None))
        return True

    def _submit(
        self, shard: int, request_id: int, parts: list[Part], kind: MessageKind, unthrottled: bool, late: OnLate | None
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._closed:
            fail(future, stopping())
            return future
        request = PendingRequest(future, shard, self._loop.time() + self.shard_wait_s, unthrottled, late)
        self.pending[request_id] = request
        length = sum(map(len, parts))
        if length <= self.links[shard].requests.message_max_bytes:
            self._send(request_id, request, parts)
        else:
            self._send_by_reference(request_id, request, kind, parts, length)
        return future

    def _send(self, request_id: int, request: PendingRequest, parts: list[Part]) -> None:
        now_s, unthrottled = self._loop.time(), request.unthrottled
        expires_s = now_s + (self.shard_wait_s if unthrottled else ROOM_WAIT_S)
        message = QueuedMessage(parts, sum(map(len, parts)), request_id, now_s, expires_s, unthrottled)
        self._push(request.shard, message)

    def _send_by_reference(
        self, request_id: int, request: PendingRequest, kind: MessageKind, parts: list[Part], length: int
    ) -> None:
        try:
            if length <= SPILL_INLINE_BYTES_MAX:
                self._send(request_id, request, self._spills.put(kind, request_id, parts, length))
                return
            self._spills.reserve(request_id, length)
        except OSError as error:
            self._spill_failed(request_id, error)
            return
        task = self._loop.create_task(self._spill(request_id, kind, parts))
        self._spilling.add(task)
        task.add_done_callback(self._spilling.discard)

    async def _spill(self, request_id: int, kind: MessageKind, parts: list[Part]) -> None:
        try:
            await asyncio.to_thread(self._spills.write, request_id, parts)
        except OSError as error:
            self._spill_failed(request_id, error)
            return
        request = self.pending.get(request_id)
        if request is not None:
            self._send(request_id, request, self._spills.reference(kind, request_id))
        else:  # it took too long, and its client has an answer
            self._spills.drop(request_id)

    def _spill_failed(self, request_id: int, error: OSError) -> None:
        self._no_room.warning("no room in shared memory for a long request", error=error.strerror)
        self._reject(request_id, f"shared memory has no room for a request so long ({error.strerror})")

    def _push(self, shard: int, message: QueuedMessage) -> None:
        link = self.links[shard]
        outcome = link.requests.offer(message)
        if outcome is SendOutcome.SENT:
            self._signal(link, message.length_bytes)
            return
        self._cell.add("ring_full")
        if outcome is SendOutcome.REFUSED:
            self._reject(message.request_id, "as many requests as may wait for room in the shard's ring wait already")
        elif self._retry_timer is None:
            self._retry_timer = self._loop.call_later(ROOM_RETRY_S, self._retry)

    def _retry(self) -> None:
        """Look for room, while a request waits for it: a shard may have made some without sending an answer."""
        self._retry_timer = None
        for link in self.links:
            self._send_waiting(link)

    def _send_waiting(self, link: _Link) -> None:
        if not link.requests.waiting:
            return
        now_s = self._loop.time()
        sent, given_up = link.requests.retry(now_s, self.pressed)
        for message in given_up:
            self._reject(message.request_id, f"the shard's ring has been full for {now_s - message.since_s:.2f} s")
        for message in sent:
            request = self.pending.get(message.request_id)
            if request is not None:
                request.throttled_s = now_s - message.since_s
        if sent:
            self._signal(link, sum(message.length_bytes for message in sent))
        if link.requests.waiting and self._retry_timer is None:
            self._retry_timer = self._loop.call_later(ROOM_RETRY_S, self._retry)

    def _reject(self, request_id: int, why: str) -> None:
        """Fail a request of which nothing has reached a shard."""
        self._spills.drop(request_id)
        request = self.pending.withdraw(request_id)
        if request is None:
            return
        what = f"{why}; nothing of this request was done, send it again later"
        if request.unthrottled:
            fail(request.future, TopicsError("shard_unavailable", what))
        else:
            self._cell.add("throttled")
            fail(request.future, throttled(what, retry_after_ms=self.retry_after_ms))

    def _signal(self, link: _Link, pushed_bytes: int) -> None:
        if self._signals_at_once or pushed_bytes >= SIGNALLED_AT_ONCE_BYTES:
            link.wake.signal()
        elif not link.signal_due:
            link.signal_due = True
            if not self._signals:
                self._loop.call_soon(self._flush_signals)
            self._signals.append(link)

    def _flush_signals(self) -> None:
        for link in self._signals:
            link.signal_due = False
            link.wake.signal()
        self._signals.clear()

    # -- answers

    def _on_wake(self) -> None:
        self._wake.drain()
        self._drain_all()

    def _take_lone(self, shard: int, request_id: int) -> None:
        """Look for the answer to a lone write, and take it if it is the first message. The loop takes other messages
        later: their listeners must not be called in the middle of a request.
        """
        link = self.links[shard]
        if not self._lone_writes.look(link.replies, [one.replies for one in self.links]) or self._waits_for_arena(
            shard
        ):
            return
        for message, position in link.replies.peek():
            kind, answered_id, _count = messages.head(message)
            if kind == MessageKind.APPEND and answered_id == request_id:
                try:
                    self._take(shard, message)
                finally:
                    link.replies.consume(position)
            break
        if any(not one.replies.empty for one in self.links):
            self._loop.call_soon(self._drain_all)

    def _drain_all(self) -> None:
        for shard in range(len(self.links)):
            self._drain(shard)

    def _drain(self, shard: int) -> None:
        link = self.links[shard]
        if link.replies.empty or self._waits_for_arena(shard):
            return
        consumed = link.replies.consumed
        try:
            for message, position in link.replies.peek():
                consumed = position
                self._take(shard, message)
        finally:
            link.replies.consume(consumed)
        self._send_waiting(link)  # requests that were answered have left the ring

    def _waits_for_arena(self, shard: int) -> bool:
        """Return whether this process still learns the topics of a restarted shard, whose messages wait meanwhile."""
        renewal = self.arenas.renewal(shard)
        if renewal is not None and renewal not in self._renewals:
            self._renewals.add(renewal)
            renewal.add_done_callback(self._renewed)
        return renewal is not None

    def _renewed(self, renewal: asyncio.Task[None]) -> None:
        self._renewals.discard(renewal)
        if not self._closed:
            self._drain_all()

    def _take(self, shard: int, message: memoryview) -> None:
        kind, request_id, _count = messages.head(message)
        if kind & messages.BY_REFERENCE:
            whole = take_long_reply(messages.decode_reference(message))
            if whole is None:
                return
            message, kind = whole, kind & ~messages.BY_REFERENCE
        if kind == MessageKind.APPEND:
            self._answer(request_id, message, append_messages.decode_append_reply)
        elif kind == MessageKind.CALL:
            self._answer(request_id, message, messages.decode)
        elif kind == MessageKind.ERROR:
            self._answer(request_id, message, messages.decode_error)
        elif kind == MessageKind.NOTIFY:
            self.watches.notify(messages.decode_notify(message))
        elif kind == MessageKind.DEALT:
            self.job_listeners.hand_over(messages.decode_dealt(message))
        elif kind == MessageKind.GENERATION:
            self.check_restart(shard)

    def _answer(self, request_id: int, message: memoryview, decode: Callable[[memoryview], object]) -> None:
        self._spills.drop(request_id)
        self.pending.answer(request_id, message, decode)

    def check_restart(self, shard: int) -> None:
        """Renew the watches at a shard if it was restarted, and call the listeners for restarts."""
        link = self.links[shard]
        generation = link.cell.get("generation")
        if generation != link.generation and not self._waits_for_arena(shard):
            link.generation = generation
            self.watches.renew(shard)
            for listener in self._restart_listeners:
                listener(shard)

    def _sweep(self) -> None:
        self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)
        now_s = self._loop.time()
        for shard in range(len(self.links)):
            self._drain(shard)
            self.check_restart(shard)
        self.pending.expire(now_s, self.no_answer)
        self.watches.sweep(now_s)


def stopping() -> TopicsError:
    """Return the `503` for requests while the service stops."""
    return TopicsError("shutting_down", "the service is stopping; ask again when it is back")
