"""A checkpoint of one shard brings its topics' new records, and deletions in their segments, to the disk.

`Checkpoints` puts records into segments, syncs them and has the shard log that (a mark). If a checkpoint is killed or
refused, the next one repeats it: a topic goes on where its last mark in the log ends.

`DurableMarks` syncs deletion marks before the compactor saves a snapshot that covers them: a start from that snapshot
does not read these deletions from the log. The shard writes the marks into segments at once; this process syncs them.
The kernel reports a failed sync only once: the pages count as clean then, and the next sync of the file succeeds though
they never reached the disk. So after a failed sync the shard writes all marks since the last snapshot again. It does so
also once in each life of this process, because the former life may have ended right after a failed sync.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, cast

from topics.compactor.segment_building import BufferOf, LogBuffers, SealAt, SegmentAppender
from topics.compactor.shard_copy import ShardCopy
from topics.core.clock import Clock, doubled_ms
from topics.core.errors import TopicsError
from topics.core.location import (
    ENTRY_WORDS,
    LOCATION_DELETED,
    LOCATION_GONE,
    LOCATION_IN_RAM_LOG,
    LOCATION_LOST,
    any_flagged,
    flags_of,
)
from topics.core.record_index import UnlocatedIndex
from topics.core.segment_list import COLD, SEALED, SegmentInfo
from topics.core.seq_set import runs_of
from topics.core.topic import Topic
from topics.shm.asks import Asks, ReplyT
from topics.shm.topic_messages import Checkpoint, MarkAgain, TopicCheckpoint
from topics.storage import layout
from topics.storage.filesystem import NO_ROOM, DeferredSyncs, FileSystem, opened
from topics.storage.kill_points import reached
from topics.storage.segment_deletes import sync_segment

TOPICS_PER_SYNC: Final = 4096
SYNC_ONE_BY_ONE_MAX: Final = 64
"""Up to this many segments are synced file by file. For more segments one sync of the file system costs less."""
TOPICS_PER_MESSAGE: Final = 96
"""A shard was measured to take 20 ms for a message with 256, so 78 µs for each."""
RECORDS_PER_STEP: Final = 1 << 16
SEGMENTS_PER_STEP: Final = 64
"""One step takes at most so many records from one topic, and at most what fills so many segments."""
RECORDS_PER_MESSAGE: Final = 1 << 19
"""The most records that one message marks: the shard checks the flags of all. Each message costs a sync of its log."""
SEQS_PER_MESSAGE: Final = 2048
"""A shard takes some ms for a message with this many deletions."""
FULL_AFTER: Final = 16
"""After this many topics without room the disk counts as full. Before that, a smaller topic may still find room."""
SHOWN_WITHIN_S: Final = 5.0
"""Time that a checkpoint waits, for all topics together, until its shard shows the records that the log has. It is
measured by the clock, because looks are far apart on a busy machine.
"""
_POLL_S: Final = 0.001
SEAL_AGAIN_MS: Final = 60_000
"""The pause after a segment could not be sealed. It doubles each time, up to SEAL_AGAIN_MAX_MS."""
SEAL_AGAIN_MAX_MS: Final = 3_600_000


class Refused(Exception):  # noqa: N818 — named for what it is
    """The shard did not mark everything, or does not show all of its records: at the moment it cannot write its log."""


class Written(NamedTuple):
    """The numbers of records, bytes and sealed segments that a checkpoint added."""

    records: int
    data_bytes: int
    sealed: int


class _Step(NamedTuple):
    """A part of one topic that is in segments and has to be marked. `lost` of its records never came, as those of a gap
    behind a restore. `has_more`: the topic may have more records.
    """

    topic: Topic
    checkpoint: TopicCheckpoint
    records: int
    has_more: bool
    lost: int = 0


class _Failures:
    """Failures of topics, and the one to report. A full disk has priority, as an operator can mend it."""

    def __init__(self) -> None:
        self.reported: OSError | None = None
        self.refused: Refused | None = None
        """The first topic of which the shard does not show all records."""
        self._no_room = 0

    def add(self, error: OSError) -> None:
        is_no_room = error.errno in NO_ROOM
        if self.reported is None or (is_no_room and not self._no_room):
            self.reported = error.with_traceback(None)  # the traceback would keep all bytes of the write in memory
        self._no_room += is_no_room

    @property
    def is_full(self) -> bool:
        """True if the disk is full: there is no use in trying other topics."""
        return self._no_room >= FULL_AFTER


@dataclass(eq=False)
class Checkpoints:
    """Makes checkpoints of all shards, one after the other.

    `alive` is called between steps. Up to `one_by_one_max` segments of a step are synced file by file.
    """

    _fs: FileSystem
    _data_dir: str
    _seal_at: SealAt
    _clock: Clock
    _alive: Callable[[], None]
    _one_by_one_max: int
    _suspects: set[str] = field(default_factory=set)
    _unsealable: dict[tuple[int, SegmentInfo], tuple[int, int]] = field(default_factory=dict)
    """(pause in ms, its end in monotonic ms) of segments that could not be sealed; an append ends it."""
    _shown_until_s: float = 0.0

    def run(self, shard_copy: ShardCopy, buffers: LogBuffers) -> Written:
        """Put everything that the copy has read into segments. When this returns, the shard's log is synced up to
        there.

        Raise OSError if some topics could not be written, otherwise Refused if the shard refused something. All other
        topics are marked nevertheless, unless the shard refuses that or the disk is full.
        """
        failures = _Failures()
        written = Written(0, 0, 0)
        self._shown_until_s = time.monotonic() + SHOWN_WITHIN_S
        try:
            written = self._run(shard_copy, buffers, failures)
        except Refused as error:
            failures.refused = error
        if failures.reported is not None:
            raise failures.reported from failures.refused
        if failures.refused is not None:
            raise failures.refused
        # Ask even if nothing has to be marked: the answer means that the log is synced.
        mark(shard_copy, [])
        reached("checkpoint.marked")
        return written

    def _run(self, shard_copy: ShardCopy, buffers: LogBuffers, failures: _Failures) -> Written:
        now_ms = self._clock.now_ms()
        due = self._due(shard_copy, now_ms)
        records = data_bytes = sealed = 0
        while not failures.is_full and (chunk := list(islice(due, TOPICS_PER_SYNC))):
            while chunk and not failures.is_full:
                steps = self._step(shard_copy, chunk, buffers.get, now_ms, failures)
                reached("checkpoint.synced")
                for step in steps:
                    infos = step.checkpoint.segments
                    former = shard_copy.index_of(step.topic).segments.between(infos[0].first_seq, infos[-1].last_seq)
                    records += step.records - step.lost
                    data_bytes += sum(info.data_bytes for info in infos) - sum(info.data_bytes for info in former)
                for message in _messages(steps):
                    self._write_back_log(shard_copy)
                    mark(shard_copy, message)
                    new = [(each.topic_id, info) for each in message for info in each.segments if info.flags & SEALED]
                    shard_copy.sealed += [(topic_id, info.first_seq) for topic_id, info in new]
                    sealed += len(new)
                    self._alive()
                chunk = [step.topic for step in steps if step.has_more]
        return Written(records, data_bytes, sealed)

    def _write_back_log(self, shard_copy: ShardCopy) -> None:
        """Write the shard's log back to the disk from this process. The shard syncs its log with the mark, and its
        writers wait for that sync: now it has less to do.
        """
        committed = shard_copy.link.committed
        if committed is not None:
            path = layout.log_path(shard_copy.tail.directory, committed.file_no)
            with suppress(OSError), opened(self._fs, path, os.O_RDWR) as fd:
                self._fs.write_back(fd, waits=True)

    def has_old(self, shard_copy: ShardCopy) -> bool:
        """True if it is time to seal a segment, even if it got no new records."""
        now_ms = self._clock.now_ms()
        return any(self._is_old(shard_copy, topic, now_ms) for topic in shard_copy.fold.topics.values())

    def _due(self, shard_copy: ShardCopy, now_ms: int) -> Iterator[Topic]:
        """Yield topics with news in the log, and topics whose active segment is old enough to be sealed."""
        topics = shard_copy.fold.topics
        for topic_id in sorted(shard_copy.touched):
            topic = topics.get(topic_id)
            if topic is not None:
                yield topic
        for topic in list(topics.values()):
            if topic.id not in shard_copy.touched and self._is_old(shard_copy, topic, now_ms):
                yield topic

    def _is_old(self, shard_copy: ShardCopy, topic: Topic, now_ms: int) -> bool:
        last = shard_copy.index_of(topic).segments.last
        if last is None or last.flags & SEALED or not self._seal_at.is_old(last, now_ms):
            return False
        _, until_ms = self._unsealable.get((topic.id, last), (0, 0))
        return self._clock.monotonic_ms() >= until_ms

    def _pause_sealing(self, topic_id: int, last: SegmentInfo) -> None:
        former_ms, _ = self._unsealable.get((topic_id, last), (0, 0))
        pause_ms = doubled_ms(former_ms, 1, SEAL_AGAIN_MAX_MS) if former_ms else SEAL_AGAIN_MS
        self._unsealable[topic_id, last] = pause_ms, self._clock.monotonic_ms() + pause_ms

    def _step(
        self, shard_copy: ShardCopy, topics: list[Topic], buffer_of: BufferOf, now_ms: int, failures: _Failures
    ) -> list[_Step]:
        """Put records of these topics into segments and sync them. Collect failures; end early on a full disk."""
        one_by_one = sum(self._segments_due(shard_copy, topic) for topic in topics) <= self._one_by_one_max
        made: list[tuple[_Step, DeferredSyncs]] = []
        for topic in topics:
            fs = DeferredSyncs(self._fs)
            appender = SegmentAppender(cast(FileSystem, fs), self._data_dir, self._seal_at, self._suspects)
            try:
                step = self._topic(shard_copy, topic, appender, buffer_of, now_ms)
            except Refused as error:
                failures.refused = failures.refused or error
            except OSError as error:
                failures.add(error)
                if failures.is_full:
                    break
            else:
                if step is not None:
                    made.append((step, fs))
            self._alive()
        if not one_by_one:
            if made:
                self._fs.sync_all(layout.topics_dir(self._data_dir))
            return [step for step, _ in made]
        steps = []
        synced_directories: set[str] = set()
        for step, fs in made:
            try:
                fs.sync(synced_directories)
                steps.append(step)
            except OSError as error:
                failures.add(error)
            self._alive()
        return steps

    def _segments_due(self, shard_copy: ShardCopy, topic: Topic) -> int:
        """Estimate how many segments will be written to."""
        records = topic.head_seq - max(topic.earliest_seq - 1, shard_copy.index_of(topic).segments.last_seq)
        return 1 + min(records, self._records_per_step) // self._seal_at.records

    @property
    def _records_per_step(self) -> int:
        return min(RECORDS_PER_STEP, SEGMENTS_PER_STEP * self._seal_at.records)

    def _topic(
        self, shard_copy: ShardCopy, topic: Topic, appender: SegmentAppender, buffer_of: BufferOf, now_ms: int
    ) -> _Step | None:
        """Put some of a topic's new records into segments. None when there are none, or the topic was deleted."""
        index = shard_copy.index_of(topic)
        last = index.segments.last
        up_to_seq = index.segments.last_seq
        moved: Exception | None = None
        while True:
            view = shard_copy.look_up(topic)
            if view is None:
                # The log has the deletion, behind the place that this copy has read, and it is synced.
                shard_copy.deleted(topic.id)
                return None
            if view.head_seq >= topic.head_seq:
                first_seq = max(up_to_seq + 1, view.base_seq)
                last_seq = min(view.head_seq, first_seq + self._records_per_step - 1)
                if first_seq > last_seq:
                    break
                entries = shard_copy.arena().entries(view, first_seq, last_seq)
                entries = None if entries is None else _followed(entries, topic, view.earliest_seq)
                if entries is not None and not entries:
                    break
                try:
                    if entries is not None:
                        infos = appender.append(topic.id, last, entries, buffer_of, now_ms)
                        done_seq = infos[-1].last_seq
                        checkpoint = TopicCheckpoint(topic.id, done_seq, infos)
                        count = done_seq - entries[0] + 1
                        lost = _lost(entries, count)
                        return _Step(topic, checkpoint, count, has_more=done_seq < view.head_seq, lost=lost)
                except (ValueError, EOFError, FileNotFoundError) as error:
                    moved = error  # the shard has copied the end of its log to a new file: look again
            if time.monotonic() >= self._shown_until_s:
                why = f": {moved}" if moved else ""
                message = f"shard {shard_copy.shard} does not show all records of topic {topic.name!r}{why}"
                raise Refused(message) from moved
            self._alive()
            time.sleep(_POLL_S)
        if up_to_seq < topic.head_seq and topic.earliest_seq <= topic.head_seq:
            # All records were evicted, but the log does not say so yet. Put a deleted record in place of the last one:
            # otherwise records would be missing between the segments or floors and the head.
            evicted = array("Q", (topic.head_seq, topic.last_write_ts, 0, LOCATION_DELETED << 32))
            infos = appender.append(topic.id, last, evicted, buffer_of, now_ms)
            return _Step(topic, TopicCheckpoint(topic.id, topic.head_seq, infos), 1, has_more=False)
        if last is not None and self._is_old(shard_copy, topic, now_ms):
            sealed = appender.seal(topic.id, last)
            if sealed is not None:
                self._unsealable.pop((topic.id, last), None)
                return _Step(topic, TopicCheckpoint(topic.id, up_to_seq, [sealed]), 0, has_more=False)
            self._pause_sealing(topic.id, last)
        return None


