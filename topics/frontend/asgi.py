"""ASGI as this service speaks it: the types, and the names of what it puts into a scope."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTE: Final = "topics.route"
"""Key of a scope: which `durations.Route` the request turned out to be, None for one whose time says nothing."""

KEPT: Final = "topics.kept"
"""Extension of a WebSocket's scope: what was sent over it and is kept for the client (`http.unread.Kept`)."""

Deliver = Callable[[Send, bytes], Awaitable[None]]
"""Sends the whole body of an answer by the `send` it is given, and returns when nothing of it is in this process."""

DELIVER: Final = "topics.deliver"
"""Extension of a scope: its `Deliver`, for an answer that counts only when it has left this process (api §10,
`at_least_once`). ASGI's `send` returns earlier: what is kept here for a slow client is lost when the connection or the
process ends. `Deliver` returns when the kernel has all of the body, and raises ConnectionResetError when the client
never gets all of it. What the kernel still has when the client dies, no server can know."""

SHARE: Final = "topics.share"
"""Key of a message of a WebSocket: its `bodies.MessageReservation`, for as long as the message is kept."""

DROPPED: Final = "topics.dropped"
"""Key of a message of a WebSocket for which there was no room: nothing else is in it."""

TRANSPORT: Final = "topics.transport"
"""Key of `scope["state"]`: the asyncio transport of a connection that Hypercorn serves."""

ROOM: Final = "topics.room"
"""Extension of a scope whose connection has many answers at once: the `budget.Reservation` of this one's."""
