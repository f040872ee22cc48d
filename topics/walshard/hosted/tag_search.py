"""The records of a topic that have a tag, wherever they are, for deletes by tag (`deletes.py`).

Records in sealed segments are found by their postings. All others, in the active segment and in the logs, are in the
topic's `TagIndex`, which catches up when it is asked.

A delete with many matches, or many records to look at, must not hold up other requests: one turn of the shard finds a
bounded number, and the next turn goes on from there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

from topics.core.clock import Clock
from topics.core.segment_list import SEALED, SegmentInfo
from topics.core.tags import Match, TagIndex
from topics.core.topic import Topic
from topics.walshard.hosted.frame_tags import FrameTags
from topics.walshard.hosted.segment_files import SegmentFiles
from topics.walshard.hosted.topic_index import TopicIndex

FOUND_MAX: Final = 2048
"""Matches of one turn: to delete so many takes some 4 ms."""
TURN_MS: Final = 5
"""Time that a turn looks for them, and a step more."""
CATCH_UP_RECORDS: Final = 1024
"""Records indexed between two looks at the clock."""
GATHERED_RECORDS: Final = 8192
"""Records gathered from an index between two looks at the clock."""
LEFT_MAX: Final = 16
"""Deletes whose matches are kept between turns. One more finds its own again each turn until one of these is done: if
it took the place of the oldest, each of them would lose its own before its next turn.
"""
_KEPT_MS: Final = 10_000
IDLE_RECORDS: Final = 512
"""Records indexed in an idle turn at most, for which a request may have to wait; fewer where they lie far apart."""


class Found(NamedTuple):
    """All seqs below `next_seq` with a matching tag, ascending. Some may be deleted already."""

    seqs: list[int]
    next_seq: int


class _Matches:
    """The matches in one place, ascending once they are `complete`. Until then they are those of the tags before
    `next_tag`.
    """

    __slots__ = ("complete", "kept_ms", "next_tag", "seqs", "tags")

    def __init__(self, seqs: list[int], complete: bool) -> None:
        self.seqs = seqs
        self.complete = complete
        self.tags: list[bytes] | None = None
        self.next_tag = 0
        self.kept_ms = 0


class TagSearch:
    """Finds records by tag in all topics of one shard. It may raise OSError, CorruptSegment and CorruptPostings."""

    def __init__(self, files: SegmentFiles, frames: FrameTags, clock: Clock) -> None:
        self._files = files
        self._frames = frames
        self._clock = clock
        self._left: dict[tuple[object, ...], _Matches] = {}
        """Matches that a turn found and did not return, by search and place, for the next turn."""

    def forget_log_files(self, file_no: int, in_ram: bool) -> None:
        """Forget files of a log that were removed, numbered below `file_no`."""
        self._frames.forget_below(file_no, in_ram)

    def find(self, topic: Topic, index: TopicIndex, match: Match, first_seq: int, last_seq: int) -> Found:
        """Find matches in first_seq..last_seq (none below `earliest_seq`), as many as one turn has time for."""
        ends_ms = self._clock.monotonic_ms() + TURN_MS
        found: list[int] = []
        next_seq = first_seq
        sealed_seq = index.segments.sealed_last_seq
        for info in index.segments.between(next_seq, min(sealed_seq, last_seq)):
            key = (topic.id, match, info.first_seq, info.version)
            matches = self._left.pop(key, None)
            if matches is None:
                matches = _Matches(self._in_segment(topic.id, info, match), True)
            if not self._take(found, key, matches, next_seq, last_seq):
                return Found(found, found[-1] + 1)
            next_seq = info.last_seq + 1
            if self._clock.monotonic_ms() >= ends_ms:
                return Found(found, next_seq)
        next_seq = max(next_seq, sealed_seq + 1)
        if next_seq <= last_seq:
            open_seq = _open_seq(topic, index)
            tail_key = (topic.id, match, last_seq)
            matches = self._left.pop(tail_key, None)
            if matches is None:
                matches = _Matches([], False)
            if not matches.complete and not self._gather(matches, topic, index, match, open_seq, last_seq, ends_ms):
                self._keep(tail_key, matches)
                return Found(found, next_seq)
            if not self._take(found, tail_key, matches, max(next_seq, open_seq), last_seq):
                return Found(found, found[-1] + 1)
        return Found(found, last_seq + 1)

    def drop_unused(self) -> None:
        """Drop matches for which no turn came. To be called now and then."""
        now_ms = self._clock.monotonic_ms()
        for key in [key for key, matches in self._left.items() if now_ms - matches.kept_ms > _KEPT_MS]:
            del self._left[key]

    def index_some(self, topic: Topic, index: TopicIndex, last_seq: int) -> bool:
        """Index some new records up to `last_seq` of a topic with a delete by tag, in an idle turn. False if there are
        none.
        """
        tags = topic.tags
        if tags is None:
            return False
        open_seq = _open_seq(topic, index)
        tags.forget_below(open_seq)  # also if no records come any more
        if tags.next_seq > last_seq:
            return False
        first_seq = max(tags.next_seq, open_seq)
        self._index(tags, topic, index, open_seq, min(last_seq, first_seq + IDLE_RECORDS - 1))
        return first_seq <= last_seq

    def _take(
        self, found: list[int], key: tuple[object, ...], matches: _Matches, first_seq: int, last_seq: int
    ) -> bool:
        """Add `matches` to `found`. False if there is room for some only; then they are kept for the next turn."""
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

    def _gather(
        self,
        matches: _Matches,
        topic: Topic,
        index: TopicIndex,
        match: Match,
        open_seq: int,
        last_seq: int,
        ends_ms: int,
    ) -> bool:
        """Gather all matches in the tail. False if it needs another turn."""
        # It may have started over since the last turn.
        tags = self._caught_up(topic, index, open_seq, last_seq, ends_ms)
        if tags is None:
            return False
        if matches.tags is None:
            matches.tags = tags.matching(match)
        while matches.next_tag < len(matches.tags):
            seqs, matches.next_tag = tags.seqs_of(matches.tags, matches.next_tag, GATHERED_RECORDS)
            matches.seqs += seqs
            if self._clock.monotonic_ms() >= ends_ms and matches.next_tag < len(matches.tags):
                return False
        matches.seqs.sort()  # runs, each sorted
        matches.tags = []
        matches.complete = True
        return True

    def _in_segment(self, topic_id: int, info: SegmentInfo, match: Match) -> list[int]:
        if info.flags & SEALED:
            return self._files.tags.find(topic_id, info, match)
        # Damaged, and gone on with in the next: its frames must tell, or say where they are damaged.
        return [seq for seq, tag in self._files.reader(topic_id, info).tagged() if match.covers(tag)]

    def _caught_up(
        self, topic: Topic, index: TopicIndex, open_seq: int, last_seq: int, ends_ms: int
    ) -> TagIndex | None:
        """Return the topic's `tags`, caught up to `last_seq`. None if that needs another turn."""
        if topic.tags is None:
            topic.tags = TagIndex(open_seq)
        tags = topic.tags
        tags.forget_below(open_seq)
        while True:
            first_seq = max(tags.next_seq, open_seq)
            self._index(tags, topic, index, open_seq, min(last_seq, first_seq + CATCH_UP_RECORDS - 1))
            if tags.next_seq > last_seq:
                return tags
            if self._clock.monotonic_ms() >= ends_ms:
                return None

    def _index(self, tags: TagIndex, topic: Topic, index: TopicIndex, open_seq: int, last_seq: int) -> None:
        tags.catch_up(open_seq, last_seq, lambda first, last: self._tagged(topic, index, first, last))

    def _tagged(
        self, topic: Topic, index: TopicIndex, first_seq: int, last_seq: int
    ) -> tuple[list[tuple[int, bytes]], int]:
        """Return tags as a `tags.TagsOf` does."""
        found: list[tuple[int, bytes]] = []
        base_seq = index.ring.base_seq
        if first_seq < base_seq:
            for info in index.segments.between(first_seq, min(last_seq, base_seq - 1)):
                found += self._files.reader(topic.id, info).tagged(first_seq, last_seq)
        if last_seq >= base_seq:
            in_logs, last_seq = self._frames.tagged(topic, index.ring, max(first_seq, base_seq), last_seq)
            found += in_logs
        return found, last_seq


def _open_seq(topic: Topic, index: TopicIndex) -> int:
    """Return the first seq that may be live and is in no sealed segment."""
    return max(index.segments.sealed_last_seq + 1, index.base_seq, topic.earliest_seq)
