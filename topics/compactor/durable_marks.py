"""Deletions that a snapshot takes for done are on the disk before it: nobody will read the log for them.

The shard marks deletions in segments at once, this process syncs the marks. A sync that failed has told of it for the
last time: the pages count as clean then, and the next sync of the same file succeeds though they never came to the
disk. So after one that failed the shard marks everything again that the log tells of since the last snapshot, and so it
does once in each life of this process, whose former one may have ended right behind such a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from topics.compactor.checkpoints import Refused
from topics.compactor.follower import Follower
from topics.compactor.marked_index import MarkedIndex
from topics.core.errors import TopicsError
from topics.core.segment_list import COLD, SegmentInfo
from topics.core.seq_set import runs_of
from topics.shm.compactor_messages import MarkAgain
from topics.shm.messages import Done
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.segment_deletes import sync_segment

SEQS_PER_MESSAGE: Final = 2048
"""A shard takes some ms for so many."""


class DurableMarks:
    """Of all shards. `alive` is called between steps; up to `one_by_one_max` segments are synced by themselves."""

    def __init__(
        self, fs: FileSystem, data_dir: str, shards: int, alive: Callable[[], None], one_by_one_max: int
    ) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._shards = shards
        self._alive = alive
        self._one_by_one_max = one_by_one_max
        self._doubted = set(range(shards))

    def doubt(self) -> None:
        """A sync of segments failed: it may have been the one that covered marks."""
        self._doubted = set(range(self._shards))

    def sync(self, followers: Iterable[Follower]) -> list[tuple[Follower, int, SegmentInfo]]:
        """Every deletion that these followers have read of is on the disk; returns (follower, topic id, segment) of
        those in segments. Raises Refused, and OSError, behind which `doubt` has to be called.
        """
        marked: list[tuple[Follower, int, SegmentInfo]] = []
        seen: list[MarkedIndex] = []
        shards = set()
        for follower in followers:
            shards.add(follower.shard)
            for topic_id in sorted(follower.shrunk):
                topic = follower.fold.topics.get(topic_id)
                if topic is None:
                    continue
                index = follower.index_of(topic)
                for info, seqs in index.deleted_in_segments():
                    if follower.shard in self._doubted:
                        self._mark_again(follower, topic_id, seqs)
                    marked.append((follower, topic_id, info))
                seen.append(index)
        if len(marked) > self._one_by_one_max:
            self._fs.sync_all(layout.topics_dir(self._data_dir))
        else:
            for _, topic_id, info in marked:
                directory = layout.topic_dir(self._data_dir, topic_id)
                sync_segment(self._fs, directory, info.first_seq, info.version, cold=bool(info.flags & COLD))
        self._doubted -= shards
        for index in seen:
            del index.deleted[:]
        return marked

    def _mark_again(self, follower: Follower, topic_id: int, seqs: Sequence[int]) -> None:
        for at in range(0, len(seqs), SEQS_PER_MESSAGE):
            runs = runs_of(seqs[at : at + SEQS_PER_MESSAGE])
            try:
                follower.link.call(MarkAgain(topic_id, runs), Done)
            except (TopicsError, OSError) as error:  # of shared memory: see `checkpoints.tell`
                raise Refused(f"shard {follower.shard}: {error}") from error
            self._alive()
