"""Many long answers on one HTTP/2 connection whose client takes none: few are made, and nobody else waits for that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from tests.frontend.http1_server import Client, Server, until
from topics.frontend.http import kept_answers
from topics.frontend.http.answer_room import KEPT_MAX_BYTES
from topics.frontend.http.http1 import HttpLimits
from topics.frontend.live import pulse

GENEROUS = (1 << 31) - 1 - 65_535
PAGE_BYTES = 1 << 20
AT_ONCE = KEPT_MAX_BYTES // PAGE_BYTES
"""So many of these are made and kept for one connection."""
PAGES = 100
"""As many streams as a connection may have."""
HEADERS = [(":method", "GET"), (":scheme", "http"), (":authority", "test")]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


class Streams:
    """A client that gives its connection all the window there is, and its streams none until they are told to read."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        self._h2.increment_flow_control_window(GENEROUS)
        self._next = 1
        self._agreed = 0
        self.got_bytes: dict[int, int] = {}
        self.ended: set[int] = set()
        self.reset: set[int] = set()
        self.flush()
        while self._agreed < 2:
            self.read()

    def ask(self, path: str) -> int:
        stream_id, self._next = self._next, self._next + 2
        self._h2.send_headers(stream_id, [*HEADERS, (":path", path)], end_stream=True)
        self.flush()
        return stream_id

    def ask_pages(self, count: int) -> list[int]:
        return [self.ask(f"/page?{PAGE_BYTES}") for _ in range(count)]

    def take(self, *stream_ids: int) -> None:
        """Their windows open."""
        for stream_id in stream_ids:
            self._h2.increment_flow_control_window(GENEROUS, stream_id)
        self.flush()

    def give_up(self, stream_id: int) -> None:
        self._h2.reset_stream(stream_id)
        self.flush()

    def flush(self) -> None:
        self._client.send(self._h2.data_to_send())

    def read(self) -> None:
        data = self._client.socket.recv(1 << 20)
        assert data, "the connection was closed"
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                self.got_bytes[event.stream_id] = self.got_bytes.get(event.stream_id, 0) + len(event.data)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.reset.add(event.stream_id)
            elif isinstance(event, h2.events.SettingsAcknowledged):
                self._agreed += 1
        self.flush()

    def read_to_the_end_of(self, *stream_ids: int) -> None:
        while not self.ended.issuperset(stream_ids):
            assert not self.reset.intersection(stream_ids)
            self.read()


def kept_when_all_have_asked(server: Server, pages: int) -> int:
    """What the service says that it keeps for its clients."""
    until(lambda: server.app.asked == pages, "the requests")
    server.settled(lambda: server.app.made)
    return server.connections.kept.held_bytes


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_connection_keeps_as_many_as_there_is_room_for_and_the_others_when_they_are_taken(loop: str) -> None:
    with Server(loop=loop) as server, server.client() as client:
        streams = Streams(client)
        pages = streams.ask_pages(PAGES)
        assert kept_when_all_have_asked(server, PAGES) == KEPT_MAX_BYTES
        assert server.app.made == AT_ONCE
        assert server.app.running == PAGES
        # One that is taken makes room for one.
        streams.take(pages[0])
        streams.read_to_the_end_of(pages[0])
        assert server.settled(lambda: server.app.made) == AT_ONCE + 1
        assert server.connections.kept.held_bytes == KEPT_MAX_BYTES
        streams.take(*pages[1:])
        streams.read_to_the_end_of(*pages)
        assert [streams.got_bytes[stream_id] for stream_id in pages] == [PAGE_BYTES] * PAGES
        until(lambda: not server.app.running, "the app calls to end")
        assert server.connections.kept.held_bytes == 0


