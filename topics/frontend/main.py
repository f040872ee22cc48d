"""A frontend: HTTP on its listeners, reads from shared memory, writes through the rings."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from typing import Final

import uvloop

from topics.core.clock import Clock, ExpiryClock, SystemClock
from topics.core.keys import KeyRing
from topics.frontend.entry.access import Cors, KeyReload
from topics.frontend.entry.bodies import allow_bodies_of
from topics.frontend.http.connections import Connections
from topics.frontend.http.deadlines import HttpLimits, RunningClock
from topics.frontend.http.serve import serve
from topics.frontend.live import cursor
from topics.frontend.operators.frontend_pressure import FrontendPressure
from topics.frontend.reads.cold import ColdTier
from topics.frontend.reads.files import LogFiles
from topics.frontend.reads.reading import TopicReader
from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.gateway import Gateway
from topics.frontend.wiring import Process, build_app
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.control import ProcessCell, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.segment_store import LocalStore

HEARTBEAT_S: Final = 0.25
HEADER_BYTES_MIN: Final = 64 * 1024

log = get_logger()


def run(
    settings: Settings,
    keys: KeyRing,
    shared: SharedMemory,
    index: int,
    incarnation: int,
    listeners: list[socket.socket],
) -> int:
    """Run the process. Return 0 after it was told to stop and has stopped."""
    clock = SystemClock()
    cell = shared.control.cell(Role.FRONTEND, index)
    cell.begin_life(incarnation, clock.now_ms(), ProcessState.STARTING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, keys, shared, index, incarnation, listeners, cell))
    cell.set("state", ProcessState.STOPPED)
    return 0


async def _serve(
    settings: Settings,
    keys: KeyRing,
    shared: SharedMemory,
    index: int,
    incarnation: int,
    listeners: list[socket.socket],
    cell: ProcessCell,
) -> None:
    loop = asyncio.get_running_loop()
    shutdown = asyncio.Event()
    clock = SystemClock()
    running_clock = RunningClock(loop.time)
    allow_bodies_of(settings.max_body_bytes)
    arenas = Arenas(shared)
    gateway = Gateway(shared, index, incarnation, arenas, cell, settings.shard_wait_ms)
    log_files = LogFiles(settings.data_dir, shared.ram_dir, shared.shards)
    expiry = ExpiryClock(clock, log.warning, shared.control.trusted_offset_ms(Role.FRONTEND, index))
    reader = TopicReader(arenas, log_files, shared.shards, expiry, _cold_tier(settings, clock))
    process = Process(shared, index, incarnation, settings, clock, running_clock)
    built = build_app(process, keys, gateway, arenas, reader)
    app, access = built.app, built.access
    connections = Connections(
        process.cap("connections", settings.max_connections, "connections_admitted"), running_clock
    )

    def stop() -> None:
        cell.set("state", ProcessState.DRAINING)
        built.drain()
        shutdown.set()

    def beat() -> None:
        cell.set("heartbeat_ms", clock.now_ms())
        cell.clock_offset_ms = expiry.trusted_offset_ms()  # also when nobody reads
        cell.set("connections", len(connections.open))
        reader.sweep()
        loop.call_later(HEARTBEAT_S, beat)

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGHUP, KeyReload(settings, access, shared.control.header, cell).request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    gateway.start()
    built.commits.start(janitor=index == 0)
    FrontendPressure(shared.control, cell, built.hub, gateway).start()
    beat()
    # What is set up lives as long as the process: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    try:
        await serve(
            app if settings.cors_origins is None else Cors(app, settings.cors_origins),
            listeners,
            HttpLimits(
                max_body_bytes=settings.max_body_bytes,
                # A client that comes back sends the positions of all its topics in one header.
                max_header_bytes=HEADER_BYTES_MIN + cursor.size_max_bytes(settings.max_watch_topics),
            ),
            shutdown,
            grace_ms=settings.frontend_grace_ms,
            connections=connections,
            clock=running_clock,
            on_ready=lambda: cell.set("state", ProcessState.READY),
        )
    finally:
        built.commits.close()
        gateway.close()


def _cold_tier(settings: Settings, clock: Clock) -> ColdTier | None:
    """The reader of the cold directory, if there is one."""
    if settings.cold_dir is None:
        return None
    store = LocalStore(OsFileSystem(), layout.topics_dir(settings.cold_dir))
    return ColdTier(store, clock, settings.cold_read_timeout_ms)
