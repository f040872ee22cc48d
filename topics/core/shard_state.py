"""The state of one shard up to a place in its log, without the records themselves: the body of a snapshot. It includes
what the durable log knows about records that only the RAM log has. Pure.

Each struct is a msgpack array in the order of its fields. A new field goes to the end and has a default, so that a
release reads the snapshots of earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import msgspec

from topics.core.config import TopicConfig
from topics.core.floors import Floors
from topics.core.job import ConsumerState
from topics.core.routers import FoldedRouters
from topics.core.segment_list import SegmentInfo
from topics.core.seq_set import Run, SeqSet, runs_of
from topics.core.topic import Topic


class FoldedTopic(msgspec.Struct, array_like=True):
    """One topic. `keys` are (key, first_seq, records, ts), oldest first. `ephemeral_head_seq` is the seq of the last
    HEAD_WATERMARK (None without any), `exact_head_seq` that of the last exact one. `segments` may go beyond `head_seq`.
    `deleted_in_ram` are deleted records that a RAM log may still have. `head_ceiling` is that of the topic while it is
    durable. The last two are the topic's (`core/topic.py`).
    """

    id: int
    name: str
    config: TopicConfig
    recreated: bool
    head_seq: int
    last_write_ts: int
    floors: Floors
    segments: list[SegmentInfo]
    keys: list[tuple[bytes, int, int, int]]
    ephemeral_head_seq: int | None
    consumers: ConsumerState = ConsumerState()
    deleted_in_ram: list[Run] = []
    exact_head_seq: int = 0
    head_ceiling: int = 0
    lost_tail_seq: int = 0
    restored_seq: int = 0


class ShardState(msgspec.Struct, array_like=True):
    """One shard. `deleted_ids` are the ids of deleted topics, ascending, each as its distance to the one before."""

    topics: list[FoldedTopic] = []
    deleted_ids: list[int] = []
    deleted_names: list[str] = []
    routers: FoldedRouters = msgspec.field(default_factory=FoldedRouters)

    def all_deleted_ids(self) -> set[int]:
        return set(accumulate(self.deleted_ids))

    def set_deleted_ids(self, topic_ids: Iterable[int]) -> None:
        self.deleted_ids = [later - former for former, later in pairwise([0, *sorted(topic_ids)])]


class RamPeriods:
    """The durable log's knowledge of records that only the RAM log has, by topic id: the seqs that they may have, and
    which of these are deleted. A topic has such records while it is `ephemeral`. In logs of release 0.1.0 it has them
    also afterwards, until segments have everything before its head.
    """

    def __init__(self) -> None:
        self._ceilings: dict[int, int] = {}
        self._exact_heads: dict[int, int] = {}
        self._deleted: dict[int, SeqSet] = {}

    def head(self, topic_id: int, seq: int, exact: bool) -> None:
        """Take a HEAD_WATERMARK: seqs up to it may have been assigned; if `exact`, these and no others were."""
        if exact:
            self._ceilings[topic_id] = self._exact_heads[topic_id] = seq
        else:
            self._ceilings[topic_id] = max(seq, self._ceilings.get(topic_id, 0))

    def ceiling(self, topic_id: int) -> int | None:
        """Return the last seq that may have been assigned in RAM; None for a topic that never had records there."""
        return self._ceilings.get(topic_id)

    def exact_head(self, topic_id: int) -> int:
        """Return a seq up to which all were assigned."""
        return self._exact_heads.get(topic_id, 0)

    def deleted(self, topic_id: int, seqs: Sequence[int]) -> None:
        """Remember deleted records (ascending seqs) that the RAM log may still have. A start reads the RAM log from its
        beginning, and fills in what was lost with it after all DELETE frames: both would undo these deletions.
        """
        if topic_id in self._ceilings:
            known = self._deleted.setdefault(topic_id, SeqSet())
            for first, last in runs_of(seqs):
                known.add(first, last)

    def has_deleted(self, topic_id: int) -> bool:
        return topic_id in self._deleted

    def deleted_runs(self, topic: Topic) -> list[Run]:
        """Return the deleted records that neither segments nor floors tell yet."""
        known = self._deleted.get(topic.id)
        if known is None:
            return []
        known.discard_below(max(topic.earliest_seq, topic.index.segments.last_seq + 1))
        return known.runs()

    def forget(self, topic_id: int) -> None:
        """Forget a deleted topic."""
        self._ceilings.pop(topic_id, None)
        self._exact_heads.pop(topic_id, None)
        self._deleted.pop(topic_id, None)

    def restore(self, kept: FoldedTopic) -> None:
        """Restore what a snapshot has of a topic."""
        if kept.deleted_in_ram:
            self._deleted[kept.id] = SeqSet(kept.deleted_in_ram)
        if kept.ephemeral_head_seq is not None:
            self._ceilings[kept.id] = kept.ephemeral_head_seq
        if kept.exact_head_seq:
            self._exact_heads[kept.id] = kept.exact_head_seq