def ask(shard_copy: ShardCopy, request: Asks[ReplyT]) -> ReplyT:
    """Have the shard carry out a request. Raise Refused, and what `ShardLink.call` raises when it gives up."""
    try:
        return shard_copy.link.call(request)
    except (TopicsError, OSError) as error:
        # This OSError comes from shared memory, not from the disk.
        raise Refused(f"shard {shard_copy.shard}: {error}") from error


def mark(shard_copy: ShardCopy, checkpoints: list[TopicCheckpoint]) -> None:
    """Have the shard log the checkpoints, and apply them to the fold at once: in the log they are behind the place that
    the copy has read.

    Raise Refused if the shard could not log all of them, or could not be asked.
    """
    reply = ask(shard_copy, Checkpoint(checkpoints))
    deleted, refused = set(reply.deleted), set(reply.refused)
    for checkpoint in checkpoints:
        topic = shard_copy.fold.topics.get(checkpoint.topic_id)
        if topic is None or checkpoint.topic_id in refused:
            continue
        if checkpoint.topic_id in deleted:
            shard_copy.deleted(checkpoint.topic_id)
            continue
        shard_copy.index_of(topic).checkpointed(checkpoint.segments)
    if refused:
        raise Refused(f"shard {shard_copy.shard} could not mark {len(refused)} of {len(checkpoints)} topics")


