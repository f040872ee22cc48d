"""api §7 over HTTP/2 with a client that gives its stream no window: what is kept for it is bounded, as over HTTP/1.1,
and it misses nothing when it goes on.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import h2.config
import h2.connection
import h2.events
import pytest
from wsproto.connection import Connection, ConnectionType
from wsproto.events import Ping, TextMessage

from tests.contract.asking import write
from tests.contract.stream import follow, watch
from tests.contract.test_7_7_websocket import open_sockets
from tests.harness import Service, poll

pytestmark = pytest.mark.long

RECORDS = 640
RECORD_BYTES = 60_000
KEPT_BYTES_MAX = 12 << 20
"""A third of the topic: anything that keeps what its client does not take is beyond it."""
GENEROUS = 1 << 30
EVERY_SEQ = list(range(1, RECORDS + 1))


@pytest.fixture(scope="module")
def large() -> Iterator[Service]:
    """One frontend, and a topic `t` of 38 MB."""
    with Service(shards=1, frontends=1, wal_file_bytes=None) as service:
        for _ in range(RECORDS // 40):
            write(service.client, "t", *["x" * RECORD_BYTES] * 40)
        read_by_somebody_else(service)
        yield service


def read_by_somebody_else(service: Service) -> None:
    """All of it. Streams of one topic take turns: nobody is far behind afterwards who could be further."""
    with follow(service, {"t": {"from_seq": 0}}) as stream:
        assert stream.records_to(RECORDS) == RECORDS


def anonymous_bytes(service: Service) -> int:
    """The frontend's own memory, without files that it maps."""
    status = Path(f"/proc/{service.pid_of('frontend')}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


class Reader:
    """One stream of one connection, which has the window that HTTP/2 begins with and gives more when told to."""

    def __init__(self, service: Service, *headers: tuple[str, str]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", service.port), timeout=15)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._h2.send_headers(1, [(":scheme", "http"), (":authority", "localhost"), *headers])
        self._flush()
        self._early = b""
        self.status = ""

    def open_window(self) -> None:
        self._h2.increment_flow_control_window(GENEROUS)
        self._h2.increment_flow_control_window(GENEROUS, 1)
        self._flush()

    def send(self, data: bytes) -> None:
        self._h2.send_data(1, data)
        self._flush()

    def wait_answer(self) -> None:
        """Its head; what data comes with it counts as read by `read_window`."""
        while not self.status:
            self._early += self._receive()
        assert self.status == "200"

    def read(self) -> bytes:
        """The next of the stream's data."""
        while not (data := self._receive()):
            pass
        return data

    def _receive(self) -> bytes:
        received = self._socket.recv(1 << 20)
        assert received, "the connection was closed"
        data = b""
        for event in self._h2.receive_data(received):
            assert not isinstance(event, h2.events.StreamEnded | h2.events.StreamReset), event
            if isinstance(event, h2.events.ResponseReceived):
                self.status = {str(name): str(value) for name, value in event.headers}[":status"]
            elif isinstance(event, h2.events.DataReceived):
                data += event.data
        self._flush()
        return data

    def read_window(self) -> bytes:
        """All that the window of the beginning lets through."""
        data = self._early
        while len(data) < 65_535:
            data += self.read()
        assert len(data) == 65_535
        return data

    def _flush(self) -> None:
        self._socket.sendall(self._h2.data_to_send())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def seqs_of_events(data: bytes, more: Callable[[], bytes]) -> list[int]:
    """Return the seqs of an event stream, as far as it is caught up."""
    pieces = [data]
    end = data[-1000:]
    while b"event: caught-up" not in end:
        pieces.append(more())
        end = (end + pieces[-1])[-1000:]  # the marker may come in two pieces
    frames = b"".join(pieces).split(b"\n\n")
    records = [frame.partition(b"data: ")[2].partition(b"\n")[0] for frame in frames if b"event: record" in frame[:100]]
    return [record["$seq"] for one in records for record in json.loads(one)["records"]]


def seqs_of_messages(data: bytes, more: Callable[[], bytes]) -> list[int]:
    """The same of a WebSocket."""
    connection, text = Connection(ConnectionType.CLIENT), ""
    seqs: list[int] = []
    while True:
        connection.receive_data(data)
        for event in connection.events():
            if not isinstance(event, TextMessage):
                continue
            text += event.data
            if not event.message_finished:
                continue
            message, text = json.loads(text), ""
            if message["op"] == "caught_up":
                return seqs
            seqs += [record["$seq"] for record in message.get("records", [])]
        data = more()


@pytest.mark.parametrize("kind", ["events", "websocket"])
def test_a_client_that_gives_no_window_is_kept_little_and_goes_on_where_it_was(large: Service, kind: str) -> None:
    before = anonymous_bytes(large)
    frontend = [large.pid_of("frontend")]
    sockets = open_sockets(frontend)
    if kind == "events":
        wid = watch(large.client, {"t": {"from_seq": 0}})["wid"]
        reader = Reader(large, (":method", "GET"), (":path", f"/v0/watch/{wid}"), ("accept", "text/event-stream"))
    else:
        websocket = [(":method", "CONNECT"), (":protocol", "websocket"), (":path", "/v0/ws")]
        reader = Reader(large, *websocket, ("sec-websocket-version", "13"))
        reader.wait_answer()
        subscribe = json.dumps({"op": "subscribe", "request_id": "1", "topic": "t", "from_seq": 0})
        reader.send(Connection(ConnectionType.CLIENT).send(TextMessage(data=subscribe)))
    with reader:
        first = reader.read_window()
        for _ in range(2):
            read_by_somebody_else(large)
        assert anonymous_bytes(large) - before < KEPT_BYTES_MAX
        if kind == "websocket":
            # The reader of the connection answers it: that one must not wait for what it is to read.
            reader.send(Connection(ConnectionType.CLIENT).send(Ping(payload=b"still there")))
        reader.open_window()
        seqs = seqs_of_events if kind == "events" else seqs_of_messages
        assert seqs(first, reader.read) == EVERY_SEQ
    # At once: between two pings of a WebSocket are 30 s.
    poll("its socket to be closed", lambda: open_sockets(frontend) <= sockets, 15.0)
