"""Locates the records of a topic in one view of it: in the log from `base_seq` on, in segments below.

MovedError says that the shard or the compactor has changed the topic since, so that a new view is needed. It is never
raised for damage.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from mmap import mmap
from operator import attrgetter
from struct import Struct
from typing import Final, TypeVar

from topics.core.errors import storage_unavailable
from topics.core.location import LOCATION_DELETED, LOCATION_GONE, LOCATION_IN_RAM_LOG
from topics.core.segment_list import COLD, SegmentInfo
from topics.frontend.reads.cold import ColdTier
from topics.frontend.reads.files import LogFiles, OpenSegment, SegmentCache
from topics.frontend.reads.records import LOG_FRAME, SEGMENT_FRAME, Run, plain_json
from topics.shm.arena import ArenaReader, TopicView
from topics.storage import layout
from topics.storage.frame import LENGTH_FIELD_LEN
from topics.storage.segment import Columns

_IDENTITY: Final = Struct("<I2xQQ")  # frame_len, topic_id, seq of a frame in the log
_COPY_MAX_BYTES: Final = 256 * 1024
"""Most bytes copied out of a map before they are sliced: a slice of `bytes` costs half of a slice of a map."""
_first_seq = attrgetter("first_seq")
_last_ts = attrgetter("last_ts")
FoundT = TypeVar("FoundT")


class MovedError(Exception):
    """The view is outdated: take a new one."""


class MismatchError(Exception):
    """A frame is not the one that its location names: the location is outdated, or the log file is damaged."""


def unmoved(found: FoundT | None) -> FoundT:
    """Return what an arena found in a view. Raise MovedError for None: the view is outdated."""
    if found is None:
        raise MovedError
    return found


@dataclass
class RecordStores:
    """The files that a frontend reads records from."""

    logs: LogFiles
    segments: SegmentCache
    cold: ColdTier | None


@dataclass(eq=False, slots=True)
class LocatedRecords:
    """The records of one topic in one view of it."""

    _stores: RecordStores
    _shard: int
    _arena: ArenaReader
    _slot: int
    _view: TopicView
    _table: tuple[SegmentInfo, ...] | None = None
    cold_segments: set[int] = field(default_factory=set)
    """First seqs of the segments that runs were taken from the cold tier of."""

    # -- times

    def ts_at(self, seq: int) -> int:
        """Return the commit time of an existing record, ms."""
        if seq < self._view.base_seq:
            info = self._segment_of(seq)
            return info.first_ts if seq == info.first_seq else self._open(info).ts_at(seq)
        return unmoved(self._arena.ts_at(self._view, seq))

    def first_seq_at(self, ts: int) -> int:
        """Return the first seq from earliest_seq on with a commit time >= ts; head_seq + 1 if there is none."""
        view = self._view
        if view.earliest_seq < view.base_seq:
            table = self._segments()
            at = bisect_left(table, ts, key=_last_ts)
            if at < len(table):
                info = table[at]
                seq = info.first_seq if info.first_ts >= ts else self._open(info).first_seq_at(ts)
                return max(seq, view.earliest_seq)
        return max(unmoved(self._arena.first_seq_at(view, ts)), view.earliest_seq)

    # -- records

    def runs(self, first_seq: int, last_seq: int, room_bytes: int, again: bool = False) -> Iterator[Run]:
        """Return checked records of first_seq..last_seq in one or more runs: at least one record, and further ones up
        to about room_bytes. With `again` the checksums of segments are checked even if they were right before.

        Raise MovedError, FileNotFoundError, EOFError, CorruptSegment, ColdMissError.
        """
        if first_seq < self._view.base_seq:
            return iter((self._segment_run(first_seq, last_seq, room_bytes, again),))
        return self._log_runs(first_seq, last_seq, room_bytes)

    def plain_record(self, seq: int) -> bytes | None:
        """Return the JSON of one record in the log that has only data; None for any other, which `runs` returns. Most
        pages have one record, and without columns it takes a third of the time. Raise as `runs`.
        """
        view = self._view
        if seq < view.base_seq:
            return None
        ts, offset_len, file_flags = unmoved(self._arena.entry(view, seq))
        flags = file_flags >> 32
        if flags > LOCATION_IN_RAM_LOG:
            return None
        offset, length, file_no = offset_len & 0xFFFF_FFFF, offset_len >> 32, file_flags & 0xFFFF_FFFF
        file = self._stores.logs.get(self._shard, bool(flags), file_no, offset + length)
        if _IDENTITY.unpack_from(file, offset) != (length - LENGTH_FIELD_LEN, view.topic_id, seq):
            raise MismatchError(f"seq {seq}, file {file_no}, offset {offset}")
        return plain_json(seq, ts, file[offset + LOG_FRAME.header_len : offset + length - LOG_FRAME.tail_len])

    def flags_and_offsets(self, first_seq: int, last_seq: int) -> tuple[list[int], list[int]]:
        """Return (location flags, offsets) of records of first_seq..last_seq, at least of one."""
        if first_seq < self._view.base_seq:
            info = self._segment_of(first_seq)
            columns = self._open(info).columns(first_seq, min(last_seq, info.last_seq))
        else:
            columns = self._columns(first_seq, last_seq)[0]
        return columns.flags, columns.offsets

    def entries(self, first_seq: int, last_seq: int) -> array[int]:
        """Return index entries of existing records. Entries in segments locate nothing. Raise as `runs`."""
        found = array("Q")
        while first_seq <= last_seq and first_seq < self._view.base_seq:
            info = self._segment_of(first_seq)
            end = min(last_seq, info.last_seq)
            found += self._open(info).entries(first_seq, end)
            first_seq = end + 1
        if first_seq <= last_seq:
            found += unmoved(self._arena.entries(self._view, first_seq, last_seq))
        return found

    # -- in segments

    def _segments(self) -> tuple[SegmentInfo, ...]:
        if self._table is None:
            self._table = unmoved(self._arena.segments(self._slot, self._view))
        return self._table

    def _segment_of(self, seq: int) -> SegmentInfo:
        table = self._segments()
        at = bisect_right(table, seq, key=_first_seq) - 1
        if at < 0 or table[at].last_seq < seq:
            raise MovedError
        return table[at]

    def _open(self, info: SegmentInfo) -> OpenSegment:
        return self._stores.segments.get(self._view.topic_id, info)

    def _segment_run(self, first_seq: int, last_seq: int, room_bytes: int, again: bool) -> Run:
        info = self._segment_of(first_seq)
        opened = self._open(info)
        columns = opened.columns(first_seq, min(last_seq, info.last_seq))
        columns = columns.part(0, _fitting(columns.lengths, room_bytes))
        starts, end = opened.extent(first_seq, columns)
        buffer = b""
        base = starts[0]
        if columns.has_gone:
            # The frames of deleted records before and after the live ones are neither read nor fetched.
            live = [number for number, flag in enumerate(columns.flags) if not flag & LOCATION_GONE]
            base, end = (starts[live[0]], starts[live[-1]] + columns.lengths[live[-1]]) if live else (0, 0)
        if end:
            data = opened.local_data()
            if data is None:
                if self._stores.cold is None:
                    why = "is in the cold tier, and this service has none: set its former TOPICS_COLD_DIR or _URL"
                    message, detail = f"segment {opened.name} {why}", {"segment": opened.name}
                    raise storage_unavailable(message, **detail)
                behind = self._cold_behind(info)
                buffer, base = self._stores.cold.extent(opened.name, base, end, info.data_bytes, behind)
                self.cold_segments.add(info.first_seq)
            else:
                buffer = data[base:end]
            if base:
                starts = [start - base for start in starts]
            marked = opened.check(buffer, base, first_seq, columns, starts, again, fetched=data is None)
            if marked:
                flags = columns.flags[:]
                for seq in marked:
                    flags[seq - first_seq] |= LOCATION_DELETED
                columns = columns._replace(flags=flags)
        return Run(first_seq, columns.ts, starts, columns.lengths, columns.flags, buffer, SEGMENT_FRAME)

    def _cold_behind(self, info: SegmentInfo) -> Iterator[tuple[str, int]]:
        """Return names and sizes of the objects behind a segment's, up to the first segment that is not cold."""
        table = self._segments()
        for at in range(bisect_right(table, info.last_seq, key=_first_seq), len(table)):
            behind = table[at]
            if not behind.flags & COLD:
                return
            yield layout.object_name(*behind.key_in(self._view.topic_id)), behind.data_bytes

    # -- in the log

    def _columns(self, first_seq: int, last_seq: int) -> tuple[Columns, list[int]]:
        entries = unmoved(self._arena.entries(self._view, first_seq, last_seq))
        halves = array("I")
        halves.frombytes(entries.tobytes())
        columns = Columns(entries[1::4].tolist(), halves[4::8].tolist(), halves[5::8].tolist(), halves[7::8].tolist())
        return columns, halves[6::8].tolist()

    def _log_runs(self, first_seq: int, last_seq: int, room_bytes: int) -> Iterator[Run]:
        columns, file_nos = self._columns(first_seq, last_seq)
        count = _fitting(columns.lengths, room_bytes)
        start = 0
        for stop in _file_ends(columns.flags[:count], file_nos[:count]):
            yield self._log_run(first_seq + start, columns.part(start, stop), file_nos[start:stop])
            start = stop

    def _log_run(self, first_seq: int, columns: Columns, file_nos: list[int]) -> Run:
        """Return consecutive records, the live ones of which are in one file."""
        ts, offsets, lengths, flags = columns
        live: Sequence[int] = range(len(ts))
        if columns.has_gone:
            live = [number for number, flag in enumerate(flags) if not flag & LOCATION_GONE]
            if not live:
                return Run(first_seq, ts, offsets, lengths, flags, b"", LOG_FRAME)
        first, last = live[0], live[-1]
        # Within a file offsets grow with the seq, so no frame ends behind the last one.
        base, end = offsets[first], offsets[last] + lengths[last]
        file_no = file_nos[first]
        file = self._stores.logs.get(self._shard, bool(flags[first] & LOCATION_IN_RAM_LOG), file_no, end)
        buffer: bytes | mmap = file
        if end - base <= min(_COPY_MAX_BYTES, 2 * sum(lengths)):
            buffer = file[base:end]
        else:
            base = 0
        starts = [offset - base for offset in offsets] if base else offsets
        unpack, topic_id = _IDENTITY.unpack_from, self._view.topic_id
        if len(live) == len(ts):
            found = [unpack(buffer, start) for start in starts]
            due = zip([n - LENGTH_FIELD_LEN for n in lengths], repeat(topic_id), range(first_seq, first_seq + len(ts)))
        else:
            found = [unpack(buffer, starts[n]) for n in live]
            due = zip([lengths[n] - LENGTH_FIELD_LEN for n in live], repeat(topic_id), [first_seq + n for n in live])
        if found != (wanted := list(due)):
            wrong = next(n for n in range(len(found)) if found[n] != wanted[n])
            raise MismatchError(f"seq {wanted[wrong][2]}, file {file_no}, offset {offsets[live[wrong]]}")
        return Run(first_seq, ts, starts, lengths, flags, buffer, LOG_FRAME, file_no, base)


def _file_ends(flags: list[int], file_nos: list[int]) -> list[int]:
    """Return the ends of the runs whose frames are in one file. Deleted and lost records may be in any run."""
    count = len(flags)
    if file_nos.count(file_nos[0]) == count and len({flag & LOCATION_IN_RAM_LOG for flag in set(flags)}) == 1:
        return [count]
    ends = []
    file: tuple[int, int] | None = None
    for number, (flag, file_no) in enumerate(zip(flags, file_nos, strict=True)):
        if flag & LOCATION_GONE:
            continue
        this = (file_no, flag & LOCATION_IN_RAM_LOG)
        if file is not None and this != file:
            ends.append(number)
        file = this
    return [*ends, count]


def _fitting(lengths: list[int], room_bytes: int) -> int:
    """Return the number of first frames that fit into `room_bytes`, at least one."""
    if sum(lengths) <= room_bytes:
        return len(lengths)
    return max(1, bisect_right(list(accumulate(lengths)), room_bytes))
