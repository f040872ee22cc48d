"""The compactor process: turns the logs of all shards into segments and snapshots until it is told to stop.

It writes no log and answers no client. While it is dead the logs grow, nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final

from topics.compactor.checkpoints import SYNC_ONE_BY_ONE_MAX, Checkpoints, DurableMarks, Refused, ask
from topics.compactor.compactor import Compactor, CutTimes
from topics.compactor.leftovers import Leftovers
from topics.compactor.life import ClockNote, Life, Stopped
from topics.compactor.loan import Loan
from topics.compactor.relocation import HotRetention, Relocation
from topics.compactor.rewriting import ColdFetch, Rewriting
from topics.compactor.segment_building import SealAt
from topics.compactor.shard_copy import ShardCopy, ShardLink
from topics.compactor.snapshots import Snapshots
from topics.core.clock import SystemClock
from topics.core.fold import Fold, FoldError
from topics.core.record_index import UnlocatedIndex
from topics.core.segment_list import COLD
from topics.log import LastingFailures, get_logger
from topics.settings import Settings
from topics.shm.control import HEARTBEAT_MS, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.shm.topic_messages import Trim
from topics.storage import kill_points, layout, service_id
from topics.storage.borrowed import cold_source, read_borrowed
from topics.storage.filesystem import FileSystem, OsFileSystem, boot_id, syncfs_reports_errors
from topics.storage.log_tail import LogTail, TailLost
from topics.storage.logfile import RefusedLog, WalPosition
from topics.storage.pins import Pinned, pins_dir, read_pinned
from topics.storage.segment_store import SegmentStore, open_store
from topics.storage.snapshot import ShardPart, UnknownSnapshotVersion, load_snapshot
from topics.storage.wal import room_left_bytes

FOLLOW_BYTES: Final = 2 * 2**20
RETRY_MS: Final = 2_000
NOT_REWRITTEN: Final = "a segment could not be rewritten, which will be repeated"
NICENESS: Final = 5
"""Clients come first. But this process must not starve: the logs, and so the next start, would grow without end."""

log = get_logger()


def run(settings: Settings, shared: SharedMemory, incarnation: int) -> int:
    """Run the process; return 1 when it has to begin again."""
    kill_points.arm_as_told(settings.test_kill_at, incarnation)
    clock = SystemClock()
    cell = shared.control.cell(Role.COMPACTOR, 0)
    cell.begin_life(incarnation, clock.now_ms(), ProcessState.STARTING)
    give_way()
    life = Life(shared, cell, clock, settings.compactor_grace_ms)
    helper = ThreadPoolExecutor(1, "cold")
    try:
        compactor = build(settings, shared, incarnation, OsFileSystem(), life, helper)
        cell.set("state", ProcessState.READY)
        shards = [shared.control.cell(Role.WALSHARD, shard) for shard in range(shared.shards)]
        note = ClockNote(OsFileSystem(), settings.data_dir, boot_id(), shards, clock)
        room_bytes = partial(room_left_bytes, OsFileSystem(), settings.data_dir, shared.control.cut_bytes)
        serve(compactor, settings, life, note, room_bytes)
    except Stopped as reason:
        log.info("stopped before the last cut was complete, so the next start reads more logs", reason=str(reason))
    except (TailLost, FoldError, RefusedLog, UnknownSnapshotVersion, OSError, Refused) as error:
        log.error("the compactor begins again", reason=str(error))
        return 1
    finally:
        # Do not wait for the helper: its cold directory may hang.
        helper.shutdown(wait=False, cancel_futures=True)
    cell.set("state", ProcessState.STOPPED)
    return 0


def give_way() -> None:
    """Lower the weight of this process and make its wake-ups interrupt no other. A sandbox may forbid it."""
    try:
        os.nice(NICENESS)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except PermissionError as error:
        log.warning("the compactor cannot lower its own priority", reason=str(error))


def build(
    settings: Settings, shared: SharedMemory, incarnation: int, fs: FileSystem, life: Life, helper: ThreadPoolExecutor
) -> Compactor:
    """Build the compactor where the newest snapshot left off. Wait for shards that recover.

    Raise RefusedLog, UnknownSnapshotVersion, FoldError, TailLost, OSError, Refused, Stopped.
    """
    links = [ShardLink(shared, shard, incarnation, life.wait) for shard in range(shared.shards)]
    for link in links:
        while link.committed is None:
            link.take_notices()
            life.wait()
    snapshot = load_snapshot(fs, settings.data_dir)
    parts: dict[int, ShardPart] = {} if snapshot is None else {part.shard: part for part in snapshot.parts}
    shard_copies = [_follow(fs, settings.data_dir, shared, link, parts.get(link.shard)) for link in links]
    for shard_copy in shard_copies:
        # After this answer no request of a former life is under way: all its marks are in the log. The shard answers
        # even while it cannot mark deletions: then only snapshots wait, and records still go into segments.
        ask(shard_copy, Trim(0))
        committed = shard_copy.link.committed
        while committed is None:
            life.wait()
            committed = shard_copy.link.committed
        shard_copy.catch_up(committed, life.alive)
    seal_at = SealAt(settings.segment_max_events, settings.segment_max_bytes, settings.segment_max_age_ms)
    clock = life.clock
    pins = pins_dir(shared.ram_dir)

    def pinned() -> Pinned:
        return read_pinned(fs, pins, clock.monotonic_ms())

    note = read_borrowed(fs, settings.data_dir)
    loan = None if note is None else Loan(fs, settings.data_dir, note, helper, clock)
    wake = shared.compactor_wake.signal_always
    relocation = store = None
    if settings.cold_place is not None:
        retention = HotRetention(settings.hot_retain_segments, settings.hot_retain_bytes)
        store = _open_cold(fs, settings.data_dir, settings.cold_place, _find_cold(shard_copies, loan), helper)
        relocation = Relocation(fs, settings.data_dir, store, retention, helper, clock, pinned, wake)
    source = cold_source(fs, note, store)
    fetch = None if source is None else ColdFetch(fs, settings.data_dir, source, helper, wake)
    one_by_one_max = SYNC_ONE_BY_ONE_MAX
    if not syncfs_reports_errors(release := os.uname().release):
        one_by_one_max = sys.maxsize
        log.info("segments are synced one by one: this kernel does not report failed syncs of a disk", kernel=release)
    compactor = Compactor(
        shard_copies,
        Snapshots(fs, settings.data_dir, shared.shards, snapshot),
        Checkpoints(fs, settings.data_dir, seal_at, clock, life.alive, one_by_one_max),
        DurableMarks(fs, settings.data_dir, shared.shards, life.alive, one_by_one_max),
        Leftovers(fs, settings.data_dir, pinned, life.alive),
        Rewriting(fs, settings.data_dir, settings.segment_rewrite_dead_ratio, clock, fetch, loan),
        relocation,
        life,
    )
    compactor.consider_all()
    return compactor


def _find_cold(shard_copies: list[ShardCopy], loan: Loan | None) -> str | None:
    """Return the name of an object that the cold tier must have; None if no segment is there."""
    for shard_copy in shard_copies:
        for topic in shard_copy.fold.topics.values():
            for info in shard_copy.index_of(topic).segments:
                if info.flags & COLD and not (loan is not None and loan.has(topic.id, info)):
                    return layout.object_name(*info.key_in(topic.id))
    return None


def _open_cold(fs: FileSystem, data_dir: str, place: str, known: str | None, helper: Executor) -> SegmentStore:
    """Open the cold tier. If it must have the object `known`, the helper checks that."""

    def owner() -> str:
        return service_id.describe(service_id.keep_id(fs, data_dir), data_dir)

    store = open_store(fs, place, apart_from=layout.topics_dir(data_dir), new=known is None, owner=owner)
    if known is not None:
        helper.submit(_check_cold, store, known)
    return store


def _check_cold(store: SegmentStore, name: str) -> None:
    """Log an error if the cold tier lacks this object. It runs on the helper's thread, because it may hang."""
    try:
        if store.exists(name):
            return
        reason = f"{store.place(name)} is missing"
    except OSError as error:
        reason = str(error)
    log.error(
        "segments are in the cold tier, which is not there or does not have them: reads of them fail",
        reason=reason,
        way_out="mount its disk, restore it or let this service in, which needs no restart,"
        " or set TOPICS_COLD_DIR or TOPICS_COLD_URL to where it is",
    )


