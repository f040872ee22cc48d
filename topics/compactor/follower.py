"""One shard as the compactor knows it: the fold of its log, how far it has been read, and what is to be done."""

from __future__ import annotations

from collections.abc import Callable

from topics.compactor.marked_index import MarkedIndex
from topics.compactor.shard_link import ShardLink
from topics.compactor.tail import LogTail
from topics.core.fold import Fold
from topics.core.topic import Topic
from topics.shm.arena import ArenaReader, TopicView
from topics.storage.frame import FrameType
from topics.storage.log_fold import fold_frames
from topics.storage.logfile import WalPosition

_ATTACH_TRIES = 10
_MAY_FREE_FILES = frozenset(
    int(kind)
    for kind in (
        FrameType.TOPIC_DELETE,
        FrameType.DELETE,
        FrameType.ACK,
        FrameType.EVICT_WATERMARK,
        FrameType.CHECKPOINT_MARK,
    )
)


class Follower:
    """`touched`: topics of which the log said anything since they were looked at last; `shrunk`: those whose segments
    may have become fewer or other ones; `sealed`: (topic id, first seq) of segments that a checkpoint sealed. Who has
    seen to them empties these.
    """

    def __init__(self, identity: str, link: ShardLink, tail: LogTail, fold: Fold) -> None:
        self.link = link
        self.fold = fold
        self.touched: set[int] = set()
        self.shrunk: set[int] = set()
        self.sealed: list[tuple[int, int]] = []
        self._identity = identity
        self._tail = tail
        self._arena: ArenaReader | None = None

    @property
    def shard(self) -> int:
        return self.link.shard

    @property
    def position(self) -> WalPosition:
        """Up to where the fold says what the log says."""
        return self._tail.position

    def log_id(self) -> int:
        return self._tail.log_id()

    def catch_up(self, until: WalPosition, alive: Callable[[], None]) -> None:
        """Reads on; `alive` is called between batches, for it may take long.

        Raises TailLost and FoldError: then this object is of no use any more; and OSError: what was read by then is
        folded, and to call it again is to go on behind that.
        """
        for batch in self._tail.read(until):
            alive()
            fold_frames(self.fold, batch, in_ram=False)
            for kind, topic_id in batch.frames.kinds_and_topics():
                self.touched.add(topic_id)
                if kind in _MAY_FREE_FILES:
                    self.shrunk.add(topic_id)
        self.fold.settle()

    def look_up(self, topic: Topic) -> TopicView | None:
        """What its shard says of a topic now; None when it has deleted it."""
        found = self.arena().look_up(topic.name)
        return found[1] if found is not None and found[1].topic_id == topic.id else None

    def arena(self) -> ArenaReader:
        """The current generation; the shard must have recovered once."""
        for _ in range(_ATTACH_TRIES):
            generation = self.link.generation
            if self._arena is not None and self._arena.generation == generation:
                return self._arena
            try:
                reader = ArenaReader(self._identity, self.shard, generation)
            except FileNotFoundError:
                continue  # replaced once more between the two lines
            if self._arena is not None:
                self._arena.close()
            self._arena = reader
        raise RuntimeError(f"index arena {generation} of shard {self.shard} is announced but not there")

    def index_of(self, topic: Topic) -> MarkedIndex:
        assert isinstance(topic.index, MarkedIndex)
        return topic.index
