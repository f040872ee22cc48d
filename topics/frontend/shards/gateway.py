"""The frontend's end of the rings: requests to shards, their answers, and who wants to know of which topic.

Nothing here blocks the event loop. A request is pushed at once, or waits (bounded) for room in the ring; what was
pushed in one iteration of the loop is signalled once, so that it reaches the shard as one group. Answers come with
an eventfd. A dead shard answers nothing: its requests wait for its next life, until `shard_wait_ms` is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.names import owner_shard
from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.pending_calls import (
    ROOM_WAIT_S,
    Fate,
    Lane,
    OnLate,
    PendingCall,
    Spills,
    Unanswered,
    Waiter,
    fail,
    take_long_reply,
)
from topics.frontend.shards.watches import Watches, WatchHandle
from topics.log import get_logger
from topics.shm import append_messages, messages
from topics.shm.append_messages import AppendReply, JobAttributes
from topics.shm.arena import TopicView
from topics.shm.asks import Asks, ReplyT
from topics.shm.control import ProcessCell, Role
from topics.shm.instance import SharedMemory
from topics.shm.messages import Call, MessageKind, Part
from topics.shm.queue_messages import Dealt
from topics.shm.topic_messages import Hello
from topics.storage.frame import LaidOut

SWEEP_S: Final = 0.25
"""How often time-outs and lost wake-ups are looked for."""
ROOM_RETRY_S: Final = 0.002
SPILL_INLINE_BYTES_MAX: Final = 1 * 2**20
"""A longer message is written to shared memory by a thread, for the loop's sake."""

_log = get_logger()


class _Link:
    """The rings and words that one shard shares with this frontend."""

    __slots__ = ("cell", "generation", "lane", "replies", "signal_due", "wake")

    def __init__(self, shared: SharedMemory, index: int, shard: int) -> None:
        pair = shared.rings[index][shard]
        self.lane = Lane(pair.requests)
        self.replies = pair.replies
        self.wake = shared.shard_wakes[shard]
        self.cell = shared.control.cell(Role.WALSHARD, shard)
        self.generation = 0
        self.signal_due = False


