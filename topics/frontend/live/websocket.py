"""One WebSocket (api §7.7): writes and subscriptions, by the same paths as over HTTP and SSE.

    receive ─▶ command ─▶ append | hub ─▶ outbox ─▶ send        no room in the outbox: no command is read

Hypercorn speaks the protocol; a socket here is two tasks, one that reads commands and one that carries the outbox out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import msgspec

from topics.core.clock import Clock
from topics.core.errors import TopicsError, invalid
from topics.core.keys import ApiKey, KeyScope
from topics.core.names import check_topic_name
from topics.frontend.asgi import DROPPED, KEPT, SHARE, Message, Receive, Scope, Send
from topics.frontend.entry import limits, wire
from topics.frontend.entry.access import Access
from topics.frontend.entry.bodies import INLINE_BYTES_MAX, LONG_BYTES, Share, hold, long_bodies, no_room
from topics.frontend.entry.pages import Pages
from topics.frontend.entry.responses import send_error
from topics.frontend.http.hypercorn_deadlines import Kept
from topics.frontend.live.channels import StreamConnection
from topics.frontend.live.delivery import Hub
from topics.frontend.live.following import check_starts, check_strong, page_options, place, resolve
from topics.frontend.live.pulse import Stall
from topics.frontend.live.socket_outbox import SocketOutbox, Subscription
from topics.frontend.live.stream import StreamPhase
from topics.frontend.live.websocket_commands import (
    Command,
    Publish,
    RequestId,
    Subscribe,
    Unsubscribe,
    decode,
    error_message,
    request_id_of,
)
from topics.frontend.live.wording import MESSAGES
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.reading import TopicReader
from topics.frontend.routes import append
from topics.frontend.routes.append import AppendRoute
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.append_messages import AppendReply
from topics.shm.cap import Cap, Counted
from topics.shm.control import ProcessCell
from topics.shm.durations import Route

LINGER_S: Final = 2.0
"""How long what is under way when a socket ends may take to go out."""
TICK_S: Final = 1.0

GOING_AWAY: Final = 1012
POLICY: Final = 1008
"""Close codes (RFC 6455 §7.4, IANA): the service restarts; the key is no longer valid."""

_encode = msgspec.json.Encoder().encode
_log = get_logger()


class Services(NamedTuple):
    """The parts of a frontend that its sockets use. `observe(route, took_us)` is told of every answered command."""

    reader: TopicReader
    appends: AppendRoute
    hub: Hub
    access: Access
    pages: Pages
    settings: Settings
    catching_up: CatchingUp
    cell: ProcessCell
    clock: Clock
    observe: Callable[[Route, int], None]


class Socket:
    """One client. `run` returns when it is over and everything of it is taken down."""

    def __init__(self, services: Services, digest: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        self._services = services
        self._digest = digest
        self._receive = receive
        self._send = send
        self._kept: Kept | None = scope.get("extensions", {}).get(KEPT)
        self._outbox = SocketOutbox(send, self._kept)
        self._subscriptions: dict[str, StreamConnection] = {}
        self._publishes: set[asyncio.Task[None]] = set()
        self._may_publish = asyncio.Semaphore(limits.SOCKET_PUBLISHES.most_count)
        self._over: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        reading = asyncio.create_task(self._read())
        carrying = asyncio.create_task(self._outbox.carry())
        watching = asyncio.create_task(self._watch_progress())
        try:
            await asyncio.wait((reading, carrying, watching, self._over), return_when=asyncio.FIRST_COMPLETED)
            self._note_failures(reading, carrying, watching)
            gone = reading.done() and not reading.cancelled() and reading.exception() is None
            reading.cancel()
            self._unfollow(list(self._subscriptions))
            if self._over.done() and not gone:
                await self._close(carrying, *self._over.result())
            if not gone:
                await self._read_out()
        finally:
            self._unfollow(list(self._subscriptions))
            tasks = (reading, carrying, watching, *self._publishes)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, code: int, reason: str) -> None:
        """Last answers go out, then the socket is closed with this code."""
        if not self._over.done():
            self._over.set_result((code, reason))

    def end_what_is_forbidden(self) -> None:
        """Other keys count now: neither socket nor subscription may outlive the right to it."""
        key = self._services.access.key_of(self._digest)
        if key is None:
            self.end(POLICY, "the key is no longer valid")
            return
        for name in list(self._subscriptions):
            if not (key.has(KeyScope.READ) and key.covers(name)):
                self._unfollow([name])
                reason = f"the key of this socket may no longer read topic {name!r}"
                self._outbox.add(error_message(None, TopicsError("forbidden", reason, {"topic": name})))

    # -- commands

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            if DROPPED in message:
                self._services.cell.add("requests")
                await self._refuse(None, no_room(long_bodies))
                continue
            text = message.pop("text", None)
            body = None if text is None else text.encode("utf-8", "surrogatepass")
            del text
            # Nothing of a message is kept, uncounted, while the next one is awaited.
            if body is None or len(body) <= LONG_BYTES:
                await self._obey(body)
                del message
            else:
                share: Share | None = message.get(SHARE)
                del message
                obeying = asyncio.create_task(self._obey_long(body, share))
                del share
                await obeying
                del obeying
            del body

    async def _obey_long(self, body: bytes, share: Share | None) -> None:
        """In a task of its own, at whose end what it holds is counted no more: one at a time, until it is answered."""
        await self._obey(body, share)
        if self._publishes:
            await asyncio.wait(set(self._publishes))

    async def _obey(self, text: bytes | None, share: Share | None = None) -> None:
        """`text`: a message in UTF-8; None for a binary one. `share`: what it counts already, as it came."""
        started_ns = time.perf_counter_ns()
        self._services.cell.add("requests")
        body = text or b""
        request_id: RequestId = None
        route = Route.OTHER
        try:
            if text is None:
                raise invalid("a message is JSON text, not binary")
            try:
                # In UTF-8 it may be longer than it was.
                if len(body) > LONG_BYTES and not (share and share.reach(len(body))):
                    await hold(long_bodies, len(body))
                command = decode(body) if len(body) <= INLINE_BYTES_MAX else await asyncio.to_thread(decode, body)
            except TopicsError:
                request_id = request_id_of(body)
                raise
            request_id, route = command.request_id, command.timed
            await self._do(command, len(body), started_ns)
            if isinstance(command, Publish):
                return  # answered by `_acknowledge`
        except TopicsError as error:
            await self._refuse(request_id, error)
        except Exception:  # noqa: BLE001 — whatever it is, the client gets an answer and the operator a line
            _log.exception("a WebSocket command failed")
            await self._refuse(request_id, TopicsError("internal", "the command failed inside the server"))
        self._observe(route, started_ns)

    async def _refuse(self, request_id: RequestId, error: TopicsError) -> None:
        self._services.cell.add("responses_4xx" if error.status < 500 else "responses_5xx")
        await self._outbox.put(error_message(request_id, error))

    def _observe(self, route: Route, started_ns: int) -> None:
        self._services.observe(route, (time.perf_counter_ns() - started_ns) // 1000)

    async def _do(self, command: Command, body_bytes: int, started_ns: int) -> None:
        key = self._key()
        if isinstance(command, Publish):
            await self._publish(command, key, body_bytes, started_ns)
        elif isinstance(command, Subscribe):
            await self._subscribe(command)
        elif isinstance(command, Unsubscribe):
            await self._unsubscribe(command)
        else:
            await self._outbox.put(_encode({"op": "pong", "request_id": command.request_id}))

    def _key(self) -> ApiKey:
        """The key as it counts now: whoever has waited asks again."""
        key = self._services.access.key_of(self._digest)
        if key is None:
            raise TopicsError("unauthorized", "the key of this socket is no longer valid")
        return key

    async def _subscribe(self, command: Subscribe) -> None:
        starts = command.starts()
        topics_max = self._services.settings.max_watch_topics
        check_starts(starts, topics_max)
        self._key().require(KeyScope.READ, starts)
        await self._services.catching_up.wait_for_all(starts)
        self._key().require(KeyScope.READ, starts)
        ended = self._ended()
        followed = len((self._subscriptions.keys() - ended) | starts.keys())
        if followed > topics_max:
            raise invalid(f"a WebSocket follows at most {topics_max} topics, not {followed}", field="topics")
        reader, hub = self._services.reader, self._services.hub
        refs = {name: reader.get(name) for name in starts}
        if command.strong:
            check_strong(refs)
        positions = {name: resolve(reader, ref, starts[name]) for name, ref in refs.items()}
        places = {name: place(reader, ref, positions[name]) for name, ref in refs.items()}
        options = page_options(command, self._services.settings)  # may refuse: before anything is ended or said
        await self._outbox.enter()
        # Nothing of the former subscription comes behind the answer to this one. And not before there is room: what it
        # has said counts with it.
        self._unfollow([*ended, *starts])
        self._outbox.add(_encode({"op": "subscribed", "request_id": command.request_id, "topics": places}))
        if hub.draining or self._over.done():
            return
        for name, ref in refs.items():
            plan = hub.plans.get((name,), (ref.view.topic_id,), options, command.strong, MESSAGES)
            push = Subscription(self._outbox, self._ended_by_hub, self._abort)
            self._subscriptions[name] = hub.open(push, plan.start({name: positions[name]}), 0)
        # Other keys may count since there was room for the answer.
        self.end_what_is_forbidden()

    async def _unsubscribe(self, command: Unsubscribe) -> None:
        wanted = command.names()
        await self._outbox.enter()
        names = [name for name in wanted if name in self._subscriptions]
        self._unfollow(names)
        self._outbox.add(_encode({"op": "unsubscribed", "request_id": command.request_id, "topics": names}))

    async def _publish(self, command: Publish, key: ApiKey, body_bytes: int, started_ns: int) -> None:
        needed = KeyScope.WRITE | KeyScope.ADMIN if wire.given(command.config) else KeyScope.WRITE
        check_topic_name(command.topic)
        wire.check_counts(command)
        key.require(needed, (command.topic,))
        await self._may_publish.acquire()
        limits = self._services.access.limits
        try:
            limits.take(key, Counted.REQUESTS)
            try:
                lay_out = self._services.appends.lay_out
                if body_bytes <= INLINE_BYTES_MAX:
                    records = lay_out(command, body_bytes)
                else:
                    records = await asyncio.to_thread(lay_out, command, body_bytes)
                caller = self._key()
                caller.require(needed, (command.topic,))
                reply = self._services.appends.submit(command.topic, command, records, None, caller)
            except BaseException:
                limits.give_back(key, Counted.REQUESTS)
                raise
        except BaseException:
            self._may_publish.release()
            raise
        told = command.request_id, command.topic, command.return_seqs  # and not the records, which may be many
        task = asyncio.create_task(self._acknowledge(*told, reply, started_ns))
        self._publishes.add(task)
        # Not in the task: one that is cancelled before its first step does not take any.
        task.add_done_callback(partial(self._published, key))

    def _published(self, key: ApiKey, task: asyncio.Task[None]) -> None:
        self._publishes.discard(task)
        self._may_publish.release()
        self._services.access.limits.give_back(key, Counted.REQUESTS)

    async def _acknowledge(
        self, request_id: RequestId, topic: str, with_seqs: bool, reply: asyncio.Future[AppendReply], started_ns: int
    ) -> None:
        try:
            done = await reply
            self._services.cell.add("records_in", done.count)
            await self._outbox.enter()
            members = append.members(topic, done, with_seqs, started_ns)
            self._outbox.add(b'{"op":"ack","request_id":%b,%b}' % (_encode(request_id), members))
        except TopicsError as error:
            await self._refuse(request_id, error)
        self._observe(Publish.timed, started_ns)

    # -- subscriptions

    def _unfollow(self, names: list[str]) -> None:
        for name in names:
            connection = self._subscriptions.pop(name, None)
            if connection is not None:
                assert isinstance(connection.push, Subscription)
                connection.push.on_end = None
                self._services.hub.close(connection)

    def _ended(self) -> set[str]:
        """Topics that were deleted: the client has been told, or will be."""
        return {name for name, one in self._subscriptions.items() if one.stream.phases[0] == StreamPhase.ENDED}

    def _ended_by_hub(self) -> None:
        """It drains, or the client has not read for too long: what concerns one subscription concerns the socket."""
        self.end(GOING_AWAY, "the service is stopping, or nothing was read for too long")

    # -- ends

    async def _watch_progress(self) -> None:
        """Returns when the client has taken nothing for too long of what waits for it (api §7)."""
        stall: Stall | None = None
        while True:
            await asyncio.sleep(TICK_S)
            now_ms = self._services.clock.monotonic_ms()
            if not self._outbox.waiting:
                stall = None
            elif stall is None:
                stall = Stall(self._outbox.taken_bytes, now_ms)
            elif stall.over(self._outbox.taken_bytes, now_ms):
                self._abort()
                return

    async def _close(self, carrying: asyncio.Task[None], code: int, reason: str) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                if self._publishes:
                    await asyncio.wait(self._publishes)
                self._outbox.close()
                await carrying
                await self._send({"type": "websocket.close", "code": code, "reason": reason})
        except TimeoutError:
            self._abort()

    async def _read_out(self) -> None:
        """Drops what still comes: Hypercorn waits for ever with a message that nobody takes."""
        for _ in range(2):
            try:
                async with asyncio.timeout(LINGER_S):
                    while (await self._receive())["type"] != "websocket.disconnect":
                        pass
                    return
            except TimeoutError:
                self._abort()

    def _abort(self) -> None:
        """The client does not read, so it cannot be told: all that is left is to cut the connection."""
        if self._kept is not None:
            self._kept.abort()

    def _note_failures(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and not isinstance(error, ConnectionError):
                _log.error("a WebSocket failed", exc_info=error)


class WebSocketRoute:
    """All sockets of this frontend."""

    def __init__(self, services: Services, places: Cap) -> None:
        """`places`: how many sockets and event streams the whole service may have open."""
        self._services = services
        self._places = places
        self._sockets: dict[Socket, None] = {}
        self._draining = False
        services.access.on_change(self._end_forbidden)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] != "websocket.connect":
            return
        try:
            caller = self._admit(scope)
        except TopicsError as error:
            self._services.cell.add("responses_4xx" if error.status < 500 else "responses_5xx")
            await refuse(error, scope, send)
            return
        socket = Socket(self._services, caller.digest, scope, receive, send)
        self._sockets[socket] = None
        self._services.cell.set("ws_connections", len(self._sockets))
        try:
            await send({"type": "websocket.accept"})
            # Other keys may count since it was admitted.
            socket.end_what_is_forbidden()
            await socket.run()
        finally:
            del self._sockets[socket]
            self._services.cell.set("ws_connections", len(self._sockets))
            self._places.release()
            self._services.access.limits.give_back(caller, Counted.STREAMS)

    def drain(self) -> None:
        """The process is to stop: clients come back elsewhere, or later."""
        self._draining = True
        for socket in list(self._sockets):
            socket.end(GOING_AWAY, "the service is stopping")

    def _admit(self, scope: Scope) -> ApiKey:
        """Return the key of a client that may open a socket; its place is then taken."""
        self._services.pages.check(scope)
        caller = self._services.access.caller(scope)
        if self._draining:
            raise TopicsError("shutting_down", "the service is stopping; ask again when it is back")
        self._services.access.limits.take(caller, Counted.STREAMS)
        if not self._places.claim():
            self._services.access.limits.give_back(caller, Counted.STREAMS)
            raise self._places.reached()
        return caller

    def _end_forbidden(self) -> None:
        for socket in list(self._sockets):
            socket.end_what_is_forbidden()


async def refuse(error: TopicsError, scope: Scope, send: Send) -> None:
    """Refuse an upgrade over HTTP, in the envelope of every error."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return

    async def as_http(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    headers = [(b"www-authenticate", b"Bearer")] if error.code == "unauthorized" else []
    await send_error(as_http, dict(scope["headers"]), error, headers)


async def needs_upgrade(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a `GET /v0/ws` without a handshake."""
    raise TopicsError("upgrade_required", "this is a WebSocket: ask with Upgrade: websocket")
