"""Older sealed segments go into the cold directory: they are copied, the shard is told, then their data go from here.

A cold directory may be slow, or hang for minutes. So one helper thread talks to it, one call after the other, and this
process asks now and then whether it is done: checkpoints go on meanwhile. Of a cold segment only the data leave the
data directory; index and tags stay and count. Their copies are for a reader that has nothing but the cold directory.

`CopyQueue` decides which segment is next: each once, the oldest first. A copy that failed is made again later, and
later still if it fails again: a file that cannot be read, or a name that cannot be written, holds up nothing behind it.
Failures in a row, of whatever segments, are the cold directory's: then nothing begins for a while, and only one copy at
a time until one succeeds.
"""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Final, NamedTuple

import msgspec

from topics.compactor.checkpoints import Refused, tell
from topics.compactor.follower import Follower
from topics.compactor.leftovers import FilesOf
from topics.core.clock import Clock, doubled_ms
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.core.topic import Topic
from topics.log import get_logger
from topics.shm.topic_messages import TopicCheckpoint
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.kill_points import reached
from topics.storage.layout import SegmentName
from topics.storage.pins import Pinned, ReadPinned, nothing_pinned
from topics.storage.segment_store import SegmentStore

RETRY_MS: Final = 10_000
"""The pause after the first failure of a segment; doubled with each further one."""
RETRY_MAX_MS: Final = 160_000
PAUSE_MS: Final = 250
"""The pause after a failure before anything else is copied; doubled with each further one in a row, up to RETRY_MS."""


class RelocationCopy(NamedTuple):
    """A segment as it was when it was queued."""

    shard: int
    topic_id: int
    info: SegmentInfo


class CopyQueue:
    """The segments to be copied. Pure; `now_ms` is of a monotonic clock."""

    def __init__(self) -> None:
        self._ready: deque[RelocationCopy] = deque()
        self._later: list[tuple[int, int, RelocationCopy]] = []
        """Heap of (due, a number that ascends, copy)."""
        self._known: set[RelocationCopy] = set()
        """All copies, also those that were taken and are neither done nor failed."""
        self._failures: dict[RelocationCopy, int] = {}
        self._later_first = False
        self._failed = 0
        self._failed_in_a_row = 0
        self._not_before_ms = 0

    @property
    def in_doubt(self) -> bool:
        """True if the last copy failed."""
        return bool(self._failed_in_a_row)

    def add(self, copy: RelocationCopy) -> None:
        """Adds a copy, unless it is here already or being made."""
        if copy not in self._known:
            self._known.add(copy)
            self._ready.append(copy)

    def __len__(self) -> int:
        """Counts also copies that were taken and are neither done nor failed."""
        return len(self._known)

    def keep_only(self, is_current: Callable[[RelocationCopy], bool]) -> None:
        """Drops waiting copies whose segment is gone: they must not take memory for ever."""
        gone = {copy for copy in self._ready if not is_current(copy)}
        gone.update(copy for _, _, copy in self._later if not is_current(copy))
        if gone:
            self._ready = deque(copy for copy in self._ready if copy not in gone)
            self._later = [row for row in self._later if row[2] not in gone]
            heapq.heapify(self._later)
            for copy in gone:
                self.dropped(copy)

    def take(self, now_ms: int) -> RelocationCopy | None:
        """Takes the next copy, which is to be `done` or `failed`; None if there is none yet."""
        if now_ms < self._not_before_ms:
            return None
        is_due = bool(self._later) and self._later[0][0] <= now_ms
        # In turn: however many fail again and again, others are copied between them, and a success ends the waiting.
        if is_due and (self._later_first or not self._ready):
            self._later_first = False
            return heapq.heappop(self._later)[2]
        self._later_first = is_due
        return self._ready.popleft() if self._ready else None

    def done(self, copy: RelocationCopy) -> None:
        """The copy was made."""
        self._failed_in_a_row = 0
        self.dropped(copy)

    def dropped(self, copy: RelocationCopy) -> None:
        """The copy is not needed any more."""
        self._failures.pop(copy, None)
        self._known.discard(copy)

    def failed(self, copy: RelocationCopy, now_ms: int) -> None:
        """The copy comes again later."""
        times = self._failures.get(copy, 0)
        self._failures[copy] = times + 1
        self._failed += 1
        heapq.heappush(self._later, (now_ms + doubled_ms(RETRY_MS, times, RETRY_MAX_MS), self._failed, copy))
        self._not_before_ms = now_ms + doubled_ms(PAUSE_MS, self._failed_in_a_row, RETRY_MS)
        self._failed_in_a_row += 1


