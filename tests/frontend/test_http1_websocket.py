"""WebSockets over HTTP/1.1, from the first frame to the end of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import wsproto
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Ping, Pong, Request, TextMessage
from wsproto.frame_protocol import FrameDecoder

from tests.frontend.http1_server import Client, Server, until
from topics.frontend.entry.bodies import medium_bodies
from topics.frontend.http import http1_websocket
from topics.frontend.http.deadlines import HttpLimits
from topics.frontend.http.frame_budget import FRAMES_BURST, OVERDRAWN
from topics.frontend.http.http1_websocket import Http1WebSocket, Http1WebSockets
from topics.frontend.http.websocket_output import SocketStage, text_frame

LIMITS = HttpLimits(max_body_bytes=4_000_000, linger_ms=200)


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param, limits=LIMITS) as running:
        yield running


class Peer:
    """The client's end of a WebSocket."""

    def __init__(self, server: Server, path: str = "/ws", **options: Any) -> None:
        self.client = Client(server.port, **options)
        self._wire = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        self.client.send(self._wire.send(Request(host="test", target=path)))
        assert isinstance(self.next(), AcceptConnection)

    def packed(self, event: Event) -> bytes:
        return self._wire.send(event)

    def say(self, *events: Event) -> None:
        """Send all of them at once."""
        self.client.send(b"".join(self._wire.send(event) for event in events))

    def next(self) -> Event | None:
        """The next event, None when the connection is closed. Messages are whole."""
        text = ""
        while True:
            for event in self._wire.events():
                if not isinstance(event, TextMessage):
                    return event
                text += event.data
                if event.message_finished:
                    return TextMessage(text)
            try:
                data = self.client.socket.recv(65_536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._wire.receive_data(data)

    def texts(self, count: int) -> list[str]:
        found = []
        for _ in range(count):
            event = self.next()
            assert isinstance(event, TextMessage), event
            found.append(event.data)
        return found

    def closed_with(self) -> int:
        """The code of the close frame that comes next. After it the connection ends."""
        event = self.next()
        assert isinstance(event, CloseConnection), event
        with contextlib.suppress(OSError):
            while self.client.socket.recv(65_536):
                pass
        return int(event.code)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def raw(opcode: int, payload: bytes, is_masked: bool = True, is_last: bool = True) -> bytes:
    """A frame as no library makes it. The mask is 0."""
    assert len(payload) < 126
    length = len(payload) | (0x80 if is_masked else 0)
    return struct.pack("BB", opcode | (0x80 if is_last else 0), length) + (bytes(4) if is_masked else b"") + payload


def inside(server: Server) -> Http1WebSocket:
    """The only open WebSocket."""
    (one,) = [one for one in server.connections.open if isinstance(one, Http1WebSocket)]
    return one


def test_many_messages_at_once_are_answered_in_order(server: Server) -> None:
    """More than wait for the app, and more than are parsed in a turn."""
    with Peer(server) as peer:
        peer.say(*(TextMessage(f"message {n}") for n in range(500)))
        assert peer.texts(500) == [f"MESSAGE {n}" for n in range(500)]


def test_a_message_in_parts_with_a_ping_between_them(server: Server) -> None:
    with Peer(server) as peer:
        peer.say(TextMessage("o", message_finished=False), Ping(b"there?"), TextMessage("ne"))
        assert peer.next() == Pong(b"there?")
        assert peer.texts(1) == ["ONE"]


def test_a_message_in_single_bytes(server: Server) -> None:
    with Peer(server) as peer:
        for byte in peer.packed(TextMessage("bit by bit, ü")):
            peer.client.send(bytes([byte]))
        assert peer.texts(1) == ["BIT BY BIT, Ü"]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_long_message_goes_in_pieces_and_is_kept_once(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings that come meanwhile are answered behind it: nothing can follow half a frame."""
    transports: list[asyncio.Transport] = []
    take_over = Http1WebSockets.take_over

    def seen(self: Http1WebSockets, transport: asyncio.Transport, *rest: Any) -> None:
        transports.append(transport)
        take_over(self, transport, *rest)

    monkeypatch.setattr(Http1WebSockets, "take_over", seen)
    with Server(loop) as server, Peer(server, receive_buffer_bytes=4096) as peer:
        text = "abcdefgh" * 2_000_000  # more than the kernel takes
        peer.say(TextMessage(text))
        until(lambda: inside(server).get_write_buffer_size() > 1_000_000, "most of the answer waits")
        websocket = inside(server)
        assert transports[0].get_write_buffer_size() < 200_000, "the transport has little of it"
        peer.say(Ping(b"first"), Ping(b"last"), TextMessage("short"))
        assert peer.next() == TextMessage(text.upper())
        found = [peer.next(), peer.next()]
        assert Pong(b"last") in found, "of pings that wait the last one is answered"
        assert TextMessage("SHORT") in found
        until(lambda: websocket.get_write_buffer_size() == 0, "nothing is left")


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (raw(1, b"\xff\xfe"), 1007),
        (raw(1, b"unmasked", is_masked=False), 1002),
        (raw(3, b""), 1002),
        (raw(0, b"goes on with nothing"), 1002),
        (raw(9, b"", is_last=False), 1002),
        (raw(8, b"\x03"), 1002),
    ],
    ids=["no text", "no mask", "unknown", "no beginning", "ping in parts", "half a code"],
)
def test_a_frame_that_breaks_the_protocol_ends_it_with_a_reason(server: Server, frame: bytes, code: int) -> None:
    with Peer(server) as peer:
        peer.say(TextMessage("before"))
        assert peer.texts(1) == ["BEFORE"]
        peer.client.send(frame)
        assert peer.closed_with() == code


def test_a_message_that_is_too_long_ends_it_whatever_else_comes(server: Server) -> None:
    with Peer(server) as peer:
        part = TextMessage("x" * 1_000_000, message_finished=False)
        with contextlib.suppress(OSError):
            for _ in range(8):
                peer.say(part)
        assert peer.closed_with() == 1009


def test_more_frames_without_content_than_an_address_may_send() -> None:
    with Server(limits=LIMITS) as server, Peer(server) as peer:
        with contextlib.suppress(OSError):
            for _ in range(20):
                peer.client.send(peer.packed(Pong(b"")) * (FRAMES_BURST // 4 + FRAMES_BURST // OVERDRAWN))
        until(lambda: not server.connections.open, "it is cut")


def test_binary_messages_are_for_the_app_to_judge(server: Server) -> None:
    with Peer(server) as peer:
        peer.say(BytesMessage(b"not text"))
        assert peer.closed_with() == 1011, "this app takes text only"
        assert isinstance(server.app.errors.pop(), AttributeError)


def test_a_close_frame_is_answered_and_the_app_is_told(server: Server) -> None:
    before = server.app.disconnects
    with Peer(server) as peer:
        peer.say(CloseConnection(1001, "bye"))
        assert peer.closed_with() == 1001
    until(lambda: server.app.disconnects == before + 1, "the app is told")


def test_frames_before_a_close_are_taken_also_if_all_come_at_once_and_those_behind_it_are_dropped(
    server: Server,
) -> None:
    before = server.app.taken
    sent = 3 * http1_websocket.MESSAGES_MAX
    with Peer(server) as peer:
        close = raw(8, struct.pack("!H", 1000))
        peer.client.send(raw(1, b"x") * sent + close + raw(1, b"behind"))
        while peer.next() is not None:
            pass
    until(lambda: server.app.taken == before + sent, "all of them to be taken")
    until(lambda: not server.app.running, "its app to end")
    assert server.app.taken == before + sent


def test_an_end_without_a_close_frame_comes_behind_what_was_sent_before(server: Server) -> None:
    before = server.app.disconnects
    with Peer(server) as peer:
        peer.say(*(TextMessage(f"{n}") for n in range(100)))
        peer.client.half_close()
        until(lambda: server.app.disconnects == before + 1, "the app is told, after all messages")


def test_the_app_closes_and_waits_for_the_client() -> None:
    with Server(limits=LIMITS) as server, Peer(server, "/closing") as peer:
        server.call(server.app.go.set)
        event = peer.next()
        assert event == CloseConnection(1012, "later")
        peer.client.send(raw(8, b"\x03\xf4"))
        assert peer.client.socket.recv(1) == b""
        until(lambda: server.app.disconnects, "the app is told")


def test_a_client_that_does_not_answer_a_close_frame_is_left() -> None:
    with Server(limits=LIMITS) as server, Peer(server, "/closing") as peer:
        server.call(server.app.go.set)
        assert isinstance(peer.next(), CloseConnection)
        assert peer.client.socket.recv(1) == b"", "it was given its time"
        until(lambda: server.app.disconnects, "the app is told")
        until(lambda: not server.connections.open, "the connection is closed")


@pytest.mark.parametrize(
    ("path", "status", "code"), [("/unopened", 403, "forbidden"), ("/unanswered", 500, "internal")]
)
def test_an_app_that_does_not_accept(server: Server, path: str, status: int, code: str) -> None:
    with server.client() as client:
        wire = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        client.send(wire.send(Request(host="test", target=path)))
        answer = client.answer()
        assert (answer.status, answer.code) == (status, code)
        assert client.is_closed()


def test_frames_before_the_answer_to_the_handshake_are_refused(server: Server) -> None:
    with server.client() as client:
        wire = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        client.send(wire.send(Request(host="test", target="/ws")) + raw(1, b"early"))
        answer = client.answer()
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert client.is_closed()


def test_a_handshake_with_a_body_is_refused(server: Server) -> None:
    """It would be read as frames, by us alone."""
    with server.client() as client:
        wire = wsproto.WSConnection(wsproto.ConnectionType.CLIENT)
        head = wire.send(Request(host="test", target="/ws", extra_headers=[(b"Content-Length", b"5")]))
        answer = client.send(head + b"12345").answer()
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert client.is_closed()


def test_an_app_that_ends_by_itself(server: Server) -> None:
    with Server(limits=LIMITS) as ending, Peer(ending, "/deaf") as peer:
        ending.call(ending.app.go.set)
        assert peer.closed_with() == 1011


@pytest.mark.parametrize("path", ["/ws", "/deaf"])
def test_nothing_of_a_client_that_is_gone_waits_for_the_collector(path: str) -> None:
    """Half a message may be megabytes, and counts as a long body."""
    with Server(limits=LIMITS) as server:
        gc.collect()
        gc.disable()
        try:
            with Peer(server, path) as peer:
                gone = weakref.ref(inside(server))
                peer.say(*(TextMessage("whole") for _ in range(20)), TextMessage("x" * 500_000, message_finished=False))
                until(lambda: medium_bodies.held_bytes > 0 or path == "/deaf", "the half message counts")
                peer.client.reset()
            server.call(server.app.go.set, server.app.scopes.clear)
            until(lambda: gone() is None, "all of it is free")
            until(lambda: medium_bodies.held_bytes == 0, "nothing counts")
        finally:
            gc.enable()


def test_a_silent_client_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_websocket, "PING_INTERVAL_S", 0.02)
    with Server(limits=LIMITS) as server, Peer(server) as peer:
        assert isinstance(peer.next(), Ping)
        assert isinstance(peer.next(), Ping), "again and again"


def test_a_client_that_reads_nothing_is_cut() -> None:
    """The transport has little of a long message, so its time is bounded by us."""
    limits = HttpLimits(write_stall_timeout_ms=200, read_min_bytes_per_s=64 << 20)
    with Server(limits=limits) as server, Peer(server, receive_buffer_bytes=4096) as peer:
        with contextlib.suppress(OSError):
            peer.say(TextMessage("x" * 8_000_000))
        until(lambda: not server.connections.open, "it is cut")
        until(lambda: not server.app.running, "the app has ended")


def test_what_is_sent_at_once_keeps_its_order_behind_what_waits() -> None:
    """`send_now` refuses while something waits."""
    with Server(limits=LIMITS) as server, Peer(server, receive_buffer_bytes=4096) as peer:
        websocket = inside(server)
        sent: list[bool] = []

        def fill() -> None:
            while len(sent) < 10_000 and (not sent or sent[-1]):
                sent.append(websocket.send_now(b"%d" % len(sent) + b" " * 10_000))

        server.call(fill)
        assert not sent[-1], "there is an end"
        assert websocket.get_write_buffer_size() < 200_000
        assert [text.split()[0] for text in peer.texts(len(sent) - 1)] == [f"{n}" for n in range(len(sent) - 1)]


def test_the_frame_of_one_message_is_made_once() -> None:
    message = b"to many"
    assert text_frame(message) is text_frame(message)
    assert text_frame(message) == b"\x81\x07to many"
    assert text_frame(b"x" * 300)[:4] == b"\x81\x7e\x01\x2c"


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_client_that_sends_faster_than_its_frames_are_parsed_is_not_read(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 1 KiB are free. A turn handles 8 KiB of them, and could read 256 KiB."""
    held: list[int] = []
    receive_bytes = FrameDecoder.receive_bytes

    def seen(self: FrameDecoder, data: bytes) -> None:
        receive_bytes(self, data)
        if not self.client:
            held.append(len(self.buffer))

    monkeypatch.setattr(FrameDecoder, "receive_bytes", seen)
    with Server(loop, limits=LIMITS) as server, Peer(server) as peer:
        part = peer.packed(TextMessage("x" * 1024, message_finished=False))
        rest = struct.pack("!BBH4x", 0, 0x80 | 126, 1024) + b"x" * 1024
        peer.client.send(part + rest * 3500 + raw(0, b""))
        assert len(peer.texts(1)[0]) == 3501 * 1024
    assert max(held) < 1_000_000


def test_a_ping_behind_the_close_frame_of_the_app_changes_nothing() -> None:
    with Server(limits=HttpLimits(linger_ms=60_000)) as server, Peer(server, "/closing") as peer:
        server.call(server.app.go.set)
        assert isinstance(peer.next(), CloseConnection)
        errors: list[object] = []
        server.call(lambda: asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(what)))
        peer.client.send(raw(9, b"there?") + raw(1, b"late") + raw(8, b"\x03\xf4"))
        assert peer.client.is_closed()
        until(lambda: server.app.disconnects, "the app is told of the client's close frame")
        assert not errors


def test_a_cancelled_send_of_a_long_message_cuts_the_connection() -> None:
    """The next frame would be read as a part of it."""
    with (
        Server(limits=HttpLimits(write_stall_timeout_ms=600_000, read_min_bytes_per_s=1)) as server,
        Peer(server, receive_buffer_bytes=4096),
    ):
        websocket = inside(server)
        sending: list[asyncio.Task[None]] = []
        message = {"type": "websocket.send", "text": "x" * 16_000_000}
        server.call(lambda: sending.append(asyncio.get_running_loop().create_task(websocket.send(message))))
        until(lambda: websocket.get_write_buffer_size() > 1_000_000, "it is on its way")
        server.call(sending[0].cancel)
        until(lambda: websocket not in server.connections.open, "it is cut")


@pytest.mark.parametrize("linger_ms", [1, 60_000])
def test_a_close_frame_comes_behind_the_long_message_that_is_being_sent(linger_ms: int) -> None:
    """The time to answer it begins then."""
    limits = HttpLimits(max_body_bytes=4_000_000, linger_ms=linger_ms)
    with Server(limits=limits) as server, Peer(server, receive_buffer_bytes=4096) as peer:
        peer.say(TextMessage("x" * 3_900_000))
        until(lambda: inside(server).get_write_buffer_size() > 500_000, "most of the answer waits")
        with contextlib.suppress(OSError):
            for _ in range(5):
                peer.say(TextMessage("x" * 1_000_000, message_finished=False))
        until(lambda: inside(server).stage is SocketStage.CLOSING, "it is too long")
        assert peer.texts(1) == ["X" * 3_900_000]
        event = peer.next()
        assert isinstance(event, CloseConnection)
        assert event.code == 1009


@pytest.mark.parametrize("ends_its_side", [False, True])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_close_in_the_middle_of_a_long_message_is_answered_behind_it(loop: str, ends_its_side: bool) -> None:
    limits = HttpLimits(max_body_bytes=4_000_000, linger_ms=60_000)
    with Server(loop, limits=limits) as server, Peer(server, receive_buffer_bytes=4096) as peer:
        peer.say(TextMessage("x" * 3_900_000))
        until(lambda: inside(server).get_write_buffer_size() > 500_000, "most of the answer waits")
        websocket = inside(server)
        peer.say(CloseConnection(1001, "bye"))
        until(lambda: websocket.stage is SocketStage.ANSWERING, "the close is read")
        peer.client.send(raw(1, b"behind the close"))
        if ends_its_side:
            peer.client.half_close()
        assert not server.app.disconnects, "the app may not end its send"
        assert peer.texts(1) == ["X" * 3_900_000]
        assert peer.closed_with() == 1001
        until(lambda: server.app.disconnects == 1, "the app is told")
        assert not server.app.errors


def test_a_receive_that_follows_a_cancelled_one_at_once_is_woken() -> None:
    with Server(limits=LIMITS) as server, Peer(server, "/deaf") as peer:
        websocket = inside(server)
        receiving: list[asyncio.Task[Any]] = []

        def receive() -> None:
            receiving.append(asyncio.get_running_loop().create_task(websocket.receive()))

        def cancel_and_receive() -> None:
            receive()  # before the cancelled one has ended
            receiving[0].cancel()

        server.call(receive)
        server.call(lambda: None)
        server.call(cancel_and_receive)
        server.call(lambda: None)
        peer.say(TextMessage("one"))
        until(receiving[1].done, "it is woken")
