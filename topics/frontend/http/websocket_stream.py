"""How messages of a WebSocket go out: what is kept of them for its client is known, and kept once.

    message ─▶ frame ─▶ HTTP/1.1: pieces of PIECE_BYTES_MAX, each when the transport has room for it
                   └──▶ HTTP/2: the stream's buffer, whole

Hypercorn hands a message to the transport at one go, and has it in three forms until the client has taken it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from hypercorn.protocol import h2, h11
from hypercorn.protocol.events import Data, Event, Request
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.ws_stream import ASGIWebsocketState
from hypercorn.typing import ASGISendEvent
from wsproto.events import Event as WebSocketEvent
from wsproto.events import TextMessage
from wsproto.utilities import LocalProtocolError

from topics.frontend.asgi import KEPT, TRANSPORT
from topics.frontend.http.handshake import EnvelopedWebSocket
from topics.frontend.http.http2_buffer import BoundedBuffer
from topics.frontend.http.unread import Kept, Unread
from topics.frontend.http.websocket_messages import CountedMessages

PIECE_BYTES_MAX: Final = 64 * 1024


class BoundedWebSocket(EnvelopedWebSocket):
    """Hypercorn's, but for how it refuses and how it sends. Its app finds it in its scope as `unread.Kept`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffer = CountedMessages(self.config.websocket_max_message_size)
        self._turn = asyncio.Lock()
        """Of whoever sends a frame in pieces."""
        self._left_bytes = 0
        """Of that frame."""

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, Request) and not self.closed:  # its app begins when this task waits for something
            cast("dict[str, Any]", self.scope["extensions"])[KEPT] = self

    async def app_send(self, message: ASGISendEvent | None) -> None:
        if message is None or message["type"] != "websocket.send" or self.state is not ASGIWebsocketState.CONNECTED:
            await super().app_send(message)
        elif not self.closed:
            # Taken out of the message, which its sender has as long as this takes.
            await self._send_wsproto_event(TextMessage(data=cast("dict[str, Any]", message).pop("text")))

    async def _send_wsproto_event(self, event: WebSocketEvent) -> None:
        if self.over_http2:
            # Never waits for others: whoever reads the connection answers pings here.
            data = self._framed(event)
            del event
            await self._send_data(data)
            return
        async with self._turn:
            data = b"" if self._left_bytes else self._framed(event)  # behind half a frame nothing can follow
            del event
            if len(data) <= PIECE_BYTES_MAX:
                await self._send_data(data)
            else:
                await self._send_in_pieces(memoryview(data))

    def _framed(self, event: WebSocketEvent) -> bytes:
        """Nothing when it can no longer be said."""
        try:
            return self.connection.send(event)
        except LocalProtocolError:
            return b""

    async def _send_in_pieces(self, frame: memoryview) -> None:
        self._left_bytes = len(frame)
        # As long as if it were with the transport: that one has little of it at any time.
        unread: Unread = cast("Any", self.context).watched()
        unread.made(self)
        unread.begin()
        try:
            while self._left_bytes and not self.closed:
                piece = bytes(frame[-self._left_bytes :][:PIECE_BYTES_MAX])
                self._left_bytes -= len(piece)
                await self._send_data(piece)
        finally:
            unread.lost()

    async def _send_data(self, data: bytes) -> None:
        if data:
            await self.send(Data(stream_id=self.stream_id, data=data))

    # As `unread.Kept`.

    def get_write_buffer_size(self) -> int:
        """Of what was sent, so much is kept for the client."""
        kept = self._below
        return self._left_bytes + (0 if kept is None else kept.get_write_buffer_size())

    def is_closing(self) -> bool:
        """Nothing is sent any more."""
        kept = self._below
        return kept is None or kept.is_closing()

    def abort(self) -> None:
        """Cuts it, whatever waits for the client is gone."""
        if self._below is not None:
            self._below.abort()

    @property
    def _below(self) -> Kept | None:
        """Its connection; over HTTP/2, which has others, its stream."""
        if not self.over_http2:
            return cast("Kept", cast("dict[str, Any]", self.scope["state"])[TRANSPORT])
        protocol = cast(H2Protocol, cast("Any", self.send).__self__)
        return cast("BoundedBuffer | None", protocol.stream_buffers.get(self.stream_id))


def install() -> None:
    """Hypercorn's protocols of this process use it from now on."""
    for module in (h11, h2):
        vars(module)["WSStream"] = BoundedWebSocket
