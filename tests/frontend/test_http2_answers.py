"""Many long answers on one HTTP/2 connection whose client takes none: few are made, and nobody else waits for that."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
from priority.priority import Stream

from tests.frontend.http1_server import Client, Server, until
from tests.frontend.http2_client import Streams
from topics.frontend.entry import stalled_clients
from topics.frontend.entry.limits import CONNECTION_ANSWERS
from topics.frontend.http import connections
from topics.frontend.http.deadlines import HttpLimits
from topics.frontend.http.http2_buffer import BoundedProtocol, BoundedStream
from topics.frontend.http.http2_websocket import BoundedWebSocket
from topics.frontend.http.hypercorn_connection import ConnectionContext, HypercornConnection

PAGE_BYTES = 1 << 20
KEPT_MAX_BYTES = CONNECTION_ANSWERS.most_bytes
AT_ONCE = KEPT_MAX_BYTES // PAGE_BYTES
"""Pages that are made and kept for one connection."""
PAGES = 100
"""Streams that a connection may have."""
PARTS = (ConnectionContext, HypercornConnection, BoundedProtocol, BoundedStream, BoundedWebSocket, Stream)
"""Objects of each connection, and of each of its streams."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def streams_of(client: Client) -> Streams:
    return Streams(client.socket)


def ask_pages(streams: Streams, count: int) -> list[int]:
    return [streams.ask(f"/page?{PAGE_BYTES}") for _ in range(count)]


def kept_when_all_have_asked(server: Server, pages: int) -> int:
    """Return the bytes that the service says it keeps for its clients."""
    until(lambda: server.app.asked == pages, "the requests")
    server.settled(lambda: server.app.made)
    return server.connections.kept.budget.held_bytes


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_connection_keeps_as_many_as_there_is_room_for_and_the_others_when_they_are_taken(loop: str) -> None:
    with Server(loop=loop) as server, server.client() as client:
        streams = streams_of(client)
        pages = ask_pages(streams, PAGES)
        assert kept_when_all_have_asked(server, PAGES) == KEPT_MAX_BYTES
        assert server.app.made == AT_ONCE
        assert server.app.running == PAGES
        # One that is taken makes room for one.
        streams.take(pages[0])
        streams.read_to_the_end_of(pages[0])
        assert server.settled(lambda: server.app.made) == AT_ONCE + 1
        assert server.connections.kept.budget.held_bytes == KEPT_MAX_BYTES
        streams.take(*pages[1:])
        streams.read_to_the_end_of(*pages)
        assert [streams.got_bytes(stream_id) for stream_id in pages] == [PAGE_BYTES] * PAGES
        until(lambda: not server.app.running, "the app calls to end")
        until(lambda: not server.connections.kept.budget.held_bytes, "nothing to be kept")


