"""Which records of a topic have a tag, wherever they are: what a delete by tag asks (`core/topic.py`).

Of sealed segments their postings say it. All others, in the active segment and in the logs, are in the topic's
`TagIndex`, which catches up when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator

from topics.core.record_index import FindTagged
from topics.core.segment_list import SEALED
from topics.core.tags import Match, TagIndex
from topics.core.topic import Topic
from topics.walshard.frame_tags import FrameTags
from topics.walshard.segment_files import SegmentFiles
from topics.walshard.topic_index import TopicIndex


class TagSearch:
    """For all topics of one shard. What it finds may raise OSError, CorruptSegment and CorruptPostings."""

    def __init__(self, files: SegmentFiles, frames: FrameTags) -> None:
        self._files = files
        self._frames = frames

    def of(self, topic: Topic, index: TopicIndex) -> FindTagged:
        """What `Topic.plan_delete` asks for."""

        def find(match: Match, first_seq: int, last_seq: int) -> list[int]:
            return self._find(topic, index, match, first_seq, last_seq)

        return find

    def forget_log_files(self, file_no: int) -> None:
        """Log files numbered below are gone."""
        self._frames.forget_below(file_no)

    def _find(self, topic: Topic, index: TopicIndex, match: Match, first_seq: int, last_seq: int) -> list[int]:
        sealed_seq = index.segments.sealed_last_seq
        found: list[int] = []
        for info in index.segments.between(first_seq, sealed_seq):
            if info.flags & SEALED:
                found += self._files.tags.find(topic.id, info, match)
            else:  # damaged, and gone on with in the next: its frames must tell, or say where they are damaged
                tagged = self._files.reader(topic.id, info).tagged()
                found += [seq for seq, tag in tagged if match.covers(tag)]
        open_seq = max(sealed_seq + 1, index.base_seq, topic.earliest_seq)
        if last_seq >= open_seq:
            if topic.tags is None:
                topic.tags = TagIndex(open_seq)
            topic.tags.catch_up(open_seq, topic.head_seq, lambda first, last: self._tagged(topic, index, first, last))
            found += [seq for seq in topic.tags.find(match) if seq >= open_seq]
        return [seq for seq in found if first_seq <= seq <= last_seq]

    def _tagged(self, topic: Topic, index: TopicIndex, first_seq: int, last_seq: int) -> Iterator[tuple[int, bytes]]:
        base_seq = index.ring.base_seq
        if first_seq < base_seq:
            for info in index.segments.between(first_seq, min(last_seq, base_seq - 1)):
                yield from self._files.reader(topic.id, info).tagged(first_seq, last_seq)
        if last_seq >= base_seq:
            yield from self._frames.tagged(topic, index.ring, max(first_seq, base_seq), last_seq)
