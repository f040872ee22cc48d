"""The topics that a shard hosts, by name and id."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Final

from topics.core.ceilings import Ceilings
from topics.core.clock import Clock
from topics.core.config import TopicConfig
from topics.core.errors import topic_not_found
from topics.core.fold import Fold, FoldError
from topics.core.job import Now
from topics.core.leases import Leases
from topics.core.location import LOCATION_IN_RAM_LOG
from topics.core.names import TopicIds, owner_shard
from topics.core.topic import Topic
from topics.shm.arena import ArenaWriter
from topics.shm.arena_heap import LARGE_ENTRIES, LocationRing
from topics.storage.wal import Moved
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.segment_files import SegmentFiles
from topics.walshard.hosted.topic_index import TopicIndex

_RANDOM_BITS: Final = 62


class Catalog:
    """Owns one shard's topics, and the arena in which readers see them. It has a topic once its creation is logged."""

    def __init__(
        self, shard: int, shards: int, arena: ArenaWriter, holdings: Holdings, files: SegmentFiles, clock: Clock
    ) -> None:
        self._shard = shard
        self._shards = shards
        self.arena = arena
        self._holdings = holdings
        self._files = files
        self._clock = clock
        self._ids = TopicIds(shard)
        self._by_name: dict[str, Hosted] = {}
        self._by_id: dict[int, Hosted] = {}
        self._made_ids: set[int] = set()
        """The ids of all topics whose creation the log has, or had: also of those that were deleted."""
        self._deleted_names: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Hosted]:
        return iter(self._by_name.values())

    def find(self, name: str) -> Hosted | None:
        return self._by_name.get(name)

    def find_id(self, topic_id: int) -> Hosted | None:
        return self._by_id.get(topic_id)

    def was_made(self, topic_id: int) -> bool:
        """False for a topic whose creation is not in the log: a power loss took it, or another service made it."""
        return topic_id in self._made_ids

    def require(self, name: str) -> Hosted:
        """Return a topic, or raise `topic_not_found`."""
        hosted = self._by_name.get(name)
        if hosted is None:
            raise topic_not_found(name)
        return hosted

    def make(self, name: str, config: TopicConfig, now_ms: int, admitted: bool = False) -> Hosted:
        """Make a topic that nobody sees yet; the caller must `host` or `abandon` it. With `admitted` the quota is not
        asked. Raise ArenaFullError, or `throttled` (quota).
        """
        self._holdings.claim_topic(admitted)
        ring: LocationRing | None = None
        try:
            ring = LocationRing(self.arena.heap, 1)
            recreated = name in self._deleted_names
            topic_id = self._ids.next(now_ms)
            index = TopicIndex(topic_id, ring, self._files)
            index.copied_seq = 0  # keeps every entry until `Sources` has looked whether routers copy the topic
            topic = Topic(topic_id, name, config, index, recreated)
            topic.ceilings = Ceilings.of_new(config)
            self._start(topic)
            return Hosted(self.arena, topic, index, self._holdings)
        except Exception:
            if ring is not None:
                ring.release()
            self._holdings.release_topic()
            raise

    def abandon(self, hosted: Hosted) -> None:
        """Drop a topic that was made, but whose creation did not get into the log."""
        hosted.abandon()
        self._holdings.release_topic()

    def host(self, hosted: Hosted) -> None:
        """Let readers see a topic whose creation is logged."""
        assert hosted.topic.name not in self._by_name
        self._by_name[hosted.topic.name] = self._by_id[hosted.topic.id] = hosted
        self._made_ids.add(hosted.topic.id)
        hosted.announce()

    def _start(self, topic: Topic) -> None:
        """Begin new random numbers of leases and cursors, so that those of a former life are recognised as old."""
        random = secrets.randbits(_RANDOM_BITS)
        topic.cursors.restart(random)
        if topic.queue is not None:
            now = Now(self._clock.now_ms(), self._clock.monotonic_ms())
            topic.queue.start(now, random, topic.config.leases_durable)

    def retire(self, hosted: Hosted) -> None:
        """Drop a topic whose deletion is logged."""
        del self._by_name[hosted.topic.name], self._by_id[hosted.topic.id]
        self._deleted_names.add(hosted.topic.name)
        hosted.retire()

    def shrink_ring(self, hosted: Hosted) -> None:
        """Shrink a large ring of an `ephemeral` topic. Called between groups; checkpoints shrink all other rings."""
        if hosted.index.ring.capacity >= LARGE_ENTRIES and hosted.topic.config.durability == "ephemeral":
            hosted.shrink_ring()

    def take_over(self, fold: Fold) -> None:
        """Host the topics of a recovered log. Raise FoldError if another shard owns one, or two share a name."""
        self._deleted_names = fold.deleted_names
        self._made_ids = fold.created_ids
        for topic_id in self._made_ids:
            self._ids.used(topic_id)
        for topic in fold.topics.values():
            if owner_shard(topic.name, self._shards) != self._shard:
                raise FoldError(f"topic {topic.name!r} is in the log of shard {self._shard}, which does not own it")
            if topic.name in self._by_name:
                raise FoldError(f"two topics in the log of shard {self._shard} are called {topic.name!r}")
            self._start(topic)
            self._host_folded(topic)

    def follow(self, topic: Topic) -> Hosted:
        """Host a topic that a follower's fold has made; of a hosted queue, take over the jobs as the fold has them."""
        hosted = self._by_id.get(topic.id)
        if topic.queue is not None:
            state, topic.queue = topic.queue.state(), Leases(topic)
            topic.queue.restore(state)
        if hosted is None or topic.queue is not None:
            self._start(topic)
        return hosted or self._host_folded(topic)

    def _host_folded(self, topic: Topic) -> Hosted:
        assert isinstance(topic.index, TopicIndex)
        hosted = Hosted(self.arena, topic, topic.index, self._holdings)
        self.host(hosted)
        return hosted

    def relocate(self, moved: Moved) -> None:
        """Change the locations of frames that the durable log has moved to another file, and publish the topics."""
        shift = moved.new_start - moved.start
        for hosted in self:
            ring = hosted.ring
            if ring.next_seq == ring.base_seq:
                continue
            entries = ring.entries(ring.base_seq, ring.next_seq - 1)
            for at, (offset_len, file_flags) in enumerate(zip(entries[2::4], entries[3::4], strict=True)):
                in_ram = file_flags >> 32 & LOCATION_IN_RAM_LOG
                offset = offset_len & 0xFFFF_FFFF
                if in_ram or file_flags & 0xFFFF_FFFF != moved.file_no or not moved.start <= offset < moved.end:
                    continue
                ring.replace(ring.base_seq + at, 2, offset_len + shift)
                ring.replace(ring.base_seq + at, 3, file_flags - moved.file_no + moved.new_file_no)
            hosted.publish()
