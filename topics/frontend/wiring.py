"""Puts the parts of a frontend together: makes all routes with the parts that they use, and the application of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec

from topics.core.clock import Clock, ExpiryClock
from topics.core.keys import KeyRing
from topics.frontend.app import App
from topics.frontend.entry.access import Access, KeyLimits, Pages
from topics.frontend.entry.leadership import Leadership
from topics.frontend.live.delivery import Hub
from topics.frontend.live.event_streams import StreamSlots
from topics.frontend.live.step_cache import KnownTopics
from topics.frontend.live.watch import SessionClient, WatchRoutes
from topics.frontend.live.websocket import Services, WebSocketRoute
from topics.frontend.operators.console_routes import ConsoleRoutes
from topics.frontend.operators.figures import ServiceFigures
from topics.frontend.operators.service_routes import MetricsRoute, ProbeRoutes, probe_operations
from topics.frontend.queues.cursor_routes import CursorRoutes
from topics.frontend.queues.queue_routes import QueueRoutes, QueueServices
from topics.frontend.queues.work import WorkRoutes
from topics.frontend.reads.catching_up import CatchingUp, RouterSight
from topics.frontend.reads.cold import ColdTier
from topics.frontend.reads.diff import DiffRoute
from topics.frontend.reads.files import LogFiles
from topics.frontend.reads.manifest import ManifestRoutes
from topics.frontend.reads.reading import TopicReader
from topics.frontend.reads.tail_routes import TailRoutes
from topics.frontend.routes.append import AppendRoute
from topics.frontend.routes.operations import operations_of
from topics.frontend.routes.router_routes import RouterRoutes
from topics.frontend.routes.topic_ranking import TopicRanking
from topics.frontend.routes.topic_routes import TopicRoutes
from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.gateway import Gateway
from topics.frontend.txn.coordinator import Stages, TxnCoordinator
from topics.frontend.txn.txn_routes import TxnRoutes
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.control import ProcessCell, Role
from topics.shm.instance import SharedMemory
from topics.shm.quotas import KeyCounts, Quota
from topics.shm.recency import Recency, RecencyWriter
from topics.storage import service_id
from topics.storage.borrowed import read_borrowed
from topics.storage.filesystem import OsFileSystem
from topics.storage.origin import Origin, RunningEnds
from topics.storage.pins import PinFiles, pins_dir
from topics.storage.segment_store import SegmentSource
from topics.storage.wal import room_left_bytes

log = get_logger()


class Process(msgspec.Struct, frozen=True):
    """One frontend process. `running_clock` leaves out the time in which it was suspended."""

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

    def quota(self, limit: str, most: int, field: str) -> Quota:
        """Return a quota over all frontends together. What a dead one had counts until its next life begins."""
        every = [self.shared.control.cell(Role.FRONTEND, frontend) for frontend in range(self.shared.frontends)]
        return Quota(limit, most, field, self.cell, every)


class Frontend(NamedTuple):
    """The application, and the parts of it that its process starts, stops or looks at. `cold`: None without a tier."""

    app: App
    access: Access
    arenas: Arenas
    gateway: Gateway
    expiry: ExpiryClock
    cold: ColdTier | None
    reader: TopicReader
    hub: Hub
    diff: DiffRoute
    websocket: WebSocketRoute
    work: WorkRoutes
    coordinator: TxnCoordinator

    def drain(self) -> None:
        """End the requests that would go on for ever: long polls, event streams and WebSockets."""
        self.diff.drain()
        self.websocket.drain()
        self.work.drain()
        self.hub.drain()


def build_app(process: Process, keys: KeyRing, store: SegmentSource | None, arrived: Callable[[], int]) -> Frontend:
    """Make one frontend on the running event loop; start its gateway. `store` has the data of cold segments,
    `arrived` returns how many requests have come so far.
    """
    shared, index, settings, cell = process.shared, process.index, process.settings, process.cell
    clock, running_clock, shards = process.clock, process.running_clock, shared.shards
    arenas = Arenas(shared)
    gateway = Gateway(
        shared, index, process.incarnation, arenas, cell, settings.shard_wait_ms, settings.archive_wait_ms, arrived
    )
    expiry = ExpiryClock(clock, log.warning, shared.control.trusted_offset_ms(Role.FRONTEND, index))
    cold = None if store is None else ColdTier(store, clock, settings.cold_read_timeout_ms)
    fs, pins = OsFileSystem(), pins_dir(shared.ram_dir)
    note = read_borrowed(fs, settings.data_dir)
    borrowed = frozenset() if note is None else frozenset(note.names())
    files = LogFiles(settings.data_dir, shared.ram_dir, shards)
    leadership = Leadership(settings, shared.control, fs)
    not_leader = None if settings.follow is None else leadership.why_not_leader
    epoch_masks = service_id.epoch_masks(fs, settings.data_dir)
    reader = TopicReader(arenas, files, shards, expiry, cold, epoch_masks, not_leader)
    recency_writer = RecencyWriter(shared.identity, index, shards)
    router_sight = RouterSight(shared)
    catching_up = CatchingUp(router_sight, reader, gateway)
    routers = RouterRoutes(router_sight, catching_up, reader, gateway, settings)
    diff = DiffRoute(reader, gateway, recency_writer, settings, cell, catching_up, clock, leadership)
    known = KnownTopics(reader, arenas, recency_writer, Recency(shared.identity, shared.frontends, shards), clock)
    hub = Hub(gateway, known, cell, running_clock)
    limits = KeyLimits(KeyCounts(shared.key_counts, shared.frontends, index), settings)
    access = Access(keys, limits, leadership.why_not_leader)
    access.on_change(partial(diff.end_forbidden, access.find_key))
    pages = Pages(settings, access)
    append = AppendRoute(gateway, settings, cell)
    slots = StreamSlots(limits, process.quota("sse_connections", settings.max_sse_connections, "sse_admitted"))
    observe = partial(shared.durations.observe, index)
    services = Services(reader, append, hub, access, pages, settings, catching_up, cell, running_clock, observe)
    websocket = WebSocketRoute(services, slots)
    ranking = TopicRanking(arenas, gateway)
    topics = TopicRoutes(known, arenas, gateway, hub, catching_up, routers, settings, ranking)
    watch = WatchRoutes(reader, SessionClient(gateway, clock), hub, access, settings, slots, catching_up)
    queue_services = QueueServices(gateway, reader)
    work = WorkRoutes(queue_services, access, settings, slots, cell, running_clock)
    figures = ServiceFigures(shared.control, shared.durations, clock.now_ms)
    metrics = MetricsRoute(figures, arenas, shards, settings.max_metric_topics)
    cells = [link.cell for link in gateway.links]
    topic_quota = Quota("topics", settings.max_topics, "topics", cells[0], cells)
    bytes_quota = Quota("total_bytes", settings.max_total_bytes, "bytes_live", cells[0], cells)
    room_bytes = partial(room_left_bytes, fs, settings.data_dir, shared.control.cut_bytes)
    coordinator = TxnCoordinator(gateway, Stages(settings.data_dir, settings.stage_ttl_ms, room_bytes))
    probes = ProbeRoutes(shared.control, clock)
    console = ConsoleRoutes(access)
    origin = Origin(fs, settings.data_dir, RunningEnds(shared.control.moment_ends))
    routes = [
        topics,
        append,
        diff,
        routers,
        watch,
        websocket,
        QueueRoutes(queue_services, catching_up, settings, cell),
        work,
        CursorRoutes(gateway, reader, catching_up, settings, cell, access.require_leader, known.note_read),
        TxnRoutes(
            append, coordinator, reader, topics.evicted, settings, topic_quota, bytes_quota, access.require_leader
        ),
        ManifestRoutes(reader, catching_up, fs, PinFiles(fs, pins, index), pins, settings.data_dir, clock, borrowed),
        TailRoutes(shared.control, origin, clock, settings.advertise_url or ""),
        metrics,
        console,
    ]
    operations = [*chain.from_iterable(map(operations_of, routes)), *probe_operations(probes, settings.probe_auth)]
    app = App(operations, console.operations, services, diff, websocket)
    return Frontend(app, access, arenas, gateway, expiry, cold, reader, hub, diff, websocket, work, coordinator)
