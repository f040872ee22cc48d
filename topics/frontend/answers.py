"""Answers: JSON bodies, the error envelope, compression for those who ask."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable
from typing import Any, Final

import msgspec

from topics.core.errors import RETRY_AFTER_S, TopicsError
from topics.frontend.asgi import ROOM, Scope, Send
from topics.frontend.bodies import Headers
from topics.frontend.http.answer_room import Place

HeaderList = list[tuple[bytes, bytes]]

LIST_BYTES_MAX: Final = 1 << 20
"""Room that is taken for one page of a list; most are much shorter."""
GZIP_MIN_BYTES: Final = 1024
PACKING_MAX_BYTES: Final = 64 * 2**20
"""Of answers that wait for a thread that packs them, or are being packed: half a second of its work or so."""
_GZIP_INLINE_BYTES_MAX: Final = 32 * 1024
_GZIP_LEVEL: Final = 1
"""A page of JSON packs well at any level; the first costs the least."""
_JSON: Final = (b"content-type", b"application/json")


class _Packer:
    """Packs short answers at once, and has threads pack long ones: not more than PACKING_MAX_BYTES of them, which they
    are slower with than pages are made. What finds no room goes as it is.
    """

    def __init__(self) -> None:
        self._packing_bytes = 0

    def has_room_for(self, body: bytes) -> bool:
        return self._packing_bytes + len(body) <= PACKING_MAX_BYTES

    async def packed(self, body: bytes) -> bytes:
        if len(body) <= _GZIP_INLINE_BYTES_MAX:
            return gzip.compress(body, _GZIP_LEVEL, mtime=0)
        len_bytes = len(body)
        self._packing_bytes += len_bytes
        try:
            return await asyncio.to_thread(gzip.compress, body, _GZIP_LEVEL, mtime=0)
        finally:
            self._packing_bytes -= len_bytes


_packer: Final = _Packer()
"""Of this process: its threads are shared by all routes."""

encode_json = msgspec.json.Encoder().encode


def elapsed_ms(started_ns: int) -> float:
    """Since `started_ns` (time.perf_counter_ns), to the microsecond."""
    return (time.perf_counter_ns() - started_ns) // 1000 / 1000


def place_of(scope: Scope) -> Place | None:
    """Where room is to be taken before an answer is made that may be long; None where each waits for the one before."""
    place: Place | None = scope.get("extensions", {}).get(ROOM)
    return place


async def take_room(scope: Scope, most_bytes: int) -> None:
    """Room for an answer of at most so many bytes, as `Place.take`."""
    place = place_of(scope)
    if place is not None:
        await place.take(most_bytes)


def send_json(
    send: Send, request_headers: Headers, status: int, body: bytes, headers: HeaderList | None = None
) -> Awaitable[None]:
    """As `send_whole`."""
    return send_whole(send, request_headers, status, _JSON, body, headers)


async def send_whole(
    send: Send,
    request_headers: Headers,
    status: int,
    content_type: tuple[bytes, bytes],
    body: bytes,
    headers: HeaderList | None = None,
) -> None:
    """The whole answer; packed when it is worth it and the client takes gzip."""
    head = [content_type]
    if headers:
        head += headers
    if len(body) >= GZIP_MIN_BYTES:
        accepted = request_headers.get(b"accept-encoding")
        if accepted is not None:
            head.append((b"vary", b"accept-encoding"))
            if accepts_gzip(accepted) and _packer.has_room_for(body):
                head.append((b"content-encoding", b"gzip"))
                body = await _packer.packed(body)
    head.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_object(
    send: Send,
    request_headers: Headers,
    status: int,
    answer: dict[str, Any],
    started_ns: int,
    *,
    with_copies: bool = True,
) -> None:
    """An answer off the hot paths, with its `performance` (api §0.7). `with_copies`: as `CatchingUp.one` says."""
    performance: dict[str, Any] = {"server_total_ms": elapsed_ms(started_ns)}
    if not with_copies:
        performance["copies_pending"] = True
    answer["performance"] = performance
    await send_json(send, request_headers, status, encode_json(answer))


async def send_error(
    send: Send, request_headers: Headers, error: TopicsError, headers: HeaderList | None = None
) -> None:
    """The envelope of api §0.6."""
    head = list(headers or ())
    retry_after_s = RETRY_AFTER_S.get(error.code)
    if retry_after_s is not None:
        head.append((b"retry-after", b"%d" % retry_after_s))
    await send_json(send, request_headers, error.status, error_body(error), head)


def error_body(error: TopicsError) -> bytes:
    content: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.detail is not None:
        content["detail"] = error.detail
    return encode_json({"error": content})


def accepts_gzip(accept_encoding: bytes) -> bool:
    """Whether `gzip` (or `*`) is listed with a weight above zero."""
    chosen = False
    for part in accept_encoding.lower().split(b","):
        coding, _, parameters = part.partition(b";")
        name = coding.strip()
        if name in (b"gzip", b"x-gzip", b"*"):
            weight = parameters.strip().removeprefix(b"q=").strip(b"0.")
            acceptable = not parameters.strip() or bool(weight)
            if name != b"*":
                return acceptable
            chosen = acceptable
    return chosen
