"""Which records of a topic have a tag, wherever they are: what a delete by tag asks (`deletes.py`).

Of sealed segments their postings say it. All others, in the active segment and in the logs, are in the topic's
`TagIndex`, which catches up when it is asked.

A delete with many matches, or many records to look at, is no reason to hold up everybody else: what is found in one
turn of the shard is bounded, and the next turn goes on from there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from topics.core.clock import Clock
from topics.core.segment_list import SEALED, SegmentInfo
from topics.core.tags import Match, TagIndex
from topics.core.topic import Topic
from topics.walshard.frame_tags import FrameTags
from topics.walshard.segment_files import SegmentFiles
from topics.walshard.topic_index import TopicIndex

FOUND_MAX: Final = 2048
"""Of one turn: to delete so many takes some 4 ms."""
TURN_MS: Final = 5
"""So long a turn looks for them, and a step more."""
CATCH_UP_RECORDS: Final = 1024
"""Between two looks at the clock."""
IDLE_RECORDS: Final = 512
"""Indexed in an idle turn, which a request may have to wait for."""


class Found(NamedTuple):
    """Seqs with a matching tag, ascending, some of which may be gone: all that there are below `next_seq`."""

    seqs: list[int]
    next_seq: int


class TagSearch:
    """For all topics of one shard. What it finds may raise OSError, CorruptSegment and CorruptPostings."""

    def __init__(self, files: SegmentFiles, frames: FrameTags, clock: Clock) -> None:
        self._files = files
        self._frames = frames
        self._clock = clock
        self._matches: tuple[tuple[object, ...], list[int]] = ((), [])
        """Of what was left over in the last turn, what it was found by and where: it is not looked for again."""

    def forget_log_files(self, file_no: int) -> None:
        """Log files numbered below are gone."""
        self._frames.forget_below(file_no)

    def find(self, topic: Topic, index: TopicIndex, match: Match, first_seq: int, last_seq: int) -> Found:
        """Of first_seq..last_seq, none below `earliest_seq`, what one turn has time for."""
        ends_ms = self._clock.monotonic_ms() + TURN_MS
        found: list[int] = []
        next_seq = first_seq
        sealed_seq = index.segments.sealed_last_seq
        for info in index.segments.between(next_seq, min(sealed_seq, last_seq)):
            key = (topic.id, match, info.first_seq, info.version)
            matches = self._matches[1] if key == self._matches[0] else self._in_segment(topic.id, info, match)
            if not self._take(found, key, matches, next_seq, last_seq):
                return Found(found, found[-1] + 1)
            next_seq = info.last_seq + 1
            if self._clock.monotonic_ms() >= ends_ms:
                return Found(found, next_seq)
        next_seq = max(next_seq, sealed_seq + 1)
        if next_seq <= last_seq:
            open_seq = _open_seq(topic, index)
            tail_key = (topic.id, match, last_seq)
            matches = self._matches[1]
            if tail_key != self._matches[0]:
                tags = self._caught_up(topic, index, open_seq, last_seq, ends_ms)
                if tags is None:
                    return Found(found, next_seq)
                matches = tags.find(match)
            if not self._take(found, tail_key, matches, max(next_seq, open_seq), last_seq):
                return Found(found, found[-1] + 1)
        self._matches = ((), [])
        return Found(found, last_seq + 1)

    def index_some(self, topic: Topic, index: TopicIndex, last_seq: int) -> bool:
        """In an idle turn: of what came, up to `last_seq`, since somebody deleted by tag. False: nothing came."""
        tags = topic.tags
        if tags is None or tags.next_seq > last_seq:
            return False
        open_seq = _open_seq(topic, index)
        tags.forget_below(open_seq)
        first_seq = max(tags.next_seq, open_seq)
        self._index(tags, topic, index, open_seq, min(last_seq, first_seq + IDLE_RECORDS - 1))
        return first_seq <= last_seq

    def _take(
        self, found: list[int], key: tuple[object, ...], matches: list[int], first_seq: int, last_seq: int
    ) -> bool:
        """Adds those of `matches`, or as many as there is room for: then False, and they are kept for the next turn."""
        start, end = bisect_left(matches, first_seq), bisect_right(matches, last_seq)
        room = FOUND_MAX - len(found)
        found += matches[start : min(end, start + room)]
        if end - start <= room:
            return True
        self._matches = (key, matches)
        return False

    def _in_segment(self, topic_id: int, info: SegmentInfo, match: Match) -> list[int]:
        if info.flags & SEALED:
            return self._files.tags.find(topic_id, info, match)
        # Damaged, and gone on with in the next: its frames must tell, or say where they are damaged.
        return [seq for seq, tag in self._files.reader(topic_id, info).tagged() if match.covers(tag)]

    def _caught_up(
        self, topic: Topic, index: TopicIndex, open_seq: int, last_seq: int, ends_ms: int
    ) -> TagIndex | None:
        """The topic's `tags`, which know of everything up to `last_seq`. None: not yet, but of more than before."""
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

    def _tagged(self, topic: Topic, index: TopicIndex, first_seq: int, last_seq: int) -> Iterator[tuple[int, bytes]]:
        base_seq = index.ring.base_seq
        if first_seq < base_seq:
            for info in index.segments.between(first_seq, min(last_seq, base_seq - 1)):
                yield from self._files.reader(topic.id, info).tagged(first_seq, last_seq)
        if last_seq >= base_seq:
            yield from self._frames.tagged(topic, index.ring, max(first_seq, base_seq), last_seq)


def _open_seq(topic: Topic, index: TopicIndex) -> int:
    """The first that may live and is in no sealed segment."""
    return max(index.segments.sealed_last_seq + 1, index.base_seq, topic.earliest_seq)
