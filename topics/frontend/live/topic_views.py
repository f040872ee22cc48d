"""Topics as delivery sees them: each looked at once in a slice of work, each page read once and put into words once.

However many connections are served, what is made here depends only on where they stand.
"""

from __future__ import annotations

from typing import Final

from topics.core.clock import Clock
from topics.core.errors import TopicsError
from topics.core.priority import base_priority
from topics.frontend.live.following import never_durable
from topics.frontend.live.stream import FramedPage, StepOutcome, Stream, StreamPlan, StreamStep, batch
from topics.frontend.live.wording import Wording
from topics.frontend.reads.cold import ColdMissError
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.arenas import Arenas
from topics.log import get_logger
from topics.shm.recency import Recency, RecencyWriter

KEPT_MS: Final = 50
"""What is older is made again: records expire, and a frame may be on its way for so long without anybody noticing."""
KEPT_BYTES: Final = 1 * 2**20
"""Of so much that was made nothing is kept beside the next page."""
_log = get_logger()


class TopicSight:
    """Finds topics and remembers them, so that one that is gone can still be said where it ended."""

    def __init__(
        self, reader: TopicReader, arenas: Arenas, recency_writer: RecencyWriter, recency: Recency, clock: Clock
    ) -> None:
        self._arenas = arenas
        self._recency = recency
        self._seen: dict[str, TopicRef] = {}
        self.reader = reader
        self._clock = clock
        self._recency_writer = recency_writer

    def see(self, name: str) -> TopicRef | None:
        """The topic as it is now."""
        ref = self.reader.find(name)
        if ref is not None:
            self._seen[name] = ref
        return ref

    def base_priority(self, name: str) -> int:
        """The priority of a topic as it was seen last, without its age; 0 for one that was never seen."""
        ref = self._seen.get(name)
        if ref is None:
            return 0
        return self.priority(ref)

    def priority(self, ref: TopicRef) -> int:
        """The topic's priority now, without its age."""
        return base_priority(ref.config, self.last_read_ms(ref), self._clock.now_ms())

    def last_read_ms(self, ref: TopicRef) -> int:
        """The time of the last read through any frontend; 0 for never."""
        return self._recency.last_read_ms(ref.shard, ref.slot, ref.view.topic_id)

    def note_read(self, ref: TopicRef) -> None:
        """Somebody reads the topic now."""
        self._recency_writer.touch(ref.shard, ref.slot, ref.view.topic_id, self._clock.now_ms())

    def forget(self, name: str) -> None:
        """Nobody follows it any more."""
        self._seen.pop(name, None)

    def final_head_seq(self, name: str, topic_id: int, at_least_seq: int) -> int:
        """Where a topic that is gone ended, as well as can be told: its slot may be in use again."""
        ref = self._seen.get(name)
        if ref is None or ref.view.topic_id != topic_id:
            return at_least_seq
        view = ref.view
        if self._arenas.of(ref.shard) is ref.arena:
            last = ref.arena.view(ref.slot)
            if last.topic_id == topic_id:
                view = last
        return max(at_least_seq, view.head_seq)


class _Sight:
    """One topic as it was looked at (`ref` None: there is none), or why it could not be; and what was made of it."""

    __slots__ = ("batches", "error", "lasting", "ref", "slice_no", "steps")

    def __init__(self, ref: TopicRef | None, error: TopicsError | None) -> None:
        self.ref = ref
        self.error = error
        self.steps: dict[Stream, StreamStep] = {}
        self.batches: dict[tuple[int, PageOptions, bool, Wording], FramedPage | TopicsError] = {}
        self.lasting = error is None
        """What failed is tried again in the next slice."""
        self.slice_no = 0


