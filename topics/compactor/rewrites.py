"""What can wait: sealed segments with many deleted records are rewritten, a bounded number of bytes a second."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from topics.compactor.checkpoints import tell
from topics.compactor.follower import Follower
from topics.compactor.rewriting import measure, rewrite
from topics.core.clock import Clock
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.core.topic import Topic
from topics.log import get_logger
from topics.shm.compactor_messages import TopicCheckpoint
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.kill_points import reached
from topics.storage.postings import CorruptPostings
from topics.storage.segment import ENTRY_LEN, CorruptSegment

BYTES_PER_S: Final = 32 * 2**20
"""Read or written on behalf of rewriting: a fraction of what a disk gives to those who wait for it."""

log = get_logger()


class _Candidate(NamedTuple):
    shard: int
    topic_id: int
    first_seq: int


class Rewriting:
    """Looks at segments in which records were deleted, one a step, and rewrites those that are worth it."""

    def __init__(self, fs: FileSystem, data_dir: str, dead_ratio: float, clock: Clock) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._dead_ratio = dead_ratio
        self._clock = clock
        self._queue: deque[_Candidate] = deque()
        self._queued: set[_Candidate] = set()
        self._next_ms = 0

    def consider(self, follower: Follower, topic_id: int, first_seq: int) -> None:
        """Records of this segment were deleted."""
        candidate = _Candidate(follower.shard, topic_id, first_seq)
        if self._dead_ratio and candidate not in self._queued:
            self._queued.add(candidate)
            self._queue.append(candidate)

    def consider_all(self, follower: Follower) -> None:
        """A former life may have known of some."""
        for topic in follower.fold.topics.values():
            for info in follower.index_of(topic).segments:
                if info.flags & SEALED and not info.flags & COLD:
                    self.consider(follower, topic.id, info.first_seq)

    def due_in_ms(self) -> int | None:
        """When there is something to look at again; None: nothing is."""
        return max(0, self._next_ms - self._clock.monotonic_ms()) if self._queue else None

    def step(self, followers: list[Follower]) -> bool:
        """Looks at one segment, if it is time to; True when it was rewritten. Raises OSError, Refused."""
        if not self._queue or self._clock.monotonic_ms() < self._next_ms:
            return False
        candidate = self._queue.popleft()
        self._queued.discard(candidate)
        follower = followers[candidate.shard]
        topic = follower.fold.topics.get(candidate.topic_id)
        if topic is None:
            return False
        info = follower.index_of(topic).segments.at(candidate.first_seq)
        if info is None or info.first_seq != candidate.first_seq or not info.flags & SEALED or info.flags & COLD:
            return False
        try:
            return self._rewrite(follower, topic, info)
        except (CorruptSegment, CorruptPostings) as error:
            log.error("a damaged segment is not rewritten", reason=str(error))
            return False

    def _rewrite(self, follower: Follower, topic: Topic, info: SegmentInfo) -> bool:
        directory = layout.topic_dir(self._data_dir, topic.id)
        dead = measure(directory, info)
        if not dead.exceeds(self._dead_ratio):
            self._pause(info.records * ENTRY_LEN)
            return False
        rewritten = rewrite(self._fs, directory, info)
        self._pause(info.data_bytes + rewritten.data_bytes)
        tell(follower, [TopicCheckpoint(topic.id, follower.index_of(topic).segments.last_seq, [rewritten])])
        reached("rewrite.marked")
        follower.shrunk.add(topic.id)
        return True

    def _pause(self, size_bytes: int) -> None:
        self._next_ms = self._clock.monotonic_ms() + size_bytes * 1000 // BYTES_PER_S
