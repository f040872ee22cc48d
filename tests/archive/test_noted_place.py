"""A service notes in its directory where it has its archive, and nobody begins another one there while that is away."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.archive.shippers import shipper_of
from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.rig import Rig
from topics.archive.shipping import Shipper
from topics.storage import service_id
from topics.storage.archive_objects import Archive, open_archive
from topics.storage.filesystem import FileSystem, OsFileSystem
from topics.storage.notes import note_path
from topics.storage.service_id import ArchiveNote

FS = OsFileSystem()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    (tmp_path / "data").mkdir()
    rig = Rig(str(tmp_path / "data"))
    rig.append("t", b"1")
    yield rig
    rig.shard.close()
    rig.close()


def begin(rig: Rig, place: str, *, notes_place: bool = True, fs: FileSystem = FS) -> Shipper:
    return shipper_of(rig, Archive(open_archive(FS, place)), fs, notes_place=notes_place)


def test_a_backup_begins_no_archive_where_that_of_its_service_is_away(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did, by the id of the service, whose archiver waited for the disk, and went on there then."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "archive"
    begin(rig, place.as_uri())
    place.rename(tmp_path / "away")
    for named in (str(place), "archive"):
        with pytest.raises(FileNotFoundError, match="had its archive there: mount its disk"):
            begin(rig, named, notes_place=False)
    assert not place.exists()
    begin(rig, "elsewhere", notes_place=False)
    assert service_id.archive_note(FS, rig.settings.data_dir) == ArchiveNote(f"{place}/archive/")


def test_an_archive_that_is_there_is_shipped_into_whatever_the_note_is_like(rig: Rig, tmp_path: Path) -> None:
    """A damaged note, or a disk on which it cannot be written, kept everything out of the archive."""
    data_dir, place = rig.settings.data_dir, str(tmp_path / "archive")
    fs = FaultyFileSystem()
    fs.arm(Fault(1, errno.ENOSPC, calls=frozenset({"rename"})))
    with capture_logs() as logs:
        begin(rig, place, fs=fs)
    assert "cannot be noted" in logs[-1]["event"]
    assert service_id.archive_note(FS, data_dir) is None
    for content in (b"", b"{}"):
        Path(note_path(data_dir, service_id.ARCHIVE_NAME)).write_bytes(content)
        begin(rig, place)
        assert service_id.archive_note(FS, data_dir) == ArchiveNote(f"{place}/archive/")
