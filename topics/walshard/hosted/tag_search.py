"""The search for a topic's records by tag, wherever they are, for deletes by tag (`deletes.py`).

Records in sealed segments are found by the segments' postings. All others (the tail: the active segment and the logs)
are in the topic's `TagIndex`, which catches up when a delete asks.

A delete with many matches, or many records to look at, must not hold up other requests. So one turn of the shard finds
a bounded number, and the next turn goes on from there.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from functools import partial
from typing import Final

import msgspec

from topics.core.clock import Clock
from topics.core.location import FILE_BITS, FLAGS_SHIFT, LOCATION_GONE, LOW_WORD
from topics.core.segment_list import SEALED, SegmentInfo
from topics.core.tags import Match, TagIndex
from topics.core.topic import Topic
from topics.shm.arena_heap import LocationRing
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.frame import HEADER_LEN, LOCATION_HAS_TAG, NODE_MAX_BYTES, TAG_MAX_BYTES
from topics.storage.topic_frames import check_header
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.segment_files import SegmentFiles

FOUND_MAX: Final = 2048
"""Matches that one turn finds at most: to delete them takes some 4 ms."""
TURN_MS: Final = 5
"""Time after which a turn begins no other step of the search."""
CATCH_UP_RECORDS: Final = 1024
"""Records indexed between two looks at the clock."""
GATHERED_RECORDS: Final = 8192
"""Records gathered from an index between two looks at the clock."""
LEFT_MAX: Final = 16
"""Searches whose matches are kept between turns at most. A further search finds its matches again in each turn. It does
not replace the oldest: with many searches, each would then lose its matches before its next turn.
"""
_KEPT_MS: Final = 10_000
IDLE_RECORDS: Final = 512
"""Records that an idle turn indexes at most, while a request may have to wait; fewer if they lie far apart."""
READS_MAX: Final = 16
"""Reads of log files that one call of `FrameTags.tagged` does at most, while a request may have to wait."""
_RUN_BYTES: Final = 1 << 18
_NEAR_BYTES: Final = 1 << 14
"""Widest gap between two frames that one read covers."""
_HEAD_BYTES: Final = HEADER_LEN + NODE_MAX_BYTES + TAG_MAX_BYTES
"""Bytes at the beginning of a frame that are sure to contain its tag."""
_FILES_MAX: Final = 8
_TAGGED_BIT: Final = LOCATION_HAS_TAG << FLAGS_SHIFT
_WANTED_BITS: Final = _TAGGED_BIT | LOCATION_GONE << FLAGS_SHIFT


_Place = tuple[int, int, int, int]
"""(seq, file bits of the record's location, offset of its frame, offset behind the frame's tag)."""


class _Matches(msgspec.Struct):
    """Matching seqs in one segment or in the tail. They are ascending once `complete`; until then they are the matches
    of the tags before `next_tag`.
    """

    seqs: list[int]
    complete: bool
    tags: list[bytes] | None = None
    next_tag: int = 0
    kept_ms: int = 0


class TagSearch:
    """Finds records by tag in all topics of one shard. It may raise OSError, CorruptSegment and CorruptPostings."""

    def __init__(self, files: SegmentFiles, frames: FrameTags, clock: Clock) -> None:
        self._files = files
        self._frames = frames
        self._clock = clock
        self._left: dict[tuple[object, ...], _Matches] = {}
        """Matches that a turn found but had no room to return, kept for the next turn, by search and place."""

    def find(self, hosted: Hosted, match: Match, first_seq: int, last_seq: int) -> tuple[list[int], int]:
        """Find matches in first_seq..last_seq, as far as one turn goes. Return (seqs, next_seq): all matches below
        next_seq, ascending. Some may be deleted already, but none is below `earliest_seq`.
        """
        ends_ms = self._clock.monotonic_ms() + TURN_MS
        topic, index = hosted.topic, hosted.index
        found: list[int] = []
        next_seq = first_seq
        sealed_seq = index.segments.sealed_last_seq
        for info in index.segments.between(next_seq, min(sealed_seq, last_seq)):
            key = (topic.id, match, info.first_seq, info.version)
            matches = self._left.pop(key, None) or _Matches(self._in_segment(topic.id, info, match), True)
            if not self._take(found, key, matches, next_seq, last_seq):
                return found, found[-1] + 1
            next_seq = info.last_seq + 1
            if self._clock.monotonic_ms() >= ends_ms:
                return found, next_seq
        next_seq = max(next_seq, sealed_seq + 1)
        if next_seq <= last_seq:
            tail_key = (topic.id, match, last_seq)
            matches = self._left.pop(tail_key, _Matches([], False))
            if not matches.complete and not self._gather(matches, hosted, match, last_seq, ends_ms):
                self._keep(tail_key, matches)
                return found, next_seq
            if not self._take(found, tail_key, matches, max(next_seq, _open_seq(hosted)), last_seq):
                return found, found[-1] + 1
        return found, last_seq + 1

    def drop_unused(self) -> None:
        """Drop matches that no search has taken for a while. To be called now and then."""
        now_ms = self._clock.monotonic_ms()
        for key in [key for key, matches in self._left.items() if now_ms - matches.kept_ms > _KEPT_MS]:
            del self._left[key]

    def index_some(self, hosted: Hosted) -> bool:
        """Index some new records if the topic has a tag index. False if there are none."""
        tags, last_seq = hosted.topic.tags, hosted.topic.head_seq
        if tags is None:
            return False
        open_seq = _open_seq(hosted)
        tags.forget_below(open_seq)  # frees memory even if no new records come
        if tags.next_seq > last_seq:
            return False
        first_seq = max(tags.next_seq, open_seq)
        self._index(tags, hosted, open_seq, min(last_seq, first_seq + IDLE_RECORDS - 1))
        return first_seq <= last_seq

    def _take(
        self, found: list[int], key: tuple[object, ...], matches: _Matches, first_seq: int, last_seq: int
    ) -> bool:
        """Add `matches` to `found`. False if there is not room for all; then they are kept for the next turn."""
        seqs = matches.seqs
        start, end = bisect_left(seqs, first_seq), bisect_right(seqs, last_seq)
        room = FOUND_MAX - len(found)
        found += seqs[start : min(end, start + room)]
        if end - start <= room:
            return True
        self._keep(key, matches)
        return False

    def _keep(self, key: tuple[object, ...], matches: _Matches) -> None:
        matches.kept_ms = self._clock.monotonic_ms()
        if len(self._left) < LEFT_MAX:
            self._left[key] = matches

    def _gather(self, matches: _Matches, hosted: Hosted, match: Match, last_seq: int, ends_ms: int) -> bool:
        """Gather all matches in the tail. False if it needs another turn."""
        # The tag index may have started over since the last turn.
        tags = self._caught_up(hosted, last_seq, ends_ms)
        if tags is None:
            return False
        if matches.tags is None:
            matches.tags = tags.matching(match)
        while matches.next_tag < len(matches.tags):
            seqs, matches.next_tag = tags.seqs_of(matches.tags, matches.next_tag, GATHERED_RECORDS)
            matches.seqs += seqs
            if self._clock.monotonic_ms() >= ends_ms and matches.next_tag < len(matches.tags):
                return False
        matches.seqs.sort()  # fast: they are a few sorted runs
        matches.tags = []
        matches.complete = True
        return True

    def _in_segment(self, topic_id: int, info: SegmentInfo, match: Match) -> list[int]:
        if info.flags & SEALED:
            return self._files.tags.find(topic_id, info, match)
        # An unsealed segment before sealed ones was damaged. It has no postings: read its frames, which may raise.
        return [seq for seq, tag in self._files.reader(topic_id, info).tagged() if match.covers(tag)]

    def _caught_up(self, hosted: Hosted, last_seq: int, ends_ms: int) -> TagIndex | None:
        """Return the topic's `tags`, caught up to `last_seq`. None if that needs another turn."""
        topic, open_seq = hosted.topic, _open_seq(hosted)
        if topic.tags is None:
            topic.tags = TagIndex(open_seq)
        tags = topic.tags
        tags.forget_below(open_seq)
        while True:
            first_seq = max(tags.next_seq, open_seq)
            self._index(tags, hosted, open_seq, min(last_seq, first_seq + CATCH_UP_RECORDS - 1))
            if tags.next_seq > last_seq:
                return tags
            if self._clock.monotonic_ms() >= ends_ms:
                return None

    def _index(self, tags: TagIndex, hosted: Hosted, open_seq: int, last_seq: int) -> None:
        tags.catch_up(open_seq, last_seq, partial(self._tagged, hosted))

    def _tagged(self, hosted: Hosted, first_seq: int, last_seq: int) -> tuple[list[tuple[int, bytes]], int]:
        """Return (seq, tag) of tagged records in segments and logs, and the seq up to which these are all."""
        found: list[tuple[int, bytes]] = []
        topic, index = hosted.topic, hosted.index
        base_seq = index.ring.base_seq
        if first_seq < base_seq:
            for info in index.segments.between(first_seq, min(last_seq, base_seq - 1)):
                found += self._files.reader(topic.id, info).tagged(first_seq, last_seq)
        if last_seq >= base_seq:
            in_logs, last_seq = self._frames.tagged(topic, index.ring, max(first_seq, base_seq), last_seq)
            found += in_logs
        return found, last_seq


