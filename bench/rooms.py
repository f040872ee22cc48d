"""A room: members that speak and listen over a WebSocket each, in one process, so that one clock times both ends.

Members speak one after the other, at a steady rate. Each record is timed from just before it was published until each
of the other members has read it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import time
from array import array
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import uvloop
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, TextMessage

from bench.load import LoadError, percentiles

_SENT: Final = re.compile(r'"sent_ns":(\d{1,20})\}')
SETTLE_PACKETS: Final = 20
DEADLINE_S: Final = 20.0


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
    members: list[_Member] = []
    for _ in range(plan.members):
        _, member = await loop.create_connection(_Member, "127.0.0.1", plan.port)
        await _until(lambda one=member: one.is_open, "a WebSocket to be open")  # type: ignore[misc]
        member.say(b'{"op":"subscribe","topic":"%b"}' % plan.topic.encode())
        members.append(member)
    await _until(lambda: all(member.is_subscribed for member in members), "every member to be subscribed")
    packets = SETTLE_PACKETS + int(plan.packets_per_s * plan.duration_s)
    start_s = loop.time()
    for number in range(packets):
        await asyncio.sleep(max(0.0, start_s + number / plan.packets_per_s - loop.time()))
        stamp = b'"sent_ns":%d}' % time.perf_counter_ns()
        record = b'{"data":{"pad":"%b",%b}' % (b"x" * 60, stamp)
        members[number % len(members)].say(
            b'{"op":"publish","topic":"%b","return_seqs":false,"records":[%b]}' % (plan.topic.encode(), record)
        )
    await _until(lambda: all(len(member.came) == packets for member in members), "every packet at every member")
    latencies_us: array[int] = array("Q")
    for at, member in enumerate(members):
        others = [us for number, us in enumerate(member.came) if number % len(members) != at]
        latencies_us.extend(others[SETTLE_PACKETS:])
        member.close()
    histogram = percentiles(latencies_us)
    found = (histogram.get_value_at_percentile(percent) for percent in (50, 99))
    return RoomOutcome(len(latencies_us), *found)


async def _until(true: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        if time.monotonic() > deadline_s:
            raise LoadError(f"not within {DEADLINE_S} s: {what}")
        await asyncio.sleep(0.002)


class _Member(asyncio.Protocol):
    """One WebSocket. Raises LoadError in the loop's handler if the service refuses or closes it."""

    def __init__(self) -> None:
        self.is_open = self.is_subscribed = False
        self.came: list[int] = []
        """The latency of each packet in µs, in the order of the topic."""
        self._wire = Connection(ConnectionType.CLIENT)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        key = base64.b64encode(os.urandom(16))
        self._transport.write(
            b"GET /v0/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %b\r\n\r\n" % key
        )

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        if not self.is_open:
            head, end, data = data.partition(b"\r\n\r\n")
            if not (end and head.startswith(b"HTTP/1.1 101")):
                raise LoadError(head.decode(errors="replace"))
            self.is_open = True
        self._wire.receive_data(data)
        for event in self._wire.events():
            if isinstance(event, CloseConnection):
                raise LoadError(f"closed: {event}")
            if not isinstance(event, TextMessage):
                continue
            if '"op":"error"' in event.data:
                raise LoadError(event.data)
            self.is_subscribed |= '"op":"subscribed"' in event.data
            self.came.extend((now_ns - int(stamp[1])) // 1000 for stamp in _SENT.finditer(event.data))

    def say(self, message: bytes) -> None:
        self._transport.write(self._wire.send(TextMessage(message.decode())))

    def close(self) -> None:
        self._transport.abort()
