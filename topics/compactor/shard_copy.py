"""One shard as the compactor sees it: the ring to it, and its copy, the fold of its log."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress

from topics.core.errors import TopicsError
from topics.core.fold import Fold
from topics.core.record_index import UnlocatedIndex
from topics.core.topic import Topic
from topics.shm import messages
from topics.shm.arena import ArenaReader, TopicView, announced_arena
from topics.shm.asks import Asks, ReplyT
from topics.shm.control import ProcessState, Role, log_bytes
from topics.shm.instance import SharedMemory
from topics.shm.messages import MessageKind
from topics.shm.shm_names import SHM_ROOT
from topics.storage.frame import Bytes, FrameType
from topics.storage.log_fold import fold_frames
from topics.storage.log_tail import LogTail
from topics.storage.logfile import WalPosition


class ShardLink:
    """The compactor's end of its ring to one shard: one request at a time, each answered, even if the shard restarts.

    `wait` is called until an answer is there: it sleeps a little, and raises to give up.
    """

    def __init__(self, shared: SharedMemory, shard: int, incarnation: int, wait: Callable[[], None]) -> None:
        self.shard = shard
        self._cell = shared.control.cell(Role.WALSHARD, shard)
        pair = shared.rings[shared.compactor_row][shard]
        self._requests = pair.requests
        self._replies = pair.replies
        self._wake = shared.shard_wakes[shard]
        self._wait = wait
        # Each life uses another file: a request of a former life may still be in the ring and name its file.
        self._spill_path = f"{SHM_ROOT}/topics-{shared.identity}-compactor-{shard}-{incarnation}"
        self._last_id = incarnation << 40

    @property
    def committed(self) -> WalPosition | None:
        """The position behind the last frame that is in the log for good; None while the shard recovers."""
        word = self._cell.get("committed")
        if not word or self._cell.get("state") == ProcessState.RECOVERING:
            return None
        return WalPosition.of_word(word)

    @property
    def written_bytes(self) -> int:
        """The bytes of its log since the snapshot with which the service started."""
        return log_bytes(self._cell)

    @property
    def generation(self) -> int:
        """The generation of its arena; 0 until the shard has recovered for the first time."""
        return self._cell.get("generation")

    def call(self, request: Asks[ReplyT]) -> ReplyT:
        """Send a request, wait for the answer and return it.

        Raise TopicsError for a refusal, OSError when shared memory has no room for a long request, and what `wait`
        raises.
        """
        self._last_id = request_id = self._last_id + 1
        parts = messages.encode_call(request_id, request)
        spilled = sum(map(len, parts)) > self._requests.message_max_bytes
        if spilled:
            self._spill(parts)
            parts = messages.encode_reference(MessageKind.CALL, request_id, self._spill_path)
        while not self._requests.push(*parts):
            self.take_notices()
            self._wait()
        self._wake.signal()
        while True:
            reply = self._take(request_id)
            if reply is not None:
                break
            self._wait()
        if spilled:
            os.unlink(self._spill_path)
        if isinstance(reply, TopicsError):
            raise reply
        return request.checked(reply)

    def _spill(self, parts: Iterable[Bytes]) -> None:
        try:
            with open(self._spill_path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.writelines(parts)
        except OSError:
            with suppress(OSError):
                os.unlink(self._spill_path)  # other objects need the room
            raise

    def take_notices(self) -> None:
        """Drop notices of the shard, so that they do not fill the ring."""
        self._take(0)

    def _take(self, request_id: int) -> object | None:
        found: object | None = None
        position = self._replies.consumed
        for message, position in self._replies.peek():  # noqa: B007
            kind, answered_id, _ = messages.head(message)
            # Skip notices, answers to a former life, and a second answer of a restarted shard.
            if not answered_id or answered_id != request_id or found is not None:
                continue
            if kind == MessageKind.ERROR:
                found = messages.decode_error(message)
            else:
                assert kind == MessageKind.CALL, kind
                found = messages.decode(message)
        self._replies.consume(position)
        return found


_MAY_FREE_FILES = frozenset(
    (FrameType.TOPIC_DELETE, FrameType.DELETE, FrameType.ACK, FrameType.EVICT_WATERMARK, FrameType.CHECKPOINT_MARK)
)


class ShardCopy:
    """The compactor's copy of one shard. Owns the fold of its log, up to `tail.position`.

    `touched` has topics with news in the log since their last checkpoint, `shrunk` topics that may have lost or
    replaced segments since the last sweep. `sealed` has (topic id, first seq) of segments that a checkpoint sealed, for
    rewriting. The code that has processed a set empties it.
    """

    def __init__(self, identity: str, link: ShardLink, tail: LogTail, fold: Fold) -> None:
        self.link = link
        self.shard = link.shard
        self.fold = fold
        self.tail = tail
        self.touched: set[int] = set()
        self.shrunk: set[int] = set()
        self.sealed: list[tuple[int, int]] = []
        self._identity = identity
        self._arena: ArenaReader | None = None

    def catch_up(self, until: WalPosition, alive: Callable[[], None]) -> None:
        """Read the log up to `until`; `alive` is called between batches.

        Raise TailLost and FoldError: do not use this object any more then. After an OSError another call goes on where
        this one stopped.
        """
        for batch in self.tail.read(until):
            alive()
            fold_frames(self.fold, batch, in_ram=False)
            for kind, topic_id in batch.frames.kinds_and_topics():
                self.touched.add(topic_id)
                if kind in _MAY_FREE_FILES:
                    self.shrunk.add(topic_id)
        self.fold.apply_pending()

    def deleted(self, topic_id: int) -> None:
        """Apply the deletion of a topic before this copy has read it. Later it skips the topic's frames before that."""
        self.fold.topic_delete(topic_id)
        self.shrunk.add(topic_id)

    def look_up(self, topic: Topic) -> TopicView | None:
        """Return the topic as its shard shows it now; None when the shard has deleted it."""
        found = self.arena().look_up(topic.name)
        return found[1] if found is not None and found[1].topic_id == topic.id else None

    def arena(self) -> ArenaReader:
        """Return the reader of the current arena; the shard must have recovered once."""
        if self._arena is None or self._arena.generation != self.link.generation:
            reader = announced_arena(self._identity, self.shard, lambda: self.link.generation)
            if self._arena is not None:
                self._arena.close()
            self._arena = reader
        return self._arena

    def index_of(self, topic: Topic) -> UnlocatedIndex:
        """Return a topic's index. Its `deleted` has the deletions that are not synced yet; `DurableMarks` empties it.
        It has seqs and not segments, because the log may have a deletion before the mark of the segment that got it.
        """
        assert isinstance(topic.index, UnlocatedIndex)
        return topic.index
