"""A real server in a thread, the app it serves, and a raw-socket client that hides nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, cast

import pytest
import uvloop

from topics.frontend.asgi import DELIVER, Receive, Scope, Send, until_disconnect
from topics.frontend.entry.responses import reserve_room
from topics.frontend.http.connections import Connections
from topics.frontend.http.deadlines import HttpLimits
from topics.frontend.http.http1 import Http1Protocol
from topics.frontend.http.http1_exchange import PushStream
from topics.frontend.http.serve import serve
from topics.shm.quotas import Quota

DEADLINE_S = 60.0
JSON = (b"content-type", b"application/json")


def until(condition: Callable[[], object], what: str) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + DEADLINE_S
    is_over = False
    while not condition():
        assert not is_over, f"did not happen: {what}"
        is_over = time.monotonic() > deadline  # one more look: this process may have stood still since the last
        time.sleep(0.002)


class Stillness:
    """The longest time that this process stood still, as a thread sees it that sleeps for a moment over and over."""

    _NAP_S = 0.005

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.is_set():
            began_s = time.monotonic()
            self._over.wait(self._NAP_S)
            self.longest_s = max(self.longest_s, time.monotonic() - began_s - self._NAP_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def undisturbed(limit_ms: int, attempt: Callable[[], None]) -> None:
    """Runs what must not take `limit_ms` between two steps of client and server. If it fails and this process stood
    still for a good part of that meanwhile, it is run again: the failure may be the machine's.
    """
    for attempts_left in range(4, -1, -1):
        stillness = Stillness()
        try:
            with stillness:
                attempt()
        except (Exception, pytest.fail.Exception):
            if not attempts_left or stillness.longest_s * 1000 < limit_ms / 3:
                raise
        else:
            return


class App:
    """One behaviour per path; what it has seen is for the test to look at."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.running = 0
        """Calls that have not ended."""
        self.disconnects = 0
        self.taken = 0
        """Messages of WebSockets."""
        self.sent_bytes = 0
        self.delivered = 0
        self.asked = self.made = 0
        """Counts of `page`: pages asked for, and made."""
        self.errors: list[BaseException] = []
        self.cut = 0
        self.go = asyncio.Event()
        self.pushes: list[PushStream] = []
        self.push_closed = 0
        self.push_writable = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        self.running += 1
        try:
            if scope["type"] == "websocket":
                await getattr(self, {"/ws": "websocket"}.get(scope["path"], scope["path"][1:]))(receive, send)
            else:
                await getattr(self, scope["path"].split("/")[1])(scope, receive, send)
        except asyncio.CancelledError:
            self.cut += 1
            raise
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            self.running -= 1

    async def body(self, receive: Receive) -> bytes:
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                raise ConnectionResetError("disconnected while its body was read")
            parts.append(message["body"])
            if not message["more_body"]:
                return b"".join(parts)

    async def answer(self, send: Send, body: bytes, status: int = 200, headers: Any = (JSON,)) -> None:
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})

    async def echo(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(send, await self.body(receive))

    async def target(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = ("method", "path", "raw_path", "query_string", "http_version", "scheme", "headers", "root_path")
        show = {key: scope[key] for key in keys} | {"client": scope["client"][0], "server": scope["server"][1]}
        await self.answer(send, json.dumps(show, default=lambda b: b.decode("latin-1")).encode())

    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(send, b"", int(scope["path"].rsplit("/", 1)[1]))

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [JSON]})
        for part in (b"one", b"", b"three"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})

    async def counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Length", b"6")]})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        await send({"type": "http.response.body", "body": b"def"})

    async def large(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pieces until the client is gone."""
        await self.body(receive)
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        piece = bytes(64 * 1024)
        while not gone.done():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self.sent_bytes += len(piece)
            # Hypercorn neither fails nor waits once the client is gone.
            await asyncio.sleep(0)

    async def endless(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pieces of the size asked for, for ever: only an error out of `send` ends it."""
        piece = bytes(int(scope["query_string"] or b"65536"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def share(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the turns that another task gets while this one sends what fits into the kernel's buffers."""
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(take_turns())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(60):
            await send({"type": "http.response.body", "body": b"-" * 10_000, "more_body": True})
        other.cancel()
        await send({"type": "http.response.body", "body": b"%d" % turns})

    async def big(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(send, b"x" * int(scope["query_string"]))

    async def deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b"x" * int(scope["query_string"])
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [JSON, length]})
        await scope["extensions"][DELIVER](send, body)
        self.delivered += 1

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as routes do whose answers may be long: take room first, for `?len_bytes` or the most."""
        self.asked += 1
        await self.body(receive)
        len_bytes, *most_bytes = map(int, scope["query_string"].split(b"-"))
        await reserve_room(scope, most_bytes[0] if most_bytes else len_bytes)
        self.made += 1
        await self.answer(send, b"x" * len_bytes)

    async def wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.body(receive)
        await self.go.wait()
        await self.answer(send, b"at last")

    async def wait_unread(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.go.wait()
        await self.answer(send, await self.body(receive))

    async def hold(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A long poll: pending until the client goes away."""
        await self.body(receive)
        assert (await receive())["type"] == "http.disconnect"
        self.disconnects += 1

    async def after(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Goes on after its answer, as a background task does."""
        await self.body(receive)
        await self.answer(send, b"answered")
        assert (await receive())["type"] == "http.disconnect"
        self.disconnects += 1
        await self.go.wait()

    async def patient(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ends without an answer when its client is gone."""
        await until_disconnect(receive)

    async def early(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(send, b"no need to read", 415)

    async def once(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.body(receive)
        await self.answer(send, b"bye", headers=[(b"Connection", b"close")])

    async def fail(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("the app is broken, as the test wants")

    async def fail_late(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        raise ValueError("the app is broken, as the test wants")

    async def nothing(self, scope: Scope, receive: Receive, send: Send) -> None:
        return

    async def short(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(send, b"abc", headers=[(b"content-length", b"5")])

    async def long(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(send, b"abcdefg", headers=[(b"content-length", b"5")])

    async def split(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(send, b"", headers=[(b"x-name", scope["query_string"].decode().encode("latin-1"))])

    async def bad_header(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, value = [
            (b"x-a", b"b\r\nset-cookie: evil=1"),
            (b"x-a", b"b\nc"),
            (b"x-a", b"b\rc"),
            (b"x-a", b"b\0c"),
            (b"x-a: y\r\nx-b", b"c"),
            (b"x a", b"b"),
            (b"", b"b"),
            (b"content-length", b"5\r\nx: y"),
        ][int(scope["query_string"])]
        await self.answer(send, b"", headers=[(name, value)])

    async def push(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        if scope["query_string"] == b"length":
            headers.append((b"content-length", b"10"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        stream = scope["extensions"]["topics.push"]()

        def on_close() -> None:
            self.push_closed += 1

        def on_writable() -> None:
            self.push_writable += 1

        stream.on_close, stream.on_writable = on_close, on_writable
        self.pushes.append(stream)
        await self.body(receive)
        assert (await receive())["type"] == "http.disconnect"
        self.disconnects += 1

    async def deaf(self, receive: Receive, send: Send) -> None:
        """A WebSocket of which nothing is read."""
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        await self.go.wait()

    async def unaccepted(self, receive: Receive, send: Send) -> None:
        """A WebSocket whose handshake waits until its client is gone."""
        while (await receive())["type"] != "websocket.disconnect":
            pass
        self.disconnects += 1

    async def broken(self, receive: Receive, send: Send) -> None:
        """A WebSocket whose app fails when it is open."""
        await send({"type": "websocket.accept"})
        raise ValueError("the app is broken, as the test wants")

    async def unopened(self, receive: Receive, send: Send) -> None:
        """A WebSocket that is refused, without a reason."""
        await send({"type": "websocket.close"})

    async def unanswered(self, receive: Receive, send: Send) -> None:
        """A WebSocket whose handshake gets no answer."""

    async def closing(self, receive: Receive, send: Send) -> None:
        """A WebSocket that is closed when `go` is set."""
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        await self.go.wait()
        await send({"type": "websocket.close", "code": 1012, "reason": "later"})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        self.disconnects += 1

    async def websocket(self, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            self.taken += 1
            await send({"type": "websocket.send", "text": message["text"].upper()})
        self.disconnects += 1


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}


class Server:
    """`serve` with an `App` in a thread of its own, on a port of 127.0.0.1."""

    def __init__(
        self,
        loop: str = "uvloop",
        limits: HttpLimits | None = None,
        grace_ms: int = 10_000,
        places: Quota | None = None,
        readable_by: Callable[[bytes], bytes] = lambda _: b"",
    ) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self.listener.getsockname()[1]
        self._limits = limits or HttpLimits()
        self._grace_ms = grace_ms
        self._places = places
        self._readable_by = readable_by
        self._loop_factory = LOOPS[loop]
        self._ready = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.app: App
        self.connections: Connections
        self.loop: asyncio.AbstractEventLoop
        self.shutdown: asyncio.Event
        self.loop_errors: list[dict[str, Any]] = []

    @property
    def http1(self) -> list[Http1Protocol]:
        """The open connections of HTTP/1.1, to look inside."""
        return [cast(Http1Protocol, connection) for connection in self.connections.open]

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda _, context: self.loop_errors.append(context))
        self.app, self.connections, self.shutdown = App(), Connections(self._places), asyncio.Event()
        await serve(
            self.app,
            [self.listener],
            self._limits,
            self.shutdown,
            grace_ms=self._grace_ms,
            connections=self.connections,
            on_ready=self._ready.set,
            readable_by=self._readable_by,
        )

    def call(self, *functions: Callable[[], object]) -> None:
        """Run `functions` in one turn of the server's loop and wait for them."""
        done = threading.Event()

        def run() -> None:
            try:
                for function in functions:
                    function()
            finally:
                done.set()

        self.loop.call_soon_threadsafe(run)
        assert done.wait(DEADLINE_S)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The server's loop stands still: what clients do meanwhile is there when their first time-outs begin."""
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go_on.wait()

        self.loop.call_soon_threadsafe(hold)
        try:
            assert held.wait(DEADLINE_S)
            yield
        finally:
            go_on.set()

    def settled(self, read: Callable[[], int]) -> int:
        """The value of `read` once it stands still while the loop turns fifty times."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            before = read()
            for _ in range(50):
                self.call(lambda: None)
            if read() == before:
                return before
            assert time.monotonic() < deadline, "it never stands still"

    def begin_shutdown(self) -> None:
        self._stopping = True
        self.call(self.shutdown.set)

    def wait_stopped(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the server does not stop"

    def client(self, **options: Any) -> Client:
        return Client(self.port, **options)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._stopping:
            self.begin_shutdown()
        self.wait_stopped()
        # An exception that reaches the loop is a defect in the protocol, whatever the test was about.
        assert not self.loop_errors, self.loop_errors


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def code(self) -> str:
        """The code of the error envelope (api §0.6)."""
        assert self.headers[b"content-type"] == b"application/json"
        error = json.loads(self.body)["error"]
        assert error["message"]
        code: str = error["code"]
        return code


class Client:
    """One TCP connection, read and written byte by byte as the test says."""

    def __init__(self, port: int, receive_buffer_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def send(self, data: bytes) -> Self:
        self.socket.sendall(data)
        return self

    def get(self, target: str, *headers: str, method: str = "GET") -> Self:
        lines = [f"{method} {target} HTTP/1.1", "Host: test", *headers, "", ""]
        return self.send("\r\n".join(lines).encode())

    def post(self, target: str, body: bytes, *headers: str) -> Self:
        lines = [f"POST {target} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *headers, "", ""]
        return self.send("\r\n".join(lines).encode() + body)

    def half_close(self) -> Self:
        self.socket.shutdown(socket.SHUT_WR)
        return self

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def line(self) -> bytes:
        return self._file.readline()

    def head(self) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers of the next answer, final or not."""
        status_line = self.line()
        assert status_line.startswith(b"HTTP/1.1 "), status_line
        headers: dict[bytes, bytes] = {}
        while (line := self.line()) != b"\r\n":
            assert line.endswith(b"\r\n"), line
            name, value = line.split(b":", 1)
            assert name.lower() not in headers, f"header {name!r} came twice"
            headers[name.lower()] = value.strip()
        return int(status_line.split()[1]), headers

    def chunk(self) -> bytes:
        """The next chunk's data; b"" is the last."""
        size = int(self.line(), 16)
        data = self.read(size)
        assert self.line() == b"\r\n"
        return data

    def answer(self, bodyless: bool = False) -> Answer:
        """The next answer, whole."""
        status, headers = self.head()
        if bodyless or status in (204, 304):
            body = b""
        elif headers.get(b"transfer-encoding") == b"chunked":
            assert b"content-length" not in headers
            body = b"".join(iter(self.chunk, b""))
        elif b"content-length" in headers:
            size = int(headers[b"content-length"])
            body = self.read(size)
            assert len(body) == size, f"the answer was cut: {len(body)} of {size} bytes"
        else:
            assert headers[b"connection"] == b"close"
            body = self._file.read()
        return Answer(status, headers, body)

    def is_closed(self) -> bool:
        """Waits for the end of the connection; False: something came instead."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    def reset(self) -> None:
        """Vanish: a reset instead of an orderly close."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
