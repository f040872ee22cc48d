"""The types of ASGI, and the keys that this service adds to scopes and messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTE: Final = "topics.route"
"""Key of a scope: the `durations.Route` that the request is measured as; None for one whose duration says nothing."""

KEPT: Final = "topics.kept"
"""Extension of a WebSocket's scope: the frames that are kept for its client (`http.hypercorn_deadlines.Kept`)."""

Deliver = Callable[[Send, bytes], Awaitable[None]]
"""A function that sends the whole body of an answer by the given `send`. It returns when this process keeps no part of
the body."""

DELIVER: Final = "topics.deliver"
"""Extension of a scope: its `Deliver`, for an answer that counts only when it has left this process (api §10,
`at_least_once`). ASGI's `send` returns earlier: bytes that are kept here for a slow client are lost when the connection
or the process ends. `Deliver` returns when the kernel has the whole body. It raises ConnectionResetError when the
client never gets the whole body. Bytes that the kernel still has when the client dies are lost unnoticed."""

SHARE: Final = "topics.share"
"""Key of a message of a WebSocket: its `bodies.Share`, for as long as the message is kept."""

DROPPED: Final = "topics.dropped"
"""Key of a message of a WebSocket that was dropped for want of room. The message has no other key."""

TRANSPORT: Final = "topics.transport"
"""Key of `scope["state"]`: the asyncio transport of a connection that Hypercorn serves."""

ROOM: Final = "topics.room"
"""Extension of a scope whose connection has many answers at once: the `budget.Hold` for this answer."""
