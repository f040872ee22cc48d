"""Duties of every HTTP/1.1 server, on both event loops."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.frontend.http1_server import Client, Server, until


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as connected:
        yield connected


def test_answers_and_keeps_the_connection(client: Client) -> None:
    for n in range(3):
        answer = client.post("/echo", b"hello %d" % n).answer()
        assert (answer.status, answer.body) == (200, b"hello %d" % n)
        assert answer.headers[b"content-type"] == b"application/json"
        assert not {b"date", b"server", b"connection"} & set(answer.headers)


def test_scope(server: Server, client: Client) -> None:
    client.get("/target/a%20b/%C3%BC%2Fx?q=%20&r=1", "X-Twice: 1", "X-TWICE:  two words \t", "X-Empty:")
    scope = json.loads(client.answer().body)
    headers = [tuple(pair) for pair in scope.pop("headers")]
    assert headers == [("host", "test"), ("x-twice", "1"), ("x-twice", "two words"), ("x-empty", "")]
    assert scope == {
        "method": "GET",
        "path": "/target/a b/ü/x",
        "raw_path": "/target/a%20b/%C3%BC%2Fx",
        "query_string": "q=%20&r=1",
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "client": "127.0.0.1",
        "server": server.port,
    }


def test_request_in_pieces_of_one_byte(client: Client) -> None:
    for byte in b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\nhello":
        client.send(bytes([byte]))
    assert client.answer().body == b"hello"


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 3_000_000])
def test_body_of_every_size_comes_back(client: Client, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert client.post("/echo", body).answer().body == body
    assert client.post("/echo", b"again").answer().body == b"again"


def test_chunked_request(client: Client) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.send(head + b"5\r\nhello\r\nA\r\n, chunked!\r\n0\r\n\r\n")
    assert client.answer().body == b"hello, chunked!"
    # Extensions and trailers mean nothing here, and empty lines inside the data do not end it.
    client.send(head + b'8;a=b;c="d"\r\n\r\n\r\n0\r\n\r\r\n0\r\nX-Sum: 1\r\nHost: evil\r\n\r\n')
    assert client.answer().body == b"\r\n\r\n0\r\n\r"
    assert client.post("/echo", b"plain").answer().body == b"plain"


def test_hundred_thousand_tiny_chunks(client: Client) -> None:
    client.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.send(b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
    assert client.answer().body == b"x" * 100_000


def test_pipelined_requests_are_answered_in_order(client: Client) -> None:
    requests = [
        b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 4\r\n\r\n%04d" % n
        if n % 2
        else b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n%04d\r\n0\r\n\r\n" % n
        for n in range(200)
    ]
    client.send(b"".join(requests))
    assert [client.answer().body for _ in requests] == [b"%04d" % n for n in range(200)]


def test_head_has_the_length_and_no_body(client: Client) -> None:
    for target, length in (("/early", b"15"), ("/counted", b"6")):
        answer = client.get(target, method="HEAD").answer(bodyless=True)
        assert answer.headers.get(b"content-length", length) == length
    client.get("/stream", method="HEAD").answer(bodyless=True)
    assert client.post("/echo", b"next").answer().body == b"next"


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body(client: Client, status: int) -> None:
    answer = client.get(f"/status/{status}").answer()
    assert answer.status == status
    assert b"transfer-encoding" not in answer.headers
    assert client.post("/echo", b"next").answer().body == b"next"


def test_streamed_answer_is_chunked(client: Client) -> None:
    answer = client.get("/stream").answer()
    assert answer.headers[b"transfer-encoding"] == b"chunked"
    assert answer.body == b"onethreeend"
    assert client.post("/echo", b"next").answer().body == b"next"


def test_streamed_answer_with_a_length(client: Client) -> None:
    answer = client.get("/counted").answer()
    assert (answer.headers[b"content-length"], answer.body) == (b"6", b"abcdef")


def test_large_answer_arrives_whole(client: Client) -> None:
    answer = client.get("/big?20000000").answer()
    assert answer.body == b"x" * 20_000_000


def test_connection_close_is_honoured(client: Client) -> None:
    answer = client.post("/echo", b"last", "Connection: close").answer()
    assert (answer.body, answer.headers[b"connection"]) == (b"last", b"close")
    assert client.is_closed()


def test_app_may_close(client: Client) -> None:
    answer = client.post("/once", b"").answer()
    assert (answer.body, answer.headers[b"connection"]) == (b"bye", b"close")
    assert client.is_closed()


def test_http_1_0_ends_with_the_connection(client: Client) -> None:
    client.send(b"GET /stream HTTP/1.0\r\n\r\n")
    answer = client.answer()
    assert b"transfer-encoding" not in answer.headers
    assert answer.body == b"onethreeend"


def test_continue_is_sent_when_the_app_asks(server: Server, client: Client) -> None:
    client.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
    assert client.head()[0] == 100
    assert client.send(b"hello").answer().body == b"hello"
    assert client.post("/echo", b"next").answer().body == b"next"


def test_continue_is_not_sent_to_a_body_that_is_there(client: Client) -> None:
    assert client.post("/echo", b"hello", "Expect: 100-continue").head()[0] in (100, 200)


def test_unfinished_answer_is_recognisable(client: Client) -> None:
    """The last chunk must be missing, or a client would take half an answer for the whole."""
    status, headers = client.get("/fail_late").head()
    assert (status, headers[b"transfer-encoding"]) == (200, b"chunked")
    assert client.chunk() == b"begun"
    assert client.is_closed()


@pytest.mark.parametrize("target", ["/fail", "/nothing", "/no_such_method_of_the_test_app"])
def test_failing_app_is_a_500(client: Client, target: str) -> None:
    assert client.get(target).answer().status == 500
    assert client.is_closed()


def test_app_sees_the_client_go(server: Server) -> None:
    before = server.app.disconnects
    with server.client() as client:
        client.get("/hold")
        until(lambda: server.app.scopes and server.app.scopes[-1]["path"] == "/hold", "request")
    until(lambda: server.app.disconnects == before + 1, "http.disconnect")


def test_app_sees_the_client_vanish_in_the_body(server: Server) -> None:
    before, errors = server.app.disconnects, len(server.app.errors)
    client = server.client()
    client.send(b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 500000\r\n\r\n" + bytes(100_000))
    until(lambda: server.app.scopes and server.app.scopes[-1]["path"] == "/echo", "request")
    client.reset()
    until(lambda: server.app.disconnects == before + 1, "http.disconnect")
    until(lambda: len(server.app.errors) == errors + 1, "the app's own error")


def test_slow_reader_makes_send_wait(server: Server) -> None:
    """An endless answer is produced no faster than it is read, and ends when the client goes."""
    server.app.sent_bytes = 0
    with server.client(receive_buffer_bytes=4096) as client:
        client.get("/large").head()
        # The kernel takes megabytes before the process has to keep anything.
        before = server.settled(lambda: server.app.sent_bytes)
        assert before < 30_000_000
        for _ in range(200):
            client.chunk()
        until(lambda: server.app.sent_bytes > before, "the app goes on when the client reads")
    with server.client() as other:
        assert other.post("/echo", b"unharmed").answer().body == b"unharmed"
    server.settled(lambda: server.app.sent_bytes)


def test_background_work_after_the_answer_does_not_hold_up_the_next_request(server: Server, client: Client) -> None:
    before = server.app.disconnects
    server.call(server.app.go.clear)
    assert client.get("/after").answer().body == b"answered"
    assert client.post("/echo", b"next").answer().body == b"next"
    until(lambda: server.app.disconnects == before + 1, "receive after the answer says disconnect")
    server.call(server.app.go.set)
