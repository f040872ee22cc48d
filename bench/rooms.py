"""A room: members that speak and listen over a WebSocket each, in one process, so that one clock times both ends.

Members speak one after the other, at a steady rate. Each record is timed from just before it was published until each
of the other members has read it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from array import array
from typing import Final, NamedTuple

import uvloop
from wsproto.connection import Connection, ConnectionType
from wsproto.events import TextMessage

from bench.load import LoadError, percentiles
from bench.watchers import Watcher, until

SETTLE_PACKETS: Final = 20
_HANDSHAKE: Final = (
    b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n\r\n"
)
_CAUGHT_UP: Final = b'"op":"caught_up"'


class RoomPlan(NamedTuple):
    """The load: `members` of the room `topic`, which exists, and `packets_per_s` of all together for `duration_s`."""

    port: int
    topic: str
    members: int
    packets_per_s: float
    duration_s: float


class RoomOutcome(NamedTuple):
    """The result: latencies in µs from just before a packet was sent until another member had it."""

    deliveries: int
    p50_us: float
    p99_us: float


def talk(plan: RoomPlan) -> RoomOutcome:
    """Run the plan in this process; LoadError when a packet did not reach a member."""
    return uvloop.run(_run(plan))


async def _run(plan: RoomPlan) -> RoomOutcome:
    loop = asyncio.get_running_loop()
    topic = plan.topic.encode()
    members: list[Watcher] = []
    for _ in range(plan.members):
        _, member = await loop.create_connection(lambda: Watcher(b"HTTP/1.1 101"), "127.0.0.1", plan.port)
        member.send(_HANDSHAKE % base64.b64encode(os.urandom(16)))
        members.append(member)
    await until(lambda: all(member.caught_up for member in members), "every WebSocket to be open")
    for member in members:
        member.send(_frame(b'{"op":"subscribe","topic":"%b"}' % topic))
    await until(lambda: all(member.has(_CAUGHT_UP) for member in members), "every member to be caught up")
    packets = SETTLE_PACKETS + int(plan.packets_per_s * plan.duration_s)
    start_s = loop.time()
    stamp = b""
    for number in range(packets):
        await asyncio.sleep(max(0.0, start_s + number / plan.packets_per_s - loop.time()))
        stamp = b'"sent_ns":%d}' % time.perf_counter_ns()
        record = b'{"data":{"pad":"%b",%b}' % (b"x" * 60, stamp)
        publish = b'{"op":"publish","topic":"%b","return_seqs":false,"records":[%b]}' % (topic, record)
        members[number % len(members)].send(_frame(publish))
    await until(lambda: all(member.has(stamp) for member in members), "the last packet at every member")
    latencies_us: array[int] = array("Q")
    for at, member in enumerate(members):
        found = member.latencies_us()
        if len(found) != packets:
            raise LoadError(f"{len(found)} of {packets} packets reached a member")
        latencies_us.extend(
            us for number, us in enumerate(found) if number >= SETTLE_PACKETS and number % len(members) != at
        )
        member.close()
    histogram = percentiles(latencies_us)
    p50_us, p99_us = (histogram.get_value_at_percentile(percent) for percent in (50, 99))
    return RoomOutcome(len(latencies_us), p50_us, p99_us)


def _frame(message: bytes) -> bytes:
    return bytes(Connection(ConnectionType.CLIENT).send(TextMessage(message.decode())))