class Gateway:
    """One per frontend process; everything is called on the event loop it was started on."""

    def __init__(
        self, shared: SharedMemory, index: int, incarnation: int, arenas: Arenas, cell: ProcessCell, shard_wait_ms: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._incarnation = incarnation
        self._cell = cell
        self._arenas = arenas
        self.shard_wait_s = shard_wait_ms / 1000
        """The longest time that an answer may take."""
        self._wake = shared.frontend_wakes[index]
        self.links = [_Link(shared, index, shard) for shard in range(shared.shards)]
        self._last_id = incarnation << 40
        self.unanswered = Unanswered()
        self._spills = Spills(shared.identity, index)
        self._signals: list[_Link] = []
        self._retry_timer: asyncio.TimerHandle | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._spilling: set[asyncio.Task[None]] = set()
        self._watches = Watches(self._loop, arenas, self.post, lambda shard: self.links[shard].lane.crowded)
        self._closed = False
        self.on_dealt: Callable[[Dealt], None] | None = None
        """The listener for jobs that a shard deals out."""
        self.on_restart: list[Callable[[int], None]] = []
        """Listeners for a shard that was started again: it has forgotten who waits at it."""
        self.pressed = False
        """A request that finds the ring full is refused after PRESSED_WAIT_S, instead of ROOM_WAIT_S."""
        self.retry_after_ms = 100

    @property
    def shards(self) -> int:
        return len(self.links)

    def knows(self, name: str) -> bool:
        """Tell whether it is known that this topic exists."""
        return self._view(name) is not None

    def is_log(self, name: str) -> bool:
        """Tell whether it is known that this topic exists and is no queue."""
        view = self._view(name)
        return view is not None and not view.is_queue

    def _view(self, name: str) -> TopicView | None:
        arena = self._arenas.of(owner_shard(name, self.shards))
        found = None if arena is None else arena.look_up(name)
        return None if found is None else found[1]

    @property
    def fullness(self) -> float:
        """The fullness of the fullest request ring, 0 to 1; 1 when somebody waits for room."""
        return max(link.lane.fullness for link in self.links)

    def start(self) -> None:
        """Says hello to every shard and listens for answers."""
        self._spills.remove_leftovers()
        for shard, link in enumerate(self.links):
            link.generation = link.cell.get("generation")
            self.post(shard, Hello(self._incarnation))
        self._loop.add_reader(self._wake.fd, self._on_wake)
        self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)

    def close(self) -> None:
        """No more answers: whoever still waits is told that the service stops."""
        self._closed = True
        self._flush_signals()
        self._loop.remove_reader(self._wake.fd)
        for timer in (self._sweep_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        for task in self._spilling:
            task.cancel()
        self.unanswered.fail_all(_stopping)

    # -- requests

    def submit_append(
        self,
        shard: int,
        name: bytes,
        create: bool,
        if_head_seq: int | None,
        key: bytes,
        config: TopicConfig | None,
        records: LaidOut,
        patient: bool = False,
        jobs: JobAttributes | None = None,
    ) -> asyncio.Future[AppendReply]:
        """Sends a write on its way. The future fails with a TopicsError: the shard's own, `shard_unavailable`
        (the outcome is unknown), or `throttled` (nothing was sent). Raises `not_ready` at once. A `patient` one is not
        throttled: it waits for room in the ring as long as for a shard that is restarted.
        """
        self._arenas.require(shard)
        self._last_id = request_id = self._last_id + 1
        parts = append_messages.encode_append(
            request_id, name, create, if_head_seq, key, config, records.offset_len, records.flags, records.buffer, jobs
        )
        return self._submit(shard, request_id, parts, MessageKind.APPEND, patient)

    def submit(
        self, shard: int, request: Call | Asks[Any], on_late: OnLate | None = None, patient: bool = False
    ) -> asyncio.Future[Any]:
        """Sends any other request on its way; its answer, and how it fails, as with `submit_append`. `on_late` gets the
        answer, if there is one, that comes when the future is done: it was cancelled, or has failed.
        """
        self._arenas.require(shard)
        self._last_id = request_id = self._last_id + 1
        parts = messages.encode_call(request_id, request)
        return self._submit(shard, request_id, parts, MessageKind.CALL, patient, on_late)

    async def call(self, shard: int, request: Asks[ReplyT], patient: bool = False) -> ReplyT:
        """Send a request as `submit` does, and wait for the answer, whose type the request names."""
        return request.checked(await self.submit(shard, request, patient=patient))

    def no_answer(self, shard: int) -> TopicsError:
        """The failure of a request that was sent and not answered."""
        return TopicsError(
            "shard_unavailable",
            f"shard {shard} did not answer within {self.shard_wait_s:g} s; whether a write took effect is not known, a"
            " repeat with the same idempotency key is safe",
        )

    def watch(self, shard: int, name: str, seen: TopicView | None, callback: Callable[[], None]) -> WatchHandle:
        """Calls `callback` (soon, never within this call) whenever the topic may differ from `seen`, or from what it
        was at the last callback: records, floors, `durable_seq`, configuration, deletion. It may also be called for
        nothing. What is made anew under the name is another topic: who finds it there says so (`WatchHandle.found`).
        """
        return self._watches.add(shard, name, seen, callback)

    # -- sending

    def post(self, shard: int, request: Call, may_be_lost: bool = False) -> bool:
        """Sends a request whose answer does not matter; kept, in order, for as long as the ring is full. False: it is
        not sent, being too long for the ring while /dev/shm has no room for it, or `may_be_lost` while too many wait.
        """
        lane = self.links[shard].lane
        if may_be_lost and lane.crowded:
            return False
        self._last_id = request_id = self._last_id + 1
        parts = messages.encode_call(request_id, request)
        length = sum(map(len, parts))
        if length > lane.message_max_bytes:
            # At once, and not in a thread: what is posted behind it may not overtake it.
            try:
                parts = self._spills.put(MessageKind.CALL, request_id, parts, length)
            except OSError as error:
                _log.warning("no room in shared memory for a long message", error=error.strerror)
                return False
        self._push(shard, Waiter(parts, sum(map(len, parts)), request_id, self._loop.time(), None))
        return True

    def _submit(
        self,
        shard: int,
        request_id: int,
        parts: list[Part],
        kind: MessageKind,
        patient: bool = False,
        on_late: OnLate | None = None,
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if self._closed:
            fail(future, _stopping())
            return future
        request = PendingCall(future, shard, self._loop.time() + self.shard_wait_s, patient, on_late)
        self.unanswered.add(request_id, request)
        length = sum(map(len, parts))
        if length <= self.links[shard].lane.message_max_bytes:
            self._push(shard, self._waiter(request_id, parts, patient))
        else:
            self._submit_by_reference(shard, request_id, parts, length, kind, patient)
        return future

    def _waiter(self, request_id: int, parts: list[Part], patient: bool) -> Waiter:
        now_s = self._loop.time()
        expires_s = now_s + (self.shard_wait_s if patient else ROOM_WAIT_S)
        return Waiter(parts, sum(map(len, parts)), request_id, now_s, expires_s, patient)

    def _submit_by_reference(
        self, shard: int, request_id: int, parts: list[Part], length: int, kind: MessageKind, patient: bool
    ) -> None:
        try:
            if length <= SPILL_INLINE_BYTES_MAX:
                self._push(shard, self._waiter(request_id, self._spills.put(kind, request_id, parts, length), patient))
                return
            self._spills.reserve(request_id, length)
        except OSError as error:
            self._spill_failed(request_id, error)
            return
        task = self._loop.create_task(self._spill(shard, request_id, kind, parts))
        self._spilling.add(task)
        task.add_done_callback(self._spilling.discard)

    async def _spill(self, shard: int, request_id: int, kind: MessageKind, parts: list[Part]) -> None:
        try:
            await asyncio.to_thread(self._spills.write, request_id, parts)
        except OSError as error:
            self._spill_failed(request_id, error)
            return
        request = self.unanswered.get(request_id)
        if request is not None:
            self._push(shard, self._waiter(request_id, self._spills.reference(kind, request_id), request.patient))
        else:  # it took too long: its client has been told
            self._spills.drop(request_id)

    def _spill_failed(self, request_id: int, error: OSError) -> None:
        _log.warning("no room in shared memory for a long request", error=error.strerror)
        self._reject(request_id, f"shared memory has no room for a request so long ({error.strerror})")

    def _push(self, shard: int, waiter: Waiter) -> None:
        link = self.links[shard]
        fate = link.lane.offer(waiter)
        if fate is Fate.SENT:
            self._signal(link)
            return
        self._cell.add("ring_full")
        if fate is Fate.REFUSED:
            self._reject(waiter.request_id, "as many requests as may wait for room in the shard's ring wait already")
        elif self._retry_timer is None:
            self._retry_timer = self._loop.call_later(ROOM_RETRY_S, self._retry)

    def _retry(self) -> None:
        """Room may have come from a shard that has nothing to answer (this runs only while someone waits)."""
        self._retry_timer = None
        for link in self.links:
            self._send_waiting(link)

    def _send_waiting(self, link: _Link) -> None:
        if not link.lane.waiting:
            return
        now_s = self._loop.time()
        sent, given_up = link.lane.retry(now_s, self.pressed)
        for waiter in given_up:
            self._reject(waiter.request_id, f"the shard's ring has been full for {now_s - waiter.since_s:.2f} s")
        for waiter in sent:
            request = self.unanswered.get(waiter.request_id)
            if request is not None:
                request.throttled_s = now_s - waiter.since_s
        if sent:
            self._signal(link)
        if link.lane.waiting and self._retry_timer is None:
            self._retry_timer = self._loop.call_later(ROOM_RETRY_S, self._retry)

    def _reject(self, request_id: int, why: str) -> None:
        """Nothing of this request has reached a shard."""
        self._spills.drop(request_id)
        request = self.unanswered.withdraw(request_id)
        if request is None:
            return
        what = f"{why}; nothing of this request was done, send it again later"
        if request.patient:
            fail(request.future, TopicsError("shard_unavailable", what))
        else:
            self._cell.add("throttled")
            fail(request.future, TopicsError("throttled", what, {"retry_after_ms": self.retry_after_ms}))

    def _signal(self, link: _Link) -> None:
        if not link.signal_due:
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
        for shard in range(len(self.links)):
            self._drain(shard)

    def _drain(self, shard: int) -> None:
        link = self.links[shard]
        if link.replies.empty:
            return
        position = link.replies.consumed
        try:
            for message, position in link.replies.peek():  # noqa: B007
                self._take(shard, message)
        finally:
            link.replies.consume(position)
        self._send_waiting(link)  # what was answered has left the ring of requests

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
            self._answer(request_id, message, messages.decode_reply)
        elif kind == MessageKind.ERROR:
            self._answer(request_id, message, messages.decode_error)
        elif kind == MessageKind.NOTIFY:
            self._watches.notify(messages.decode_notify(message))
        elif kind == MessageKind.DEALT:
            if self.on_dealt is not None:
                self.on_dealt(messages.decode_dealt(message))
        elif kind == MessageKind.GENERATION:
            self._check_generation(shard)

    def _answer(self, request_id: int, message: memoryview, decode: Callable[[memoryview], object]) -> None:
        self._spills.drop(request_id)
        self.unanswered.answer(request_id, message, decode)

    def _check_generation(self, shard: int) -> None:
        """A shard that was started again knows of no watches."""
        link = self.links[shard]
        generation = link.cell.get("generation")
        if generation != link.generation:
            link.generation = generation
            self._watches.renew(shard)
            for listener in self.on_restart:
                listener(shard)

    def _sweep(self) -> None:
        self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)
        now_s = self._loop.time()
        for shard in range(len(self.links)):
            self._drain(shard)
            self._check_generation(shard)
        self.unanswered.expire(now_s, self.no_answer)
        self._watches.sweep(now_s)


def _stopping() -> TopicsError:
    return TopicsError("shutting_down", "the service is stopping; ask again when it is back")
