"""WebSockets as they come, over HTTP/1.1 and HTTP/2: what a handshake must have, and messages made of frames."""

from __future__ import annotations

import re
import sys
from io import BytesIO, StringIO
from typing import Any, Final

from wsproto.events import Event, Message, Ping, Pong, TextMessage

from topics.core.errors import TopicsError, invalid
from topics.frontend import asgi
from topics.frontend.asgi import DROPPED, RESERVATION
from topics.frontend.entry.bodies import COUNTED_FROM_BYTES, MessageReservation
from topics.frontend.http.frame_budget import FrameBudget

PIECE_BYTES_MAX: Final = 64 * 1024  # a longer frame is sent in such pieces, each when there is room for it
PING_INTERVAL_S: Final = 30.0
"""Pings keep proxies from closing a silent connection, and find clients that are gone without a word."""
FRAGMENT_BYTES: Final = 1024  # a shorter part of a message counts as a frame without content
VERSION: Final = b"13"
_KEY: Final = re.compile(rb"[A-Za-z0-9+/]{22}==")  # 16 bytes in base64
_SHOWN_BYTES: Final = 60


class MessageTooLongError(Exception):
    """A message is longer than the service takes."""


class IncomingMessages:
    """The messages of one client, made of the events of its frames. Owns the message that is not whole. That counts
    like a body: without room it is dropped, and the app is told. Frames without content take from the budget.
    """

    def __init__(self, max_len: int, frames: FrameBudget) -> None:
        """`max_len` is the most characters, or bytes, of a message."""
        self._max_len = max_len
        self._frames = frames
        self._kept: StringIO | BytesIO | None = None
        self._kept_bytes = 0
        self._len = 0
        self._frame_len = 0
        self._reservation: MessageReservation | None = None
        self._is_dropped = False

    def take(self, event: Event) -> asgi.Message | None:
        """Return the message that this event completes, None if it completes none. Raise MessageTooLongError, and
        DenialOfServiceError if the client sends too many frames without content.
        """
        if not isinstance(event, Message):
            if isinstance(event, Ping | Pong):
                self._frames.spend()
            return None
        self._frame_len += len(event.data)
        self._extend(event)
        if event.frame_finished:
            is_fragment = not event.message_finished and self._frame_len < FRAGMENT_BYTES
            self._frame_len = 0
            if is_fragment or not self._len:
                self._frames.spend()
        return self._end() if event.message_finished else None

    def _extend(self, event: Message[Any]) -> None:
        self._len += len(event.data)
        if self._len > self._max_len:
            self._drop()
            raise MessageTooLongError
        if self._is_dropped:
            return
        self._kept_bytes += sys.getsizeof(event.data)
        if self._kept_bytes > COUNTED_FROM_BYTES:
            if self._reservation is None:
                self._reservation = MessageReservation()
            if not self._reservation.reach(self._kept_bytes):
                self._drop()
                return
        if self._kept is None:
            self._kept = StringIO() if isinstance(event, TextMessage) else BytesIO()
        self._kept.write(event.data)

    def _drop(self) -> None:
        self._kept = self._reservation = None
        self._is_dropped = True

    def _end(self) -> asgi.Message:
        kept = self._kept
        message: asgi.Message = {
            "type": "websocket.receive",
            "text": kept.getvalue() if isinstance(kept, StringIO) else None,
            "bytes": kept.getvalue() if isinstance(kept, BytesIO) else None,
        }
        if self._is_dropped:
            message[DROPPED] = True
        if self._reservation is not None:
            message[RESERVATION] = self._reservation
        self._kept = self._reservation = None
        self._kept_bytes = self._len = 0
        self._is_dropped = False
        return message


def handshake_error(headers: list[tuple[bytes, bytes]], http_version: str) -> TopicsError | None:
    """Return the error of a malformed WebSocket handshake (RFC 6455 §4.2.1). Over HTTP/2 it has no key (RFC 8441)."""
    if http_version == "1.0":
        return invalid("a WebSocket needs HTTP/1.1 or HTTP/2, not HTTP/1.0")
    versions = [value for name, value in headers if name.lower() == b"sec-websocket-version"]
    if versions != [VERSION]:
        return TopicsError("upgrade_required", f"Sec-WebSocket-Version must be 13, once; it is {_show(versions)}")
    keys = [value for name, value in headers if name.lower() == b"sec-websocket-key"]
    if http_version == "1.1" and not (len(keys) == 1 and _KEY.fullmatch(keys[0])):
        return invalid(f"Sec-WebSocket-Key must be 16 bytes in base64, once; it is {_show(keys)}")
    if any(name.lower() == b"content-length" and value.strip(b"0") for name, value in headers):
        return invalid("the handshake of a WebSocket has no body")
    return None


def _show(values: list[bytes]) -> str:
    return ", ".join(repr(value[:_SHOWN_BYTES].decode("latin-1")) for value in values[:2]) or "not there"
