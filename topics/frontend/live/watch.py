"""`POST /v0/watch` and `GET /v0/watch/:wid` (api §7): a session is made, and streamed on whatever frontend."""

from __future__ import annotations

import hmac
import time
from typing import Any, Final

from starlette.datastructures import QueryParams

from topics.api import answers
from topics.api.requests import WatchBody
from topics.core.errors import TopicsError
from topics.core.keys import ANYONE, ApiKey, KeyScope
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry import wire
from topics.frontend.entry.access import Access, caller_of
from topics.frontend.entry.bodies import Headers, read_body
from topics.frontend.entry.query import flag
from topics.frontend.entry.responses import HeaderList, send_object, weight
from topics.frontend.live import cursor
from topics.frontend.live.channels import StreamConnection
from topics.frontend.live.delivery import Hub
from topics.frontend.live.following import check_starts, check_strong, page_options, place, resolve
from topics.frontend.live.push import AsgiPush, until_disconnect
from topics.frontend.live.session_use import SESSION_TTL_MS, Follow, Opened, Session, SessionUse, without_nodes
from topics.frontend.live.stream import Stream
from topics.frontend.live.websocket import needs_upgrade
from topics.frontend.live.wording import EVENT_STREAM
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.node_sets import node_sets
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.reads.records import PageOptions
from topics.frontend.routes.operations import (
    EVENTS,
    LOST,
    TOPIC_LOST,
    Answer,
    ApiOperation,
    Binding,
    Outcome,
    Query,
    flag_query,
    ok,
)
from topics.settings import Settings
from topics.shm.cap import Cap, Counted
from topics.shm.durations import Route

