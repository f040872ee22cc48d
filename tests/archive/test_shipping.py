"""The shipper makes another base if that lets something be pruned, and none for nothing."""

from __future__ import annotations

from pathlib import Path

from tests.archive.shippers import shipper_of
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.archive.inspection import prune
from topics.shm.topic_messages import DeleteRecords
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import OsFileSystem


def test_what_was_deleted_leaves_with_the_next_base_though_nothing_was_written_since(tmp_path: Path) -> None:
    """There was no next base until something was written: what was deleted stayed, whatever was pruned."""
    (tmp_path / "data").mkdir()
    rig = Rig(str(tmp_path / "data"), segment_max_events="4")
    archive = Archive(open_archive(OsFileSystem(), str(place := tmp_path / "archive")))
    compaction = Compaction(rig)
    for number in range(10):
        rig.append("t", b"secret-%d" % number)
    compaction.cut()
    rig.call(DeleteRecords("t", 9, None, b""))
    shipper_of(rig, archive).base()
    compaction.cut()
    compaction.compactor.upkeep()
    for _ in range(2):
        shipper_of(rig, archive).base()
    assert len(archive.bases(1)) == 2, "one more, since there is less; and none for nothing"
    assert prune(archive, rig.clock.ms + 1).bases == 1
    assert not [path for path in place.rglob("*") if path.is_file() and b"secret-0" in path.read_bytes()]
    rig.shard.close()
    rig.close()
