"""What waits for the client of an HTTP/2 stream, bounded: who has more to say waits until it is taken (api §7).

Hypercorn's own buffer goes by how little it could send just now: with a window of 0 that is nothing, it takes this for
a client that keeps up, and lets the next message in. A client that gives no window pulls a whole topic into memory.
"""

from __future__ import annotations

import hypercorn.protocol
from h2.events import Event, StreamReset
from hypercorn.protocol import h2
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer


class BoundedBuffer(StreamBuffer):
    """Of one stream: one message, and less than BUFFER_HIGH_WATER before it."""

    async def push(self, data: bytes) -> None:
        """Returns when there is room for the next one, or the stream is closed."""
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()  # room that there was before this message
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


class BoundedProtocol(H2Protocol):
    """Hypercorn's, but that a stream which the client resets takes what waits for it along, and whoever sends: there
    may be as many of them as the client likes.
    """

    async def _handle_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StreamReset) and event.stream_id in self.stream_buffers:
                await self.stream_buffers[event.stream_id].close()
        await super()._handle_events(events)


def install() -> None:
    """HTTP/2 of this process uses them from now on."""
    vars(h2)["StreamBuffer"] = BoundedBuffer
    vars(hypercorn.protocol)["H2Protocol"] = BoundedProtocol
