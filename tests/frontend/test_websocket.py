"""A WebSocket whose key changes, or which ends, in the middle of a command (api §0.10, §7.7)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from tests.frontend.hosting import Hosting, Written
from tests.frontend.live import turns, until
from tests.frontend.test_app import Frontend, on_loop
from topics.core.keys import KeyRing, parse_list
from topics.frontend.asgi import DROPPED
from topics.frontend.entry import limits
from topics.frontend.reads import node_sets
from topics.frontend.reads.catching_up import CatchingUp
from topics.shm import append_messages, messages
from topics.shm.append_messages import AppendReply
from topics.shm.messages import MessageKind
from topics.shm.quotas import Counted

NARROWED = {"other prefixes": "me:rw:elsewhere", "no scopes": "me:d", "gone": "another:rw"}


class Client:
    """One socket of the key `me`. It takes what it is sent unless `reads` is clear."""

    def __init__(self, frontend: Frontend) -> None:
        frontend.access.replace(KeyRing(parse_list("me:rw")))
        self._frontend = frontend
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.received: list[dict[str, Any]] = []
        self.closed_with = 0
        self.reads = asyncio.Event()
        self.reads.set()
        scope = {
            "type": "websocket",
            "http_version": "1.1",
            "path": "/v0/ws",
            "query_string": b"",
            "headers": [(b"authorization", b"Bearer me")],
        }
        self._sent.put_nowait({"type": "websocket.connect"})
        self.app = asyncio.create_task(frontend.app(scope, self._sent.get, self._send))

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "websocket.send":
            self.received.append(msgspec.json.decode(message["text"]))
        elif message["type"] == "websocket.close":
            self.closed_with = message["code"]

    def say(self, **command: Any) -> None:
        self._sent.put_nowait({"type": "websocket.receive", "text": msgspec.json.encode(command).decode()})

    def say_too_much(self) -> None:
        """Send a message for which there is no room."""
        self._sent.put_nowait({"type": "websocket.receive", "text": None, "bytes": None, DROPPED: True})

    def use(self, keys: str) -> None:
        """These count from now on."""
        self._frontend.access.replace(KeyRing(parse_list(keys)))

    def of(self, op: str) -> list[dict[str, Any]]:
        return [message for message in self.received if message["op"] == op]

    async def leave(self) -> None:
        self._sent.put_nowait({"type": "websocket.disconnect"})
        await self.app


def appends(frontend: Frontend) -> list[int]:
    """Request ids of all writes that were sent to the shard."""
    peeked = frontend.hosting.shared.rings[0][0].requests.peek()
    return [request_id for kind, request_id, _ in (messages.head(m) for m, _ in peeked) if kind == MessageKind.APPEND]


@pytest.mark.parametrize("keys", NARROWED.values(), ids=NARROWED)
def test_a_key_that_is_narrowed_while_a_subscription_catches_up(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    hosting.make("t")
    hosting.write("t", [Written(b"1")])

    async def test(frontend: Frontend) -> None:
        behind, caught_up = asyncio.Event(), asyncio.Event()

        async def catch_up(_self: CatchingUp, _names: Iterable[str]) -> None:
            behind.set()
            await caught_up.wait()

        monkeypatch.setattr(CatchingUp, "wait_for_all", catch_up)
        client = Client(frontend)
        client.say(op="subscribe", request_id=1, topic="t")
        await behind.wait()
        client.use(keys)
        caught_up.set()
        await until(lambda: client.of("error") or client.closed_with)
        await turns()
        assert not client.of("subscribed")
        assert not client.of("record")
        await client.leave()

    on_loop(hosting, test)


@pytest.mark.parametrize("keys", NARROWED.values(), ids=NARROWED)
def test_a_key_that_is_narrowed_while_a_subscription_waits_to_be_answered(hosting: Hosting, keys: str) -> None:
    hosting.make("t")
    hosting.write("t", [Written(b"1")])

    async def test(frontend: Frontend) -> None:
        client = Client(frontend)
        client.say(op="ping", request_id=0)
        await until(lambda: client.of("pong"))
        client.reads.clear()
        for _ in range(limits.SOCKET_MESSAGES.most_count + 1):
            client.say(op="ping", request_id=0)
        client.say(op="subscribe", request_id=1, topic="t")
        await turns(100)  # it has found no room
        client.use(keys)
        client.reads.set()
        await until(lambda: client.of("error") or client.closed_with)
        await turns()
        assert not client.of("record")
        await client.leave()

    on_loop(hosting, test)


@pytest.mark.parametrize("keys", ["me:rw:elsewhere", "me:r"])
def test_a_key_that_is_narrowed_while_a_publish_waits(hosting: Hosting, keys: str) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        client = Client(frontend)
        for request_id in range(limits.SOCKET_PUBLISHES.most_count + 1):
            client.say(op="publish", request_id=request_id, topic="t", records=[{"data": 1}])
        await until(lambda: len(appends(frontend)) == limits.SOCKET_PUBLISHES.most_count)
        await turns()
        client.use(keys)
        reply = append_messages.encode_append_reply(
            appends(frontend)[0], AppendReply(1, 1, 1, False, False, "disk", 1, 0)
        )
        assert hosting.shared.rings[0][0].replies.push(reply)
        hosting.shared.frontend_wakes[0].signal_always()
        await until(lambda: client.of("error") or client.closed_with)
        await turns()
        assert len(appends(frontend)) == limits.SOCKET_PUBLISHES.most_count
        await client.leave()

    on_loop(hosting, test)


def test_a_publish_that_is_cut_before_its_first_step_counts_no_longer(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosting.make("t")

    async def test(frontend: Frontend) -> None:
        client = Client(frontend)
        submit = frontend.append.submit

        def submit_and_cut(*write: Any) -> asyncio.Future[AppendReply]:
            client.app.cancel()
            return submit(*write)

        monkeypatch.setattr(frontend.append, "submit", submit_and_cut)
        client.say(op="publish", request_id=1, topic="t", records=[{"data": 1}])
        with contextlib.suppress(asyncio.CancelledError):
            await client.app
        assert appends(frontend)
        (digest,) = (key.digest for key in parse_list("me:rw"))
        assert all(frontend.key_counts.claim(digest, what, most=1) for what in Counted)

    on_loop(hosting, test)


def test_a_message_for_which_there_was_no_room_is_answered_and_the_socket_lives_on(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        client = Client(frontend)
        client.say_too_much()
        client.say(op="ping", request_id="next")
        await until(lambda: client.of("pong"))
        error, pong = client.received
        assert (error["op"], error["request_id"], error["code"]) == ("error", None, "throttled")
        assert error["detail"]["limit"] == "body_bytes"
        assert pong["request_id"] == "next"
        await client.leave()

    on_loop(hosting, test)


def test_a_subscription_that_is_refused_for_its_writers_leaves_the_one_before_it(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer for a command, and nothing ended for one that fails."""
    monkeypatch.setattr(node_sets.node_sets.budget, "most_bytes", 0)
    hosting.make("t")
    hosting.write("t", [Written(b"1")])

    async def test(frontend: Frontend) -> None:
        client = Client(frontend)
        client.say(op="subscribe", request_id=1, topic="t")
        await until(lambda: client.of("record"))
        client.say(op="subscribe", request_id=2, topic="t", node=[f"writer-{n:040}" for n in range(100)])
        await until(lambda: client.of("error"))
        client.say(op="unsubscribe", request_id=3, topic="t")
        await until(lambda: client.of("unsubscribed"))
        assert [message["request_id"] for message in client.of("subscribed")] == [1]
        (error,) = client.of("error")
        assert (error["request_id"], error["code"], error["detail"]["limit"]) == (2, "throttled", "node_bytes")
        assert [message["topics"] for message in client.of("unsubscribed")] == [["t"]], "the first one still was"
        await client.leave()

    on_loop(hosting, test)
