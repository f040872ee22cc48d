"""What waits for the client of a WebSocket: a few messages, whoever has more to say waits for room. Once they are
HIGH_WATER_BYTES together nobody has room, as in an event stream: then there are these and what one step said.

Two kinds of writers share it and take turns while it is full. Answers to commands wait in `put`, so a client that does
not read its answers is not read from either. Subscriptions are the hub's: they are told that there is no room, stay
behind in their topic, and are asked again (`on_writable`) when there is room for all that one step may say. Until then
nothing of theirs is read or put into words: the log is their queue. What is kept is counted with the subscription that
said it: the hub bounds all of that together (`Room`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from topics.frontend.asgi import Send
from topics.frontend.entry import limits
from topics.frontend.http.hypercorn_deadlines import Kept
from topics.frontend.live.push import HIGH_WATER_BYTES
from topics.frontend.live.wording import MESSAGE_END

STEP_MESSAGES_MAX: Final = 3
"""Of one step of a stream: tombstone, record, caught_up."""


class SocketOutbox:
    """Of one WebSocket. `wire` tells what was sent and is still kept for the client; None where nobody can tell."""

    def __init__(self, send: Send, wire: Kept | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._wire = wire
        self._queue: deque[tuple[bytes, Subscription | None]] = deque()
        self._kept_bytes = 0
        """Of the queue, and of the message that is being sent."""
        self._news = asyncio.Event()
        self._answers: deque[asyncio.Future[None]] = deque()
        """Who waits in `put`."""
        self._promised = 0
        """Room given to answers that have not come yet."""
        self._subscriptions: dict[Subscription, None] = {}
        """Who was told that there is no room, longest first."""
        self._offered = False
        self._after_answer = False
        self._sending = False
        self._handed_bytes = 0
        self._closed = False

    @property
    def taken_bytes(self) -> int:
        """How much the client has taken so far, or a little more."""
        return self._handed_bytes - self._unsent_bytes

    @property
    def waiting(self) -> bool:
        """Whether there is anything that the client has not taken."""
        return self._sending or bool(self._queue) or self._unsent_bytes > 0

    @property
    def full(self) -> bool:
        """Nobody is to say more before the client has taken some of it."""
        return self._kept_bytes >= HIGH_WATER_BYTES

    async def put(self, message: bytes) -> None:
        """Adds an answer as soon as there is room and it is its turn."""
        await self.enter()
        self.add(message)

    async def enter(self) -> None:
        """Returns when an answer has room and it is its turn; it is to be added at once. For those that are made, or
        done, no earlier: there may be many of them.
        """
        if self._answers or not self._answer_may():
            room = self._loop.create_future()
            self._answers.append(room)
            try:
                await room
            except asyncio.CancelledError:
                if room.done() and not room.cancelled():
                    self._promised -= 1
                    self._let_in()
                raise
            self._promised -= 1
        self._after_answer = True

    def add(self, message: bytes, owner: Subscription | None = None) -> None:
        """Without asking for room: for who was promised some, and for last words."""
        if not self._closed:
            self._queue.append((message, owner))
            self._count(owner, len(message))
            self._news.set()

    async def carry(self) -> None:
        """Sends until `close`, and then what is left."""
        while self._queue or not self._closed:
            if not self._queue:
                self._news.clear()
                await self._news.wait()
                continue
            message, owner = self._queue.popleft()
            self._let_in()
            self._sending = True
            len_bytes = len(message)
            self._handed_bytes += len_bytes
            event = {"type": "websocket.send", "text": message.decode()}
            del message
            await self._send(event)
            self._sending = False
            self._count(owner, -len_bytes)
            self._let_in()

    def close(self) -> None:
        """Nothing more is added."""
        self._closed = True
        self._news.set()

    @property
    def _unsent_bytes(self) -> int:
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    def _count(self, owner: Subscription | None, more_bytes: int) -> None:
        self._kept_bytes += more_bytes
        if owner is not None:
            owner.buffered_bytes += more_bytes

    # -- turns

    def _has_room(self, messages: int) -> bool:
        return not self.full and len(self._queue) + self._promised + messages <= limits.SOCKET_MESSAGES.most_count

    def _answer_may(self) -> bool:
        subscriptions_turn = self._offered or (self._after_answer and bool(self._subscriptions))
        return self._has_room(1) and not subscriptions_turn

    def has_room_for(self, subscription: Subscription) -> bool:
        """Whether all that a step may say has room now; if not, the subscription is told when."""
        if self._has_room(STEP_MESSAGES_MAX) and (self._offered or not self._answers):
            return True
        self.tell(subscription)
        return False

    def tell(self, subscription: Subscription) -> None:
        """When there is room."""
        self._subscriptions[subscription] = None

    def forget(self, subscription: Subscription) -> None:
        """It has ended."""
        self._subscriptions.pop(subscription, None)

    def _let_in(self) -> None:
        while self._answers and self._answer_may():
            room = self._answers.popleft()
            if not room.done():
                self._promised += 1
                self._after_answer = True
                room.set_result(None)
        if self._subscriptions and not self._offered and self._has_room(STEP_MESSAGES_MAX):
            subscription = next(iter(self._subscriptions))
            del self._subscriptions[subscription]
            self._offered, self._after_answer = True, False
            # The hub does what it does about this in its next turn, which comes before ours.
            if subscription.on_writable is not None:
                subscription.on_writable()
            self._loop.call_soon(self._offer_is_over)

    def _offer_is_over(self) -> None:
        self._offered = False
        self._let_in()


class Subscription:
    """One topic of a WebSocket, as the hub writes to it (`push.Push`). `on_end`: the hub ended it; `cut` the socket
    when what is kept for it is wanted for others. `buffered_bytes` is its own part of what the outbox keeps.
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
    def taken_bytes(self) -> int:
        """Of the whole socket: a client that takes what others say does not stand still."""
        return self._outbox.taken_bytes

    @property
    def writable(self) -> bool:
        return not self._closed and self._outbox.has_room_for(self)

    def write(self, data: bytes) -> bool:
        """False: now more is kept for the client than HIGH_WATER_BYTES. `on_writable` says when that is over."""
        if self._closed:
            return True
        for message in _messages(data):
            self._outbox.add(message, self)
        if not self._outbox.full:
            return True
        self._outbox.tell(self)
        return False

    def abort(self) -> None:
        """Cuts the socket, whatever else it follows: they share what is kept."""
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
    """The same frames go to every subscriber in turn: remembered by identity, one deep."""
    global _last_messages
    if _last_messages[0] is not data:
        _last_messages = (data, tuple(data.split(MESSAGE_END)[:-1]))
    return _last_messages[1]
