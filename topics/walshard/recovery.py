"""From files to a shard at work: read the logs, fold them, build a new arena.

Nothing of the former incarnation's shared memory is trusted but the rings and the journal: topics and locations come
from the files. Until the new arena is complete, readers keep the old one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from topics.core.clock import Clock
from topics.core.fold import Fold
from topics.core.topic import LOCATION_IN_RAM_LOG
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.arena import ArenaWriter, unlink_arena
from topics.shm.control import ProcessCell
from topics.shm.instance import SharedMemory
from topics.shm.location_ring import LocationRing
from topics.storage import layout
from topics.storage.filesystem import BOOT_ID_PATH, FileSystem
from topics.storage.frame import (
    FLAG_META,
    FLAG_NODE,
    FLAG_TAG,
    HEADER_LEN,
    LOCATION_HAS_META,
    LOCATION_HAS_NODE,
    LOCATION_HAS_TAG,
    FrameType,
)
from topics.storage.logfile import WalIdentity
from topics.storage.recovery import RecoveredFile, Recovery, recover_group
from topics.storage.wal import WalWriter
from topics.walshard.background_sync import BackgroundSync
from topics.walshard.catalog import Catalog
from topics.walshard.commit import Logs
from topics.walshard.frame_tags import FrameTags
from topics.walshard.holdings import Holdings
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Operation
from topics.walshard.outbox import Outbox
from topics.walshard.ram_log import RamTrim
from topics.walshard.routing_setup import make_routing
from topics.walshard.sessions import Sessions
from topics.walshard.shard import Shard
from topics.walshard.sinks import Sinks

log = get_logger()

RAM_FILE_BYTES: Final = 8 * 1024 * 1024
_LOCATION_FLAGS: Final = [
    (LOCATION_HAS_TAG if flags & FLAG_TAG else 0)
    | (LOCATION_HAS_NODE if flags & FLAG_NODE else 0)
    | (LOCATION_HAS_META if flags & FLAG_META else 0)
    for flags in range(256)
]
"""Frame flags → location flags."""


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
    with open(BOOT_ID_PATH) as boot_id_file:
        identity = WalIdentity(index, settings.wal_shards, boot_id_file.read().strip())
    directory = layout.group_dir(settings.data_dir, index, settings.wal_shards)
    ram_directory = layout.ram_group_dir(shared.ram_dir, index)
    tags = FrameTags(fs, directory, ram_directory)
    fold = Fold(lambda: LocationRing(arena, 1), tags.of)

    # The RAM log outlives a crash of this process, never a service: a torn end of it is one of a killed process.
    ram_recovery = recover_group(fs, ram_directory, identity, start="lowest")
    recovery = recover_group(fs, directory, identity, settings.accept_data_loss)
    frames = _fold_log(fold, ram_recovery, True, cell) + _fold_log(fold, recovery, False, cell)
    fold.finish(ram_log_survived=ram_recovery.end is not None)
    for topic in fold.topics.values():
        topic.durable_seq = 0 if topic.config.durability == "ephemeral" else topic.head_seq

    holdings = Holdings(shared.control, index, settings)
    catalog = Catalog(index, settings.wal_shards, arena, holdings, clock)
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

    def commit(durable: list[Operation], ram: list[Operation]) -> bool:
        return shard.commit_group(durable, ram)

    def show(hosted: Hosted) -> None:
        shard.show(hosted)

    def logged(hosted: Hosted) -> None:
        shard.logged(hosted)

    routing = make_routing(
        settings, shared, index, fold.routers, catalog, holdings, cell, clock, fs, commit, show, logged
    )
    ram_trim = RamTrim(fs, ram_directory, RAM_FILE_BYTES, logs, catalog, sessions, routing.feeds)
    sinks = Sinks(fs, settings.data_dir, index, settings.wal_shards)
    shard = Shard(catalog, sessions, sinks, holdings, logs, ram_trim, tags, syncs, outbox, routing, cell, clock)
    routing.rederive()

    holdings.settle(len(sessions))
    cell.set("torn_bytes", recovery.torn_bytes)
    cell.set("arena_bytes", arena.used_bytes)
    cell.set("generation", generation)
    unlink_arena(shared.identity, index, generation - 1)
    for line in (*ram_recovery.report, *recovery.report):
        log.warning("recovery", repair=line)
    log.info(
        "recovered",
        frames=frames,
        topics=len(catalog),
        torn_bytes=recovery.torn_bytes,
        took_ms=clock.monotonic_ms() - started_ms,
    )
    return shard


def _fold_log(fold: Fold, recovery: Recovery, in_ram: bool, cell: ProcessCell) -> int:
    """Feeds the frames of one log, in order; returns how many."""
    frames = 0
    for batch in recovery:
        _fold_batch(fold, batch, LOCATION_IN_RAM_LOG if in_ram else 0)
        frames += len(batch.frames)
        cell.set("progress_ppm", int(recovery.progress * 1_000_000))
    return frames


def _fold_batch(fold: Fold, batch: RecoveredFile, ram_flag: int) -> None:
    buffer = batch.buffer
    runs: dict[int, array[int]] = {}
    words = [batch.file_no | (flags | ram_flag) << 32 for flags in _LOCATION_FLAGS]
    last_topic_id = -1
    extend: Callable[[tuple[int, int, int, int]], None] | None = None
    for offset, total_len, type_, flags, topic_id, seq, ts, node_len, tag_len, data_len in batch.frames:
        if type_ == FrameType.APPEND:
            if topic_id != last_topic_id or extend is None:
                run = runs.get(topic_id)
                if run is None:
                    run = runs[topic_id] = array("Q")
                extend = run.extend
                last_topic_id = topic_id
            extend((seq, ts, offset | total_len << 32, words[flags]))
            continue
        start = offset + HEADER_LEN + node_len + tag_len
        data = bytes(buffer[start : start + data_len])
        match type_:
            case FrameType.IDEMPOTENCY:
                fold.idempotency(topic_id, seq, ts, data)
            case FrameType.RAM_STATE:
                fold.ram_state(topic_id, data)
            case FrameType.JOB_ATTRIBUTES:
                fold.job_attributes(topic_id, data)
            case FrameType.LEASE:
                fold.lease(topic_id, data)
            case FrameType.CURSOR:
                fold.cursor(topic_id, data)
            case FrameType.SESSION:
                fold.session(data)
            case FrameType.FILE_START | FrameType.FILE_END | FrameType.SYNC_MARK | FrameType.ROUTER_COPY:
                pass
            case _:
                # Control frames see their topic with all records before them.
                for run_topic_id, run in runs.items():
                    fold.records(run_topic_id, run)
                runs = {}
                extend = None
                _fold_control(fold, type_, topic_id, seq, data, bool(ram_flag))
    for run_topic_id, run in runs.items():
        fold.records(run_topic_id, run)


def _fold_control(fold: Fold, type_: int, topic_id: int, seq: int, data: bytes, in_ram: bool) -> None:
    match type_:
        case FrameType.TOPIC_CREATE:
            fold.topic_create(topic_id, data)
        case FrameType.CONFIG_UPDATE:
            fold.config_update(topic_id, data)
        case FrameType.TOPIC_DELETE:
            fold.topic_delete(topic_id)
        case FrameType.DELETE:
            fold.delete(topic_id, seq, data)
        case FrameType.EVICT_WATERMARK:
            fold.evict_watermark(topic_id, seq, data)
        case FrameType.ACK:
            fold.ack(topic_id, data)
        case FrameType.HEAD_WATERMARK:
            fold.head_watermark(topic_id, seq, data)
        case FrameType.ROUTER_CREATE:
            fold.routers.created(data)
        case FrameType.ROUTER_DELETE:
            fold.routers.deleted(seq)
        case FrameType.ROUTER_CURSOR:
            fold.router_cursor(topic_id, seq, data, in_ram)
        case FrameType.ROUTER_SOURCE:
            fold.router_source(topic_id, seq)
        case _:
            raise AssertionError(f"frame type {type_} has no meaning in this version")