class TopicViews:
    """One consistent sight of each topic it is asked about, for one slice of work: `begin` each with it.

    A pass over many connections takes several slices. What was put into words in one is good in the next, if the topic
    is still the same and not much time has gone by (records expire).
    """

    def __init__(self, topics: TopicSight) -> None:
        self._topics = topics
        self._sights: dict[str, _Sight] = {}
        self._slice_no = 0
        self._now_ms = self._since_ms = 0
        self._made_bytes = 0
        self.made = 0
        """Steps, ever."""

    def begin(self) -> None:
        """The event loop has gone on: every topic is looked at again."""
        self._slice_no += 1
        self._now_ms = self._topics.reader.now_ms()
        if not 0 <= self._now_ms - self._since_ms <= KEPT_MS:
            self.clear()

    def clear(self) -> None:
        """What was made so far is not used again."""
        self._sights.clear()
        self._made_bytes = 0
        self._since_ms = self._now_ms

    def step(self, stream: Stream, index: int) -> StreamStep:
        """What follows for every connection that stands at `stream`, in the topic at `index` of its plan."""
        sight = self._look(stream.plan.names[index])
        step = sight.steps.get(stream)
        if step is None:
            if self._made_bytes > KEPT_BYTES:
                for other in self._sights.values():
                    other.steps.clear()
                    other.batches.clear()
                self._made_bytes = 0
            step = sight.steps[stream] = self._make(sight, stream, index)
            self._made_bytes += len(step.data)
            self.made += 1
            if step.outcome is StepOutcome.FAILED or step.outcome is StepOutcome.COLD:
                sight.lasting = False
        return step

    def _look(self, name: str) -> _Sight:
        sight = self._sights.get(name)
        if sight is not None and sight.slice_no == self._slice_no:
            return sight
        ref, error = None, None
        try:
            ref = self._topics.see(name)
        except TopicsError as raised:
            error = raised
        except Exception:  # noqa: BLE001 — one topic's fault is not that of all that are delivered
            _log.exception("a topic could not be looked at", topic=name)
            error = TopicsError("internal", f"topic {name!r} cannot be read")
        if sight is None or not sight.lasting or error is not None or sight.ref != ref:
            sight = self._sights[name] = _Sight(ref, error)
        sight.slice_no = self._slice_no
        return sight

    def _make(self, sight: _Sight, stream: Stream, index: int) -> StreamStep:
        plan, from_seq = stream.plan, stream.positions[index]
        name, ref = plan.names[index], sight.ref
        try:
            if sight.error is not None:
                raise sight.error
            if ref is not None and ref.view.topic_id == plan.topic_ids[index]:
                return stream.take(index, self._batch(sight, ref, from_seq, plan))
        except ColdMissError as miss:
            return stream.lack(miss)
        except TopicsError as error:
            if error.code != "topic_not_found":
                return stream.fail(index, error.code, error.message)
        except Exception:  # noqa: BLE001 — one topic's fault is not that of all that are delivered
            _log.exception("a topic could not be delivered", topic=name)
            return stream.fail(index, "internal", f"topic {name!r} cannot be read")
        return stream.end(index, self._topics.final_head_seq(name, plan.topic_ids[index], from_seq))

    def _batch(self, sight: _Sight, ref: TopicRef, from_seq: int, plan: StreamPlan) -> FramedPage:
        key = (from_seq, plan.options, plan.strong, plan.wording)
        made = sight.batches.get(key)
        if made is None:
            made = sight.batches[key] = self._read(ref, from_seq, plan)
        if isinstance(made, TopicsError):
            raise made
        return made

    def _read(self, ref: TopicRef, from_seq: int, plan: StreamPlan) -> FramedPage | TopicsError:
        refusal = never_durable(ref) if plan.strong else None
        if refusal is not None:  # it has become so since the stream was asked for
            return refusal
        up_to_seq = ref.view.durable_seq if plan.strong else None
        try:
            page = self._topics.reader.read_page(ref, from_seq, plan.options, self._now_ms, up_to_seq)
        except TopicsError as error:
            return error
        if page.count:
            self._topics.note_read(ref)
        made = batch(ref.name, from_seq, page, plan.strong, plan.wording)
        self._made_bytes += len(made.record)
        return made
