"""ASGI as this service speaks it: the types, and the names of what it puts into a scope."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTE: Final = "topics.route"
"""Key of a scope: the request's `durations.Route`, None for one whose time says nothing."""


class WriteBuffer(Protocol):
    """The bytes that are kept for a client, in the shape of asyncio's transports."""

    def get_write_buffer_size(self) -> int: ...

    def is_closing(self) -> bool: ...

    def abort(self) -> None: ...


WRITE_BUFFER: Final = "topics.write_buffer"
"""Extension of a WebSocket's scope: its `WriteBuffer`."""

Deliver = Callable[[Send, bytes], Awaitable[None]]
"""Sends the whole body of an answer by the `send` it is given, and returns when nothing of it is in this process."""

DELIVER: Final = "topics.deliver"
"""Extension of a scope: its `Deliver`, for an answer that counts only when it has left this process (api §10,
`at_least_once`). ASGI's `send` returns earlier: what is kept here for a slow client is lost when the connection or the
process ends. `Deliver` returns when the kernel has all of the body, and raises ConnectionResetError when the client
never gets all of it. No server can know what the kernel still has when the client dies."""

RESERVATION: Final = "topics.reservation"
"""Key of a WebSocket message: its `bodies.MessageReservation`, which is held as long as the message is kept."""

DROPPED: Final = "topics.dropped"
"""Key of a WebSocket message for which there was no room. It has no content."""

ROOM: Final = "topics.room"
"""Extension of a scope whose connection has many answers at once: the `budget.Reservation` of this answer."""
