"""Watch sessions: `POST /v0/watch` creates one, `GET /v0/watch/:wid` streams it on any frontend (api §7).

The shard that owns a wid stores the followed topics, and the positions when a stream ends in order. While one is open
only this frontend knows them, and tells a restarted shard that it is open.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from topics.api import answers
from topics.api.requests import WatchBody
from topics.core.clock import Clock
from topics.core.errors import TopicsError, invalid
from topics.core.keys import ANYONE, ApiKey, KeyScope
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry.access import LEADER_REQUIRED, Access
from topics.frontend.entry.bodies import Headers
from topics.frontend.entry.wire import flag
from topics.frontend.live import event_streams
from topics.frontend.live.channels import StreamConnection
from topics.frontend.live.delivery import Hub
from topics.frontend.live.event_streams import HEARTBEAT_MAX_MS, PACE_MAX_MS, StreamSlots
from topics.frontend.live.following import check_starts, follow
from topics.frontend.live.stream import StreamSpec, StreamState
from topics.frontend.live.wording import EVENT_STREAM, decode_cursor
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.diff import page_options
from topics.frontend.reads.node_sets import node_sets
from topics.frontend.reads.reading import TopicReader
from topics.frontend.reads.records import PageOptions
from topics.frontend.routes import operations as api
from topics.frontend.routes.operations import ApiRequest, JsonReply
from topics.frontend.shards.gateway import Gateway
from topics.frontend.shards.pending_requests import is_outcome_unknown
from topics.settings import Settings
from topics.shm.durations import Route
from topics.shm.topic_messages import SESSION_TTL_MS, SessionAbandon, SessionClose, SessionGet, SessionOpen, SessionPut

SESSION_BYTES_MAX: Final = 256 * 1024
_WID: Final = re.compile(r"wid_[A-Za-z0-9_-]{22}")
_WID_BYTES: Final = 16
TOLD_AT_ONCE: Final = 128
"""Streams that a restarted shard is told of in one turn of the event loop."""
_STREAM_NO_SHIFT: Final = 20
"""A stream's number is the ms in which it was opened, shifted by so many bits, plus a serial."""


class Follow(msgspec.Struct, array_like=True, frozen=True):
    """One topic of a session: the instance of the name, and the position to start from."""

    topic_id: int
    from_seq: int


class Session(msgspec.Struct, array_like=True, frozen=True):
    """The request of a watch, resolved and clamped."""

    topics: dict[str, Follow]
    options: PageOptions
    heartbeat_ms: int
    strong: bool
    key_digest: bytes
    """Digest of the creating key, which alone may stream the session; empty if none was needed."""
    pace_ms: int = 0


class Opened(msgspec.Struct, frozen=True):
    """A session as a stream of it begins. `positions` are those of the last stream that ended in order, without topics
    that had ended; None if none did. If `exact` is false, a later stream may have read further.
    """

    wid: str
    stream_no: int
    session: Session
    positions: dict[str, int] | None
    exact: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Session).decode


