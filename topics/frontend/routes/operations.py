"""The operations of the API: requests are routed by them, and the OpenAPI document is made from them.

Each is written at the method that answers it. None can be without its description, so every route has one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeVar

from topics.core.keys import KeyScope
from topics.frontend.asgi import Receive, Scope, Send
from topics.shm.durations import Route

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
HandlerT = TypeVar("HandlerT", bound=Callable[..., Awaitable[Any]])

JSON: Final = "application/json"
TEXT: Final = "text/plain"
EVENTS: Final = "text/event-stream"
TOPIC_PATH: Final = "/v0/topics/{topic}"
LOST: Final = ("shard_unavailable", "storage_unavailable")
"""The errors of a request that a shard has to carry out."""
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
        """True if the answer is an event stream."""
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


def common_codes(has_body: bool, public: bool = False) -> tuple[str, ...]:
    """Return the errors that any request may be answered with."""
    codes = ["invalid_request", "throttled", "internal", "shutting_down"]
    if has_body:
        codes += ["payload_too_large", "unsupported_media_type", "request_timeout"]
    if not public:
        codes += ["unauthorized", "forbidden", "not_ready"]
    return tuple(codes)


def ok(about: str, body: Any, media: str = JSON) -> dict[int, Answer]:
    """Return one success, with a body of this type."""
    return {200: Answer(about, {media: body})}


def ok_or_created(about: str, about_created: str, body: Any) -> dict[int, Answer]:
    """Return the successes of an operation that may create something."""
    return ok(about, body) | {201: Answer(about_created, {JSON: body})}


def made_or_there(body: Any) -> dict[int, Answer]:
    """Return the successes of a `PUT`."""
    return ok_or_created("It was there", "It was made", body)


def flag_query(name: str, default: bool, about: str) -> Query:
    """Return the parameter `?name=true|false`."""
    return Query(name, {"type": "boolean", "default": default}, about)
