"""api §7.7, §0.6: requests that are no handshake are refused in the envelope of every error, for every client."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import h2.config
import h2.connection
import h2.events
import psutil
import pytest

from tests.contract.asking import envelope
from tests.harness import Service, poll

GOOD = {
    "Host": "localhost",
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version": "13",
}


@pytest.fixture(scope="module")
def spoken() -> Iterator[Service]:
    with Service(shards=1, frontends=1) as running:
        yield running


def asked(
    service: Service, line: str, headers: dict[str, str], behind: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what comes until the service closes the connection."""
    head = "\r\n".join([line, *(f"{name}: {value}" for name, value in headers.items())])
    with socket.create_connection(("127.0.0.1", service.port), timeout=15) as raw:
        raw.sendall(head.encode("latin-1") + b"\r\n\r\n" + behind)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := raw.recv(65536):
                received += piece
    answer, _, body = received.partition(b"\r\n\r\n")
    status, *lines = answer.decode("latin-1").split("\r\n")
    return int(status.split(" ")[1]), dict(one.lower().split(": ", 1) for one in lines), body


@pytest.mark.parametrize(
    ("changed", "status", "code"),
    [
        ({"Sec-WebSocket-Key": None}, 400, "invalid_request"),
        ({"Sec-WebSocket-Key": ""}, 400, "invalid_request"),
        ({"Sec-WebSocket-Key": "garbage"}, 400, "invalid_request"),
        ({"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25j"}, 400, "invalid_request"),
        ({"Sec-WebSocket-Key": "x" * 5000}, 400, "invalid_request"),
        ({"Sec-WebSocket-Version": None}, 426, "upgrade_required"),
        ({"Sec-WebSocket-Version": "12"}, 426, "upgrade_required"),
        ({"Sec-WebSocket-Version": "\xff\xfe"}, 426, "upgrade_required"),
        ({"Upgrade": None}, 426, "upgrade_required"),
        ({"Upgrade": "teapot"}, 426, "upgrade_required"),
        ({"Connection": None}, 426, "upgrade_required"),
        ({"Authorization": "Bearer a\r\nAuthorization: Bearer b"}, 400, "invalid_request"),
        ({"Last-Event-ID": "a\r\nLast-Event-ID: b"}, 400, "invalid_request"),
    ],
    ids=str,
)
def test_a_malformed_handshake_is_refused_in_the_envelope(
    spoken: Service, changed: dict[str, str | None], status: int, code: str
) -> None:
    headers = {name: value for name, value in (GOOD | changed).items() if value is not None}
    if "upgrade" not in headers.get("Connection", "").lower() or headers.get("Upgrade") != "websocket":
        headers["Connection"] = ", ".join([*filter(None, [headers.get("Connection")]), "close"])
    answered, given, body = asked(spoken, "GET /v0/ws HTTP/1.1", headers)
    assert answered == status
    envelope(body, given["content-type"], code)
    assert given["connection"] == "close"
    if "Sec-WebSocket-Version" in changed:
        assert given["sec-websocket-version"] == "13"


def test_a_good_handshake_is_none_of_them(spoken: Service) -> None:
    head = "\r\n".join(["GET /v0/ws HTTP/1.1", *(f"{name}: {value}" for name, value in GOOD.items())])
    with socket.create_connection(("127.0.0.1", spoken.port), timeout=15) as raw:
        raw.sendall(head.encode() + b"\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        ("POST /v0/ws HTTP/1.1", 405, "method_not_allowed"),
        ("DELETE /v0/ws HTTP/1.1", 405, "method_not_allowed"),
        ("GET /v0/wss HTTP/1.1", 404, "not_found"),
    ],
)
def test_a_handshake_by_another_method_or_at_another_path(spoken: Service, line: str, status: int, code: str) -> None:
    answered, given, body = asked(spoken, line, GOOD | {"Connection": "Upgrade, close"})
    assert answered == status
    envelope(body, given["content-type"], code)


def test_frames_before_the_answer_change_nothing(spoken: Service) -> None:
    """They are not an answer's to wait for, and not the beginning of another request."""
    answered, given, body = asked(spoken, "GET /v0/ws HTTP/1.1", GOOD | {"Sec-WebSocket-Version": "8"}, b"\x81\x80abcd")
    assert answered == 426
    envelope(body, given["content-type"], "upgrade_required")


