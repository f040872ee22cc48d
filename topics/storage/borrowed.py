"""The segment data that a restored directory borrows: the data are still in the archive that it was restored from.

    <data dir>/meta/borrowed.json

A restore copies logs, indexes and tags, and a snapshot in which all sealed segments are cold. This note says under
which names the archive has the segments' data, so readers find them there like the data of any other cold segment. The
compactor copies one segment after the other into the directory as a new version (`compactor/loan.py`). Once no snapshot
lists a borrowed segment, it removes the note and the loan, the object that keeps the archive from pruning the files.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec

from topics.storage import layout
from topics.storage.archive_objects import Archive, ArchiveDamagedError, ArchiveStore, FileRef, open_archive
from topics.storage.filesystem import FileSystem
from topics.storage.notes import VERSION, note_path, read_note_file, write_note_file
from topics.storage.segment_store import WHOLE_OBJECT_MS, SegmentSource, SegmentStore, open_store

NAME: Final = "borrowed.json"


class BorrowedNote(msgspec.Struct, frozen=True):
    """The content of the note. `place` is the archive, a directory or a URL; the object `loan` there protects its
    files. `files` lists all files of the borrowed segments, with their indexes and tags.
    """

    place: str
    loan: str
    files: list[FileRef]
    version: int = VERSION

    def names(self) -> dict[str, str]:
        """Return the names of the archive's objects, by the names that a cold tier would give them."""
        return {ref.path.partition("/")[2]: ref.name for ref in self.files}


def read_borrowed(fs: FileSystem, data_dir: str) -> BorrowedNote | None:
    """Return the note, None if nothing is borrowed. Raise OSError, also for a damaged note: if it counted as none, data
    would be missing.
    """
    return read_note_file(fs, data_dir, NAME, BorrowedNote, "restore the directory again")


def write_borrowed(fs: FileSystem, data_dir: str, note: BorrowedNote) -> None:
    """Write the note durably. Raise OSError."""
    write_note_file(fs, data_dir, NAME, msgspec.json.encode(note))


def remove_borrowed(fs: FileSystem, data_dir: str) -> None:
    """Remove the note durably. Raise OSError."""
    with suppress(FileNotFoundError):
        fs.unlink(note_path(data_dir, NAME))
    fs.fsync_dir(layout.meta_dir(data_dir))


def end_loan(fs: FileSystem, data_dir: str, note: BorrowedNote, store: ArchiveStore) -> None:
    """End the loan, so that the archive may prune the files, and remove the note. Raise OSError, also if no archive is
    there: its disk may not be mounted, and the loan would stay on it for ever.
    """
    numbers: list[int] = []
    with suppress(ArchiveDamagedError):  # other objects are there, as of an archive that is half mounted
        numbers = Archive(store).generations()
    if not numbers:
        reason = "has no archive now: mount its disk; if it is gone for good, remove meta/borrowed.json and start again"
        raise FileNotFoundError(errno.ENOENT, reason, store.place(""))
    Archive(store).end_loan(note.loan)
    remove_borrowed(fs, data_dir)


class ColdSource:
    """The data of all cold segments: borrowed ones are read in the archive, the others in the service's own cold tier.
    It only reads.
    """

    def __init__(self, own: SegmentStore | None, lender: ArchiveStore | None, names: Mapping[str, str]) -> None:
        """`names` are the objects of the lender, by the names that the cold tier would give them."""
        self._own = own
        self._lender = lender
        self._names = names

    def has(self, name: str) -> bool:
        """Return whether there is a store in which this object should be."""
        return self._own is not None or name in self._names

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        store, found = self._where(name)
        return store.read_range(found, offset, length)

    def exists(self, name: str) -> bool:
        store, found = self._where(name)
        return store.exists(found)

    def len(self, name: str) -> int:
        store, found = self._where(name)
        return store.len(found)

    def place(self, name: str) -> str:
        store, found = self._where(name)
        return store.place(found)

    def _where(self, name: str) -> tuple[SegmentSource, str]:
        if self._lender is not None and (borrowed := self._names.get(name)) is not None:
            return self._lender, borrowed
        if self._own is None:
            reason = "is in the cold tier, and neither TOPICS_COLD_DIR nor TOPICS_COLD_URL is set"
            raise FileNotFoundError(errno.ENOENT, reason, name)
        return self._own, name


def cold_source(
    fs: FileSystem, note: BorrowedNote | None, own: SegmentStore | None, timeout_ms: int = WHOLE_OBJECT_MS
) -> ColdSource | None:
    """Return the data of all cold segments; None if there can be none. `own` is the service's cold tier."""
    if note is None:
        return None if own is None else ColdSource(own, None, {})
    return ColdSource(own, open_archive(fs, note.place, timeout_ms), note.names())


def open_cold(
    fs: FileSystem, data_dir: str, cold_place: str | None, timeout_ms: int = WHOLE_OBJECT_MS
) -> ColdSource | None:
    """Return the data of all cold segments of a directory; None if there can be none. Raise OSError."""
    own = None if cold_place is None else open_store(fs, cold_place, timeout_ms)
    return cold_source(fs, read_borrowed(fs, data_dir), own, timeout_ms)
