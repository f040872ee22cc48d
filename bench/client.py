"""The Python client beside a raw socket that sends the same bytes, in turns: what the client costs its user.

python -m bench.client [--rounds N] [--durability disk|fsync]

One service of one shard and one frontend. Times are in µs, rates in records/s; a line has the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, Self

from bench import wire
from tests.harness import Service
from topics.client import AsyncClient, Client, calls

LONE: Final = 400
BATCHES: Final = 60
BATCH: Final = 100
READ_RECORDS: Final = 100_000
FOLLOWED: Final = 200
WARM_UP: Final = 20
FOLLOWED_ALL: Final = 1 + WARM_UP + FOLLOWED
DATA: Final = json.loads(wire.data(7))


class Figure(NamedTuple):
    """The times of the operations of one measurement, and the records that they moved."""

    seconds: list[float]
    records: int

    @property
    def p50_us(self) -> float:
        return statistics.median(self.seconds) * 1e6

    @property
    def p99_us(self) -> float:
        return statistics.quantiles(self.seconds, n=100)[98] * 1e6 if len(self.seconds) > 1 else self.p50_us

    @property
    def per_s(self) -> float:
        return self.records / sum(self.seconds)


class RawConnection:
    """A socket that sends requests made before, and reads answers that say how long they are."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, request: bytes) -> bytes:
        self._socket.sendall(request)
        answer = self._socket.recv(1 << 18)
        head_end = answer.index(b"\r\n\r\n") + 4
        length = int(answer[:head_end].lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        parts, left = [answer], length - (len(answer) - head_end)
        while left > 0:
            parts.append(self._socket.recv(1 << 18))
            left -= len(parts[-1])
        return b"".join(parts)

    def stream(self, path: str) -> Iterator[bytes]:
        """Yield what comes, as it comes."""
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n".encode())
        while data := self._socket.recv(1 << 16):
            yield data


def timed(work: Iterable[Callable[[], object]], records: int) -> Figure:
    """Do each piece of work and take its time; the first ones are not counted."""
    seconds = []
    for number, one in enumerate(work):
        begin_s = time.perf_counter()
        one()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - begin_s)
    return Figure(seconds, records * len(seconds))


# -- appends


def raw_appends(service: Service, count: int, batch: int) -> Figure:
    def request() -> bytes:
        call = calls.append("raw", [DATA] * batch)
        assert call.body is not None
        return wire.post("/v0/topics/raw?return_seqs=false", call.body)

    with RawConnection(service.port) as raw:
        requests = [request() for _ in range(count + WARM_UP)]
        return timed((lambda one=one: raw.ask(one) for one in requests), batch)  # type: ignore[misc]


def sync_appends(service: Service, count: int, batch: int) -> Figure:
    with Client(service.url) as client:
        records = [DATA] * batch
        return timed(itertools.repeat(lambda: client.append("sync", records), count + WARM_UP), batch)


def async_appends(service: Service, count: int, batch: int) -> Figure:
    async def run() -> Figure:
        seconds = []
        records = [DATA] * batch
        async with AsyncClient(service.url) as client:
            for number in range(count + WARM_UP):
                begin_s = time.perf_counter()
                await client.append("async", records)
                if number >= WARM_UP:
                    seconds.append(time.perf_counter() - begin_s)
        return Figure(seconds, batch * len(seconds))

    return asyncio.run(run())


# -- reads


def raw_read(service: Service) -> Figure:
    requests = [
        wire.post(
            "/v0/topics/read/diff",
            b'{"from_seq":%d,"limit":1000,"include_tags":true,"max_batch_bytes":8388608}' % from_seq,
        )
        for from_seq in range(0, READ_RECORDS, 1000)
    ]
    with RawConnection(service.port) as raw:
        begin_s = time.perf_counter()
        for request in requests:
            raw.ask(request)
        return Figure([time.perf_counter() - begin_s], READ_RECORDS)


def sync_read(service: Service) -> Figure:
    with Client(service.url) as client:
        begin_s = time.perf_counter()
        count = sum(1 for _ in client.read("read"))
        return _read_figure(count, begin_s)


def async_read(service: Service) -> Figure:
    async def run() -> Figure:
        async with AsyncClient(service.url) as client:
            begin_s = time.perf_counter()
            count = 0
            async for _ in client.read("read"):
                count += 1
            return _read_figure(count, begin_s)

    return asyncio.run(run())


def _read_figure(count: int, begin_s: float) -> Figure:
    assert count == READ_RECORDS, count
    return Figure([time.perf_counter() - begin_s], count)


# -- from an append to its follower


