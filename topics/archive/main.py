"""The archiver process: ships everything that the shards commit until it is told to stop.

It writes nothing but the archive. Only `archived` writes wait for it. While it is dead, or cannot reach the
archive, the shards keep their logs. A thread ships, since a request to a bucket may hang; the main thread responds.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from topics.archive.archiver import LEADER_SIGN_MS, Archiver, ArchiverPlan
from topics.archive.shipping import NoMomentError, Shipper
from topics.core.clock import Clock, SystemClock
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.control import HEARTBEAT_MS, ProcessCell, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.storage import kill_points, service_id
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import OsFileSystem
from topics.storage.origin import Origin, RunningEnds

STOP: Final = (signal.SIGTERM,)
"""The process waits for this signal. A handler that sets an Event could hang: interrupted code may hold its lock."""
LAST_SHIP_S: Final = 2.0
"""Time in which a stop lets the last moment be shipped. A bucket that hangs must not hold up the stop."""
REQUEST_MS: Final = 30_000
"""Time-out of a request to the bucket."""
NICENESS: Final = 5

Work = Callable[[threading.Event], None]
Code = Callable[[], int | None]

log = get_logger()


def run(settings: Settings, shared: SharedMemory, incarnation: int) -> int:
    """Run the process; return 1 when it has to begin again."""
    assert settings.archive_url is not None
    kill_points.arm_as_told(settings.test_kill_at, incarnation)
    clock, fs = SystemClock(), OsFileSystem()
    cell = shared.control.cell(Role.ARCHIVER, 0)
    cell.begin_life(incarnation, clock.now_ms(), ProcessState.STARTING)
    with suppress(PermissionError):  # a sandbox may forbid it
        os.nice(NICENESS)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)

    archive = Archive(open_archive(fs, settings.archive_url, REQUEST_MS))
    origin = Origin(fs, settings.data_dir, RunningEnds(shared.control.moment_ends), settings.cold_place)

    def make_shipper() -> Shipper:
        if service_id.known_id(fs, settings.data_dir) is None:
            raise NoMomentError("no shard of this new service has begun its log yet; try again")
        masks = service_id.epoch_masks(fs, settings.data_dir)
        own_id, url = service_id.keep_id(fs, settings.data_dir), settings.advertise_url or ""
        return Shipper(archive, origin, own_id, clock, epoch_masks=masks, leader_url=url, notes_place=True)

    gives_signs = settings.advertise_url is not None
    interval_ms = min(settings.archive_interval_ms, LEADER_SIGN_MS) if gives_signs else settings.archive_interval_ms
    plan = ArchiverPlan(interval_ms, settings.archive_keep_ms, gives_signs)
    helpers = ThreadPoolExecutor(2, "archive")
    archiver = Archiver(archive, make_shipper, shared.control, shared.shard_wakes, plan, clock, helpers)
    return stand_by(cell, clock, archiver.work, helpers, LAST_SHIP_S)


def stand_by(
    cell: ProcessCell, clock: Clock, work: Work, helpers: Executor, last_s: float = 0, code: Code = lambda: None
) -> int:
    """Run `work` in a thread until SIGTERM, and then let it end within `last_s`. Return the exit code of the process:
    that of `code` once it has one, 1 if the thread has died without one, else 0.
    """
    stop = threading.Event()
    worker = threading.Thread(target=work, args=(stop,), name="archive-work", daemon=True)
    worker.start()
    cell.set("state", ProcessState.READY)
    # After a suspension that is longer than the time-out, CPython returns a signal number that nobody sent.
    while (found := signal.sigtimedwait(STOP, HEARTBEAT_MS / 1000)) is None or found.si_signo not in STOP:
        cell.set("heartbeat_ms", clock.now_ms())
        has_ended = not worker.is_alive()  # looked at first: the thread sets its code before it ends
        if (exit_code := code()) is not None:
            return exit_code
        if has_ended:
            log.error("the process begins again: its thread has ended, the log says why")
            return 1
    stop.set()
    cell.set("state", ProcessState.DRAINING)
    worker.join(last_s)
    if last_s and worker.is_alive():
        log.warning("stopped before the last records were in the archive: the next start ships them")
    helpers.shutdown(wait=False, cancel_futures=True)
    cell.set("state", ProcessState.STOPPED)
    return 0
