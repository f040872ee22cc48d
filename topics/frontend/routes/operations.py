"""The shape of the table of what the API offers: it routes the requests, and the OpenAPI document is made of it.

An operation cannot be written down without its description, so every route has one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from topics.core.keys import KeyScope
from topics.frontend.asgi import Receive, Scope, Send
from topics.shm.durations import Route

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON: Final = "application/json"
TEXT: Final = "text/plain"
EVENTS: Final = "text/event-stream"
LOST: Final = ("shard_unavailable", "storage_unavailable")
"""The errors of a request that a shard has to carry out."""


class Query(NamedTuple):
    """A query parameter: its JSON schema and its purpose."""

    name: str
    schema: dict[str, Any]
    about: str


class Answer(NamedTuple):
    """A success: the type of its body for each media type. None: it is no JSON, or has no type of its own."""

    about: str
    bodies: dict[str, Any]


class Binding(NamedTuple):
    """The requests of an operation and the endpoint that answers them. `path` has its parameters in braces.

    `timed` is what the duration is measured as. A key must have the scopes `needs` over the names in the path; None:
    the endpoint looks at the key itself, or asks for none. `tag` is the section of the document.
    """

    method: str
    path: str
    endpoint: Endpoint
    timed: Route | None
    needs: KeyScope | None
    tag: str


class ApiOperation(NamedTuple):
    """One method of one path, and what the document says about it. `codes` are errors beyond `common_codes`."""

    binding: Binding
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

    @property
    def common_codes(self) -> tuple[str, ...]:
        """The errors that any request of this kind may be answered with."""
        codes = ["invalid_request", "throttled", "internal", "shutting_down"]
        if self.body is not None:
            codes += ["payload_too_large", "unsupported_media_type", "request_timeout"]
        if not self.public:
            codes += ["unauthorized", "forbidden", "not_ready"]
        return tuple(codes)


def json_answer(about: str, body: Any) -> Answer:
    """A success with a JSON body of this type."""
    return Answer(about, {JSON: body})


def made_or_there(body: Any) -> dict[int, Answer]:
    """The successes of a `PUT`."""
    return {200: json_answer("It was there", body), 201: json_answer("It was made", body)}


def flag_query(name: str, default: bool, about: str) -> Query:
    """`?name=true|false`."""
    return Query(name, {"type": "boolean", "default": default}, about)
