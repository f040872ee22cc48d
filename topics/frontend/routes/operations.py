"""The operations of the API. Requests are routed by them, and the OpenAPI document is made from them.

An operation is written, with its description, at the method that answers it. Off the hot paths such a method takes an
`ApiRequest` and returns a `JsonReply`; `json_route` does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Final, NamedTuple, TypeVar

from starlette.datastructures import QueryParams

from topics.core.keys import ApiKey, KeyScope
from topics.core.names import check_topic_name
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import wire
from topics.frontend.entry.access import caller_of
from topics.frontend.entry.bodies import Headers, read_body
from topics.frontend.entry.responses import LIST_BYTES_MAX, elapsed_ms, encode_json, reserve_room, send_json
from topics.frontend.entry.wire import BodyT, name_after, page_size
from topics.shm.durations import Route

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
HandlerT = TypeVar("HandlerT", bound=Callable[..., Awaitable[Any]])

JSON: Final = "application/json"
TEXT: Final = "text/plain"
EVENTS: Final = "text/event-stream"
TOPIC_PATH: Final = "/v0/topics/{topic}"
LOST: Final = ("shard_unavailable", "storage_unavailable")
"""Error codes of any request that a shard has to carry out."""
TOPIC_LOST: Final = ("topic_not_found", *LOST)
STRING: Final = {"type": "string"}
COUNT: Final = {"type": "integer", "minimum": 0}


class Query(NamedTuple):
    """A query parameter: its JSON schema and its purpose."""

    name: str
    schema: dict[str, Any]
    about: str


PAGED: Final = (
    Query("page_size", COUNT | {"default": 100}, "at most 1000"),
    Query("cursor", STRING, "next_cursor of the page before"),
)
"""The parameters of every list (api §0.8)."""


class Answer(NamedTuple):
    """A success: the type of its body for each media type; None for a body that is no JSON or has no type."""

    about: str
    bodies: dict[str, Any]


class ApiOperation(NamedTuple):
    """One method of one path, the endpoint that answers it, and its description. `path` has its parameters in braces.

    The duration is measured as `timed`. A key must have the scopes `needs` over the names in the path; None: the
    endpoint checks the key itself, or asks for none (`public`). `tag` is the section of the document, `answers` are by
    status, `codes` are the errors beyond `common_codes`, `body` is the type of the request's body.
    """

    method: str
    path: str
    endpoint: Endpoint
    timed: Route | None
    needs: KeyScope | None
    tag: str
    summary: str
    answers: dict[int, Answer]
    codes: tuple[str, ...] = ()
    body: Any = None
    body_required: bool = True
    query: tuple[Query, ...] = ()
    public: bool = False

    @property
    def is_stream(self) -> bool:
        return any(EVENTS in answer.bodies for answer in self.answers.values())


# -- decorators that write an operation at the method that answers it


def asgi_route(
    method: str, path: str, timed: Route | None, needs: KeyScope | None, tag: str
) -> Callable[[HandlerT], HandlerT]:
    """Bind an endpoint to the requests that it answers. Its description is below, by `describe` and `takes`."""
    return _note(method=method, path=path, timed=timed, needs=needs, tag=tag)


def describe(summary: str, answers: dict[int, Answer], *codes: str) -> Callable[[HandlerT], HandlerT]:
    return _note(summary=summary, answers=answers, codes=codes)


def takes(*query: Query, body: Any = None, body_required: bool = True) -> Callable[[HandlerT], HandlerT]:
    return _note(query=query, body=body, body_required=body_required)


def _note(**members: object) -> Callable[[HandlerT], HandlerT]:
    """Return a decorator that keeps these members of an operation with a handler, for `operations_of`."""

    def note(handle: HandlerT) -> HandlerT:
        handle.__dict__.setdefault("operation", {}).update(members)
        return handle

    return note


def operations_of(routes: object) -> list[ApiOperation]:
    """Return the operations that the methods of `routes` answer, in the order in which these are written."""
    return [
        ApiOperation(endpoint=getattr(routes, name), **member.operation)
        for name, member in vars(type(routes)).items()
        if hasattr(member, "operation")
    ]


def common_codes(has_body: bool, public: bool = False, only_reads: bool = False) -> tuple[str, ...]:
    """Return the errors that any request may be answered with."""
    codes = ["invalid_request", "throttled", "internal", "shutting_down"]
    if has_body:
        codes += ["payload_too_large", "unsupported_media_type", "request_timeout"]
    if not public:
        codes += ["unauthorized", "forbidden", "not_ready"] + ["not_leader"] * (not only_reads)
    return tuple(codes)


def ok(about: str, body: Any, media: str = JSON) -> dict[int, Answer]:
    return {200: Answer(about, {media: body})}


def ok_or_created(about: str, about_created: str, body: Any) -> dict[int, Answer]:
    return ok(about, body) | {201: Answer(about_created, {JSON: body})}


def made_or_there(body: Any) -> dict[int, Answer]:
    return ok_or_created("It was there", "It was made", body)


def flag_query(name: str, default: bool, about: str) -> Query:
    return Query(name, {"type": "boolean", "default": default}, about)


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
        return caller_of(self.scope)

    @property
    def query(self) -> QueryParams:
        return QueryParams(self.scope["query_string"])

    async def body(self, max_bytes: int) -> bytes:
        return await read_body(self._receive, self.headers, max_bytes)

    async def decoded(self, body_type: type[BodyT], max_bytes: int, default: bytes = b"") -> BodyT:
        """Read the body and decode it. An empty one is decoded as `default`."""
        return wire.decode_as(body_type, await self.body(max_bytes) or default)

    async def list_page(self, check_name: Callable[[str], str]) -> tuple[int, str]:
        """Return the size of the page of a list, and the name that it follows, when there is room for its answer."""
        query = self.query
        size, after = page_size(query), name_after(wire.parameter(query, "cursor"), check_name)
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
            copies = {} if with_copies else {"copies_pending": True}
            answer["performance"] = {"server_total_ms": elapsed_ms(started_ns), **copies}
            await send_json(send, request.headers, status, encode_json(answer))

        return endpoint

    return bind
