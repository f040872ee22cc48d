"""What the durable log says of records that are in RAM alone: how far heads may be, and which were deleted.

A topic has such records while it is `ephemeral`. In logs of release 0.1.0 also afterwards, until segments have
everything before its head.
"""

from __future__ import annotations

from collections.abc import Sequence

from topics.core.seq_set import Run, SeqSet, runs_of
from topics.core.shard_state import FoldedTopic
from topics.core.topic import Topic


class RamPeriods:
    """By topic id, as the fold comes upon it."""

    def __init__(self) -> None:
        self._ceilings: dict[int, int] = {}
        self._exact_heads: dict[int, int] = {}
        self._deleted: dict[int, SeqSet] = {}

    def head(self, topic_id: int, seq: int, exact: bool) -> None:
        """HEAD_WATERMARK: seqs up to there may have been given out; if `exact`, these and no others were."""
        if exact:
            self._ceilings[topic_id] = self._exact_heads[topic_id] = seq
        else:
            self._ceilings[topic_id] = max(seq, self._ceilings.get(topic_id, 0))

    def ceiling(self, topic_id: int) -> int | None:
        """No seq above it was given out in RAM; None for a topic that never had records there."""
        return self._ceilings.get(topic_id)

    def exact_head(self, topic_id: int) -> int:
        """Every seq up to it was given out."""
        return self._exact_heads.get(topic_id, 0)

    def deleted(self, topic_id: int, seqs: Sequence[int]) -> None:
        """Deleted records (ascending), which a RAM log may still have: it is read from its beginning, and what is lost
        with one is filled in at the end, behind the frames that say so.
        """
        if topic_id in self._ceilings:
            known = self._deleted.setdefault(topic_id, SeqSet())
            for first, last in runs_of(seqs):
                known.add(first, last)

    def has_deleted(self, topic_id: int) -> bool:
        return topic_id in self._deleted

    def deleted_runs(self, topic: Topic) -> list[Run]:
        """Of those, what segments and floors do not say by now."""
        known = self._deleted.get(topic.id)
        if known is None:
            return []
        known.discard_below(max(topic.earliest_seq, topic.index.segments.last_seq + 1))
        return known.runs()

    def forget(self, topic_id: int) -> None:
        """The topic was deleted."""
        self._ceilings.pop(topic_id, None)
        self._exact_heads.pop(topic_id, None)
        self._deleted.pop(topic_id, None)

    def restore(self, kept: FoldedTopic) -> None:
        """As the snapshot has it."""
        if kept.deleted_in_ram:
            self._deleted[kept.id] = SeqSet(kept.deleted_in_ram)
        if kept.ephemeral_head_seq is not None:
            self._ceilings[kept.id] = kept.ephemeral_head_seq
        if kept.exact_head_seq:
            self._exact_heads[kept.id] = kept.exact_head_seq
