"""The progress of a WebSocket over HTTP/1.1, and the frames of messages for its client."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from wsproto.connection import Connection, ConnectionType
from wsproto.events import TextMessage

_framer: Final = Connection(ConnectionType.SERVER)
_last_frame: tuple[bytes, bytes] = (b"", b"")


class SocketStage(IntEnum):
    """The progress of a WebSocket."""

    HANDSHAKE = 0
    OPEN = 1
    CLOSING = 2  # a close frame is sent, or comes behind half a frame: the client is to answer it
    ANSWERING = 3  # the client has closed: the answer comes behind half a frame, and nothing more is taken
    OVER = 4  # nothing more is sent or taken


def text_frame(message: bytes) -> bytes:
    """Return `message_frame`, and remember the last one: the same message goes to many clients in turn."""
    global _last_frame
    if _last_frame[0] is not message:
        _last_frame = (message, message_frame(message))
    return _last_frame[1]


def message_frame(message: bytes) -> bytes:
    """Return the frame of a message in UTF-8."""
    return bytes(_framer.send(TextMessage(message.decode())))
