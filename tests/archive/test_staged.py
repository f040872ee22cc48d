"""Stages of commits over topics may be many bytes. Those who ship them, or tell followers of them, read each once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.walshard.rig import Rig
from topics.archive.restoring import Restore, WantedMoment, plan
from topics.archive.shipping import Shipper
from topics.frontend.txn.coordinator import Stages
from topics.storage import layout, service_id
from topics.storage.archive_objects import Archive, LogEnd, open_archive
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import lay_out
from topics.storage.logfile import WalPosition
from topics.storage.origin import Origin, OriginGoneError, RunningEnds, read_tail

FS = OsFileSystem()


class Counting(OsFileSystem):
    """Counts how often a stage is read."""

    reads = 0

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self.reads += path.endswith(".stage")
        return super().open(path, flags, mode)


def test_a_stage_is_read_once(tmp_path: Path) -> None:
    """It was for each moment, and 30 times a second for each follower: a gigabyte in memory, say, for a large batch."""
    data_dir, restored = str(tmp_path / "data"), str(tmp_path / "restored")
    os.mkdir(data_dir)
    rig = Rig(data_dir)
    rig.append("t", b"1")
    staged = Stages(data_dir, 3_600_000, lambda: 1 << 40).make("t", "txn", lay_out([(b"", b"", b'"staged"', b"")]))
    archive, fs = Archive(open_archive(FS, str(tmp_path / "archive"))), Counting()
    origin = Origin(fs, data_dir, RunningEnds(rig.shared.control.moment_ends))
    shipper = Shipper(archive, origin, service_id.keep_id(FS, data_dir), rig.clock)
    shipper.begin()
    for _ in range(5):
        with pytest.raises(OriginGoneError):  # there is no base yet
            shipper.ship()
    files = shipper.begin_base()
    files.copy()
    for number in range(5):
        rig.append("t", b"%d" % number)
        shipper.ship()
    assert not shipper.is_based
    assert fs.reads == 0
    shipper.end_base(files)
    assert fs.reads == 1
    fs.reads = 0
    for number in range(5):
        rig.append("t", b"%d" % number)
        shipper.ship()
    assert fs.reads == 0
    for _ in range(5):
        with pytest.raises(OriginGoneError):
            read_tail(origin, [LogEnd(0, 1, WalPosition(1, 0))], rig.clock.ms, "")
    assert fs.reads == 1
    assert all(read_tail(origin, [], rig.clock.ms, "") for _ in range(5))
    assert fs.reads == 1
    rig.shard.close()
    rig.close()
    Restore(archive, plan(archive, WantedMoment()), FS, restored, lambda *_: None).run(rig.clock)
    [there], [here] = (list(Path(layout.stages_dir(place)).iterdir()) for place in (data_dir, restored))
    assert here.name == there.name == f"{staged}.stage"
    assert here.read_bytes() == there.read_bytes()
