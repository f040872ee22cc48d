"""The outgoing messages of a WebSocket. A few wait for the client; beyond HIGH_WATER_BYTES writers wait for room, as in
an event stream. So the outbox keeps at most those bytes and the messages of one step.

Two kinds of writers share the room, and take turns while there is none. Answers to commands wait in `put`, so no more
commands are read from a client that does not read its answers. Subscriptions are called back (`on_writable`) when all
messages of one step have room. Until then they are behind: the log is their queue. The hub bounds all of their messages
together (`LargeFrames`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from topics.frontend.asgi import Send, WriteBuffer
from topics.frontend.entry import limits
from topics.frontend.live.event_streams import HIGH_WATER_BYTES
from topics.frontend.live.wording import MESSAGE_END

SendNow = Callable[[bytes], bool]

STEP_MESSAGES_MAX: Final = 3
"""Messages of one step of a stream: tombstone, record, caught_up."""


class SocketOutbox:
    """Queue of messages for one WebSocket. It owns their order, their bytes, and the turns of those that wait for room.
    `buffer` holds what was sent and is still kept for the client; None if nobody can tell. `send_now` sends a message
    at once, unless it has to wait (`asgi.SEND_NOW`); None if nothing can.
    """

    def __init__(self, send: Send, buffer: WriteBuffer | None, send_now: SendNow | None = None) -> None:
        self._send_now = send_now
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._buffer = buffer
        self._queue: deque[tuple[bytes, Subscription | None]] = deque()
        self._kept_bytes = 0  # bytes of the queue and of the message that is being sent
        self._changed = asyncio.Event()
        self._answers: deque[asyncio.Future[None]] = deque()  # answers that wait for their turn
        self._promised = 0  # number of answers that have room and are not added yet
        self._subscriptions: dict[Subscription, None] = {}  # subscriptions that wait for room, longest first
        self._offered = False  # true while a subscription has its turn
        self._after_answer = False  # true if the last turn was an answer's
        self._sending = False
        self._sent_bytes = 0
        self._closed = False

    @property
    def progress_bytes(self) -> int:
        """Number of bytes that the client has read so far, or a little more."""
        return self._sent_bytes - self._unread_bytes

    @property
    def is_unread(self) -> bool:
        return self._sending or bool(self._queue) or self._unread_bytes > 0

    @property
    def is_full(self) -> bool:
        """True if nobody may add more before the client has read some."""
        return self._kept_bytes >= HIGH_WATER_BYTES

    async def put(self, message: bytes) -> None:
        """Add an answer as soon as there is room and it is its turn."""
        await self.wait_for_turn()
        self.add(message)

    async def wait_for_turn(self) -> None:
        """Return when an answer has room and it is its turn. The caller adds it without another `await`."""
        if self._answers or not self._answer_may():
            turn = self._loop.create_future()
            self._answers.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._promised -= 1
                    self._give_turns()
                raise
            self._promised -= 1
        self._after_answer = True

    def add(self, message: bytes, owner: Subscription | None = None) -> None:
        """Add a message without asking for room: for writers that have their turn, and for last messages."""
        if self._closed:
            return
        if self._send_now is not None and not self._queue and not self._sending and self._send_now(message):
            self._sent_bytes += len(message)
            return
        self._queue.append((message, owner))
        self._count(owner, len(message))
        self._changed.set()

    async def send_all(self) -> None:
        """Send messages until `close`, and then those that are left."""
        while self._queue or not self._closed:
            if not self._queue:
                self._changed.clear()
                await self._changed.wait()
                continue
            message, owner = self._queue.popleft()
            self._give_turns()
            self._sending = True
            len_bytes = len(message)
            self._sent_bytes += len_bytes
            event = {"type": "websocket.send", "text": message.decode()}
            del message
            await self._send(event)
            self._sending = False
            self._count(owner, -len_bytes)
            self._give_turns()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    @property
    def _unread_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.get_write_buffer_size()

    def _count(self, owner: Subscription | None, more_bytes: int) -> None:
        self._kept_bytes += more_bytes
        if owner is not None:
            owner.buffered_bytes += more_bytes

    # -- turns

    def _has_room(self, messages: int) -> bool:
        return not self.is_full and len(self._queue) + self._promised + messages <= limits.SOCKET_MESSAGES.most_count

    def _answer_may(self) -> bool:
        subscriptions_turn = self._offered or (self._after_answer and bool(self._subscriptions))
        return self._has_room(1) and not subscriptions_turn

    def has_room_for(self, subscription: Subscription) -> bool:
        """Return True if all messages of a step have room now. Else the subscription is called back."""
        if self._has_room(STEP_MESSAGES_MAX) and (self._offered or not self._answers):
            return True
        self.call_back(subscription)
        return False

    def call_back(self, subscription: Subscription) -> None:
        """Call the subscription's `on_writable` when there is room."""
        self._subscriptions[subscription] = None

    def forget(self, subscription: Subscription) -> None:
        """Forget a subscription that has ended. Idempotent."""
        self._subscriptions.pop(subscription, None)

    def _give_turns(self) -> None:
        while self._answers and self._answer_may():
            turn = self._answers.popleft()
            if not turn.done():
                self._promised += 1
                self._after_answer = True
                turn.set_result(None)
        if self._subscriptions and not self._offered and self._has_room(STEP_MESSAGES_MAX):
            subscription = next(iter(self._subscriptions))
            del self._subscriptions[subscription]
            self._offered, self._after_answer = True, False
            # The hub reacts in its next turn of the event loop, which comes before ours.
            if subscription.on_writable is not None:
                subscription.on_writable()
            self._loop.call_soon(self._end_offer)

    def _end_offer(self) -> None:
        self._offered = False
        self._give_turns()


class Subscription:
    """One topic of a WebSocket, as the hub writes to it (an `event_streams.Push`). `buffered_bytes` is its part.
    `on_end` is called when the hub ends it, `cut` when others need the memory that the socket holds.
    """

    def __init__(self, outbox: SocketOutbox, on_end: Callable[[], None], cut: Callable[[], None]) -> None:
        self._outbox = outbox
        self._closed = False
        self._cut = cut
        self.buffered_bytes = 0
        self.on_end: Callable[[], None] | None = on_end
        self.on_writable: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None

    @property
    def progress_bytes(self) -> int:
        """The whole socket's: a client that reads the messages of others is not stalled."""
        return self._outbox.progress_bytes

    @property
    def writable(self) -> bool:
        return not self._closed and self._outbox.has_room_for(self)

    def write(self, data: bytes) -> bool:
        """Add the messages, and return False if the outbox is full now. Then `on_writable` says when it is not."""
        if self._closed:
            return True
        for message in _messages(data):
            self._outbox.add(message, self)
        if not self._outbox.is_full:
            return True
        self._outbox.call_back(self)
        return False

    def abort(self) -> None:
        """Cut the socket with all its subscriptions, because they share what is kept."""
        self._closed = True
        self._outbox.forget(self)
        self._cut()

    def close(self) -> None:
        self._closed = True
        self._outbox.forget(self)
        if self.on_end is not None:
            self.on_end()


_last_messages: tuple[bytes, tuple[bytes, ...]] = (b"", ())


def _messages(data: bytes) -> tuple[bytes, ...]:
    """Split frames into messages. The same frames go to every subscriber in turn, so the last ones are remembered."""
    global _last_messages
    if _last_messages[0] is not data:
        _last_messages = (data, tuple(data.split(MESSAGE_END)[:-1]))
    return _last_messages[1]
