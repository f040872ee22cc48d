"""What one event stream says, as a pure state machine: (where it stands, what it is shown) → (bytes, where it stands).

A `Stream` is a value: the position and phase of each topic. Streams that stand at the same place are the same object,
so the hub asks once for all of them, and a thousand watchers of one topic cost a thousand writes of one frame.

    CONNECTING ──page──▶ BACKLOG ──page that ends at the head: caught-up──▶ LIVE
                            ▲                                                │
                            └────────── page that does not ──────────────────┘
    any ──deleted: topic-deleted──▶ ENDED            any ──cannot be read: error──▶ FAILING ──page──▶ BACKLOG

How it is said, over an event stream or a WebSocket, is `wording.py`.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from topics.api.answers import TombstoneAnswer as Tombstone
from topics.frontend.live.wording import EVENT_STREAM, Wording
from topics.frontend.reads.cold import ColdMissError
from topics.frontend.reads.reading import RecordPage
from topics.frontend.reads.records import PageOptions

RETRY_AFTER_MS: Final = 1_000
"""When what could not be read is tried again."""


class StreamPhase(IntEnum):
    """Of one topic in one stream."""

    CONNECTING = 0
    """Nothing of it has been looked at on this connection."""
    BACKLOG = 1
    LIVE = 2
    ENDED = 3
    FAILING = 4


class StepOutcome(Enum):
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


class StreamStep(msgspec.Struct, frozen=True):
    """`data` goes on the wire (may be nothing), `stream` is where that leaves the connection."""

    stream: Stream
    data: bytes
    frames: int
    records: int
    outcome: StepOutcome
    miss: ColdMissError | None = None


class FramedPage(msgspec.Struct, frozen=True):
    """A page put into words, for every stream that stands where it begins: all but the ends of frames."""

    topic: str
    tombstone: Tombstone | None
    record: bytes
    """The `record` frame but for its end; empty when there is no record."""
    records: int
    after_tombstone_seq: int
    next_seq: int
    head_seq: int
    hidden: bool
    """There is more, which a `strong` stream must not show yet."""


def batch(topic: str, from_seq: int, page: RecordPage, strong: bool, wording: Wording = EVENT_STREAM) -> FramedPage:
    """`strong` streams live in a world whose head is what is durable (api §7)."""
    head_seq = max(from_seq, min(page.head_seq, page.durable_seq)) if strong else page.head_seq
    tombstone = page.tombstone
    start = from_seq
    if tombstone is not None:
        # After `recreated` everything is read again, what its gap names are the former instance's records.
        start = tombstone.earliest_seq - 1 if tombstone.reason == "recreated" else tombstone.gap_to
    record = b""
    if page.count:
        record = wording.record(topic, page.body, start, page.next_from_seq, head_seq)
    return FramedPage(
        topic, tombstone, record, page.count, start, page.next_from_seq, head_seq, head_seq < page.head_seq
    )


class StreamPlan:
    """What a stream follows and how; equal ones are to be one object (`Plans`)."""

    __slots__ = ("__weakref__", "_streams", "names", "options", "strong", "topic_ids", "wording")

    def __init__(
        self,
        names: tuple[str, ...],
        topic_ids: tuple[int, ...],
        options: PageOptions,
        strong: bool,
        wording: Wording = EVENT_STREAM,
    ) -> None:
        assert len(names) == len(topic_ids)
        self.names = names
        self.topic_ids = topic_ids
        self.options = options
        self.strong = strong
        self.wording = wording
        self._streams: WeakValueDictionary[tuple[tuple[int, ...], bytes], Stream] = WeakValueDictionary()

    def start(self, positions: dict[str, int]) -> Stream:
        """A new connection's stream; topics without a position have ended before."""
        phases = bytes(StreamPhase.CONNECTING if name in positions else StreamPhase.ENDED for name in self.names)
        return self.at(tuple(positions.get(name, 0) for name in self.names), phases)

    def at(self, positions: tuple[int, ...], phases: bytes) -> Stream:
        """The one stream that stands there."""
        stream = self._streams.get((positions, phases))
        if stream is None:
            stream = self._streams[positions, phases] = Stream(self, positions, phases)
        return stream


