"""A stream as a pure state machine: (its state, the next page or event) → (bytes to send, its next state).

A `StreamState` is a value: the position and phase of each topic. Streams in the same state share one object, so the hub
makes a step once for all of them, and a thousand watchers of one topic cost a thousand writes of one frame.

    CONNECTING ──page──▶ BACKLOG ──page that ends at the head: caught-up──▶ LIVE
                            ▲                                                │
                            └────────── page that does not ──────────────────┘
    any ──deleted: topic-deleted──▶ ENDED            any ──cannot be read: error──▶ FAILING ──page──▶ BACKLOG

`wording.py` has the frames of event streams and the messages of WebSockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
"""Time until a topic that could not be read is tried again."""


class TopicPhase(IntEnum):
    """The phase of one topic in one stream."""

    CONNECTING = 0  # not read yet on this connection
    BACKLOG = 1
    LIVE = 2
    ENDED = 3
    FAILING = 4


class StepOutcome(Enum):
    """The work that is left after a step."""

    CURRENT = 0  # nothing until the topic changes
    WAITING = 1  # the same, but there are records that are not durable yet
    MORE = 2  # read the next page, which is there already
    ENDED = 3  # nothing ever
    FAILED = 4  # try again in RETRY_AFTER_MS
    COLD = 5  # try again when `miss` is fetched


class StreamStep(msgspec.Struct, frozen=True):
    """One step of a stream: the `data` to send (may be empty), and the `state` after it."""

    state: StreamState
    data: bytes
    frames: int
    records: int
    outcome: StepOutcome
    miss: ColdMissError | None = None


class FramedPage(msgspec.Struct, frozen=True):
    """A page as frames, for all streams at the position where it begins. Only the ends of the frames are missing."""

    topic: str
    tombstone: Tombstone | None
    record: bytes
    """The `record` frame without its end; empty if there is no record."""
    records: int
    after_tombstone_seq: int
    next_seq: int
    head_seq: int
    hidden: bool
    """True if there is more that a `strong` stream must not show yet."""


def frame_page(
    topic: str, from_seq: int, page: RecordPage, to_seq: int | None, wording: Wording = EVENT_STREAM
) -> FramedPage:
    """Frame a page. A `strong` stream has a `to_seq`, which it takes for the head (api §7)."""
    tombstone = page.tombstone
    start = from_seq
    if tombstone is not None:
        # After `recreated` the topic is read from its start: the gap is of the former instance's records.
        start = tombstone.earliest_seq - 1 if tombstone.reason == "recreated" else tombstone.gap_to
    head_seq = page.head_seq if to_seq is None else min(page.head_seq, max(start, to_seq))
    record = b""
    if page.count:
        record = wording.record(topic, page.body, start, page.next_from_seq, head_seq)
    return FramedPage(
        topic, tombstone, record, page.count, start, page.next_from_seq, head_seq, head_seq < page.head_seq
    )


@dataclass(eq=False, slots=True, weakref_slot=True)
class StreamSpec:
    """The topics that a stream follows, and how it reads and words them. Owns the states of its streams."""

    names: tuple[str, ...]
    topic_ids: tuple[int, ...]
    options: PageOptions
    strong: bool
    wording: Wording = EVENT_STREAM
    _states: WeakValueDictionary[tuple[tuple[int, ...], bytes], StreamState] = field(
        default_factory=WeakValueDictionary
    )

    def start(self, positions: dict[str, int]) -> StreamState:
        """Return the state of a new connection. Topics without a position have ended before."""
        phases = bytes(TopicPhase.CONNECTING if name in positions else TopicPhase.ENDED for name in self.names)
        return self.state(tuple(positions.get(name, 0) for name in self.names), phases)

    def state(self, positions: tuple[int, ...], phases: bytes) -> StreamState:
        """Return the one state with these positions and phases."""
        state = self._states.get((positions, phases))
        if state is None:
            state = self._states[positions, phases] = StreamState(self, positions, phases)
        return state


@dataclass(eq=False, slots=True, weakref_slot=True)
class StreamState:
    """The position and `TopicPhase` of each topic of a stream. Immutable; compared by identity."""

    spec: StreamSpec
    positions: tuple[int, ...]
    phases: bytes
    _frame_end: bytes | None = None

    def cursor(self) -> dict[str, int]:
        """Return the position by topic, without topics that have ended."""
        return {
            name: position
            for name, position, phase in zip(self.spec.names, self.positions, self.phases, strict=True)
            if phase != TopicPhase.ENDED
        }

    @property
    def frame_end(self) -> bytes:
        """The end of a frame that leaves a stream in this state."""
        if self._frame_end is None:
            self._frame_end = self.spec.wording.end(self.cursor())
        return self._frame_end

    def advance(self, index: int, page: FramedPage) -> StreamStep:
        """Send the page that follows the position in the topic at `index`."""
        phase, wording = self.phases[index], self.spec.wording
        assert phase != TopicPhase.ENDED
        caught_up = page.next_seq >= page.head_seq
        after = self._moved(index, page.next_seq, TopicPhase.LIVE if caught_up else TopicPhase.BACKLOG)
        frames = []
        if page.tombstone is not None:
            after_gap = self._moved(index, page.after_tombstone_seq, TopicPhase.BACKLOG)
            reason = page.tombstone.reason
            if phase == TopicPhase.CONNECTING and reason not in ("recreated", "lost_tail", "restored"):
                reason = "from_seq_too_old"
            frames.append(wording.tombstone(page.topic, page.tombstone, reason) + after_gap.frame_end)
        if page.record:
            frames.append(page.record + after.frame_end)
        if caught_up and phase != TopicPhase.LIVE:
            frames.append(wording.caught_up(page.topic, page.head_seq) + after.frame_end)
        at_head = StepOutcome.WAITING if page.hidden else StepOutcome.CURRENT
        outcome = at_head if caught_up else StepOutcome.MORE
        return StreamStep(after, b"".join(frames), len(frames), page.records, outcome)

    def topic_deleted(self, index: int, head_seq: int) -> StreamStep:
        """End a topic that was deleted, whether or not its name is in use again."""
        after = self._moved(index, self.positions[index], TopicPhase.ENDED)
        frame = self.spec.wording.topic_deleted(self.spec.names[index], head_seq) + after.frame_end
        return StreamStep(after, frame, 1, 0, StepOutcome.ENDED)

    def fail(self, index: int, code: str, message: str) -> StreamStep:
        """Tell the client that the topic cannot be read now (`code` as in api §0.6); once, until it can be read."""
        if self.phases[index] == TopicPhase.FAILING:
            return StreamStep(self, b"", 0, 0, StepOutcome.FAILED)
        after = self._moved(index, self.positions[index], TopicPhase.FAILING)
        frame = self.spec.wording.advisory(code, message, RETRY_AFTER_MS, [self.spec.names[index]])
        return StreamStep(after, frame, 1, 0, StepOutcome.FAILED)

    def _moved(self, index: int, position: int, phase: TopicPhase) -> StreamState:
        if position == self.positions[index] and phase == self.phases[index]:
            return self
        after = index + 1
        return self.spec.state(
            (*self.positions[:index], position, *self.positions[after:]),
            self.phases[:index] + bytes((phase,)) + self.phases[after:],
        )
