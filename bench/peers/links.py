"""One connection to each server, through the Python client that its users have, at the same few operations.

A stream is a topic, a Redis stream, a JetStream stream, a PostgreSQL table. Records are the same bytes everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import msgspec
import nats
import psycopg
import redis
import redis.asyncio
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType, StreamConfig

from bench.peers.servers import Server
from topics.client import AsyncClient, Client, Record

STREAM: Final = "bench"
QUEUE: Final = "jobs"
GROUP: Final = "workers"
PAGE: Final = 1000
LEASE_S: Final = 600


class Link(Protocol):
    """A connection to a server. Its operations return when the server has acknowledged them."""

    async def append(self, payloads: Sequence[bytes]) -> None: ...

    async def fill_queue(self, payloads: Sequence[bytes]) -> None: ...

    def follow(self) -> AsyncIterator[bytes]:
        """Yield each record from now on, as it comes. The first item is empty: the server knows this reader."""
        ...

    async def work(self) -> bool:
        """Take one job and acknowledge it; False if there is none. There are more than are asked for."""
        ...

    async def close(self) -> None: ...


class TopicsLink:
    def __init__(self, port: int) -> None:
        self._client = AsyncClient(f"http://127.0.0.1:{port}")
        self._jobs = self._client.queue(QUEUE).work()

    async def append(self, payloads: Sequence[bytes]) -> None:
        await self._client.append(STREAM, [msgspec.Raw(one) for one in payloads])

    async def fill_queue(self, payloads: Sequence[bytes]) -> None:
        await self._client.append(QUEUE, [msgspec.Raw(one) for one in payloads])

    async def follow(self) -> AsyncIterator[bytes]:
        head = (await self._client.get_topic(STREAM)).head_seq
        yield b""
        async for _, item in self._client.follow({STREAM: head}):
            assert isinstance(item, Record), item
            yield bytes(item.raw)

    async def work(self) -> bool:
        job = await anext(self._jobs)
        await job.ack()
        return True

    async def close(self) -> None:
        await self._jobs.aclose()
        await self._client.close()


class RedisLink:
    def __init__(self, port: int) -> None:
        self._client = redis.asyncio.Redis(port=port)

    async def append(self, payloads: Sequence[bytes]) -> None:
        await self._add(STREAM, payloads)

    async def fill_queue(self, payloads: Sequence[bytes]) -> None:
        await self._add(QUEUE, payloads)

    async def _add(self, stream: str, payloads: Sequence[bytes]) -> None:
        if len(payloads) == 1:
            await self._client.xadd(stream, {"d": payloads[0]})
            return
        pipeline = self._client.pipeline(transaction=False)
        for one in payloads:
            pipeline.xadd(stream, {"d": one})
        await pipeline.execute()

    async def follow(self) -> AsyncIterator[bytes]:
        last: bytes | str = "0"
        with contextlib.suppress(redis.ResponseError):
            last = (await self._client.xinfo_stream(STREAM))["last-generated-id"]
        yield b""
        while True:
            for _, entries in await self._client.xread({STREAM: last}, count=PAGE, block=60_000) or ():
                for _, fields in entries:
                    yield fields[b"d"]
                last = entries[-1][0]

    async def work(self) -> bool:
        taken = await self._client.xreadgroup(GROUP, "bench", {QUEUE: ">"}, count=1)
        if not taken:
            return False
        await self._client.xack(QUEUE, GROUP, taken[0][1][0][0])
        return True

    async def close(self) -> None:
        await self._client.aclose()


class JetstreamLink:
    """A publish is acknowledged one by one; a batch is published without waiting in between, as its docs advise."""

    def __init__(self, port: int) -> None:
        self._url = f"nats://127.0.0.1:{port}"
        self._connection: Any = None
        self._stream: Any = None
        self._jobs: Any = None

    async def _js(self) -> Any:
        if self._stream is None:
            self._connection = await nats.connect(self._url)
            self._stream = self._connection.jetstream(publish_async_max_pending=100_000)
        return self._stream

    async def append(self, payloads: Sequence[bytes]) -> None:
        await self._publish(STREAM, payloads)

    async def fill_queue(self, payloads: Sequence[bytes]) -> None:
        await self._publish(QUEUE, payloads)

    async def _publish(self, subject: str, payloads: Sequence[bytes]) -> None:
        stream = await self._js()
        if len(payloads) == 1:
            await stream.publish(subject, payloads[0])
        else:
            await asyncio.gather(*[await stream.publish_async(subject, one) for one in payloads])

    async def follow(self) -> AsyncIterator[bytes]:
        stream = await self._js()
        config = ConsumerConfig(deliver_policy=DeliverPolicy.NEW, ack_policy=AckPolicy.NONE)
        subscription = await stream.subscribe(STREAM, ordered_consumer=True, config=config)
        await self._connection.flush()
        yield b""
        async for message in subscription.messages:
            yield message.data

    async def work(self) -> bool:
        if self._jobs is None:
            stream = await self._js()
            self._jobs = await stream.pull_subscribe(QUEUE, durable=GROUP)
        try:
            (job,) = await self._jobs.fetch(1, timeout=5)
        except TimeoutError:
            return False
        await job.ack_sync()
        return True

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class PostgresLink:
    """A table with a serial number; readers are woken by NOTIFY; a job is claimed with SKIP LOCKED in a transaction."""

    def __init__(self, port: int) -> None:
        self._dsn = postgres_dsn(port)
        self._connection: psycopg.AsyncConnection[Any] | None = None

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        if self._connection is None:
            self._connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
        return self._connection

    async def append(self, payloads: Sequence[bytes]) -> None:
        await self._insert(STREAM, payloads)

    async def fill_queue(self, payloads: Sequence[bytes]) -> None:
        await self._insert(QUEUE, payloads)

    async def _insert(self, table: str, payloads: Sequence[bytes]) -> None:
        connection = await self._connect()
        await connection.execute(insert(table), (list(payloads),))

    async def follow(self) -> AsyncIterator[bytes]:
        connection = await self._connect()
        await connection.execute(f"LISTEN {STREAM}")
        found = await (await connection.execute(f"SELECT coalesce(max(seq), 0) FROM {STREAM}")).fetchone()
        assert found is not None
        last = found[0]
        yield b""
        while True:
            async for _ in connection.notifies(stop_after=1, timeout=60):
                pass
            rows = await connection.execute(f"SELECT seq, data FROM {STREAM} WHERE seq > %s ORDER BY seq", (last,))
            for seq, record in await rows.fetchall():
                yield bytes(record)
                last = seq

    async def work(self) -> bool:
        connection = await self._connect()
        async with connection.transaction():
            taken = await connection.execute(
                f"DELETE FROM {QUEUE} WHERE seq = (SELECT seq FROM {QUEUE} ORDER BY seq LIMIT 1 FOR UPDATE SKIP LOCKED)"
                " RETURNING data"
            )
            return await taken.fetchone() is not None

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


LINKS: Final[dict[str, Callable[[int], Link]]] = {
    "topics": TopicsLink,
    "redis": RedisLink,
    "jetstream": JetstreamLink,
    "postgres": PostgresLink,
}


def postgres_dsn(port: int) -> str:
    return f"host=127.0.0.1 port={port} user=bench dbname=postgres"


def insert(table: str) -> str:
    """Return the statement that writes an array of payloads; readers of the stream are woken by it."""
    notify = f", pg_notify('{STREAM}', '')" if table == STREAM else ""
    written = f"INSERT INTO {table} (data) SELECT unnest(%s::bytea[]) RETURNING seq"
    return f"WITH written AS ({written}) SELECT max(seq){notify} FROM written"


async def prepare(server: Server) -> None:
    """Make the stream and the queue."""
    match server.contender.family:
        case "topics":
            durability = "fsync" if server.contender.synced else "disk"
            async with AsyncClient(f"http://127.0.0.1:{server.port}") as client:
                await client.put_topic(STREAM, durability=durability)
                await client.put_topic(QUEUE, type="queue", durability=durability, lease_ms=LEASE_S * 1000)
        case "redis":
            connection = redis.asyncio.Redis(port=server.port)
            await connection.xgroup_create(QUEUE, GROUP, mkstream=True)
            await connection.aclose()
        case "jetstream":
            bus = await nats.connect(f"nats://127.0.0.1:{server.port}")
            for name in (STREAM, QUEUE):
                config = StreamConfig(name=name, subjects=[name], storage=StorageType.FILE)
                await bus.jetstream().add_stream(config)
            consumer = ConsumerConfig(durable_name=GROUP, ack_wait=LEASE_S, max_ack_pending=100_000)
            await bus.jetstream().add_consumer(QUEUE, consumer)
            await bus.close()
        case "postgres":
            async with await psycopg.AsyncConnection.connect(postgres_dsn(server.port), autocommit=True) as database:
                for name in (STREAM, QUEUE):
                    await database.execute(f"CREATE TABLE {name} (seq bigserial PRIMARY KEY, data bytea NOT NULL)")


@contextmanager
def lone_writer(server: Server) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that appends one record through the blocking client. nats-py has none: its loop is run."""
    match server.contender.family:
        case "topics":
            with Client(f"http://127.0.0.1:{server.port}") as client:
                yield lambda payload: client.append(STREAM, [msgspec.Raw(payload)])
        case "redis":
            connection = redis.Redis(port=server.port)
            yield lambda payload: connection.xadd(STREAM, {"d": payload})
            connection.close()
        case "jetstream":
            with asyncio.Runner() as runner:
                link = JetstreamLink(server.port)
                yield lambda payload: runner.run(link.append([payload]))
                runner.run(link.close())
        case "postgres":
            with psycopg.connect(postgres_dsn(server.port), autocommit=True) as database:
                yield lambda payload: database.execute(insert(STREAM), ([payload],))


