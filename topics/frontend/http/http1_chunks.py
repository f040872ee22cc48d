"""Where a chunked body ends. llhttp, which judges it, does not say; and it must not see the request behind.

    5;ext⏎  hello⏎   A⏎  , chunked!⏎   0⏎   [Trailer: x⏎ …] ⏎
    └size┘ └─left──┘ └ ┘ └──left────┘ └size┘ └──── trailers ───┘

Chunks are followed by their lengths, never searched: what their data looks like costs nothing. Any cut into reads gives
the same end.
"""

from __future__ import annotations

import re

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[^\r\n]*)?\r\n")
_SHORT_ONES = re.compile(b"(?:%b)*+" % b"|".join(b"[%x%X]\r\n.{%d}" % (n, n, n + 2) for n in range(1, 16)), re.DOTALL)
"""Whole chunks of up to 15 bytes, as many as there are: 40,000 of them in a read would be 40,000 turns of a loop."""


class MalformedError(Exception):
    """No chunk's size stands where one has to."""


class Chunks:
    """Of one body."""

    __slots__ = ("_left_bytes", "_line", "_tail", "ended")

    def __init__(self) -> None:
        self._left_bytes = 0
        """Of the current chunk, the CR LF behind it included."""
        self._line = bytearray()
        """What has come of a size line."""
        self._tail: bytes | None = None
        """In the trailers: the last bytes before what comes next, 3 at most."""
        self.ended = False

    def follow(self, data: bytes | bytearray, position: int) -> int:
        """How far `data[position:]` is of this body: to its own end, or to that of the body, which then has `ended`.

        Raises MalformedError.
        """
        size = len(data)
        while position < size:
            if self._left_bytes:
                step = min(self._left_bytes, size - position)
                self._left_bytes -= step
                position += step
            elif self._tail is not None:
                return self._follow_trailers(data, position)
            else:
                if not self._line:
                    short_ones = _SHORT_ONES.match(data, position)
                    assert short_ones is not None
                    position = short_ones.end()
                if position < size:
                    position = self._follow_size(data, position)
        return position

    def _follow_size(self, data: bytes | bytearray, position: int) -> int:
        found = None if self._line else _SIZE_LINE.match(data, position)
        if found is not None:
            end = found.end()
        else:
            end = data.find(b"\n", position) + 1
            self._line += data[position : end or len(data)]
            if not end:
                return len(data)
            found = _SIZE_LINE.fullmatch(self._line)
            if found is None:
                raise MalformedError(f"{bytes(self._line[:40])!r} is not the size of a chunk")
            self._line = bytearray()
        length = int(found[1], 16)
        if length:
            self._left_bytes = length + 2
        else:
            self._tail = b"\r\n"
        return end

    def _follow_trailers(self, data: bytes | bytearray, position: int) -> int:
        """They end, and the body with them, at the first empty line, which may have begun in the read before."""
        assert self._tail is not None
        for split in (3, 2, 1):
            if self._tail.endswith(b"\r\n\r\n"[:split]) and data.startswith(b"\r\n\r\n"[split:], position):
                self.ended = True
                return position + 4 - split
        end = data.find(b"\r\n\r\n", position)
        if end >= 0:
            self.ended = True
            return end + 4
        self._tail = (self._tail + data[max(position, len(data) - 3) :])[-3:]
        return len(data)
