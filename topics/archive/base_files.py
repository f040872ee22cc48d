"""The files of a base: the segments that a snapshot lists, copied into the archive as far as it does not have them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from threading import Event
from typing import Final

from xxhash import xxh3_64_intdigest

from topics.storage.archive_objects import ArchiveDamagedError, ArchiveStore, FileRef, LogStart, file_name, read_whole
from topics.storage.origin import ListedSegment, Origin, OriginGoneError, SegmentFile, listed_segments
from topics.storage.segment import index_digest
from topics.storage.snapshot import Snapshot, load_snapshot

COPIERS: Final = 8
"""Segments that are copied at a time: most of the time of a bucket is waiting."""


class BaseFiles:
    """Copies the files of one base into a generation of the archive. Owns the copying, not the objects.

    `known` are files that the archive has already, by path. `told` hears how many bytes of how many were looked at.
    """

    def __init__(
        self,
        store: ArchiveStore,
        origin: Origin,
        generation: int,
        snapshot: Snapshot | None,
        starts: list[LogStart],
        known: Mapping[str, FileRef],
        told: Callable[[int, int], None],
    ) -> None:
        self.starts = starts
        self.body = b"" if snapshot is None else snapshot.body
        self.refs: dict[str, FileRef] = {}
        """All files, by their paths, once they are copied."""
        self.put_bytes = self.put_objects = 0
        self.has_unread = False
        """True if a file cannot be read, here or in the cold tier: no fault of the archive."""
        self._store = store
        self._origin = origin
        self._generation = generation
        self._segments = [] if snapshot is None else list(listed_segments(snapshot))
        self._known = known
        self._told = told
        self._is_over = Event()

    def copy(self) -> None:
        """Copy the files. Raise OriginGoneError if one was removed (begin another base), OSError, EOFError."""
        done, total = 0, sum(segment.data.size_bytes or 0 for segment in self._segments)
        with ThreadPoolExecutor(COPIERS, "base") as pool:
            works = {pool.submit(self._copy, segment): segment for segment in self._segments}
            try:
                for work in as_completed(works):
                    for ref, put_bytes in work.result():
                        self.refs[ref.path] = ref
                        self.put_bytes += put_bytes
                        self.put_objects += put_bytes > 0
                    done += works[work].data.size_bytes or 0
                    self._told(done, total)
            except OriginGoneError as gone:
                newest = load_snapshot(self._origin.fs, self._origin.data_dir)
                if newest is None or newest.body != self.body:
                    raise
                way_out = "if the next one does, too, mount its disk or restore it from a copy"
                self.has_unread = True
                raise FileNotFoundError(errno.ENOENT, f"{gone}, and the newest snapshot lists it: {way_out}") from gone
            finally:
                self._is_over.set()
                pool.shutdown(cancel_futures=True)

    def give_up(self) -> None:
        """Make `copy` raise soon, in whatever thread it runs."""
        self._is_over.set()

    def _copy(self, segment: ListedSegment) -> list[tuple[FileRef, int]]:
        """Copy the files of a segment; return them, each with the bytes that were put for it."""
        if self._is_over.is_set():
            raise InterruptedError("the base was given up")
        idx = self._read(segment.idx)
        # Data and tags never change, but for marks of deletions: offsets, lengths and times of records identify them.
        identity = index_digest(idx)
        copied = [self._copy_file(segment.data, identity)]
        if segment.tags is not None:
            copied.append(self._copy_file(segment.tags, identity))
        # The index is read last: a deletion marks the frame in the data first, then the index.
        idx = self._read(segment.idx)
        copied.insert(0, self._copy_file(segment.idx, xxh3_64_intdigest(idx), idx))
        return copied

    def _read(self, file: SegmentFile) -> bytes:
        try:
            return self._origin.read_segment_file(file)
        except (OSError, EOFError):
            self.has_unread = True
            raise

    def _copy_file(self, file: SegmentFile, identity: int, content: bytes | None = None) -> tuple[FileRef, int]:
        _, topic, own = file.path.split("/")
        size = "" if file.size_bytes is None else f"-{file.size_bytes}"
        stem = file_name(self._generation, f"{topic}-{identity:016x}{size}-")
        known = self._known.get(file.path)
        if known is not None and known.name.startswith(stem):
            return known, 0
        if content is None:
            content = self._read(file)
        digest = xxh3_64_intdigest(content)
        other_name = f"{stem}{digest:016x}-{own}"
        # A base may have an object of the first name already, read when other records were marked as deleted.
        for name in (f"{stem}{own}", other_name):
            is_new = self._store.create(name, content)
            with suppress(ArchiveDamagedError):
                if read_whole(self._store, name) == content:
                    return FileRef(file.path, name, len(content), digest), len(content) if is_new else 0
        raise OSError(errno.EIO, "gives other bytes than were put there", self._store.place(other_name))
