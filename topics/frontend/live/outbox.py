"""What waits for the client of a WebSocket: MESSAGES_MAX messages, whoever has more to say waits for room.

Two kinds of writers share it and take turns while it is full. Answers to commands wait in `put`, so a client that does
not read its answers is not read from either. Subscriptions are the hub's: they are told that there is no room, stay
behind in their topic, and are asked again (`on_writable`) when there is room for all that one step may say. Until then
nothing of theirs is read or put into words: the log is their queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from topics.frontend.asgi import Send
from topics.frontend.live.wording import MESSAGE_END

MESSAGES_MAX: Final = 4
STEP_MESSAGES_MAX: Final = 3
"""Of one step of a stream: tombstone, record, caught_up."""


class Outbox:
    """Of one WebSocket. `unsent_bytes` tells what its transport keeps for the client."""

    def __init__(self, send: Send, unsent_bytes: Callable[[], int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._unsent_bytes = unsent_bytes
        self._queue: deque[str] = deque()
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
        return self._handed_bytes - self._unsent_bytes()

    @property
    def waiting(self) -> bool:
        """Whether there is anything that the client has not taken."""
        return self._sending or bool(self._queue) or self._unsent_bytes() > 0

    async def put(self, message: bytes) -> None:
        """Adds an answer as soon as there is room and it is its turn."""
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
        self.add(message.decode())

    def add(self, *messages: str) -> None:
        """Without asking for room: for who was promised some, and for last words."""
        if not self._closed:
            self._queue.extend(messages)
            self._news.set()

    async def carry(self) -> None:
        """Sends until `close`, and then what is left."""
        while self._queue or not self._closed:
            if not self._queue:
                self._news.clear()
                await self._news.wait()
                continue
            text = self._queue.popleft()
            self._let_in()
            self._sending = True
            self._handed_bytes += len(text)
            await self._send({"type": "websocket.send", "text": text})
            self._sending = False

    def close(self) -> None:
        """Nothing more is added."""
        self._closed = True
        self._news.set()

    # -- turns

    @property
    def _room(self) -> int:
        return MESSAGES_MAX - len(self._queue) - self._promised

    def _answer_may(self) -> bool:
        subscriptions_turn = self._offered or (self._after_answer and bool(self._subscriptions))
        return self._room > 0 and not subscriptions_turn

    def has_room_for(self, subscription: Subscription) -> bool:
        """Whether all that a step may say has room now; if not, the subscription is told when."""
        if self._room >= STEP_MESSAGES_MAX and (self._offered or not self._answers):
            return True
        self._subscriptions[subscription] = None
        return False

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
        if self._subscriptions and self._room >= STEP_MESSAGES_MAX and not self._offered:
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
    """One topic of a WebSocket, as the hub writes to it (`push.Push`). `on_end`: the hub ended it."""

    def __init__(self, outbox: Outbox, on_end: Callable[[], None]) -> None:
        self._outbox = outbox
        self._closed = False
        self.on_end: Callable[[], None] | None = on_end
        self.on_writable: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None

    @property
    def buffered_bytes(self) -> int:
        """Falls with every byte that the client takes, whatever others add meanwhile: it is compared with itself."""
        return -self._outbox.taken_bytes

    @property
    def writable(self) -> bool:
        return not self._closed and self._outbox.has_room_for(self)

    def write(self, data: bytes) -> bool:
        """True always: what is kept for the client is bounded by messages, and room is asked for before a step."""
        if not self._closed:
            self._outbox.add(*_messages(data))
        return True

    def abort(self) -> None:
        """As `close`. The hub never does it: there is nothing to free."""
        self.close()

    def close(self) -> None:
        self._closed = True
        self._outbox.forget(self)
        if self.on_end is not None:
            self.on_end()


_last_messages: tuple[bytes, tuple[str, ...]] = (b"", ())


def _messages(data: bytes) -> tuple[str, ...]:
    """The same frames go to every subscriber in turn: remembered by identity, one deep."""
    global _last_messages
    if _last_messages[0] is not data:
        _last_messages = (data, tuple(data.decode().split(MESSAGE_END.decode())[:-1]))
    return _last_messages[1]
