"""A shard's use of segment files: it reads index entries and tags, and marks deletions.

The compactor writes everything else in these files. The shard marks a deletion as soon as it is logged. The compactor
syncs the marks before it makes a snapshot that relies on them. If an index cannot take a mark, the shard keeps the mark
in memory and tries again; until then no snapshot is made (`is_marked`). If only the frame cannot be marked, the mark in
the index is enough. If the index is missing or too short, nobody can read its records, so no snapshot waits for it: a
copy that is restored later has the marks that it had when it was copied.
"""

from __future__ import annotations

import errno
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress, islice
from typing import Final, NamedTuple

from topics.core.location import ENTRY_WORDS, LOCATION_DELETED, LOCATION_GONE, dense_entries
from topics.core.segment_list import COLD, SEALED, SegmentInfo, SegmentKey
from topics.log import get_logger
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.segment import (
    ENTRY,
    ENTRY_FLAGS_AT,
    ENTRY_LEN,
    ENTRY_U32,
    IS_LIVE,
    LOG_FRAME_EXTRA_LEN,
    CommittedFile,
    CorruptSegment,
    entries_of_idx,
)
from topics.storage.segment_deletes import mark_deleted
from topics.storage.segment_reader import SegmentReader
from topics.walshard.hosted.segment_tags import SegmentTags

log = get_logger()

