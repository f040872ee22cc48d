"""`python -m bench.cycles`: what a frontend leaves to the garbage collector, for each kind of work.

A look of the collector at all objects holds the loop for a µs each, so a frontend leaves it nothing
(`topics.core.collector`). A service of one frontend runs with `bench.cycle_probe` in it. Each kind of work is done some
times, and what the collector then finds is divided by that number. `--circles` shows what refers to what.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import h2.config
import h2.connection
import h2.events
import wsproto.connection
import wsproto.events

from tests.frontend.http1_server import Client
from tests.harness import Service, poll

ROOT: Final = Path(__file__).parents[1]
TIMES: Final = 40
SETTLE_S: Final = 2.6
"""Longer than a frontend gives an app whose client is gone."""
LONG_MS: Final = 30_000
JSON: Final = "Content-Type: application/json"
COMMAND: Final = """#!{python}
import sys
sys.path.insert(0, {root!r})
from bench.cycle_probe import install
install({directory!r})
from topicsd import topics_supervisor
sys.exit(topics_supervisor())
"""
RECORD: Final = b'{"records":[{"data":1}]}'


class Probed:
    """A service with a probe in its frontend."""

    def __init__(self, service: Service, directory: Path) -> None:
        self.service = service
        self.port = service.port
        self._directory = directory
        self._pid = service.pid_of("frontend")

    def look(self) -> dict[str, Any]:
        """Return what the frontend has left to the collector since the last look."""
        path = self._directory / str(self._pid)
        os.kill(self._pid, signal.SIGUSR1)
        poll("what is left", path.exists)
        found: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        return found

    # -- clients

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        with Client(self.port) as client:
            yield client

    def clients(self, stack: ExitStack) -> list[Client]:
        """Return TIMES connections, which end with the stack."""
        return [stack.enter_context(Client(self.port)) for _ in range(TIMES)]

    def ask(self, path: str, body: object, status: int = 200) -> Any:
        """Ask once, over a connection of its own."""
        with self.client() as client:
            answer = client.post(path, json.dumps(body).encode(), JSON).answer()
            assert answer.status == status, answer
            return json.loads(answer.body)

    def put(self, topic: str, **config: object) -> None:
        with self.client() as client:
            body = json.dumps(config).encode()
            head = f"PUT /v0/topics/{topic} HTTP/1.1\r\nHost: test\r\n{JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
            assert client.send(head.encode() + body).answer().status in (200, 201)

    def write(self, topic: str, body: bytes = RECORD) -> None:
        with self.client() as client:
            assert client.post(f"/v0/topics/{topic}", body, JSON).answer().status in (200, 201)

    def stream_path(self, topic: str = "t") -> str:
        path: str = self.ask("/v0/watch", {"topics": {topic: {"from_seq": 0}}})["stream_url"]
        return path


class Http2:
    """One connection of HTTP/2, which reads until something happens on a stream."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._next = 1
        self._happened: set[tuple[int | None, type[h2.events.Event]]] = set()

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> int:
        stream_id, self._next = self._next, self._next + 2
        head = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        head += [("content-type", "application/json")] if body else []
        self._h2.send_headers(stream_id, head + list(headers.items()), end_stream=not body)
        if body:
            self._h2.send_data(stream_id, body, end_stream=True)
        self._flush()
        return stream_id

    def open_websocket(self) -> int:
        stream_id, self._next = self._next, self._next + 2
        head = [(":method", "CONNECT"), (":protocol", "websocket"), (":scheme", "http"), (":path", "/v0/ws")]
        head += [(":authority", "localhost"), ("sec-websocket-version", "13")]
        self._h2.send_headers(stream_id, head)
        self._flush()
        self.wait(stream_id, h2.events.ResponseReceived)
        return stream_id

    def send(self, stream_id: int, data: bytes) -> None:
        self._h2.send_data(stream_id, data)
        self._flush()

    def reset(self, stream_id: int) -> None:
        self._h2.reset_stream(stream_id)
        self._flush()

    def go_away(self) -> None:
        self._h2.close_connection()
        self._flush()
        self.socket.close()

    def wait(self, stream_id: int, kind: type[h2.events.Event]) -> None:
        """Read until this has happened on the stream."""
        while (stream_id, kind) not in self._happened:
            data = self.socket.recv(65536)
            assert data, "the connection was closed"
            for event in self._h2.receive_data(data):
                self._happened.add((getattr(event, "stream_id", None), type(event)))
                if isinstance(event, h2.events.DataReceived):
                    self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self._flush()

    def _flush(self) -> None:
        self.socket.sendall(self._h2.data_to_send())


