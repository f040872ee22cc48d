"""A topic's record index in its shard: older entries are in the segments' indexes on the disk, newer ones in the
location ring in memory. Readers find seqs from `ring.base_seq` on in the ring; live records below are in segments.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from topics.core.config import U64_MAX
from topics.core.location import (
    ENTRY_WORDS,
    FLAGS_SHIFT,
    LOCATION_DELETED,
    LOCATION_GONE,
    LOCATION_IN_RAM_LOG,
    LOCATION_LOST,
    any_flagged,
    flags_of,
    lengths_of,
)
from topics.core.segment_list import SEALED, SegmentInfo, SegmentList
from topics.shm.arena_heap import LocationRing
from topics.storage.segment import CorruptSegment
from topics.walshard.hosted.segment_files import SegmentFiles

_ELSEWHERE: Final = LOCATION_IN_RAM_LOG | LOCATION_LOST
_CHUNK_ENTRIES: Final = 8192


class TopicIndex:
    """The `core.record_index.RecordIndex` of a hosted topic. It owns the location ring and the list of segments."""

    __slots__ = ("_files", "copied_seq", "ring", "segments", "topic_id")

    def __init__(self, topic_id: int, ring: LocationRing, files: SegmentFiles) -> None:
        self.topic_id = topic_id
        self.ring = ring
        self.segments = SegmentList()
        self._files = files
        self.copied_seq = U64_MAX
        """Seq up to which every router has copied this topic; U64_MAX without routers. Later entries stay in the ring
        until they are copied or a checkpoint passes them, even if their records were evicted or deleted.
        """

    @property
    def base_seq(self) -> int:
        return next((segment.first_seq for segment in self.segments), self.ring.base_seq)

    @property
    def next_seq(self) -> int:
        return self.ring.next_seq

    @property
    def durable_last_seq(self) -> int:
        """The last seq that is in a segment or in the durable log."""
        ring = self.ring
        for end in range(ring.next_seq, ring.base_seq, -_CHUNK_ENTRIES):
            start = max(ring.base_seq, end - _CHUNK_ENTRIES)
            words = ring.entries(start, end - 1)[3::4]
            durable = {word for word in set(words) if not word >> FLAGS_SHIFT & _ELSEWHERE}
            if durable:
                return start + max(at for at, word in enumerate(words) if word in durable)
        return self.segments.last_seq

    def reserve(self, count: int) -> None:
        """Make room for `count` more entries; raises ArenaFullError."""
        self.ring.reserve(count)

    def append(self, ts: int, offset_len: array[int], file_flags: array[int]) -> None:
        self.ring.append(ts, offset_len, file_flags)

    def append_entries(self, entries: array[int]) -> None:
        in_segments = max(0, self.segments.last_seq + 1 - entries[0]) if entries else 0
        if in_segments:
            entries = entries[in_segments * ENTRY_WORDS :]
        if entries:
            assert entries[0] == self.ring.next_seq, (self.topic_id, entries[0], self.ring.next_seq)
            self.ring.reserve(len(entries) // ENTRY_WORDS)
            self.ring.append_entries(entries)

    def entries(self, first_seq: int, last_seq: int) -> array[int]:
        ring = self.ring
        if first_seq >= ring.base_seq:
            return ring.entries(first_seq, last_seq)
        found = array("Q")
        for info in self.segments.between(first_seq, min(last_seq, ring.base_seq - 1)):
            found += self._files.entries(
                self.topic_id, info, max(first_seq, info.first_seq), min(last_seq, info.last_seq)
            )
        if last_seq >= ring.base_seq:
            found += ring.entries(ring.base_seq, last_seq)
        assert len(found) == (last_seq - first_seq + 1) * ENTRY_WORDS, (self.topic_id, first_seq, last_seq)
        return found

    def ts_at(self, seq: int) -> int:
        if seq >= self.ring.base_seq:
            return self.ring.ts_at(seq)
        info = self.segments.at(seq)
        assert info is not None, (self.topic_id, seq)
        return self._files.ts_at(self.topic_id, info, seq)

    def live_size(self, first_seq: int, last_seq: int) -> tuple[int, int]:
        records = size_bytes = 0
        base_seq = self.ring.base_seq
        if first_seq < base_seq:
            for info in self.segments.between(first_seq, min(last_seq, base_seq - 1)):
                found = self._files.live_size(
                    self.topic_id, info, max(first_seq, info.first_seq), min(last_seq, info.last_seq)
                )
                records += found[0]
                size_bytes += found[1]
        for start in range(max(first_seq, base_seq), last_seq + 1, _CHUNK_ENTRIES):
            entries = self.ring.entries(start, min(last_seq, start + _CHUNK_ENTRIES - 1))
            if not any_flagged(entries, LOCATION_GONE):
                records += len(entries) // ENTRY_WORDS
                size_bytes += sum(lengths_of(entries))
                continue
            lengths = [
                offset_len >> 32
                for offset_len, file_flags in zip(entries[2::4], entries[3::4], strict=True)
                if not file_flags >> FLAGS_SHIFT & LOCATION_GONE
            ]
            records += len(lengths)
            size_bytes += sum(lengths)
        return records, size_bytes

    def is_readable(self, first_seq: int, last_seq: int) -> bool:
        return all(self._files.is_readable(self.topic_id, info) for info in self.segments.between(first_seq, last_seq))

    def pick_live(self, seqs: Sequence[int]) -> tuple[list[int], int]:
        live: list[int] = []
        size_bytes = 0
        for info, part in self._by_segment(seqs):
            if info is not None:
                found, found_bytes = self._files.pick_live(self.topic_id, info, part)
                live += found
                size_bytes += found_bytes
                continue
            flags = [word >> FLAGS_SHIFT for word in self.ring.column(part, 3)]
            found = [seq for seq, flag in zip(part, flags, strict=True) if not flag & LOCATION_GONE]
            live += found
            size_bytes += sum([word >> 32 for word in self.ring.column(found, 2)])
        return live, size_bytes

    def behind_deleted(self, seq: int) -> int:
        while (info := self.segments.at(seq)) is not None and self._files.is_all_deleted(self.topic_id, info):
            seq = info.last_seq + 1
        return seq

    def flag_deleted(self, seqs: Sequence[int]) -> None:
        for info, part in self._by_segment(seqs):
            if info is not None:
                self._files.mark(self.topic_id, info, part)
                continue
            self.ring.flag(part, LOCATION_DELETED << FLAGS_SHIFT)

    def checkpointed(self, segments: Iterable[SegmentInfo]) -> None:
        ring = self.ring
        for info in segments:
            old = self.segments.put(info)
            if old is not None:
                self._files.replaced(self.topic_id, old, info)
            if info.flags & SEALED and self.segments.at(info.first_seq) is info:
                self._files.sealed(self.topic_id, info)
        if self.segments.last_seq < ring.base_seq:
            return
        # Records may have been deleted after the compactor copied them: mark these in the segments.
        last_seq = min(self.segments.last_seq, ring.next_seq - 1)
        if last_seq >= ring.base_seq:
            entries = ring.entries(ring.base_seq, last_seq)
            if any_flagged(entries, LOCATION_DELETED):
                flags = flags_of(entries)
                self.flag_moved([ring.base_seq + at for at, flag in enumerate(flags) if flag & LOCATION_DELETED])
        ring.drop_before(self.segments.last_seq + 1)
        if ring.next_seq <= self.segments.last_seq:
            ring.skip_to(self.segments.last_seq + 1)

    def deleted_from(self, seq: int) -> Iterator[Sequence[int]]:
        """Yield the seqs from `seq` on (ascending) that are deleted in segments, segment by segment. A segment that
        cannot be read is left out.
        """
        for info in self.segments.between(seq, self.segments.last_seq):
            with suppress(OSError, CorruptSegment):
                seqs = self._files.deleted(self.topic_id, info)
                if seqs := seqs[bisect_left(seqs, seq) :]:
                    yield seqs

    def flag_moved(self, seqs: Sequence[int]) -> None:
        """Mark deleted records (ascending seqs) in the segments that have them now, even if they were marked before."""
        for info, part in self.segments.having(seqs):
            self._files.mark(self.topic_id, info, part)

    def drop_before(self, seq: int) -> None:
        for info in self.segments.drop_below(seq):
            self._files.forget(self.topic_id, info)
        self.ring.drop_before(min(seq, self.copied_seq + 1))

    def forget(self) -> None:
        """Forget the segments of a deleted topic."""
        for info in self.segments:
            self._files.forget(self.topic_id, info)

    def skip_to(self, seq: int) -> None:
        if seq > self.ring.next_seq:
            self.ring.skip_to(seq)

    def _by_segment(self, seqs: Sequence[int]) -> Iterable[tuple[SegmentInfo | None, Sequence[int]]]:
        """Yield the seqs by segment; None stands for the ring.

        Seqs below the ring that no segment has are left out: their records are deleted. This happens in recovery: a
        snapshot's segments are made later than its place in the log, so they may lack records that the log deletes
        behind that place.
        """
        in_ring = bisect_left(seqs, self.ring.base_seq)
        yield from self.segments.having(seqs[:in_ring])
        if in_ring < len(seqs):
            yield None, seqs[in_ring:]
