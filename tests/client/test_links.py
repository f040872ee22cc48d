"""Connections of both clients: kept, given up, and closed at the right moment. The service is a script here."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.harness import poll
from topics.api.answers import JobAnswer
from topics.client import AsyncClient, Client, ClientError, NotAllowedError, Retry, UnreachableError, calls
from topics.client.clients import REQUESTS_MAX
from topics.client.errors import ServiceFaultError
from topics.client.http import NotSentError, ServiceAddress, TransportError
from topics.client.links import AsyncLink, Link, LinkPool, finish, finish_each
from topics.client.shift import BACKOFF, Shift

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
REQUEST = b"GET /v0/x HTTP/1.1\r\nHost: localhost\r\n\r\n"
NO_REPEAT = Retry(total_s=0.0)


class Script:
    """A service that gives the n-th request of all connections the n-th answer; None: it closes instead."""

    def __init__(self, answers: list[bytes | None], tls: ssl.SSLContext | None = None) -> None:
        self._answers = iter(answers)
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        self.requests: list[bytes] = []
        self.closed = threading.Semaphore(0)
        """Released for each connection that has ended."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            self.connections.append(connection)
            while request := connection.recv(1 << 16):
                self.requests.append(request)
                answer = next(self._answers)
                if answer is None:
                    break
                connection.sendall(answer)
        connection.close()
        self.closed.release()

    def address(self) -> ServiceAddress:
        return ServiceAddress(f"http://127.0.0.1:{self.port}", None, None)

    def close(self) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.close()


def refusal(code: str) -> bytes:
    body = b'{"error":{"code":"%b","message":""}}' % code.encode()
    return b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.fixture
def script() -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(*answers: bytes | None, tls: ssl.SSLContext | None = None) -> Script:
        made.append(Script(list(answers), tls))
        return made[-1]

    yield make
    for one in made:
        one.close()


