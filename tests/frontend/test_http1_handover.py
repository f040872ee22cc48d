"""Other protocols on the same port: HTTP/2, with prior knowledge or by upgrade, is Hypercorn's, a WebSocket ours."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import h2.config
import h2.connection
import h2.events
import pytest
import wsproto
from wsproto.events import AcceptConnection, CloseConnection, Ping, Request, TextMessage

from tests.frontend.http1_server import Client, Server, until
from topics.frontend.http import http1_websocket
from topics.frontend.http.deadlines import HttpLimits
from topics.shm.control import Cell
from topics.shm.quotas import Quota

H2_HEADERS = [(":method", "POST"), (":path", "/echo"), (":scheme", "http"), (":authority", "test")]


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as connected:
        yield connected


def h2_answers(
    client: Client, h2c: h2.connection.H2Connection, streams: int, received: bytes = b""
) -> dict[int, bytes]:
    """The bodies of the next answers, by stream. `received` has been read from the connection already."""
    bodies: dict[int, bytes] = {}
    ended = 0
    while ended < streams:
        data, received = received or client.socket.recv(65_536), b""
        assert data, "the connection was closed"
        for event in h2c.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                assert dict(event.headers)[b":status"] == b"200"
            elif isinstance(event, h2.events.DataReceived):
                bodies[event.stream_id] = bodies.get(event.stream_id, b"") + event.data
                h2c.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                ended += 1
        client.send(h2c.data_to_send())
    return bodies


@pytest.mark.parametrize("piece_bytes", [10, 100_000])
def test_h2c_with_prior_knowledge(server: Server, client: Client, piece_bytes: int) -> None:
    h2c = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
    h2c.initiate_connection()
    for stream_id, body in ((1, b"first"), (3, b"x" * 10_000)):
        h2c.send_headers(stream_id, H2_HEADERS)
        h2c.send_data(stream_id, body, end_stream=True)
    data = h2c.data_to_send()
    for start in range(0, len(data), piece_bytes):
        client.send(data[start : start + piece_bytes])
    assert h2_answers(client, h2c, 2) == {1: b"first", 3: b"x" * 10_000}
    assert server.app.scopes[-1]["http_version"] == "2"


def test_h2c_by_upgrade(client: Client) -> None:
    h2c = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
    settings = h2c.initiate_upgrade_connection()
    assert settings is not None
    upgrade = f"HTTP2-Settings: {settings.decode()}"
    client.get("/big?20", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", upgrade)
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.socket.recv(65_536)
    head, _, received = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101")
    assert b"upgrade: h2c" in head.lower()
    client.send(h2c.data_to_send())
    assert h2_answers(client, h2c, 1, received) == {1: b"x" * 20}


def test_lists_of_an_upgrade_may_come_in_several_headers(server: Server, client: Client) -> None:
    before = len(server.app.scopes)
    upgrade = ("Connection: Upgrade", "Connection: HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: ")
    client.get("/big?20", *upgrade, "Accept: a/b", "X: 1", "X: 2", "Accept: text/html;q=0.5")
    assert client.head()[0] == 101
    until(lambda: len(server.app.scopes) > before, "the request")
    headers = server.app.scopes[-1]["headers"]
    assert dict(headers)[b"accept"] == b"a/b, text/html;q=0.5"
    assert [value for name, value in headers if name == b"x"] == [b"1", b"2"]


def websocket_messages(client: Client, connection: wsproto.WSConnection, count: int) -> list[str]:
    texts: list[str] = []
    while len(texts) < count:
        data = client.socket.recv(65_536)
        assert data, "the connection was closed"
        connection.receive_data(data)
        for event in connection.events():
            if isinstance(event, TextMessage):
                texts.append(event.data)
            else:
                assert isinstance(event, AcceptConnection | Ping), event
    return texts


@pytest.mark.parametrize("after_a_request", [False, True])
def test_websocket_echo(client: Client, after_a_request: bool) -> None:
    if after_a_request:
        assert client.post("/echo", b"hi").answer().body == b"hi"
    connection = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
    client.send(connection.send(Request(host="test", target="/ws")))
    data = client.socket.recv(65_536)
    assert data.startswith(b"HTTP/1.1 101")
    connection.receive_data(data)
    assert any(isinstance(event, AcceptConnection) for event in connection.events())
    client.send(connection.send(TextMessage(data="one")) + connection.send(TextMessage(data="two")))
    assert websocket_messages(client, connection, 2) == ["ONE", "TWO"]
    client.send(connection.send(CloseConnection(code=1000)))
    connection.receive_data(client.socket.recv(65_536))
    assert any(isinstance(event, CloseConnection) for event in connection.events())


@pytest.mark.parametrize("app_ends", [True, False])
def test_a_websocket_that_nobody_reads_from_gives_its_place_back(
    app_ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More messages than wait for an app: until it takes some no more is read, not even the end."""
    monkeypatch.setattr(http1_websocket, "GONE_S", 0.05)
    cell = Cell(memoryview(array("Q", [0])), ("held",))
    with Server(places=Quota("connections", 1, "held", cell, [cell])) as server:
        with server.client() as client:
            connection = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
            client.send(connection.send(Request(host="test", target="/deaf")))
            connection.receive_data(client.socket.recv(65_536))
            assert any(isinstance(event, AcceptConnection) for event in connection.events())
            client.send(b"".join(connection.send(TextMessage(data="unheard")) for _ in range(100)))
            if app_ends:
                server.call(server.app.go.set)
                until(lambda: not server.app.running, "the app to end")
            client.reset()
        until(lambda: not cell.get("held"), "the place to be given back")