INDEXES_MAX: Final = 256
_COUNTS_AT_ONCE: Final = 32
_COUNTED_RECORDS_AT_ONCE: Final = 1 << 16
"""Records that one `count_some` counts, unless its first segment has more: some ms."""
_WAIT_MAX: Final = 64
"""Calls of `mark_again` at most between two tries to mark deletions in a damaged segment."""
_FOR_NOW: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""Errors that a lack of file descriptors or memory causes, and that say nothing about the file."""
_DELETED_TABLE: Final = bytes(1 if flags & LOCATION_DELETED else 0 for flags in range(256))


class _Due(NamedTuple):
    """Deleted records (ascending seqs) of a segment that are yet to be marked. With `holds_up` snapshots wait for that.

    The next try comes after `wait` calls of `mark_again`, of which `left` are still to come.
    """

    info: SegmentInfo
    seqs: list[int]
    holds_up: bool
    wait: int = 0
    left: int = 0


class SegmentFiles:
    """Reads and marks the segment files of one shard. It owns the deletions that are yet to be marked. `tags` keeps up
    to `tags_max` files of sealed segments open.

    `entries`, `ts_at`, `live_size` and `mark` raise nothing: floors must move past a damaged segment, and one topic's
    damage must not end a shard. Records of an unreadable index count as live, with the segment's mean length and its
    latest time. All other methods raise OSError and CorruptSegment.
    """

    def __init__(self, fs: FileSystem, data_dir: str, tags_max: int) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self.tags = SegmentTags(data_dir, tags_max)
        self._indexes: OrderedDict[SegmentKey, CommittedFile] = OrderedDict()
        self._sizes: dict[SegmentKey, tuple[int, int]] = {}
        """(live records, their bytes) of whole sealed segments, so that floors can move far without a look at each."""
        self._uncounted: dict[SegmentKey, SegmentInfo] = {}
        self._all_deleted: set[SegmentKey] = set()
        """Sealed segments whose records are all known to be deleted, which none of them ceases to be."""
        self._due: dict[tuple[int, int], _Due] = {}
        """Deletions to be marked, by topic id and first seq of the segment."""
        self._unreadable: set[SegmentKey] = set()
        """Segments that could not be read. Each was logged once."""

    # -- reading

    def entries(self, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> array[int]:
        """Return index entries of these seqs as `RecordIndex.entries` does. Lengths are those of the log frames."""
        part = self._readable_part(topic_id, info, first_seq, last_seq)
        if part is None:
            return _estimated(info, first_seq, last_seq)
        entries = entries_of_idx(part, first_seq)
        extra = LOG_FRAME_EXTRA_LEN << 32
        entries[2::ENTRY_WORDS] = array("Q", [word + extra if word >> 32 else word for word in entries[2::ENTRY_WORDS]])
        for seq in self._unmarked_between(topic_id, info, first_seq, last_seq):
            entries[(seq - first_seq) * ENTRY_WORDS + 3] |= LOCATION_DELETED << 32
        return entries

    def ts_at(self, topic_id: int, info: SegmentInfo, seq: int) -> int:
        part = self._readable_part(topic_id, info, seq, seq)
        if part is None:
            return info.last_ts
        ts: int = ENTRY.unpack(part)[2]
        return ts

    def live_size(self, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> tuple[int, int]:
        """Return (records, bytes in the log) neither deleted nor lost. Sizes of whole sealed segments are kept."""
        key = info.key_in(topic_id)
        is_whole = bool(info.flags & SEALED) and (first_seq, last_seq) == (info.first_seq, info.last_seq)
        known = self._sizes.get(key) if is_whole else None
        if known is not None:
            return known
        part = self._readable_part(topic_id, info, first_seq, last_seq)
        if part is None:
            count = last_seq - first_seq + 1
            return count, count * _mean_len(info)
        unmarked = self._unmarked_between(topic_id, info, first_seq, last_seq)
        size = _live_size(part, first_seq, unmarked, info.data_bytes if is_whole else None)
        if is_whole:
            self._sizes[key] = size
        return size

    def is_readable(self, topic_id: int, info: SegmentInfo) -> bool:
        """Return False once a part of the segment was unreadable or damaged: its sizes may be estimates then."""
        return info.key_in(topic_id) not in self._unreadable

    def pick_live(self, topic_id: int, info: SegmentInfo, seqs: Sequence[int]) -> tuple[list[int], int]:
        """Return those of these seqs (ascending, all in the segment) that live, and their bytes in the log."""
        first = seqs[0]
        unmarked = set(self._unmarked_between(topic_id, info, first, seqs[-1]))
        with memoryview(self._part(topic_id, info, first, seqs[-1])).cast("I") as words:
            live = [seq for seq in seqs if not words[(seq - first) * ENTRY_U32 + 4] & LOCATION_GONE]
            if unmarked:
                live = [seq for seq in live if seq not in unmarked]
            size_bytes = sum([words[(seq - first) * ENTRY_U32 + 1] for seq in live])
        return live, size_bytes + len(live) * LOG_FRAME_EXTRA_LEN

    def is_all_deleted(self, topic_id: int, info: SegmentInfo) -> bool:
        """Return whether every record of a sealed segment is known to be deleted."""
        key = info.key_in(topic_id)
        if key in self._all_deleted:
            return True
        if not info.flags & SEALED or self._sizes.get(key, (0, 0))[0]:
            return False
        part = self._readable_part(topic_id, info, info.first_seq, info.last_seq)
        if part is None or 0 in part[ENTRY_FLAGS_AT::ENTRY_LEN].translate(_DELETED_TABLE):
            return False
        self._all_deleted.add(key)
        return True

    def deleted(self, topic_id: int, info: SegmentInfo) -> list[int]:
        """Return all seqs of the segment that are deleted, whether they have a frame or not."""
        part = self._part(topic_id, info, info.first_seq, info.last_seq)
        flags = part[ENTRY_FLAGS_AT::ENTRY_LEN]
        found = [info.first_seq + at for at, flag in enumerate(flags) if flag & LOCATION_DELETED]
        return sorted({*found, *self._unmarked_between(topic_id, info, info.first_seq, info.last_seq)})

    def reader(self, topic_id: int, info: SegmentInfo) -> SegmentReader:
        """Return a reader of index and frames. The segment must not be cold."""
        directory = layout.topic_dir(self._data_dir, topic_id)
        return SegmentReader.open(directory, info.first_seq, info.records, info.data_bytes, info.version)

    def sealed(self, topic_id: int, info: SegmentInfo) -> None:
        """Note a sealed segment, whose live records `count_some` will count."""
        key = info.key_in(topic_id)
        if key not in self._sizes:
            self._uncounted[key] = info

    def drop_replaced(self) -> None:
        """Close indexes whose files a restored copy has replaced. To be called now and then."""
        for key in [key for key, idx in self._indexes.items() if not idx.has_its_name]:
            del self._indexes[key]

    def count_some(self) -> None:
        """Count live records of some sealed segments. To be called now and then."""
        records = 0
        for key, info in list(islice(self._uncounted.items(), _COUNTS_AT_ONCE)):
            if records and records + info.records > _COUNTED_RECORDS_AT_ONCE:
                break
            records += info.records
            del self._uncounted[key]
            self.live_size(key.topic_id, info, info.first_seq, info.last_seq)

    # -- marking

    def mark(self, topic_id: int, info: SegmentInfo, seqs: Sequence[int]) -> None:
        """Mark records of the segment (ascending seqs) as deleted, now or, if a file cannot be written, later."""
        if not seqs:
            return
        self._subtract(topic_id, info, seqs)
        place = (topic_id, info.first_seq)
        due = self._due.pop(place, None)
        if due is not None:
            seqs = sorted({*due.seqs, *seqs})
        cold = bool(info.flags & COLD)
        directory = layout.topic_dir(self._data_dir, topic_id)
        try:
            defect = mark_deleted(self._fs, directory, info.first_seq, seqs, info.version, cold=cold)
        except (FileNotFoundError, CorruptSegment) as error:
            self._log_unreadable(topic_id, info, error)
            self._due[place] = _later(info, seqs, due)
        except OSError as error:
            if due is None or not due.holds_up:  # logs the first failure only: a new try follows every second
                log.error("deletions could not be marked in a segment", error=str(error), records=len(seqs))
            self._due[place] = _Due(info, list(seqs), True)
        else:
            if defect is not None:
                self._log_unreadable(topic_id, info, defect)
            if isinstance(defect, OSError) and not isinstance(defect, FileNotFoundError):
                self._due[place] = _later(info, seqs, due)

    def replaced(self, topic_id: int, old: SegmentInfo, new: SegmentInfo) -> None:
        """Note that the segment has a new file, or is longer. Mark the deletions of the old file in the new one."""
        if new.version != old.version:
            try:
                seqs = self.deleted(topic_id, old)
            except FileNotFoundError:
                seqs = []  # happens in recovery: the old files were removed after this was done in a former life
            except (OSError, CorruptSegment) as error:
                if isinstance(error, OSError) and error.errno in _FOR_NOW:
                    raise
                # This happens only in recovery, since `SegmentHandover` reads the old file first. The new version was
                # made from the old one. Later deletions are in the log and still due: the old file could not take them.
                self._log_unreadable(topic_id, old, error)
                seqs = []
            self.forget(topic_id, old, with_marks=False)
            self.mark(topic_id, new, seqs)
        due = self._due.pop((topic_id, old.first_seq), None)
        if due is not None:
            self._sizes.pop(new.key_in(topic_id), None)
            self.mark(topic_id, new, due.seqs)

    def forget(self, topic_id: int, info: SegmentInfo, *, with_marks: bool = True) -> None:
        """Forget a segment that was removed or replaced."""
        key = info.key_in(topic_id)
        self._indexes.pop(key, None)
        self.tags.forget(topic_id, info)
        self._sizes.pop(key, None)
        self._uncounted.pop(key, None)
        self._all_deleted.discard(key)
        self._unreadable.discard(key)
        if with_marks:
            self._due.pop((topic_id, info.first_seq), None)

    def mark_again(self) -> None:
        """Mark what could not be marked before. To be called now and then."""
        for place, due in list(self._due.items()):
            if due.left:
                self._due[place] = due._replace(left=due.left - 1)
            else:
                self.mark(place[0], due.info, due.seqs)

    @property
    def is_marked(self) -> bool:
        """Return whether all deletions for which snapshots wait are marked."""
        return not any(due.holds_up for due in self._due.values())

    def is_marked_of(self, topic_id: int) -> bool:
        """Return whether all deletions of one topic for which snapshots wait are marked."""
        return not any(due.holds_up for (id, _), due in self._due.items() if id == topic_id)

    def _subtract(self, topic_id: int, info: SegmentInfo, seqs: Sequence[int]) -> None:
        """Subtract records from the kept size of a segment, before they are marked."""
        key = info.key_in(topic_id)
        known = self._sizes.pop(key, None)
        if known is None:
            return
        try:
            live, size_bytes = self.pick_live(topic_id, info, seqs)
        except (OSError, CorruptSegment):
            return  # the next `live_size` counts the segment again, or estimates
        self._sizes[key] = known[0] - len(live), known[1] - size_bytes

    # -- files

    def _readable_part(self, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> bytes | None:
        try:
            return self._part(topic_id, info, first_seq, last_seq)
        except (OSError, CorruptSegment) as error:
            self._log_unreadable(topic_id, info, error)
            return None

    def _log_unreadable(self, topic_id: int, info: SegmentInfo, error: OSError | CorruptSegment) -> None:
        key = info.key_in(topic_id)
        if key not in self._unreadable:
            log.error("a segment cannot be used as a whole", topic_id=f"{topic_id:016x}", reason=str(error))
            self._unreadable.add(key)

    def _part(self, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> bytes:
        start = (first_seq - info.first_seq) * ENTRY_LEN
        return self._index(topic_id, info)[start : start + (last_seq - first_seq + 1) * ENTRY_LEN]

    def _index(self, topic_id: int, info: SegmentInfo) -> CommittedFile:
        key = info.key_in(topic_id)
        idx = self._indexes.get(key)
        length = info.records * ENTRY_LEN
        if idx is None or len(idx) < length:
            directory = layout.topic_dir(self._data_dir, topic_id)
            path = layout.segment_idx_path(directory, *key.name)
            idx = self._indexes[key] = CommittedFile(path, length)
            if len(self._indexes) > INDEXES_MAX:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(key)
        return idx

    def _unmarked_between(self, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> list[int]:
        due = self._due.get((topic_id, info.first_seq)) if self._due else None
        if due is None:
            return []
        return due.seqs[bisect_left(due.seqs, first_seq) : bisect_right(due.seqs, last_seq)]


def _later(info: SegmentInfo, seqs: Sequence[int], before: _Due | None) -> _Due:
    """Return deletions to be marked later, for which no snapshot waits. The wait doubles with each try."""
    wait = min(_WAIT_MAX, 2 * before.wait or 1) if before is not None else 0
    return _Due(info, list(seqs), False, wait, wait)


def _live_size(part: bytes, first_seq: int, unmarked: list[int], data_bytes: int | None) -> tuple[int, int]:
    """Return (live records, their bytes in the log) of index entries from `first_seq` on. `data_bytes` is the length of
    the segment's frames if the entries are of a whole segment, else None.
    """
    live = bytearray(part[ENTRY_FLAGS_AT::ENTRY_LEN].translate(IS_LIVE))
    for seq in unmarked:
        live[seq - first_seq] = 0
    records = live.count(1)
    if data_bytes is None or records < len(live):
        lengths = array("I")
        lengths.frombytes(part)
        data_bytes = sum(compress(lengths[1::5], live))
    return records, data_bytes + records * LOG_FRAME_EXTRA_LEN


def _mean_len(info: SegmentInfo) -> int:
    return info.data_bytes // info.records + LOG_FRAME_EXTRA_LEN


def _estimated(info: SegmentInfo, first_seq: int, last_seq: int) -> array[int]:
    count = last_seq - first_seq + 1
    return dense_entries(first_seq, info.last_ts, array("Q", [_mean_len(info) << 32]) * count, array("Q", [0]) * count)