def test_short_answers_and_streams_beside_them_do_not_wait(server: Server) -> None:
    with server.client() as client:
        streams = streams_of(client)
        events = streams.ask("/large")  # which begins, and goes on as it is taken
        ask_pages(streams, PAGES // 2)
        kept_when_all_have_asked(server, PAGES // 2)
        short = streams.ask("/stream")
        streams.take(short, events)
        streams.read_to_the_end_of(short)
        before_bytes = streams.got_bytes(events)
        while streams.got_bytes(events) < before_bytes + 4 * PAGE_BYTES:
            streams.read()
        assert server.app.made == AT_ONCE


def test_another_connection_has_room_of_its_own(server: Server) -> None:
    with server.client() as client, server.client() as other_client:
        ask_pages(streams_of(client), AT_ONCE + 1)
        kept_when_all_have_asked(server, AT_ONCE + 1)
        other = streams_of(other_client)
        page = other.ask(f"/page?{PAGE_BYTES}")
        other.take(page)
        other.read_to_the_end_of(page)
        assert server.settled(lambda: server.app.made) == AT_ONCE + 1


def test_over_http1_nobody_waits_for_room(server: Server) -> None:
    with server.client() as client:
        for _ in range(2):
            assert len(client.get(f"/page?{2 * KEPT_MAX_BYTES}").answer().body) == 2 * KEPT_MAX_BYTES


def test_streams_that_are_reset_are_in_nobody_s_way(server: Server) -> None:
    with server.client() as client:
        streams = streams_of(client)
        pages = ask_pages(streams, AT_ONCE + 4)
        kept_when_all_have_asked(server, len(pages))
        # Two that wait: their calls end. Two that are made: what is kept of them goes, and the last two are made.
        for stream_id in (*pages[AT_ONCE : AT_ONCE + 2], *pages[:2]):
            streams.give_up(stream_id)
        until(lambda: server.app.made == AT_ONCE + 2, "those that are left to be made")
        until(lambda: server.app.running == AT_ONCE, "the calls of the others to end")
        assert server.settled(lambda: server.connections.kept.budget.held_bytes) == KEPT_MAX_BYTES
        left = [*pages[2:AT_ONCE], *pages[AT_ONCE + 2 :]]
        streams.take(*left)
        streams.read_to_the_end_of(*left)


def test_nothing_is_left_of_a_connection_that_is_closed(server: Server) -> None:
    with server.client() as client:
        ask_pages(streams_of(client), PAGES)
        kept_when_all_have_asked(server, PAGES)
    until(lambda: not server.app.running, "the calls to end")
    until(lambda: not server.connections.kept.budget.held_bytes, "nothing to be kept")
    assert server.app.made == AT_ONCE
    assert not server.app.cut, "they ended only when they were cancelled"


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("path", ["/echo", "/wait", "/endless", "/ws"])
def test_nothing_of_a_connection_that_is_over_waits_for_the_collector(server: Server, path: str, end: str) -> None:
    """Its streams have not sent their end, wait for an app or for their client, or are WebSockets."""
    gc.collect()
    gc.disable()
    try:
        with server.client() as client:
            streams = streams_of(client)
            for _ in range(3):
                if path == "/ws":
                    streams.open_websocket(path)
                else:
                    streams.ask(path)
            until(lambda: len(server.app.scopes) == 3, "all have asked")
            if path == "/echo":
                until(lambda: not server.app.running, "all are answered")
            if end == "reset":
                client.reset()
        server.call(server.app.go.set, server.app.scopes.clear)
        until(lambda: not any(isinstance(one, PARTS) for one in gc.get_objects()), "all of it is free")
    finally:
        gc.enable()


def test_what_might_have_been_longer_holds_as_much_as_it_is_long(server: Server) -> None:
    with server.client() as client:
        streams = streams_of(client)
        pages = [streams.ask(f"/page?{PAGE_BYTES}-{KEPT_MAX_BYTES // 2}") for _ in range(PAGES)]
        # For the last of them half of the room was left: they are not two, as if all were as long as they might be.
        assert kept_when_all_have_asked(server, PAGES) == PAGE_BYTES * (AT_ONCE // 2 + 1)
        streams.take(*pages)
        streams.read_to_the_end_of(*pages)


def test_who_takes_nothing_holds_up_the_others_of_its_connection_for_a_time_only() -> None:
    limits = HttpLimits(write_stall_timeout_ms=300, linger_ms=20)
    with Server(limits=limits) as server, server.client() as client:
        streams = streams_of(client)
        pages = ask_pages(streams, AT_ONCE + 3)
        kept_when_all_have_asked(server, len(pages))
        streams.take(*pages[AT_ONCE:])
        streams.read_to_the_end_of(*pages[AT_ONCE:])
        assert streams.reset >= set(pages[:3])
        until(lambda: not server.app.running, "the calls to end")
        until(lambda: not server.connections.kept.budget.held_bytes, "nothing to be kept")


def test_a_stop_does_not_wait_for_them_beyond_its_grace() -> None:
    with Server(grace_ms=200) as server, server.client() as client:
        streams = streams_of(client)
        ask_pages(streams, AT_ONCE + 3)
        kept_when_all_have_asked(server, AT_ONCE + 3)
        server.begin_shutdown()
        server.wait_stopped()
        assert server.app.running == 0
        assert server.connections.kept.budget.held_bytes == 0


def test_a_stop_waits_for_those_who_take_theirs() -> None:
    with Server() as server, server.client() as client:
        streams = streams_of(client)
        pages = ask_pages(streams, AT_ONCE + 3)
        kept_when_all_have_asked(server, len(pages))
        server.begin_shutdown()
        streams.take(*pages)
        streams.read_to_the_end_of(*pages)
        server.wait_stopped()


def test_streams_of_all_connections_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that that of HTTP/1.1 has: who has taken nothing for longest is reset, and its connection goes on."""
    monkeypatch.setattr(connections, "CHECK_S", 0.05)
    monkeypatch.setattr(stalled_clients, "STALL_CUT_MS", 200)
    with Server() as server, contextlib.ExitStack() as stack:
        server.connections.kept.high_bytes = 7_000_000
        clients = [streams_of(stack.enter_context(server.client())) for _ in range(3)]
        asked = []
        for count, streams in enumerate(clients, start=1):
            asked.append(streams.ask("/big?3000000"))
            until(lambda: len(server.app.scopes) == count, "the request")
            server.settled(lambda: server.connections.kept.budget.held_bytes)
        while asked[0] not in clients[0].reset:
            clients[0].read()
        assert server.connections.kept.budget.held_bytes == 6_000_000
        for streams, stream_id in zip(clients[1:], asked[1:], strict=True):
            streams.take(stream_id)
            streams.read_to_the_end_of(stream_id)
        again = clients[0].ask("/stream")
        clients[0].take(again)
        clients[0].read_to_the_end_of(again)


def test_what_a_connection_of_http1_keeps_counts() -> None:
    with Server() as server, contextlib.ExitStack() as stack:
        client = stack.enter_context(server.client(receive_buffer_bytes=4096))
        client.get("/big?30000000")
        until(lambda: server.connections.kept.budget.held_bytes > 20_000_000, "its answer to be kept")
        assert len(client.answer().body) == 30_000_000
        # The client may have the last of it before the server's loop has heard that it is out.
        until(lambda: not server.connections.kept.budget.held_bytes, "nothing to be kept")
