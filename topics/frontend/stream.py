"""What one event stream says, as a pure state machine: (where it stands, what it is shown) → (bytes, where it stands).

A `Stream` is a value: the position and phase of each topic. Streams that stand at the same place are the same object,
so the hub asks once for all of them, and a thousand watchers of one topic cost a thousand writes of one frame.

    CONNECTING ──page──▶ BACKLOG ──page that ends at the head: caught-up──▶ LIVE
                            ▲                                                │
                            └────────── page that does not ──────────────────┘
    any ──deleted: topic-deleted──▶ ENDED            any ──cannot be read: error──▶ FAILING ──page──▶ BACKLOG

A frame (rules.md Watch); the JSON of a record may have line breaks between tokens, each continues as another `data:`:

    event: record LF data: {"topic":…,"records":[…],"from_seq":…,"to_seq":…,"head_seq":…} LF id: <cursor> LF LF
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from topics.frontend import cursor
from topics.frontend.cold import ColdMissError
from topics.frontend.reading import Page, Tombstone
from topics.frontend.records import PageOptions

OPENING: Final = b"retry: 2000\n\n"
RETRY_AFTER_MS: Final = 1_000
"""When what could not be read is tried again."""
ADVISORY: Final = 429
FINAL: Final = 410

_encode_json = msgspec.json.Encoder().encode


class Phase(IntEnum):
    """Of one topic in one stream."""

    CONNECTING = 0
    """Nothing of it has been looked at on this connection."""
    BACKLOG = 1
    LIVE = 2
    ENDED = 3
    FAILING = 4


class Outcome(Enum):
    """What a step leaves to do."""

    CURRENT = 0
    """Nothing, until the topic changes."""
    WAITING = 1
    """The same, but there are records that are not durable yet."""
    MORE = 2
    """Another page is there already."""
    ENDED = 3
    """Nothing, ever."""
    FAILED = 4
    """Try again in RETRY_AFTER_MS."""
    COLD = 5
    """Try again when `miss` is there."""


class Step(NamedTuple):
    """`data` goes on the wire (may be nothing), `stream` is where that leaves the connection."""

    stream: Stream
    data: bytes
    frames: int
    records: int
    outcome: Outcome
    miss: ColdMissError | None = None


class Batch(msgspec.Struct, frozen=True):
    """A page put into words, for every stream that stands where it begins: all but the ids."""

    topic: str
    tombstone: Tombstone | None
    record: bytes
    """The `record` frame up to its id; empty when there is no record."""
    records: int
    after_tombstone_seq: int
    next_seq: int
    head_seq: int
    hidden: bool
    """There is more, which a `strong` stream must not show yet."""


def batch(topic: str, from_seq: int, page: Page, strong: bool) -> Batch:
    """`strong` streams live in a world whose head is what is durable (api §7)."""
    head_seq = max(from_seq, min(page.head_seq, page.durable_seq)) if strong else page.head_seq
    tombstone = page.tombstone
    start = from_seq
    if tombstone is not None:
        # After `recreated` everything is read again, what its gap names are the former instance's records.
        start = tombstone.earliest_seq - 1 if tombstone.reason == "recreated" else tombstone.gap_to
    record = b""
    if page.count:
        data = b'{"topic":"%b","records":[%b],"from_seq":%d,"to_seq":%d,"head_seq":%d}' % (
            topic.encode(),
            page.body,
            start,
            page.next_from_seq,
            head_seq,
        )
        record = b"event: record\ndata: %b\n" % _in_lines(data)
    return Batch(topic, tombstone, record, page.count, start, page.next_from_seq, head_seq, head_seq < page.head_seq)


class Plan:
    """What a stream follows and how; equal ones are to be one object (the hub sees to that)."""

    __slots__ = ("__weakref__", "_streams", "names", "options", "strong", "topic_ids")

    def __init__(self, names: tuple[str, ...], topic_ids: tuple[int, ...], options: PageOptions, strong: bool) -> None:
        assert len(names) == len(topic_ids)
        self.names = names
        self.topic_ids = topic_ids
        self.options = options
        self.strong = strong
        self._streams: WeakValueDictionary[tuple[tuple[int, ...], bytes], Stream] = WeakValueDictionary()

    def start(self, positions: dict[str, int]) -> Stream:
        """A new connection's stream; topics without a position have ended before."""
        phases = bytes(Phase.CONNECTING if name in positions else Phase.ENDED for name in self.names)
        return self.at(tuple(positions.get(name, 0) for name in self.names), phases)

    def at(self, positions: tuple[int, ...], phases: bytes) -> Stream:
        """The one stream that stands there."""
        stream = self._streams.get((positions, phases))
        if stream is None:
            stream = self._streams[positions, phases] = Stream(self, positions, phases)
        return stream


