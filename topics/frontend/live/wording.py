"""The frames of a stream in the words of its transport: event stream (api §7) or WebSocket messages (api §7.7).

    event: record LF data: {"topic":…,"records":[…],"from_seq":…,"to_seq":…,"head_seq":…} LF id: <cursor> LF LF
    {"op":"record","topic":…,"records":[…],"from_seq":…,"to_seq":…,"head_seq":…} RS

The cursor says where a stream stands in each of its topics: base64url, without padding, of the JSON map from topic to
position. A client sends it back as `Last-Event-ID`. RS (0x1E) cannot occur in JSON text, so it separates messages that
are written together. It is not sent.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Final, Protocol

import msgspec

from topics.api.answers import TombstoneAnswer as Tombstone
from topics.api.requests import U64_MAX
from topics.frontend.entry.responses import encode_json

_decode_json = msgspec.json.Decoder(dict[str, Annotated[int, msgspec.Meta(ge=0)]]).decode
_STANDARD = bytes.maketrans(b"-_", b"+/")
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def encode_cursor(positions: Mapping[str, int]) -> bytes:
    return binascii.b2a_base64(encode_json(positions), newline=False).translate(_URL_SAFE).rstrip(b"=")


def cursor_max_bytes(topics: int) -> int:
    """Return the greatest length of a cursor: `"<name>":<seq>,` of 255 and 20 characters, four for three in base64."""
    return 4 * (topics * (255 + 20 + 4) + 2) // 3 + 4


def decode_cursor(cursor: bytes) -> dict[str, int] | None:
    """Return the positions of a cursor; None if it is malformed."""
    try:
        text = binascii.a2b_base64(cursor.translate(_STANDARD) + b"=" * (-len(cursor) % 4), strict_mode=True)
        positions = _decode_json(text)
        return positions if max(positions.values(), default=0) <= U64_MAX else None
    except (ValueError, RecursionError):  # binascii.Error and msgspec's errors are ValueErrors
        return None


MESSAGE_END: Final = b"\x1e"
ADVISORY: Final = 429
FINAL: Final = 410
SHUTTING_DOWN: Final = b"server_shutting_down"
SHUTTING_DOWN_TEXT: Final = b"the service is stopping; connect again"


class Wording(Protocol):
    """The words of one transport. A frame is one of `record` … `topic_deleted`, followed by the `end` of its state."""

    def event(self, name: bytes, members: bytes) -> bytes:
        """Return an event without its end. `members` is a JSON object without its braces."""

    def end(self, positions: Mapping[str, int]) -> bytes:
        """Return the end of a frame that leaves the stream at `positions` (by topic)."""

    def error(self, status: int, code: str, message: str, more: dict[str, Any]) -> bytes:
        """Return a whole frame."""

    def record(self, topic: str, body: bytes, from_seq: int, to_seq: int, head_seq: int) -> bytes:
        """Return the event for records. `body` is record objects joined by commas."""
        members = b'"topic":"%b","records":[%b],"from_seq":%d,"to_seq":%d,"head_seq":%d'
        return self.event(b"record", members % (topic.encode(), body, from_seq, to_seq, head_seq))

    def tombstone(self, topic: str, tombstone: Tombstone, reason: str) -> bytes:
        gap = {"gap_from": tombstone.gap_from, "gap_to": tombstone.gap_to}
        state = {"earliest_seq": tombstone.earliest_seq, "head_seq": tombstone.head_seq}
        return self.event(b"tombstone", _members({"topic": topic, "reason": reason} | gap | state))

    def caught_up(self, topic: str, head_seq: int) -> bytes:
        return self.event(b"caught_up", b'"topic":"%b","head_seq":%d' % (topic.encode(), head_seq))

    def topic_deleted(self, topic: str, head_seq: int) -> bytes:
        return self.event(b"topic_deleted", _members({"topic": topic, "head_seq": head_seq, "reason": "deleted"}))

    def advisory(self, code: str, message: str, retry_after_ms: int, topics: list[str]) -> bytes:
        """Return a whole frame: these topics cannot be read now, the stream continues."""
        return self.error(ADVISORY, code, message, {"retry_after_ms": retry_after_ms, "topics": topics})

    def final(self, code: str, message: str) -> bytes:
        """Return a whole frame: the stream is over."""
        return self.error(FINAL, code, message, {})


class EventStreamWording(Wording):
    """`text/event-stream`."""

    opening = b"retry: 2000\n\n"
    shutting_down = b'event: error\ndata: {"code":"%b","error":"%b"}\n\n' % (SHUTTING_DOWN, SHUTTING_DOWN_TEXT)

    def event(self, name: bytes, members: bytes) -> bytes:
        return b"event: %b\ndata: {%b}\n" % (name.replace(b"_", b"-"), in_lines(members))

    def end(self, positions: Mapping[str, int]) -> bytes:
        return b"id: %b\n\n" % encode_cursor(positions)

    def error(self, status: int, code: str, message: str, more: dict[str, Any]) -> bytes:
        # Without an id: nothing was delivered.
        return self.event(b"error", _members({"code": status, "error": message} | more)) + b"\n"

    def heartbeat(self, now_ms: int) -> bytes:
        """Return the comment for an idle stream; `now_ms` since the epoch."""
        return b": hb %d\n\n" % now_ms


class MessageWording(Wording):
    """WebSocket text messages. Heartbeats are the protocol's own."""

    shutting_down = b'{"op":"error","request_id":null,"code":"%b","message":"%b"}' % (SHUTTING_DOWN, SHUTTING_DOWN_TEXT)

    def event(self, name: bytes, members: bytes) -> bytes:
        return b'{"op":"%b",%b}' % (name, members)

    def end(self, positions: Mapping[str, int]) -> bytes:
        return MESSAGE_END

    def error(self, status: int, code: str, message: str, more: dict[str, Any]) -> bytes:
        members = _members({"request_id": None, "code": code, "message": message} | more)
        return self.event(b"error", members) + MESSAGE_END


EVENT_STREAM: Final = EventStreamWording()
MESSAGES: Final = MessageWording()


def _members(data: dict[str, Any]) -> bytes:
    return encode_json(data)[1:-1]


def in_lines(data: bytes) -> bytes:
    """Return JSON with its line breaks, white space between tokens, made into those of an event stream. A client joins
    the values of `data:` lines with LF, so LF survives; CR would end a line and becomes a blank.
    """
    return data.replace(b"\r", b" ").replace(b"\n", b"\ndata: ")
