"""A frontend: HTTP on its listeners, reads from shared memory, writes through the rings."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from functools import partial
from typing import Final

import uvloop

from topics.core.clock import Clock, SystemClock
from topics.core.expiry_clock import ExpiryClock
from topics.core.keys import KeyRing
from topics.frontend.access import Access
from topics.frontend.app import App
from topics.frontend.append import AppendRoute
from topics.frontend.attended import AttendedClock
from topics.frontend.bodies import allow_bodies_of
from topics.frontend.cors import Cors
from topics.frontend.figures import ServiceFigures
from topics.frontend.http.http1 import Connections
from topics.frontend.http.limits import HttpLimits
from topics.frontend.http.serve import serve
from topics.frontend.key_limits import KeyLimits
from topics.frontend.key_reload import KeyReload
from topics.frontend.live import cursor
from topics.frontend.live.delivery import Hub
from topics.frontend.live.sessions import Sessions
from topics.frontend.live.snapshot import TopicSight
from topics.frontend.live.watch import WatchRoutes
from topics.frontend.live.websocket import Services
from topics.frontend.live.websocket_route import WebSocketRoute
from topics.frontend.metrics import MetricsRoute
from topics.frontend.pressure import FrontendPressure
from topics.frontend.probes import ProbeRoutes
from topics.frontend.queues.cursor_routes import CursorRoutes
from topics.frontend.queues.dead_letters import DeadLetters
from topics.frontend.queues.job_channel import JobChannel
from topics.frontend.queues.peek import PeekRoute
from topics.frontend.queues.queue import QueueRoutes
from topics.frontend.queues.queue_table import cursor_operations, queue_operations
from topics.frontend.queues.unreadable import UnreadableJobs
from topics.frontend.queues.work import WorkRoutes
from topics.frontend.reads.catching_up import CatchingUp, RouterSight
from topics.frontend.reads.cold import ColdTier
from topics.frontend.reads.diff import DiffRoute
from topics.frontend.reads.log_files import LogFiles
from topics.frontend.reads.manifest import ManifestRoutes
from topics.frontend.reads.manifest_table import manifest_operations
from topics.frontend.reads.reading import TopicReader
from topics.frontend.router_operations import router_operations
from topics.frontend.routers import RouterRoutes
from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.gateway import Gateway
from topics.frontend.table import service_operations, topic_operations, watch_operations
from topics.frontend.topics import TopicRoutes
from topics.frontend.txn.commits import Commits
from topics.frontend.txn.routes import TxnRoutes
from topics.frontend.txn.stages import Stages
from topics.frontend.txn.table import txn_operations
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.cap import Cap
from topics.shm.control import ProcessCell, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.shm.key_counts import KeyCounts
from topics.shm.recency import Recency, RecencyWriter
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.pins import PinFiles, pins_dir
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
    """The process; 0 when it was told to stop and has."""
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
    attended = AttendedClock(loop.time)
    shards = shared.shards
    allow_bodies_of(settings.max_body_bytes)
    arenas = Arenas(shared)
    gateway = Gateway(shared, index, incarnation, arenas, cell, settings.shard_wait_ms)
    log_files = LogFiles(settings.data_dir, shared.ram_dir, shards)
    expiry = ExpiryClock(clock, log.warning, shared.control.trusted_offset_ms(Role.FRONTEND, index))
    reader = TopicReader(arenas, log_files, shards, expiry, _cold_tier(settings, clock))
    recency_writer = RecencyWriter(shared.identity, index, shards)
    router_sight = RouterSight(shared)
    catching_up = CatchingUp(router_sight, reader, gateway)
    routers = RouterRoutes(router_sight, catching_up, reader, gateway, settings)
    diff = DiffRoute(reader, gateway, recency_writer, settings, cell, catching_up, clock)
    recency = Recency(shared.identity, shared.frontends, shards)
    hub = Hub(gateway, TopicSight(reader, arenas, recency_writer, recency, clock), cell, attended)
    limits = KeyLimits(KeyCounts(shared.key_counts, shared.frontends, index), settings)
    access = Access(keys, settings.probe_auth, limits)
    append = AppendRoute(gateway, settings, cell)
    places = _cap("sse_connections", settings.max_sse_connections, "sse_admitted", shared, cell)
    observe = partial(shared.durations.observe, index)
    services = Services(reader, append, hub, access, settings, catching_up, cell, attended, observe)
    websocket = WebSocketRoute(services, places)
    topics = TopicRoutes(
        reader, arenas, gateway, recency_writer, recency, settings, hub.waiting_ms, catching_up, routers, clock
    )
    watch = WatchRoutes(reader, Sessions(gateway, arenas, clock), hub, access, settings, places, catching_up)
    channel = JobChannel(gateway, incarnation)
    unreadable = UnreadableJobs()
    dead_letters = DeadLetters(gateway, reader, unreadable)
    work = WorkRoutes(gateway, reader, channel, dead_letters, unreadable, access, settings, places, cell, attended)
    queues = QueueRoutes(gateway, reader, channel, dead_letters, unreadable, catching_up, settings, cell)
    figures = ServiceFigures(shared.control, shared.durations, clock.now_ms)
    metrics = MetricsRoute(figures, arenas, shards, settings.max_metric_topics)
    commits = Commits(gateway, Stages(settings.data_dir, settings.stage_ttl_ms))
    operations = [
        *topic_operations(append, diff, topics),
        *router_operations(routers),
        *watch_operations(watch),
        *queue_operations(queues, PeekRoute(gateway, reader, catching_up, settings), work),
        *cursor_operations(CursorRoutes(gateway, reader, catching_up, settings, cell)),
        *txn_operations(TxnRoutes(append, commits, reader, topics.settled, settings)),
        *manifest_operations(_manifest(reader, catching_up, settings, shared, index, clock)),
        *service_operations(ProbeRoutes(shared.control, clock), metrics, settings.probe_auth),
    ]
    app = App(operations, append, diff, websocket, access, cell, observe)
    connections = Connections(
        _cap("connections", settings.max_connections, "connections_admitted", shared, cell), attended
    )

    def stop() -> None:
        cell.set("state", ProcessState.DRAINING)
        diff.drain()
        websocket.drain()
        work.drain()
        hub.drain()
        shutdown.set()

    def beat() -> None:
        cell.set("heartbeat_ms", clock.now_ms())
        cell.clock_offset_ms = expiry.look()  # also when nobody reads
        cell.set("connections", len(connections.open))
        reader.sweep()
        loop.call_later(HEARTBEAT_S, beat)

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGHUP, KeyReload(settings, access, shared.control.header, cell).request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    gateway.start()
    commits.start(janitor=index == 0)
    FrontendPressure(shared.control, cell, hub, gateway).start()
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
            clock=attended,
            on_ready=lambda: cell.set("state", ProcessState.READY),
        )
    finally:
        commits.close()
        gateway.close()


def _manifest(
    reader: TopicReader,
    catching_up: CatchingUp,
    settings: Settings,
    shared: SharedMemory,
    index: int,
    clock: Clock,
) -> ManifestRoutes:
    fs, directory = OsFileSystem(), pins_dir(shared.ram_dir)
    return ManifestRoutes(reader, catching_up, fs, PinFiles(fs, directory, index), directory, settings.data_dir, clock)


def _cold_tier(settings: Settings, clock: Clock) -> ColdTier | None:
    """What is in the cold directory, if there is one."""
    if settings.cold_dir is None:
        return None
    store = LocalStore(OsFileSystem(), layout.topics_dir(settings.cold_dir))
    return ColdTier(store, clock, settings.cold_read_timeout_ms)


def _cap(limit: str, most: int, field: str, shared: SharedMemory, cell: ProcessCell) -> Cap:
    """Of all frontends together. What one that died had counts until its next life begins."""
    every = [shared.control.cell(Role.FRONTEND, frontend) for frontend in range(shared.frontends)]
    return Cap(limit, most, field, cell, every)
