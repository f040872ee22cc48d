"""The one-off process that runs before any shard. It ends a promotion, checks data of a former release, and lays out
the logs for all shards.
"""

from __future__ import annotations

from topics.archive import promoting
from topics.core.clock import SystemClock
from topics.core.fold import FoldError
from topics.core.names import owner_shard
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.control import EXIT_REFUSED
from topics.shm.instance import SharedMemory
from topics.storage import reshard
from topics.storage.borrowed import read_borrowed
from topics.storage.filesystem import OsFileSystem, boot_id, said
from topics.storage.logfile import RefusedLog
from topics.storage.service_id import epoch_masks
from topics.storage.snapshot import UnknownSnapshotVersion, plan_move
from topics.storage.upgrade import check_upgrade, has_mark, write_mark
from topics.storage.wal import WalSyncError, WalWriteError

log = get_logger()


def take_role(settings: Settings) -> Settings:
    """Return the settings for the service's present role. Raise OSError if they do not fit the data directory, or if
    its notes are damaged: every frontend would die of that.
    """
    fs = OsFileSystem()
    settings = promoting.take_role(fs, settings, SystemClock())
    epoch_masks(fs, settings.data_dir)
    read_borrowed(fs, settings.data_dir)
    return settings


def is_needed(settings: Settings) -> bool:
    """True if the data are new, of another release, of another number of shards, or about to be promoted."""
    fs = OsFileSystem()
    if settings.follow is not None:
        return False
    if promoting.is_promotion_due(fs, settings.data_dir):
        return True
    try:
        marked = has_mark(fs, settings.data_dir)
    except RefusedLog:
        return True  # the process logs why
    return not marked or reshard.needs_reshard(fs, settings.data_dir, settings.wal_shards)


def run(settings: Settings, shared: SharedMemory) -> int:
    """Run the process; it may be killed and repeated. Return EXIT_REFUSED if a log must not be used as it is."""
    header = shared.control.header

    def progress(share: float) -> None:
        # This process is the only writer of that word while it runs.
        header.set("reshard_ppm", int(share * 1e6))

    def owner(name: str) -> int:
        return owner_shard(name, settings.wal_shards)

    fs = OsFileSystem()
    try:
        if promoting.is_promotion_due(fs, settings.data_dir):
            topics = promoting.finish_promotion(fs, settings.data_dir, SystemClock())
            log.info("promoted: this service leads", topics=topics)
        marked = has_mark(fs, settings.data_dir)
        report = reshard.finish_swap(fs, settings.data_dir)
        if not marked:
            check_upgrade(settings.data_dir, settings.accept_data_loss, progress)
        move = plan_move(fs, settings.data_dir, owner)
        report += reshard.reshard(
            fs,
            settings.data_dir,
            settings.wal_shards,
            boot_id(),
            owner,
            progress,
            file_bytes=settings.wal_file_bytes,
            accept_data_loss=settings.accept_data_loss,
            move=move,
        )
        if not marked:
            write_mark(fs, settings.data_dir)
    except (RefusedLog, UnknownSnapshotVersion, FoldError) as error:
        log.error("the log cannot be used as it is", reason=str(error))
        return EXIT_REFUSED
    except (WalWriteError, WalSyncError, OSError) as error:
        log.error("the logs could not be prepared", reason=said(error))
        return 1
    for line in report:
        log.warning("prepared the logs", note=line)
    return 0
