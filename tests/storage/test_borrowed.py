"""The note of what a restored directory borrows, and where cold data are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from topics.storage.archive_objects import FileRef, open_archive
from topics.storage.borrowed import BorrowedNote, cold_source, open_cold, read_borrowed, remove_borrowed, write_borrowed
from topics.storage.filesystem import OsFileSystem
from topics.storage.segment_store import open_store

FS = OsFileSystem()
LENT = "00000000000000aa/seg-00000000000000000001.data"
OWN = "00000000000000aa/seg-00000000000000000009.data"
OBJECT = "g00000001.files/lent"


def note(place: Path) -> BorrowedNote:
    return BorrowedNote(str(place), "loans/x", [FileRef(f"topics/{LENT}", OBJECT, 4, 0)])


def test_the_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_borrowed(FS, str(tmp_path)) is None
    write_borrowed(FS, str(tmp_path), note(tmp_path))
    assert read_borrowed(FS, str(tmp_path)) == note(tmp_path)
    for _ in range(2):  # it may be repeated
        remove_borrowed(FS, str(tmp_path))
        assert read_borrowed(FS, str(tmp_path)) is None


@pytest.mark.parametrize("content", [b"", b"{}", b'{"place":"x","loan":"y","files":[],"version":2}'])
def test_a_damaged_note_is_never_taken_for_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "borrowed.json").write_bytes(content)
    with pytest.raises(OSError, match=r"borrowed\.json.*restore the directory again|restore the directory again"):
        read_borrowed(FS, str(tmp_path))


def test_borrowed_data_are_read_in_the_archive_and_others_in_the_own_tier(tmp_path: Path) -> None:
    archive, cold_dir = tmp_path / "archive-of-it", tmp_path / "cold"
    open_archive(FS, str(archive)).put(OBJECT, [b"lent"])
    own = open_store(FS, str(cold_dir))
    own.put(OWN, [b"its own"])
    source = cold_source(FS, note(archive), own)
    assert source is not None
    assert (source.read_range(LENT, 1, 2), source.len(LENT), source.exists(LENT)) == (b"en", 4, True)
    assert (source.read_range(OWN, 0, 7), source.len(OWN), source.exists(OWN)) == (b"its own", 7, True)
    assert source.place(LENT) == str(archive / "archive" / OBJECT)
    assert source.place(OWN) == str(cold_dir / "topics" / OWN)
    assert source.has(LENT)
    assert source.has(OWN)


def test_a_service_without_a_cold_tier_has_what_it_borrows_and_nothing_else(tmp_path: Path) -> None:
    assert open_cold(FS, str(tmp_path), None) is None
    write_borrowed(FS, str(tmp_path), note(tmp_path))
    source = open_cold(FS, str(tmp_path), None)
    assert source is not None
    assert source.has(LENT)
    assert not source.has(OWN)
    with pytest.raises(FileNotFoundError, match="TOPICS_COLD_URL"):
        source.read_range(OWN, 0, 1)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "archive" / OBJECT)):
        source.read_range(LENT, 0, 1)
