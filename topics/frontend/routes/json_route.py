"""Routes off the hot paths: a handler takes an `ApiRequest` and returns a `JsonReply`; `json_route` does the rest."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from starlette.datastructures import QueryParams

from topics.core.keys import ApiKey, KeyScope
from topics.core.names import check_topic_name
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import wire
from topics.frontend.entry.access import caller_of
from topics.frontend.entry.bodies import Headers, read_body
from topics.frontend.entry.query import name_after, page_size
from topics.frontend.entry.responses import LIST_BYTES_MAX, reserve_room, send_object
from topics.frontend.entry.wire import BodyT
from topics.frontend.routes.operations import asgi_route
from topics.shm.durations import Route

RoutesT = TypeVar("RoutesT")


class JsonReply(NamedTuple):
    """The answer of a handler, without its `performance`. `with_copies` is what `CatchingUp` returned."""

    answer: dict[str, Any]
    status: int = 200
    with_copies: bool = True


class ApiRequest:
    """One request as a handler reads it."""

    __slots__ = ("_receive", "headers", "scope")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.headers: Headers = dict(scope["headers"])
        self._receive = receive

    @property
    def topic(self) -> str:
        """The topic in the path. `400` for a name that no topic can have."""
        return check_topic_name(self.scope["path_params"]["topic"])

    @property
    def caller(self) -> ApiKey:
        """The key of the request."""
        return caller_of(self.scope)

    @property
    def query(self) -> QueryParams:
        return QueryParams(self.scope["query_string"])

    async def body(self, max_bytes: int) -> bytes:
        """Read the body (`entry.bodies.read_body`)."""
        return await read_body(self._receive, self.headers, max_bytes)

    async def decoded(self, body_type: type[BodyT], max_bytes: int, default: bytes = b"") -> BodyT:
        """Read the body and decode it. An empty one is decoded as `default`."""
        return wire.decode_as(body_type, await self.body(max_bytes) or default)

    async def list_page(self, check_name: Callable[[str], str]) -> tuple[int, str]:
        """Return the size of the page of a list, and the name that it follows, when there is room for its answer."""
        query = self.query
        size, after = page_size(query), name_after(query.get("cursor"), check_name)
        await reserve_room(self.scope, LIST_BYTES_MAX)
        return size, after


Handler = Callable[[RoutesT, ApiRequest], Awaitable[JsonReply]]
Method = Callable[[RoutesT, Scope, Receive, Send], Awaitable[None]]


def json_route(
    method: str, path: str, timed: Route | None, needs: KeyScope | None, tag: str
) -> Callable[[Handler[RoutesT]], Method[RoutesT]]:
    """Bind a handler as `asgi_route` does. Its reply is sent with the time since the request came (api §0.7)."""

    def bind(handle: Handler[RoutesT]) -> Method[RoutesT]:
        @asgi_route(method, path, timed, needs, tag)
        @wraps(handle)
        async def endpoint(self: RoutesT, scope: Scope, receive: Receive, send: Send) -> None:
            started_ns = time.perf_counter_ns()
            request = ApiRequest(scope, receive)
            answer, status, with_copies = await handle(self, request)
            await send_object(send, request.headers, status, answer, started_ns, with_copies=with_copies)

        return endpoint

    return bind
