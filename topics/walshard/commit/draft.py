"""Drafts: the log writes of a group, which handlers hand to the commit.

handler ──▶ Draft ──▶ Commits.commit, which sets the outcome in the draft ──▶ Shard publishes the topics
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence, Set
from functools import partial
from typing import Any, TypeVar

import msgspec

from topics.core.ceilings import Ceiling
from topics.core.floors import Floors
from topics.core.job import Now
from topics.core.pending import PendingTopic, PendingWrite
from topics.core.topic import Topic
from topics.shm.append_messages import AppendReply
from topics.shm.asks import Message
from topics.storage.frame import FLAG_MORE, Bytes, FrameType
from topics.storage.topic_frames import AppendFrames, control_frame, delete_frame, floor_frame, head_frame
from topics.walshard.hosted.hosted import Hosted


class RingRequest(msgspec.Struct, eq=False):
    """A request in the ring of its frontend, up to `position`, and its encoded reply; None if none is wanted."""

    frontend: int
    position: int
    id: int
    reply: bytearray | None = None


Then = Callable[[], None] | None
"""The step that follows a write: once it is in the log (`apply`), or if it never gets there (`undo`)."""
ControlBodies = list[tuple[FrameType, bytes]]
"""The frames of one write that have no record, in order."""


class LogWrite(msgspec.Struct, eq=False):
    """One atomic write: all of its frames get into the log, or none.

    Each of `buffers` holds whole frames; `more_frames` is the number of frames beyond one for each buffer. Once the
    frames are in the log `place(file_no, offset)` runs, then `apply()`; neither may fail. `undo()` runs instead if the
    write fails. With `sync` the write counts only once it is on the disk. A write that `takes_room` is refused on a
    full disk; others may use the reserve. `request` is the request that the write carries out, if any.
    """

    buffers: list[Bytes]
    apply: Then = None
    place: Callable[[int, int], None] | None = None
    more_frames: int = 0
    sync: bool = False
    undo: Then = None
    takes_room: bool = False
    request: RingRequest | None = None

    @property
    def frames(self) -> int:
        return len(self.buffers) + self.more_frames

    @property
    def length(self) -> int:
        return sum(map(len, self.buffers))


def control_write(
    topic: Topic, ts: int, bodies: ControlBodies, apply: Then, undo: Then = None, *, sync: bool = False
) -> LogWrite:
    """Return one atomic write of control frames. It is synced if `sync` or the topic's class says so."""
    last = len(bodies) - 1
    buffers: list[Bytes] = [
        control_frame(type_, topic.id, ts, body, flags=FLAG_MORE if at < last else 0)
        for at, (type_, body) in enumerate(bodies)
    ]
    return LogWrite(buffers, apply, sync=sync or topic.config.is_synced, undo=undo)


def floors_write(topic: Topic, ts: int) -> LogWrite:
    """Return the write that logs a topic's floors as they are now, wherever caps have moved them."""
    floors = topic.floors()
    return LogWrite([floor_frame(topic, floors, ts)], partial(_logged, topic, floors))


def deletion_write(topic: Topic, seqs: Sequence[int], ts: int) -> LogWrite:
    """Return the write that logs deletions (ascending seqs) which only the topic's segments have. Its count of records
    is one too high on purpose, and `floors_write` must follow with the right one. If a kill comes between the two, the
    next start finds the wrong count and logs all these deletions again.
    """
    floors = msgspec.structs.replace(topic.floors(), records=topic.records + 1)
    return LogWrite([delete_frame(topic, 0, seqs, floors, ts)], partial(_logged, topic, floors))


def _logged(topic: Topic, floors: Floors) -> None:
    topic.revision, topic.logged_floor = floors.revision, floors.evict_floor


def head_write(topic: Topic, seq: int, ts: int) -> LogWrite:
    """Return the write of an exact head watermark: the topic has given out all seqs up to `seq`, and none behind."""
    ceiling = Ceiling(seq, True)
    return LogWrite([head_frame(topic, seq, ts, exact=True)], partial(topic.ceilings.logged, ceiling, seq), sync=True)


def ceiling_writes(topic: Topic, count: int, ts: int) -> list[LogWrite]:
    """Return the write of the ceiling that must be logged before the next `count` seqs; [] if none is due."""
    ceiling = topic.ceilings.copy(topic.durable_seq).plan(topic.config, topic.head_seq, count, topic.durable_seq)
    if ceiling is None:
        return []
    logged = partial(topic.ceilings.logged, ceiling, topic.head_seq + count)
    return [LogWrite([head_frame(topic, ceiling.seq, ts, exact=False)], logged, sync=ceiling.sync)]


