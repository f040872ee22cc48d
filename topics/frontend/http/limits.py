"""The limits of one connection. They hold for our HTTP/1.1 and, as far as it has them, for Hypercorn's protocols."""

from __future__ import annotations

import msgspec


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a connection may ask for, in bytes and milliseconds."""

    max_header_bytes: int = 64 * 1024
    """A whole head with its request line. The framing and trailers of a chunked body may be as long, plus eight times
    the body."""
    max_headers: int = 128
    max_uri_bytes: int = 16 * 1024
    max_body_bytes: int = 64 * 1024 * 1024
    header_timeout_ms: int = 10_000
    """From a head's first byte to its last. A new connection may be silent as long."""
    body_idle_timeout_ms: int = 30_000
    body_timeout_ms: int = 60_000
    """For a body that comes at less than `body_min_bytes_per_s`; `deadlines.BodyTime` counts it."""
    body_min_bytes_per_s: int = 64 * 1024
    keep_alive_timeout_ms: int = 75_000
    write_stall_timeout_ms: int = 45_000
    """How long a client may take nothing of what waits for it. This is longer than the 30 s (31 s at most) that an
    event stream waits for its client: the stream then has last words for it (api §7), and they need time to arrive."""
    read_min_bytes_per_s: int = 16 * 1024
    """A client may take the time that an answer needs at this rate, and `write_stall_timeout_ms` on top."""
    vanished_after_ms: int = 45_000
    """How long the client's host may acknowledge nothing of what was sent (`vanished.py`)."""
    linger_ms: int = 1_000
    """How long input is read and dropped after a last answer, so that no reset overtakes the answer."""
    read_high_water_bytes: int = 64 * 1024
    """Unread body, or pipelined requests, that may wait in memory before reading pauses."""
    write_high_water_bytes: int = 64 * 1024
    """Answer that may wait in memory before the app's `send` waits."""
    discard_max_bytes: int = 256 * 1024
    """The rest of a body that is read and dropped after an early answer, to keep the connection. With a longer rest the
    connection is closed."""

    def write_time_s(self, waiting_bytes: int) -> float:
        """How long a client may take to read `waiting_bytes`."""
        return self.write_stall_timeout_ms / 1000 + waiting_bytes / self.read_min_bytes_per_s