class SessionClient:
    """Creates, opens and closes watch sessions at their shards, and owns the list of this frontend's open streams.

    A restarted shard hears of the open streams before anything else about their sessions: it drops sessions without one
    after SESSION_TTL_MS.
    """

    def __init__(self, gateway: Gateway, clock: Clock) -> None:
        self._gateway = gateway
        self._owner = gateway.owner
        self._clock = clock
        self._last_stream_no = 0
        self._open: dict[int, tuple[int, str]] = {}
        """The shard and the wid of each open stream, by its number."""
        self._untold: dict[int, tuple[int, str]] = {}
        """The same of the streams of which a restarted shard has yet to hear."""
        gateway.on_restart(self._tell_restarted)

    async def create(self, session: Session) -> str:
        """Store a new session and return its wid. Raise as `Gateway.call` does."""
        body = _encode(session)
        if len(body) > SESSION_BYTES_MAX:
            raise invalid(f"the watch is too large to be stored: {len(body)} bytes, at most {SESSION_BYTES_MAX}")
        wid = "wid_" + secrets.token_urlsafe(_WID_BYTES)
        await self._gateway.call(self._owner(wid), SessionPut(wid, body))
        return wid

    async def get(self, wid: str) -> Session:
        """Return the session as it was created, without opening it. Raise `404 not_found`."""
        _check(wid)
        return _decode((await self._gateway.call(self._owner(wid), SessionGet(wid))).body)

    async def open(self, wid: str) -> Opened:
        """Begin a stream of the session, which ends with `close` or `abandon`. Raise `404 not_found`."""
        _check(wid)
        # Among all streams of a session, over all frontends, the one opened last has the highest number.
        now = self._clock.monotonic_ms() << _STREAM_NO_SHIFT
        self._last_stream_no = stream_no = max(self._last_stream_no + 1, now)
        owner = self._owner(wid)
        self._gateway.check_restart(owner)
        try:
            reply = await self._gateway.call(owner, SessionOpen(wid, stream_no))
        except (TopicsError, asyncio.CancelledError) as error:
            if is_outcome_unknown(error):
                # The shard may have opened it, or will. A session with an open stream is never dropped.
                self._gateway.post(owner, SessionAbandon(wid, stream_no))
            raise
        self._open[stream_no] = owner, wid
        return Opened(wid, stream_no, _decode(reply.body), reply.positions, reply.exact)

    def close(self, opened: Opened, positions: dict[str, int] | None) -> None:
        """Tell the shard, without waiting, that the stream has ended and sent everything up to `positions`."""
        wid, stream_no = opened.wid, opened.stream_no
        owner = self._owner(wid)
        self._gateway.check_restart(owner)
        del self._open[stream_no]
        self._tell(stream_no)
        # Posted even if the ring is full: a session whose stream never ends is never dropped. Not in a task: it must
        # be before the same client's next GET.
        if not self._gateway.post(owner, SessionClose(wid, stream_no, positions), may_be_lost=True):
            # The session continues at an earlier position, or at the client's Last-Event-ID.
            self._gateway.post(owner, SessionAbandon(wid, stream_no))

    def abandon(self, opened: Opened) -> None:
        """End a stream that has sent nothing, instead of `close`, and leave the session as it was."""
        if opened.exact:
            self.close(opened, opened.positions)
        else:
            del self._open[opened.stream_no]
            self._tell(opened.stream_no)
            self._gateway.post(self._owner(opened.wid), SessionAbandon(opened.wid, opened.stream_no))

    def _tell_restarted(self, shard: int) -> None:
        is_telling = bool(self._untold)
        self._untold |= {stream_no: place for stream_no, place in self._open.items() if place[0] == shard}
        if not is_telling:
            self._tell_some()

    def _tell_some(self) -> None:
        """Tell a restarted shard of some open streams, and of the others in the next turns of the event loop."""
        for stream_no in list(islice(self._untold, TOLD_AT_ONCE)):
            self._tell(stream_no)
        if self._untold:
            asyncio.get_running_loop().call_soon(self._tell_some)

    def _tell(self, stream_no: int) -> None:
        place = self._untold.pop(stream_no, None)
        if place is not None:
            shard, wid = place
            self._gateway.post(shard, SessionOpen(wid, stream_no))


def _check(wid: str) -> None:
    if _WID.fullmatch(wid) is None:
        raise TopicsError("not_found", f"no watch session {wid[:64]!r}: create one with POST /v0/watch")


_EVENTS: Final = api.ok("Events: record, tombstone, caught-up, topic-deleted, error", None, api.EVENTS)