class Draft:
    """Writes for the durable log and the RAM log, and the topics that they make, change and delete.

    Handlers fill it. The commit sets `is_logged` and `committed`; if it refuses the draft, it empties `made` and
    `deleted`. `floors_of` are ids of topics whose floors are in the writes already.
    """

    def __init__(
        self,
        durable: Iterable[LogWrite] = (),
        ram: Iterable[LogWrite] = (),
        touched: Iterable[Hosted] = (),
        *,
        deleted: Iterable[Hosted] = (),
        floors_of: Iterable[int] = (),
        reply: Message | None = None,
    ) -> None:
        self.durable = list(durable)
        self.ram = list(ram)
        self.touched = {hosted.topic.id: hosted for hosted in touched} if touched else {}
        self.floors_of = set(floors_of)
        self.reply = reply
        """Reply to the request that the draft carries out; None for a draft of many requests."""
        self.made: dict[str, Hosted] = {}
        """Topics whose creation is among the durable writes, by name."""
        self.deleted = list(deleted)
        """Topics whose end is among the durable writes."""
        self.carrier: LogWrite | None = None
        """The write that carries out the request which is being handled."""
        self._pending: dict[int, PendingTopic] = {}
        self.is_logged = False
        """All of its durable writes are in the log; its RAM writes may have been refused."""
        self.committed = False
        """All of it is in the logs."""

    def __bool__(self) -> bool:
        return bool(self.durable or self.ram)

    def add(self, write: LogWrite, *, in_ram: bool = False, carries_out: bool = True) -> None:
        """Add a write. With `carries_out` the request that is being handled fails if it cannot be committed."""
        (self.ram if in_ram else self.durable).append(write)
        if carries_out:
            self.carrier = write

    def add_append(self, hosted: Hosted, write: PendingWrite, frames: AppendFrames) -> None:
        """Add the writes of an append: frames that must come first, then its records, which carry the request out."""
        sync = write.in_ram or (write.ceiling is not None and write.ceiling.sync)
        for frame in frames.before:
            self.durable.append(LogWrite([frame], write.ceiling_logged, sync=sync))
        place = partial(write.logged, frames.prefix_len)
        records = LogWrite(frames.records, place=place, more_frames=write.outcome.records - 1, sync=write.sync)
        records.takes_room = True
        self.add(records, in_ram=write.in_ram)
        self.touched[hosted.topic.id] = hosted

    def touch(self, hosted: Hosted) -> None:
        """Note that the draft changes what readers see of a topic."""
        self.touched[hosted.topic.id] = hosted

    def pending_of(self, topic: Topic, now: Now) -> PendingTopic:
        """Return the topic as the draft so far leaves it."""
        pending = self._pending.get(topic.id)
        if pending is None:
            pending = self._pending[topic.id] = PendingTopic(topic, now)
        return pending

    def dying(self, topic: Topic) -> Set[int]:
        """Return the seqs of a topic's records whose removal is drafted."""
        pending = self._pending.get(topic.id)
        return frozenset() if pending is None else pending.dying

    def take_carrier(self) -> LogWrite | None:
        """Return, and forget, the write that carries out the request which was handled last; None when none does."""
        carrier, self.carrier = self.carrier, None
        return carrier


T = TypeVar("T")
Steps = Generator[Draft, None, T]
"""A handler that needs several commits yields each draft, and goes on once it is committed or was refused."""


GroupHandler = Callable[[Any, int, Draft], Message | AppendReply | None]
"""Prepares a request of a frontend in a group: (call, frontend, group) → reply. It may raise TopicsError, having left
the group as it was, or CommitFirst.
"""
AloneHandler = Callable[[Any, int], Steps[Any]]
"""Carries out a request by itself, once everything prepared before is committed: (call, frontend) → steps to the reply.
The draft that carries it out also holds the reply, so that the journal has the reply before the log has the draft.
"""


class CommitFirst(Exception):  # noqa: N818 - not an error
    """Raised by a group handler whose request needs the group so far committed, then `steps` done. With `all` the steps
    carry out the request; otherwise the shard then calls the handler again.
    """

    def __init__(self, steps: Steps[object] | None = None, *, all: bool = False) -> None:
        super().__init__()
        self.steps, self.all = steps, all