def _open_seq(hosted: Hosted) -> int:
    """Return the first seq that may be live and is in no sealed segment."""
    index = hosted.index
    return max(index.segments.sealed_last_seq + 1, index.base_seq, hosted.topic.earliest_seq)


class FrameTags:
    """Reads tags from both logs of one shard. It keeps a few files open."""

    def __init__(self, fs: FileSystem, directory: str, ram_directory: str) -> None:
        self._fs = fs
        self._directories = (directory, ram_directory)
        self._open: OrderedDict[tuple[int, int], int] = OrderedDict()

    def forget_below(self, file_no: int, in_ram: bool) -> None:
        """Close files of a log that were removed, numbered below `file_no`."""
        for key in [key for key in self._open if bool(key[0]) == in_ram and key[1] < file_no]:
            self._fs.close(self._open.pop(key))

    def tagged(
        self, topic: Topic, ring: LocationRing, first_seq: int, last_seq: int
    ) -> tuple[list[tuple[int, bytes]], int]:
        """Return (seq, tag) of tagged records among these seqs, which are all in the ring, as far as `READS_MAX` reads
        go, and the last seq that was looked at. One read covers neighbours in a file. Raise OSError.
        """
        entries = ring.entries(first_seq, last_seq)
        wanted = [
            (seq, word & FILE_BITS, offset := offset_len & LOW_WORD, offset + min(offset_len >> 32, _HEAD_BYTES))
            for seq, offset_len, word in zip(entries[0::4], entries[2::4], entries[3::4], strict=True)
            if word & _WANTED_BITS == _TAGGED_BIT
        ]
        found: list[tuple[int, bytes]] = []
        at = 0
        for _ in range(READS_MAX):
            if at == len(wanted):
                return found, last_seq
            end = _run_end(wanted, at)
            self._read(topic, wanted[at:end], found)
            at = end
        return found, wanted[at][0] - 1 if at < len(wanted) else last_seq

    def _read(self, topic: Topic, run: list[_Place], found: list[tuple[int, bytes]]) -> None:
        """Add the tags of neighbours in one file."""
        _, file, begin, _ = run[0]
        end = run[-1][3]
        file_no = file & LOW_WORD
        buffer = self._fs.pread(self._fd((file >> FLAGS_SHIFT, file_no)), end - begin, begin)
        if len(buffer) < end - begin:
            # The file is shorter than its locations say: something cut it in place.
            raise OSError(errno.EIO, f"log file {file_no} ends at {begin + len(buffer)}, before {end}")
        for seq, _, offset, _ in run:
            at = offset - begin
            node_len, tag_len = check_header(buffer, at, topic, seq, file_no, offset)
            start = at + HEADER_LEN + node_len
            found.append((seq, buffer[start : start + tag_len]))

    def _fd(self, key: tuple[int, int]) -> int:
        fd = self._open.get(key)
        if fd is None:
            fd = self._open[key] = self._fs.open(layout.log_path(self._directories[key[0]], key[1]), os.O_RDONLY)
            if len(self._open) > _FILES_MAX:
                self._fs.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(key)
        return fd


def _run_end(places: list[_Place], at: int) -> int:
    """Return the index behind the last place that one read covers if it begins with the place at `at`."""
    _, first_file, first_offset, end_offset = places[at]
    for end in range(at + 1, len(places)):
        _, file, offset, head_end = places[end]
        if file != first_file or not end_offset <= offset <= end_offset + _NEAR_BYTES:
            return end
        if head_end - first_offset > _RUN_BYTES:
            return end
        end_offset = head_end
    return len(places)
