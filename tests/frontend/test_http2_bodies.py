"""A body over HTTP/2 whose app does not read it holds up its stream alone: its window is all that waits for the app."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from h2.errors import ErrorCodes

from tests.frontend.http1_server import Server, until
from tests.frontend.http2_client import HEADERS, Streams
from topics.frontend.http.http2_buffer import BoundedStream

PIECE = b"0123456789" * 100
WINDOW_BYTES = 65_535
"""The window of a stream."""
FRAME_BYTES = 16_384
"""The bytes of the longest frame."""
STATED = [(":method", "POST"), (":path", "/echo"), *HEADERS, ("content-length", "5")]
"""The head of a request with a body of 5 bytes."""
MISFITS = [[b"123456"], [b"123", b"456"], [b"12345", b"", b"6"], [b"1234", None], [None]]
"""The pieces of other bodies; behind None comes the end."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def begun(streams: Streams, path: str = "/wait_unread") -> int:
    return streams.begin((":method", "POST"), (":path", path), *HEADERS)


def filled(streams: Streams, path: str = "/wait_unread") -> int:
    """Return a stream that has taken as much of a body as it takes without its app."""
    stream = begun(streams, path)
    streams.fill(stream, PIECE, lambda: 0)
    return stream


def is_served(streams: Streams) -> bool:
    asked = streams.ask("/status/204")
    streams.read_to_the_end_of(asked)
    return True