def resume(
    names: Set[str], stored: Mapping[str, int], seen: Mapping[str, int] | None, exact: bool, heads: Mapping[str, int]
) -> dict[str, int]:
    """Return the position from which each topic of a session continues, without those whose end the client has seen.

    `names` are the session's topics, `stored` its own positions, `seen` the client's, if it sent any. The client may
    rewind the session, and bring back a topic whose end it has not seen. It may move the session forward, up to the
    head, only if `exact` is false: the process that served the last stream died, so its end is not known.
    """
    positions = dict(stored)
    for name, seq in (seen or {}).items():
        if name in names:
            known = positions.get(name)
            if known is None or seq < known or (not exact and seq <= heads.get(name, 0)):
                positions[name] = seq
    return positions


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

    @api.json_route("POST", "/v0/watch", Route.CREATE_WATCH, KeyScope.READ, "watch")
    @api.describe("Make a watch session", api.ok("The session", answers.WatchAnswer), "topic_not_found", *api.LOST)
    @api.takes(api.flag_query("lenient", False, "leave out topics that do not exist"), body=WatchBody)
    async def create(self, request: ApiRequest) -> JsonReply:
        lenient = flag(request.query, "lenient", False)
        body = await request.decoded(WatchBody, self.settings.max_command_bytes)
        check_starts(body.topics, self.settings.max_watch_topics)
        request.caller.require(KeyScope.READ, body.topics)
        await self.catching_up.wait_for_all(body.topics)
        found = await follow(self.reader, body.topics, body.strong, lenient)
        follows = {name: Follow(one.ref.view.topic_id, one.from_seq) for name, one in found.items()}
        options = page_options(body, self.settings)
        heartbeat_ms = max(self.settings.test_min_heartbeat_ms, min(body.heartbeat_ms, HEARTBEAT_MAX_MS))
        pace_ms = min(body.pace_ms, PACE_MAX_MS)
        session = Session(follows, options, heartbeat_ms, body.strong, request.caller.digest, pace_ms)
        wid = await self.sessions.create(session)
        url, states = f"/v0/watch/{wid}", {name: one.state for name, one in found.items()}
        return JsonReply({"wid": wid, "stream_url": url, "session_ttl_ms": SESSION_TTL_MS, "topics": states})

    # The key may be in the query, and an unknown wid is 404 for any key, so the key is checked here.
    @api.asgi_route("GET", "/v0/watch/{wid}", None, None, "watch")
    @api.describe("The event stream of a session", _EVENTS, "not_found", "not_acceptable", *api.LOST)
    @api.takes(api.Query("token", api.STRING, "the key, for clients that cannot send a header"))
    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.access.authenticate(scope, token=True)
        headers = dict(scope["headers"])
        event_streams.check_accept(headers)
        wid = scope["path_params"]["wid"]
        caller = ANYONE
        if self.access.on:
            caller = self._admit(await self.sessions.get(wid), scope)
        self.access.require_leader(KeyScope.READ, scope["headers"])
        # Before the session is opened: a refused request must not end the stream that has it.
        with self.slots.hold(caller):
            await self._stream(wid, headers, scope, receive, send)

    async def _stream(self, wid: str, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        opened = await self.sessions.open(wid)
        connection: StreamConnection | None = None
        try:
            state = self._resume(opened, headers.get(b"last-event-id"))
            # Keep the session's nodes, which may be most of it, as the set that streams share.
            session = msgspec.structs.replace(opened.session, options=state.spec.options)
            opened = msgspec.structs.replace(opened, session=session)
            self.hub.check_ready(state.spec.names)  # before the answer begins
            push = await event_streams.begin_stream(scope, send)
            connection = self.hub.open(push, state, session.heartbeat_ms, session.pace_ms)
            end_if_forbidden = partial(self._end_if_forbidden, connection, session, LEADER_REQUIRED in scope["headers"])
            self.access.on_change(end_if_forbidden)
            end_if_forbidden()  # the keys may have changed since it was admitted
            await event_streams.run_stream(push, receive)
        finally:
            if connection is None:
                self.sessions.abandon(opened)
            else:
                self.access.forget(end_if_forbidden)
                self.hub.close(connection)
                self.sessions.close(opened, connection.state.cursor())

    def _admit(self, session: Session, scope: Scope) -> ApiKey:
        """Return the key that may stream the session. A wid alone gives no access to it."""
        caller = self.access.authenticate(scope, token=True)
        if not hmac.compare_digest(caller.digest, session.key_digest):
            raise TopicsError("unauthorized", "this watch session belongs to another key, which alone may stream it")
        caller.require(KeyScope.READ, session.topics)
        return caller

    def _end_if_forbidden(self, connection: StreamConnection, session: Session, of_leader: bool) -> None:
        error = self.access.why_not(session.key_digest, KeyScope.READ, session.topics, of_leader)
        if error is not None and not connection.closed:
            connection.push.write(EVENT_STREAM.final(error.code, error.message))
            self.hub.close(connection)

    def _resume(self, opened: Opened, last_event_id: bytes | None) -> StreamState:
        """Return the state from which the session's stream continues. `last_event_id` says what the client has seen."""
        session, follows = opened.session, opened.session.topics
        stored = opened.positions
        if stored is None:
            stored = {name: follow.from_seq for name, follow in follows.items()}
        seen = None if last_event_id is None else decode_cursor(last_event_id)
        heads = {}
        if seen and not opened.exact:
            for name in seen.keys() & follows.keys():
                ref = self.reader.find(name)
                if ref is not None and ref.view.topic_id == follows[name].topic_id:
                    heads[name] = ref.view.head_seq
        options = session.options
        if options.nodes is not None:
            # Never refused: opening the session has ended its former stream.
            options = options._replace(nodes=node_sets.keep(options.nodes, admitted=True))
        topic_ids = tuple(follow.topic_id for follow in follows.values())
        spec = StreamSpec(tuple(follows), topic_ids, options, session.strong)
        return self.hub.share(spec).start(resume(follows.keys(), stored, seen, opened.exact, heads))
