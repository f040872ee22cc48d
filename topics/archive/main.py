"""The archiver process: ships everything that the shards commit until it is told to stop.

It writes nothing but the archive, and nobody waits for it. While it is dead, or cannot reach the archive, the shards
keep their logs. A thread ships, since a request to a bucket may hang; the process's own thread stays responsive.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from topics.archive.archiver import LEADER_SIGN_MS, Archiver, ArchiverPlan
from topics.archive.shipping import Shipper
from topics.core.clock import SystemClock
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.control import HEARTBEAT_MS, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.storage import kill_points, service_id
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import OsFileSystem
from topics.storage.origin import Origin, RunningEnds

STOP: Final = (signal.SIGTERM,)
"""It is waited for: a handler that sets an event can stand still if it came between two waits for that event."""
LAST_SHIP_S: Final = 2.0
"""The time for the last moment when the service stops. A bucket that hangs must not hold up the stop."""
REQUEST_MS: Final = 30_000
"""Time-out of a request to the bucket."""
NICENESS: Final = 5

log = get_logger()


def run(settings: Settings, shared: SharedMemory, incarnation: int) -> int:
    """Run the process; return 1 when it has to begin again."""
    assert settings.archive_url is not None
    kill_points.arm_as_told(settings.test_kill_at, incarnation)
    clock, fs = SystemClock(), OsFileSystem()
    cell = shared.control.cell(Role.ARCHIVER, 0)
    cell.begin_life(incarnation, clock.now_ms(), ProcessState.STARTING)
    os.nice(NICENESS)
    stop = threading.Event()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)

    archive = Archive(open_archive(fs, settings.archive_url, REQUEST_MS))
    origin = Origin(fs, settings.data_dir, RunningEnds(shared.control.settled_ends), settings.cold_place)

    def make_shipper() -> Shipper:
        mask = service_id.epoch_mask(fs, settings.data_dir)
        own_id, url = service_id.keep_id(fs, settings.data_dir), settings.advertise_url or ""
        return Shipper(archive, origin, own_id, clock, epoch_mask=mask, leader_url=url, notes_place=True)

    gives_signs = settings.advertise_url is not None
    interval_ms = min(settings.archive_interval_ms, LEADER_SIGN_MS) if gives_signs else settings.archive_interval_ms
    plan = ArchiverPlan(interval_ms, settings.archive_keep_ms, gives_signs)
    helpers = ThreadPoolExecutor(2, "archive")
    archiver = Archiver(archive, make_shipper, shared.control, shared.shard_wakes, plan, clock, helpers)
    worker = threading.Thread(target=archiver.work, args=(stop,), name="shipping", daemon=True)
    worker.start()
    cell.set("state", ProcessState.READY)
    while not told_to_stop():
        cell.set("heartbeat_ms", clock.now_ms())
        if not worker.is_alive():
            log.error("the archiver begins again: its thread has ended, the log says why")
            return 1
    stop.set()
    cell.set("state", ProcessState.DRAINING)
    worker.join(LAST_SHIP_S)
    if worker.is_alive():
        log.warning("stopped before the last records were in the archive: the next start ships them")
    helpers.shutdown(wait=False, cancel_futures=True)
    cell.set("state", ProcessState.STOPPED)
    return 0


def told_to_stop() -> bool:
    """Wait for the time of a heartbeat, or until SIGTERM comes; return whether it came."""
    found = signal.sigtimedwait(STOP, HEARTBEAT_MS / 1000)
    # A process that was stopped for longer than that gets a signal of any number from CPython, which nobody sent.
    return found is not None and found.si_signo in STOP