def test_it_holds_up_no_other_request_and_comes_whole_when_it_is_read(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        unread = [filled(streams) for _ in range(3)]
        assert is_served(streams)
        assert all(WINDOW_BYTES - len(PIECE) < streams.sent_bytes(stream) <= WINDOW_BYTES for stream in unread)
        server.call(server.app.go.set)
        for stream in unread:
            streams.take(stream)
            streams.go_on(stream, PIECE * 300, whole=True)
            streams.read_to_the_end_of(stream)
            assert bytes(streams.bodies[stream]) == PIECE * (streams.sent_bytes(stream) // len(PIECE))


@pytest.mark.parametrize("path", ["/big?1000000", "/early"])
def test_an_app_that_answers_without_reading_it_holds_up_no_other_request(server: Server, path: str) -> None:
    """The first answer waits for its window, and would wait for ever if the connection were not read."""
    with server.client() as client:
        streams = Streams(client.socket)
        unread = begun(streams, path)
        for _ in range(50):
            streams.go_on(unread, PIECE, whole=False)
        assert is_served(streams)
        streams.take(unread)
        streams.go_on(unread, PIECE, whole=True)
        streams.read_to_the_end_of(unread)


def test_windows_come_back_from_streams_that_are_given_up(server: Server) -> None:
    """All of them together have sent more than the window of the connection."""
    with server.client() as client:
        streams = Streams(client.socket)
        for _ in range(110):
            streams.give_up(filled(streams))
        assert is_served(streams)
        assert streams.connection_room_bytes > WINDOW_BYTES
        server.call(server.app.go.set)
        until(lambda: server.app.disconnects == 110, "their apps to hear of it")


def test_nothing_is_left_of_those_that_were_answered(server: Server) -> None:
    gc.collect()
    gc.disable()
    try:
        with server.client() as client:
            streams = Streams(client.socket)
            asked = [streams.ask("/echo", PIECE) for _ in range(5)]
            streams.take(*asked)
            streams.read_to_the_end_of(*asked)
            until(lambda: not any(isinstance(one, BoundedStream) for one in gc.get_objects()), "all of them to be free")
    finally:
        gc.enable()


def test_padding_waits_for_nobody(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        padded = begun(streams)
        for _ in range(400):
            streams.pad(padded, 255)
        server.call(server.app.go.set)
        streams.take(padded)
        streams.go_on(padded, b"all", whole=True)
        streams.read_to_the_end_of(padded)
        assert bytes(streams.bodies[padded]) == b"all"


@pytest.mark.parametrize("end", ["reset", "close"])
def test_its_app_hears_that_its_client_is_gone(server: Server, end: str) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        unread = filled(streams)
        server.settled(lambda: server.app.running)
        if end == "reset":
            streams.give_up(unread)
            assert is_served(streams)
            server.call(server.app.go.set)
            until(lambda: server.app.disconnects == 1, "its app to hear of it")
            assert streams.reset_codes == {}
    server.call(server.app.go.set)
    until(lambda: server.app.disconnects == 1, "its app to hear of it")


def test_what_came_before_the_end_of_its_connection_is_read(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        asked = streams.ask("/wait_unread", b"all of it")
        until(lambda: server.app.running == 1, "the request")
        streams.settle()
        streams.give_up(asked)
        streams.settle()
        server.call(server.app.go.set)
        until(lambda: not server.app.running, "its app to end")
        assert not server.app.disconnects


def misfit(streams: Streams, pieces: list[bytes | None], *, by_trailers: bool) -> int:
    """Return a request whose body has not the length that its head states."""
    stream = streams.begin(*STATED)
    for piece in pieces:
        if piece is not None:
            streams.go_on(stream, piece, whole=False)
        elif by_trailers:
            streams.trail(stream)
        else:
            streams.go_on(stream, b"", whole=True)
    return stream


@pytest.mark.parametrize("by_trailers", [False, True])
@pytest.mark.parametrize("pieces", MISFITS, ids=str)
def test_one_of_another_length_than_stated_ends_its_own_request_alone(
    server: Server, pieces: list[bytes | None], by_trailers: bool
) -> None:
    """RFC 9113 §8.1.1: an error of the stream. Behind a proxy the other streams are other people's."""
    with server.client() as client:
        streams = Streams(client.socket)
        other = streams.begin(*STATED)
        streams.go_on(other, b"123", whole=False)
        odd = misfit(streams, pieces, by_trailers=by_trailers)
        until(lambda: server.app.disconnects == 1, "its app to hear of it")
        streams.settle()
        assert streams.reset_codes == {odd: ErrorCodes.PROTOCOL_ERROR}
        streams.go_on(other, b"45", whole=False)
        streams.trail(other)
        streams.take(other)
        streams.read_to_the_end_of(other)
        assert bytes(streams.bodies[other]) == b"12345"


def test_a_websocket_that_states_an_empty_body_goes_on(server: Server) -> None:
    """Its frames are no body. It was let in, and reset at its first frame."""
    with server.client() as client:
        streams = Streams(client.socket)
        websocket = streams.open_websocket("/ws", "13", b"", **{"content-length": "0"})
        while websocket not in streams.answered:
            streams.read()
        streams.take(websocket)
        streams.go_on(websocket, b"\x81\x82\0\0\0\0hi", whole=False)
        while not streams.bodies.get(websocket):
            assert not streams.reset_codes
            streams.read()
        assert bytes(streams.bodies[websocket]) == b"\x81\x02HI"


def test_a_head_that_states_a_body_and_ends_the_request_is_none(server: Server) -> None:
    with server.client() as client:
        streams = Streams(client.socket)
        odd = streams.begin(*STATED, ended=True)
        assert is_served(streams)
        assert streams.reset_codes == {odd: ErrorCodes.PROTOCOL_ERROR}
        assert [scope["path"] for scope in server.app.scopes] == ["/status/204"]


def test_windows_come_back_from_those_of_another_length(server: Server) -> None:
    """All of them together have sent more than half the window of the connection. It is opened again from there on."""
    with server.client() as client:
        streams = Streams(client.socket)
        whole_bytes = streams.connection_room_bytes
        for _ in range(whole_bytes // 2 // FRAME_BYTES + 20):
            streams.begin(*STATED, behind=bytes(FRAME_BYTES))
            asked = streams.ask("/big?20000")  # an answer pays for the reset
            streams.take(asked)
            streams.read_to_the_end_of(asked)
        assert streams.connection_room_bytes > whole_bytes * 3 // 4
