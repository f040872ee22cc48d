"""Messages of a WebSocket as they come, counted as bodies are (`bodies.Share`) from their first pieces until the app
has done what they say.

    piece … piece ─▶ whole ─▶ Hypercorn's queue of ten ─▶ app
        └─▶ no room: dropped, with all that follows of it ─▶ a message that says so

Hypercorn reads on while the app does something else, and counts nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from hypercorn.protocol.ws_stream import FrameTooLargeError, WebsocketBuffer
from wsproto.events import Message

from topics.frontend.asgi import DROPPED, SHARE
from topics.frontend.bodies import COUNTED_FROM_BYTES, Share


class CountedMessages(WebsocketBuffer):
    """The message that is coming."""

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length)
        self._share: Share | None = None
        self._kept_bytes = 0
        self._dropped = False

    def extend(self, event: Message[Any]) -> None:
        """Another piece; it comes in the right order."""
        if self.length + len(event.data) > self.max_length:
            self._drop()
            raise FrameTooLargeError
        if self._dropped:
            self.length += len(event.data)
            return
        self._kept_bytes += sys.getsizeof(event.data)
        if self._kept_bytes > COUNTED_FROM_BYTES:
            if self._share is None:
                self._share = Share()
            if not self._share.reach(self._kept_bytes):
                self.length += len(event.data)
                self._drop()
                return
        super().extend(event)

    def _drop(self) -> None:
        self.value = self._share = None
        self._dropped = True

    def clear(self) -> None:
        """The next message begins."""
        super().clear()
        self._share = None
        self._kept_bytes = 0
        self._dropped = False

    def to_message(self) -> dict[str, Any]:
        """For the app."""
        message: dict[str, Any] = super().to_message()
        if self._dropped:
            message[DROPPED] = True
        if self._share is not None:
            message[SHARE] = self._share
        return message