PIECE_BYTES: Final = 4 * 2**20
AHEAD_MAX: Final = 32
AHEAD_BYTES: Final = 64 * 2**20
"""The helper has up to so many copies, or one large one, to go on with. It need not wait for this process between two
small ones, and other work for it (`rewriting.ColdFetch`) does not wait long.
"""
QUEUE_MIN: Final = 1024
"""When so many segments wait, or twice as many as were still there last time, those that have gone are dropped."""
REMOVED_MAX: Final = 1 << 16
"""So many names of objects that may have become superfluous are kept; of more the cold directory itself is asked."""

log = get_logger()


class HotRetention(NamedTuple):
    """How much of a topic stays hot; the stricter bound counts, 0 bytes are no bound."""

    segments: int
    data_bytes: int

    def excess(self, segments: Iterable[SegmentInfo]) -> list[SegmentInfo]:
        """Returns sealed segments that are hot and need not be, the oldest first."""
        hot = [info for info in segments if info.flags & SEALED and not info.flags & COLD]
        kept = held_bytes = 0
        for info in reversed(hot):
            held_bytes += info.data_bytes
            if kept >= self.segments or (self.data_bytes and held_bytes > self.data_bytes):
                break
            kept += 1
        return hot[: len(hot) - kept]


class RelocationStep(NamedTuple):
    """The result of a step: how many segments became cold, and how many copies failed and are made again later."""

    relocated: int
    failed: int


