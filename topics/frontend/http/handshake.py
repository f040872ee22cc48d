"""WebSocket handshakes that are none (RFC 6455 §4.2.1) are refused in the envelope of every error (api §0.6).

Hypercorn judges a handshake before the app hears of it: what it refuses gets an empty 400 on a connection that it then
forgets, and it takes anything for a key. So its stream of a WebSocket is replaced by this one.
"""

from __future__ import annotations

import re
from typing import Final

from hypercorn.protocol.events import Body, EndBody, Event, Request, Response, StreamClosed
from hypercorn.protocol.ws_stream import ASGIWebsocketState, WSStream

from topics.core.errors import TopicsError, invalid
from topics.frontend.answers import error_body

_KEY: Final = re.compile(rb"[A-Za-z0-9+/]{22}==")
"""16 bytes in base64."""
_VERSION: Final = b"13"
_SHOWN_BYTES: Final = 60
_BY_STATUS: Final = {
    400: ("invalid_request", "frames of a WebSocket came before the answer to its handshake"),
    403: ("forbidden", "no WebSocket may be opened here"),
    404: ("not_found", "there is nothing at this host"),
    500: ("internal", "the handshake failed inside the server"),
}
"""What Hypercorn answers by itself."""


class EnvelopedWebSocket(WSStream):
    """Hypercorn's, but for how it refuses."""

    over_http2 = False

    async def handle(self, event: Event) -> None:
        """From the protocol: what the client sent."""
        if isinstance(event, Request) and not self.closed:
            self.over_http2 = event.http_version == "2"
            wrong = flaw(event.headers, event.http_version)
            if wrong is not None:
                await self._refuse(wrong)
                return
        await super().handle(event)

    async def _send_error_response(self, status_code: int) -> None:
        await self._refuse(TopicsError(*_BY_STATUS[status_code]))

    async def _refuse(self, error: TopicsError) -> None:
        self.closed = True
        self.state = ASGIWebsocketState.HTTPCLOSED
        body = error_body(error)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if error.code == "upgrade_required":
            headers.append((b"sec-websocket-version", _VERSION))
        if not self.over_http2:
            headers.append((b"connection", b"close"))
        await self.send(Response(stream_id=self.stream_id, headers=headers, status_code=error.status))
        await self.send(Body(stream_id=self.stream_id, data=body))
        await self.send(EndBody(stream_id=self.stream_id))
        if not self.over_http2:
            # Else nobody would close the connection. A stream of HTTP/2 must stay: the client may still send on it.
            await self.send(StreamClosed(stream_id=self.stream_id))


def flaw(headers: list[tuple[bytes, bytes]], http_version: str) -> TopicsError | None:
    """What is wrong with the handshake of a GET that asks for a WebSocket. Over HTTP/2 it has no key (RFC 8441)."""
    if http_version == "1.0":
        return invalid("a WebSocket needs HTTP/1.1 or HTTP/2, not HTTP/1.0")
    versions = [value for name, value in headers if name.lower() == b"sec-websocket-version"]
    if versions != [_VERSION]:
        return TopicsError("upgrade_required", f"Sec-WebSocket-Version must be 13, once; it is {_show(versions)}")
    keys = [value for name, value in headers if name.lower() == b"sec-websocket-key"]
    if http_version == "1.1" and not (len(keys) == 1 and _KEY.fullmatch(keys[0])):
        return invalid(f"Sec-WebSocket-Key must be 16 bytes in base64, once; it is {_show(keys)}")
    return None


def _show(values: list[bytes]) -> str:
    return ", ".join(repr(value[:_SHOWN_BYTES].decode("latin-1")) for value in values[:2]) or "not there"
