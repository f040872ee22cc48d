"""What the API offers, route by route: the one table from which requests are routed and the OpenAPI document is made.

An operation without its description cannot be written down, so no route is without one.
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
"""What anything may be answered that a shard has to do."""


class Query(NamedTuple):
    """A query parameter: its JSON schema, and what it is for."""

    name: str
    schema: dict[str, Any]
    about: str


class Answer(NamedTuple):
    """A success: what its body is, by media type. None: no JSON, or none that has a type."""

    about: str
    bodies: dict[str, Any]


class Operation(NamedTuple):
    """One method of one path. `path` has its parameters in braces.

    `needs`: the scopes that a key must have, over the names in the path; None: the endpoint looks for itself, or asks
    for no key (`public`). `codes`: errors beyond those of `common_codes`. `timed`: as what its duration is measured.
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
        """Whether what it answers is an event stream."""
        return any(EVENTS in answer.bodies for answer in self.answers.values())

    @property
    def common_codes(self) -> tuple[str, ...]:
        """What any request of this kind may be answered."""
        codes = ["invalid_request", "throttled", "internal", "shutting_down"]
        if self.body is not None:
            codes += ["payload_too_large", "unsupported_media_type", "request_timeout"]
        if not self.public:
            codes += ["unauthorized", "forbidden", "not_ready"]
        return tuple(codes)


def json_answer(about: str, body: Any) -> Answer:
    """A success with a JSON body of this type."""
    return Answer(about, {JSON: body})


def flag_query(name: str, default: bool, about: str) -> Query:
    """`?name=true|false`."""
    return Query(name, {"type": "boolean", "default": default}, about)
