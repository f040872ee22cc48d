"""A topic as its shard hosts it: the pure topic, its slot in the arena, and the frontends that watch it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from topics.core.config import TopicConfig
from topics.core.segment_list import SegmentInfo, SegmentList
from topics.core.topic import Topic
from topics.shm.arena import HAS_CURSORS, IS_QUEUE, SEGMENT_ROW_BYTES, ArenaWriter, Descriptor, SlotState, TopicView
from topics.shm.arena_heap import ArenaFullError, LocationRing
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.hosted.topic_index import TopicIndex


@dataclass(eq=False, slots=True)
class Hosted:
    """One topic of this shard. It owns the topic's slot in the arena, and `publish` must follow every change.
    `watchers` are the frontends that watch it: frontend → its token of the topic.
    """

    _arena: ArenaWriter
    topic: Topic
    index: TopicIndex
    _holdings: Holdings
    slot: int = field(init=False)
    ram_from_seq: int = field(init=False)
    """First seq that an `ephemeral` topic has in the RAM log; all records below are in the durable log or segments."""
    watchers: dict[int, int] = field(default_factory=dict)
    _shown_records: int = 0
    _shown_bytes: int = 0
    _shown_jobs: tuple[int, int, int, int] = (0, 0, 0, 0)
    _descriptor: tuple[int, int] = field(init=False)
    _version: int = 1
    _table: tuple[int, int] = (0, 0)
    _table_version: int = 0
    """Version of the published list of segments."""
    _outdated: list[tuple[int, int]] = field(default_factory=list)
    """Former tables, to be freed once the topic is published again."""

    def __post_init__(self) -> None:
        self.slot = self._arena.new_slot()
        try:
            self._descriptor = self.prepare_config(self.topic.config)
        except Exception:
            self._arena.return_slot(self.slot)
            raise
        self.ram_from_seq = self.index.durable_last_seq + 1

    @property
    def ring(self) -> LocationRing:
        return self.index.ring

    @property
    def has_unlogged_floor(self) -> bool:
        """Return whether caps evicted records, but the log does not have the new floor yet."""
        return self.topic.evict_floor > self.topic.logged_floor

    @property
    def has_evicted_for_ram(self) -> bool:
        """Return whether records in RAM evicted durable ones, unlogged so far: the durable log cannot show that."""
        is_ephemeral = self.topic.config.durability == "ephemeral"
        return is_ephemeral and self.has_unlogged_floor and self.topic.logged_floor < self.ram_from_seq

    def announce(self) -> None:
        """Make the topic visible to readers."""
        self.publish()
        self._arena.announce(self.slot)
        self._holdings.count_topic(self.topic.config, 1)

    def publish(self, state: SlotState = SlotState.LIVE) -> None:
        """Let readers see the topic as it is now."""
        topic, ring = self.topic, self.index.ring
        self._count(topic.records, topic.live_bytes)
        if self.index.segments.version != self._table_version:
            # Without memory for a new table the old one stays: it has all live segments, and some dropped ones.
            with suppress(ArenaFullError):
                self._take_up(self._arena.store_segments(self.index.segments))
        jobs = self.job_counts()
        if jobs[1] != self._shown_jobs[1]:
            self._holdings.count_leases(jobs[1] - self._shown_jobs[1])
        self._shown_jobs = jobs
        self._arena.publish(
            self.slot,
            TopicView(
                topic.id,
                state,
                topic.head_seq,
                ring.base_seq,
                topic.earliest_seq,
                topic.evict_floor,
                topic.evict_reason,
                topic.records,
                topic.live_bytes,
                topic.durable_seq,
                topic.last_write_ts,
                ring.word,
                ring.capacity,
                self._descriptor[0],
                self._descriptor[1],
                self._version,
                topic.evict_run_seq,
                topic.recreated,
                self._table[0] >> 3,
                self._table[1] // SEGMENT_ROW_BYTES | (self._table_version & 0xFFFF_FFFF) << 32,
                *jobs,
                (IS_QUEUE if topic.queue is not None else 0) | (HAS_CURSORS if len(topic.cursors) else 0),
                topic.archived_seq,
                topic.restored_seq,
            ),
        )
        ring.published()
        for table in self._outdated:
            self._arena.heap.free(*table)
        self._outdated.clear()

    def prepare_segments(self, segments: SegmentList) -> tuple[int, int]:
        """Store a table of new segments; the caller passes it to `checkpointed` or `release`. Raise ArenaFullError."""
        return self._arena.store_segments(segments)

    def release(self, memory: tuple[int, int]) -> None:
        """Free a table or a descriptor that is not needed. An empty table has no memory to free."""
        if memory[1]:
            self._arena.heap.free(*memory)

    def checkpointed(self, segments: list[SegmentInfo], table: tuple[int, int]) -> None:
        """Take over segments that are logged; `publish` shows them."""
        index = self.index
        index.checkpointed(segments)
        self._take_up(table)
        index.drop_before(self.topic.earliest_seq)
        with suppress(ArenaFullError):
            index.ring.shrink()

    def shrink_ring(self) -> None:
        """Free unused memory of the ring. Only to be called between groups, when nobody has reserved room in it."""
        ring = self.index.ring
        capacity = ring.capacity
        with suppress(ArenaFullError):
            ring.shrink()
        if ring.capacity != capacity:
            self.publish()

    def _take_up(self, table: tuple[int, int]) -> None:
        if self._table[1]:
            self._outdated.append(self._table)
        self._table = table
        self._table_version = self.index.segments.version

    def publish_counts(self) -> None:
        """Publish a queue if its counts have changed. Claims and leases change nothing else that readers see."""
        if self.job_counts() != self._shown_jobs:
            self.publish()

    def job_counts(self) -> tuple[int, int, int, int]:
        queue = self.topic.queue
        if queue is None:
            return (0, 0, 0, 0)
        return (queue.ready, queue.in_flight, queue.scheduled, queue.dead_lettered)

    def prepare_config(self, config: TopicConfig) -> tuple[int, int]:
        """Store a new descriptor; the caller passes it to `configured` or `release`. Raise ArenaFullError."""
        return self._arena.store_descriptor(Descriptor(self.topic.name, config))

    def configured(self, config: TopicConfig, descriptor: tuple[int, int]) -> None:
        """Take over a configuration that is logged. A new durability class is on the disk with all before it."""
        self._arena.heap.free(*self._descriptor)
        self._descriptor = descriptor
        self._version += 1
        self._holdings.count_topic(self.topic.config, -1)
        self._holdings.count_topic(config, 1)
        if config.durability != self.topic.config.durability:
            # The class changes only once everything so far is in the durable log and on the disk.
            self.ram_from_seq = self.topic.head_seq + 1
            self.topic.durable_seq = self.topic.head_seq
        self.topic.configured(config)

    def abandon(self) -> None:
        """Free everything of a topic whose slot nobody sees."""
        self.index.forget()
        for memory in (self._descriptor, *self._outdated, self._table):
            self.release(memory)
        self._outdated.clear()
        self.ring.release()
        self._arena.return_slot(self.slot)

    def retire(self) -> None:
        """Tell readers that the topic was deleted, then free everything."""
        self.publish(SlotState.DELETED)
        self._arena.announce(self.slot)
        self._count(0, 0)
        self._holdings.count_leases(-self._shown_jobs[1])
        self._holdings.count_topic(self.topic.config, -1)
        self.topic.queue = None  # breaks a reference cycle, which only a full garbage collection would find
        self.abandon()

    def _count(self, records: int, live_bytes: int) -> None:
        self._holdings.count_records(records - self._shown_records, live_bytes - self._shown_bytes)
        self._shown_records, self._shown_bytes = records, live_bytes
