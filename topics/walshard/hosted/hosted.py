"""A topic as its shard hosts it: the pure topic, its slot in the arena, and who wants to hear of it."""

from __future__ import annotations

from contextlib import suppress

from topics.core.config import TopicConfig
from topics.core.segment_list import SegmentInfo, SegmentList
from topics.core.topic import Topic
from topics.shm.arena import IS_QUEUE, SEGMENT_ROW_BYTES, ArenaWriter, Descriptor, SlotState, TopicView
from topics.shm.arena_heap import ArenaFullError, LocationRing
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.hosted.topic_index import TopicIndex


class Hosted:
    """One topic of this shard. `publish` after every change; `watchers` are frontend → token."""

    __slots__ = (
        "_arena",
        "_descriptor",
        "_holdings",
        "_outdated",
        "_shown_bytes",
        "_shown_jobs",
        "_shown_records",
        "_table",
        "_table_version",
        "_version",
        "index",
        "ram_from_seq",
        "slot",
        "topic",
        "watchers",
    )

    def __init__(self, arena: ArenaWriter, topic: Topic, index: TopicIndex, holdings: Holdings) -> None:
        self._arena = arena
        self._holdings = holdings
        self._shown_records = self._shown_bytes = 0
        self._shown_jobs = (0, 0, 0)
        self.topic = topic
        self.index = index
        self.slot = arena.new_slot()
        self._version = 1
        self._table = (0, 0)
        self._outdated: list[tuple[int, int]] = []
        """Former tables, free once the topic is published again."""
        self._table_version = 0
        """Of the list of segments that is shown."""
        try:
            self._descriptor = arena.store_descriptor(Descriptor(topic.name, topic.config))
        except Exception:
            arena.return_slot(self.slot)
            raise
        self.watchers: dict[int, int] = {}
        self.ram_from_seq = index.durable_last_seq + 1
        """In an `ephemeral` topic every record from there on is in RAM, and none before it."""

    @property
    def ring(self) -> LocationRing:
        return self.index.ring

    @property
    def has_unlogged_floor(self) -> bool:
        """Whether records were evicted of which the log does not say so."""
        return self.topic.evict_floor > self.topic.logged_floor

    @property
    def has_evicted_for_ram(self) -> bool:
        """Whether caps have evicted durable records to make room for records in RAM, and the log does not say so: who
        reads the log without those could not work it out again.
        """
        is_ephemeral = self.topic.config.durability == "ephemeral"
        return is_ephemeral and self.has_unlogged_floor and self.topic.logged_floor < self.ram_from_seq

    def announce(self) -> None:
        """Makes the topic visible to readers."""
        self.publish()
        self._arena.announce(self.slot)
        self._holdings.count_topic(self.topic.config, 1)

    def publish(self, state: SlotState = SlotState.LIVE) -> None:
        """What the topic is now is what readers see."""
        topic, ring = self.topic, self.index.ring
        self._count(topic.records, topic.live_bytes)
        if self.index.segments.version != self._table_version:
            self._renew_table()
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
                IS_QUEUE if topic.queue is not None else 0,
            ),
        )
        ring.published()
        for table in self._outdated:
            self._arena.heap.free(*table)
        self._outdated.clear()

    def prepare_segments(self, segments: SegmentList) -> tuple[int, int]:
        """A table of what the segments will be (ArenaFullError), to be taken up by `checkpointed`, or freed."""
        return self._arena.store_segments(segments)

    def release_segments(self, table: tuple[int, int]) -> None:
        """It was prepared in vain."""
        if table[1]:
            self._arena.heap.free(*table)

    def checkpointed(self, up_to_seq: int, segments: list[SegmentInfo], table: tuple[int, int]) -> None:
        """They are logged; `publish` shows them."""
        index = self.index
        index.checkpointed(up_to_seq, segments)
        self._take_up(table)
        index.drop_before(self.topic.earliest_seq)
        with suppress(ArenaFullError):
            index.ring.shrink()

    def tighten(self) -> None:
        """Of a ring that is hardly used any more, memory comes back. Between groups: nobody has reserved room in it."""
        ring = self.index.ring
        capacity = ring.capacity
        with suppress(ArenaFullError):
            ring.shrink()
        if ring.capacity != capacity:
            self.publish()

    def _renew_table(self) -> None:
        try:
            table = self._arena.store_segments(self.index.segments)
        except ArenaFullError:
            return  # there are fewer than before: the table that is shown has all that live, and some that do not
        self._take_up(table)

    def _take_up(self, table: tuple[int, int]) -> None:
        if self._table[1]:
            self._outdated.append(self._table)
        self._table = table
        self._table_version = self.index.segments.version

    def publish_counts(self) -> None:
        """Of a queue: claims and leases change what is ready and in flight, and nothing else."""
        if self.job_counts() != self._shown_jobs:
            self.publish()

    def job_counts(self) -> tuple[int, int, int]:
        queue = self.topic.queue
        return (0, 0, 0) if queue is None else (queue.ready, queue.in_flight, queue.dead_lettered)

    def prepare_config(self, config: TopicConfig) -> tuple[int, int]:
        """Room for a new descriptor (ArenaFullError), to be taken up by `configured` once it is logged."""
        return self._arena.store_descriptor(Descriptor(self.topic.name, config))

    def release_config(self, descriptor: tuple[int, int]) -> None:
        """It was not logged."""
        self._arena.heap.free(*descriptor)

    def configured(self, config: TopicConfig, descriptor: tuple[int, int]) -> None:
        """It is logged, and on the disk with all before it."""
        self._arena.heap.free(*self._descriptor)
        self._descriptor = descriptor
        self._version += 1
        self._holdings.count_topic(self.topic.config, -1)
        self._holdings.count_topic(config, 1)
        if config.durability != self.topic.config.durability:
            # Everything so far is in the durable log, and on the disk.
            self.ram_from_seq = self.topic.head_seq + 1
            self.topic.durable_seq = self.topic.head_seq
        self.topic.configured(config)

    def abandon(self) -> None:
        """A topic that never came to be: nobody has seen its slot."""
        self._arena.heap.free(*self._descriptor)
        self.index.forget()
        for table in (*self._outdated, self._table):
            if table[1]:
                self._arena.heap.free(*table)
        self._outdated.clear()
        self.ring.release()
        self._arena.return_slot(self.slot)

    def retire(self) -> None:
        """The topic was deleted: readers learn it, then slot and blocks are free."""
        self.publish(SlotState.DELETED)
        self._arena.announce(self.slot)
        self._count(0, 0)
        self._holdings.count_leases(-self._shown_jobs[1])
        self._holdings.count_topic(self.topic.config, -1)
        self.abandon()

    def _count(self, records: int, live_bytes: int) -> None:
        self._holdings.count_records(records - self._shown_records, live_bytes - self._shown_bytes)
        self._shown_records, self._shown_bytes = records, live_bytes