def cut(end: socket.socket) -> None:
    """Reset a connection."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    end.close()


# -- HTTP/1.1


def asks(*requests: tuple[str, str, bytes, int]) -> Callable[[Probed], None]:
    """Send these requests again and again, over one connection while it lasts."""

    def work(probed: Probed) -> None:
        for method, path, body, status in requests:
            client = Client(probed.port)
            for _ in range(TIMES):
                head = f"{method} {path} HTTP/1.1\r\nHost: test\r\n{JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
                answer = client.send(head.encode() + body).answer(bodyless=method == "HEAD")
                assert answer.status == status, answer
                if answer.headers.get(b"connection") == b"close":
                    client.close()
                    client = Client(probed.port)
            client.close()

    return work


def write_each(probed: Probed) -> None:
    for _ in range(TIMES):
        probed.write("t")


def write_reset(probed: Probed) -> None:
    for _ in range(TIMES):
        with probed.client() as client:
            client.post("/v0/topics/t", RECORD, JSON).reset()


def refused_writes(probed: Probed) -> None:
    probed.put("full", cap_records=1, discard="reject")
    with probed.client() as client:
        client.post("/v0/topics/full", RECORD, JSON).answer()
        for _ in range(TIMES):
            assert client.post("/v0/topics/full", RECORD, JSON).answer().status == 422
        client.get("/v0/topics/full", method="DELETE").answer()


def make_and_delete(probed: Probed) -> None:
    with probed.client() as client:
        for _ in range(TIMES):
            assert client.post("/v0/topics/u", RECORD, JSON).answer().status == 201
            assert client.get("/v0/topics/u", method="DELETE").answer().status == 200


def half_a_body(probed: Probed) -> None:
    with ExitStack() as stack:
        for client in probed.clients(stack):
            client.send(f"POST /v0/topics/t HTTP/1.1\r\nHost: test\r\n{JSON}\r\nContent-Length: 9000\r\n\r\n[".encode())
        time.sleep(0.3)


def too_long(probed: Probed) -> None:
    head = f"POST /v0/topics/t HTTP/1.1\r\nHost: test\r\n{JSON}\r\nContent-Length: 99000000\r\n\r\n".encode()
    for _ in range(TIMES):
        with probed.client() as client:
            assert client.send(head).answer().status == 413


def nonsense(probed: Probed) -> None:
    for _ in range(TIMES):
        with probed.client() as client:
            assert client.send(b"what is this?\r\n\r\n").answer().status == 400


def long_poll(end: str, wait_ms: int = LONG_MS) -> Callable[[Probed], None]:
    def work(probed: Probed) -> None:
        topic = f"poll-{time.monotonic_ns()}"
        probed.put(topic)
        with ExitStack() as stack:
            clients = probed.clients(stack)
            body = json.dumps({"from_seq": 0, "wait_ms": wait_ms}).encode()
            for client in clients:
                client.post(f"/v0/topics/{topic}/diff", body, JSON)
            time.sleep(0.3)
            if end == "record":
                probed.write(topic)
            if end in ("record", "time"):
                assert all(client.answer().status == 200 for client in clients)
            if end == "reset":
                for client in clients:
                    client.reset()

    return work


def event_stream(end: str) -> Callable[[Probed], None]:
    def work(probed: Probed) -> None:
        topic = f"watched-{time.monotonic_ns()}"
        probed.put(topic)
        paths = [probed.stream_path(topic) for _ in range(TIMES)]
        with ExitStack() as stack:
            clients = probed.clients(stack)
            for client, path in zip(clients, paths, strict=True):
                client.get(path, "Accept: text/event-stream")
                assert client.head()[0] == 200
                client.chunk()
            probed.write(topic)
            time.sleep(0.3)
            if end == "deleted":
                with probed.client() as other:
                    assert other.get(f"/v0/topics/{topic}", method="DELETE").answer().status == 200
                time.sleep(0.3)
            elif end == "reset":
                for client in clients:
                    client.reset()
            elif end == "taken over":
                for path in paths:
                    client = stack.enter_context(Client(probed.port)).get(path, "Accept: text/event-stream")
                    assert client.head()[0] == 200
                time.sleep(0.3)

    return work


def slow_streams(probed: Probed) -> None:
    """Open streams that read nothing, until they are cut."""
    topic = f"large-{time.monotonic_ns()}"
    probed.put(topic)
    for _ in range(20):
        probed.write(topic, json.dumps({"records": [{"data": "x" * 200_000}]}).encode())
    with ExitStack() as stack:
        for _ in range(TIMES):
            client = stack.enter_context(Client(probed.port, receive_buffer_bytes=4096))
            client.get(probed.stream_path(topic), "Accept: text/event-stream")
        time.sleep(45)


# -- Queues


def claims(probed: Probed) -> None:
    probed.put("jobs", type="queue")
    for _ in range(TIMES):
        probed.write("jobs")
        claimed = probed.ask("/v0/topics/jobs/claim", {"node": "n"})["claimed"]
        probed.ask("/v0/topics/jobs/ack", {"node": "n", "seqs": [claimed[0]["$seq"]]})


def work_streams(end: str) -> Callable[[Probed], None]:
    def work(probed: Probed) -> None:
        topic = f"jobs-{time.monotonic_ns()}"
        probed.put(topic, type="queue")
        with ExitStack() as stack:
            clients = probed.clients(stack)
            for at, client in enumerate(clients):
                client.get(f"/v0/topics/{topic}/work?node=n{at}", "Accept: text/event-stream")
                assert client.head()[0] == 200
            probed.write(topic)
            time.sleep(0.3)
            if end == "reset":
                for client in clients:
                    client.reset()

    return work


# -- WebSockets


def frame(event: wsproto.events.Event) -> bytes:
    return wsproto.connection.Connection(wsproto.connection.ConnectionType.CLIENT).send(event)


def message(op: str, **fields: object) -> bytes:
    return frame(wsproto.events.TextMessage(json.dumps({"op": op} | fields)))


HANDSHAKE: Final = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


def websocket(end: str) -> Callable[[Probed], None]:
    def work(probed: Probed) -> None:
        probed.put("full", cap_records=1, discard="reject")
        with ExitStack() as stack:
            clients = probed.clients(stack)
            for client in clients:
                client.get("/v0/ws", *HANDSHAKE)
                assert client.head()[0] == 101
                client.send(message("subscribe", request_id=1, topic="t"))
                client.send(message("publish", request_id=2, topic="t", records=[{"data": 1}]))
                client.read(2)
                if end == "refused publishes":
                    client.send(message("publish", request_id=3, topic="full", records=[{"data": 1}] * 2))
                    client.read(1)
            time.sleep(0.3)
            for client in clients:
                if end == "close":
                    client.send(frame(wsproto.events.CloseConnection(1000)))
                elif end == "unsubscribed":
                    client.send(message("unsubscribe", request_id=3, topic="t"))
                    client.send(message("nonsense", request_id=4))
                    client.send(frame(wsproto.events.CloseConnection(1000)))
                elif end == "wrong frame":
                    client.send(b"\xff\xff\xff\xff\xff\xff\xff")
                elif end == "reset":
                    client.reset()
            time.sleep(0.3)

    return work


def refused_websocket(probed: Probed) -> None:
    for _ in range(TIMES):
        with probed.client() as client:
            assert client.get("/v0/ws", *HANDSHAKE, "Origin: http://evil.example").head()[0] == 403


# -- HTTP/2


def http2(end: str, requests: int = 1) -> Callable[[Probed], None]:
    """Make connections with some requests each; or TIMES requests over one."""

    def work(probed: Probed) -> None:
        for _ in range(TIMES if requests == 1 else 1):
            one = Http2(probed.port)
            for _ in range(requests):
                one.wait(one.ask("POST", "/v0/topics/t", RECORD), h2.events.StreamEnded)
            if end == "go away":
                one.go_away()
            elif end == "reset":
                cut(one.socket)
            one.socket.close()

    return work


def http2_errors(probed: Probed) -> None:
    one = Http2(probed.port)
    for _ in range(TIMES):
        one.wait(one.ask("GET", "/v0/topics/none"), h2.events.StreamEnded)
    one.go_away()


def http2_long_poll(end: str, wait_ms: int = LONG_MS) -> Callable[[Probed], None]:
    def work(probed: Probed) -> None:
        topic = f"poll-{time.monotonic_ns()}"
        probed.put(topic)
        body = json.dumps({"from_seq": 0, "wait_ms": wait_ms}).encode()
        one = Http2(probed.port)
        streams = [one.ask("POST", f"/v0/topics/{topic}/diff", body) for _ in range(TIMES)]
        time.sleep(0.5)
        if end == "record":
            probed.write(topic)
        for stream_id in streams:
            if end == "reset":
                one.reset(stream_id)
            elif end != "cut":
                one.wait(stream_id, h2.events.StreamEnded)
        if end == "cut":
            cut(one.socket)
        else:
            time.sleep(0.3)
            one.go_away()

    return work


def http2_each(begin: Callable[[Probed, Http2], int], end: str) -> Callable[[Probed], None]:
    """Begin a stream over a connection each, and end all of them."""

    def work(probed: Probed) -> None:
        ones = []
        for _ in range(TIMES):
            one = Http2(probed.port)
            stream_id = begin(probed, one)
            one.wait(stream_id, h2.events.DataReceived)
            ones.append((one, stream_id))
        time.sleep(0.3)
        for one, stream_id in ones:
            if end == "close":
                one.send(stream_id, frame(wsproto.events.CloseConnection(1000)))
            elif end == "stream reset":
                one.reset(stream_id)
            elif end == "reset":
                cut(one.socket)
        time.sleep(0.3)
        for one, _ in ones:
            one.socket.close()

    return work


def http2_event_stream(end: str) -> Callable[[Probed], None]:
    def begin(probed: Probed, one: Http2) -> int:
        return one.ask("GET", probed.stream_path(), accept="text/event-stream")

    return http2_each(begin, end)


def http2_websocket(end: str) -> Callable[[Probed], None]:
    def begin(_probed: Probed, one: Http2) -> int:
        stream_id = one.open_websocket()
        one.send(stream_id, message("subscribe", request_id=1, topic="t"))
        return stream_id

    return http2_each(begin, end)


def http2_nonsense(probed: Probed) -> None:
    for _ in range(TIMES):
        with socket.create_connection(("127.0.0.1", probed.port), timeout=30) as end:
            end.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100)
            while end.recv(65536):
                pass


GET_TOPIC: Final = ("GET", "/v0/topics/t", b"", 200)

UNREAD: Final = "event streams that are not read, cut"
"""Work that takes most of a minute."""
WORK: Final[dict[str, Callable[[Probed], None]]] = {
    "writes over one connection": asks(("POST", "/v0/topics/t", RECORD, 200)),
    "writes, a connection each": write_each,
    "writes, reset behind the request": write_reset,
    "pages": asks(("POST", "/v0/topics/t/diff", b'{"from_seq":0}', 200)),
    "a topic, metrics, lists": asks(
        GET_TOPIC,
        ("GET", "/v0/metrics", b"", 200),
        ("GET", "/v0/topics?sort=bytes", b"", 200),
        ("HEAD", *GET_TOPIC[1:]),
    ),
    "422, refused by the shard": refused_writes,
    "topics, made and deleted": make_and_delete,
    "400, a body that is no JSON": asks(("POST", "/v0/topics/t", b"{", 400)),
    "400, no HTTP": nonsense,
    "404": asks(("GET", "/v0/topics/none", b"", 404)),
    "405": asks(("PUT", "/v0/metrics", b"", 405)),
    "413": too_long,
    "half a body, then closed": half_a_body,
    "long polls, answered": long_poll("record"),
    "long polls, timed out": long_poll("time", 100),
    "long polls, closed by the client": long_poll("close"),
    "long polls, reset": long_poll("reset"),
    "event streams, closed by the client": event_stream("close"),
    "event streams, reset": event_stream("reset"),
    "event streams, of a topic that is deleted": event_stream("deleted"),
    "event streams, taken over": event_stream("taken over"),
    UNREAD: slow_streams,
    "claims and acks": claims,
    "/work streams, closed by the client": work_streams("close"),
    "/work streams, reset": work_streams("reset"),
    "WebSockets, closed in order": websocket("close"),
    "WebSockets, unsubscribed, and a wrong command": websocket("unsubscribed"),
    "WebSockets, a wrong frame": websocket("wrong frame"),
    "WebSockets, their connections closed": websocket("end"),
    "WebSockets, reset": websocket("reset"),
    "WebSockets, publishes that the shard refuses": websocket("refused publishes"),
    "WebSockets, refused": refused_websocket,
    "HTTP/2, requests over one connection": http2("go away", TIMES),
    "HTTP/2, 404 over one connection": http2_errors,
    "HTTP/2, a connection each, GOAWAY": http2("go away"),
    "HTTP/2, a connection each, closed": http2("close"),
    "HTTP/2, a connection each, reset": http2("reset"),
    "HTTP/2, no frames": http2_nonsense,
    "HTTP/2, long polls of one connection, answered": http2_long_poll("record"),
    "HTTP/2, long polls of one connection, timed out": http2_long_poll("time", 100),
    "HTTP/2, long polls of one connection, their streams reset": http2_long_poll("reset"),
    "HTTP/2, long polls of one connection, it is reset": http2_long_poll("cut"),
    "HTTP/2, event streams, their streams reset": http2_event_stream("stream reset"),
    "HTTP/2, event streams, closed by the client": http2_event_stream("end"),
    "HTTP/2, event streams, reset": http2_event_stream("reset"),
    "HTTP/2, WebSockets, closed in order": http2_websocket("close"),
    "HTTP/2, WebSockets, their streams reset": http2_websocket("stream reset"),
    "HTTP/2, WebSockets, closed by the client": http2_websocket("end"),
    "HTTP/2, WebSockets, reset": http2_websocket("reset"),
}


@contextlib.contextmanager
def running() -> Iterator[Probed]:
    """Run a service with a probe in its frontend, and a topic `t`."""
    with tempfile.TemporaryDirectory(prefix="topics-cycles-") as kept:
        directory, command = Path(kept) / "left", Path(kept) / "topics-supervisor"
        directory.mkdir()
        command.write_text(COMMAND.format(python=sys.executable, root=str(ROOT), directory=str(directory)))
        command.chmod(0o755)
        env = {"TOPICS_ALLOWED_HOSTS": "test"}
        with Service(shards=1, frontends=1, env=env, command=command) as service:
            probed = Probed(service, directory)
            probed.write("t")
            yield probed


def measure(probed: Probed, what: str) -> dict[str, Any]:
    """Do the work twice; the first time is for what is made once, and stays."""
    for _ in range(2):
        WORK[what](probed)
        time.sleep(SETTLE_S)
        found = probed.look()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.cycles", description="Measure what is left to the garbage collector.")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="work whose name contains this")
    parser.add_argument("--circles", action="store_true", help="show what refers to what in a circle")
    arguments = parser.parse_args()
    print("| work | objects left, each | bytes left, each |\n|---|---|---|")
    with running() as probed:
        for what in WORK:
            if arguments.only and not any(part in what for part in arguments.only):
                continue
            found = measure(probed, what)
            print(f"| {what} | {found['objects'] / TIMES:.1f} | {found['bytes'] / TIMES:,.0f} |", flush=True)
            if arguments.circles:
                for text, count in found["circles"]:
                    print(f"    {count} × {text}", flush=True)
                print(f"    {found['kinds']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