def _follow(fs: FileSystem, data_dir: str, shared: SharedMemory, link: ShardLink, part: ShardPart | None) -> ShardCopy:
    """Return a copy of the shard that follows its log from where the snapshot ends, or from the first file."""
    directory = layout.group_dir(data_dir, link.shard, shared.shards)
    fold = Fold(lambda _topic_id: UnlocatedIndex(), is_located=False)
    if part is None:
        position = WalPosition(layout.list_log_files(fs, directory)[0], 0)
    else:
        position = part.position
        fold.restore(part.decoded())
    return ShardCopy(shared.identity, link, LogTail(directory, position), fold)


def serve(compactor: Compactor, settings: Settings, life: Life, note: ClockNote, room_bytes: Callable[[], int]) -> None:
    """Make cuts and do upkeep until the process is to stop."""
    cell, clock = life.cell, life.clock
    # The brake slows a shard from four fifths of `max_replay_bytes` on: a cut must be due before that.
    wal_bytes = min(settings.checkpoint_wal_bytes, settings.max_replay_bytes // 4 or settings.checkpoint_wal_bytes)
    times = CutTimes(settings.checkpoint_interval_ms, wal_bytes, clock.monotonic_ms())
    upkeep_not_before_ms = 0
    lasting = LastingFailures(lambda: clock.monotonic_ms() / 1000)
    pause_ms = min(HEARTBEAT_MS, settings.checkpoint_interval_ms)
    while not life.stopping:
        life.alive()
        note.keep()
        upkeep_in_ms = None
        compactor.follow(FOLLOW_BYTES)
        left_bytes = room_bytes()
        if times.is_due(compactor.new_bytes, clock.monotonic_ms(), left_bytes):
            has_news = compactor.has_news
            complete = compactor.cut(is_full=left_bytes < 0) if has_news else True
            times.done(complete, clock.monotonic_ms(), was_made=has_news)
        if times.is_tidying_due(clock.monotonic_ms()):
            compactor.tidy()
            times.tidied(clock.monotonic_ms())
        try:
            # A failure here, for example of a cold directory, holds up no checkpoint.
            if times.may_keep_up(clock.monotonic_ms()) and clock.monotonic_ms() >= upkeep_not_before_ms:
                upkeep_in_ms = compactor.upkeep()
                lasting.over(NOT_REWRITTEN)
        except (OSError, Refused) as error:
            cell.add("failures")
            upkeep_not_before_ms = clock.monotonic_ms() + RETRY_MS
            lasting.failed(NOT_REWRITTEN, error)
        if not life.stopping:
            life.sleep(pause_ms if upkeep_in_ms is None else min(pause_ms, max(1, upkeep_in_ms)))
    cell.set("state", ProcessState.DRAINING)
    note.close()
    if compactor.has_news:
        compactor.cut()
