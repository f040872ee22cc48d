"""Answers that are event streams: which clients may open one, its head, and its writes until the client is gone."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, NamedTuple

from topics.core.errors import TopicsError
from topics.core.keys import ApiKey
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry.access import KeyLimits
from topics.frontend.entry.bodies import Headers
from topics.frontend.entry.responses import HeaderList, weight
from topics.frontend.live.push import AsgiPush, Push, until_disconnect
from topics.shm.cap import Cap, Counted

HEARTBEAT_MAX_MS: Final = 60_000
_HEAD: Final[HeaderList] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class StreamSlots:
    """Limits the open streams and WebSockets of the whole service (`places`) and of each key (api §11)."""

    def __init__(self, limits: KeyLimits, places: Cap) -> None:
        self._limits = limits
        self._places = places

    def hold(self, key: ApiKey) -> StreamSlot:
        """Count one stream of this key until the context ends. Raise `429 throttled`."""
        self._limits.acquire(key, Counted.STREAMS)
        if not self._places.claim():
            self._limits.release(key, Counted.STREAMS)
            raise self._places.reached()
        return StreamSlot(self, key)

    def release(self, key: ApiKey) -> None:
        """Give back what `hold` counted."""
        self._places.release()
        self._limits.release(key, Counted.STREAMS)


class StreamSlot(NamedTuple):
    """The count of one open stream, given back at the end of its context: small, since there are thousands."""

    slots: StreamSlots
    key: ApiKey

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.slots.release(self.key)


def check_accept(headers: Headers) -> None:
    """Raise `406 not_acceptable` if the client does not accept `text/event-stream`."""
    accept = headers.get(b"accept")
    if accept is not None and not weight(accept, b"text/event-stream"):
        shown = accept[:100].decode("latin-1")
        raise TopicsError("not_acceptable", f"this is a text/event-stream, which Accept: {shown} rules out")


def stopping() -> TopicsError:
    """Return the `503` for a stream that is opened while the service stops."""
    return TopicsError("shutting_down", "the service is stopping; ask again when it is back")


async def begin_stream(scope: Scope, send: Send) -> Push:
    """Send the head of an event stream, and return its writer."""
    await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
    extension = scope.get("extensions", {}).get("topics.push")
    push: Push = AsgiPush(send) if extension is None else extension()
    return push


def run_stream(push: Push, receive: Receive) -> Awaitable[None]:
    """Return when the stream is closed or its client is gone."""
    return push.run(receive) if isinstance(push, AsgiPush) else until_disconnect(receive)
