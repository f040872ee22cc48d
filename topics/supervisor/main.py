"""`serve` runs a service from the first check to the last clean-up; the steps stand in the order of their time."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Final

from topics import __version__
from topics.core.clock import SETTLE_MS, STEP_MAX_MS, Clock, SystemClock, offset_at_start
from topics.core.keys import KeyRing
from topics.log import configure_log, get_logger, identify
from topics.settings import PREFIX, Settings, read_keys
from topics.shm import shm_names
from topics.shm.control import EXIT_AGAIN, ControlPage, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.storage import layout
from topics.storage.filesystem import FileSystem, OsFileSystem, boot_id, choose_write_path
from topics.storage.lock import DataDirLock, DataDirLocked, DataDirNotWritable, is_running
from topics.storage.logfile import WalPosition, note_committed
from topics.storage.notes import read_clock
from topics.supervisor.check import StatVfs, raise_limits, shared_memory_shortage, strangers_memory
from topics.supervisor.children import ChildMains
from topics.supervisor.listeners import AddressError, listen_for, port_of, share, show, write_port_file
from topics.supervisor.notify import Notify
from topics.supervisor.signals import STOP, Signals
from topics.supervisor.supervision import EXIT_OK, Supervisor

LOCK_RETRY_MS: Final = 50
LOCK_BRIEF_MS: Final = 500
"""Time to wait for the lock: longer than a process holds it that only reads the lock's state."""

log = get_logger()


class StartError(Exception):
    """The service cannot start; the message names the obstacle and the way out."""


def serve(
    settings: Settings,
    mains: ChildMains,
    notify: Notify,
    *,
    inherited: list[socket.socket] | None = None,
    statvfs: StatVfs = os.statvfs,
    clock: Clock | None = None,
) -> int:
    """Run the service until it is stopped; return its exit code. Raise SettingsError, StartError."""
    keys = read_keys(settings)
    clock = clock or SystemClock()
    configure_log(settings.log_level, settings.log_format)
    identify("supervisor")
    log.info("starting", version=__version__, pid=os.getpid(), settings=settings.masked())
    _log_authentication(settings, keys)
    with Signals() as signals, ExitStack() as behind, _refused():
        if shortage := raise_limits(settings):
            raise StartError(shortage)
        lock = _acquire(settings, signals, clock)
        if lock is None:
            return EXIT_OK
        behind.callback(lock.release)
        with _refused(f"data directory {settings.data_dir} cannot be written"):
            write_path = choose_write_path(settings.data_dir)
        settings = _take_role(mains, settings)
        if inherited:
            listeners = share(inherited, settings.frontends)
        else:
            listeners = listen_for(settings.host, settings.port, settings.frontends)
        port = port_of(listeners[0])
        address = show(settings.host, port)
        for listener in chain.from_iterable(listeners):
            behind.callback(listener.close)
        if settings.port_file:
            write_port_file(settings.port_file, address)
            behind.callback(_remove, settings.port_file)
        log.info("listening", address=address, inherited=bool(inherited), write_path=write_path.name.lower())

        while True:
            shared = _share(settings, statvfs)
            with ExitStack() as life:
                life.callback(shared.destroy)
                header = shared.control.header
                header.set("supervisor_pid", os.getpid())
                header.set("started_ms", clock.now_ms())
                header.set("port", port)
                header.set("write_path", write_path)
                header.set("follows", int(settings.follow is not None))
                if (offset_ms := _trusted_offset_ms(settings, clock)) is not None:
                    header.clock_offset_ms = offset_ms
                header.set("state", ProcessState.STARTING)
                with _refused(f"data directory {settings.data_dir} cannot be read"):
                    reshard = mains.needs_reshard(settings)
                # Children share the pages of these objects with us until a garbage collector writes to them: freeze
                # them.
                gc.collect()
                gc.freeze()
                service = Supervisor(settings, keys, mains, shared, listeners, clock, signals, notify)
                exit_code, keys = service.run(reshard=reshard), service.keys
                header.set("state", ProcessState.STOPPED)
            if exit_code != EXIT_AGAIN:
                log.info("stopped", exit=exit_code)
                return exit_code
            # Free the memory of this life before the next one takes its own. The supervisor is in a reference cycle.
            del shared, header, life, service
            gc.collect()
            settings = _take_role(mains, settings)


