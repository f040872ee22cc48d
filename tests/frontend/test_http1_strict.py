"""Limits, time-outs, refusals and ends of a connection: ours only, on both loops."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from tests.frontend.http1_server import DEADLINE_S, Client, Server, undisturbed, until
from topics.frontend.http.deadlines import HttpLimits

LOOPS = ["uvloop", "asyncio"]
READ_BYTES = 256 * 1024
"""The most that either loop reads at once."""
SMALL = HttpLimits(
    max_header_bytes=4096,
    max_headers=20,
    max_uri_bytes=1024,
    max_body_bytes=100_000,
    read_high_water_bytes=8192,
    discard_max_bytes=1000,
    linger_ms=5_000,
)


@pytest.fixture(scope="module", params=LOOPS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(loop=request.param, limits=SMALL) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as connected:
        yield connected


def refused(client: Client, status: int, code: str) -> None:
    answer = client.answer()
    assert (answer.status, answer.code) == (status, code)
    assert answer.headers[b"connection"] == b"close"
    assert client.is_closed()


HOST = b"Host: test\r\n"
GET = b"GET /target HTTP/1.1\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: test\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        GET + b"X: a\r\n b\r\n" + HOST + b"\r\n",
        GET + b"Host : test\r\n\r\n",
        GET + HOST + b"X: a\0b\r\n\r\n",
        GET.replace(b"\r\n", b"\n") + b"Host: test\n\n",
        GET + b"\r\n",
        GET + HOST + HOST + b"\r\n",
        GET + b"Host: a b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /target\r\n",
    ],
)
def test_malformed_requests_are_refused_at_once(server: Server, client: Client, request_bytes: bytes) -> None:
    seen = len(server.app.scopes)
    client.send(request_bytes)
    refused(client, 400, "invalid_request")
    # Only the bad chunk is found after the head was good.
    assert len(server.app.scopes) - seen <= (b"zz" in request_bytes)


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"GET /" + b"x" * 1024 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414, "uri_too_long"),
        (b"GET /" + b"x" * 5000, 414, "uri_too_long"),
        (GET + HOST + b"X: y\r\n" * 20 + b"\r\n", 431, "headers_too_large"),
        (GET + HOST + b"X: " + b"y" * 5000, 431, "headers_too_large"),
        (GET + HOST + b"X: " + b"y" * 5000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /target HTTP/1.2\r\n" + HOST + b"\r\n", 505, "http_version_not_supported"),
        (b"GET /target HTTP/2.0\r\n" + HOST + b"\r\n", 505, "http_version_not_supported"),
        (b"BREW /target HTTP/1.1\r\n" + HOST + b"\r\n", 405, "method_not_allowed"),
        (b"CONNECT test:443 HTTP/1.1\r\n" + HOST + b"\r\n", 405, "method_not_allowed"),
        (POST + b"Content-Length: 5\r\nExpect: a-miracle\r\n\r\n", 417, "expectation_failed"),
        (POST + b"Content-Length: 100001\r\n\r\n", 413, "payload_too_large"),
    ],
)
def test_over_limit_and_unsupported(client: Client, request_bytes: bytes, status: int, code: str) -> None:
    client.send(request_bytes)
    refused(client, status, code)


def test_refused_body_can_still_be_sent_by_a_client_that_does_not_look(client: Client) -> None:
    """Closing at once would reset the connection, and the client would lose the answer with it."""
    client.send(POST + b"Content-Length: 30000000\r\n\r\n")
    for _ in range(200):
        client.send(bytes(100_000))
    answer = client.answer()
    assert (answer.status, answer.code) == (413, "payload_too_large")


def test_chunked_body_over_the_limit(server: Server, client: Client) -> None:
    errors = len(server.app.errors)
    client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + bytes(0x1000) + b"\r\n")
    for _ in range(30):
        client.send(b"1000\r\n" + bytes(0x1000) + b"\r\n")
    refused(client, 413, "payload_too_large")
    until(lambda: len(server.app.errors) == errors + 1, "the app learns that no more comes")


@pytest.mark.parametrize("endless", [b"1;" + b"x" * 20_000, b"0\r\nX: " + b"y" * 20_000, b"0\r\n" + b"X: y\r\n" * 4000])
def test_endless_chunk_extensions_and_trailers(client: Client, endless: bytes) -> None:
    client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + endless)
    refused(client, 400, "invalid_request")


def test_unanswered_expectation_closes(client: Client) -> None:
    """Without `100 Continue` nobody knows whether the body follows, so nothing can follow the answer."""
    client.send(b"POST /early HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
    answer = client.answer()
    assert (answer.status, answer.headers[b"connection"]) == (415, b"close")
    assert client.is_closed()


def test_early_answer_keeps_the_connection_when_the_rest_is_small(client: Client) -> None:
    client.send(b"POST /early HTTP/1.1\r\nHost: test\r\nContent-Length: 10\r\n\r\n")
    answer = client.answer()
    assert (answer.status, answer.body) == (415, b"no need to read")
    assert b"connection" not in answer.headers
    client.send(b"01234").send(b"56789").post("/echo", b"next")
    assert client.answer().body == b"next"


def test_the_rest_of_a_body_and_the_next_request_in_one_piece(server: Server, client: Client) -> None:
    """A client that has its early answer before its body was read sends this: the next body has all its time."""
    head = b"POST /%s HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\n"
    client.send(head % b"early")
    assert client.answer().status == 415
    client.send(b"{}" + head % b"echo")
    with server.client() as other:  # a time that was over would now be noticed
        assert other.post("/echo", b"other").answer().body == b"other"
    assert client.send(b"ok").answer().body == b"ok"


def test_early_answer_to_a_chunked_body_keeps_the_connection_while_the_rest_is_small(client: Client) -> None:
    head = b"POST /early HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    assert client.send(head).answer().status == 415
    assert client.send(b"5\r\nthere\r\n0\r\n\r\n").post("/echo", b"next").answer().body == b"next"
    assert client.send(head).answer().status == 415
    client.send(b"800\r\n" + bytes(0x800) + b"\r\n")
    assert client.is_closed()


def test_early_answer_closes_when_the_rest_is_large(client: Client) -> None:
    client.send(b"POST /early HTTP/1.1\r\nHost: test\r\nContent-Length: 50000\r\n\r\n")
    answer = client.answer()
    assert (answer.status, answer.headers[b"connection"]) == (415, b"close")
    client.send(bytes(50_000))
    assert client.is_closed()


def test_http_1_0_keep_alive(client: Client) -> None:
    client.send(b"POST /echo HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi")
    answer = client.answer()
    assert (answer.body, answer.headers[b"connection"]) == (b"hi", b"keep-alive")
    assert client.post("/echo", b"next").answer().body == b"next"


def test_blank_lines_before_a_request(client: Client) -> None:
    assert client.send(b"\r\n").send(b"\r\n\r\n").post("/echo", b"hi").answer().body == b"hi"


def test_absolute_target(client: Client) -> None:
    client.get("http://elsewhere/target/x?y=1")
    assert b'"raw_path": "/target/x", "query_string": "y=1"' in client.answer().body


def test_app_errors_have_the_envelope(client: Client) -> None:
    client.get("/fail")
    refused(client, 500, "internal")


@pytest.mark.parametrize("target", ["/short", "/long"])
def test_wrong_content_length_of_the_app(client: Client, target: str) -> None:
    client.get(target)
    refused(client, 500, "internal")


@pytest.mark.parametrize("case", range(8))
def test_response_splitting(client: Client, case: int) -> None:
    client.get(f"/bad_header?{case}")
    refused(client, 500, "internal")


def test_failed_head_request_has_no_body(client: Client) -> None:
    client.get("/fail", method="HEAD")
    assert client.answer(bodyless=True).status == 500
    assert client.is_closed()


def test_app_that_never_stops_sending_is_stopped_when_the_client_goes(server: Server, client: Client) -> None:
    errors = len(server.app.errors)
    client.get("/endless").head()
    with server.client() as other:
        # A client that reads as fast as the app writes must not starve the others.
        reading = threading.Thread(target=lambda: [client.chunk() for _ in range(500)])
        reading.start()
        assert other.post("/echo", b"served meanwhile").answer().body == b"served meanwhile"
        reading.join()
    client.reset()
    until(lambda: len(server.app.errors) == errors + 1, "send fails")
    assert isinstance(server.app.errors[-1], ConnectionResetError)


@pytest.mark.parametrize("piece_bytes", [10, 65_536])
def test_writing_to_a_client_that_is_gone_ends_at_once(
    server: Server, client: Client, piece_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    errors = len(server.app.errors)
    client.get(f"/endless?{piece_bytes}").head()
    client.reset()
    until(lambda: len(server.app.errors) == errors + 1, "send fails")
    # Both loops count writes to a lost connection, and complain of each from the fifth on.
    assert "socket.send() raised exception" not in caplog.text


def test_loop_gets_its_turn_while_the_client_takes_everything(client: Client) -> None:
    assert int(client.get("/share").answer().body.lstrip(b"-")) >= 2


def test_disconnect_is_seen_after_a_large_body_was_taken(server: Server) -> None:
    before = server.app.disconnects
    with server.client() as client:
        client.post("/hold", bytes(50_000))
        until(lambda: server.app.scopes and server.app.scopes[-1]["path"] == "/hold", "request")
    until(lambda: server.app.disconnects == before + 1, "http.disconnect")


def test_requests_behind_an_unread_answer_wait(server: Server) -> None:
    """The answers to what a client pipelines must not pile up; a half-close in between changes nothing."""
    before = len(server.app.scopes)
    with server.client(receive_buffer_bytes=4096) as client:
        client.get("/big?20000000").post("/echo", b"second").post("/echo", b"third").half_close()
        until(lambda: len(server.app.scopes) > before, "request")
        assert server.settled(lambda: len(server.app.scopes)) == before + 1
        assert len(client.answer().body) == 20_000_000
        assert [client.answer().body for _ in range(2)] == [b"second", b"third"]
        assert client.is_closed()


def test_half_closed_client_gets_its_answers(client: Client) -> None:
    client.post("/echo", b"one").post("/echo", b"two").post("/echo", b"three").half_close()
    assert [client.answer().body for _ in range(3)] == [b"one", b"two", b"three"]
    assert client.is_closed()


def test_half_closed_client_of_a_long_poll(server: Server, client: Client) -> None:
    """It is taken as gone, since that is how a client that closed altogether looks, too."""
    before = server.app.disconnects
    client.get("/hold").half_close()
    until(lambda: server.app.disconnects == before + 1, "http.disconnect")
    assert client.is_closed()


@pytest.mark.parametrize("part", [b"", b"GET /ta", POST + b"Content-Length: 5\r\n\r\nhe"])
def test_half_closed_in_the_middle(client: Client, part: bytes) -> None:
    client.send(part).half_close()
    assert client.is_closed()


def fill(client: Client, piece: bytes) -> int:
    """Send pieces until the server takes no more; returns the number of bytes that went."""
    sent = 0
    client.socket.settimeout(0.3)
    while sent < 100_000_000:
        try:
            sent += client.socket.send(piece[sent % len(piece) :])
        except TimeoutError:
            client.socket.settimeout(DEADLINE_S)
            return sent
    raise AssertionError("the server takes everything")


def test_body_that_nobody_reads_is_not_collected() -> None:
    """The app does not take the body, so the kernel's buffers fill up and the client has to wait."""
    limits = HttpLimits(max_body_bytes=2**40)
    with Server(limits=limits) as server, server.client() as client:
        client.send(b"POST /wait_unread HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"8000\r\n" + bytes(0x8000) + b"\r\n"
        sent = fill(client, piece)
        (connection,) = server.http1
        assert connection._exchange is not None
        # The mark counts what is parsed and what is not each for itself; one read more may have been under way.
        assert connection._exchange.unread_bytes <= 2 * limits.read_high_water_bytes + READ_BYTES
        server.call(server.app.go.set)
        client.send(piece[sent % len(piece) :] + b"0\r\n\r\n")
        assert len(client.answer().body) == (sent // len(piece) + 1) * 0x8000


def test_pipelined_requests_wait_outside(server: Server, client: Client) -> None:
    """While the first is not answered, no more than a mark and one read of what follows is taken in."""
    server.call(server.app.go.clear)
    client.get("/wait")
    until(lambda: server.app.scopes and server.app.scopes[-1]["path"] == "/wait", "request")
    one = b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000
    sent = fill(client, one)
    (connection,) = server.http1
    assert len(connection.pending) <= SMALL.read_high_water_bytes + READ_BYTES
    server.call(server.app.go.set)
    assert client.answer().body == b"at last"
    for _ in range(sent // len(one)):
        assert client.answer().body == b"x" * 5000


class TestTime:
    """Each time-out is short in the server of one test, and all others are long."""

    @pytest.fixture(params=LOOPS)
    def loop(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    def test_slow_head(self, loop: str) -> None:
        with Server(loop=loop, limits=HttpLimits(header_timeout_ms=60)) as server, contextlib.ExitStack() as stack:
            with server.held():  # who has not begun in time is closed without a word
                client = stack.enter_context(server.client())
                client.send(GET)
            stop = threading.Event()

            def drip() -> None:
                # Every byte is progress, and yet it must end.
                try:
                    for byte in b"X: " + b"y" * 100_000:
                        client.send(bytes([byte]))
                        if stop.wait(0.005):
                            return
                except OSError:
                    pass

            dripping = threading.Thread(target=drip)
            dripping.start()
            answer = client.answer()
            assert (answer.status, answer.code) == (408, "request_timeout")
            stop.set()
            dripping.join()

    def test_silent_connection_is_closed_without_a_word(self, loop: str) -> None:
        with Server(loop=loop, limits=HttpLimits(header_timeout_ms=30)) as server, server.client() as client:
            assert client.is_closed()

    def test_slow_body(self, loop: str) -> None:
        limits = HttpLimits(body_idle_timeout_ms=40)
        with Server(loop=loop, limits=limits) as server, server.client() as client:
            client.send(POST + b"Content-Length: 100\r\n\r\nhello")
            refused(client, 408, "request_timeout")
            until(lambda: server.app.disconnects == 1, "the app learns")

    def test_body_that_keeps_coming_is_not_timed_out(self, loop: str) -> None:
        limits = HttpLimits(body_idle_timeout_ms=400)
        pause = threading.Event()

        def keep_coming() -> None:
            with Server(loop=loop, limits=limits) as server, server.client() as client:
                client.send(POST + b"Content-Length: 20\r\n\r\n")
                for _ in range(20):
                    client.send(b"x")
                    pause.wait(0.03)
                assert client.answer().status == 200

        undisturbed(limits.body_idle_timeout_ms, keep_coming)

    def test_idle_keep_alive(self, loop: str) -> None:
        limits = HttpLimits(keep_alive_timeout_ms=40)
        with Server(loop=loop, limits=limits) as server, server.client() as client:
            assert client.post("/echo", b"hi").answer().body == b"hi"
            assert client.is_closed()

    def test_app_may_take_longer_than_any_timeout(self, loop: str) -> None:
        limits = HttpLimits(header_timeout_ms=30, body_idle_timeout_ms=30, keep_alive_timeout_ms=30)

        def wait_for_the_app() -> None:
            """Between its connection and its request there is a turn of the loop, too."""
            with Server(loop=loop, limits=limits) as server, contextlib.ExitStack() as stack:
                with server.held():
                    client = stack.enter_context(server.client())
                    client.get("/wait")
                until(lambda: server.app.scopes, "request")
                began_s = server.loop.time()
                until(lambda: server.loop.time() > began_s + 0.3, "ten times the time-outs")
                server.call(server.app.go.set)
                assert client.answer().body == b"at last"

        undisturbed(limits.header_timeout_ms, wait_for_the_app)

    def test_time_of_the_body_does_not_run_while_the_app_is_busy(self, loop: str) -> None:
        """Its time stands still while the body waits for the app, and before the client was told to send it."""
        limits = HttpLimits(body_idle_timeout_ms=100)

        def wait_for_the_app() -> None:
            with Server(loop=loop, limits=limits) as server, server.client() as full, server.client() as waiting:
                full.post("/wait_unread", bytes(500_000))
                waiting.send(
                    b"POST /wait_unread HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
                )
                until(lambda: len(server.app.scopes) == 2, "requests")
                began_s = server.loop.time()
                until(lambda: server.loop.time() > began_s + 0.3, "three times the time-out")
                server.call(server.app.go.set)
                assert waiting.head()[0] == 100
                assert waiting.send(b"hi").answer().body == b"hi"
                assert len(full.answer().body) == 500_000

        undisturbed(limits.body_idle_timeout_ms, wait_for_the_app)

    def test_client_that_never_closes_after_the_last_answer(self, loop: str) -> None:
        limits = HttpLimits(linger_ms=40)
        with Server(loop=loop, limits=limits) as server, server.client() as client:
            assert client.post("/once", b"").answer().body == b"bye"
            until(lambda: not server.connections.open, "the connection is let go")


class TestDrain:
    @pytest.fixture(params=LOOPS)
    def loop(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    def test_idle_is_closed_and_busy_finishes(self, loop: str) -> None:
        with Server(loop=loop, grace_ms=10_000) as server, server.client() as idle, server.client() as busy:
            assert idle.post("/echo", b"hi").answer().body == b"hi"
            busy.get("/wait")
            until(lambda: len(server.app.scopes) == 2, "requests")
            server.begin_shutdown()
            assert idle.is_closed()
            with pytest.raises(ConnectionRefusedError):
                server.client()
            server.call(server.app.go.set)
            answer = busy.answer()
            assert (answer.body, answer.headers[b"connection"]) == (b"at last", b"close")
            assert busy.is_closed()
            busy.close()
            server.wait_stopped()
            assert not server.app.cut

    def test_request_on_its_way_is_still_answered(self, loop: str) -> None:
        with Server(loop=loop, grace_ms=10_000) as server, server.client() as client:
            client.send(POST[:20])
            until(lambda: any(c.pending for c in server.http1), "part of a head")
            server.begin_shutdown()
            client.send(POST[20:] + b"Content-Length: 2\r\n\r\nhi")
            answer = client.answer()
            assert (answer.body, answer.headers[b"connection"]) == (b"hi", b"close")

    def test_what_is_not_done_in_time_is_cut(self, loop: str) -> None:
        with Server(loop=loop, grace_ms=50) as server, server.client() as waiting, server.client() as streaming:
            waiting.get("/wait")
            streaming.get("/endless").head()
            server.begin_shutdown()
            refused(waiting, 503, "shutting_down")
            server.wait_stopped()
            assert server.app.cut == 2
            assert not server.connections.tasks