Resolve = Callable[..., list[Any]]


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have `localhost` be an address of which nobody listens to the port, and then 127.0.0.1."""
    resolve: Resolve = socket.getaddrinfo

    def begin(first: str) -> None:
        def found(host: object, port: Any, *rest: Any, **options: Any) -> list[Any]:
            both = ((first, port), ("127.0.0.1", port))
            if host != "localhost":
                return resolve(host, port, *rest, **options)
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place) for place in both]

        monkeypatch.setattr(socket, "getaddrinfo", found)

    return begin


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["threads", "asyncio"])
def kind(request: pytest.FixtureRequest) -> tuple[Run, Any]:
    """The two kinds of connection, each with its way to run the same coroutine."""
    return (finish, Link) if request.param == "threads" else (asyncio.run, AsyncLink)


def links_to(service: Script, link: Any) -> LinkPool:
    return LinkPool(partial(link.connect, service.address()))


def close_when_asked(links: LinkPool, service: Script) -> None:
    poll("the request", lambda: bool(service.requests))
    links.close()


def test_a_connection_is_used_again(script: Callable[..., Script], kind: tuple[Run, Any]) -> None:
    run, link = kind
    service = script(OK, OK, CLOSING, OK)

    async def body() -> None:
        links = links_to(service, link)
        for _ in range(4):
            assert (await links.ask(REQUEST)).take_body() == b"{}"
        links.close()

    run(body())
    assert len(service.connections) == 2, "the third answer closed the first connection"


def test_a_connection_that_the_service_closed_is_not_used(script: Callable[..., Script], kind: tuple[Run, Any]) -> None:
    run, link = kind
    service = script(OK, OK)

    async def body() -> None:
        links = links_to(service, link)
        await links.ask(REQUEST)
        service.connections[0].shutdown(socket.SHUT_RDWR)
        assert service.closed.acquire(timeout=20)
        assert (await links.ask(REQUEST)).status == 200
        links.close()

    run(body())
    assert len(service.requests) == 2, "nothing was sent over the closed one"


def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next(
    script: Callable[..., Script], kind: tuple[Run, Any]
) -> None:
    """A proxy may say 408 before it closes a connection that was idle for long."""
    run, link = kind
    service = script(OK, OK)

    async def body() -> None:
        links = links_to(service, link)
        await links.ask(REQUEST)
        service.connections[0].sendall(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        for _ in range(3 if link is AsyncLink else 0):
            await asyncio.sleep(0.001)  # whether the event loop has read it or not
        assert (await links.ask(REQUEST)).status == 200
        links.close()

    run(body())
    assert len(service.connections) == 2


def test_a_broken_answer_is_an_error_and_its_connection_is_closed(
    script: Callable[..., Script], kind: tuple[Run, Any]
) -> None:
    run, link = kind
    service = script(OK[:-1], None, OK)

    async def body() -> None:
        links = links_to(service, link)
        if link is AsyncLink:
            asking = asyncio.ensure_future(links.ask(REQUEST))
            while not service.requests:
                await asyncio.sleep(0.001)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert service.closed.acquire(timeout=20), "a cancelled request ends with its connection"
        else:
            threading.Thread(target=close_when_asked, args=(links, service)).start()
            with pytest.raises(TransportError):
                await links.ask(REQUEST)
            with pytest.raises(RuntimeError, match="closed"):
                await links.ask(REQUEST)
            links = links_to(service, link)
        with pytest.raises(TransportError) as broken:
            await links.ask(REQUEST)
        assert not isinstance(broken.value, NotSentError)
        assert (await links.ask(REQUEST)).status == 200
        links.close()

    run(body())
    assert len(service.connections) == 3


def test_a_silent_stream_ends(script: Callable[..., Script], kind: tuple[Run, Any]) -> None:
    run, link = kind
    service = script(STREAM + b"data: 1\n\n")

    async def body() -> None:
        links = links_to(service, link)
        with pytest.raises(TransportError, match="in time"):
            _ = [events async for events in links.events(REQUEST, 0.05)]

    run(body())
    assert service.closed.acquire(timeout=20)


def test_a_stream_that_nobody_reads_any_more_is_closed(script: Callable[..., Script]) -> None:
    service = script(STREAM + b"data: 1\n\ndata: 2\n\n")
    stream = finish_each(links_to(service, Link).events(REQUEST, 20.0))
    assert next(batch for batch in stream if batch)[0].data == b"1"
    stream.close()
    assert service.closed.acquire(timeout=20)


def test_a_brake_on_one_who_repeats_without_an_end_is_no_warning(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    """Only what a producer may wait for without an end is told."""
    body = b'{"error":{"code":"throttled","message":"later","detail":{"retry_after_ms":1}}}'
    brake = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    service = script(brake, brake, OK)
    endless = Retry(total_s=math.inf, pause_first_s=0.001)
    with Client(f"http://127.0.0.1:{service.port}", retry=endless) as client:
        assert client.call(calls.Call("GET", "/v0/x", bytes)) == b"{}"
    assert len(service.requests) == 3
    assert not caplog.messages


def test_long_polls_keep_no_request_from_being_sent() -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if b"/diff" not in asked[-1]:
            writer.write(OK)

    async def ask() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with AsyncClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            polls = [asyncio.ensure_future(client.diff("t", wait_ms=30_000)) for _ in range(REQUESTS_MAX)]
            while len(asked) < REQUESTS_MAX:
                await asyncio.sleep(0.001)
            assert await asyncio.wait_for(client.call(calls.Call("GET", "/v0/x", bytes)), 20) == b"{}"
            for one in polls:
                one.cancel()
        server.close()

    asyncio.run(ask())


@pytest.mark.parametrize("end", ["asks", "closes"])
def test_a_forked_child_leaves_the_connections_of_its_parent_alone(
    script: Callable[..., Script], kind: tuple[Run, Any], end: str
) -> None:
    run, link = kind
    service = script(OK, OK, OK)

    async def use(links: LinkPool) -> None:
        if end == "asks":
            assert (await links.ask(REQUEST)).take_body() == b"{}"
        else:
            links.close()

    async def body() -> None:
        links = links_to(service, link)
        await links.ask(REQUEST)
        child = os.fork()
        if not child:
            status = 1
            try:
                run(use(links))
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert (await links.ask(REQUEST)).take_body() == b"{}"
        links.close()

    run(body())
    # The parent's second request goes over its first connection.
    assert len(service.connections) == (2 if end == "asks" else 1)


def test_a_request_that_must_not_be_repeated_is_sent_once(script: Callable[..., Script]) -> None:
    service = script(None, OK)
    with Client(f"http://127.0.0.1:{service.port}") as client, pytest.raises(UnreachableError, match="may have been"):
        client.call(calls.claim("t", "node"))
    assert len(service.requests) == 1


def test_an_answer_of_something_else_may_be_that_to_a_write(script: Callable[..., Script]) -> None:
    service = script(OK)
    with (
        Client(f"http://127.0.0.1:{service.port}", retry=NO_REPEAT) as topics,
        pytest.raises(ServiceFaultError, match="did not come from a topics service") as fault,
    ):
        topics.append("t", [1])
    assert fault.value.may_be_done


@pytest.mark.parametrize("first", [None, refusal("unauthorized")])
def test_an_ack_that_is_refused_may_be_done_if_one_before_it_got_no_answer(
    script: Callable[..., Script], first: bytes | None
) -> None:
    service = script(first, refusal("unauthorized"))
    job = JobAnswer(seq=1, ts=1, lease_id="l", deadline=1, deliveries=1)

    async def body() -> None:
        async with AsyncClient(f"http://127.0.0.1:{service.port}", retry=NO_REPEAT) as topics:
            shift = Shift(topics, "t", "n", max_jobs=1, lease_ms=1000, backoff=BACKOFF)
            with pytest.raises(NotAllowedError) as refused:
                await shift.ack(job)
            assert refused.value.may_be_done is (first is None)

    asyncio.run(body())


def test_an_authority_of_ones_own_is_trusted_and_no_other(script: Callable[..., Script], tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    key, cert = tmp_path / "key", tmp_path / "cert"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*make, "-keyout", key, "-out", cert, *names], check=True, capture_output=True)
    of_service = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    of_service.load_cert_chain(cert, key)
    body = b'{"topic": "t", "deleted": true, "routers_removed": [], "performance": {"server_total_ms": 1}}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    service = script(*[answer] * 4, tls=of_service)
    url = f"https://localhost:{service.port}"
    trusting = ssl.create_default_context(cafile=str(cert))

    async def asynchronous() -> None:
        async with AsyncClient(url, tls=trusting) as client:
            for _ in range(2):
                assert (await client.delete_topic("t")).deleted

    with Client(url, tls=trusting) as client:
        for _ in range(2):
            assert client.delete_topic("t").deleted
    asyncio.run(asynchronous())
    assert len(service.connections) == 2
    with Client(url, retry=NO_REPEAT) as client, pytest.raises(ClientError, match="certificate"):
        client.delete_topic("t")


def test_the_next_address_of_a_host_name_is_tried_when_one_is_dead(
    script: Callable[..., Script], kind: tuple[Run, Any], two_addresses: Callable[[str], None]
) -> None:
    run, link = kind
    service = script(OK)
    two_addresses("127.0.0.2")

    async def body() -> None:
        links = LinkPool(partial(link.connect, ServiceAddress(f"http://localhost:{service.port}", None, None)))
        assert (await links.ask(REQUEST)).take_body() == b"{}"
        links.close()

    run(body())


def test_an_address_that_hangs_does_not_use_up_the_time_for_the_next(
    script: Callable[..., Script], monkeypatch: pytest.MonkeyPatch, two_addresses: Callable[[str], None]
) -> None:
    """asyncio tried them one after the other, and all of them had one time-out: the second was never asked."""
    service = script(OK)
    two_addresses("127.0.0.2")

    async def body() -> None:
        loop = asyncio.get_running_loop()
        connect, hung = loop.sock_connect, asyncio.Event()

        async def hang(one: socket.socket, place: Any) -> None:
            if place[0] == "127.0.0.2":
                hung.set()
                await asyncio.Event().wait()
            await connect(one, place)

        monkeypatch.setattr(loop, "sock_connect", hang)
        links = LinkPool(partial(AsyncLink.connect, ServiceAddress(f"http://localhost:{service.port}", None, None)))
        assert (await links.ask(REQUEST)).take_body() == b"{}"
        assert hung.is_set()
        links.close()

    asyncio.run(body())


def test_a_loop_that_tries_addresses_by_itself_is_not_told_how(
    script: Callable[..., Script], two_addresses: Callable[[str], None]
) -> None:
    service = script(OK)
    two_addresses("127.0.0.2")

    async def body() -> None:
        links = links_to(service, AsyncLink)
        assert (await links.ask(REQUEST)).take_body() == b"{}"
        links.close()

    uvloop.run(body())
