"""Routes through the app itself: long polls, what fails inside, methods, probes. Arena and logs are real, the shard
is the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.frontend.hosting import Hosting, Written
from tests.frontend.live import until
from topics import settings as settings_module
from topics.core.config import TopicConfig
from topics.core.keys import KeyRing, parse_list
from topics.frontend.asgi import RESERVATION, ROOM
from topics.frontend.entry import limits
from topics.frontend.entry.bodies import LONG_BYTES, MessageReservation, long_bodies, medium_bodies
from topics.frontend.entry.budget import Budget, Reservation
from topics.frontend.live import websocket_commands
from topics.frontend.live.delivery import Hub
from topics.frontend.live.websocket_commands import Command
from topics.frontend.reads import node_sets as node_sets_module
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.wiring import Process, build_app
from topics.shm import messages
from topics.shm.control import ProcessState, Role
from topics.shm.messages import MessageKind
from topics.shm.topic_messages import Watch

DEADLINE_S = 60.0


class Frontend:
    """An app on one loop, and requests to it."""

    def __init__(self, hosting: Hosting, shard_wait_ms: int) -> None:
        self.hosting = hosting
        given = {"data_dir": hosting.data_dir, "wal_shards": 1, "frontends": 1, "cold_read_timeout_ms": 60_000}
        settings = settings_module.load({}, given | {"shard_wait_ms": shard_wait_ms})
        process = Process(hosting.shared, 0, 1, settings, hosting.clock, hosting.clock)
        built = build_app(process, KeyRing(()), hosting.store, lambda: 0)
        self.cell, self.gateway, self.reader = process.cell, built.gateway, built.reader
        self.app, self.access, self.diff = built.app, built.access, built.diff
        self.append = built.app._append
        self.key_counts = built.access.limits._counts
        self.gone = asyncio.Event()
        """The client closes its connection."""

    async def ask(
        self, method: str, path: str, body: Any = None, place: Reservation | None = None, key: str = ""
    ) -> tuple[int, dict[bytes, bytes], Any]:
        """(status, headers, decoded body). `place`: where there is room for it on a connection of HTTP/2."""
        path, _, query = path.partition("?")
        content = b"" if body is None else msgspec.json.encode(body)
        answer: list[dict[str, Any]] = []
        taken = False

        async def receive() -> dict[str, Any]:
            nonlocal taken
            if taken:
                await self.gone.wait()
                return {"type": "http.disconnect"}
            taken = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            answer.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(b"content-type", b"application/json"), (b"authorization", b"Bearer " + key.encode())],
            "extensions": {} if place is None else {ROOM: place},
        }
        await self.app(scope, receive, send)
        if not answer:
            return 0, {}, None
        content = answer[1]["body"]
        return answer[0]["status"], dict(answer[0]["headers"]), msgspec.json.decode(content) if content else None

    async def watching(self, name: str) -> Watch:
        """The watch that the gateway asks the shard for, of the topic that the name means now."""
        topic_id = self.hosting.topics[name].topic.id
        while True:
            for message, _position in self.hosting.shared.rings[0][0].requests.peek():
                if messages.head(message)[0] == MessageKind.CALL:
                    call = messages.decode(message)
                    if isinstance(call, Watch) and (call.name, call.seen_topic_id) == (name, topic_id):
                        return call
            await asyncio.sleep(0.001)

    def notify(self, watch: Watch) -> None:
        assert self.hosting.shared.rings[0][0].replies.push(messages.encode_notify([watch.token]))
        self.hosting.shared.frontend_wakes[0].signal_always()


def on_loop(hosting: Hosting, test: Callable[[Frontend], Awaitable[None]], shard_wait_ms: int = 10_000) -> None:
    async def main() -> None:
        frontend = Frontend(hosting, shard_wait_ms)
        frontend.gateway.start()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(frontend)
        finally:
            frontend.gateway.close()

    asyncio.run(main())


# -- long polls


@pytest.mark.parametrize("padding", [" " * (LONG_BYTES + 1), '"node":[%s"me"],' % ('"me",' * 300_000)])
def test_a_long_poll_does_not_hold_what_its_body_was(hosting: Hosting, padding: str) -> None:
    """Four of them, each of the longest there may be, would keep every other long body out for 30 s."""
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        body = msgspec.Raw(b"{%b%b" % (padding.encode(), b'"wait_ms":30000}'))
        poll = asyncio.create_task(frontend.ask("POST", "/v0/topics/t/diff", body))
        await frontend.watching("t")
        assert frontend.cell.get("long_polls") == 1
        assert long_bodies.held_bytes == 0
        frontend.gone.set()
        await poll

    on_loop(hosting, test)


def test_a_reader_may_name_so_many_writers(hosting: Hosting) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        async def asked(nodes: list[str]) -> int:
            status, _, _ = await frontend.ask("POST", "/v0/topics/t/diff", {"node": nodes})
            return status

        names = [f"n{number}" for number in range(node_sets_module.NODES_MAX)]
        assert await asked(names) == 200
        assert await asked([*names, *names]) == 200
        assert await asked([*names, "one more"]) == 400
        assert await asked(["x" * node_sets_module.NODES_MAX_BYTES]) == 200
        assert await asked(["x" * node_sets_module.NODES_MAX_BYTES, "y"]) == 400

    on_loop(hosting, test)


def test_a_long_poll_waits_for_what_it_may_deliver(hosting: Hosting) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        poll = asyncio.create_task(frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000, "node": "me"}))
        watch = await frontend.watching("t")
        assert frontend.cell.get("long_polls") == 1
        hosting.write("t", [Written(b"1", node=b"me")] * 3)
        frontend.notify(watch)
        await asyncio.sleep(0.01)
        assert not poll.done()
        hosting.write("t", [Written(b'"for me"')])
        frontend.notify(watch)
        status, _, body = await poll
        assert (status, [record["$seq"] for record in body["records"]], body["next_from_seq"]) == (200, [4], 4)
        assert body["performance"]["records_scanned"] == 4
        assert frontend.cell.get("long_polls") == 0

    on_loop(hosting, test)


def test_a_long_poll_passes_a_long_stretch_of_filtered_records(hosting: Hosting) -> None:
    hosting.make("t")
    for _ in range(4):
        hosting.write("t", [Written(b"1", node=b"me")] * 8192)
    hosting.write("t", [Written(b'"for me"')])

    async def test(frontend: Frontend) -> None:
        question = {"wait_ms": 30_000, "node": "me"}
        _, _, body = await frontend.ask("POST", "/v0/topics/t/diff", question)
        assert [record["$seq"] for record in body["records"]] == [4 * 8192 + 1]
        _, _, body = await frontend.ask("POST", "/v0/topics/t/diff", question | {"wait_ms": 0})
        assert (body["records"], body["caught_up"]) == ([], False)

    on_loop(hosting, test)


def test_a_stopping_frontend_answers_its_long_polls(hosting: Hosting) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        poll = asyncio.create_task(frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000}))
        await frontend.watching("t")
        frontend.diff.drain()
        status, _, body = await poll
        assert (status, body["records"], body["caught_up"]) == (200, [], True)
        status, _, _ = await frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000})
        assert status == 200

    on_loop(hosting, test)


@pytest.mark.parametrize("end", ["drain", "deadline", "deadline and drain"])
def test_a_long_poll_that_waits_for_room_ends_with_its_time_and_at_a_stop(hosting: Hosting, end: str) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        room = Budget(limits.CONNECTION_ANSWERS._replace(most_bytes=8 << 20))
        place, other = Reservation(room), Reservation(room)
        wait_ms = 30_000 if end == "drain" else 100
        poll = asyncio.create_task(frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": wait_ms}, place))
        watch = await frontend.watching("t")
        await other.replace(8 << 20)
        hosting.write("t", [Written(b"1")])
        frontend.notify(watch)
        await until(lambda: place in room.waiting or poll.done())
        if end != "deadline":
            frontend.diff.drain()
            frontend.diff.drain()
        status, _, body = await poll
        assert (status, body["records"], body["next_from_seq"]) == (200, [], 0)
        assert not room.waiting
        other.close()
        assert room.held_bytes < 1000, "no more than the answer, which nobody has taken here"
        _, _, body = await frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000}, Reservation(room))
        assert [record["$seq"] for record in body["records"]] == [1]
        assert frontend.cell.get("long_polls") == 0

    on_loop(hosting, test)


@pytest.mark.parametrize(
    ("left", "status", "code"),
    [("other", 401, "unauthorized"), ("mine:r:u", 403, "forbidden"), ("mine:w", 403, "forbidden")],
)
def test_a_long_poll_ends_with_the_right_to_it(hosting: Hosting, left: str, status: int, code: str) -> None:
    """It got what was written up to 30 s after its key had been revoked."""
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        def begin(key: str) -> asyncio.Task[tuple[int, dict[bytes, bytes], Any]]:
            return asyncio.create_task(frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000}, key=key))

        frontend.access.replace(KeyRing(parse_list("mine,stays")))
        ends, stays = begin("mine"), begin("stays")
        watch = await frontend.watching("t")
        await until(lambda: frontend.cell.get("long_polls") == 2)
        frontend.access.replace(KeyRing(parse_list(f"stays,{left}")))
        hosting.write("t", [Written(b"1")])
        frontend.notify(watch)
        answer = await ends
        assert (answer[0], answer[2].get("error", {}).get("code")) == (status, code)
        assert [record["data"] for record in (await stays)[2]["records"]] == [1]
        assert frontend.cell.get("long_polls") == 0

    on_loop(hosting, test)


def test_a_long_poll_that_begins_while_its_key_is_revoked_ends_at_once(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        frontend.access.replace(KeyRing(parse_list("mine,stays")))
        wait_for = CatchingUp.wait_for

        async def waited(catching_up: CatchingUp, name: str) -> bool:
            frontend.access.replace(KeyRing(parse_list("stays")))
            return await wait_for(catching_up, name)

        monkeypatch.setattr(CatchingUp, "wait_for", waited)
        status, _, _ = await frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000}, key="mine")
        assert status == 401

    on_loop(hosting, test)


def test_a_client_that_goes_away_leaves_no_long_poll_behind(hosting: Hosting) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        poll = asyncio.create_task(frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000}))
        await frontend.watching("t")
        frontend.gone.set()
        assert (await poll)[0] == 0
        assert frontend.cell.get("long_polls") == 0

    on_loop(hosting, test)


def test_the_topic_of_a_long_poll_is_deleted(hosting: Hosting) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        poll = asyncio.create_task(frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000}))
        watch = await frontend.watching("t")
        hosting.retire("t")
        frontend.notify(watch)
        status, _, body = await poll
        assert (status, body["error"]["code"]) == (404, "topic_not_found")

    on_loop(hosting, test)


def test_a_long_poll_goes_on_in_a_topic_that_is_made_again_while_it_waits_for_room(hosting: Hosting) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        room = Budget(limits.CONNECTION_ANSWERS._replace(most_bytes=8 << 20))
        place, other = Reservation(room), Reservation(room)
        poll = asyncio.create_task(frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000}, place))
        watch = await frontend.watching("t")
        await other.replace(8 << 20)
        hosting.retire("t")
        frontend.notify(watch)
        await until(lambda: place in room.waiting)
        hosting.make("t")
        other.close()
        again = await frontend.watching("t")
        assert again.token == watch.token
        hosting.write("t", [Written(b"1")])
        frontend.notify(again)
        status, _, body = await poll
        assert (status, [record["$seq"] for record in body["records"]]) == (200, [1])

    on_loop(hosting, test)


def test_long_polls_are_bounded(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LONG_POLLS", limits.LONG_POLLS._replace(most_count=1))
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        poll = asyncio.create_task(frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000}))
        await frontend.watching("t")
        status, headers, body = await frontend.ask("POST", "/v0/topics/t/diff", {"wait_ms": 30_000})
        assert (status, body["error"]["detail"]) == (429, {"limit": "long_polls", "max": 1})
        assert b"retry-after" in headers
        frontend.diff.drain()
        assert (await poll)[0] == 200

    on_loop(hosting, test)


# -- what fails inside


def test_a_fault_is_a_500_that_shows_nothing(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:
    hosting.make("t")

    def fault(*_: object) -> None:
        raise RuntimeError("secret of the inside")

    async def test(frontend: Frontend) -> None:
        monkeypatch.setattr(frontend.reader, "read_page", fault)
        status, _, body = await frontend.ask("POST", "/v0/topics/t/diff", {})
        assert (status, body["error"]["code"]) == (500, "internal")
        assert "secret" not in body["error"]["message"]
        assert (frontend.cell.get("responses_5xx"), frontend.cell.get("requests")) == (1, 1)

    on_loop(hosting, test)


# -- methods and probes


def test_methods(hosting: Hosting) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        for path, allowed in (
            ("/v0/topics/t", b"DELETE, GET, HEAD, OPTIONS, POST, PUT"),
            ("/v0/topics/t/diff", b"OPTIONS, POST"),
            ("/v0/topics", b"GET, HEAD, OPTIONS"),
        ):
            status, headers, body = await frontend.ask("PATCH", path)
            assert (status, headers[b"allow"], body["error"]["code"]) == (405, allowed, "method_not_allowed")
            status, headers, _ = await frontend.ask("OPTIONS", path)
            assert (status, headers[b"allow"]) == (204, allowed)
        whole = await frontend.ask("OPTIONS", "*")
        assert (whole[0], whole[1][b"allow"]) == (204, b"DELETE, GET, HEAD, OPTIONS, POST, PUT")
        assert (await frontend.ask("GET", "*"))[0] == 404
        assert (await frontend.ask("HEAD", "/v0/topics/t"))[0] == 200
        for path in ("/v0/topics/", "/v0/topics/t/", "/v0/topics//diff", "/v0/topics/a/b/diff", "/v0/topics/t/diff/"):
            assert (await frontend.ask("POST", path, {}))[0] == 404

    on_loop(hosting, test)


def test_probes_tell_recovering_from_ready(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        cell = hosting.shared.control.cell(Role.WALSHARD, 0)
        cell.set("generation", 0)
        cell.set("progress_ppm", 400_000)
        status, headers, body = await frontend.ask("GET", "/v0/ready")
        assert (status, body["error"]["code"], body["error"]["detail"]) == (503, "not_ready", {"replay_progress": 0.4})
        assert b"retry-after" in headers
        assert (await frontend.ask("GET", "/v0/health"))[2]["status"] == "ok"
        cell.set("generation", 1)
        cell.set("topics", 12)
        cell.set("state", ProcessState.RECOVERING)  # killed and started again: its topics can be read
        body = (await frontend.ask("GET", "/readyz"))[2]
        assert (body["status"], body["topics"], body["wal_replay_complete"]) == ("ready", 12, False)
        assert body["recovering_shards"] == [0]
        cell.set("state", ProcessState.READY)
        cell.set("wal_read_only", 1)
        body = (await frontend.ask("GET", "/readyz"))[2]
        assert (body["wal_replay_complete"], body["read_only_shards"]) == (True, [0])
        assert "hanging_shards" not in body
        cell.set("heartbeat_ms", 1)
        body = (await frontend.ask("GET", "/readyz"))[2]
        assert (body["wal_replay_complete"], body["hanging_shards"]) == (True, [0])

    on_loop(hosting, test)


def test_effective_priority_is_what_is_scheduled_by(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Priority of its configuration, and age for as long as something new in it has been waiting here."""
    hosting.make("t", TopicConfig(priority=-700))
    hosting.make("other", TopicConfig(priority=30))
    monkeypatch.setattr(Hub, "waiting_ms", lambda _hub, name: 4_000 if name == "t" else 0)

    async def test(frontend: Frontend) -> None:
        _, _, state = await frontend.ask("GET", "/v0/topics/t")
        assert state["effective_priority"] == -300
        _, _, listed = await frontend.ask("GET", "/v0/topics")
        assert {entry["topic"]: entry["effective_priority"] for entry in listed["topics"]} == {"t": -300, "other": 30}

    on_loop(hosting, test)