def test_short_answers_and_streams_beside_them_do_not_wait(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client)
        events = streams.ask("/large")  # which begins, and goes on as it is taken
        streams.ask_pages(PAGES // 2)
        kept_when_all_have_asked(server, PAGES // 2)
        short = streams.ask("/stream")
        streams.take(short, events)
        streams.read_to_the_end_of(short)
        before_bytes = streams.got_bytes.get(events, 0)
        while streams.got_bytes.get(events, 0) < before_bytes + 4 * PAGE_BYTES:
            streams.read()
        assert server.app.made == AT_ONCE


def test_another_connection_has_room_of_its_own(server: Server) -> None:
    with server.client() as client, server.client() as other_client:
        Streams(client).ask_pages(AT_ONCE + 1)
        kept_when_all_have_asked(server, AT_ONCE + 1)
        other = Streams(other_client)
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
        streams = Streams(client)
        pages = streams.ask_pages(AT_ONCE + 4)
        kept_when_all_have_asked(server, len(pages))
        # Two that wait: their calls end. Two that are made: what is kept of them goes, and the last two are made.
        for stream_id in (*pages[AT_ONCE : AT_ONCE + 2], *pages[:2]):
            streams.give_up(stream_id)
        until(lambda: server.app.made == AT_ONCE + 2, "those that are left to be made")
        until(lambda: server.app.running == AT_ONCE, "the calls of the others to end")
        assert server.connections.kept.held_bytes == KEPT_MAX_BYTES
        left = [*pages[2:AT_ONCE], *pages[AT_ONCE + 2 :]]
        streams.take(*left)
        streams.read_to_the_end_of(*left)


def test_nothing_is_left_of_a_connection_that_is_closed(server: Server) -> None:
    with server.client() as client:
        Streams(client).ask_pages(PAGES)
        kept_when_all_have_asked(server, PAGES)
    until(lambda: not server.app.running, "the calls to end")
    assert server.connections.kept.held_bytes == 0
    assert server.app.made == AT_ONCE


def test_who_takes_nothing_holds_up_the_others_of_its_connection_for_a_time_only() -> None:
    limits = HttpLimits(write_stall_timeout_ms=300, linger_ms=20)
    with Server(limits=limits) as server, server.client() as client:
        streams = Streams(client)
        pages = streams.ask_pages(AT_ONCE + 3)
        kept_when_all_have_asked(server, len(pages))
        streams.take(*pages[AT_ONCE:])
        streams.read_to_the_end_of(*pages[AT_ONCE:])
        assert streams.reset >= set(pages[:3])
        until(lambda: not server.app.running, "the calls to end")
        assert server.connections.kept.held_bytes == 0


def test_a_stop_does_not_wait_for_them_beyond_its_grace() -> None:
    with Server(grace_ms=200) as server, server.client() as client:
        streams = Streams(client)
        streams.ask_pages(AT_ONCE + 3)
        kept_when_all_have_asked(server, AT_ONCE + 3)
        server.begin_shutdown()
        server.wait_stopped()
        assert server.app.running == 0
        assert server.connections.kept.held_bytes == 0


def test_a_stop_waits_for_those_who_take_theirs() -> None:
    with Server() as server, server.client() as client:
        streams = Streams(client)
        pages = streams.ask_pages(AT_ONCE + 3)
        kept_when_all_have_asked(server, len(pages))
        server.begin_shutdown()
        streams.take(*pages)
        streams.read_to_the_end_of(*pages)
        server.wait_stopped()


def test_streams_of_all_connections_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that that of HTTP/1.1 has: who has taken nothing for longest is reset, and its connection goes on."""
    monkeypatch.setattr(kept_answers, "KEPT_HIGH_BYTES", 7_000_000)
    monkeypatch.setattr(kept_answers, "LOOK_S", 0.05)
    monkeypatch.setattr(pulse, "STALL_CUT_MS", 200)
    with Server() as server, contextlib.ExitStack() as stack:
        clients = [Streams(stack.enter_context(server.client())) for _ in range(3)]
        asked = []
        for count, streams in enumerate(clients, start=1):
            asked.append(streams.ask("/big?3000000"))
            until(lambda count=count: len(server.app.scopes) == count, "the request")  # type: ignore[misc]
            server.settled(lambda: server.connections.kept.held_bytes)
        while asked[0] not in clients[0].reset:
            clients[0].read()
        assert server.connections.kept.held_bytes == 6_000_000
        for streams, stream_id in zip(clients[1:], asked[1:], strict=True):
            streams.take(stream_id)
            streams.read_to_the_end_of(stream_id)
        again = clients[0].ask("/stream")
        clients[0].take(again)
        clients[0].read_to_the_end_of(again)


@pytest.mark.parametrize("protocol", ["stock", "httptools"])
def test_what_any_connection_keeps_counts(protocol: str) -> None:
    with Server("stock" if protocol == "stock" else "httptools") as server, contextlib.ExitStack() as stack:
        client = stack.enter_context(server.client(receive_buffer_bytes=4096))
        client.get("/big?30000000")
        until(lambda: server.connections.kept.held_bytes > 20_000_000, "its answer to be kept")
        assert len(client.answer().body) == 30_000_000
        assert server.connections.kept.held_bytes == 0
