"""A WAL shard: recovers its log, then commits group after group until it is told to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from topics.core.clock import SystemClock
from topics.core.collector import collect_only_young
from topics.core.fold import FoldError
from topics.core.governor import Brake
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.arena_heap import ArenaFullError
from topics.shm.control import EXIT_NEXT_LIFE, EXIT_REFUSED, HEARTBEAT_MS, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.shm.memory import FENCE_IS_FULL
from topics.shm.ring import Wake
from topics.storage.filesystem import WritePath
from topics.storage.kill_points import arm_as_told
from topics.storage.log_tail import TailLost
from topics.storage.logfile import RefusedLog
from topics.storage.snapshot import UnknownSnapshotVersion
from topics.storage.wal import WalSyncError, WalWriteError
from topics.walshard.commit.shard_rings import ShardRings
from topics.walshard.place import Place
from topics.walshard.setup import set_up
from topics.walshard.shard import Shard
from topics.walshard.shard_pressure import ShardPressure

BUSY_FOR_MS: Final = 0 if FENCE_IS_FULL else 50
"""Time after its last request for which the shard sleeps at most 1 ms at once. A lost wake-up (`shm/ring.py`) then
costs at most 1 ms.
"""
STUCK_MS: Final = 10
"""Longest sleep while a router waits for something that no signal announces."""

log = get_logger()


def run(settings: Settings, shared: SharedMemory, index: int, incarnation: int) -> int:
    """Run the process until it is told to stop, and return its exit code: EXIT_REFUSED when the log must not be used
    as it is, EXIT_NEXT_LIFE when a follower's shard has to start again with a newer snapshot, 1 for other failures.
    """
    arm_as_told(settings.test_kill_at, incarnation)
    collect_only_young()  # a full collection takes 1 s with 100,000 topics, and nothing here leaves a cycle
    clock = SystemClock()
    cell = shared.control.cell(Role.WALSHARD, index)
    cell.begin_life(incarnation, clock.now_ms(), ProcessState.RECOVERING)
    wake = shared.shard_wakes[index]
    stop = _StopRequest(wake)
    rings = ShardRings(shared, index)
    fs = WritePath(shared.control.header.get("write_path")).file_system()
    if settings.follow is not None and not _leader_is_known(shared, index, stop, wake):
        cell.set("state", ProcessState.STOPPED)
        return 0
    with ThreadPoolExecutor(1, "preallocate") as preallocating, ThreadPoolExecutor(1, "sync") as syncing:
        place = Place(settings, shared, index, rings, cell, clock, fs, preallocating, syncing)
        try:
            shard = set_up(place).shard
        except (RefusedLog, FoldError, UnknownSnapshotVersion) as error:
            log.error("the log cannot be used as it is", reason=str(error))
            cell.set("state", ProcessState.STOPPED)  # so that the compactor does not wait for it
            return EXIT_REFUSED
        except (ArenaFullError, WalWriteError, TailLost, OSError) as error:
            log.error("recovery failed", reason=str(error))
            return 1
        cell.set("state", ProcessState.READY)
        rings.announce_generation()
        rings.flush()
        brake = Brake(settings.max_replay_bytes)
        pressure = ShardPressure(shared.control, cell, rings, brake, partial(shared.control.lag_bytes, index))
        is_outdated = partial(shared.control.is_outdated, index)
        _serve(shard, place, wake, stop, pressure, is_outdated)
        if is_outdated() and not stop.requested:
            return EXIT_NEXT_LIFE
        cell.set("state", ProcessState.DRAINING)
        try:
            shard.close()
        except WalSyncError as error:
            log.error("the log was not closed cleanly", reason=str(error))
            return 1
    cell.set("state", ProcessState.STOPPED)
    return 0


def _leader_is_known(shared: SharedMemory, index: int, stop: _StopRequest, wake: Wake) -> bool:
    """Wait until the follower's process has fetched a log of this shard that may be read. False when told to stop."""
    while not shared.control.readable(index):
        if stop.requested:
            return False
        wake.announce_sleep()
        wake.sleep(HEARTBEAT_MS)
        wake.awake()
    return True


def _serve(
    shard: Shard, place: Place, wake: Wake, stop: _StopRequest, pressure: ShardPressure, is_outdated: Callable[[], bool]
) -> None:
    rings, cell, clock = place.rings, place.cell, place.clock
    beat_ms = sweep_ms = busy_ms = clock.monotonic_ms()
    while True:
        pressure.gather()
        served = pressure.group(shard.serve)
        copied = pressure.aside(shard.copy)
        now_ms = clock.monotonic_ms()
        shows_more = shard.sync_in_background()
        pressure.sample()
        if now_ms - beat_ms >= HEARTBEAT_MS:
            beat_ms = now_ms
            cell.set("heartbeat_ms", clock.now_ms())
        if now_ms - sweep_ms >= 1000:
            sweep_ms = now_ms
            shard.sweep()
            if is_outdated():
                return
        if served or copied or shows_more or shard.upkeep.busy:
            busy_ms = now_ms
            continue
        if rings.stuck:
            rings.flush()
        elif stop.requested:
            return
        elif shard.upkeep.idle():
            continue
        wake.announce_sleep()
        if rings.idle and shard.is_idle:
            if rings.stuck or now_ms - busy_ms < BUSY_FOR_MS:
                timeout_ms = 1
            else:
                timeout_ms = STUCK_MS if shard.is_stuck else HEARTBEAT_MS
            tick_ms = shard.next_tick_ms
            if tick_ms is not None:
                timeout_ms = max(0, min(timeout_ms, tick_ms - now_ms))
            pressure.aside(partial(wake.sleep, timeout_ms))
        wake.awake()


class _StopRequest:
    """Notes a SIGTERM and wakes the shard, which finishes the requests in its rings, then ends."""

    def __init__(self, wake: Wake) -> None:
        self.requested = False
        self._wake = wake
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, _number: int, _frame: object) -> None:
        self.requested = True
        self._wake.signal_always()