def read_all(server: Server) -> int:
    """Read the stream from its beginning through the blocking client, a page at a time; return the number of records,
    each handed out as the client hands it out.
    """
    match server.contender.family:
        case "topics":
            with Client(f"http://127.0.0.1:{server.port}") as client:
                return _read_topics(client)
        case "redis":
            connection = redis.Redis(port=server.port)
            last, count = b"-", 0
            while entries := connection.xrange(STREAM, min=last, count=PAGE):
                count += len(entries)
                last = b"(" + entries[-1][0]
            connection.close()
            return count
        case "jetstream":
            with asyncio.Runner() as runner:
                return runner.run(_read_jetstream(server))
        case "postgres":
            with psycopg.connect(postgres_dsn(server.port)) as database:
                cursor = database.cursor("pages", binary=True)
                cursor.itersize = PAGE
                return sum(1 for _ in cursor.execute(f"SELECT seq, data FROM {STREAM} ORDER BY seq"))
    raise AssertionError(server.contender.family)


def _read_topics(client: Client) -> int:
    count = position = 0
    while True:
        page = client.diff(STREAM, position, limit=PAGE)
        if not page.records:
            return count
        count += len(page.records)
        position = page.next_from_seq


async def _read_jetstream(server: Server) -> int:
    connection = await nats.connect(f"nats://127.0.0.1:{server.port}")
    stream = connection.jetstream()
    wanted = (await stream.stream_info(STREAM)).state.messages
    reader = await stream.pull_subscribe(STREAM, config=ConsumerConfig(ack_policy=AckPolicy.NONE))
    count = 0
    while count < wanted:
        count += len(await reader.fetch(PAGE, timeout=10))
    await connection.close()
    return count


def payload(stamp_ns: int = 0) -> bytes:
    """Return a JSON object of 100 bytes with this time in it."""
    opening = json.dumps({"sent_ns": stamp_ns, "pad": ""}).encode()[:-2]
    return opening + b"x" * (100 - len(opening) - 2) + b'"}'
