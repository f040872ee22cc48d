"""From files to a shard at work: read the logs, fold them, build a new arena.

Nothing of the former incarnation's shared memory is trusted but the rings and the journal: topics and locations come
from the files. Until the new arena is complete, readers keep the old one.
"""

from __future__ import annotations

import resource
from concurrent.futures import Executor
from typing import Final

import msgspec

from topics.core.clock import Clock, ExpiryClock
from topics.core.fold import Fold
from topics.core.topic import Topic
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.arena import ArenaWriter, unlink_arena
from topics.shm.control import ProcessCell, Role
from topics.shm.instance import SharedMemory
from topics.shm.location_ring import LocationRing
from topics.storage import layout
from topics.storage.filesystem import FileSystem, boot_id
from topics.storage.layout import snapshot_path
from topics.storage.log_fold import fold_frames
from topics.storage.logfile import RefusedLog, WalIdentity, WalPosition, read_first_start
from topics.storage.recovery import Recovery, recover_group
from topics.storage.snapshot import load
from topics.storage.wal import WalWriter
from topics.walshard.background_sync import BackgroundSync
from topics.walshard.catalog import Catalog
from topics.walshard.commit import Logs
from topics.walshard.deaths import FrontendDeaths
from topics.walshard.frame_tags import FrameTags
from topics.walshard.group_commit import GroupCommit
from topics.walshard.head_marks import LostHeads
from topics.walshard.holdings import Holdings
from topics.walshard.outbox import Outbox
from topics.walshard.ram_log import RamTrim
from topics.walshard.room import MakeRoom
from topics.walshard.routing_setup import make_routing
from topics.walshard.segment_files import SegmentFiles
from topics.walshard.segment_tags import tags_max
from topics.walshard.sessions import Sessions
from topics.walshard.shard import Shard
from topics.walshard.sinks import Sinks
from topics.walshard.step_clock import StepClock
from topics.walshard.tag_search import TagSearch
from topics.walshard.topic_index import TopicIndex
from topics.walshard.trimming import LogTrim
from topics.walshard.watchers import Watchers

log = get_logger()

RAM_FILE_BYTES: Final = 8 * 1024 * 1024


