"""What a stream says, in the words of its transport: event stream frames (api §7), or WebSocket messages (api §7.7).

    event: record LF data: {"topic":…,"records":[…],"from_seq":…,"to_seq":…,"head_seq":…} LF id: <cursor> LF LF
    {"op":"record","topic":…,"records":[…],"from_seq":…,"to_seq":…,"head_seq":…} RS

The JSON of a record may have line breaks between tokens; in an event stream each continues as another `data:`.
RS (0x1E) stands in no JSON text, so it tells messages apart that are written together; it is not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from topics.api.answers import TombstoneAnswer as Tombstone
from topics.frontend.live import cursor

MESSAGE_END: Final = b"\x1e"
ADVISORY: Final = 429
FINAL: Final = 410

_encode_json = msgspec.json.Encoder().encode


class Wording(Protocol):
    """A frame is one of `record` … `topic_deleted` and, right behind it, the `end` for where it leaves the stream."""

    def record(self, topic: str, body: bytes, from_seq: int, to_seq: int, head_seq: int) -> bytes:
        """`body`: record objects joined by commas."""

    def tombstone(self, topic: str, tombstone: Tombstone, reason: str) -> bytes: ...

    def caught_up(self, topic: str, head_seq: int) -> bytes: ...

    def topic_deleted(self, topic: str, head_seq: int) -> bytes: ...

    def end(self, places: Mapping[str, int]) -> bytes:
        """`places`: position by topic."""

    def advisory(self, code: str, message: str, retry_after_ms: int, topics: list[str]) -> bytes:
        """A whole frame: these topics cannot be read now, the stream goes on."""

    def final(self, code: str, message: str) -> bytes:
        """A whole frame: the stream is over."""


class EventStreamWording:
    """`text/event-stream`."""

    opening = b"retry: 2000\n\n"

    def record(self, topic: str, body: bytes, from_seq: int, to_seq: int, head_seq: int) -> bytes:
        return b"event: record\ndata: %b\n" % in_lines(_record(b"", topic, body, from_seq, to_seq, head_seq))

    def tombstone(self, topic: str, tombstone: Tombstone, reason: str) -> bytes:
        return b"event: tombstone\ndata: %b\n" % _encode_json(_tombstone(topic, tombstone, reason))

    def caught_up(self, topic: str, head_seq: int) -> bytes:
        return b'event: caught-up\ndata: {"topic":"%b","head_seq":%d}\n' % (topic.encode(), head_seq)

    def topic_deleted(self, topic: str, head_seq: int) -> bytes:
        data = {"topic": topic, "head_seq": head_seq, "reason": "deleted"}
        return b"event: topic-deleted\ndata: %b\n" % _encode_json(data)

    def end(self, places: Mapping[str, int]) -> bytes:
        return b"id: %b\n\n" % cursor.encode(places)

    def advisory(self, code: str, message: str, retry_after_ms: int, topics: list[str]) -> bytes:
        # No id: nothing was delivered.
        data = {"code": ADVISORY, "error": message, "retry_after_ms": retry_after_ms, "topics": topics}
        return b"event: error\ndata: %b\n\n" % _encode_json(data)

    def final(self, code: str, message: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode_json({"code": FINAL, "error": message})

    def heartbeat(self, now_ms: int) -> bytes:
        """The comment of an idle stream; `now_ms` since the epoch."""
        return b": hb %d\n\n" % now_ms


class MessageWording:
    """WebSocket text messages; heartbeats are the protocol's own."""

    def record(self, topic: str, body: bytes, from_seq: int, to_seq: int, head_seq: int) -> bytes:
        return _record(b'"op":"record",', topic, body, from_seq, to_seq, head_seq)

    def tombstone(self, topic: str, tombstone: Tombstone, reason: str) -> bytes:
        return _encode_json({"op": "tombstone"} | _tombstone(topic, tombstone, reason))

    def caught_up(self, topic: str, head_seq: int) -> bytes:
        return b'{"op":"caught_up","topic":"%b","head_seq":%d}' % (topic.encode(), head_seq)

    def topic_deleted(self, topic: str, head_seq: int) -> bytes:
        return _encode_json({"op": "topic_deleted", "topic": topic, "head_seq": head_seq, "reason": "deleted"})

    def end(self, places: Mapping[str, int]) -> bytes:
        return MESSAGE_END

    def advisory(self, code: str, message: str, retry_after_ms: int, topics: list[str]) -> bytes:
        data = {"op": "error", "request_id": None, "code": code, "message": message}
        return _encode_json(data | {"retry_after_ms": retry_after_ms, "topics": topics}) + MESSAGE_END

    def final(self, code: str, message: str) -> bytes:
        return _encode_json({"op": "error", "request_id": None, "code": code, "message": message}) + MESSAGE_END


EVENT_STREAM: Final = EventStreamWording()
MESSAGES: Final = MessageWording()


def _record(opening: bytes, topic: str, body: bytes, from_seq: int, to_seq: int, head_seq: int) -> bytes:
    return b'{%b"topic":"%b","records":[%b],"from_seq":%d,"to_seq":%d,"head_seq":%d}' % (
        opening,
        topic.encode(),
        body,
        from_seq,
        to_seq,
        head_seq,
    )


def _tombstone(topic: str, tombstone: Tombstone, reason: str) -> dict[str, Any]:
    return {
        "topic": topic,
        "reason": reason,
        "gap_from": tombstone.gap_from,
        "gap_to": tombstone.gap_to,
        "earliest_seq": tombstone.earliest_seq,
        "head_seq": tombstone.head_seq,
    }


def in_lines(data: bytes) -> bytes:
    """JSON whose line breaks (white space all of them: in a string they are escaped) are an event stream's.

    A client joins the values of `data:` lines with LF, so LF survives; CR would end a line and becomes a blank.
    """
    if b"\r" in data:
        data = data.replace(b"\r", b" ")
    if b"\n" in data:
        data = data.replace(b"\n", b"\ndata: ")
    return data
