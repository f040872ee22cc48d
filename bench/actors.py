"""Chains of small steps: many actors, each with a topic of its own, hand events around.

An event is at one actor. A connection that has the event reads it there, writes it to the next actor, and deletes it
where it was. All of these are small requests to ever other topics, each of which holds a record or two.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import uvloop

from bench import wire
from bench.load import LoadError, always, body_of, read_cpu

_NEXT: Final = re.compile(rb'"next_from_seq":(\d+)')


class ChainPlan(NamedTuple):
    """The load: `events` that go around, each among as many of the topics `actors`, which are empty, and over a
    connection of its own. They are deleted by tag, or else by seq. The CPU time of `pids` is taken.
    """

    port: int
    actors: list[str]
    events: int
    by_tag: bool
    warm_up_s: float
    duration_s: float
    pids: tuple[int, ...] = ()


class ChainOutcome(NamedTuple):
    """The result: steps of events in the measured time, and the CPU time of each process for one of them."""

    steps: int
    seconds: float
    cpu_us: tuple[float, ...]

    @property
    def per_s(self) -> float:
        return self.steps / self.seconds


def hand_around(plan: ChainPlan) -> ChainOutcome:
    """Run the plan in this process; LoadError for an answer that is not 2xx, or when an event is not where it was."""
    return uvloop.run(_Run(plan).run())


class _Run:
    def __init__(self, plan: ChainPlan) -> None:
        self.plan = plan
        self.steps = 0
        self.failure = ""
        self.stop_at_ns = 0
        self.done = asyncio.Event()
        self._open = plan.events

    async def run(self) -> ChainOutcome:
        plan, loop = self.plan, asyncio.get_running_loop()
        events = [_Event(self, number, plan.actors[number :: plan.events]) for number in range(plan.events)]
        for event in events:
            await loop.create_connection(always(event), "127.0.0.1", plan.port)
        self.stop_at_ns = time.perf_counter_ns() + int((plan.warm_up_s + plan.duration_s) * 1e9)
        for event in events:
            event.write()
        await asyncio.sleep(plan.warm_up_s)
        steps, began_ns, before = self.steps, time.perf_counter_ns(), read_cpu(plan.pids)
        await self.done.wait()
        if self.failure:
            raise LoadError(self.failure)
        steps = self.steps - steps
        cpu_us = [(now - then) / 1000 / steps for now, then in zip(read_cpu(plan.pids), before, strict=True)]
        return ChainOutcome(steps, (time.perf_counter_ns() - began_ns) / 1e9, tuple(cpu_us))

    def closed(self) -> None:
        self._open -= 1
        if not self._open or self.failure:
            self.done.set()


class _Event(asyncio.Protocol):
    """One event on its way: read it, write it to the next actor, delete it where it was."""

    def __init__(self, run: _Run, number: int, actors: list[str]) -> None:
        self._run = run
        self._number = number
        self._actors = actors
        self._at = 0
        self._seqs = [0] * len(actors)
        self._tag = b"event-%d" % number
        self._next: Callable[[bytes], None] = self._written
        self._answer = bytearray()
        self._finished = False
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._finished:
            self._run.failure = f"the server closed a connection ({error})"
        self._run.closed()

    def data_received(self, chunk: bytes) -> None:
        self._answer += chunk
        try:
            body = body_of(self._answer)
        except LoadError as error:
            self._fail(str(error))
            return
        if body is not None:
            self._next(body)

    def write(self) -> None:
        """Write the event to the actor at which it is to be."""
        body = b'{"records":[{"data":%b,"tag":"%b"}]}' % (wire.data(self._number), self._tag)
        self._send("?return_seqs=false", body, self._written)

    def _written(self, _body: bytes) -> None:
        former = (self._at - 1) % len(self._actors)
        if seq := self._seqs[former]:
            match = b'"match":"%b"' % self._tag if self._run.plan.by_tag else b'"before_seq":%d' % (seq + 1)
            self._send("/delete", b"{" + match + b"}", self._deleted, former)
        else:
            self._read()

    def _deleted(self, body: bytes) -> None:
        if b'"deleted":1,' not in body:
            self._fail(f"an event was not where it was read: {body[:200]!r}")
            return
        self._run.steps += 1
        if time.perf_counter_ns() >= self._run.stop_at_ns or self._run.failure:
            self._finished = True
            self._transport.close()
        else:
            self._read()

    def _read(self) -> None:
        self._send("/diff", b'{"from_seq":%d,"limit":1}' % self._seqs[self._at], self._found)

    def _found(self, body: bytes) -> None:
        seq = _NEXT.search(body)
        if seq is None or b'"n":%d,' % self._number not in body:
            self._fail(f"an event is not where it was written: {body[:200]!r}")
            return
        self._seqs[self._at] = int(seq[1])
        self._at = (self._at + 1) % len(self._actors)
        self.write()

    def _send(self, what: str, body: bytes, then: Callable[[bytes], None], actor: int | None = None) -> None:
        self._next = then
        name = self._actors[self._at if actor is None else actor]
        self._transport.write(wire.post(f"/v0/topics/{name}{what}", body))

    def _fail(self, what: str) -> None:
        self._run.failure = what
        self._finished = True
        self._transport.abort()