HEARTBEAT_MAX_MS: Final = 60_000
EVENT_STREAM_HEADERS: Final[HeaderList] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class WatchRoutes:
    """One method for each method of HTTP; routing is the app's."""

    def __init__(
        self,
        reader: TopicReader,
        sessions: SessionUse,
        hub: Hub,
        access: Access,
        settings: Settings,
        places: Cap,
        catching_up: CatchingUp,
    ) -> None:
        """`places`: how many streams the whole service may have open."""
        self._reader = reader
        self._sessions = sessions
        self._hub = hub
        self._access = access
        self._settings = settings
        self._places = places
        self._catching_up = catching_up
        self._streams: dict[StreamConnection, Session] = {}
        access.on_change(self._end_forbidden)

    async def create(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_ns = time.perf_counter_ns()
        headers = dict(scope["headers"])
        lenient = flag(QueryParams(scope["query_string"]), "lenient", False)
        request = wire.decode_as(WatchBody, await read_body(receive, headers, self._settings.max_body_bytes))
        check_starts(request.topics, self._settings.max_watch_topics)
        caller = caller_of(scope)
        caller.require(KeyScope.READ, request.topics)
        await self._catching_up.wait_for_all(request.topics)
        found = {name: ref for name in request.topics if (ref := self._find(name, lenient)) is not None}
        follows = {
            name: Follow(ref.view.topic_id, resolve(self._reader, ref, request.topics[name]))
            for name, ref in found.items()
        }
        if request.strong:
            check_strong(found)
        states = {name: place(self._reader, ref, follows[name].from_seq) for name, ref in found.items()}
        options = page_options(request, self._settings)
        wid = await self._sessions.create(
            Session(
                follows,
                None if options.nodes is None else sorted(options.nodes),
                options.limit,
                options.max_batch_bytes,
                max(self._settings.test_min_heartbeat_ms, min(request.heartbeat_ms, HEARTBEAT_MAX_MS)),
                options.include_tags,
                options.include_meta,
                options.include_data,
                request.strong,
                caller.digest,
            )
        )
        answer: dict[str, Any] = {
            "wid": wid,
            "stream_url": f"/v0/watch/{wid}",
            "session_ttl_ms": SESSION_TTL_MS,
            "topics": states,
        }
        await send_object(send, headers, 200, answer, started_ns)

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        accept = headers.get(b"accept")
        if accept is not None and not accepts_event_stream(accept):
            shown = accept[:100].decode("latin-1")
            raise TopicsError("not_acceptable", f"this is a text/event-stream, which Accept: {shown} rules out")
        wid = scope["path_params"]["wid"]
        caller = ANYONE
        if self._access.on:
            caller = self._admit(await self._sessions.look(wid), scope)
        # Before the session is taken over: who is refused must not end the stream that has it.
        self._access.limits.take(caller, Counted.STREAMS)
        try:
            if not self._places.claim():
                raise self._places.reached()
            try:
                await self._stream(wid, headers, scope, receive, send)
            finally:
                self._places.release()
        finally:
            self._access.limits.give_back(caller, Counted.STREAMS)

    async def _stream(self, wid: str, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        opened = await self._sessions.open(wid)
        connection: StreamConnection | None = None
        try:
            stream = self._resume(opened, headers.get(b"last-event-id"))
            opened = without_nodes(opened)  # which its plan has, as a set that many may share
            if self._hub.draining:
                raise TopicsError("shutting_down", "the service is stopping; ask again when it is back")
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
            extension = scope.get("extensions", {}).get("topics.push")
            push = AsgiPush(send) if extension is None else extension()
            connection = self._hub.open(push, stream, opened.session.heartbeat_ms)
            self._streams[connection] = opened.session
            # Other keys may count since it was admitted.
            self._end_if_forbidden(connection, opened.session)
            await (push.run(receive) if isinstance(push, AsgiPush) else until_disconnect(receive))
        finally:
            if connection is None:
                self._sessions.give_back(opened)
            else:
                del self._streams[connection]
                self._hub.close(connection)
                self._sessions.close(opened, connection.stream.places())

    def _admit(self, session: Session, scope: Scope) -> ApiKey:
        """Before anything of the session is touched: whoever learned of a wid without its key must not disturb it."""
        caller = self._access.caller(scope, token=True)
        if not hmac.compare_digest(caller.digest, session.key_digest):
            raise TopicsError("unauthorized", "this watch session belongs to another key, which alone may stream it")
        caller.require(KeyScope.READ, session.topics)
        return caller

    def _end_forbidden(self) -> None:
        """Other keys count now: a stream may not outlive the right to it."""
        for connection, session in list(self._streams.items()):
            self._end_if_forbidden(connection, session)

    def _end_if_forbidden(self, connection: StreamConnection, session: Session) -> None:
        if not connection.closed and not self._access.still_allows(session.key_digest, KeyScope.READ, session.topics):
            connection.push.write(EVENT_STREAM.final("forbidden", "the key of this stream is no longer valid for it"))
            self._hub.close(connection)

    def _find(self, name: str, lenient: bool) -> TopicRef | None:
        return self._reader.find(name) if lenient else self._reader.get(name)

    def _resume(self, opened: Opened, last_event_id: bytes | None) -> Stream:
        """Where the session's stream goes on, given what the client says it has seen."""
        session, follows = opened.session, opened.session.topics
        stored = opened.positions
        if stored is None:
            stored = {name: follow.from_seq for name, follow in follows.items()}
        seen = None if last_event_id is None else cursor.decode(last_event_id)
        heads = {}
        if seen and not opened.exact:
            for name in seen.keys() & follows.keys():
                ref = self._reader.find(name)
                if ref is not None and ref.view.topic_id == follows[name].topic_id:
                    heads[name] = ref.view.head_seq
        plan = self._hub.plans.get(
            tuple(follows),
            tuple(follow.topic_id for follow in follows.values()),
            PageOptions(
                session.limit,
                session.max_batch_bytes,
                # Not to be refused here: the session has been taken over, from a stream that may be well.
                None if session.nodes is None else node_sets.keep(frozenset(session.nodes), admitted=True),
                session.include_tags,
                session.include_meta,
                session.include_data,
            ),
            session.strong,
        )
        return plan.start(cursor.resume(follows.keys(), stored, seen, opened.exact, heads))


def accepts_event_stream(accept: bytes) -> bool:
    """Tell whether an Accept header allows `text/event-stream`."""
    return weight(accept, b"text/event-stream") > 0


def watch_operations(watch: WatchRoutes) -> list[ApiOperation]:
    """Event streams and WebSockets (api §7)."""
    events = ok("Events: record, tombstone, caught-up, topic-deleted, error", None, EVENTS)
    upgrade = {101: Answer("Switching to WebSocket", {})}
    return [
        ApiOperation(
            Binding("POST", "/v0/watch", watch.create, Route.CREATE_WATCH, KeyScope.READ, "watch"),
            Outcome("Make a watch session", ok("The session", answers.WatchAnswer), TOPIC_LOST),
            body=WatchBody,
            query=(flag_query("lenient", False, "leave out topics that do not exist"),),
        ),
        ApiOperation(
            # An unknown wid is 404 whoever asks, so it looks for the key itself.
            Binding("GET", "/v0/watch/{wid}", watch.stream, None, None, "watch"),
            Outcome("The event stream of a session", events, ("not_found", "not_acceptable", *LOST)),
            query=(Query("token", {"type": "string"}, "the key, for who cannot send a header"),),
        ),
        ApiOperation(
            Binding("GET", "/v0/ws", needs_upgrade, None, None, "watch"),
            Outcome("A WebSocket: subscribe, unsubscribe, publish, ping (api §7.7)", upgrade, ("upgrade_required",)),
        ),
    ]
