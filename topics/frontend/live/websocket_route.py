"""`GET /v0/ws`: which clients may open a WebSocket (api §7.7), and the open ones of this frontend."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from topics.core.errors import TopicsError
from topics.core.keys import ApiKey
from topics.frontend.asgi import Message, Receive, Scope, Send
from topics.frontend.entry.responses import send_error
from topics.frontend.live.event_streams import StreamSlots
from topics.frontend.live.websocket import Services, Socket
from topics.frontend.routes.operations import Answer, asgi_route, describe
from topics.frontend.shards.gateway import stopping

_SWITCHED: Final = {101: Answer("Switching to WebSocket", {})}


class WebSocketRoute:
    """All sockets of this frontend. It admits them, and ends those whose key is no longer valid."""

    def __init__(self, services: Services, slots: StreamSlots) -> None:
        self._services = services
        self._slots = slots
        self._sockets: dict[Socket, None] = {}
        self._draining = False
        services.access.on_change(self._end_forbidden)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] != "websocket.connect":
            return
        with ExitStack() as slot:
            try:
                caller = self._admit(scope)
                slot.enter_context(self._slots.hold(caller))
            except TopicsError as error:
                self._services.cell.add("responses_4xx" if error.status < 500 else "responses_5xx")
                await refuse(error, scope, send)
                return
            socket = Socket(self._services, caller.digest, scope, receive, send)
            self._sockets[socket] = None
            self._services.cell.set("ws_connections", len(self._sockets))
            try:
                await send({"type": "websocket.accept"})
                # The keys may have changed since it was admitted.
                socket.end_forbidden()
                await socket.run()
            finally:
                del self._sockets[socket]
                self._services.cell.set("ws_connections", len(self._sockets))

    @asgi_route("GET", "/v0/ws", None, None, "watch")
    @describe("A WebSocket: subscribe, unsubscribe, publish, ping (api §7.7)", _SWITCHED, "upgrade_required")
    async def needs_upgrade(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise TopicsError("upgrade_required", "this is a WebSocket: send Upgrade: websocket")

    def drain(self) -> None:
        """End all sockets and refuse new ones: the process is stopping."""
        self._draining = True
        for socket in list(self._sockets):
            socket.end_shutting_down()

    def _admit(self, scope: Scope) -> ApiKey:
        self._services.pages.check(scope)
        caller = self._services.access.authenticate(scope)
        if self._draining:
            raise stopping()
        return caller

    def _end_forbidden(self) -> None:
        for socket in list(self._sockets):
            socket.end_forbidden()


async def refuse(error: TopicsError, scope: Scope, send: Send) -> None:
    """Refuse an upgrade over HTTP, with the usual JSON error."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return

    async def as_http(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await send_error(as_http, dict(scope["headers"]), error)
