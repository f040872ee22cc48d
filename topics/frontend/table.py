"""The operations on topics, watches and the service itself. Each further kind of operations has a list like this."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from topics.api import answers as answer
from topics.api.requests import AppendBody, DeleteBody, DiffBody, GivenConfig, WatchBody
from topics.core.keys import KeyScope
from topics.frontend.append import AppendRoute
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.live.watch import WatchRoutes
from topics.frontend.live.websocket_route import needs_upgrade
from topics.frontend.metrics import MetricsRoute
from topics.frontend.operations import (
    EVENTS,
    JSON,
    LOST,
    TEXT,
    Answer,
    Endpoint,
    Operation,
    Query,
    flag_query,
    json_answer,
)
from topics.frontend.probes import ProbeRoutes
from topics.frontend.reads.diff import DiffRoute
from topics.frontend.topics import TopicRoutes
from topics.shm.durations import Route

NamedEndpoint = Callable[[str, Scope, Receive, Send], Awaitable[None]]

_TOPIC: Final = "/v0/topics/{topic}"
_PAGE_SIZE: Final = {"type": "integer", "minimum": 0, "default": 100}


def topic_operations(append: AppendRoute, diff: DiffRoute, topics: TopicRoutes) -> list[Operation]:
    """Lists, configuration, writes, reads and deletions (api §1 to §5)."""
    return [
        Operation(
            "GET",
            "/v0/topics",
            topics.list_all,
            Route.LIST_TOPICS,
            KeyScope.READ,
            "topics",
            "List topics by name",
            {200: json_answer("A page of topics", answer.TopicList)},
            query=(
                Query("prefix", {"type": "string"}, "only names that begin with it"),
                Query("page_size", _PAGE_SIZE, "at most 1000"),
                Query("cursor", {"type": "string"}, "next_cursor of the page before"),
                flag_query("touch", False, "whether this counts as reading the topics"),
            ),
        ),
        Operation(
            "GET",
            _TOPIC,
            topics.get,
            Route.GET_TOPIC,
            KeyScope.READ,
            "topics",
            "The state of a topic",
            {200: json_answer("The topic", answer.TopicState)},
            ("topic_not_found",),
            query=(flag_query("touch", True, "whether this counts as reading the topic"),),
        ),
        Operation(
            "PUT",
            _TOPIC,
            topics.put,
            Route.PUT_TOPIC,
            KeyScope.ADMIN,
            "topics",
            "Create a topic, or replace its configuration",
            {
                200: json_answer("It was there", answer.PutTopicAnswer),
                201: json_answer("It was created", answer.PutTopicAnswer),
            },
            ("topic_exists_incompatible", *LOST),
            body=GivenConfig,
            body_required=False,
        ),
        Operation(
            "DELETE",
            _TOPIC,
            topics.delete,
            Route.DELETE_TOPIC,
            KeyScope.DELETE,
            "topics",
            "Delete a topic and all of its records",
            {200: json_answer("It is gone", answer.DeleteTopicAnswer)},
            ("topic_not_empty", *LOST),
            query=(flag_query("if_empty", False, "only a topic without records"),),
        ),
        Operation(
            "POST",
            _TOPIC,
            of_topic(append),
            Route.APPEND,
            KeyScope.WRITE,
            "records",
            "Append records, all or none",
            {
                200: json_answer("Appended", answer.AppendAnswer),
                201: json_answer("Appended, and the topic created", answer.AppendAnswer),
            },
            (
                "batch_too_large",
                "record_too_large",
                "topic_not_found",
                "not_a_queue",
                "head_mismatch",
                "fenced",
                "out_of_order",
                "topic_full",
                *LOST,
            ),
            body=AppendBody,
            query=(flag_query("return_seqs", True, "whether the answer lists the seqs"),),
        ),
        Operation(
            "POST",
            f"{_TOPIC}/diff",
            of_topic(diff),
            Route.DIFF,
            KeyScope.READ,
            "records",
            "Read what follows a cursor, or wait for it",
            {200: json_answer("A page of records", answer.DiffAnswer)},
            ("topic_not_found", "storage_unavailable"),
            body=DiffBody,
        ),
        Operation(
            "POST",
            f"{_TOPIC}/delete",
            topics.delete_records,
            Route.DELETE_RECORDS,
            KeyScope.DELETE,
            "records",
            "Delete records by seq, by tag, or both",
            {200: json_answer("They are gone", answer.DeleteRecordsAnswer)},
            ("topic_not_found", *LOST),
            body=DeleteBody,
        ),
    ]


def watch_operations(watch: WatchRoutes) -> list[Operation]:
    """Event streams and WebSockets (api §7)."""
    return [
        Operation(
            "POST",
            "/v0/watch",
            watch.create,
            Route.CREATE_WATCH,
            KeyScope.READ,
            "watch",
            "Make a watch session",
            {200: json_answer("The session", answer.WatchAnswer)},
            ("topic_not_found", *LOST),
            body=WatchBody,
            query=(flag_query("lenient", False, "leave out topics that do not exist"),),
        ),
        Operation(
            "GET",
            "/v0/watch/{wid}",
            watch.stream,
            None,
            # An unknown wid is 404 whoever asks, so it looks for the key itself.
            None,
            "watch",
            "The event stream of a session",
            {200: Answer("Events: record, tombstone, caught-up, topic-deleted, error", {EVENTS: None})},
            ("not_found", "not_acceptable", *LOST),
            query=(Query("token", {"type": "string"}, "the key, for who cannot send a header"),),
        ),
        Operation(
            "GET",
            "/v0/ws",
            needs_upgrade,
            None,
            None,
            "watch",
            "A WebSocket: subscribe, unsubscribe, publish, ping (api §7.7)",
            {101: Answer("Switching to WebSocket", {})},
            ("upgrade_required",),
        ),
    ]


def service_operations(probes: ProbeRoutes, metrics: MetricsRoute, probe_auth: bool) -> list[Operation]:
    """Probes and metrics (api §8)."""
    needs = KeyScope.NONE if probe_auth else None
    health = {200: json_answer("It answers", answer.Health)}
    ready = {200: json_answer("All topics can be read", answer.Ready)}
    return [
        *(
            Operation(
                "GET", path, probes.health, Route.HEALTH, needs, "service", "Alive?", health, public=not probe_auth
            )
            for path in ("/v0/health", "/healthz")
        ),
        *(
            Operation(
                "GET",
                path,
                probes.ready,
                Route.READY,
                needs,
                "service",
                "Recovered?",
                ready,
                ("not_ready",),
                public=not probe_auth,
            )
            for path in ("/v0/ready", "/readyz")
        ),
        Operation(
            "GET",
            "/v0/metrics",
            metrics.get,
            Route.METRICS,
            KeyScope.READ,
            "service",
            "Metrics of the whole service",
            {200: Answer("Prometheus text, or JSON by Accept", {TEXT: None, JSON: dict[str, Any]})},
        ),
    ]


def of_topic(endpoint: NamedEndpoint) -> Endpoint:
    """An endpoint that is also reached without the router, with the topic's name."""

    async def with_name(scope: Scope, receive: Receive, send: Send) -> None:
        await endpoint(scope["path_params"]["topic"], scope, receive, send)

    return with_name
