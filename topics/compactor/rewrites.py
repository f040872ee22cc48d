"""What can wait: sealed segments with many deleted records are rewritten, a bounded number of bytes a second."""

from __future__ import annotations

import heapq
from collections import deque
from concurrent.futures import Future
from typing import Final, NamedTuple

from topics.compactor.backoff import doubled_ms
from topics.compactor.checkpoints import Refused, tell
from topics.compactor.cold_fetch import ColdFetch, Data
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

AGAIN_MS: Final = 10_000
"""After a segment could not be rewritten, or a cold directory did not give what it was asked for; doubled each time."""
AGAIN_MAX_MS: Final = 160_000

log = get_logger()


class _Candidate(NamedTuple):
    shard: int
    topic_id: int
    first_seq: int


class Rewriting:
    """Looks at segments in which records were deleted, one a step, and rewrites those that are worth it.

    Those in the cold directory come back here for that: `fetch` gets what lives of them, one at a time, and nobody
    waits for it; as the oldest of their topics they are relocated again. Without it they stay as they are.
    """

    def __init__(
        self, fs: FileSystem, data_dir: str, dead_ratio: float, clock: Clock, fetch: ColdFetch | None = None
    ) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._dead_ratio = dead_ratio
        self._clock = clock
        self._fetch = fetch
        self._queue: deque[_Candidate] = deque()
        self._queued: set[_Candidate] = set()
        self._next_ms = 0
        self._failures: dict[_Candidate, int] = {}
        self._later: list[tuple[int, _Candidate]] = []
        """Heap of (due, candidate): those that failed."""
        self._cold: dict[_Candidate, None] = {}
        """Worth it, and to be fetched first; in that order."""
        self._fetching: tuple[_Candidate, SegmentInfo] | None = None
        self._fetch_next_ms = 0
        self._fetches_failed = 0
        """In a row."""

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
                if info.flags & SEALED:
                    self.consider(follower, topic.id, info.first_seq)

    def due_in_ms(self) -> int | None:
        """When there is something to look at again; None: nothing is, but for what may have been fetched."""
        if self._queue:
            due_ms = self._next_ms
        elif self._later:
            due_ms = max(self._next_ms, self._later[0][0])
        else:
            return None
        return max(0, due_ms - self._clock.monotonic_ms())

    def step(self, followers: list[Follower]) -> bool:
        """Looks at one segment, if it is time to; True when one was rewritten. Raises OSError, Refused: what it was at
        comes again, later each time.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._next_ms:
            return False
        while self._later and self._later[0][0] <= now_ms:
            self._queue.append(heapq.heappop(self._later)[1])
        return self._look_at_next(followers) or self._go_on_with_cold(followers)

    def _look_at_next(self, followers: list[Follower]) -> bool:
        if not self._queue:
            return False
        candidate = self._queue.popleft()
        self._queued.discard(candidate)
        follower = followers[candidate.shard]
        times = self._failures.pop(candidate, 0)
        found = self._current(follower, candidate)
        if found is None:
            return False
        topic, info = found
        try:
            dead = measure(layout.topic_dir(self._data_dir, topic.id), info)
            if not dead.exceeds(self._dead_ratio):
                self._pause(info.records * ENTRY_LEN)
                return False
            if info.flags & COLD:
                if self._fetch is not None:
                    self._cold[candidate] = None
                return False
            self._rewrite(follower, topic, info, None)
        except (CorruptSegment, CorruptPostings, FileNotFoundError) as error:
            log.error("a damaged segment is not rewritten", reason=str(error))
            return False
        except (OSError, Refused):
            self._pause(info.data_bytes)
            self._failures[candidate] = times + 1
            self._queued.add(candidate)
            due_ms = self._clock.monotonic_ms() + doubled_ms(AGAIN_MS, times, AGAIN_MAX_MS)
            heapq.heappush(self._later, (due_ms, candidate))
            raise
        return True

    def _go_on_with_cold(self, followers: list[Follower]) -> bool:
        if self._fetch is None:
            return False
        if self._fetching is not None:
            future = self._fetch.take()
            if future is None:
                return False
            fetched, self._fetching = self._fetching, None
            return self._fetched(followers, *fetched, future)
        if self._cold and self._clock.monotonic_ms() >= self._fetch_next_ms:
            candidate = next(iter(self._cold))
            del self._cold[candidate]
            found = self._current(followers[candidate.shard], candidate)
            if found is not None and found[1].flags & COLD:
                self._fetching = candidate, found[1]
                self._fetch.begin(candidate.topic_id, found[1])
        return False

    def _fetched(
        self, followers: list[Follower], candidate: _Candidate, info: SegmentInfo, future: Future[Data]
    ) -> bool:
        follower = followers[candidate.shard]
        reached("rewrite.fetched")
        found = self._current(follower, candidate)
        if found is None or found[1] != info:
            if future.exception() is None:
                self._fetches_failed = 0
            return False  # and it may have failed for that: files go with their segment
        try:
            data = future.result()
            try:
                self._rewrite(follower, found[0], info, data)
            except FileNotFoundError as error:  # here: what is not there is the cold directory's to say, and may come
                raise CorruptSegment(error.filename or "", 0, "the file is missing") from error
        except (CorruptSegment, CorruptPostings, EOFError) as error:
            self._fetches_failed = 0  # the cold directory gave what it has
            log.error("a damaged segment is not rewritten", reason=str(error))
            return False
        except (OSError, Refused):
            pause_ms = doubled_ms(AGAIN_MS, self._fetches_failed, AGAIN_MAX_MS)
            self._fetches_failed += 1
            self._fetch_next_ms = self._clock.monotonic_ms() + pause_ms
            self._cold[candidate] = None
            raise
        self._fetches_failed = 0
        return True

    def _current(self, follower: Follower, candidate: _Candidate) -> tuple[Topic, SegmentInfo] | None:
        """The segment as it is now, if it is a sealed one."""
        topic = follower.fold.topics.get(candidate.topic_id)
        if topic is None:
            return None
        info = follower.index_of(topic).segments.at(candidate.first_seq)
        if info is None or info.first_seq != candidate.first_seq or not info.flags & SEALED:
            return None
        return topic, info

    def _rewrite(self, follower: Follower, topic: Topic, info: SegmentInfo, data: Data | None) -> None:
        rewritten = rewrite(self._fs, layout.topic_dir(self._data_dir, topic.id), info, data)
        self._pause(info.data_bytes + rewritten.data_bytes)
        tell(follower, [TopicCheckpoint(topic.id, follower.index_of(topic).segments.last_seq, [rewritten])])
        reached("rewrite.marked")
        follower.shrunk.add(topic.id)

    def _pause(self, size_bytes: int) -> None:
        self._next_ms = self._clock.monotonic_ms() + size_bytes * 1000 // BYTES_PER_S
