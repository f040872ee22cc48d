"""How a frontend is put together: which route uses what, and the application that all of them make."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec

from topics.core.clock import Clock
from topics.core.keys import KeyRing
from topics.frontend.app import App
from topics.frontend.entry.access import Access, KeyLimits
from topics.frontend.entry.pages import Pages
from topics.frontend.live.delivery import Hub
from topics.frontend.live.session_client import SessionClient
from topics.frontend.live.step_cache import KnownTopics
from topics.frontend.live.watch import WatchRoutes, watch_operations
from topics.frontend.live.websocket import Services
from topics.frontend.live.websocket_route import WebSocketRoute
from topics.frontend.operators.figures import ServiceFigures
from topics.frontend.operators.service_routes import MetricsRoute, ProbeRoutes, service_operations
from topics.frontend.queues.cursor_reads import CursorRoutes, cursor_operations
from topics.frontend.queues.queue_access import QueueAccess, QueueRoutes
from topics.frontend.queues.work import WorkRoutes, queue_operations
from topics.frontend.reads.catching_up import CatchingUp, RouterSight
from topics.frontend.reads.diff import DiffRoute
from topics.frontend.reads.manifest import ManifestRoutes, manifest_operations
from topics.frontend.reads.reading import TopicReader
from topics.frontend.routes.append import AppendRoute
from topics.frontend.routes.router_routes import RouterRoutes, router_operations
from topics.frontend.routes.topic_routes import TopicRoutes, topic_operations
from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.gateway import Gateway
from topics.frontend.txn.commit_driver import CommitDriver, Stages
from topics.frontend.txn.routes import TxnRoutes, txn_operations
from topics.settings import Settings
from topics.shm.cap import Cap, KeyCounts
from topics.shm.control import ProcessCell, Role
from topics.shm.instance import SharedMemory
from topics.shm.recency import Recency, RecencyWriter
from topics.storage.filesystem import OsFileSystem
from topics.storage.pins import PinFiles, pins_dir


class Process(msgspec.Struct, frozen=True):
    """One frontend process: which one it is, its settings and clocks, and the memory that it shares with others.

    `running_clock` leaves out the time in which the process was not there for its clients.
    """

    shared: SharedMemory
    index: int
    incarnation: int
    settings: Settings
    clock: Clock
    running_clock: Clock

    @property
    def cell(self) -> ProcessCell:
        """The cell of the control page that this process writes."""
        return self.shared.control.cell(Role.FRONTEND, self.index)

    def cap(self, limit: str, most: int, field: str) -> Cap:
        """A cap on what all frontends have together. A dead process counts until its next life begins."""
        every = [self.shared.control.cell(Role.FRONTEND, frontend) for frontend in range(self.shared.frontends)]
        return Cap(limit, most, field, self.cell, every)


class Built(NamedTuple):
    """The application, and the parts of it that its process starts, stops or looks at."""

    app: App
    access: Access
    hub: Hub
    diff: DiffRoute
    websocket: WebSocketRoute
    work: WorkRoutes
    commits: CommitDriver

    def drain(self) -> None:
        """End what would go on for ever: long polls, event streams and WebSockets."""
        self.diff.drain()
        self.websocket.drain()
        self.work.drain()
        self.hub.drain()


def build_app(process: Process, keys: KeyRing, gateway: Gateway, arenas: Arenas, reader: TopicReader) -> Built:
    """Make the routes of one frontend. They answer once the gateway is started."""
    shared, index, settings, cell = process.shared, process.index, process.settings, process.cell
    clock, running_clock, shards = process.clock, process.running_clock, shared.shards
    recency_writer = RecencyWriter(shared.identity, index, shards)
    router_sight = RouterSight(shared)
    catching_up = CatchingUp(router_sight, reader, gateway)
    routers = RouterRoutes(router_sight, catching_up, reader, gateway, settings)
    diff = DiffRoute(reader, gateway, recency_writer, settings, cell, catching_up, clock)
    known = KnownTopics(reader, arenas, recency_writer, Recency(shared.identity, shared.frontends, shards), clock)
    hub = Hub(gateway, known, cell, running_clock)
    limits = KeyLimits(KeyCounts(shared.key_counts, shared.frontends, index), settings)
    access = Access(keys, settings.probe_auth, limits)
    pages = Pages(settings, access)
    append = AppendRoute(gateway, settings, cell)
    places = process.cap("sse_connections", settings.max_sse_connections, "sse_admitted")
    observe = partial(shared.durations.observe, index)
    services = Services(reader, append, hub, access, pages, settings, catching_up, cell, running_clock, observe)
    websocket = WebSocketRoute(services, places)
    topics = TopicRoutes(known, arenas, gateway, hub, catching_up, routers, settings)
    watch = WatchRoutes(reader, SessionClient(gateway, arenas, clock), hub, access, settings, places, catching_up)
    jobs = QueueAccess(gateway, reader, process.incarnation)
    work = WorkRoutes(jobs, access, settings, places, cell, running_clock)
    figures = ServiceFigures(shared.control, shared.durations, clock.now_ms)
    metrics = MetricsRoute(figures, arenas, shards, settings.max_metric_topics)
    commits = CommitDriver(gateway, Stages(settings.data_dir, settings.stage_ttl_ms))
    fs, pins = OsFileSystem(), pins_dir(shared.ram_dir)
    manifest = ManifestRoutes(reader, catching_up, fs, PinFiles(fs, pins, index), pins, settings.data_dir, clock)
    operations = [
        *topic_operations(append, diff, topics),
        *router_operations(routers),
        *watch_operations(watch),
        *queue_operations(QueueRoutes(jobs, catching_up, settings, cell), work),
        *cursor_operations(CursorRoutes(gateway, reader, catching_up, settings, cell)),
        *txn_operations(TxnRoutes(append, commits, reader, topics.settled, settings)),
        *manifest_operations(manifest),
        *service_operations(ProbeRoutes(shared.control, clock), metrics, settings.probe_auth),
    ]
    app = App(operations, append, diff, websocket, access, pages, cell, observe)
    return Built(app, access, hub, diff, websocket, work, commits)
