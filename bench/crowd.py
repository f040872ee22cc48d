"""Many clients in one process: event streams that time each delivery, and writers that repeat what is refused.

They use bare transports on one event loop, with one clock for both ends. Records are stamped with the time of sending;
a stream keeps how long each took to reach it and which seqs it has seen, so that missing ones are found.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from bench import wire
from bench.load import LoadError

_STAMP = re.compile(rb'"\$seq":(\d+),"\$ts":\d+,"data":\{"sent_ns":(\d+),')
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
STAMP_BYTES = 128
"""No record's stamp, seq included, is longer."""
DEADLINE_S = 30.0


class Answer(NamedTuple):
    status: int
    head: bytes
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One keep-alive connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self.asked = 0
        """Number of requests that it has sent."""
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return await self.send(head.encode() + b"Accept: application/json\r\n\r\n" + (body or b""))

    async def send(self, request: bytes) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        self.asked += 1
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        assert length is not None, head
        return Answer(int(head[9:12]), head, await reader.readexactly(int(length[1])))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class SharedClient(Client):
    """A client for several tasks: each waits for its turn."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._turn = asyncio.Lock()

    async def send(self, request: bytes) -> Answer:
        async with self._turn:
            return await super().send(request)


class Watcher(asyncio.Protocol):
    """One event stream of one topic: the seqs it has seen, and their latencies."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.seqs: array[int] = array("Q")
        self.latencies_us: array[int] = array("Q")
        self.record_frames = 0
        self.heartbeats_s: list[float] = []
        self.opened_s = 0.0
        self.caught_up = False
        self.closed = False
        self.tail = b""
        """The end of what came, for a look at last words."""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True

    def open(self, path: str, from_id: str | None = None) -> None:
        resume = f"Last-Event-ID: {from_id}\r\n" if from_id else ""
        self._transport.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{resume}\r\n".encode())

    def data_received(self, chunk: bytes) -> None:
        now_ns = time.perf_counter_ns()
        # Of a server or a client that was held up, several come at once, and records with them.
        self.heartbeats_s += [now_ns / 1e9] * chunk.count(b"\n: hb ")
        self.record_frames += chunk.count(b"event: record\n")
        chunk = self.tail + chunk
        end = 0
        for stamp in _STAMP.finditer(chunk):
            self.seqs.append(int(stamp[1]))
            self.latencies_us.append(max(0, now_ns - int(stamp[2])) // 1000)
            end = stamp.end()
        if not self.caught_up and b"event: caught-up" in chunk:
            self.caught_up = True
            self.opened_s = now_ns / 1e9
        self.tail = chunk[max(end, len(chunk) - STAMP_BYTES) :]

    def stop_reading(self) -> None:
        self._transport.pause_reading()

    def read_on(self) -> None:
        self._transport.resume_reading()

    def close(self) -> None:
        self._transport.abort()


class Writer:
    """A writer of stamped records to one topic, as fast as it is allowed or every `every_s`. It counts the answers."""

    def __init__(
        self,
        port: int,
        topic: str,
        pad: int = 20,
        every_s: float = 0.0,
        read_back: int = 0,
        readers: Sequence[Client] = (),
    ) -> None:
        """`read_back`: after every so many acknowledged writes the last one is read at once, through each of `readers`
        or, without any, through the writer's own connection.
        """
        self.topic = topic
        self.statuses: Counter[int] = Counter()
        self.odd: list[str] = []
        """Answers that the contract does not allow: other errors, a 429 without its fields, an acked record that is
        missing.
        """
        self.refused_ms: array[float] = array("d")
        """Time until each refusal came, in ms."""
        self.write_max_ms = 0.0
        """The longest that any answer took."""
        self.acked = 0
        self._client = Client(port)
        self._pad = b"x" * pad
        self._every_s = every_s
        self._read_back = read_back
        self._readers = readers or (self._client,)

    @property
    def asked(self) -> int:
        """Requests so far, those of looks at what was acknowledged included."""
        return self._client.asked

    async def run(self, until_s: float, acked_min: int = 0) -> None:
        """Write until that moment of the loop's clock, and until `acked_min` writes are acknowledged in all; may be
        called again.
        """
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while loop.time() < until_s or self.acked < acked_min:
            began_s = time.perf_counter()
            answer = await self._write()
            self.write_max_ms = max(self.write_max_ms, (time.perf_counter() - began_s) * 1000)
            self.statuses[answer.status] += 1
            if answer.status == 429:
                self.refused_ms.append((time.perf_counter() - began_s) * 1000)
                await self._refused(answer)
            elif answer.status // 100 != 2:
                self.odd.append(f"{answer.status} {answer.body[:300]!r}")
            else:
                self.acked += 1
                if self._read_back and self.acked % self._read_back == 1:
                    await self._check(answer.json["first_seq"])
            if self._every_s:
                next_s += self._every_s
                await asyncio.sleep(max(0.0, next_s - loop.time()))

    async def _write(self) -> Answer:
        body = b'{"records":[{"data":{"sent_ns":%d,"pad":"%b"}}]}' % (time.perf_counter_ns(), self._pad)
        return await self._client.send(wire.post(f"/v0/topics/{self.topic}?return_seqs=false", body))

    async def _refused(self, answer: Answer) -> None:
        error = answer.json["error"]
        after_ms = error.get("detail", {}).get("retry_after_ms")
        if error["code"] != "throttled" or not after_ms or b"retry-after: " not in answer.head.lower():
            self.odd.append(f"a 429 without its fields: {answer.head!r} {answer.body!r}")
            return
        await asyncio.sleep(after_ms / 1000)

    async def _check(self, seq: int) -> None:
        for found in await asyncio.gather(
            *[reader.send(wire.diff(self.topic, seq - 1, 1)) for reader in self._readers]
        ):
            if found.status == 200 and b'"$seq":%d,' % seq in found.body:
                continue
            self.odd.append(f"seq {seq} was acknowledged and is not there: {found.status} {found.body[:300]!r}")


class PressureSample(NamedTuple):
    """The pressure at one moment, as the metrics show it."""

    at_s: float
    pressure: float
    deferring: bool
    coalesce_ms: float
    window_ms: float
    throttled: int
    requests: int


class Observer:
    """Samples of the pressure, taken from the metrics again and again."""

    def __init__(self, port: int) -> None:
        self._client = Client(port)
        self.samples: list[PressureSample] = []
        self.stopped = False

    @property
    def asked(self) -> int:
        """Requests so far."""
        return self._client.asked

    async def sample(self) -> PressureSample:
        metrics = (await self._client.ask("GET", "/v0/metrics")).json
        sample = PressureSample(
            time.perf_counter(),
            metrics["topics_pressure"],
            bool(metrics["topics_deferring"]),
            max(metrics["topics_coalesce_seconds"].values()) * 1000,
            max(metrics["topics_shard_commit_window_seconds"].values()) * 1000,
            metrics["topics_throttled_total"],
            sum(metrics["topics_frontend_requests_total"].values()),
        )
        self.samples.append(sample)
        return sample

    async def run(self) -> None:
        """Look again and again until it is told to stop."""
        while not self.stopped:
            await self.sample()
            await asyncio.sleep(0.1)

    async def until(self, true: Any, what: str) -> PressureSample:
        deadline = time.monotonic() + DEADLINE_S
        while not true(sample := await self.sample()):
            if time.monotonic() > deadline:
                raise LoadError(f"not within {DEADLINE_S} s: {what}; last sample: {sample}")
            await asyncio.sleep(0.1)
        return sample


async def put(client: Client, topic: str, **config: Any) -> None:
    answer = await client.ask("PUT", f"/v0/topics/{topic}", json.dumps(config).encode())
    assert answer.status in (200, 201), answer


async def watch(
    client: Client, port: int, topic: str, *others: str, receive_bytes: int | None = None, **body: Any
) -> Watcher:
    """Make a session on one topic (and others, whose records have no stamp), and open its stream. `receive_bytes` is
    the size of the socket's buffer, for a client that is to be slow.
    """
    topics = {name: dict[str, int]() for name in (topic, *others)}
    answer = await client.ask("POST", "/v0/watch", json.dumps({"topics": topics, **body}).encode())
    assert answer.status == 200, answer
    end = socket.socket()
    if receive_bytes is not None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    end.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(end, ("127.0.0.1", port))
    _, watcher = await loop.create_connection(lambda: Watcher(topic), sock=end)
    watcher.open(answer.json["stream_url"])
    return watcher


async def readers(port: int, frontends: int) -> list[Client]:
    """Return a connection to each of so many frontends. Nobody else may send requests meanwhile."""
    found: dict[str, Client] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < frontends:
        if time.monotonic() > deadline:
            raise LoadError(f"all connections came to {len(found)} of {frontends} frontends")
        client = SharedClient(port)
        if found.setdefault(await _frontend_of(client), client) is not client:
            client.close()
    return list(found.values())


async def _frontend_of(client: Client) -> str:
    """Return the frontend of a connection: the one whose count of requests grows with the connection's own."""
    before = await _requests(client)
    for _ in range(20):
        await client.ask("GET", "/v0/health")
    after = await _requests(client)
    return max(after, key=lambda index: after[index] - before.get(index, 0))


async def _requests(client: Client) -> dict[str, int]:
    """Return the number of requests, by frontend."""
    found: dict[str, int] = (await client.ask("GET", "/v0/metrics")).json["topics_frontend_requests_total"]
    return found


async def until(true: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        if time.monotonic() > deadline:
            raise LoadError(f"not within {DEADLINE_S} s: {what}")
        await asyncio.sleep(0.01)
