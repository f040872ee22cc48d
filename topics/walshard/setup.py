"""The start of a shard: read its logs, fold them, build a new arena, put the parts together.

A new incarnation trusts only the rings and the journal of its predecessor's shared memory. It takes topics and
locations from the files. Readers keep the old arena until the new one is complete.
"""

from __future__ import annotations

import resource
from functools import partial
from typing import Final, NamedTuple, get_args

from topics.core.clock import ExpiryClock
from topics.core.errors import TopicsError
from topics.core.fold import Fold
from topics.core.routers import ROUTERS_SHARD, FoldedRouters
from topics.log import get_logger
from topics.shm import queue_messages, topic_messages
from topics.shm.append_messages import AppendRequest
from topics.shm.arena import ArenaWriter, unlink_arena
from topics.shm.arena_heap import LocationRing
from topics.shm.control import Role
from topics.shm.router_memory import RouterBoard, RouterBoardWriter, RouterTable, RouterTableWriter
from topics.storage.wal import ROOM_STEP_BYTES, WalWriter, room_beside_bytes
from topics.walshard.commit.archive_wait import ArchiveWait
from topics.walshard.commit.commits import Commits
from topics.walshard.commit.draft import AloneHandler, GroupHandler
from topics.walshard.commit.log_trim import LogTrim, RamTrim
from topics.walshard.commit.logs import BackgroundSync, Logs
from topics.walshard.follower_shard import FollowedLog, FollowerShard, only_reads
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
from topics.walshard.log_reading import Recovered, may_read_until, read_followed, read_logs
from topics.walshard.place import Place
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
    """Recover a shard from its files, publish its new arena, and return its parts. Raise RefusedLog, FoldError or
    UnknownSnapshotVersion for an unusable log, TailLost when the log of a followed service has lost its tail.
    """
    settings, index, cell, clock = place.settings, place.shard, place.cell, place.clock
    identity, control = place.shared.identity, place.shared.control
    started_ms = clock.monotonic_ms()
    generation = cell.get("generation") + 1
    bases = control.bases
    unlink_arena(identity, index, generation)  # an incarnation that died while it recovered may have left one
    arena = ArenaWriter(identity, index, generation)
    files = SegmentFiles(place.fs, settings.data_dir, tags_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    read = read_logs if settings.follow is None else read_followed
    recovered = read(place, lambda topic_id: TopicIndex(topic_id, LocationRing(arena.heap, 1), files))
    if generation == 1:
        cell.set("wal_bytes_found", recovered.log_bytes)

    holdings = Holdings(control, index, settings)
    catalog = Catalog(index, settings.wal_shards, arena, holdings, files, clock)
    catalog.take_over(recovered.fold)
    parts = _put_together(place, recovered, catalog, holdings, files)

    if recovered.followed is None:
        _log_lost_end(recovered.fold, parts)
        parts.logs.count()  # the compactor reads the log up to the end that this shows
    holdings.publish()
    cell.set("torn_bytes", recovered.torn_bytes)
    cell.set("arena_bytes", arena.used_bytes)
    cell.set("generation", generation)
    cell.set("bases_loaded", bases)
    unlink_arena(identity, index, generation - 1)
    for line in recovered.report:
        log.warning("recovery", repair=line)
    log.info(
        "recovered",
        snapshot=recovered.snapshot_line,
        frames=recovered.frames,
        topics=len(catalog),
        torn_bytes=recovered.torn_bytes,
        took_ms=clock.monotonic_ms() - started_ms,
    )
    return parts


class Parts(NamedTuple):
    """A shard, and those of its parts that tests look at."""

    shard: Shard
    catalog: Catalog
    files: SegmentFiles
    logs: Logs
    commits: Commits
    sessions: WatchSessions
    queues: Queues
    sinks: Sinks


def _log_lost_end(fold: Fold, parts: Parts) -> None:
    """Log what the log may have lost with its end: the last records of topics, and deletions that only segments have.
    If the log cannot be written now, `Commits` does this before the next write.
    """
    heads = [fold.topics[topic_id] for topic_id in fold.lost_end.heads]
    lost = {topic.id for topic in heads if topic.lost_tail_seq == topic.head_seq} | fold.lost_end.deletions
    if not lost and all(topic.config.durability == "ephemeral" for topic in heads):
        return  # the first write to the durable log logs these heads
    if lost:
        what = "the log may have lost its end: the last records of topics, or deletions, may be gone"
        log.warning(what, topics=len(lost))
        parts.logs.lost_tails = len(lost)
    try:
        parts.commits.log_lost_end()
    except TopicsError as error:
        log.error("what the log may have lost with its end cannot be logged yet", reason=str(error))


def _open_logs(place: Place, recovered: Recovered, catalog: Catalog) -> Logs:
    fs, identity, end = place.fs, place.identity, recovered.end
    file_bytes, helper = place.settings.wal_file_bytes, place.preallocating

    def open_ram() -> WalWriter:
        return WalWriter(
            fs,
            place.ram_directory,
            identity,
            recovered.ram_end,
            file_bytes=RAM_FILE_BYTES,
            preallocate="none",
            room_bytes=partial(_ram_room_bytes, place),
        )

    if recovered.followed is None:
        wal = WalWriter(
            fs, place.directory, identity, end, file_bytes=file_bytes, helper=helper, room_bytes=place.room_bytes
        )
    else:  # a follower refuses requests that change anything, so this log stays empty
        wal = WalWriter(fs, place.ram_directory + ".empty", identity, None, preallocate="none")
    ram = None if recovered.ram_end is None else open_ram()
    ends = end, recovered.ram_end
    return Logs(wal, ram, open_ram, catalog.relocate, place.rings.withdraw, place.cell, ends, place.clock)


def _ram_room_bytes(place: Place) -> int:
    """Return the bytes in /dev/shm that new records may take. Somewhat more than a file of each shard is kept free. A
    full RAM log needs it to repeat live records, and a shard that was killed needs it to build a new arena while
    readers still use the old one.
    """
    kept_bytes = place.settings.wal_shards * (RAM_FILE_BYTES * 9 // 8 + ROOM_STEP_BYTES)
    return room_beside_bytes(place.fs, place.shared.ram_dir, kept_bytes)


def _put_together(
    place: Place, recovered: Recovered, catalog: Catalog, holdings: Holdings, files: SegmentFiles
) -> Parts:
    settings, shared, shard, rings, cell, clock, fs, _preallocating, syncing = place
    logs = _open_logs(place, recovered, catalog)
    expiry = ExpiryClock(clock, log.warning, shared.control.trusted_offset_ms(Role.WALSHARD, shard))
    time = StepClock(clock, expiry)
    frame_tags = FrameTags(fs, place.directory, place.ram_directory)
    tags = TagSearch(files, frame_tags, clock)
    archive = _follow_archive(place, logs, catalog)
    syncs = BackgroundSync(logs, syncing, shared.shard_wakes[shard], clock.monotonic_ms(), archive)
    rings.take_over([entry for entry in rings.committed_before() if logs.holds(entry)])
    commits = Commits(logs, syncs, rings, catalog, recovered.fold.lost_end, time)

    deletes = Deletes(catalog, tags, time)
    appends = Appends(catalog, holdings, logs, deletes, time)
    queues = Queues(catalog, deletes, rings.push, cell, time)
    cursors = NamedCursors(catalog, time)
    sessions = WatchSessions(holdings, time)
    sessions.recovered(recovered.fold.sessions)
    sinks = Sinks(fs, settings.data_dir, shard, settings.wal_shards, catalog, appends)
    routing = _make_routing(place, recovered.fold.routers, catalog, holdings, deletes)
    topic_calls = TopicCalls(catalog, logs, deletes, routing.log_feed, place.ram_directory, time)
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
        topic_messages.PutTopic: topic_calls.make,
        topic_messages.EnsureTopic: topic_calls.make,
        topic_messages.StagePublish: sinks.publish,
        topic_messages.StagesOver: sinks.stages_over,
        **dict.fromkeys(get_args(topic_messages.SinkCall), sinks.take),
        topic_messages.MarkAgain: segments.mark_again,
        topic_messages.Trim: segments.trim,
    }
    alone: dict[type, AloneHandler] = {
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
    if recovered.followed is not None:
        handlers = only_reads(handlers)
    others = sessions.ram_frames, routing.feeds.ram_frames
    room_bytes = partial(_ram_room_bytes, place)
    ram_trim = RamTrim(fs, place.ram_directory, room_bytes, RAM_FILE_BYTES, logs, catalog, frame_tags, others)
    upkeep = Upkeep(catalog, files, syncs, log_trim, ram_trim, deletes, sessions, clock)
    parts = rings, handlers, routing, commits, holdings, upkeep, cell, time
    if recovered.followed is None:
        whole = Shard(*parts)
    else:
        until = partial(may_read_until, shared.control, shard)
        wait = ArchiveWait(partial(shared.control.shipped, shard), lambda: 0, 0)
        log_of_leader = FollowedLog(recovered.fold, recovered.followed, until, wait, catalog, routing)
        whole = FollowerShard(*parts, log=log_of_leader)
    return Parts(whole, catalog, files, logs, commits, sessions, queues, sinks)


def _follow_archive(place: Place, logs: Logs, catalog: Catalog) -> ArchiveWait | None:
    """Return the `ArchiveWait` of this shard, all recovered topics noted in it; None without an archive."""
    settings, shared = place.settings, place.shared
    if not shared.control.has_archiver or settings.follow is not None:
        return None
    files_max = settings.archive_backlog_bytes // (settings.wal_file_bytes * settings.wal_shards)
    wait = ArchiveWait(partial(shared.control.shipped, place.shard), place.room_bytes, files_max)
    wait.committed(catalog, logs.end_word)
    return wait


def _make_routing(
    place: Place, state: FoldedRouters, catalog: Catalog, holdings: Holdings, deletes: Deletes
) -> Routing:
    settings, shared, shard, _rings, cell, clock, fs, *_threads = place
    originals = Originals(fs, settings, shared, clock.monotonic_ms)
    boards = [RouterBoard(board) for board in shared.router_boards]
    sources = Sources(catalog, RouterTable(shared.router_table), boards, Links(shared, shard))
    feeds = Feeds(RouterBoardWriter(shared.router_boards[shard]), clock)
    feeds.recovered(state, {hosted.topic.id: hosted for hosted in catalog})
    registry: Registrar | None = None
    if shard == ROUTERS_SHARD:
        writer = RouterTableWriter(shared.router_table)
        registry = Registrar(writer, state, cell, settings.max_routers, clock.now_ms)
    copier = Copier(originals, holdings.claim_bytes, cell, clock)
    return Routing(catalog, sources, originals, feeds, copier, deletes, registry, clock)
