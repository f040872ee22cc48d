"""From files to a shard at work: read the logs, fold them, build a new arena, put the parts together.

Nothing of the former incarnation's shared memory is trusted but the rings and the journal: topics and locations come
from the files. Until the new arena is complete, readers keep the old one.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final, NamedTuple

import msgspec

from topics.core.clock import Clock, ExpiryClock
from topics.core.errors import TopicsError
from topics.core.fold import Fold
from topics.core.routers import ROUTERS_SHARD, FoldedRouters
from topics.log import get_logger
from topics.settings import Settings
from topics.shm import queue_messages, topic_messages
from topics.shm.append_messages import AppendRequest
from topics.shm.arena import ArenaWriter, unlink_arena
from topics.shm.arena_heap import LocationRing
from topics.shm.control import ProcessCell, Role
from topics.shm.instance import SharedMemory
from topics.shm.router_memory import RouterBoard, RouterBoardWriter, RouterTable, RouterTableWriter
from topics.storage import layout
from topics.storage.filesystem import FileSystem, boot_id
from topics.storage.layout import snapshot_path
from topics.storage.log_fold import fold_frames
from topics.storage.logfile import RefusedLog, WalIdentity, WalPosition, read_first_start
from topics.storage.recovery import Recovery
from topics.storage.snapshot import load_snapshot
from topics.storage.wal import WalWriter, room_left_bytes
from topics.walshard.commit.archive_wait import ArchiveWait
from topics.walshard.commit.commits import Commits
from topics.walshard.commit.draft import AloneHandler, GroupHandler
from topics.walshard.commit.log_trim import LogTrim, RamReserve, RamTrim
from topics.walshard.commit.logs import BackgroundSync, Logs
from topics.walshard.commit.shard_rings import ShardRings
from topics.walshard.handlers.appends import Appends
from topics.walshard.handlers.deletes import Deletes
from topics.walshard.handlers.frontends import Frontends
from topics.walshard.handlers.named_cursors import NamedCursors
from topics.walshard.handlers.queues import Queues
from topics.walshard.handlers.segment_handover import SegmentHandover
from topics.walshard.handlers.sinks import Sinks
from topics.walshard.handlers.topic_calls import TopicCalls
from topics.walshard.handlers.watch_sessions import WatchSessions
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.hosted.segment_files import SegmentFiles
from topics.walshard.hosted.segment_tags import tags_max
from topics.walshard.hosted.tag_search import FrameTags, TagSearch
from topics.walshard.hosted.topic_index import TopicIndex
from topics.walshard.routers.copier import Copier
from topics.walshard.routers.feeds import Feeds
from topics.walshard.routers.originals import Originals
from topics.walshard.routers.registrar import Registrar
from topics.walshard.routers.routing import Routing
from topics.walshard.routers.sources import Links, Sources
from topics.walshard.shard import Handlers, Shard
from topics.walshard.step_clock import StepClock
from topics.walshard.upkeep import Upkeep

log = get_logger()

RAM_FILE_BYTES: Final = 8 * 1024 * 1024


def set_up(place: Place) -> Parts:
    """Return the shard as its files say, its arena current. Raise RefusedLog or FoldError for an unusable log."""
    settings, index, cell, clock = place.settings, place.shard, place.cell, place.clock
    identity, control = place.shared.identity, place.shared.control
    started_ms = clock.monotonic_ms()
    generation = cell.get("generation") + 1
    unlink_arena(identity, index, generation)  # of an incarnation that died while it recovered
    arena = ArenaWriter(identity, index, generation)
    files = SegmentFiles(place.fs, settings.data_dir, tags_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    recovered = _read_logs(place, lambda topic_id: TopicIndex(topic_id, LocationRing(arena.heap, 1), files))
    if generation == 1:
        cell.set("wal_bytes_found", recovered.log_bytes)

    holdings = Holdings(control, index, settings)
    catalog = Catalog(index, settings.wal_shards, arena, holdings, files, clock)
    catalog.take_over(recovered.fold)
    parts = _put_together(place, recovered, catalog, holdings, files)

    _log_lost_tails(recovered.fold, parts)
    parts.logs.count()  # the compactor reads the log up to there
    holdings.settle()
    cell.set("torn_bytes", recovered.durable.torn_bytes)
    cell.set("arena_bytes", arena.used_bytes)
    cell.set("generation", generation)
    unlink_arena(identity, index, generation - 1)
    for line in (*recovered.ram.report, *recovered.durable.report):
        log.warning("recovery", repair=line)
    log.info(
        "recovered",
        snapshot=recovered.snapshot_line,
        frames=recovered.frames,
        topics=len(catalog),
        torn_bytes=recovered.durable.torn_bytes,
        took_ms=clock.monotonic_ms() - started_ms,
    )
    return parts


class Parts(NamedTuple):
    """A shard, and some of its parts."""

    shard: Shard
    catalog: Catalog
    files: SegmentFiles
    logs: Logs
    commits: Commits
    sessions: WatchSessions
    queues: Queues
    sinks: Sinks


class Place(NamedTuple):
    """The place of a shard: all that its process hands over. One helper thread lays out log files ahead, one syncs."""

    settings: Settings
    shared: SharedMemory
    shard: int
    rings: ShardRings
    cell: ProcessCell
    clock: Clock
    fs: FileSystem
    preallocating: Executor
    syncing: Executor

    @property
    def identity(self) -> WalIdentity:
        return WalIdentity(self.shard, self.settings.wal_shards, boot_id())

    @property
    def directory(self) -> str:
        """Directory of the durable log."""
        return layout.group_dir(self.settings.data_dir, self.shard, self.settings.wal_shards)

    @property
    def ram_directory(self) -> str:
        """Directory of the RAM log."""
        return layout.ram_group_dir(self.shared.ram_dir, self.shard)


class _Recovered(NamedTuple):
    """The fold of both logs, and how each was read."""

    fold: Fold
    durable: Recovery
    ram: Recovery
    frames: int
    log_bytes: int
    snapshot_line: str


def _read_logs(place: Place, make_index: Callable[[int], TopicIndex]) -> _Recovered:
    fold = Fold(make_index)
    start, snapshot_line = _restore(fold, place.fs, place.settings.data_dir, place.directory)
    # The RAM log outlives a crash of this process, never a service: a torn end of it is one of a killed process.
    ram = Recovery(place.fs, place.ram_directory, place.identity, start="lowest")
    durable = Recovery(place.fs, place.directory, place.identity, place.settings.accept_data_loss, start=start)
    ram_frames, _ = _fold_log(fold, ram, True, place.cell)
    frames, log_bytes = _fold_log(fold, durable, False, place.cell)
    # In the life of one service the machine has not stopped; what its first shard could not log is lost as before.
    same_life = place.cell.get("generation") > 0 and not place.cell.get("lost_tails")
    fold.finish(ram_log_survived=ram.end is not None, has_end=durable.has_end or same_life)
    for topic in fold.topics.values():
        # What the durable log has is on the disk.
        topic.durable_seq = 0 if topic.config.durability == "ephemeral" else topic.head_seq
    return _Recovered(fold, durable, ram, ram_frames + frames, log_bytes, snapshot_line)


def _log_lost_tails(fold: Fold, parts: Parts) -> None:
    """Log at once which topics may have lost their last records. If that fails, it comes before the next write."""
    lost = [topic for topic in map(fold.topics.__getitem__, fold.lost_heads) if topic.lost_tail_seq == topic.head_seq]
    if not lost:
        return
    log.warning("the log may have lost its end: the last records of topics may be gone", topics=len(lost))
    parts.logs.lost_tails = len(lost)
    try:
        parts.commits.log_lost_heads()
    except TopicsError as error:
        log.error("that the last records of topics may be gone cannot be logged yet", reason=str(error))


def _open_logs(place: Place, recovered: _Recovered, catalog: Catalog, reserve: RamReserve) -> Logs:
    fs, identity, end = place.fs, place.identity, recovered.durable.end
    file_bytes, helper = place.settings.wal_file_bytes, place.preallocating

    def open_ram() -> WalWriter:
        end = recovered.ram.end
        ram = WalWriter(fs, place.ram_directory, identity, end, file_bytes=RAM_FILE_BYTES, preallocate="none")
        reserve.fill()
        return ram

    room_bytes = partial(room_left_bytes, fs, place.settings.data_dir, place.shared.control.cut_bytes)
    wal = WalWriter(fs, place.directory, identity, end, file_bytes=file_bytes, helper=helper, room_bytes=room_bytes)
    ram = None if recovered.ram.end is None else open_ram()
    ends = end, recovered.ram.end
    return Logs(wal, ram, open_ram, catalog.relocate, place.rings.withdraw, place.cell, ends, place.clock)


def _put_together(
    place: Place, recovered: _Recovered, catalog: Catalog, holdings: Holdings, files: SegmentFiles
) -> Parts:
    settings, shared, shard, rings, cell, clock, fs, _preallocating, syncing = place
    reserve = RamReserve(fs, place.ram_directory + ".reserve", RAM_FILE_BYTES)
    logs = _open_logs(place, recovered, catalog, reserve)
    expiry = ExpiryClock(clock, log.warning, shared.control.trusted_offset_ms(Role.WALSHARD, shard))
    time = StepClock(clock, expiry)
    frame_tags = FrameTags(fs, place.directory, place.ram_directory)
    tags = TagSearch(files, frame_tags, clock)
    archive = _follow_archive(place, logs, catalog)
    syncs = BackgroundSync(logs, syncing, shared.shard_wakes[shard], clock.monotonic_ms(), archive)
    rings.take_over([entry for entry in rings.committed_before() if logs.holds(entry)])
    commits = Commits(logs, syncs, rings, catalog, recovered.fold.lost_heads, time)

    deletes = Deletes(catalog, tags, time)
    appends = Appends(catalog, holdings, deletes, time)
    queues = Queues(catalog, deletes, rings.push, cell, time)
    cursors = NamedCursors(catalog, time)
    sessions = WatchSessions(holdings, time)
    sessions.recovered(recovered.fold.sessions)
    sinks = Sinks(fs, settings.data_dir, shard, settings.wal_shards, catalog, appends)
    routing = _make_routing(place, recovered.fold.routers, catalog, holdings, deletes)
    topic_calls = TopicCalls(catalog, deletes, routing.log_feed, place.ram_directory, time)
    log_trim = LogTrim(logs, catalog, frame_tags, archive)
    segments = SegmentHandover(catalog, files, logs, log_trim, time)
    talk = rings.notify, rings.forget_notices, rings.drain_dead
    frontends = Frontends(shared.control, catalog, *talk, sessions, queues, cursors)

    # Who handles which request: in a group with others, or alone.
    in_group: dict[type, GroupHandler] = {
        AppendRequest: appends.prepare,
        queue_messages.Claim: queues.claim,
        queue_messages.Ack: queues.ack,
        queue_messages.Nack: queues.nack,
        queue_messages.Extend: queues.extend,
        queue_messages.Unclaim: queues.unclaim,
        queue_messages.WorkOpen: queues.open_work,
        queue_messages.WorkClose: queues.close_work,
        queue_messages.Bury: queues.bury,
        queue_messages.Release: queues.release,
        queue_messages.Peek: queues.peek,
        queue_messages.Reserve: queues.reserve,
        queue_messages.Remove: queues.remove,
        queue_messages.CursorGet: cursors.look,
        queue_messages.CursorAdvance: cursors.advance,
        queue_messages.CursorPassedOn: cursors.passed_on,
        topic_messages.SessionGet: sessions.look,
        topic_messages.SessionOpen: sessions.open,
        topic_messages.SessionAbandon: sessions.abandon,
        topic_messages.Watch: frontends.watch,
        topic_messages.Unwatch: frontends.unwatch,
        topic_messages.Hello: frontends.hello,
        topic_messages.StagePublish: sinks.publish,
        topic_messages.StagesOver: sinks.stages_over,
        topic_messages.TxnBegin: sinks.take,
        topic_messages.TxnEnd: sinks.take,
        topic_messages.TxnForget: sinks.take,
        topic_messages.TxnGet: sinks.take,
        topic_messages.TxnPending: sinks.take,
        topic_messages.MarkAgain: segments.mark_again,
        topic_messages.Trim: segments.trim,
    }
    alone: dict[type, AloneHandler] = {
        topic_messages.PutTopic: topic_calls.put,
        topic_messages.EnsureTopic: topic_calls.ensure,
        topic_messages.DeleteTopic: topic_calls.delete,
        topic_messages.DeleteRecords: deletes.delete,
        topic_messages.Expire: deletes.expire_one,
        queue_messages.CursorPut: cursors.put,
        queue_messages.CursorDelete: cursors.delete,
        topic_messages.SessionPut: sessions.put,
        topic_messages.SessionClose: sessions.close,
        topic_messages.Checkpoint: segments.take,
        topic_messages.CatchUp: routing.catch_up,
        topic_messages.SyncRouters: routing.sync,
    }
    if routing.registrar is not None:
        alone[topic_messages.PutRouter] = routing.registrar.put
        alone[topic_messages.DeleteRouter] = routing.registrar.delete
        alone[topic_messages.RemoveRouters] = routing.registrar.remove
    handlers = Handlers(in_group, alone, queues, cursors, frontends)
    others = sessions.ram_frames, routing.feeds.ram_frames
    ram_trim = RamTrim(fs, place.ram_directory, reserve, logs, catalog, frame_tags, others)
    upkeep = Upkeep(catalog, files, syncs, log_trim, ram_trim, deletes, sessions, clock)
    whole = Shard(rings, handlers, routing, commits, holdings, upkeep, cell, time)
    return Parts(whole, catalog, files, logs, commits, sessions, queues, sinks)


def _follow_archive(place: Place, logs: Logs, catalog: Catalog) -> ArchiveWait | None:
    """Return what follows the archive, which gets all records of the recovered log; None without an archive."""
    settings, shared = place.settings, place.shared
    if not shared.control.has_archiver:
        return None
    files_max = settings.archive_backlog_bytes // (settings.wal_file_bytes * settings.wal_shards)
    room_bytes = partial(room_left_bytes, place.fs, settings.data_dir, shared.control.cut_bytes)
    wait = ArchiveWait(partial(shared.control.shipped, place.shard), room_bytes, files_max)
    wait.committed((hosted for hosted in catalog if hosted.topic.config.durability != "ephemeral"), logs.end_word)
    return wait


def _make_routing(
    place: Place, state: FoldedRouters, catalog: Catalog, holdings: Holdings, deletes: Deletes
) -> Routing:
    settings, shared, shard, _rings, cell, clock, fs, *_threads = place
    originals = Originals(fs, settings, shared, clock.monotonic_ms)
    boards = [RouterBoard(board) for board in shared.router_boards]
    sources = Sources(catalog, RouterTable(shared.router_table), boards, Links(shared, shard))
    feeds = Feeds(RouterBoardWriter(shared.router_boards[shard]), clock.now_ms)
    feeds.recovered(state, {hosted.topic.id: hosted for hosted in catalog})
    registry: Registrar | None = None
    if shard == ROUTERS_SHARD:
        writer = RouterTableWriter(shared.router_table)
        registry = Registrar(writer, state, cell, settings.max_routers, clock.now_ms)
    copier = Copier(originals, holdings.claim_bytes, cell, clock)
    return Routing(catalog, sources, originals, feeds, copier, deletes, registry, clock)


def _restore(fold: Fold, fs: FileSystem, data_dir: str, directory: str) -> tuple[WalPosition | None, str]:
    """Restore the newest snapshot of that log; return from where the log is read (None: all), and a word on it."""
    snapshot = load_snapshot(fs, data_dir)
    if snapshot is None:
        return None, "none"
    for bad in snapshot.skipped:
        log.warning("a snapshot was passed over", reason=str(bad))
    first = read_first_start(fs, directory)
    part = None if first is None else snapshot.part_of(first.log_id)
    if part is None:
        return None, f"{snapshot.number}, nothing of this shard"
    try:
        fold.restore(part.decoded())
    except msgspec.DecodeError as error:
        path = snapshot_path(data_dir, snapshot.number)
        raise RefusedLog(path, f"its state of shard {part.shard} does not decode: {error}") from error
    return part.position, str(snapshot.number)


def _fold_log(fold: Fold, recovery: Recovery, in_ram: bool, cell: ProcessCell) -> tuple[int, int]:
    """Fold the frames of one log, in order; return how many, and their bytes."""
    frames = size_bytes = 0
    for batch in recovery:
        fold_frames(fold, batch, in_ram)
        frames += len(batch.frames)
        if batch.frames:
            last_offset, last_len = batch.frames[-1][:2]
            size_bytes += last_offset + last_len - batch.frames[0][0]
        cell.set("progress_ppm", int(recovery.progress * 1_000_000))
    return frames, size_bytes
