"""The types of ASGI, the keys that this service adds to scopes and messages, and the wait for a client's disconnect."""

from __future__ import annotations

import asyncio
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
SEND_NOW: Final = "topics.send_now"
"""Extension of a WebSocket's scope: a function that sends a message in UTF-8 at once, and returns False if it has to
wait: for the client, or for another message. Then `send` sends it."""
Deliver = Callable[[Send, bytes], Awaitable[None]]
"""A function that sends a whole body by the given `send`, and returns when this process keeps no part of it."""
DELIVER: Final = "topics.deliver"
"""Extension of a scope: its `Deliver`, for an answer that counts only when it has left this process (api §10,
`at_least_once`). ASGI's `send` returns earlier: bytes that are kept here are lost when the connection or the process
ends. `Deliver` returns when the kernel has the whole body, or raises ConnectionResetError."""
REFUSAL: Final = "topics.refusal"
"""Key of a scope: the error with which the app is to answer this request, so that pages may read it (`Cors`)."""
ADMITTED: Final = "topics.admitted"
"""Key of a scope: a function to call when the request is admitted: its connection has then shown a valid key."""
RESERVATION: Final = "topics.reservation"
"""Key of a WebSocket message: its `bodies.MessageReservation`, which is held as long as the message is kept."""
DROPPED: Final = "topics.dropped"
"""Key of a WebSocket message for which there was no room. It has no content."""
ROOM: Final = "topics.room"
"""Extension of a scope whose connection has many answers at once: the `budget.Reservation` of this answer."""


async def disconnected_before(done: asyncio.Future[Any], receive: Receive) -> bool:
    """Wait for `done` or the client's disconnect, and return True if the client is gone."""
    gone = asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        return gone.done()
    finally:
        gone.cancel()


async def until_disconnect(receive: Receive) -> None:
    """Wait for the end of the connection, of the answer or of the WebSocket. Other messages are dropped."""
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass
