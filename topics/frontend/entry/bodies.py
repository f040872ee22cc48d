"""Request bodies: read whole, bounded, unpacked, checked for their content type, and counted while they are in memory.

    read_body ──▶ reserve(its length) ──▶ unpacked, decoded ──▶ handled: the request's task ends ──▶ released
                     │ waits in a queue                    └─▶ release_body: little of it is kept
                     └─▶ 429 throttled

While a body waits for room it is not read, so TCP holds up its client. If two bodies wait for each other's room, one
times out. Bodies of up to 1 MiB have their own budget, since four slow clients can fill that of the long ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

from topics.core.errors import TopicsError, invalid
from topics.frontend.asgi import Receive
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget, Reservation

Headers = dict[bytes, bytes]
RequestT = TypeVar("RequestT")

_GZIP_WBITS: Final = 31
_UNZIP_INLINE_BYTES_MAX: Final = 1024  # a longer body may unpack to more than 1 MiB, so a thread unpacks it

COUNTED_FROM_BYTES: Final = 64 << 10
"""Shorter bodies are not counted: a connection or HTTP/2 stream has at most one of them."""
LONG_BYTES: Final = 1 << 20
"""Longer bodies count in `long_bodies`."""

# One event loop and all routes share them, so they are the process's.
medium_bodies: Final = Budget(limits.MEDIUM_BODIES)
long_bodies: Final = Budget(limits.LONG_BODIES)
_reservations: Final[dict[asyncio.Task[Any], dict[Budget, Reservation]]] = {}


class ClientGoneError(Exception):
    """The client closed the connection before its answer."""


_SINGLE: Final = (b"host", b"content-length", b"content-type", b"idempotency-key", b"last-event-id", b"authorization")


def check_repeated(headers: Collection[tuple[bytes, bytes]]) -> None:
    """Raise `400` for a header that has two values and may have one: it is not known which one is meant. Two of Origin
    are another page's (`access.py`).
    """
    if len(headers) > len(dict(headers)):
        for single in _SINGLE:
            if len({value for name, value in headers if name == single}) > 1:
                name = single.decode().title()
                raise invalid(f"header {name} is there twice, with different values: send one", field=name)


async def read_body(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    """Return the unpacked body, JSON by its content type, or empty (api §0.2). A long one counts until the task ends.
    Raise `payload_too_large`, `throttled`, `unsupported_media_type`, `invalid_request`; ClientGoneError.
    """
    content_length = headers.get(b"content-length", b"")
    length = int(content_length) if content_length.isdigit() else 0
    if length > max_bytes:
        raise _too_large(max_bytes)  # before any of it is asked for
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        body = await _read_rest(receive, body, length, max_bytes)
    elif len(body) > COUNTED_FROM_BYTES:
        await _reserve(len(body))
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    if not body:
        return body
    _check_content_type(headers.get(b"content-type"))
    encoding = headers.get(b"content-encoding")
    if encoding is None:
        return body
    return await _unpack(body, encoding, max_bytes)


async def read_request(
    receive: Receive, headers: Headers, max_bytes: int, decode: Callable[[bytes], RequestT]
) -> RequestT:
    """Return `decode` of the body, which no longer counts. For requests that are short once decoded and may wait."""
    request = decode(await read_body(receive, headers, max_bytes))
    release_body()
    return request


async def reserve(budget: Budget, size_bytes: int) -> None:
    """Count `size_bytes` more until the current task ends. Raise `throttled` if no room comes free in time."""
    task = asyncio.current_task()
    assert task is not None
    if task not in _reservations:
        task.add_done_callback(_release)
    reservation = _reservations.setdefault(task, {}).setdefault(budget, Reservation(budget))
    del task  # breaks a reference cycle: a task that is cancelled here keeps this frame
    try:
        await reservation.grow(size_bytes, budget.limit.wait_s)
    except TimeoutError:
        raise no_room(budget) from None


def release_body() -> None:
    """Stop counting the body of the current task, which keeps next to nothing of it."""
    if not _reservations:  # short bodies are not counted, and to find the task is a system call
        return
    task = asyncio.current_task()
    assert task is not None
    _release(task)


def _release(task: asyncio.Task[Any]) -> None:
    for reservation in _reservations.pop(task, {}).values():
        reservation.close()


class MessageReservation:
    """The room of one WebSocket message in both budgets. It is released when nothing refers to it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._medium = Reservation(medium_bodies)
        self._long = Reservation(long_bodies)

    def reach(self, size_bytes: int) -> bool:
        """Grow to `size_bytes`; False if there is no room."""
        while self._medium.held_bytes + self._long.held_bytes < size_bytes:
            if self._medium.held_bytes < LONG_BYTES:
                has_room = self._medium.try_grow(COUNTED_FROM_BYTES)
            else:
                has_room = self._long.try_grow(LONG_BYTES)
            if not has_room:
                return False
        return True

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            # The loop closes it: this may run in any thread, in the middle of anything.
            self._loop.call_soon_threadsafe(self._medium.close)
            self._loop.call_soon_threadsafe(self._long.close)


def no_room(budget: Budget) -> TopicsError:
    return budget.refused(f"request bodies fill all of their {budget.most_bytes} bytes of memory; send it again later")


async def _reserve(size_bytes: int) -> None:
    await reserve(long_bodies if size_bytes > LONG_BYTES else medium_bodies, size_bytes)


async def _read_rest(receive: Receive, first: bytes, length: int, max_bytes: int) -> bytes:
    """Return the whole body. Its `length`, if it is known and not 0, is reserved at once: a body that was let in does
    not wait again.
    """
    chunks = [first]
    size = len(first)
    room, more = COUNTED_FROM_BYTES, True
    while True:
        while size > room:  # one message may be several steps long
            if length or room < LONG_BYTES:
                await _reserve(length or COUNTED_FROM_BYTES)
                room += length or COUNTED_FROM_BYTES
            else:
                await reserve(long_bodies, LONG_BYTES)
                room += LONG_BYTES
        if not more:
            # Joining 1 MiB or more takes so long that a thread does it.
            return b"".join(chunks) if size <= LONG_BYTES else await asyncio.to_thread(b"".join, chunks)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)


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
    # RFC 1952: the last four bytes state the unpacked size. No more than that is unpacked.
    stated = int.from_bytes(body[-4:], "little")
    if min(stated, max_bytes) > COUNTED_FROM_BYTES:
        await _reserve(min(stated, max_bytes))
    if len(body) <= _UNZIP_INLINE_BYTES_MAX:
        return unzip(body, max_bytes, stated)
    return await asyncio.to_thread(unzip, body, max_bytes, stated)


def unzip(body: bytes, max_bytes: int, stated_bytes: int | None = None) -> bytes:
    """Unpack one gzip member, never more than a byte beyond `max_bytes` and the `stated_bytes`."""
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
