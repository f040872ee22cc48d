"""The types of ASGI, and the keys that this service adds to scopes and messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTE: Final = "topics.route"
"""Key of a scope: the `durations.Route` that the request is measured as; None for one whose duration says nothing."""


class WriteBuffer(Protocol):
    """The bytes that are kept for a client, in the shape of asyncio's transports."""

    def get_write_buffer_size(self) -> int: ...

    def is_closing(self) -> bool: ...

    def abort(self) -> None: ...


WRITE_BUFFER: Final = "topics.write_buffer"
"""Extension of a WebSocket's scope: its `WriteBuffer`."""

Deliver = Callable[[Send, bytes], Awaitable[None]]
"""A function that sends the whole body of an answer by the given `send`. It returns when this process keeps no part of
the body."""

DELIVER: Final = "topics.deliver"
"""Extension of a scope: its `Deliver`, for an answer that counts only when it has left this process (api §10,
`at_least_once`). ASGI's `send` returns earlier: bytes that are kept here for a slow client are lost when the connection
or the process ends. `Deliver` returns when the kernel has the whole body. It raises ConnectionResetError when the
client never gets the whole body. Bytes that the kernel still has when the client dies are lost unnoticed."""

ADMITTED: Final = "topics.admitted"
"""Key of a scope: a function to call when the request is admitted, whose connection has then shown a valid key."""

RESERVATION: Final = "topics.reservation"
"""Key of a WebSocket message: its `bodies.MessageReservation`, which is held as long as the message is kept."""

DROPPED: Final = "topics.dropped"
"""Key of a WebSocket message for which there was no room. It has no content."""

ROOM: Final = "topics.room"
"""Extension of a scope whose connection has many answers at once: the `budget.Reservation` of this answer."""