class Stream:
    """Where a connection stands: per topic of its plan a position and a `Phase`. Compared by identity."""

    __slots__ = ("__weakref__", "_id_line", "phases", "plan", "positions")

    def __init__(self, plan: Plan, positions: tuple[int, ...], phases: bytes) -> None:
        self.plan = plan
        self.positions = positions
        self.phases = phases
        self._id_line: bytes | None = None

    def places(self) -> dict[str, int]:
        """Position by topic, without those that have ended."""
        return {
            name: position
            for name, position, phase in zip(self.plan.names, self.positions, self.phases, strict=True)
            if phase != Phase.ENDED
        }

    @property
    def id_line(self) -> bytes:
        """`id: …` of a frame after which a connection stands here, and the blank line that ends the frame."""
        if self._id_line is None:
            self._id_line = b"id: %b\n\n" % cursor.encode(self.places())
        return self._id_line

    def take(self, index: int, batch: Batch) -> Step:
        """The page that follows the position in the topic at `index`."""
        phase = self.phases[index]
        assert phase != Phase.ENDED
        caught_up = batch.next_seq >= batch.head_seq
        moved = self._moved(index, batch.next_seq, Phase.LIVE if caught_up else Phase.BACKLOG)
        pieces = []
        if batch.tombstone is not None:
            after = self._moved(index, batch.after_tombstone_seq, Phase.BACKLOG)
            pieces.append(_tombstone(batch.topic, batch.tombstone, phase == Phase.CONNECTING) + after.id_line)
        if batch.record:
            pieces.append(batch.record + moved.id_line)
        if caught_up and phase != Phase.LIVE:
            data = b'{"topic":"%b","head_seq":%d}' % (batch.topic.encode(), batch.head_seq)
            pieces.append(b"event: caught-up\ndata: %b\n%b" % (data, moved.id_line))
        at_head = Outcome.WAITING if batch.hidden else Outcome.CURRENT
        outcome = at_head if caught_up else Outcome.MORE
        return Step(moved, b"".join(pieces), len(pieces), batch.records, outcome)

    def end(self, index: int, head_seq: int) -> Step:
        """The topic was deleted, whether or not its name is in use again."""
        moved = self._moved(index, self.positions[index], Phase.ENDED)
        data = {"topic": self.plan.names[index], "head_seq": head_seq, "reason": "deleted"}
        frame = b"event: topic-deleted\ndata: %b\n%b" % (_encode_json(data), moved.id_line)
        return Step(moved, frame, 1, 0, Outcome.ENDED)

    def lack(self, miss: ColdMissError) -> Step:
        """What follows is in the cold tier and not at hand."""
        return Step(self, b"", 0, 0, Outcome.COLD, miss)

    def fail(self, index: int, message: str) -> Step:
        """The topic cannot be read now; said once, until it can be read again."""
        if self.phases[index] == Phase.FAILING:
            return Step(self, b"", 0, 0, Outcome.FAILED)
        moved = self._moved(index, self.positions[index], Phase.FAILING)
        frame = error_frame(ADVISORY, message, retry_after_ms=RETRY_AFTER_MS, topics=[self.plan.names[index]])
        return Step(moved, frame, 1, 0, Outcome.FAILED)

    def _moved(self, index: int, position: int, phase: Phase) -> Stream:
        if position == self.positions[index] and phase == self.phases[index]:
            return self
        after = index + 1
        return self.plan.at(
            (*self.positions[:index], position, *self.positions[after:]),
            self.phases[:index] + bytes((phase,)) + self.phases[after:],
        )


def heartbeat(now_ms: int) -> bytes:
    """The comment of an idle stream; `now_ms` since the epoch."""
    return b": hb %d\n\n" % now_ms


def error_frame(
    code: int, message: str, *, retry_after_ms: int | None = None, topics: list[str] | None = None
) -> bytes:
    """An `error` event: ADVISORY, the stream goes on, or FINAL, it is over. It has no id: nothing was delivered."""
    data: dict[str, object] = {"code": code, "error": message}
    if retry_after_ms is not None:
        data["retry_after_ms"] = retry_after_ms
    if topics is not None:
        data["topics"] = topics
    return b"event: error\ndata: %b\n\n" % _encode_json(data)


def _tombstone(topic: str, tombstone: Tombstone, connecting: bool) -> bytes:
    reason = tombstone.reason
    if connecting and reason != "recreated":
        reason = "from_seq_too_old"
    data = {
        "topic": topic,
        "reason": reason,
        "gap_from": tombstone.gap_from,
        "gap_to": tombstone.gap_to,
        "earliest_seq": tombstone.earliest_seq,
        "head_seq": tombstone.head_seq,
    }
    return b"event: tombstone\ndata: %b\n" % _encode_json(data)


def _in_lines(data: bytes) -> bytes:
    """JSON whose line breaks (white space all of them: in a string they are escaped) are an event stream's.

    A client joins the values of `data:` lines with LF, so LF survives; CR would end a line and becomes a blank.
    """
    if b"\r" in data:
        data = data.replace(b"\r", b" ")
    if b"\n" in data:
        data = data.replace(b"\n", b"\ndata: ")
    return data
