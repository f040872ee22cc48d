"""A shipper of a service whose shards run in the test's process."""

from __future__ import annotations

from tests.walshard.rig import Rig
from topics.archive.shipping import Shipper
from topics.storage import service_id
from topics.storage.archive_objects import Archive
from topics.storage.filesystem import FileSystem, OsFileSystem
from topics.storage.origin import Origin, RunningEnds


def shipper_of(
    rig: Rig, archive: Archive, fs: FileSystem | None = None, *, notes_place: bool = False, leader_url: str = ""
) -> Shipper:
    """Return a shipper that has begun; it reads the data directory with `fs`."""
    data_dir = rig.settings.data_dir
    origin = Origin(fs or OsFileSystem(), data_dir, RunningEnds(rig.shared.control.moment_ends))
    own_id = service_id.keep_id(OsFileSystem(), data_dir)
    shipper = Shipper(archive, origin, own_id, rig.clock, leader_url=leader_url, notes_place=notes_place)
    shipper.begin()
    return shipper
