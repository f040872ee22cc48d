"""Request bodies: read whole, bounded, unpacked, of the right content type; and what all of them hold in memory.

    read_body ──▶ hold(what is to come) ──▶ … unpacked, decoded ──▶ laid out, answered: the request's task ends ──▶ free
                     │ no room: it waits in line               └─▶ let_go: little of it is kept ──▶ free
                     └─▶ 429 throttled

A body waits for room before it is read on, so that TCP holds up its client. Of two that have a part each and wait for
the rest one is refused in the end: room for the other. Bodies of up to a MiB have a budget of their own: four clients
that send theirs slowly fill that of the long ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

from topics.core.errors import TopicsError, invalid
from topics.frontend.asgi import Receive
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget, Hold

Headers = dict[bytes, bytes]
WishT = TypeVar("WishT")

_GZIP_WBITS: Final = 31
_UNZIP_INLINE_BYTES_MAX: Final = 1024
"""A longer body may unpack to more than a MiB, so a thread does it and the loop goes on."""

INLINE_BYTES_MAX: Final = 1 << 20
"""A longer body is decoded and laid out by a thread: others get their turn between two calls into C."""
COUNTED_FROM_BYTES: Final = 64 << 10
"""Shorter bodies are not counted: a connection, or stream of HTTP/2, has one of those at most."""
LONG_BYTES: Final = 1 << 20
"""Longer bodies have the second budget."""

medium_bodies: Final = Budget(limits.MEDIUM_BODIES)
long_bodies: Final = Budget(limits.LONG_BODIES)
"""Both are this process's: there is one event loop, and all routes share them."""
_holds: Final[dict[asyncio.Task[Any], dict[Budget, Hold]]] = {}
"""The holds of each request."""


class ClientGoneError(Exception):
    """The client closed the connection before its answer; there is nobody to tell."""


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    """The unpacked body, JSON by its content type where there is any (api §0.2).

    From COUNTED_FROM_BYTES on it counts until the current task ends. Raises `payload_too_large`, `throttled`,
    `unsupported_media_type`, `invalid_request`; ClientGoneError.
    """
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        body = await _read_rest(receive, body, headers, max_bytes)
    elif len(body) > COUNTED_FROM_BYTES:
        await _hold(len(body))
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    if not body:
        return body
    _check_content_type(headers.get(b"content-type"))
    encoding = headers.get(b"content-encoding")
    if encoding is None:
        return body
    return await _unpack(body, encoding, max_bytes)


async def read_wish(receive: Receive, headers: Headers, max_bytes: int, decode: Callable[[bytes], WishT]) -> WishT:
    """`read_body`, decoded to something short, for requests that may wait for long: the body is counted no longer."""
    wish = decode(await read_body(receive, headers, max_bytes))
    let_go()
    return wish


def allow_bodies_of(max_body_bytes: int) -> None:
    """Make room for four of the longest bodies there may be. To be called at the start."""
    long_bodies.most_bytes = max(long_bodies.most_bytes, 4 * max_body_bytes)


async def hold(budget: Budget, size_bytes: int) -> None:
    """Count so much more until the current task ends or lets go. Raises `throttled` when no room comes in time."""
    task = asyncio.current_task()
    assert task is not None
    if task not in _holds:
        task.add_done_callback(_free)
    mine = _holds.setdefault(task, {}).setdefault(budget, Hold(budget))
    try:
        await mine.wait_for(size_bytes, budget.limit.wait_s)
    except TimeoutError:
        raise no_room(budget) from None


def let_go() -> None:
    """The current task keeps next to nothing of what it read."""
    task = asyncio.current_task()
    assert task is not None
    _free(task)


def _free(task: asyncio.Task[Any]) -> None:
    for one in _holds.pop(task, {}).values():
        one.close()