class Relocation:
    """Relocates segments of all topics, and removes superfluous objects in the cold directory.

    `helper` has one thread, which calls `wake` when it has copied something. Without a cold directory there is no such
    object.
    """

    def __init__(
        self,
        fs: FileSystem,
        data_dir: str,
        store: SegmentStore,
        retention: HotRetention,
        helper: Executor,
        clock: Clock,
        read_pinned: ReadPinned = nothing_pinned,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._store = store
        self._retention = retention
        self._helper = helper
        self._read_pinned = read_pinned
        self._clock = clock
        self._wake = wake
        self._queue = CopyQueue()
        self._queue_max = QUEUE_MIN
        self._copying: deque[tuple[RelocationCopy, Future[None]]] = deque()
        self._deleting: Future[dict[str, OSError]] | None = None
        self._listing: Future[list[str]] | None = helper.submit(store.list, "")
        self._list_again = False
        self._removed: set[str] = set()
        """Objects of segments that went in the data directory, as far as there are any."""
        self._found: set[str] = set()
        """Objects that are there, or may be."""
        self._due: set[str] = set()
        """Objects that one snapshot found superfluous."""
        self._held: set[str] = set()
        """Objects that two snapshots found superfluous; a pin, or the cold directory, kept them."""

    @property
    def waiting(self) -> bool:
        """True if the next snapshot would let something go."""
        is_free = self._deleting is None or self._deleting.done()
        return is_free and bool(self._removed or self._found or self._due)

    def consider(self, follower: Follower, topic: Topic) -> None:
        """Queues segments of this topic: some were sealed, or a former life may have sealed some."""
        for info in self._retention.excess(follower.index_of(topic).segments):
            self._queue.add(RelocationCopy(follower.shard, topic.id, info))

    def step(self, followers: list[Follower]) -> RelocationStep:
        """Takes over finished copies and begins the next ones."""
        copied: dict[int, list[RelocationCopy]] = {}
        failed = 0
        while self._copying and self._copying[0][1].done():
            copy, future = self._copying.popleft()
            try:
                future.result()
            except OSError as error:
                if self._current(followers[copy.shard], copy) is None:
                    self._gone(copy)  # the error may come from that: files go with their segment
                else:
                    self._failed(copy, error)
                    failed += 1
            else:
                copied.setdefault(copy.shard, []).append(copy)
        relocated = 0
        for shard, copies in copied.items():
            reached("relocate.copied")
            step = self._copied(followers[shard], copies)
            relocated, failed = relocated + step.relocated, failed + step.failed
        if len(self._queue) > self._queue_max:
            self._queue.keep_only(lambda copy: self._current(followers[copy.shard], copy) is not None)
            self._queue_max = max(QUEUE_MIN, 2 * len(self._queue))
        self._begin(followers)
        if self._copying and self._copying[0][1].done():
            self._wake()  # the helper finished while the shard was waited for
        return RelocationStep(relocated, failed)

    def _begin(self, followers: list[Follower]) -> None:
        """Gives the helper as many copies as it is to have before it."""
        ahead_bytes = sum(copy.info.data_bytes for copy, _ in self._copying)
        now_ms = self._clock.monotonic_ms()
        while not self._copying or (
            len(self._copying) < AHEAD_MAX and ahead_bytes < AHEAD_BYTES and not self._queue.in_doubt
        ):
            copy = self._queue.take(now_ms)
            if copy is None:
                return
            if self._current(followers[copy.shard], copy) is None:
                self._queue.dropped(copy)
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

    def removed(self, topic_id: int, name: SegmentName) -> None:
        """This segment is gone, so copies of it are superfluous."""
        self._removed.update(object_names(topic_id, *name))
        if len(self._removed) > REMOVED_MAX:
            # The cold directory hangs. It can list its objects itself, once it says anything again.
            self._removed = set()
            self._list_again = True

    def sweep(self, files_of: FilesOf, in_snapshot: Callable[[int], bool]) -> list[OSError]:
        """Once a snapshot: removes objects that were superfluous at the one before, and notes those that are now, for
        the next one. Objects of topics of which this snapshot says nothing new (`in_snapshot`) stay.

        Never waits for the cold directory. Returns the failures of earlier calls; they are tried again, and hold up
        nothing else.
        """
        failures: list[OSError] = []
        if not self._is_free(failures):
            return failures
        self._found.update(self._listed(failures))
        self._found |= self._removed
        self._removed = set()
        needless = _needless(files_of, self._being_copied())
        agreed = {name for name in self._due if _is_of(name, in_snapshot)}
        looked_at = {name for name in self._found if _is_of(name, in_snapshot)}
        self._held |= agreed
        self._due = self._due - agreed | {name for name in looked_at if needless(name)}
        self._found -= looked_at
        self._delete_held(needless, failures)
        return failures

    def tidy(self, files_of: FilesOf) -> list[OSError]:
        """Without a snapshot: removes objects that two snapshots agreed on and that were kept; else like `sweep`.
        Superfluous objects that the cold directory lists are a reason for the next snapshot.
        """
        failures: list[OSError] = []
        if self._is_free(failures):
            needless = _needless(files_of, self._being_copied())
            self._found.update(name for name in self._listed(failures) if needless(name))
            self._delete_held(needless, failures)
        return failures

    def _listed(self, failures: list[OSError]) -> list[str]:
        """Returns the objects that the cold directory has, once it has said so; after a failure it is asked again."""
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
        going = sorted(name for name in self._held if not _is_pinned(name, pinned))
        if going:
            self._held.difference_update(going)
            self._deleting = self._helper.submit(self._delete, going)

    def _being_copied(self) -> frozenset[str]:
        """Returns objects that are being copied: they must not be deleted behind that, for they may count by then."""
        return frozenset(
            name
            for copy, _ in self._copying
            for name in object_names(copy.topic_id, copy.info.first_seq, copy.info.version)
        )

    def _current(self, follower: Follower, copy: RelocationCopy) -> Topic | None:
        """Returns the topic, if the segment is still as it was when it was queued."""
        topic = follower.fold.topics.get(copy.topic_id)
        if topic is None or follower.index_of(topic).segments.at(copy.info.first_seq) != copy.info:
            return None
        return topic

    def _gone(self, copy: RelocationCopy) -> None:
        """The segment was rewritten, dropped or deleted meanwhile: objects that were copied of it are superfluous."""
        self._queue.dropped(copy)
        self._found.update(object_names(copy.topic_id, copy.info.first_seq, copy.info.version))

    def _copied(self, follower: Follower, copies: list[RelocationCopy]) -> RelocationStep:
        """Has the shard mark these copies, in one message. Copies that it did not mark, or may not have, are made
        again.
        """
        cold: dict[int, list[SegmentInfo]] = {}
        for copy in copies:
            if self._current(follower, copy) is None:
                self._gone(copy)
            else:
                flagged = msgspec.structs.replace(copy.info, flags=copy.info.flags | COLD)
                cold.setdefault(copy.topic_id, []).append(flagged)
        checkpoints = []
        for topic_id, infos in cold.items():
            last_seq = follower.index_of(follower.fold.topics[topic_id]).segments.last_seq
            checkpoints.append(TopicCheckpoint(topic_id, last_seq, sorted(infos, key=lambda info: info.first_seq)))
        unmarked: list[RelocationCopy] = []
        try:
            if checkpoints:
                tell(follower, checkpoints)
        except (OSError, Refused) as refused:
            # It may have refused some topics only, or have answered in part before it could not be asked again.
            unmarked = [copy for copy in copies if self._current(follower, copy) is not None]
            for copy in unmarked:
                self._failed(copy, refused)
        marked = [copy for copy in copies if copy not in unmarked]
        if marked:
            reached("relocate.marked")
            follower.shrunk.update(copy.topic_id for copy in marked)
        for copy in marked:
            self._queue.done(copy)
        return RelocationStep(sum(map(len, cold.values())) - len(unmarked), len(unmarked))

    # -- on the helper's thread

    def _copy(self, copy: RelocationCopy) -> None:
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

    def _delete(self, names: list[str]) -> dict[str, OSError]:
        """Deletes objects. Returns those that could not be deleted, and why."""
        kept: dict[str, OSError] = {}
        for name in names:
            try:
                self._store.delete(name)
            except OSError as error:
                kept[name] = error
        return kept


def object_names(topic_id: int, first_seq: int, version: int) -> list[str]:
    """Returns the names of a segment's files in a store. The data come last: a reader that finds them finds the
    others.
    """
    directory = layout.topic_dir("", topic_id)
    paths = (
        layout.segment_tags_path(directory, first_seq, version),
        layout.segment_idx_path(directory, first_seq, version),
        layout.segment_data_path(directory, first_seq, version),
    )
    return [os.path.join(os.path.basename(directory), os.path.basename(path)) for path in paths]


def _is_of(name: str, topics: Callable[[int], bool]) -> bool:
    """True if the object is of one of these topics, or of none at all."""
    topic_id = layout.topic_id_of(name.partition("/")[0])
    return topic_id is None or topics(topic_id)


def _is_pinned(name: str, pinned: Pinned) -> bool:
    directory, _, file = name.partition("/")
    topic_id, parsed = layout.topic_id_of(directory), layout.parse_segment_file(file)
    return topic_id is not None and parsed is not None and (topic_id, parsed[0]) in pinned


def _needless(files_of: FilesOf, being_copied: frozenset[str]) -> Callable[[str], bool]:
    """Returns a function: true if a stored object is known to be superfluous. A hot segment needs none, nor does one
    that is gone.
    """

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
        return not needed.is_cold(segment_name) and needed.superfluous(segment_name) is not None

    return needless
