"""Answers: JSON bodies, the error envelope, gzip for clients that accept it."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Mapping
from typing import Any, Final

import msgspec

from topics.core.errors import RETRY_AFTER_S, TopicsError
from topics.frontend.asgi import ROOM, Scope, Send
from topics.frontend.entry import limits
from topics.frontend.entry.bodies import Headers
from topics.frontend.entry.budget import Budget, Reservation

HeaderList = list[tuple[bytes, bytes]]

LIST_BYTES_MAX: Final = 1 << 20
"""Room reserved for one page of a list; most are much shorter."""
GZIP_MIN_BYTES: Final = 1024
_GZIP_INLINE_BYTES_MAX: Final = 32 * 1024
_ACCEPT_MAX_BYTES: Final = 2048
"""Bytes of an Accept or Accept-Encoding header that are read: a whole head full of them would take 30 ms."""
_GZIP_LEVEL: Final = 1  # level 1 is the fastest, and packs a page of JSON nearly as well as the others
_JSON: Final = (b"content-type", b"application/json")
_HEADERS: Final = {"unauthorized": (b"www-authenticate", b"Bearer"), "upgrade_required": (b"upgrade", b"websocket")}

packing: Final = Budget(limits.PACKING)
"""Long answers that threads of this process are packing. Pages are made faster than they are packed."""

encode_json = msgspec.json.Encoder().encode


def elapsed_ms(started_ns: int) -> float:
    """Return the time since `started_ns` (time.perf_counter_ns), to the microsecond."""
    return (time.perf_counter_ns() - started_ns) // 1000 / 1000


def room_of(scope: Scope) -> Reservation | None:
    """Return the answer's part of its connection's budget; None over HTTP/1.1, which has one answer at a time."""
    room: Reservation | None = scope.get("extensions", {}).get(ROOM)
    return room


async def reserve_room(scope: Scope, most_bytes: int) -> None:
    """Wait until an answer of at most `most_bytes` may be made: over HTTP/2 until the client has read its earlier ones
    (`limits.CONNECTION_ANSWERS`). Raise ConnectionResetError if the client is gone.
    """
    room = room_of(scope)
    if room is not None:
        await room.replace(most_bytes)


def send_json(
    send: Send, request_headers: Headers, status: int, body: bytes, headers: HeaderList | None = None
) -> Awaitable[None]:
    return send_whole(send, request_headers, status, _JSON, body, headers)


async def send_whole(
    send: Send,
    request_headers: Headers,
    status: int,
    content_type: tuple[bytes, bytes],
    body: bytes,
    headers: HeaderList | None = None,
) -> None:
    """Send a whole answer; packed if it is long enough and the client accepts gzip."""
    head = [content_type]
    if headers:
        head += headers
    if len(body) >= GZIP_MIN_BYTES:
        accepted = request_headers.get(b"accept-encoding")
        if accepted is not None:
            head.append((b"vary", b"accept-encoding"))
            if accepts_gzip(accepted) and packing.fits(len(body)):
                head.append((b"content-encoding", b"gzip"))
                body = await _packed(body)
    head.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def _packed(body: bytes) -> bytes:
    len_bytes = len(body)
    if len_bytes <= _GZIP_INLINE_BYTES_MAX:
        return gzip.compress(body, _GZIP_LEVEL, mtime=0)
    packing.held_bytes += len_bytes
    try:
        return await asyncio.to_thread(gzip.compress, body, _GZIP_LEVEL, mtime=0)
    finally:
        packing.release(len_bytes)


async def send_error(send: Send, request_headers: Headers, error: TopicsError) -> None:
    """Send `error` in the envelope of api §0.6, with the headers that belong to its code."""
    head: HeaderList = []
    retry_after_s = RETRY_AFTER_S.get(error.code)
    if retry_after_s is not None:
        head.append((b"retry-after", b"%d" % retry_after_s))
    elif error.detail is not None and "allow" in error.detail:
        head.append((b"allow", error.detail["allow"].encode()))
    elif error.code in _HEADERS:
        head.append(_HEADERS[error.code])
    await send_json(send, request_headers, error.status, error_body(error), head)


def error_body(error: TopicsError) -> bytes:
    """Return the envelope of api §0.6."""
    content: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.detail is not None:
        content["detail"] = error.detail
    return encode_json({"error": content})


def accepts_gzip(accept_encoding: bytes) -> bool:
    """Return True if `gzip` (or `*`) is listed with a weight above zero."""
    return _best_weight(accept_encoding, {b"*": 1, b"gzip": 2, b"x-gzip": 2}) > 0


def weight(accept: bytes, media_type: bytes) -> float:
    """Return the weight of `media_type` in an Accept header, 0 to 1. The most specific range that covers it counts."""
    return _best_weight(accept, {b"*/*": 1, media_type.partition(b"/")[0] + b"/*": 2, media_type: 3})


def _best_weight(accept: bytes, specificity: Mapping[bytes, int]) -> float:
    best, weight = 0, 0.0
    for part in accept[:_ACCEPT_MAX_BYTES].lower().split(b","):
        value, *parameters = (piece.strip() for piece in part.split(b";"))
        if specificity.get(value, 0) > best:
            best = specificity[value]
            given = next((parameter[2:] for parameter in parameters if parameter.startswith(b"q=")), b"1")
            try:
                weight = min(1.0, max(0.0, float(given)))
            except ValueError:
                weight = 1.0
    return weight
