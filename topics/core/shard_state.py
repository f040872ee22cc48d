"""The state of one shard up to a place in its log, without the records themselves: the body of a snapshot. Pure.

Each struct is a msgpack array in the order of its fields. A new field goes to the end and has a default, so that a
release reads the snapshots of earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

import msgspec

from topics.core.config import TopicConfig
from topics.core.floors import Floors
from topics.core.job import ConsumerState
from topics.core.routers import FoldedRouters
from topics.core.segment_list import SegmentInfo
from topics.core.seq_set import Run


class FoldedTopic(msgspec.Struct, array_like=True):
    """One topic. `keys` are (key, first_seq, records, ts), oldest first. `ephemeral_head_seq` is the seq of the last
    HEAD_WATERMARK (None without any), `exact_head_seq` that of the last exact one. `segments` may go beyond `head_seq`.
    `deleted_in_ram` are deleted records that a RAM log may still have. `head_ceiling` and `lost_tail_seq` are those of
    the topic while it is durable.
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