class Share:
    """What a message of a WebSocket that comes in pieces holds of both budgets, until nobody has it any more, nor the
    message that it is kept with.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._medium = Hold(medium_bodies)
        self._long = Hold(long_bodies)

    def reach(self, size_bytes: int) -> bool:
        """It is so long now; False: there is no room for that."""
        while self._medium.held_bytes + self._long.held_bytes < size_bytes:
            if self._medium.held_bytes < LONG_BYTES:
                has_room = self._medium.grow(COUNTED_FROM_BYTES)
            else:
                has_room = self._long.grow(LONG_BYTES)
            if not has_room:
                return False
        return True

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            # Not here: this may be any moment of any thread.
            self._loop.call_soon_threadsafe(self._medium.close)
            self._loop.call_soon_threadsafe(self._long.close)


def no_room(budget: Budget) -> TopicsError:
    """429: the budget is used up."""
    return budget.refused(
        f"the bodies of requests hold all of the {budget.most_bytes} bytes that they may; send it again later"
    )


async def _hold(size_bytes: int) -> None:
    """Room for a body, or a piece, of this size."""
    await hold(long_bodies if size_bytes > LONG_BYTES else medium_bodies, size_bytes)


async def _read_rest(receive: Receive, first: bytes, headers: Headers, max_bytes: int) -> bytes:
    chunks = [first]
    size = len(first)
    # With a length all of it is asked for at once, so that of those let in none waits again.
    length = _length(headers, max_bytes)
    room, more = COUNTED_FROM_BYTES, True
    while True:
        while size > room:  # one message may be several steps long
            if length or room < LONG_BYTES:
                await _hold(length or COUNTED_FROM_BYTES)
                room += length or COUNTED_FROM_BYTES
            else:
                await hold(long_bodies, LONG_BYTES)
                room += LONG_BYTES
        if not more:
            # From a MiB on, joining leaves the interpreter to others.
            return b"".join(chunks) if size <= INLINE_BYTES_MAX else await asyncio.to_thread(b"".join, chunks)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)


def _length(headers: Headers, max_bytes: int) -> int:
    """The length of the body, 0 if it is not known; the server has checked it."""
    length = headers.get(b"content-length", b"")
    return min(int(length), max_bytes) if length.isdigit() else 0


def _check_content_type(content_type: bytes | None) -> None:
    if content_type == b"application/json":
        return
    if content_type is None:
        raise TopicsError("unsupported_media_type", "a body needs Content-Type: application/json")
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        shown = content_type[:100].decode("latin-1")
        raise TopicsError("unsupported_media_type", f"Content-Type must be application/json, not {shown!r}")


async def _unpack(body: bytes, encoding: bytes, max_bytes: int) -> bytes:
    name = encoding.strip().lower()
    if name == b"identity":
        return body
    if name not in (b"gzip", b"x-gzip"):
        shown = encoding[:100].decode("latin-1")
        raise TopicsError("unsupported_media_type", f"Content-Encoding must be gzip or absent, not {shown!r}")
    # RFC 1952: the last four bytes are the size of what was packed. Who states less gets no more than that unpacked.
    stated = int.from_bytes(body[-4:], "little")
    if min(stated, max_bytes) > COUNTED_FROM_BYTES:
        await _hold(min(stated, max_bytes))
    if len(body) <= _UNZIP_INLINE_BYTES_MAX:
        return unzip(body, max_bytes, stated)
    return await asyncio.to_thread(unzip, body, max_bytes, stated)


def unzip(body: bytes, max_bytes: int, stated_bytes: int | None = None) -> bytes:
    """One gzip member of at most `max_bytes`, and `stated_bytes` if given; unpacks no more than one byte beyond."""
    unpacker = zlib.decompressobj(_GZIP_WBITS)
    most = max_bytes if stated_bytes is None else min(max_bytes, stated_bytes)
    try:
        unpacked = unpacker.decompress(body, most + 1)
    except zlib.error as error:
        raise invalid(f"the body is not gzip: {error}") from None
    if len(unpacked) > max_bytes:
        raise _too_large(max_bytes)
    if len(unpacked) > most:
        raise invalid(f"the gzip body holds more than the {most} bytes that its end states")
    if not unpacker.eof:
        raise invalid("the gzip body is cut short")
    if unpacker.unused_data:
        raise invalid(f"{len(unpacker.unused_data)} bytes follow the gzip body")
    return unpacked


def _too_large(max_bytes: int) -> TopicsError:
    return TopicsError(
        "payload_too_large", f"a body has at most {max_bytes} bytes (unpacked)", {"max_body_bytes": max_bytes}
    )
