"""A backup: one moment of a service, running or not, shipped into an archive."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from topics.archive.inspection import prove
from topics.archive.shipping import NoMomentError, Shipped, Shipper
from topics.core.clock import Clock
from topics.log import get_logger
from topics.shm import shm_names
from topics.shm.control import ControlPage
from topics.storage import service_id
from topics.storage.archive_objects import Archive, ArchiveDamagedError, open_archive
from topics.storage.filesystem import FileSystem
from topics.storage.follow_note import read_note
from topics.storage.lock import DataDirLocked, inspecting
from topics.storage.notes import note_path
from topics.storage.origin import LogEnds, Origin, RestingEnds, RunningEnds

_RETRY_S: Final = 0.1

log = get_logger()


def backup(
    fs: FileSystem,
    data_dir: str,
    to: str,
    cold_place: str | None,
    clock: Clock,
    patience_ms: int,
    told: Callable[[int, int], None],
) -> Shipped:
    """Ship the present moment of a data directory, and a base for it, to `to`, a directory or a bucket's URL.

    Raise OSError, RefusedLog, OtherShipperError, ArchiveDamagedError, and NoMomentError after `patience_ms`.
    """
    note = read_note(fs, data_dir)
    if note is not None and not note.is_promoted:  # its logs go by the id of that service
        reason = f"is a copy of the service in {note.url}: back that up, or promote this one"
        raise OSError(errno.EINVAL, reason, data_dir)
    until_ms = clock.monotonic_ms() + patience_ms
    archive = Archive(open_archive(fs, to))
    is_new = not archive.generations()
    while True:
        try:
            with _ends(data_dir) as ends:
                origin = Origin(fs, data_dir, ends, cold_place)
                masks = service_id.epoch_masks(fs, data_dir)
                own_id, owner = service_id.keep_id(fs, data_dir), os.stat(data_dir)
                noted = os.lstat(id_path := note_path(data_dir, service_id.NAME))
                if os.geteuid() == 0 and noted.st_uid != owner.st_uid:  # the service's user has to read what root notes
                    os.lchown(id_path, owner.st_uid, owner.st_gid)
                shipper = Shipper(archive, origin, own_id, clock, told, masks)
                shipper.begin()
                if is_new:
                    log.warning("a new archive is begun: if there should be one, mount its disk", place=to)
                    is_new = False
                shipped = shipper.base()
                assert shipper.last_base is not None
                try:
                    prove(archive, max(archive.generations()), shipper.last_base)
                except ArchiveDamagedError as damage:
                    way_out = "put it back from a copy, or back up again once the service has run for some minutes"
                    raise ArchiveDamagedError(f"{damage}: no restore of this backup; {way_out}") from damage
                return shipped
        except NoMomentError:
            if clock.monotonic_ms() >= until_ms:
                raise
        time.sleep(_RETRY_S)


@contextmanager
def _ends(data_dir: str) -> Iterator[LogEnds]:
    """Yield the ends of the logs. The control page of a running service tells them, else the logs themselves, which
    nobody may change meanwhile.
    """
    try:
        with inspecting(data_dir):
            yield RestingEnds(data_dir)
            return
    except DataDirLocked:
        pass
    try:
        page = ControlPage.attach(shm_names.shm_name(shm_names.identity(data_dir), "control"))
    except FileNotFoundError as error:
        why = "its service starts or stops: try again; or it is in a container: back it up in there"
        raise NoMomentError(f"{data_dir}: {why}") from error
    yield RunningEnds(page.moment_ends)