class StreamPlans:
    """All plans that are followed."""

    def __init__(self) -> None:
        self._plans: WeakValueDictionary[tuple[object, ...], StreamPlan] = WeakValueDictionary()

    def get(
        self,
        names: tuple[str, ...],
        topic_ids: tuple[int, ...],
        options: PageOptions,
        strong: bool,
        wording: Wording = EVENT_STREAM,
    ) -> StreamPlan:
        """The one plan that says this: streams of equal plans share what is made for them."""
        key = (names, topic_ids, options, strong, wording)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = StreamPlan(names, topic_ids, options, strong, wording)
        return plan


class Stream:
    """Where a connection stands: per topic of its plan a position and a `Phase`. Compared by identity."""

    __slots__ = ("__weakref__", "_frame_end", "phases", "plan", "positions")

    def __init__(self, plan: StreamPlan, positions: tuple[int, ...], phases: bytes) -> None:
        self.plan = plan
        self.positions = positions
        self.phases = phases
        self._frame_end: bytes | None = None

    def places(self) -> dict[str, int]:
        """Position by topic, without those that have ended."""
        return {
            name: position
            for name, position, phase in zip(self.plan.names, self.positions, self.phases, strict=True)
            if phase != StreamPhase.ENDED
        }

    @property
    def frame_end(self) -> bytes:
        """The end of a frame after which a connection stands here."""
        if self._frame_end is None:
            self._frame_end = self.plan.wording.end(self.places())
        return self._frame_end

    def take(self, index: int, batch: FramedPage) -> StreamStep:
        """The page that follows the position in the topic at `index`."""
        phase, wording = self.phases[index], self.plan.wording
        assert phase != StreamPhase.ENDED
        caught_up = batch.next_seq >= batch.head_seq
        moved = self._moved(index, batch.next_seq, StreamPhase.LIVE if caught_up else StreamPhase.BACKLOG)
        pieces = []
        if batch.tombstone is not None:
            after = self._moved(index, batch.after_tombstone_seq, StreamPhase.BACKLOG)
            reason = batch.tombstone.reason
            if phase == StreamPhase.CONNECTING and reason != "recreated":
                reason = "from_seq_too_old"
            pieces.append(wording.tombstone(batch.topic, batch.tombstone, reason) + after.frame_end)
        if batch.record:
            pieces.append(batch.record + moved.frame_end)
        if caught_up and phase != StreamPhase.LIVE:
            pieces.append(wording.caught_up(batch.topic, batch.head_seq) + moved.frame_end)
        at_head = StepOutcome.WAITING if batch.hidden else StepOutcome.CURRENT
        outcome = at_head if caught_up else StepOutcome.MORE
        return StreamStep(moved, b"".join(pieces), len(pieces), batch.records, outcome)

    def end(self, index: int, head_seq: int) -> StreamStep:
        """The topic was deleted, whether or not its name is in use again."""
        moved = self._moved(index, self.positions[index], StreamPhase.ENDED)
        frame = self.plan.wording.topic_deleted(self.plan.names[index], head_seq) + moved.frame_end
        return StreamStep(moved, frame, 1, 0, StepOutcome.ENDED)

    def lack(self, miss: ColdMissError) -> StreamStep:
        """What follows is in the cold tier and not at hand."""
        return StreamStep(self, b"", 0, 0, StepOutcome.COLD, miss)

    def fail(self, index: int, code: str, message: str) -> StreamStep:
        """The topic cannot be read now (`code` as in api §0.6); said once, until it can be read again."""
        if self.phases[index] == StreamPhase.FAILING:
            return StreamStep(self, b"", 0, 0, StepOutcome.FAILED)
        moved = self._moved(index, self.positions[index], StreamPhase.FAILING)
        frame = self.plan.wording.advisory(code, message, RETRY_AFTER_MS, [self.plan.names[index]])
        return StreamStep(moved, frame, 1, 0, StepOutcome.FAILED)

    def _moved(self, index: int, position: int, phase: StreamPhase) -> Stream:
        if position == self.positions[index] and phase == self.phases[index]:
            return self
        after = index + 1
        return self.plan.at(
            (*self.positions[:index], position, *self.positions[after:]),
            self.phases[:index] + bytes((phase,)) + self.phases[after:],
        )
