"""`POST /v0/watch` creates a session, `GET /v0/watch/:wid` streams it on any frontend (api §7)."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Final

from topics.api import answers
from topics.api.requests import WatchBody
from topics.core.errors import TopicsError
from topics.core.keys import ANYONE, ApiKey, KeyScope
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry.access import Access
from topics.frontend.entry.bodies import Headers
from topics.frontend.entry.query import flag
from topics.frontend.live import cursor, event_streams
from topics.frontend.live.channels import StreamConnection
from topics.frontend.live.delivery import Hub
from topics.frontend.live.event_streams import HEARTBEAT_MAX_MS, StreamSlots
from topics.frontend.live.following import check_starts, check_strong, start_seq, topic_state
from topics.frontend.live.session_client import SESSION_TTL_MS, Follow, Opened, Session, SessionClient, without_nodes
from topics.frontend.live.stream import StreamSpec, StreamState
from topics.frontend.live.wording import EVENT_STREAM
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.diff import page_options
from topics.frontend.reads.node_sets import node_sets
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.reads.records import PageOptions
from topics.frontend.routes.json_route import ApiRequest, JsonReply, json_route
from topics.frontend.routes.operations import (
    EVENTS,
    LOST,
    STRING,
    TOPIC_LOST,
    Query,
    asgi_route,
    describe,
    flag_query,
    ok,
    takes,
)
from topics.frontend.shards.gateway import stopping
from topics.settings import Settings
from topics.shm.durations import Route

_EVENTS: Final = ok("Events: record, tombstone, caught-up, topic-deleted, error", None, EVENTS)


@dataclass(eq=False)
class WatchRoutes:
    """The handlers of watch sessions. Ends streams whose keys are no longer valid."""

    reader: TopicReader
    sessions: SessionClient
    hub: Hub
    access: Access
    settings: Settings
    slots: StreamSlots
    catching_up: CatchingUp
    _streams: dict[StreamConnection, Session] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.access.on_change(self._end_forbidden)

    @json_route("POST", "/v0/watch", Route.CREATE_WATCH, KeyScope.READ, "watch")
    @describe("Make a watch session", ok("The session", answers.WatchAnswer), *TOPIC_LOST)
    @takes(flag_query("lenient", False, "leave out topics that do not exist"), body=WatchBody)
    async def create(self, request: ApiRequest) -> JsonReply:
        lenient = flag(request.query, "lenient", False)
        body = await request.decoded(WatchBody, self.settings.max_body_bytes)
        check_starts(body.topics, self.settings.max_watch_topics)
        request.caller.require(KeyScope.READ, body.topics)
        await self.catching_up.wait_for_all(body.topics)
        found = {name: ref for name in body.topics if (ref := self._find(name, lenient)) is not None}
        follows = {
            name: Follow(ref.view.topic_id, start_seq(self.reader, ref, body.topics[name]))
            for name, ref in found.items()
        }
        if body.strong:
            check_strong(found)
        states = {name: topic_state(self.reader, ref, follows[name].from_seq) for name, ref in found.items()}
        options = page_options(body, self.settings)
        wid = await self.sessions.create(
            Session(
                follows,
                None if options.nodes is None else sorted(options.nodes),
                options.limit,
                options.max_batch_bytes,
                max(self.settings.test_min_heartbeat_ms, min(body.heartbeat_ms, HEARTBEAT_MAX_MS)),
                options.include_tags,
                options.include_meta,
                body.include_data,
                body.strong,
                request.caller.digest,
            )
        )
        stream_url = f"/v0/watch/{wid}"
        return JsonReply({"wid": wid, "stream_url": stream_url, "session_ttl_ms": SESSION_TTL_MS, "topics": states})

    # An unknown wid is 404 for any key, so the key is checked here.
    @asgi_route("GET", "/v0/watch/{wid}", None, None, "watch")
    @describe("The event stream of a session", _EVENTS, "not_found", "not_acceptable", *LOST)
    @takes(Query("token", STRING, "the key, for clients that cannot send a header"))
    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        event_streams.check_accept(headers)
        wid = scope["path_params"]["wid"]
        caller = ANYONE
        if self.access.on:
            caller = self._admit(await self.sessions.get(wid), scope)
        # Before the session is opened: a refused request must not end the stream that has it.
        with self.slots.hold(caller):
            await self._stream(wid, headers, scope, receive, send)

    async def _stream(self, wid: str, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        opened = await self.sessions.open(wid)
        connection: StreamConnection | None = None
        try:
            state = self._resume(opened, headers.get(b"last-event-id"))
            opened = without_nodes(opened)  # its spec has them, as a set that streams share
            if self.hub.draining:
                raise stopping()
            push = await event_streams.begin_stream(scope, send)
            connection = self.hub.open(push, state, opened.session.heartbeat_ms)
            self._streams[connection] = opened.session
            # The keys may have changed since it was admitted.
            self._end_if_forbidden(connection, opened.session)
            await event_streams.run_stream(push, receive)
        finally:
            if connection is None:
                self.sessions.abandon(opened)
            else:
                del self._streams[connection]
                self.hub.close(connection)
                self.sessions.close(opened, connection.state.cursor())

    def _admit(self, session: Session, scope: Scope) -> ApiKey:
        """Return the key that may stream the session. A wid alone gives no access to it."""
        caller = self.access.authenticate(scope, token=True)
        if not hmac.compare_digest(caller.digest, session.key_digest):
            raise TopicsError("unauthorized", "this watch session belongs to another key, which alone may stream it")
        caller.require(KeyScope.READ, session.topics)
        return caller

    def _end_forbidden(self) -> None:
        """End the streams whose keys are no longer valid for them."""
        for connection, session in list(self._streams.items()):
            self._end_if_forbidden(connection, session)

    def _end_if_forbidden(self, connection: StreamConnection, session: Session) -> None:
        if not connection.closed and not self.access.still_allows(session.key_digest, KeyScope.READ, session.topics):
            connection.push.write(EVENT_STREAM.final("forbidden", "the key of this stream is no longer valid for it"))
            self.hub.close(connection)

    def _find(self, name: str, lenient: bool) -> TopicRef | None:
        return self.reader.find(name) if lenient else self.reader.get(name)

    def _resume(self, opened: Opened, last_event_id: bytes | None) -> StreamState:
        """Return the state from which the session's stream continues. `last_event_id` says what the client has seen."""
        session, follows = opened.session, opened.session.topics
        stored = opened.positions
        if stored is None:
            stored = {name: follow.from_seq for name, follow in follows.items()}
        seen = None if last_event_id is None else cursor.decode(last_event_id)
        heads = {}
        if seen and not opened.exact:
            for name in seen.keys() & follows.keys():
                ref = self.reader.find(name)
                if ref is not None and ref.view.topic_id == follows[name].topic_id:
                    heads[name] = ref.view.head_seq
        spec = StreamSpec(
            tuple(follows),
            tuple(follow.topic_id for follow in follows.values()),
            PageOptions(
                session.limit,
                session.max_batch_bytes,
                # Never refused: opening the session has ended its former stream.
                None if session.nodes is None else node_sets.keep(frozenset(session.nodes), admitted=True),
                session.include_tags,
                session.include_meta,
                session.include_data,
            ),
            session.strong,
        )
        return self.hub.specs.share(spec).start(cursor.resume(follows.keys(), stored, seen, opened.exact, heads))