def test_websocket_behind_a_pipelined_request(client: Client) -> None:
    """The upgrade must wait until what came before it is answered."""
    connection = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
    upgrade = connection.send(Request(host="test", target="/ws"))
    client.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\nfirst" + upgrade)
    assert client.answer().body == b"first"
    assert client.head()[0] == 101


def test_upgrade_with_a_body_is_answered_without_one(client: Client) -> None:
    """`curl --http2 -d` sends it so: HTTP/1.1 goes on, and the body is the request's, never the next request."""
    client.post("/echo", b"GET /evil HTTP/1.1\r\n\r\n", "Connection: Upgrade", "Upgrade: h2c", "HTTP2-Settings: ")
    assert client.answer().body == b"GET /evil HTTP/1.1\r\n\r\n"


def test_unknown_upgrade_is_ignored(client: Client) -> None:
    assert client.post("/echo", b"hi", "Connection: Upgrade", "Upgrade: teapot/1").answer().body == b"hi"


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_unknown_upgrade_does_not_lift_the_limits(loop: str) -> None:
    """A client that takes nothing is cut as without it."""
    limits = HttpLimits(write_stall_timeout_ms=200, linger_ms=50)
    with Server(loop=loop, limits=limits) as server, server.client(receive_buffer_bytes=4096) as client:
        client.get("/endless", "Connection: Upgrade", "Upgrade: teapot/1")
        until(lambda: server.app.running, "the app runs")
        until(lambda: not server.app.running, "the app learns that its client is given up")
        assert isinstance(server.app.errors[0], ConnectionResetError)


def test_drain_closes_idle_connections_of_other_protocols() -> None:
    with Server(grace_ms=10_000) as server, server.client() as client:
        h2c = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        h2c.initiate_connection()
        h2c.send_headers(1, H2_HEADERS)
        h2c.send_data(1, b"hi", end_stream=True)
        client.send(h2c.data_to_send())
        assert h2_answers(client, h2c, 1) == {1: b"hi"}
        server.begin_shutdown()
        server.wait_stopped()


def test_grace_cuts_a_websocket() -> None:
    with Server(grace_ms=50) as server, server.client() as client:
        connection = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        client.send(connection.send(Request(host="test", target="/ws")))
        assert client.head()[0] == 101
        until(lambda: server.app.scopes, "the app runs")
        server.begin_shutdown()
        server.wait_stopped()
        assert server.app.cut == 1
