"""Calls that make the files of a copied service last, in their order: a missing one fails here.

A kill cannot show one that is missing, for the page cache survives it (docs/reliability.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.archive.follower_rig import URL
from tests.archive.test_borrowing import ship
from tests.storage.unsynced import UnsyncedFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig, TestClock
from topics.archive.directory_copy import DirectoryCopy
from topics.archive.promoting import finish_promotion
from topics.archive.replica import Replica, begin_anew
from topics.archive.restoring import Restore, WantedMoment, plan
from topics.storage import layout
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import OsFileSystem
from topics.storage.follow_note import read_note
from topics.storage.logfile import WalPosition

NOTED = ["fdatasync following.json.tmp", "rename following.json", "fsync_dir meta"]


@pytest.fixture
def fs() -> UnsyncedFileSystem:
    return UnsyncedFileSystem()


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """The archive of a service with a segment, and records behind its snapshot."""
    (tmp_path / "origin").mkdir()
    rig = Rig(str(tmp_path / "origin"))
    compaction = Compaction(rig)
    rig.append("t", b"1", b"2")
    compaction.cut()
    rig.append("t", b"3")
    found = Archive(open_archive(OsFileSystem(), str(tmp_path / "archive")))
    ship(rig, found)
    return found


def copy_of(fs: UnsyncedFileSystem, root: Path) -> DirectoryCopy:
    """A directory with two log files of 8 bytes."""
    copy = DirectoryCopy(fs, str(root), 1, "an archive")
    directory = Path(copy.log_directory(0))
    directory.mkdir(parents=True)
    for number in (1, 2):
        Path(layout.log_path(str(directory), number)).write_bytes(b"8 bytes.")
    return copy


def test_a_log_that_is_laid_out(fs: UnsyncedFileSystem, tmp_path: Path) -> None:
    copy = copy_of(fs, tmp_path)
    copy.sync_log(0, WalPosition(1, 4), WalPosition(1, 8))
    assert fs.lasting == ["fdatasync wal-#.log"]
    fs.lasting.clear()
    copy.sync_log(0, WalPosition(1, 4), WalPosition(2, 8))
    assert fs.lasting == ["fdatasync wal-#.log", "fdatasync wal-#.log", "fsync_dir wal"]
    fs.lasting.clear()
    copy.cut_behind(0, WalPosition(1, 4))
    assert fs.lasting == ["fsync_dir wal"], "the file that is cut is synced with all others, at the end"


def test_deletions_that_are_marked_in_a_segment(fs: UnsyncedFileSystem, tmp_path: Path) -> None:
    Path(tmp_path, "0.data").write_bytes(b"a segment")
    copy_of(fs, tmp_path).mark_deleted("0.data", b"")
    assert fs.lasting == ["fdatasync 0.data"]


def test_a_restored_directory_is_whole_when_it_gets_its_name(
    fs: UnsyncedFileSystem, tmp_path: Path, archive: Archive
) -> None:
    target = str(tmp_path / "restored")
    Restore(archive, plan(archive, WantedMoment()), fs, target, lambda *_: None, None).run(TestClock())
    assert fs.lasting[-3:] == ["sync_all restored.restoring", "rename restored", f"fsync_dir {tmp_path.name}"]


def test_a_base_is_on_the_disk_before_the_note_of_it_and_a_promotion_before_its_end(
    fs: UnsyncedFileSystem, tmp_path: Path, archive: Archive
) -> None:
    data_dir = str(tmp_path / "followed")
    begin_anew(OsFileSystem(), data_dir, URL)
    replica = Replica(archive, fs, data_dir, 1, TestClock())
    note = read_note(OsFileSystem(), data_dir)
    assert note is not None
    assert replica.begin(note)
    first_note = fs.lasting.index("rename following.json")
    assert "sync_all followed" in fs.lasting[:first_note]
    assert fs.lasting[-len(NOTED) :] == NOTED
    fs.lasting.clear()
    finish_promotion(fs, data_dir, TestClock())
    assert fs.lasting[-1 - len(NOTED) :] == ["sync_all followed", *NOTED]
