"""One WebSocket (api §7.7): writes and subscriptions, on the same paths as over HTTP and SSE.

    receive ─▶ command ─▶ append | hub ─▶ outbox ─▶ send        no room in the outbox: no command is read

The server speaks the protocol (`http/`). A socket here is three tasks: one reads commands, one sends what had to wait
in the outbox, and one watches the client's progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

from topics.core.clock import Clock
from topics.core.errors import TopicsError, forbidden, invalid
from topics.core.keys import ApiKey, KeyScope
from topics.core.names import check_topic_name
from topics.frontend import asgi
from topics.frontend.asgi import Message, Receive, Scope, Send, WriteBuffer
from topics.frontend.entry import limits, wire
from topics.frontend.entry.access import Access, Pages
from topics.frontend.entry.bodies import LONG_BYTES, MessageReservation, check_repeated, long_bodies, no_room, reserve
from topics.frontend.entry.responses import encode_json, send_error
from topics.frontend.entry.stalled_clients import ReadProgress
from topics.frontend.live import websocket_commands
from topics.frontend.live.channels import StreamConnection
from topics.frontend.live.delivery import JOIN_STEP, Hub
from topics.frontend.live.event_streams import StreamSlots
from topics.frontend.live.following import check_starts, follow
from topics.frontend.live.socket_outbox import SocketOutbox, Subscription
from topics.frontend.live.stream import StreamSpec, TopicPhase
from topics.frontend.live.websocket_commands import ROUTES, Command, Publish, RequestId, Subscribe, Unsubscribe
from topics.frontend.live.wording import MESSAGES
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.diff import page_options
from topics.frontend.reads.reading import TopicReader
from topics.frontend.routes import append
from topics.frontend.routes import operations as api
from topics.frontend.routes.append import AppendRoute
from topics.frontend.shards.gateway import stopping
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.append_messages import AppendReply
from topics.shm.control import ProcessCell
from topics.shm.durations import Route
from topics.shm.quotas import Counted

LINGER_S: Final = 2.0
"""Time for publishes under way and last messages when a socket ends."""
TICK_S: Final = 1.0

GOING_AWAY: Final = 1012
POLICY: Final = 1008
"""Close codes (RFC 6455 §7.4, IANA): the service restarts; the key is no longer valid."""

_ENDED_BY_HUB: Final = "the service is stopping, or nothing was read for too long"

log = get_logger()


class Services(NamedTuple):
    """The parts of a frontend that all requests and sockets use. `observe(route, took_us)` is told of each."""

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
    """The WebSocket of one client. It owns the subscriptions and publishes; `run` ends them before it returns."""

    def __init__(self, services: Services, digest: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        self._services = services
        self._digest = digest
        self._headers = scope["headers"]
        self._receive = receive
        self._send = send
        extensions = scope.get("extensions", {})
        self._write_buffer: WriteBuffer | None = extensions.get(asgi.WRITE_BUFFER)
        self._outbox = SocketOutbox(send, self._write_buffer, extensions.get(asgi.SEND_NOW))
        self._subscriptions: dict[str, StreamConnection] = {}
        self._publishes: set[asyncio.Task[None]] = set()
        self._may_publish = asyncio.Semaphore(limits.SOCKET_PUBLISHES.most_count)
        self._over: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        reading = asyncio.create_task(self._read())
        sending = asyncio.create_task(self._outbox.send_all())
        watching = asyncio.create_task(self._watch_progress())
        try:
            await asyncio.wait((reading, sending, watching, self._over), return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, sending, watching):
                error = task.exception() if task.done() and not task.cancelled() else None
                if error is not None and not isinstance(error, ConnectionError):
                    log.error("a WebSocket failed", exc_info=error)
            gone = reading.done() and not reading.cancelled() and reading.exception() is None
            reading.cancel()
            self._unfollow(list(self._subscriptions))
            if self._over.done() and not gone:
                await self._close(sending, *self._over.result())
            if not gone:
                await self._drop_input()
        finally:
            self._unfollow(list(self._subscriptions))
            tasks = (reading, sending, watching, *self._publishes)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end(self, code: int, reason: str) -> None:
        """Close the socket with this code, after its last answers. Idempotent."""
        if not self._over.done():
            self._over.set_result((code, reason))

    def end_shutting_down(self) -> None:
        """End the socket after a last message that says why."""
        self._outbox.add(MESSAGES.shutting_down)
        self.end(GOING_AWAY, "the service is stopping")

    def end_forbidden(self) -> None:
        """End the socket, or those of its subscriptions, that are not allowed any more."""
        key = self._services.access.find_key(self._digest)
        if key is None:
            self.end(POLICY, "the key is no longer valid")
            return
        try:
            self._services.access.require_leader(KeyScope.READ, self._headers)
        except TopicsError as refusal:
            self._outbox.add(websocket_commands.error_message(None, refusal))
            self.end(GOING_AWAY, "another service leads")
            return
        for name in list(self._subscriptions):
            if not (key.has(KeyScope.READ) and key.covers(name)):
                self._unfollow([name])
                reason = f"the key of this socket may no longer read topic {name!r}"
                error = forbidden(reason, topic=name)
                self._outbox.add(websocket_commands.error_message(None, error))

    # -- commands

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            if asgi.DROPPED in message:
                self._services.cell.add("requests")
                await self._refuse(None, no_room(long_bodies))
                continue
            text = message.pop("text", None)
            body = None if text is None else text.encode("utf-8", "surrogatepass")
            del text
            # No part of a message may be kept, uncounted, while the next one is awaited.
            if body is None or len(body) <= LONG_BYTES:
                await self._handle(body)
                del message
            else:
                reservation: MessageReservation | None = message.get(asgi.RESERVATION)
                del message
                handling = asyncio.create_task(self._handle_long(body, reservation))
                del reservation
                await handling
                del handling
            del body

    async def _handle_long(self, body: bytes, reservation: MessageReservation | None) -> None:
        """Handle a long message until it is answered. In a task of its own, because what it reserves ends with that."""
        await self._handle(body, reservation)
        if self._publishes:
            await asyncio.wait(set(self._publishes))

    async def _handle(self, text: bytes | None, reservation: MessageReservation | None = None) -> None:
        """Handle and answer a message in UTF-8; None for a binary one. `reservation` is the room it has already."""
        started_ns = time.perf_counter_ns()
        self._services.cell.add("requests")
        body = text or b""
        request_id: RequestId = None
        route = Route.OTHER
        try:
            if text is None:
                raise invalid("a message is JSON text, not binary")
            try:
                command = await self._decode(body, reservation)
            except TopicsError:
                request_id = websocket_commands.request_id_of(body)
                raise
            request_id, route = command.request_id, ROUTES[type(command)]
            key = self._key()
            if isinstance(command, Publish):
                await self._publish(command, key, len(body), started_ns)
                return  # answered by `_acknowledge`
            if isinstance(command, Subscribe):
                await self._subscribe(command)
            elif isinstance(command, Unsubscribe):
                await self._unsubscribe(command)
            else:
                await self._outbox.put(encode_json({"op": "pong", "request_id": command.request_id}))
        except TopicsError as error:
            await self._refuse(request_id, error.with_traceback(None))
        except Exception:  # the client gets an answer, the operator a log line
            log.exception("a WebSocket command failed")
            await self._refuse(request_id, TopicsError("internal", "the command failed inside the server"))
        self._observe(route, started_ns)

    async def _decode(self, body: bytes, reservation: MessageReservation | None) -> Command:
        # In UTF-8 a message may be longer than it was when it arrived.
        if len(body) > LONG_BYTES and not (reservation and reservation.reach(len(body))):
            await reserve(long_bodies, len(body))
        if len(body) <= append.DECODED_INLINE_BYTES_MAX:
            return websocket_commands.decode(body)
        return await asyncio.to_thread(websocket_commands.decode, body, self._services.settings.max_command_bytes)

    async def _refuse(self, request_id: RequestId, error: TopicsError) -> None:
        self._services.cell.add("responses_4xx" if error.status < 500 else "responses_5xx")
        await self._outbox.put(websocket_commands.error_message(request_id, error))

    def _observe(self, route: Route, started_ns: int) -> None:
        self._services.observe(route, (time.perf_counter_ns() - started_ns) // 1000)

    def _key(self) -> ApiKey:
        """Return the socket's key as it is now. Ask again after every wait."""
        key = self._services.access.find_key(self._digest)
        if key is None:
            raise TopicsError("unauthorized", "the key of this socket is no longer valid")
        return key

    async def _subscribe(self, command: Subscribe) -> None:
        starts = command.starts()
        settings = self._services.settings
        topics_max = settings.max_watch_topics
        check_starts(starts, topics_max)
        self._key().require(KeyScope.READ, starts)
        await self._services.catching_up.wait_for_all(starts)
        self._key().require(KeyScope.READ, starts)
        # Subscriptions to deleted topics have ended; their own streams have told the client.
        ended = {name for name, one in self._subscriptions.items() if one.state.phases[0] == TopicPhase.ENDED}
        followed = len((self._subscriptions.keys() - ended) | starts.keys())
        if followed > topics_max:
            raise invalid(f"a WebSocket follows at most {topics_max} topics, not {followed}", field="topics")
        reader, hub = self._services.reader, self._services.hub
        found = await follow(reader, starts, command.strong)
        topics = {name: one.state for name, one in found.items()}
        # This may refuse the command, so it comes before any subscription is ended.
        options = page_options(command, settings)
        await self._outbox.wait_for_turn()
        # The former subscription must not send anything after the answer to this one. It ends only when there is room,
        # because its messages count with it.
        self._unfollow([*ended, *starts])
        self._outbox.add(encode_json({"op": "subscribed", "request_id": command.request_id, "topics": topics}))
        for at, (name, (ref, from_seq, _state)) in enumerate(found.items(), 1):
            if hub.draining or self._over.done():
                return
            spec = hub.share(StreamSpec((name,), (ref.view.topic_id,), options, command.strong, MESSAGES))
            push = Subscription(self._outbox, partial(self.end, GOING_AWAY, _ENDED_BY_HUB), self._abort)
            self._subscriptions[name] = hub.open(push, spec.start({name: from_seq}), 0)
            if at % JOIN_STEP == 0:
                self.end_forbidden()
                await asyncio.sleep(0)
        # The keys may have changed while the answer waited for room.
        self.end_forbidden()

    async def _unsubscribe(self, command: Unsubscribe) -> None:
        asked = command.names()
        await self._outbox.wait_for_turn()
        names = [name for name in asked if name in self._subscriptions]
        self._unfollow(names)
        self._outbox.add(encode_json({"op": "unsubscribed", "request_id": command.request_id, "topics": names}))

    async def _publish(self, command: Publish, key: ApiKey, body_bytes: int, started_ns: int) -> None:
        needed = KeyScope.WRITE | KeyScope.ADMIN if wire.given(command.config) else KeyScope.WRITE
        check_topic_name(command.topic)
        wire.check_counts(command)
        key.require(needed, (command.topic,))
        await self._may_publish.acquire()
        with ExitStack() as undo:
            undo.callback(self._may_publish.release)
            key_limits = self._services.access.limits
            key_limits.acquire(key, Counted.REQUESTS)
            undo.callback(key_limits.release, key, Counted.REQUESTS)
            lay_out = self._services.appends.lay_out
            if body_bytes <= append.DECODED_INLINE_BYTES_MAX and not append.is_long(command):
                records = lay_out(command, body_bytes)
            else:
                records = await asyncio.to_thread(lay_out, command, body_bytes)
            caller = self._key()
            caller.require(needed, (command.topic,))
            self._services.access.require_leader(needed)
            reply = self._services.appends.submit(command.topic, command, records, None, caller)
            release = undo.pop_all().close
        answered = command.request_id, command.topic, command.return_seqs  # without the records, which may be many
        task = asyncio.create_task(self._acknowledge(*answered, reply, started_ns))
        self._publishes.add(task)
        # A callback, since a task that is cancelled before its first step runs no code of its own.
        task.add_done_callback(partial(self._published, release))

    def _published(self, release: Callable[[], None], task: asyncio.Task[None]) -> None:
        self._publishes.discard(task)
        release()

    async def _acknowledge(
        self, request_id: RequestId, topic: str, with_seqs: bool, reply: asyncio.Future[AppendReply], started_ns: int
    ) -> None:
        try:
            done = await reply
            if done.durability == "archived":
                await self._services.appends.archive_acks.wait_for_topic(topic)
            self._services.cell.add("records_in", done.count)
            await self._outbox.wait_for_turn()
            members = append.members(topic, done, with_seqs, started_ns)
            self._outbox.add(b'{"op":"ack","request_id":%b,%b}' % (encode_json(request_id), members))
        except TopicsError as error:
            await self._refuse(request_id, error.with_traceback(None))
        self._observe(Route.WS_PUBLISH, started_ns)

    # -- subscriptions

    def _unfollow(self, names: list[str]) -> None:
        for name in names:
            connection = self._subscriptions.pop(name, None)
            if connection is not None:
                assert isinstance(connection.push, Subscription)
                connection.push.on_end = None
                self._services.hub.close(connection)

    # -- ends

    async def _watch_progress(self) -> None:
        """Cut a client that reads nothing for too long of what waits for it (api §7), and return."""
        progress: ReadProgress | None = None
        while True:
            await asyncio.sleep(TICK_S)
            now_ms = self._services.clock.monotonic_ms()
            if not self._outbox.is_unread:
                progress = None
            elif progress is None:
                progress = ReadProgress(self._outbox.progress_bytes, now_ms)
            elif progress.timed_out(self._outbox.progress_bytes, now_ms):
                self._abort()
                return

    async def _close(self, sending: asyncio.Task[None], code: int, reason: str) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                if self._publishes:
                    await asyncio.wait(self._publishes)
                self._outbox.close()
                await sending
                await self._send({"type": "websocket.close", "code": code, "reason": reason})
        except TimeoutError:
            self._abort()

    async def _drop_input(self) -> None:
        """Drop further messages until the client is gone. A message that nobody takes would stop the reading."""
        for _ in range(2):
            try:
                async with asyncio.timeout(LINGER_S):
                    await asgi.until_disconnect(self._receive)
                    return
            except TimeoutError:
                self._abort()

    def _abort(self) -> None:
        """Cut the connection of a client that does not read, and cannot be told."""
        if self._write_buffer is not None:
            self._write_buffer.abort()


