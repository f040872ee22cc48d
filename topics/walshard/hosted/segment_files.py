"""The files of segments as a shard uses them: entries of their indexes, deletions marked in them, their tags.

The compactor writes everything else in them. A shard marks what it has logged as deleted, at once; the marks are on the
disk before a snapshot takes them for done, which is the compactor's affair. What an index could not be told is kept and
told later: until then this process knows of it, and no snapshot is made (`is_marked`). Where a frame could not be
marked the index has it all the same, and that is enough. Of an index that is missing or too short nobody can read a
record, so no snapshot waits for that: whoever restores it from a copy later restores what the copy has.
"""

from __future__ import annotations

import errno
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress, islice
from typing import Final, NamedTuple

from topics.core.location import ENTRY_WORDS, LOCATION_DELETED, LOCATION_GONE
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.log import get_logger
from topics.storage import layout
from topics.storage.committed_file import CommittedFile
from topics.storage.filesystem import FileSystem
from topics.storage.segment import (
    ENTRY,
    ENTRY_FLAGS_AT,
    ENTRY_LEN,
    LOG_FRAME_EXTRA_LEN,
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
"""So many segments, and as a rule so many records: some ms."""
_WAIT_MAX: Final = 64
"""Occasions (`mark_again`) that are let pass, at most, before another try at what a try is not likely to help."""
_FOR_NOW: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""What these say is about the process, not about a file."""
_ENTRY_U32: Final = ENTRY_LEN // 4
_DELETED_TABLE: Final = bytes(1 if flags & LOCATION_DELETED else 0 for flags in range(256))
_LIVE_TABLE: Final = bytes(0 if flags & LOCATION_GONE else 1 for flags in range(256))


class SegmentKey(NamedTuple):
    """One segment's files."""

    topic_id: int
    first_seq: int
    version: int


class _Due(NamedTuple):
    """Deleted records (ascending seqs) of a segment that are not marked everywhere; whether snapshots wait for it.

    It is tried again after `wait` occasions, of which `left` are still to come: at each one if snapshots wait.
    """

    info: SegmentInfo
    seqs: list[int]
    holds_up: bool
    wait: int = 0
    left: int = 0


class SegmentFiles:
    """Of all topics of one shard. `tags`: of their sealed segments, so many of whose files stay open: `tags_max`.

    `entries`, `ts_at` and `live_size` raise nothing: floors must move past a damaged segment, and one topic's damage
    take down no shard. Where an index cannot be read, its records count as live, of the segment's mean length and its
    latest time. Marking raises nothing either; everything else OSError and CorruptSegment.
    """

    def __init__(self, fs: FileSystem, data_dir: str, tags_max: int) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self.tags = SegmentTags(data_dir, tags_max)
        self._indexes: OrderedDict[SegmentKey, CommittedFile] = OrderedDict()
        self._sizes: dict[SegmentKey, tuple[int, int]] = {}
        """What lives in whole sealed segments: floors that move far cost no look at each record."""
        self._uncounted: dict[SegmentKey, SegmentInfo] = {}
        self._all_deleted: set[SegmentKey] = set()
        """Of which it is known: no record of them comes back."""
        self._due: dict[tuple[int, int], _Due] = {}
        """By topic id and first seq."""
        self._unreadable: set[SegmentKey] = set()
        """Said once each."""

    # -- reading

    def entries(self, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> array[int]:
        """Entries of first_seq..last_seq, in that segment, as `RecordIndex.entries`: `len` is that of the log frame."""
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
        """(records, bytes in the log) of what is neither deleted nor lost. All of a sealed segment is most often known;
        else it is counted, by column.
        """
        key = SegmentKey(topic_id, info.first_seq, info.version)
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
        """False once something of it could not be read, or was damaged: its sizes may be estimates."""
        return SegmentKey(topic_id, info.first_seq, info.version) not in self._unreadable

    def pick_live(self, topic_id: int, info: SegmentInfo, seqs: Sequence[int]) -> tuple[list[int], int]:
        """Which of these seqs (ascending, in that segment) are live, and their bytes in the log."""
        first = seqs[0]
        unmarked = set(self._unmarked_between(topic_id, info, first, seqs[-1]))
        with memoryview(self._part(topic_id, info, first, seqs[-1])).cast("I") as words:
            live = [seq for seq in seqs if not words[(seq - first) * _ENTRY_U32 + 4] & LOCATION_GONE]
            if unmarked:
                live = [seq for seq in live if seq not in unmarked]
            size_bytes = sum([words[(seq - first) * _ENTRY_U32 + 1] for seq in live])
        return live, size_bytes + len(live) * LOG_FRAME_EXTRA_LEN

    def is_all_deleted(self, topic_id: int, info: SegmentInfo) -> bool:
        """Whether every record of a sealed segment is deleted, as far as its index can be read and says so."""
        key = SegmentKey(topic_id, info.first_seq, info.version)
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
        """All seqs of the segment that are deleted, whether they have a frame or not."""
        part = self._part(topic_id, info, info.first_seq, info.last_seq)
        flags = part[ENTRY_FLAGS_AT::ENTRY_LEN]
        found = [info.first_seq + at for at, flag in enumerate(flags) if flag & LOCATION_DELETED]
        return sorted({*found, *self._unmarked_between(topic_id, info, info.first_seq, info.last_seq)})

    def reader(self, topic_id: int, info: SegmentInfo) -> SegmentReader:
        """Index and frames; not of a cold segment."""
        directory = layout.topic_dir(self._data_dir, topic_id)
        return SegmentReader.open(directory, info.first_seq, info.records, info.data_bytes, info.version)

    def sealed(self, topic_id: int, info: SegmentInfo) -> None:
        """A topic has this segment, which nothing is appended to: what lives in it will be counted."""
        key = SegmentKey(topic_id, info.first_seq, info.version)
        if key not in self._sizes:
            self._uncounted[key] = info

    def let_go(self) -> None:
        """Of indexes that were replaced by a copy meanwhile; to be called now and then."""
        for key in [key for key, idx in self._indexes.items() if not idx.has_its_name]:
            del self._indexes[key]

    def count_some(self) -> None:
        """Of those that were not asked about yet; to be called now and then."""
        records = 0
        for key, info in list(islice(self._uncounted.items(), _COUNTS_AT_ONCE)):
            if records and records + info.records > _COUNTED_RECORDS_AT_ONCE:
                break
            records += info.records
            del self._uncounted[key]
            self.live_size(key.topic_id, info, info.first_seq, info.last_seq)

    # -- marking

    def mark(self, topic_id: int, info: SegmentInfo, seqs: Sequence[int]) -> None:
        """These records of the segment (ascending) are deleted."""
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
            self._say_unreadable(topic_id, info, error)
            self._due[place] = _later(info, seqs, due)
        except OSError as error:
            if due is None or not due.holds_up:  # it is tried again every second
                log.error("deletions could not be marked in a segment", error=str(error), records=len(seqs))
            self._due[place] = _Due(info, list(seqs), True)
        else:
            if defect is not None:
                self._say_unreadable(topic_id, info, defect)
            if isinstance(defect, OSError) and not isinstance(defect, FileNotFoundError):
                self._due[place] = _later(info, seqs, due)

    def replaced(self, topic_id: int, old: SegmentInfo, new: SegmentInfo) -> None:
        """The segment is another file now, or longer: what was deleted in the old one is in the new one."""
        if new.version != old.version:
            try:
                seqs = self.deleted(topic_id, old)
            except FileNotFoundError:
                seqs = []  # read back from the log: all this was done before the old files went
            except (OSError, CorruptSegment) as error:
                if isinstance(error, OSError) and error.errno in _FOR_NOW:
                    raise
                # Read back from the log as well: `Marks` has just read it otherwise. The new version was made from it,
                # and what the log tells of since is due, for this one could not be told.
                self._say_unreadable(topic_id, old, error)
                seqs = []
            self.forget(topic_id, old, with_marks=False)
            self.mark(topic_id, new, seqs)
        due = self._due.pop((topic_id, old.first_seq), None)
        if due is not None:
            self._sizes.pop(SegmentKey(topic_id, new.first_seq, new.version), None)
            self.mark(topic_id, new, due.seqs)

    def forget(self, topic_id: int, info: SegmentInfo, *, with_marks: bool = True) -> None:
        """The segment is no more, or is another file."""
        key = SegmentKey(topic_id, info.first_seq, info.version)
        self._indexes.pop(key, None)
        self.tags.forget(topic_id, info)
        self._sizes.pop(key, None)
        self._uncounted.pop(key, None)
        self._all_deleted.discard(key)
        self._unreadable.discard(key)
        if with_marks:
            self._due.pop((topic_id, info.first_seq), None)

    def mark_again(self) -> None:
        """What could not be marked before; to be called now and then."""
        for place, due in list(self._due.items()):
            if due.left:
                self._due[place] = due._replace(left=due.left - 1)
            else:
                self.mark(place[0], due.info, due.seqs)

    @property
    def is_marked(self) -> bool:
        """Everything that is deleted is marked in the indexes that there are."""
        return not any(due.holds_up for due in self._due.values())

    def is_marked_of(self, topic_id: int) -> bool:
        """The same of one topic."""
        return not any(due.holds_up for (id, _), due in self._due.items() if id == topic_id)

    def _subtract(self, topic_id: int, info: SegmentInfo, seqs: Sequence[int]) -> None:
        """From what is known to live, before these are marked."""
        key = SegmentKey(topic_id, info.first_seq, info.version)
        known = self._sizes.pop(key, None)
        if known is None:
            return
        try:
            live, size_bytes = self.pick_live(topic_id, info, seqs)
        except (OSError, CorruptSegment):
            return  # it is counted anew, or estimated
        self._sizes[key] = known[0] - len(live), known[1] - size_bytes

    # -- files

    def _readable_part(self, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> bytes | None:
        try:
            return self._part(topic_id, info, first_seq, last_seq)
        except (OSError, CorruptSegment) as error:
            self._say_unreadable(topic_id, info, error)
            return None

    def _say_unreadable(self, topic_id: int, info: SegmentInfo, error: OSError | CorruptSegment) -> None:
        key = SegmentKey(topic_id, info.first_seq, info.version)
        if key not in self._unreadable:
            log.error("a segment cannot be used as a whole", topic_id=f"{topic_id:016x}", reason=str(error))
            self._unreadable.add(key)

    def _part(self, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> bytes:
        start = (first_seq - info.first_seq) * ENTRY_LEN
        return self._index(topic_id, info)[start : start + (last_seq - first_seq + 1) * ENTRY_LEN]

    def _index(self, topic_id: int, info: SegmentInfo) -> CommittedFile:
        key = SegmentKey(topic_id, info.first_seq, info.version)
        idx = self._indexes.get(key)
        length = info.records * ENTRY_LEN
        if idx is None or len(idx) < length:
            directory = layout.topic_dir(self._data_dir, topic_id)
            idx = self._indexes[key] = CommittedFile(
                layout.segment_idx_path(directory, info.first_seq, info.version), length
            )
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
    """No snapshot waits for it, and it is waited longer each time."""
    wait = min(_WAIT_MAX, 2 * before.wait or 1) if before is not None else 0
    return _Due(info, list(seqs), False, wait, wait)


def _live_size(part: bytes, first_seq: int, unmarked: list[int], data_bytes: int | None) -> tuple[int, int]:
    """Of a piece of an index that begins with the entry of `first_seq`; `unmarked` are seqs of it that are gone, too;
    `data_bytes` of all frames together, where it is all of a segment.
    """
    live = bytearray(part[ENTRY_FLAGS_AT::ENTRY_LEN].translate(_LIVE_TABLE))
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
    entries = array("Q", bytes(count * ENTRY_WORDS * 8))
    entries[0::ENTRY_WORDS] = array("Q", range(first_seq, first_seq + count))
    entries[1::ENTRY_WORDS] = array("Q", [info.last_ts]) * count
    entries[2::ENTRY_WORDS] = array("Q", [_mean_len(info) << 32]) * count
    return entries