def test_when_a_topic_was_read_is_told_by_the_wall_clock(hosting: Hosting) -> None:
    """The clock of expiry is not asked: it does not yet take a clock that was put forward for time."""
    hosting.make("t")
    hosting.write("t", [Written(b"1")])

    async def test(frontend: Frontend) -> None:
        reads: tuple[tuple[Any, ...], ...] = (
            ("GET", "/v0/topics/t"),
            ("GET", "/v0/topics?touch=true"),
            ("POST", "/v0/topics/t/diff", {}),
        )
        for read in reads:
            frontend.reader.now_ms()
            hosting.clock.skew_ms += 86_400_000
            status, _, _ = await frontend.ask(*read)
            assert status == 200
            assert frontend.reader.now_ms() == hosting.clock.monotonic_ms()
            status, _, answer = await frontend.ask("GET", "/v0/topics/t?touch=false")
            assert answer["last_read_ts"] == hosting.clock.now_ms()

    on_loop(hosting, test)


# -- messages of a WebSocket


@pytest.mark.parametrize("filling", ["x", "é", "💧"])
def test_a_long_message_is_counted_until_it_is_answered(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch, filling: str
) -> None:
    """In bytes, not in characters, and no longer: the socket stays open."""
    counted: list[int] = []
    decode_command = websocket_commands.decode

    def decode(body: bytes, *most_bytes: int) -> Command:
        counted.append(long_bodies.held_bytes)
        return decode_command(body, *most_bytes)

    monkeypatch.setattr(websocket_commands, "decode", decode)
    padding = filling * ((LONG_BYTES + 100_000) // len(filling.encode()))
    text = msgspec.json.encode({"op": "ping", "request_id": 1, "padding": padding}).decode()

    async def test(frontend: Frontend) -> None:
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        received: asyncio.Queue[Any] = asyncio.Queue()
        scope = {"type": "websocket", "http_version": "1.1", "path": "/v0/ws", "query_string": b"", "headers": []}
        sent.put_nowait({"type": "websocket.connect"})
        app = asyncio.create_task(frontend.app(scope, sent.get, received.put))
        assert (await received.get())["type"] == "websocket.accept"
        for _ in range(3):
            sent.put_nowait({"type": "websocket.receive", "text": text})
            assert msgspec.json.decode((await received.get())["text"]) == {"op": "pong", "request_id": 1}
        # One that was counted as it came is not counted again, but as far as it is longer in UTF-8.
        share: MessageReservation | None = MessageReservation()
        assert share is not None
        assert share.reach(LONG_BYTES)
        came_bytes = long_bodies.held_bytes + medium_bodies.held_bytes
        medium_bytes = medium_bodies.held_bytes
        sent.put_nowait({"type": "websocket.receive", "text": text, RESERVATION: share})
        del share
        await received.get()
        assert counted.pop() == LONG_BYTES
        assert (came_bytes, medium_bytes) == (LONG_BYTES, LONG_BYTES)
        await until(lambda: not long_bodies.held_bytes and not medium_bodies.held_bytes)
        sent.put_nowait({"type": "websocket.receive", "text": '{"op":"ping","request_id":2}'})
        assert msgspec.json.decode((await received.get())["text"])["request_id"] == 2
        assert counted == [len(text.encode())] * 3 + [0]
        sent.put_nowait({"type": "websocket.disconnect"})
        await app

    on_loop(hosting, test)
