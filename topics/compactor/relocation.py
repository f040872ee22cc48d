"""Older sealed segments into the cold directory: copied, told, and only then no longer here.

A cold directory may be slow, or hang for minutes. So one helper thread talks to it, one call after the other, and this
process asks now and then whether it is done: checkpoints go on meanwhile. Of a cold segment only the data leave
the data directory; index and tags stay and count, their copies are for whoever has nothing but the cold directory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Final, NamedTuple

import msgspec

from topics.compactor.checkpoints import tell
from topics.compactor.follower import Follower
from topics.compactor.leftovers import FilesOf
from topics.core.clock import Clock
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.core.topic import Topic
from topics.log import get_logger
from topics.shm.compactor_messages import TopicCheckpoint
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.kill_points import reached
from topics.storage.pins import Pinned, ReadPinned, nothing_pinned
from topics.storage.segment_store import SegmentStore

PIECE_BYTES: Final = 4 * 2**20
RETRY_MS: Final = 10_000

log = get_logger()


class HotRetention(NamedTuple):
    """How much of a topic stays; the stricter one counts, 0 bytes are no bound."""

    segments: int
    data_bytes: int

    def excess(self, segments: Iterable[SegmentInfo]) -> list[SegmentInfo]:
        """Sealed segments that are here and need not be, the oldest first."""
        hot = [info for info in segments if info.flags & SEALED and not info.flags & COLD]
        kept = held_bytes = 0
        for info in reversed(hot):
            held_bytes += info.data_bytes
            if kept >= self.segments or (self.data_bytes and held_bytes > self.data_bytes):
                break
            kept += 1
        return hot[: len(hot) - kept]


class _Copy(NamedTuple):
    shard: int
    topic_id: int
    info: SegmentInfo


class Relocation:
    """`helper` has one thread. Without a cold directory there is none of these."""

    def __init__(
        self,
        fs: FileSystem,
        data_dir: str,
        store: SegmentStore,
        retention: HotRetention,
        helper: Executor,
        clock: Clock,
        read_pinned: ReadPinned = nothing_pinned,
    ) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._store = store
        self._retention = retention
        self._helper = helper
        self._read_pinned = read_pinned
        self._clock = clock
        self._queue: deque[_Copy] = deque()
        self._copying: tuple[_Copy, Future[None]] | None = None
        self._deleting: tuple[list[str], Future[None]] | None = None
        self._listing: Future[list[str]] | None = helper.submit(store.list, "")
        self._found: set[str] = set()
        self._due: set[str] = set()
        self._not_before_ms = 0

    @property
    def waiting(self) -> bool:
        """Whether the next snapshot would let something go."""
        if self._deleting is None:
            return bool(self._found or self._due)
        deleting = self._deleting[1]
        return deleting.done() and bool(self._found or self._due or deleting.exception() is not None)

    def consider(self, follower: Follower, topic: Topic) -> None:
        """Segments of this topic were sealed, or may have been by a former life."""
        queued = {(copy.topic_id, copy.info) for copy in self._queue}
        if self._copying is not None:
            queued.add((self._copying[0].topic_id, self._copying[0].info))
        for info in self._retention.excess(follower.index_of(topic).segments):
            if (topic.id, info) not in queued:
                self._queue.append(_Copy(follower.shard, topic.id, info))

    def step(self, followers: list[Follower]) -> int:
        """Takes note of what is done and begins what is next; how many segments became cold. Raises OSError, Refused;
        a copy that failed is made again later.
        """
        relocated = 0
        if self._copying is not None and self._copying[1].done():
            copy, future = self._copying
            self._copying = None
            try:
                future.result()
            except OSError:
                self._queue.appendleft(copy)
                self._not_before_ms = self._clock.monotonic_ms() + RETRY_MS
                raise
            relocated = self._copied(followers[copy.shard], copy)
        if self._copying is None and self._queue and self._clock.monotonic_ms() >= self._not_before_ms:
            copy = self._queue.popleft()
            if self._current(followers[copy.shard], copy) is not None:
                self._copying = copy, self._helper.submit(self._copy, copy)
        return relocated

    def sweep(self, files_of: FilesOf, removed: Iterable[str]) -> None:
        """Once a snapshot: copies of `removed` segments, and whatever else is there for nothing, go with the next one.

        Never waits for the cold directory. Raises OSError of an earlier call, which comes again at the next snapshot.
        """
        self._found.update(removed)
        if self._listing is not None and self._listing.done():
            listing, self._listing = self._listing, None
            try:
                self._found.update(listing.result())
            except OSError:
                self._listing = self._helper.submit(self._store.list, "")
                raise
        if self._deleting is not None:
            names, deleting = self._deleting
            if not deleting.done():
                return
            self._deleting = None
            if deleting.exception() is not None:
                self._due.update(names)
            deleting.result()
        needless = _needless(files_of, self._being_copied())
        due = {name for name in self._due if needless(name)}
        pinned = self._read_pinned() if due else frozenset()
        held = {name for name in due if _is_pinned(name, pinned)}
        going = sorted(due - held)
        self._due = held | {name for name in self._found if needless(name)}
        self._found = set()
        if going:
            self._deleting = going, self._helper.submit(self._delete, going)

    def _being_copied(self) -> frozenset[str]:
        """What must not be deleted behind its copying: it may count by then."""
        if self._copying is None:
            return frozenset()
        copy, _ = self._copying
        return frozenset(object_names(copy.topic_id, copy.info.first_seq, copy.info.version))

    def _current(self, follower: Follower, copy: _Copy) -> Topic | None:
        """The topic, if the segment is still as it was when it was to be copied."""
        topic = follower.fold.topics.get(copy.topic_id)
        if topic is None or follower.index_of(topic).segments.at(copy.info.first_seq) != copy.info:
            return None
        return topic

    def _copied(self, follower: Follower, copy: _Copy) -> int:
        reached("relocate.copied")
        topic = self._current(follower, copy)
        if topic is None:  # rewritten, dropped or deleted meanwhile
            self._found.update(object_names(copy.topic_id, copy.info.first_seq, copy.info.version))
            return 0
        cold = msgspec.structs.replace(copy.info, flags=copy.info.flags | COLD)
        tell(follower, [TopicCheckpoint(topic.id, follower.index_of(topic).segments.last_seq, [cold])])
        reached("relocate.marked")
        follower.shrunk.add(topic.id)
        return 1

    # -- on the helper's thread

    def _copy(self, copy: _Copy) -> None:
        directory = layout.topic_dir(self._data_dir, copy.topic_id)
        for name in object_names(copy.topic_id, copy.info.first_seq, copy.info.version):
            path = os.path.join(directory, os.path.basename(name))
            self._store.put(name, self._pieces(path))

    def _pieces(self, path: str) -> Iterator[bytes]:
        fd = self._fs.open(path, os.O_RDONLY)
        try:
            offset = 0
            while piece := self._fs.pread(fd, PIECE_BYTES, offset):
                offset += len(piece)
                yield piece
        finally:
            self._fs.close(fd)

    def _delete(self, names: list[str]) -> None:
        for name in names:
            self._store.delete(name)


def object_names(topic_id: int, first_seq: int, version: int) -> list[str]:
    """What the files of a segment are called in a store; the data come last: who finds them finds the others."""
    directory = layout.topic_dir("", topic_id)
    paths = (
        layout.segment_tags_path(directory, first_seq, version),
        layout.segment_idx_path(directory, first_seq, version),
        layout.segment_data_path(directory, first_seq, version),
    )
    return [os.path.join(os.path.basename(directory), os.path.basename(path)) for path in paths]


def _is_pinned(name: str, pinned: Pinned) -> bool:
    directory, _, file = name.partition("/")
    topic_id, parsed = layout.topic_id_of(directory), layout.parse_segment_file(file)
    return topic_id is not None and parsed is not None and (topic_id, parsed[0]) in pinned


def _needless(files_of: FilesOf, being_copied: frozenset[str]) -> Callable[[str], bool]:
    """Whether a stored object is known to belong to nothing: a hot segment needs none, nor does one that is gone."""

    def needless(name: str) -> bool:
        directory, _, file = name.partition("/")
        topic_id, parsed = layout.topic_id_of(directory), layout.parse_segment_file(file)
        if topic_id is None or parsed is None or name in being_copied:
            return False
        needed = files_of(topic_id)
        if needed is None:
            return False
        if needed.segments is None:
            return True
        segment_name, _ = parsed
        cold = any(info.flags & COLD and (info.first_seq, info.version) == segment_name for info in needed.segments)
        return not cold and needed.superfluous(segment_name) is not None

    return needless
