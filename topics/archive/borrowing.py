"""Borrowing: data of sealed segments stay in the archive at first, and a loan keeps them there (`storage/borrowed.py`).

A restored service brings them home by rewriting (`compactor/loan.py`). A replica has no compactor: its process fetches
them, and the shards load a snapshot in which they are here.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Container
from concurrent.futures import Executor, Future
from typing import Final

import msgspec

from topics.archive.directory_copy import DirectoryCopy, fetched_ahead
from topics.core.clock import Clock
from topics.log import get_logger
from topics.storage.archive_objects import Archive, ArchiveDamagedError, Base, FileRef, base_name, loan_name
from topics.storage.borrowed import BorrowedNote, end_loan, read_borrowed, remove_borrowed, write_borrowed
from topics.storage.filesystem import FileSystem, said

BATCH_BYTES: Final = 16 << 20
"""Most bytes of one fetch, unless it is of one larger object. The follower takes moments in between."""
BATCH_MS: Final = 1000
LAID_OUT_MS: Final = 20
"""Time for laying out data between two moments. Each file is synced, so it may take longer than this."""
RETRY_MS: Final = 10_000
_READ_ONLY: Final = (errno.EACCES, errno.EPERM, errno.EROFS)

log = get_logger()


class NoLoanError(OSError):
    """A loan cannot be created: the archive is read-only, or cannot be reached."""


def borrow(
    archive: Archive, generation: int, base: Base, fs: FileSystem, data_dir: str, place: str, who: str
) -> dict[str, FileRef]:
    """Have the archive keep the files of a base's sealed segments, and note which data stay there; return these by
    their paths. `place` is the archive's, and `who` tells people whose loan it is.

    Raise NoLoanError, ArchiveDamagedError if a file is not there any more, OSError. An error may leave the note behind.
    """
    sealed = {stem for stem, kind in (os.path.splitext(ref.path) for ref in base.files) if kind == ".tags"}
    files = [ref for ref in base.files if os.path.splitext(ref.path)[0] in sealed]
    if not files:
        return {}
    place = place if "://" in place else os.path.abspath(place)
    note = BorrowedNote(place, loan_name(generation, base.number), files)
    write_borrowed(fs, data_dir, note)  # first: after a kill the next try can end the loan
    try:
        archive.store.create(note.loan, who.encode())
    except OSError as error:
        if error.errno in _READ_ONLY:
            remove_borrowed(fs, data_dir)  # there is no loan to end
        raise NoLoanError(error.errno, f"cannot be created ({said(error)})", archive.store.place(note.loan)) from error
    # A pruning that has not seen the loan removes the base first. So the base is looked for last.
    there = {
        name for folder in {ref.name.partition("/")[0] for ref in files} for name in archive.store.list(f"{folder}/")
    }
    missing = [ref.name for ref in files if ref.name not in there]
    if missing or not archive.has_base(generation, base.number):
        name = missing[0] if missing else base_name(generation, base.number)
        raise ArchiveDamagedError(f"{archive.store.place(name)}: is missing")
    return {ref.path: ref for ref in files if ref.path.endswith(".data")}


class Homecoming:
    """The data of a replica that are still in the archive, and their way here. Owns the note of them, and the loan.

    Readers take data from the data directory as soon as they are there (`frontend/reads/files.py`). The segment is cold
    until the shards load the next snapshot, and until then they mark deletions in its index alone. The logs behind that
    snapshot have these deletions, so the shards mark them in the data as they load it.
    """

    def __init__(self, archive: Archive, fs: FileSystem, data_dir: str, copy: DirectoryCopy, clock: Clock) -> None:
        self._archive = archive
        self._fs = fs
        self._data_dir = data_dir
        self._copy = copy
        self._clock = clock
        self.missing: dict[str, FileRef] = {}
        """Data that are not here, by their paths."""
        self._note: BorrowedNote | None = None
        self._is_home = False
        """True once no snapshot that a start may use lists a borrowed segment."""
        self._coming: Future[list[tuple[FileRef, bytes | Exception]]] | None = None
        self._arrived: deque[tuple[FileRef, bytes | Exception]] = deque()
        """Data that were fetched and are not laid out, or the errors of their fetches."""
        self._not_before_ms = 0

    def begin(self, generation: int, base: Base, place: str) -> None:
        """Borrow the data of a base, of which nothing is here. A read-only archive lends nothing: then `missing` is
        empty, and the caller copies everything. Raise ArchiveDamagedError, OSError: begin again.
        """
        self._take_note()
        former = "" if self._note is None else self._note.loan
        try:
            self._end()  # the loan of an earlier try, or of a copy that was given up
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            loan = self._archive.store.place(former)
            log.warning("the loan of a copy before cannot be ended: delete it", loan=loan, reason=said(error))
            remove_borrowed(self._fs, self._data_dir)
        who = f"{os.uname().nodename}:{self._data_dir}"
        try:
            self.missing = borrow(self._archive, generation, base, self._fs, self._data_dir, place, who)
        except NoLoanError as error:
            if error.errno not in _READ_ONLY:
                raise
            log.warning("everything is copied before anything is served: nothing can be borrowed", reason=said(error))
        self._note = read_borrowed(self._fs, self._data_dir)

    def go_on(self) -> None:
        """Go on where the directory's note says. Raise OSError."""
        self._take_note()
        if self._note is not None:
            data = (ref for ref in self._note.files if ref.path.endswith(".data"))
            self.missing = {ref.path: ref for ref in data if self._is_missing(ref.path)}

    def _is_missing(self, data_path: str) -> bool:
        """Return whether data are to be fetched. If a later base has dropped their segment, its index is gone, too."""
        idx_path = data_path.removesuffix(".data") + ".idx"
        data_is_here, idx_is_here = (
            self._fs.exists(os.path.join(self._data_dir, one)) for one in (data_path, idx_path)
        )
        return idx_is_here and not data_is_here

    def _take_note(self) -> None:
        self._note = read_borrowed(self._fs, self._data_dir)
        self.missing, self._is_home, self._coming = {}, False, None
        self._arrived.clear()

    def keep_only(self, files: Container[str]) -> None:
        """Fetch only data that another base has, too: `files` are its paths. That base may have other objects for
        these, with more deletions.
        """
        self.missing = {path: ref for path, ref in self.missing.items() if path in files}

    @property
    def missing_bytes(self) -> int:
        return sum(ref.size_bytes for ref in self.missing.values())

    def step(self, helper: Executor) -> Exception | None:
        """Lay out fetched data for LAID_OUT_MS, and have the helper fetch more. Return the first error of data that
        could not be fetched or laid out, if any. These are fetched again later.
        """
        failure: Exception | None = None
        if self._coming is not None and self._coming.done():
            self._arrived.extend(self._coming.result())
            self._coming = None
        until_ms = self._clock.monotonic_ms() + LAID_OUT_MS
        while self._arrived and self._clock.monotonic_ms() < until_ms:
            ref, content = self._arrived.popleft()
            if ref.path in self.missing and (error := self._lay_out(ref, content)) is not None:
                failure = failure or error
                self.missing[ref.path] = self.missing.pop(ref.path)  # the others come first
        now_ms = self._clock.monotonic_ms()
        if failure is not None:
            self._not_before_ms = now_ms + RETRY_MS
        if self.missing and self._coming is None and not self._arrived and now_ms >= self._not_before_ms:
            self._not_before_ms = now_ms + BATCH_MS
            self._coming = helper.submit(self._fetch, self._next_batch())
        return failure

    def _lay_out(self, ref: FileRef, content: bytes | Exception) -> Exception | None:
        if isinstance(content, Exception):
            return content
        try:
            self._copy.replace(ref.path, content)
        except OSError as error:
            return error
        del self.missing[ref.path]
        return None

    def _next_batch(self) -> list[FileRef]:
        batch: list[FileRef] = []
        size_bytes = 0
        for ref in self.missing.values():
            size_bytes += ref.size_bytes
            if batch and size_bytes > BATCH_BYTES:
                break
            batch.append(ref)
        return batch

    def _fetch(self, refs: list[FileRef]) -> list[tuple[FileRef, bytes | Exception]]:
        """Fetch data, on the helper's thread."""

        def content(ref: FileRef) -> bytes | Exception:
            try:
                return self._archive.file(ref)
            except (OSError, ArchiveDamagedError) as error:
                return error

        return list(fetched_ahead(content, refs))

    def narrow(self) -> None:
        """Write snapshots and the note so that the next start counts only missing data as borrowed. A service that
        leads may have a segment of the same name in its cold tier. Raise OSError.
        """
        if self._note is None:
            return
        for _ in range(2):  # a start may have to use the older one
            self._copy.save_snapshot_again(self.missing)
        missing = {os.path.splitext(path)[0] for path in self.missing}
        files = [ref for ref in self._note.files if os.path.splitext(ref.path)[0] in missing]
        self._note = msgspec.structs.replace(self._note, files=files)
        write_borrowed(self._fs, self._data_dir, self._note)

    def come_home(self) -> bool:
        """Take the next step once nothing is missing, and all shards have loaded the newest snapshot. The first step
        writes snapshots without borrowed data: True, the shards have to load them. The second ends the loan. Raise
        OSError.
        """
        if self._note is None or self.missing:
            return False
        if self._is_home:
            self._end()
            log.info("all data are here: the archive is not needed for them any more")
            return False
        self.narrow()
        self._is_home = True
        return True

    def _end(self) -> None:
        if self._note is not None:
            end_loan(self._fs, self._data_dir, self._note, self._archive.store)
            self._note = None
