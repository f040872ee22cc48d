"""A frontend: HTTP on its listeners, reads from shared memory, writes through the rings."""

from __future__ import annotations

import asyncio
import gc
import signal
from functools import partial
from socket import socket
from typing import Final

import psutil
import uvloop

from topics.core.clock import SystemClock
from topics.core.collector import FullLooks, collect_only_young
from topics.core.keys import KeyRing
from topics.frontend.app import StartGate
from topics.frontend.entry.access import Cors, KeyReload
from topics.frontend.entry.bodies import long_bodies
from topics.frontend.http.connections import Connections
from topics.frontend.http.deadlines import HttpLimits, RunningClock
from topics.frontend.http.serve import serve
from topics.frontend.live.wording import cursor_max_bytes
from topics.frontend.operators.frontend_pressure import FrontendPressure
from topics.frontend.shards.arenas import Slices
from topics.frontend.wiring import Process, build_app
from topics.settings import Settings
from topics.shm.control import HEARTBEAT_MS, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.storage.borrowed import open_cold
from topics.storage.filesystem import OsFileSystem

HEADER_BYTES_MIN: Final = 64 * 1024


def run(
    settings: Settings, keys: KeyRing, shared: SharedMemory, index: int, incarnation: int, listeners: list[socket]
) -> int:
    """Run the process until SIGTERM. Return 0 once it has stopped."""
    cell = shared.control.cell(Role.FRONTEND, index)
    cell.begin_life(incarnation, SystemClock().now_ms(), ProcessState.STARTING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        clock = RunningClock(runner.get_loop().time)
        process = Process(shared, index, incarnation, settings, SystemClock(), clock)
        runner.run(_serve(process, clock, keys, listeners))
    cell.set("state", ProcessState.STOPPED)
    return 0


def _own_bytes(process: psutil.Process) -> int:
    """Return the memory that a process shares with no other."""
    used = process.memory_info()
    return int(used.rss - used.shared)


async def _serve(process: Process, running_clock: RunningClock, keys: KeyRing, listeners: list[socket]) -> None:
    loop = asyncio.get_running_loop()
    shutdown = asyncio.Event()
    settings, control, cell = process.settings, process.shared.control, process.cell
    long_bodies.most_bytes = max(long_bodies.most_bytes, 4 * settings.max_body_bytes)
    cold = open_cold(OsFileSystem(), settings.data_dir, settings.cold_place, settings.cold_read_timeout_ms)
    connections = Connections(
        process.quota("connections", settings.max_connections, "connections_admitted"), running_clock
    )
    frontend = build_app(process, keys, cold, lambda: connections.arrived)

    collect_only_young()
    looks = FullLooks(gc.collect, lambda: gc.get_count()[2], partial(_own_bytes, psutil.Process()))

    def stop() -> None:
        cell.set("state", ProcessState.DRAINING)
        frontend.drain()
        shutdown.set()

    def beat() -> None:
        cell.set("heartbeat_ms", process.clock.now_ms())
        cell.clock_offset_ms = frontend.expiry.trusted_offset_ms()  # reads renew it, too, but may not come
        cell.set("connections", len(connections.open))
        if settings.follow is None:
            frontend.access.look_who_leads()
        frontend.reader.sweep()
        looks.beat(
            max(len(connections.open), len(connections.tasks), cell.get("sse_connections"), cell.get("long_polls"))
        )
        loop.call_later(HEARTBEAT_MS / 1000, beat)

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGHUP, KeyReload(settings, frontend.access, control.header, cell).request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    frontend.gateway.start()
    if settings.follow is None:  # a follower leaves unfinished batches to its leader
        frontend.coordinator.start(janitor=process.index == 0)
    FrontendPressure(control, cell, frontend.hub, frontend.gateway).start()
    beat()
    # Objects made so far live as long as the process, so the collector need not look at them again and again.
    gc.collect()
    gc.freeze()
    shards = [control.cell(Role.WALSHARD, shard) for shard in range(process.shared.shards)]

    async def learn() -> None:
        await frontend.arenas.learn(Slices())
        gc.freeze()  # the collector would take over 10 ms to look at the names of 100,000 topics

    app = StartGate(frontend.app, shards, settings.shard_wait_ms / 1000, learn, frontend.arenas)
    cors = None if settings.cors_origins is None else Cors(app, settings.cors_origins)
    try:
        await serve(
            cors or app,
            listeners,
            HttpLimits(
                max_body_bytes=settings.max_body_bytes,
                # A client that reconnects sends the positions of all its topics in one header.
                max_header_bytes=HEADER_BYTES_MIN + cursor_max_bytes(settings.max_watch_topics),
            ),
            shutdown,
            grace_ms=settings.frontend_grace_ms,
            connections=connections,
            clock=running_clock,
            on_ready=lambda: cell.set("state", ProcessState.READY),
            readable_by=(lambda _: b"") if cors is None else cors.lines_for,
        )
    finally:
        frontend.coordinator.close()
        frontend.gateway.close()