def test_refused_handshakes_leave_no_connection_behind(spoken: Service) -> None:
    for _ in range(20):
        asked(spoken, "GET /v0/ws HTTP/1.1", GOOD | {"Sec-WebSocket-Key": "garbage"})
    port = spoken.port

    def open_connections() -> int:
        return sum(
            one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port
            for pid in spoken.family()
            for one in psutil.Process(pid).net_connections("tcp")
        )

    spoken.client.close()
    poll("every connection to be closed", lambda: not open_connections())


@pytest.mark.parametrize(
    ("more", "status", "code"),
    [
        ([("sec-websocket-version", "12")], "426", "upgrade_required"),
        ([], "426", "upgrade_required"),
        ([("sec-websocket-version", "13"), ("content-length", "5")], "400", "invalid_request"),
        (
            [("sec-websocket-version", "13"), ("authorization", "Bearer a"), ("authorization", "Bearer b")],
            "400",
            "invalid_request",
        ),
    ],
    ids=str,
)
def test_over_http2(spoken: Service, more: list[tuple[str, str]], status: str, code: str) -> None:
    """RFC 8441: `:protocol` in place of Upgrade, and no key."""
    h2c = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    h2c.initiate_connection()
    headers = [(":method", "CONNECT"), (":protocol", "websocket"), (":scheme", "http"), (":path", "/v0/ws")]
    headers += [(":authority", "localhost"), *more]
    answer: dict[str, str] = {}
    body = b""
    with socket.create_connection(("127.0.0.1", spoken.port), timeout=15) as raw:
        h2c.send_headers(1, headers)
        raw.sendall(h2c.data_to_send())
        ended = False
        while not ended:
            data = raw.recv(65536)
            assert data, "the connection was closed"
            for event in h2c.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    answer = {str(name): str(value) for name, value in event.headers}
                elif isinstance(event, h2.events.DataReceived):
                    body += event.data
                ended = ended or isinstance(event, h2.events.StreamEnded)
            raw.sendall(h2c.data_to_send())
        # The connection serves on.
        about = [(":method", "GET"), (":scheme", "http"), (":path", "/v0/health"), (":authority", "localhost")]
        h2c.send_headers(3, about)
        h2c.end_stream(3)
        raw.sendall(h2c.data_to_send())
        health = None
        while health is None:
            for event in h2c.receive_data(raw.recv(65536)):
                if isinstance(event, h2.events.ResponseReceived) and event.stream_id == 3:
                    health = {str(name): str(value) for name, value in event.headers}[":status"]
    assert answer[":status"] == status
    assert answer.get("sec-websocket-version") == ("13" if status == "426" else None)
    assert "connection" not in answer
    envelope(body, answer["content-type"], code)
    assert health == "200"


@pytest.mark.parametrize("is_http2", [False, True])
def test_an_offer_to_compress_is_declined(spoken: Service, is_http2: bool) -> None:
    """To pack 8 MiB would hold up every other client."""
    offer = ("sec-websocket-extensions", "permessage-deflate")
    with socket.create_connection(("127.0.0.1", spoken.port), timeout=15) as raw:
        if not is_http2:
            head = "\r\n".join(["GET /v0/ws HTTP/1.1", *(": ".join(header) for header in [*GOOD.items(), offer])])
            raw.sendall(head.encode() + b"\r\n\r\n")
            answer = raw.recv(65536).lower()
            assert answer.startswith(b"http/1.1 101 ")
            assert b"sec-websocket-extensions" not in answer
            return
        h2c = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        h2c.initiate_connection()
        headers = [(":method", "CONNECT"), (":protocol", "websocket"), (":scheme", "http"), (":path", "/v0/ws")]
        h2c.send_headers(1, [*headers, (":authority", "localhost"), ("sec-websocket-version", "13"), offer])
        raw.sendall(h2c.data_to_send())
        given: dict[str, str] = {}
        while not given:
            for event in h2c.receive_data(raw.recv(65536)):
                if isinstance(event, h2.events.ResponseReceived):
                    given = {str(name): str(value) for name, value in event.headers}
        assert given[":status"] == "200"
        assert offer[0] not in given