def _followed(entries: array[int], topic: Topic, earliest_seq: int) -> array[int] | None:
    """Return the entries that may go into segments now: only of records that this process read from the log, and so
    checked. Return None while the shard does not show these records in the log.

    Usually records in RAM come behind all of these. Evicted ones that the shard keeps for routers may come before
    them; leave these out.
    """
    count = max(0, topic.head_seq - entries[0] + 1)
    entries = entries[: count * ENTRY_WORDS]
    if not any_flagged(entries, LOCATION_IN_RAM_LOG):
        return entries
    in_ram = [flags & (LOCATION_IN_RAM_LOG | LOCATION_GONE) == LOCATION_IN_RAM_LOG for flags in flags_of(entries)]
    if True not in in_ram:
        return entries
    behind = len(in_ram) - in_ram[::-1].index(True)
    return entries[behind * ENTRY_WORDS :] if entries[0] + behind <= earliest_seq else None


def _lost(entries: array[int], count: int) -> int:
    """Return how many of the first `count` entries are of lost records."""
    if not any_flagged(entries, LOCATION_LOST):
        return 0
    return sum(flags & LOCATION_LOST != 0 for flags in flags_of(entries)[:count])


def _messages(steps: list[_Step]) -> Iterator[list[TopicCheckpoint]]:
    message: list[TopicCheckpoint] = []
    records = 0
    for step in steps:
        if message and (len(message) >= TOPICS_PER_MESSAGE or records + step.records > RECORDS_PER_MESSAGE):
            yield message
            message, records = [], 0
        message.append(step.checkpoint)
        records += step.records
    if message:
        yield message