def _take_role(mains: ChildMains, settings: Settings) -> Settings:
    with _refused(f"data directory {settings.data_dir} cannot be used"):
        return mains.take_role(settings)


@contextmanager
def _refused(what: str | None = None) -> Iterator[None]:
    """Turn errors that refuse a start into StartErrors. `what` begins the message of an OSError; None lets it pass."""
    try:
        yield
    except (DataDirLocked, DataDirNotWritable, AddressError) as refusal:
        raise StartError(str(refusal)) from refusal
    except OSError as error:
        if what is None:
            raise
        where = f"{error.filename} " if error.filename else ""
        raise StartError(f"{what}: {where}{error.strerror or error}") from error


def _log_authentication(settings: Settings, keys: KeyRing) -> None:
    if keys.keys:
        log.info("authentication is on", keys=len(keys.keys))
    else:
        log.warning(
            "AUTHENTICATION IS OFF: everybody who reaches this address may read, write and delete everything",
            host=settings.host,
            way_out=f"set {PREFIX}API_KEYS_FILE or {PREFIX}API_KEYS",
        )


def _acquire(settings: Settings, signals: Signals, clock: Clock) -> DataDirLock | None:
    """Take the lock; wait until the children of a killed supervisor have ended. None if a stop signal comes first."""
    begun_ms = clock.monotonic_ms()
    is_waiting = False
    while True:
        try:
            return DataDirLock.acquire(settings.data_dir)
        except DataDirLocked as refusal:
            orphans = refusal.pid is not None and not is_running(refusal.pid)
            wait_ms = settings.shutdown_grace_ms if orphans else LOCK_BRIEF_MS if refusal.pid is None else 0
            if clock.monotonic_ms() - begun_ms >= wait_ms:
                raise
            if orphans and not is_waiting:
                is_waiting = True
                log.warning("waiting for the processes of a killed service to end", supervisor_pid=refusal.pid)
        if signals.wait(LOCK_RETRY_MS) in STOP:
            return None


def _share(settings: Settings, statvfs: StatVfs) -> SharedMemory:
    """Create the shared memory. First remove that of a killed service: the holder of the lock owns the names."""
    identity = shm_names.identity(settings.data_dir)
    if problem := strangers_memory(settings.data_dir):
        raise StartError(problem)
    with _refused(f"data directory {settings.data_dir} cannot be written"):
        keep_ends(OsFileSystem(), settings.data_dir, identity)
    if stale := shm_names.unlink_all(identity):
        log.warning("removed shared memory of a service that was killed", objects=stale)
    if shortage := shared_memory_shortage(settings, statvfs):
        raise StartError(shortage)
    with _refused(f"shared memory cannot be created in {shm_names.SHM_ROOT}"):
        archivers = int(settings.archive_url is not None or settings.follow is not None)
        return SharedMemory.create(identity, settings.wal_shards, settings.frontends, settings.ring_bytes, archivers)


def keep_ends(fs: FileSystem, data_dir: str, identity: str) -> None:
    """Note on the disk how far the logs of a killed service went; its control page knows, and is removed soon."""
    try:
        page = ControlPage.attach(shm_names.shm_name(identity, "control"))
    except OSError:
        return
    if page.follows:
        return  # the shards of a follower commit nothing to this directory
    for shard in range(page.shards):
        cell, directory = page.cell(Role.WALSHARD, shard), layout.group_dir(data_dir, shard, page.shards)
        committed = cell.get("committed")
        if committed and not cell.get("lost_tails") and fs.exists(directory):
            note_committed(fs, directory, WalPosition.of_word(committed))


def _trusted_offset_ms(settings: Settings, clock: Clock) -> int | None:
    """Return the wall time minus monotonic time that the previous service trusted; None: trust the clock."""
    try:
        last = read_clock(OsFileSystem(), settings.data_dir)
    except OSError as error:
        log.warning("meta/clock.json cannot be read, so the wall clock is trusted", reason=str(error))
        return None
    offset_ms = offset_at_start(last, boot_id(), clock)
    if last is not None and offset_ms is not None:
        ahead_ms = clock.now_ms() - clock.monotonic_ms() - offset_ms
        if ahead_ms > STEP_MAX_MS:
            log.warning(
                "the clock is ahead of the time that the last service went by: nothing expires by it for a while",
                by_ms=ahead_ms,
                same_boot=last.boot_id == boot_id(),
                expiry_waits_ms=SETTLE_MS,
            )
    return offset_ms


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
