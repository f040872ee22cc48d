"""A client of HTTP/2 with many streams on one connection, whose windows open when the test says so."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Final

import h2.config
import h2.connection
import h2.events
import h2.settings
from hyperframe.frame import GoAwayFrame

GENEROUS: Final = (1 << 31) - 1 - 65_535
PIECE_BYTES: Final = 10_000
"""Bytes of a frame of a body."""
STILL: Final = 4
"""Round trips without a change after which nothing more is expected."""
HEADERS: Final = [(":scheme", "http"), (":authority", "localhost")]


class Streams:
    """A client that gives its connection all the window there is, and its streams none until they are told to read."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        config = h2.config.H2Configuration(
            header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self._h2 = h2.connection.H2Connection(config)
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        self._h2.increment_flow_control_window(GENEROUS)
        self._next = 1
        self._agreed = 0
        self.bodies: dict[int, bytearray] = {}
        self.answered: set[int] = set()
        self.ended: set[int] = set()
        self.reset: set[int] = set()
        self.reset_codes: dict[int, int] = {}
        self.ended_by: int | None = None
        self.last_begun: list[int] = []
        """The last stream that each GOAWAY without an error named."""
        self._received = bytearray()
        self._sent_bytes: dict[int, int] = {}
        self._pongs = 0
        self.flush()
        while self._agreed < 2:
            self.read()

    def ask(self, path: str, body: bytes = b"", *, whole: bool = True, **headers: str) -> int:
        """GET, or POST of a JSON body, which `whole` says is all of it; returns the stream."""
        stream_id, self._next = self._next, self._next + 2
        head = [(":method", "POST" if body else "GET"), (":path", path), *HEADERS, *headers.items()]
        if body:
            head.append(("content-type", "application/json"))
        self._h2.send_headers(stream_id, head, end_stream=not body)
        if body:
            self._h2.send_data(stream_id, body, end_stream=whole)
        self.flush()
        return stream_id

    def open_websocket(self, path: str, version: str = "13", behind: bytes = b"", **headers: str) -> int:
        """Ask for a WebSocket (RFC 8441), and send bytes right behind that; returns the stream."""
        head = [(":method", "CONNECT"), (":protocol", "websocket"), (":path", path), *HEADERS]
        return self.begin(*head, ("sec-websocket-version", version), *headers.items(), behind=behind)

    def begin(self, *head: tuple[str, str], behind: bytes = b"", ended: bool = False) -> int:
        """Send a head as it is, and bytes right behind it; returns the stream, whose end is to come unless `ended`."""
        stream_id, self._next = self._next, self._next + 2
        self._h2.send_headers(stream_id, head, end_stream=ended)
        if behind:
            self._h2.send_data(stream_id, behind)
        self.flush()
        return stream_id

    def begin_unsent(self) -> int:
        """Return a stream whose head the test is to send by itself."""
        stream_id, self._next = self._next, self._next + 2
        self._h2.send_headers(stream_id, [(":method", "GET")], end_stream=True)
        self._h2.clear_outbound_data_buffer()
        return stream_id

    def trail(self, stream_id: int, *trailers: tuple[str, str]) -> None:
        """End a body with trailers."""
        self._h2.send_headers(stream_id, trailers or [("x-trailer", "1")], end_stream=True)
        self.flush()

    def settle(self) -> None:
        """Return when the service has looked at all that was sent."""
        self._h2.ping(b"settled?")
        self.flush()
        pongs = self._pongs
        while self._pongs == pongs:
            self.read()

    def go_on(self, stream_id: int, body: bytes, *, whole: bool) -> None:
        """Send more of a body. Raise ProtocolError if the stream was reset, whose window opens no more."""
        while True:
            while stream_id not in self.reset and self._h2.local_flow_control_window(stream_id) < min(1, len(body)):
                self.read()
            piece = body[: min(self._h2.local_flow_control_window(stream_id), PIECE_BYTES)]
            body = body[len(piece) :]
            self._h2.send_data(stream_id, piece, end_stream=whole and not body)
            self._sent_bytes[stream_id] = self.sent_bytes(stream_id) + len(piece)
            self.flush()
            if not body:
                return

    def pad(self, stream_id: int, pad_bytes: int) -> None:
        """Send a frame of padding alone, when the window has room for it."""
        while self.room_bytes(stream_id) <= pad_bytes:
            self.read()
        self._h2.send_data(stream_id, b"", pad_length=pad_bytes)
        self.flush()

    def sent_bytes(self, stream_id: int) -> int:
        """Return the bytes that `go_on` has sent."""
        return self._sent_bytes.get(stream_id, 0)

    @property
    def connection_room_bytes(self) -> int:
        """The bytes that all streams together may send now."""
        return self._h2.outbound_flow_control_window

    def room_bytes(self, stream_id: int) -> int:
        """Return the bytes that the stream may send now."""
        return self._h2.local_flow_control_window(stream_id)

    def fill(self, stream_id: int, message: bytes, taken: Callable[[], int]) -> int:
        """Send the message again and again, until the window is closed; returns how often. It counts as closed when it
        and the number `taken` of the service have stood still for some round trips: the service may be late to open it.
        """
        sent = still = 0
        while still < STILL:
            if self.room_bytes(stream_id) >= len(message):
                self.go_on(stream_id, message, whole=False)
                sent += 1
                still = 0
                continue
            before = (taken(), self.room_bytes(stream_id))
            self.settle()
            still = still + 1 if before == (taken(), self.room_bytes(stream_id)) else 0
        return sent

    def got_bytes(self, stream_id: int) -> int:
        return len(self.bodies.get(stream_id, b""))

    def heads(self, count: int) -> bytes:
        """Return the frames of so many requests. Their answers are never read."""
        for _ in range(count):
            stream_id, self._next = self._next, self._next + 2
            self._h2.send_headers(stream_id, [(":method", "GET"), (":path", "/"), *HEADERS], end_stream=True)
            del self._h2.streams[stream_id]  # else there would be too many
        return self._h2.data_to_send()

    def take(self, *stream_ids: int) -> None:
        """Their windows open."""
        for stream_id in stream_ids:
            self._h2.increment_flow_control_window(GENEROUS, stream_id)
        self.flush()

    def give_up(self, stream_id: int) -> None:
        self._h2.reset_stream(stream_id)
        self.flush()

    def flush(self) -> None:
        self._socket.sendall(self._h2.data_to_send())

    def read(self) -> None:
        data = self._socket.recv(1 << 20)
        assert data, "the connection was closed"
        for event in self._h2.receive_data(self._without_farewells(data)):
            if isinstance(event, h2.events.DataReceived):
                self.bodies.setdefault(event.stream_id, bytearray()).extend(event.data)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, h2.events.ResponseReceived):
                self.answered.add(event.stream_id)
            elif isinstance(event, h2.events.PingAckReceived):
                self._pongs += 1
            elif isinstance(event, h2.events.StreamReset):
                self.reset.add(event.stream_id)
                self.reset_codes[event.stream_id] = int(event.error_code)
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.ended_by = int(event.error_code or 0)
            elif isinstance(event, h2.events.SettingsAcknowledged):
                self._agreed += 1
        with contextlib.suppress(ConnectionError):  # the service may have closed the connection meanwhile
            self.flush()

    def _without_farewells(self, data: bytes) -> bytes:
        """Take each GOAWAY without an error out: h2 would read nothing behind it, not even answers."""
        self._received += data
        rest = b""
        while len(self._received) >= 9 and len(self._received) >= (end := 9 + int.from_bytes(self._received[:3])):
            frame = bytes(self._received[:end])
            del self._received[:end]
            if frame[3] == GoAwayFrame.type and frame[13:17] == bytes(4):
                self.last_begun.append(int.from_bytes(frame[9:13]))
            else:
                rest += frame
        return rest

    def read_to_the_close(self) -> None:
        """Read until the connection is closed. What comes is dropped, but for farewells."""
        with contextlib.suppress(ConnectionError):
            while data := self._socket.recv(1 << 16):
                self._without_farewells(data)

    def read_to_the_end_of(self, *stream_ids: int) -> None:
        while not self.ended.issuperset(stream_ids):
            assert not self.reset.intersection(stream_ids)
            self.read()