def recover(
    settings: Settings,
    shared: SharedMemory,
    index: int,
    outbox: Outbox,
    cell: ProcessCell,
    clock: Clock,
    fs: FileSystem,
    preallocating: Executor,
    syncing: Executor,
) -> Shard:
    """The shard as its files say, its arena built and current.

    Raises RefusedLog or FoldError when the log must not be used as it is.
    """
    started_ms = clock.monotonic_ms()
    generation = cell.get("generation") + 1
    unlink_arena(shared.identity, index, generation)  # of an incarnation that died while it recovered
    arena = ArenaWriter(shared.identity, index, generation)
    identity = WalIdentity(index, settings.wal_shards, boot_id())
    directory = layout.group_dir(settings.data_dir, index, settings.wal_shards)
    ram_directory = layout.ram_group_dir(shared.ram_dir, index)
    files = SegmentFiles(fs, settings.data_dir, tags_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    tags = TagSearch(files, FrameTags(fs, directory, ram_directory), clock)
    fold = Fold(lambda topic_id: TopicIndex(topic_id, LocationRing(arena.heap, 1), files))
    start, snapshot_line = _restore(fold, fs, settings.data_dir, directory)

    # The RAM log outlives a crash of this process, never a service: a torn end of it is one of a killed process.
    ram_recovery = recover_group(fs, ram_directory, identity, start="lowest")
    recovery = recover_group(fs, directory, identity, settings.accept_data_loss, start=start)
    ram_frames, _ = _fold_log(fold, ram_recovery, True, cell)
    frames, log_bytes = _fold_log(fold, recovery, False, cell)
    if generation == 1:
        cell.set("wal_bytes_found", log_bytes)
    fold.finish(ram_log_survived=ram_recovery.end is not None)
    for topic in fold.topics.values():
        topic.durable_seq = _durable_seq(topic)

    holdings = Holdings(shared.control, index, settings)
    catalog = Catalog(index, settings.wal_shards, arena, holdings, files, clock)
    catalog.take_over(fold)
    sessions = Sessions()
    sessions.recovered(fold.sessions, clock.monotonic_ms())

    def open_wal() -> WalWriter:
        return WalWriter.open(
            fs, directory, identity, recovery.end, file_bytes=settings.wal_file_bytes, helper=preallocating
        )

    def open_ram() -> WalWriter:
        return WalWriter.open(
            fs, ram_directory, identity, ram_recovery.end, file_bytes=RAM_FILE_BYTES, preallocate="none"
        )

    logs = Logs(
        open_wal(),
        open_ram() if ram_recovery.end is not None else None,
        open_ram,
        catalog.relocate,
        outbox.withdraw,
        cell,
        (recovery.end, ram_recovery.end),
        clock,
    )
    syncs = BackgroundSync(logs, syncing, shared.shard_wakes[index], clock.monotonic_ms())
    for hosted in catalog:
        syncs.hold(hosted)
    time = StepClock(clock, ExpiryClock(clock, log.warning, shared.control.trusted_offset_ms(Role.WALSHARD, index)))
    watchers = Watchers(catalog, outbox)
    commits = GroupCommit(logs, LostHeads(catalog, logs, fold.lost_heads), syncs, outbox, watchers, time)
    make_room = MakeRoom()
    routing = make_routing(settings, shared, index, fold.routers, catalog, holdings, make_room, cell, clock, fs)
    ram_trim = RamTrim(fs, ram_directory, RAM_FILE_BYTES, logs, catalog, sessions, routing.feeds, tags)
    sinks = Sinks(fs, settings.data_dir, index, settings.wal_shards)
    log_trim = LogTrim(logs, catalog, tags)
    shard = Shard(
        catalog,
        sessions,
        sinks,
        holdings,
        logs,
        ram_trim,
        files,
        tags,
        log_trim,
        syncs,
        outbox,
        watchers,
        FrontendDeaths(shared.control, outbox.drain_dead),
        commits,
        routing,
        cell,
        clock,
        time,
        make_room,
    )

    logs.count()  # the compactor reads the log up to there
    holdings.settle(len(sessions))
    cell.set("torn_bytes", recovery.torn_bytes)
    cell.set("arena_bytes", arena.used_bytes)
    cell.set("generation", generation)
    unlink_arena(shared.identity, index, generation - 1)
    for line in (*ram_recovery.report, *recovery.report):
        log.warning("recovery", repair=line)
    log.info(
        "recovered",
        snapshot=snapshot_line,
        frames=ram_frames + frames,
        topics=len(catalog),
        torn_bytes=recovery.torn_bytes,
        took_ms=clock.monotonic_ms() - started_ms,
    )
    return shard


def _durable_seq(topic: Topic) -> int:
    """What the files hold is on the disk; but a topic that was `ephemeral` for a while may have records in RAM."""
    if topic.config.durability == "ephemeral":
        return 0
    assert isinstance(topic.index, TopicIndex)
    in_ram_seq = topic.index.first_ram_seq(topic.earliest_seq, min(topic.head_ceiling, topic.head_seq))
    return topic.head_seq if in_ram_seq is None else in_ram_seq - 1


def _restore(fold: Fold, fs: FileSystem, data_dir: str, directory: str) -> tuple[WalPosition | None, str]:
    """What the newest snapshot knows of the log in `directory`: from where the log is to be read, None from its
    beginning; and what the operator hears of it.
    """
    snapshot = load(fs, data_dir)
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
        raise RefusedLog(path, f"{path}: its state of shard {part.shard} does not decode: {error}") from error
    return part.position, str(snapshot.number)


def _fold_log(fold: Fold, recovery: Recovery, in_ram: bool, cell: ProcessCell) -> tuple[int, int]:
    """Feeds the frames of one log, in order; returns how many, and their bytes."""
    frames = size_bytes = 0
    for batch in recovery:
        fold_frames(fold, batch, in_ram)
        frames += len(batch.frames)
        if batch.frames:
            last_offset, last_len = batch.frames[-1][:2]
            size_bytes += last_offset + last_len - batch.frames[0][0]
        cell.set("progress_ppm", int(recovery.progress * 1_000_000))
    return frames, size_bytes
