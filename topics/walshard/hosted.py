"""A topic as its shard hosts it: the pure topic, its slot in the arena, and who wants to hear of it."""

from __future__ import annotations

from topics.core.config import TopicConfig
from topics.core.topic import Topic
from topics.shm.arena import ArenaWriter, Descriptor, SlotState, TopicView
from topics.shm.location_ring import LocationRing
from topics.walshard.holdings import Holdings


class Hosted:
    """One topic of this shard. `publish` after every change; `watchers` are frontend → token."""

    __slots__ = (
        "_arena",
        "_descriptor",
        "_holdings",
        "_shown_bytes",
        "_shown_jobs",
        "_shown_records",
        "_version",
        "logged_floor",
        "ring",
        "slot",
        "topic",
        "watchers",
    )

    def __init__(self, arena: ArenaWriter, topic: Topic, ring: LocationRing, holdings: Holdings) -> None:
        self._arena = arena
        self._holdings = holdings
        self._shown_records = self._shown_bytes = 0
        self._shown_jobs = (0, 0, 0)
        self.topic = topic
        self.ring = ring
        self.slot = arena.new_slot()
        self._version = 1
        try:
            self._descriptor = arena.store_descriptor(Descriptor(topic.name, topic.config))
        except Exception:
            arena.return_slot(self.slot)
            raise
        self.watchers: dict[int, int] = {}
        self.logged_floor = topic.evict_floor
        """Up to where the log knows that records were evicted."""

    @property
    def logged_head_seq(self) -> int:
        """The head as the log has it: behind it there are only copies that can be made again."""
        return min(self.topic.head_seq, self.ring.unlogged_seq - 1)

    def announce(self) -> None:
        """Makes the topic visible to readers."""
        self.publish()
        self._arena.announce(self.slot)
        self._holdings.came(self.topic.config)

    def publish(self, state: SlotState = SlotState.LIVE) -> None:
        """What the topic is now is what readers see."""
        topic, ring = self.topic, self.ring
        self._count(topic.records, topic.live_bytes)
        jobs = self._jobs()
        if jobs[1] != self._shown_jobs[1]:
            self._holdings.leased(jobs[1] - self._shown_jobs[1])
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
                *jobs,
                topic.queue is not None,
            ),
        )
        ring.published()

    def publish_counts(self) -> None:
        """Of a queue: claims and leases change what is ready and in flight, and nothing else."""
        if self._jobs() != self._shown_jobs:
            self.publish()

    def _jobs(self) -> tuple[int, int, int]:
        queue = self.topic.queue
        return (0, 0, 0) if queue is None else (queue.ready, queue.in_flight, queue.dead_lettered)

    def prepare_config(self, config: TopicConfig) -> tuple[int, int]:
        """Room for a new descriptor (ArenaFullError), to be taken up by `configured` once it is logged."""
        return self._arena.store_descriptor(Descriptor(self.topic.name, config))

    def configured(self, config: TopicConfig, descriptor: tuple[int, int]) -> None:
        self._arena.free(*self._descriptor)
        self._descriptor = descriptor
        self._version += 1
        self._holdings.left(self.topic.config)
        self._holdings.came(config)
        self.topic.configured(config)

    def abandon(self) -> None:
        """A topic that never came to be: nobody has seen its slot."""
        self._arena.free(*self._descriptor)
        self.ring.release()
        self._arena.return_slot(self.slot)

    def retire(self) -> None:
        """The topic was deleted: readers learn it, then slot and blocks are free."""
        self.publish(SlotState.DELETED)
        self._arena.announce(self.slot)
        self._count(0, 0)
        self._holdings.leased(-self._shown_jobs[1])
        self._holdings.left(self.topic.config)
        self.abandon()

    def _count(self, records: int, live_bytes: int) -> None:
        self._holdings.changed(records - self._shown_records, live_bytes - self._shown_bytes)
        self._shown_records, self._shown_bytes = records, live_bytes
