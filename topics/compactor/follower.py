"""One shard as the compactor sees it: the ring to it, the tail of its log, and the fold of that log.

Unlike recovery this repairs nothing: committed bytes are valid, so an invalid frame means that the reader is in the
wrong place.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from topics.core.errors import TopicsError
from topics.core.fold import Fold
from topics.core.record_index import UnlocatedIndex
from topics.core.segment_list import SegmentInfo
from topics.core.topic import Topic
from topics.shm import messages
from topics.shm.arena import ArenaReader, TopicView
from topics.shm.asks import Asks, ReplyT
from topics.shm.control import ProcessState, Role, log_bytes
from topics.shm.instance import SharedMemory
from topics.shm.messages import MessageKind
from topics.shm.shm_names import SHM_ROOT
from topics.storage import layout
from topics.storage.frame import Bytes, FrameType
from topics.storage.frame_columns import scan_columns
from topics.storage.log_fold import fold_frames
from topics.storage.logfile import FileStart, NotALogFile, WalPosition, map_file, parse_file_start
from topics.storage.recovery import BATCH_FRAMES, FRAMING_TYPES, RecoveredFile


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
        # Another file in each life: a request of a former life may still be in the ring.
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
        """The bytes of its log that were in no snapshot when the service started, or were written since."""
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
            # Others are notices, answers to a former life, or a second answer of a restarted shard.
            if not answered_id or answered_id != request_id or found is not None:
                continue
            if kind == MessageKind.ERROR:
                found = messages.decode_error(message)
            else:
                assert kind == MessageKind.CALL, kind
                found = messages.decode(message)
        self._replies.consume(position)
        return found


_HEAD_BYTES: Final = 4096


class TailLost(Exception):  # noqa: N818 — named for what it is
    """The log does not continue where this reader stopped: begin again from the newest snapshot."""


class LogTail:
    """A reader of one shard's log, up to where the shard has committed. It yields every frame once.

    `position` is behind the last frame that was read.
    """

    def __init__(self, directory: str, position: WalPosition) -> None:
        self.directory = directory
        self.position = position

    def read(self, until: WalPosition) -> Iterator[RecoveredFile]:
        """Yield the frames up to `until`, which the shard has committed, in batches; without those of FRAMING_TYPES.

        `position` moves behind a batch when the next one is asked for. Raise TailLost and OSError.
        """
        if until < self.position:
            raise TailLost(f"{self.directory}: was read up to {self.position}, but is committed only up to {until}")
        while self.position.file_no < until.file_no:
            yield from self._rest_of_file()
        yield from self._read(until.offset)

    def log_id(self) -> int:
        """Return the log id of the file at `position`."""
        path = layout.log_path(self.directory, self.position.file_no)
        return self._start_of(path).log_id

    def _rest_of_file(self) -> Iterator[RecoveredFile]:
        """Read up to where the next file continues."""
        file_no = self.position.file_no
        following = self._start_of(layout.log_path(self.directory, file_no + 1))
        if following.previous_end is None:
            yield from self._read(None)
        elif self.position.offset < following.previous_end:
            yield from self._read(following.previous_end)
        # Frames behind `previous_end` come again in the next file; to read them twice changes nothing.
        self.position = WalPosition(file_no + 1, 0)

    def _read(self, end: int | None) -> Iterator[RecoveredFile]:
        """Read from `position` exactly to `end`, without one to the FILE_END that names the next file."""
        file_no = self.position.file_no
        path = layout.log_path(self.directory, file_no)
        with self._open(path) as mapped, memoryview(mapped) as view:
            offset = self.position.offset or _parse(path, mapped[:_HEAD_BYTES])[1]
            limit = len(view) if end is None else end
            while offset < limit or end is None:
                frames, next_offset, defect = scan_columns(view, offset, limit, BATCH_FRAMES, trusts_records=True)
                ending_at = frames.find(FrameType.FILE_END)
                ending = frames[ending_at] if ending_at < len(frames) else None
                if ending is not None and (end is not None or ending[4:6] != (file_no, ending[0])):
                    raise TailLost(f"{path}: ends at offset {ending[0]}, before its committed end")
                if ending is None and (defect is not None or not frames):
                    raise TailLost(f"{path}: has no frame at offset {next_offset}: {defect}")
                kept = frames.without(FRAMING_TYPES)
                if kept:
                    yield RecoveredFile(file_no, path, view, kept)
                offset = next_offset
                self.position = WalPosition(file_no, offset)
                if ending is not None:
                    return

    def _start_of(self, path: str) -> FileStart:
        with self._open(path) as mapped:
            return _parse(path, mapped[:_HEAD_BYTES])[0]

    def _open(self, path: str) -> mmap.mmap:
        try:
            return map_file(path)
        except FileNotFoundError as error:
            raise TailLost(f"{path}: does not exist, but the log continues in it") from error
        except EOFError as error:
            raise TailLost(f"{path}: is empty") from error


def _parse(path: str, head: bytes) -> tuple[FileStart, int]:
    try:
        return parse_file_start(path, head)
    except NotALogFile as error:
        raise TailLost(f"{path}: is not a log file: {error}") from error


class MarkedIndex(UnlocatedIndex):
    """A topic's index as the compactor needs it: its segments, and its new deletions.

    `deleted` are those that are not synced yet (`DurableMarks` empties it). They are seqs, not segments, for the log
    may have a deletion before the segment in which it was marked.
    """

    __slots__ = ()

    def deleted_in_segments(self) -> list[tuple[SegmentInfo, Sequence[int]]]:
        """Return (segment, its seqs in `deleted`, ascending) for each segment that has any."""
        if not self.deleted:
            return []
        seqs = sorted(self.deleted)
        found: list[tuple[SegmentInfo, Sequence[int]]] = []
        start = 0
        for info in self.segments.between(seqs[0], seqs[-1]):
            start = bisect_left(seqs, info.first_seq, start)
            end = bisect_left(seqs, info.last_seq + 1, start)
            if end > start:
                found.append((info, seqs[start:end]))
            start = end
        return found


_ATTACH_TRIES = 10
_MAY_FREE_FILES = frozenset(
    (FrameType.TOPIC_DELETE, FrameType.DELETE, FrameType.ACK, FrameType.EVICT_WATERMARK, FrameType.CHECKPOINT_MARK)
)


class Follower:
    """The compactor's copy of one shard. Owns the fold of its log, up to `tail.position`.

    `touched`: topics with news in the log since their last checkpoint. `shrunk`: topics that may have lost or replaced
    segments since the last sweep. `sealed`: (topic id, first seq) of segments that a checkpoint sealed, for rewriting.
    The code that has processed them empties these.
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

        Raise TailLost and FoldError: then this object is of no use any more. After an OSError another call goes on
        where this one stopped.
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
        """Apply a topic's deletion that the log has behind the place read so far; earlier frames do not count."""
        self.fold.topic_delete(topic_id)
        self.shrunk.add(topic_id)

    def look_up(self, topic: Topic) -> TopicView | None:
        """Return the topic as its shard shows it now; None when the shard has deleted it."""
        found = self.arena().look_up(topic.name)
        return found[1] if found is not None and found[1].topic_id == topic.id else None

    def arena(self) -> ArenaReader:
        """Return the reader of the current arena; the shard must have recovered once."""
        for _ in range(_ATTACH_TRIES):
            generation = self.link.generation
            if self._arena is not None and self._arena.generation == generation:
                return self._arena
            try:
                reader = ArenaReader(self._identity, self.shard, generation)
            except FileNotFoundError:
                continue  # replaced meanwhile
            if self._arena is not None:
                self._arena.close()
            self._arena = reader
        raise RuntimeError(f"index arena {generation} of shard {self.shard} was announced but does not exist")

    def index_of(self, topic: Topic) -> MarkedIndex:
        assert isinstance(topic.index, MarkedIndex)
        return topic.index