_SWITCHED: Final = {101: api.Answer("Switching to WebSocket", {})}


class WebSocketRoute:
    """All sockets of this frontend. It admits them, and ends those whose key is no longer valid."""

    def __init__(self, services: Services, slots: StreamSlots) -> None:
        self._services = services
        self._slots = slots
        self._sockets: dict[Socket, None] = {}
        self._draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] != "websocket.connect":
            return
        with ExitStack() as slot:
            try:
                self._services.pages.check(scope)
                check_repeated(scope["headers"])
                caller = self._services.access.authenticate(scope)
                self._services.access.require_leader(KeyScope.READ, scope["headers"])
                if self._draining:
                    raise stopping()
                slot.enter_context(self._slots.hold(caller))
            except TopicsError as error:
                self._services.cell.add("responses_4xx" if error.status < 500 else "responses_5xx")
                await refuse(error, scope, send)
                return
            socket = Socket(self._services, caller.digest, scope, receive, send)
            self._sockets[socket] = None
            self._services.access.on_change(socket.end_forbidden)
            self._services.cell.set("ws_connections", len(self._sockets))
            try:
                await send({"type": "websocket.accept"})
                # The keys may have changed since it was admitted.
                socket.end_forbidden()
                await socket.run()
            finally:
                del self._sockets[socket]
                self._services.access.forget(socket.end_forbidden)
                self._services.cell.set("ws_connections", len(self._sockets))

    @api.asgi_route("GET", "/v0/ws", None, None, "watch")
    @api.describe("A WebSocket: subscribe, unsubscribe, publish, ping (api §7.7)", _SWITCHED, "upgrade_required")
    async def needs_upgrade(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise TopicsError("upgrade_required", "this is a WebSocket: send Upgrade: websocket")

    def drain(self) -> None:
        """End all sockets and refuse new ones: the process is stopping."""
        self._draining = True
        for socket in list(self._sockets):
            socket.end_shutting_down()


async def refuse(error: TopicsError, scope: Scope, send: Send) -> None:
    """Refuse an upgrade over HTTP, with the usual JSON error."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return

    async def as_http(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await send_error(as_http, dict(scope["headers"]), error)
