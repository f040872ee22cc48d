"""Relocation moves older sealed segments to the cold tier: it copies them, the shard logs that, it removes their data.

A cold directory may be slow, or hang for minutes. So one helper thread uses it, one call after the other, and this
process checks now and then whether a call is done; checkpoints go on meanwhile. Only the data of a cold segment leave
the data directory. Its index and tags stay, and readers of the service use these. The cold tier gets copies of them for
a reader that has nothing but the cold tier.

`CopyQueue` decides which segment is next. It repeats a failed copy later, so a file that cannot be read, or a name that
cannot be written, holds up no other. After several failures in a row the fault is probably in the cold directory: then
it copies nothing for a while, and one segment at a time until a copy succeeds.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from topics.compactor.checkpoints import Refused, mark
from topics.compactor.leftovers import FilesOf
from topics.compactor.shard_copy import ShardCopy
from topics.compactor.work_queue import RETRY_MS, WorkQueue
from topics.core.clock import Clock, doubled_ms
from topics.core.segment_list import COLD, SEALED, SegmentInfo, SegmentKey
from topics.core.topic import Topic
from topics.log import get_logger
from topics.shm.topic_messages import TopicCheckpoint
from topics.storage import layout
from topics.storage.filesystem import FileSystem, opened
from topics.storage.kill_points import reached
from topics.storage.pins import ReadPinned
from topics.storage.segment_store import SegmentStore

PAUSE_MS: Final = 250
"""The pause of all copying after a failure. It doubles with each further failure in a row, up to RETRY_MS."""
PIECE_BYTES: Final = 4 * 2**20
AHEAD_MAX: Final = 32
AHEAD_BYTES: Final = 64 * 2**20
"""The helper gets at most AHEAD_MAX copies, or AHEAD_BYTES, in advance. So it does not wait for this process between
small copies, and its other work (`rewriting.ColdFetch`) does not wait long.
"""
QUEUE_MIN: Final = 1024
"""The queue drops segments that no longer exist when this many wait, or twice as many as remained last time."""
REMOVED_MAX: Final = 1 << 16
"""The most names of superfluous objects to remember. If there are more, it lists the cold directory instead."""

log = get_logger()


class RelocationCopy(NamedTuple):
    """A segment to be copied, as it was when it was queued."""

    shard: int
    topic_id: int
    info: SegmentInfo

    @property
    def objects(self) -> list[str]:
        """The names of its objects in the cold directory."""
        return layout.object_names(*self.info.key_in(self.topic_id))


class CopyQueue(WorkQueue[RelocationCopy]):
    """The segments to copy. After a failure it gives out nothing for a while, longer with each failure in a row."""

    def __init__(self) -> None:
        super().__init__()
        self._failed_in_a_row = 0
        self._not_before_ms = 0

    @property
    def in_doubt(self) -> bool:
        """True if the last copy failed."""
        return bool(self._failed_in_a_row)

    def take(self, now_ms: int) -> RelocationCopy | None:
        """Take the next copy, None if there is none yet. Later call `done`, `drop` or `failed` for it."""
        return None if now_ms < self._not_before_ms else super().take(now_ms)

    def done(self, copy: RelocationCopy) -> None:
        """Forget a copy that was made. It shows that the cold directory works."""
        self._failed_in_a_row = 0
        self.drop(copy)

    def failed(self, copy: RelocationCopy, now_ms: int) -> None:
        """Put a copy that failed back, for later."""
        super().failed(copy, now_ms)
        self._not_before_ms = now_ms + doubled_ms(PAUSE_MS, self._failed_in_a_row, RETRY_MS)
        self._failed_in_a_row += 1


class HotRetention(NamedTuple):
    """The bounds of the sealed data that stay hot in a topic. The stricter one counts; 0 bytes are no bound."""

    segments: int
    data_bytes: int

    def excess(self, segments: Iterable[SegmentInfo]) -> list[SegmentInfo]:
        """Return the sealed hot segments beyond the bounds, the oldest first."""
        hot = [info for info in segments if info.flags & SEALED and not info.flags & COLD]
        kept = held_bytes = 0
        for info in reversed(hot):
            held_bytes += info.data_bytes
            if kept >= self.segments or (self.data_bytes and held_bytes > self.data_bytes):
                break
            kept += 1
        return hot[: len(hot) - kept]


@dataclass(eq=False)
class Relocation:
    """Relocates segments of all topics, and removes superfluous objects from the cold tier, if there is one.

    The one thread of `helper` calls `wake` when it has copied something.
    """

    _fs: FileSystem
    _data_dir: str
    _store: SegmentStore
    _retention: HotRetention
    _helper: Executor
    _clock: Clock
    _read_pinned: ReadPinned = frozenset
    _wake: Callable[[], None] = lambda: None
    _queue: CopyQueue = field(default_factory=CopyQueue)
    _copying: deque[tuple[RelocationCopy, Future[None]]] = field(default_factory=deque)
    _deleting: Future[dict[str, OSError]] | None = None
    _listing: Future[list[str]] | None = None
    _list_again: bool = False
    _removed: set[str] = field(default_factory=set)
    """Objects that may be left of segments that were removed from the data directory."""
    _found: set[str] = field(default_factory=set)
    """Objects that exist or may exist; `sweep` judges them at the next snapshot."""
    _due: set[str] = field(default_factory=set)
    """Objects that one snapshot found superfluous."""
    _held: set[str] = field(default_factory=set)
    """Objects that two snapshots found superfluous, but that are pinned or could not be deleted."""

    def __post_init__(self) -> None:
        self._queue_max = QUEUE_MIN
        self._listing = self._helper.submit(self._store.list, "")

    @property
    def waiting(self) -> bool:
        """True if the next snapshot would remove something."""
        is_free = self._deleting is None or self._deleting.done()
        return is_free and bool(self._removed or self._found or self._due)

    def consider(self, shard_copy: ShardCopy, topic: Topic) -> None:
        """Queue the segments of this topic that must become cold."""
        for info in self._retention.excess(shard_copy.index_of(topic).segments):
            self._queue.add(RelocationCopy(shard_copy.shard, topic.id, info))

    def step(self, shard_copies: list[ShardCopy]) -> tuple[int, int]:
        """Mark finished copies and begin the next ones. Return the numbers of new cold segments and of failures."""
        copied: dict[int, list[RelocationCopy]] = {}
        failed = 0
        while self._copying and self._copying[0][1].done():
            copy, future = self._copying.popleft()
            try:
                future.result()
            except OSError as error:
                if not self._is_current(shard_copies[copy.shard], copy):
                    self._outdated(copy)  # it failed because its files were removed
                else:
                    self._failed(copy, error)
                    failed += 1
            else:
                copied.setdefault(copy.shard, []).append(copy)
        relocated = 0
        for shard, copies in copied.items():
            reached("relocate.copied")
            marked, unmarked = self._mark_cold(shard_copies[shard], copies)
            relocated, failed = relocated + marked, failed + unmarked
        if len(self._queue) > self._queue_max:
            self._queue.keep_only(lambda copy: self._is_current(shard_copies[copy.shard], copy))
            self._queue_max = max(QUEUE_MIN, 2 * len(self._queue))
        self._begin(shard_copies)
        if self._copying and self._copying[0][1].done():
            self._wake()  # the helper may have finished copies while this process waited for the shard
        return relocated, failed

    def _begin(self, shard_copies: list[ShardCopy]) -> None:
        """Give the helper as many copies as it may have in advance."""
        ahead_bytes = sum(copy.info.data_bytes for copy, _ in self._copying)
        now_ms = self._clock.monotonic_ms()
        while not self._copying or (
            len(self._copying) < AHEAD_MAX and ahead_bytes < AHEAD_BYTES and not self._queue.in_doubt
        ):
            copy = self._queue.take(now_ms)
            if copy is None:
                return
            if not self._is_current(shard_copies[copy.shard], copy):
                self._queue.drop(copy)
                continue
            future = self._helper.submit(self._copy, copy)
            future.add_done_callback(lambda _: self._wake())
            self._copying.append((copy, future))
            ahead_bytes += copy.info.data_bytes

    def _failed(self, copy: RelocationCopy, error: Exception) -> None:
        log.error(
            "a segment could not be relocated, which will be repeated",
            topic_id=f"{copy.topic_id:016x}",
            first_seq=copy.info.first_seq,
            reason=str(error),
        )
        self._queue.failed(copy, self._clock.monotonic_ms())

    def removed(self, key: SegmentKey) -> None:
        """Note that a segment was removed, so copies of it are superfluous."""
        self._removed.update(layout.object_names(*key))
        if len(self._removed) > REMOVED_MAX:
            # The cold directory hangs. List it when it answers again.
            self._removed = set()
            self._list_again = True

    def sweep(self, files_of: FilesOf, in_snapshot: Callable[[int], bool]) -> list[OSError]:
        """Remove objects that the previous snapshot found superfluous, and note those that this one finds. Keep objects
        of topics whose state is not new in this snapshot (`in_snapshot`).

        This never waits for the cold directory. Return the failures of earlier calls, which will be repeated.
        """
        failures: list[OSError] = []
        if not self._is_free(failures):
            return failures
        self._found.update(self._listed(failures))
        self._found |= self._removed
        self._removed = set()
        needless = self._judge(files_of)

        def is_new(name: str) -> bool:
            parsed = _parsed(name)
            return parsed is None or in_snapshot(parsed.topic_id)

        agreed = set(filter(is_new, self._due))
        judged = set(filter(is_new, self._found))
        self._held |= agreed
        self._due = self._due - agreed | {name for name in judged if needless(name)}
        self._found -= judged
        self._delete_held(needless, failures)
        return failures

    def tidy(self, files_of: FilesOf) -> list[OSError]:
        """Remove objects that two snapshots found superfluous; otherwise like `sweep`. If the cold directory lists
        superfluous objects, that is a reason for another snapshot.
        """
        failures: list[OSError] = []
        if self._is_free(failures):
            needless = self._judge(files_of)
            self._found.update(name for name in self._listed(failures) if needless(name))
            self._delete_held(needless, failures)
        return failures

    def _listed(self, failures: list[OSError]) -> list[str]:
        """Return the objects of the cold directory, once the helper has listed it. Ask again after a failure."""
        names: list[str] = []
        if self._listing is not None and self._listing.done():
            listing, self._listing = self._listing, None
            try:
                names = listing.result()
            except OSError as error:
                failures.append(error)
                self._list_again = True
        if self._list_again and self._listing is None:
            self._listing = self._helper.submit(self._store.list, "")
            self._list_again = False
        return names

    def _is_free(self, failures: list[OSError]) -> bool:
        """True if the last deletion is done."""
        if self._deleting is not None:
            if not self._deleting.done():
                return False
            kept, self._deleting = self._deleting.result(), None
            self._held.update(kept)
            failures += kept.values()
        return True

    def _delete_held(self, needless: Callable[[str], bool], failures: list[OSError]) -> None:
        self._held = {name for name in self._held if needless(name)}
        if not self._held:
            return
        try:
            pinned = self._read_pinned()
        except OSError as error:
            failures.append(error)
            return
        going = sorted(name for name in self._held if _parsed(name) not in pinned)
        if going:
            self._held.difference_update(going)
            self._deleting = self._helper.submit(self._delete, going)

    def _judge(self, files_of: FilesOf) -> Callable[[str], bool]:
        """Return a function that is true for an object whose segment is known to be hot or removed."""
        # A copy that is under way may be marked before a deletion of its objects would be done.
        being_copied = {name for copy, _ in self._copying for name in copy.objects}

        def is_needless(name: str) -> bool:
            parsed = _parsed(name)
            if parsed is None or name in being_copied:
                return False
            needed = files_of(parsed.topic_id)
            if needed is None or needed.segments is None:
                return needed is not None
            return not needed.is_cold(parsed.name) and needed.superfluous(parsed.name) is not None

        return is_needless

    def _is_current(self, shard_copy: ShardCopy, copy: RelocationCopy) -> bool:
        """True if the segment is still as it was when it was queued."""
        topic = shard_copy.fold.topics.get(copy.topic_id)
        return topic is not None and shard_copy.index_of(topic).segments.at(copy.info.first_seq) == copy.info

    def _outdated(self, copy: RelocationCopy) -> None:
        """Drop a copy whose segment was rewritten or removed meanwhile; what was copied of it is superfluous."""
        self._queue.drop(copy)
        self._found.update(copy.objects)

    def _mark_cold(self, shard_copy: ShardCopy, copies: list[RelocationCopy]) -> tuple[int, int]:
        """Have the shard mark these segments as cold, in one message. Queue those that it does not mark once more."""
        cold: dict[int, list[SegmentInfo]] = {}
        for copy in copies:
            if not self._is_current(shard_copy, copy):
                self._outdated(copy)
            else:
                flagged = msgspec.structs.replace(copy.info, flags=copy.info.flags | COLD)
                cold.setdefault(copy.topic_id, []).append(flagged)
        checkpoints = []
        for topic_id, infos in cold.items():
            last_seq = shard_copy.index_of(shard_copy.fold.topics[topic_id]).segments.last_seq
            checkpoints.append(TopicCheckpoint(topic_id, last_seq, sorted(infos, key=lambda info: info.first_seq)))
        unmarked: list[RelocationCopy] = []
        try:
            if checkpoints:
                mark(shard_copy, checkpoints)
        except (OSError, Refused) as error:
            # The shard may have refused some topics only.
            unmarked = [copy for copy in copies if self._is_current(shard_copy, copy)]
            for copy in unmarked:
                self._failed(copy, error)
        marked = [copy for copy in copies if copy not in unmarked]
        if marked:
            reached("relocate.marked")
            shard_copy.shrunk.update(copy.topic_id for copy in marked)
        for copy in marked:
            self._queue.done(copy)
        return sum(map(len, cold.values())) - len(unmarked), len(unmarked)

    # -- on the helper's thread

    def _copy(self, copy: RelocationCopy) -> None:
        for name in copy.objects:
            self._store.put(name, self._pieces(os.path.join(layout.topics_dir(self._data_dir), name)))

    def _pieces(self, path: str) -> Iterator[bytes]:
        with opened(self._fs, path, os.O_RDONLY) as fd:
            offset = 0
            while piece := self._fs.pread(fd, PIECE_BYTES, offset):
                offset += len(piece)
                yield piece

    def _delete(self, names: list[str]) -> dict[str, OSError]:
        """Delete objects. Return those that could not be deleted, and why."""
        kept: dict[str, OSError] = {}
        for name in names:
            try:
                self._store.delete(name)
            except OSError as error:
                kept[name] = error
        return kept


def _parsed(name: str) -> SegmentKey | None:
    """Return the segment that an object belongs to; None if it belongs to none."""
    directory, _, file = name.partition("/")
    topic_id, found = layout.topic_id_of(directory), layout.parse_segment_file(file)
    return None if topic_id is None or found is None else SegmentKey(topic_id, *found[0])