class _Arrivals:
    """The times at which a reader in a thread of its own gets items; the first item says that its stream is open."""

    def __init__(self, read: Callable[[Callable[[], object]], object]) -> None:
        self._came = threading.Semaphore(0)
        self.at_s = 0.0
        self._thread = threading.Thread(target=read, args=(self._note,), daemon=True)
        self._thread.start()

    def _note(self) -> None:
        self.at_s = time.perf_counter()
        self._came.release()

    def wait(self) -> float:
        assert self._came.acquire(timeout=20), "nothing came"
        return self.at_s

    def times(self, append: Callable[[], object]) -> Figure:
        append()
        self.wait()
        seconds = []
        for number in range(FOLLOWED + WARM_UP):
            begin_s = time.perf_counter()
            append()
            end_s = self.wait()
            if number >= WARM_UP:
                seconds.append(end_s - begin_s)
        self._thread.join()
        return Figure(seconds, len(seconds))


def _note_each(items: Iterator[object]) -> Callable[[Callable[[], object]], object]:
    def read(note: Callable[[], object]) -> None:
        for _ in itertools.islice(items, FOLLOWED_ALL):
            note()

    return read


def raw_follow(service: Service) -> Figure:
    topic = f"followed-{time.monotonic_ns()}"
    with Client(service.url) as client, RawConnection(service.port) as writer, RawConnection(service.port) as reader:
        client.put_topic(topic)
        wid = client.call(calls.watch({topic: 0}, {"heartbeat_ms": 5000, "include_tags": True})).wid

        def frames() -> Iterator[bytes]:
            data = b""
            for part in reader.stream(f"/v0/watch/{wid}"):
                data += part
                while (end := data.find(b"\n\n")) >= 0:
                    frame, data = data[:end], data[end + 2 :]
                    if b"event: record" in frame:
                        yield frame

        def requests() -> Iterator[bytes]:
            while True:
                body = calls.append(topic, [DATA]).body
                assert body is not None
                yield wire.post(f"/v0/topics/{topic}?return_seqs=false", body)

        made = list(itertools.islice(requests(), FOLLOWED_ALL))
        todo = iter(made)
        return _Arrivals(_note_each(frames())).times(lambda: writer.ask(next(todo)))


def sync_follow(service: Service) -> Figure:
    topic = f"followed-{time.monotonic_ns()}"
    with Client(service.url) as client:
        client.put_topic(topic)
        return _Arrivals(_note_each(client.follow(topic))).times(lambda: client.append(topic, [DATA]))


def async_follow(service: Service) -> Figure:
    """Measure a follower in the event loop of another thread; the writer is in this one."""
    topic = f"followed-{time.monotonic_ns()}"

    async def follow(note: Callable[[], object]) -> None:
        async with AsyncClient(service.url) as client:
            left = FOLLOWED_ALL
            async for _ in client.follow(topic):
                note()
                left -= 1
                if not left:
                    return

    with Client(service.url) as writer:
        writer.put_topic(topic)
        arrivals = _Arrivals(lambda note: asyncio.run(follow(note)))
        return arrivals.times(lambda: writer.append(topic, [DATA]))


Way = Callable[[Service], Figure]
WORK: Final[dict[str, dict[str, Way]]] = {
    "append": {
        "raw": lambda service: raw_appends(service, LONE, 1),
        "sync": lambda service: sync_appends(service, LONE, 1),
        "async": lambda service: async_appends(service, LONE, 1),
    },
    f"batch of {BATCH}": {
        "raw": lambda service: raw_appends(service, BATCHES, BATCH),
        "sync": lambda service: sync_appends(service, BATCHES, BATCH),
        "async": lambda service: async_appends(service, BATCHES, BATCH),
    },
    "read": {"raw": raw_read, "sync": sync_read, "async": async_read},
    "append → follower": {"raw": raw_follow, "sync": sync_follow, "async": async_follow},
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--durability", default="disk")
    given = arguments.parse_args()
    with Service(shards=1, frontends=1, wal_file_bytes=None) as service, Client(service.url) as client:
        for topic in ("raw", "sync", "async", "read"):
            client.put_topic(topic, durability=given.durability)
        for _ in range(READ_RECORDS // 1000):
            client.append("read", [DATA] * 1000)
        print(f"{'work':20}{'way':8}{'p50 µs':>10}{'p99 µs':>10}{'records/s':>12}")
        for name, ways in WORK.items():
            rounds: dict[str, list[Figure]] = {way: [] for way in ways}
            for _ in range(given.rounds):
                for way, measure in ways.items():
                    rounds[way].append(measure(service))
            for way, figures in rounds.items():
                p50, p99, rate = (
                    statistics.median(values)
                    for values in zip(*((one.p50_us, one.p99_us, one.per_s) for one in figures), strict=True)
                )
                print(f"{name:20}{way:8}{p50:10,.0f}{p99:10,.0f}{rate:12,.0f}", flush=True)


if __name__ == "__main__":
    main()