class DurableMarks:
    """Syncs the deletion marks of all shards. It owns the set of shards that have to write their marks again.

    It calls `alive` between steps. It syncs up to `one_by_one_max` segments file by file.
    """

    def __init__(
        self, fs: FileSystem, data_dir: str, shards: int, alive: Callable[[], None], one_by_one_max: int
    ) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._shards = shards
        self._alive = alive
        self._one_by_one_max = one_by_one_max
        self.doubted = set(range(shards))

    def doubt(self) -> None:
        """Have all shards write their marks again: a sync of segments failed, and it may have covered marks."""
        self.doubted = set(range(self._shards))

    def sync(self, shard_copy: ShardCopy) -> list[tuple[int, SegmentInfo]]:
        """Sync every deletion that the copy has read. Return (topic id, segment) of each segment that has some.

        Raise Refused, or OSError: then call `doubt`.
        """
        marked: list[tuple[int, SegmentInfo]] = []
        seen: list[UnlocatedIndex] = []
        for topic_id in sorted(shard_copy.shrunk):
            topic = shard_copy.fold.topics.get(topic_id)
            if topic is None:
                continue
            index = shard_copy.index_of(topic)
            for info, seqs in index.segments.having(sorted(index.deleted)):
                if shard_copy.shard in self.doubted:
                    self._mark_again(shard_copy, topic_id, seqs)
                marked.append((topic_id, info))
            seen.append(index)
        if len(marked) > self._one_by_one_max:
            self._fs.sync_all(layout.topics_dir(self._data_dir))
        else:
            for topic_id, info in marked:
                directory = layout.topic_dir(self._data_dir, topic_id)
                sync_segment(self._fs, directory, info.first_seq, info.version, cold=bool(info.flags & COLD))
        self.doubted.discard(shard_copy.shard)
        for index in seen:
            del index.deleted[:]
        return marked

    def _mark_again(self, shard_copy: ShardCopy, topic_id: int, seqs: Sequence[int]) -> None:
        for at in range(0, len(seqs), SEQS_PER_MESSAGE):
            runs = runs_of(seqs[at : at + SEQS_PER_MESSAGE])
            ask(shard_copy, MarkAgain(topic_id, runs))
            self._alive()
