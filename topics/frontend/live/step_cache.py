"""Topics as delivery sees them: each looked up once in a slice of work, each page read and framed once.

However many connections are served, the work that is done here depends only on where they stand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from topics.core.clock import Clock
from topics.core.errors import TopicsError
from topics.core.scheduler import base_priority
from topics.frontend.live.following import check_durable
from topics.frontend.live.stream import FramedPage, StepOutcome, StreamSpec, StreamState, StreamStep, frame_page
from topics.frontend.live.wording import Wording
from topics.frontend.reads.cold import ColdMissError
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.arenas import Arenas
from topics.log import get_logger
from topics.shm.recency import Recency, RecencyWriter

KEPT_MS: Final = 50
"""Age at which steps are made again, since records expire meanwhile. Nobody notices a delay of this length."""
KEPT_BYTES: Final = 1 * 2**20
"""Steps are dropped when so many bytes were made, except for the last one."""
log = get_logger()


@dataclass(eq=False)
class KnownTopics:
    """Finds topics, and remembers how each was found last: a stream is told the head of a topic that is deleted."""

    reader: TopicReader
    arenas: Arenas
    recency_writer: RecencyWriter
    recency: Recency
    clock: Clock
    _last_refs: dict[str, TopicRef] = field(default_factory=dict)

    def find(self, name: str) -> TopicRef | None:
        """Return the topic as it is now; None if there is none."""
        ref = self.reader.find(name)
        if ref is not None:
            self._last_refs[name] = ref
        return ref

    def base_priority(self, name: str) -> int:
        """Return the priority of a topic as it was found last, without its age; 0 if it was never found."""
        ref = self._last_refs.get(name)
        return 0 if ref is None else self.priority(ref)

    def priority(self, ref: TopicRef) -> int:
        """Return the topic's priority now, without its age."""
        return base_priority(ref.config, self.last_read_ms(ref), self.clock.now_ms())

    def last_read_ms(self, ref: TopicRef) -> int:
        """Return the time of the last read through any frontend; 0 for never."""
        return self.recency.last_read_ms(ref.shard, ref.slot, ref.view.topic_id)

    def note_read(self, ref: TopicRef) -> None:
        self.recency_writer.touch(ref.shard, ref.slot, ref.view.topic_id, self.clock.now_ms())

    def forget(self, name: str) -> None:
        """Forget a topic that nobody follows any more."""
        self._last_refs.pop(name, None)

    def final_head_seq(self, name: str, topic_id: int, at_least_seq: int) -> int:
        """Return the head of a deleted topic, as far as it is known: its slot may be in use again."""
        ref = self._last_refs.get(name)
        if ref is None or ref.view.topic_id != topic_id:
            return at_least_seq
        view = ref.view
        if self.arenas.of(ref.shard) is ref.arena:
            last = ref.arena.view(ref.slot)
            if last.topic_id == topic_id:
                view = last
        return max(at_least_seq, view.head_seq)


@dataclass(eq=False, slots=True)
class _CachedTopic:
    """One topic as it was found (`ref` None: there is none) or the `error`, with the pages and steps made from it."""

    ref: TopicRef | None
    error: TopicsError | None
    steps: dict[StreamState, StreamStep] = field(default_factory=dict)
    pages: dict[tuple[int, PageOptions, bool, Wording], FramedPage | TopicsError] = field(default_factory=dict)
    lasting: bool = True
    """False if something failed, which the next slice tries again."""
    slice_no: int = 0


class StepCache:
    """The steps of streams in each slice of work (`begin`). They stay valid in the next if the topic is the same."""

    def __init__(self, topics: KnownTopics) -> None:
        self._topics = topics
        self._cached: dict[str, _CachedTopic] = {}
        self._slice_no = 0
        self._now_ms = self._since_ms = 0
        self._made_bytes = 0
        self.made = 0  # number of steps made since the start

    def begin(self) -> None:
        """Begin a slice: the event loop has run, so every topic is looked up again."""
        self._slice_no += 1
        self._now_ms = self._topics.reader.now_ms()
        if not 0 <= self._now_ms - self._since_ms <= KEPT_MS:
            self.clear()

    def clear(self) -> None:
        self._cached.clear()
        self._made_bytes = 0
        self._since_ms = self._now_ms

    def step(self, state: StreamState, index: int) -> StreamStep:
        """Return the next step of every stream in `state`, in the topic at `index` of its spec."""
        topic = self._find(state.spec.names[index])
        step = topic.steps.get(state)
        if step is None:
            if self._made_bytes > KEPT_BYTES:
                for other in self._cached.values():
                    other.steps.clear()
                    other.pages.clear()
                self._made_bytes = 0
            step = topic.steps[state] = self._make(topic, state, index)
            self._made_bytes += len(step.data)
            self.made += 1
            if step.outcome is StepOutcome.FAILED or step.outcome is StepOutcome.COLD:
                topic.lasting = False
        return step

    def _find(self, name: str) -> _CachedTopic:
        cached = self._cached.get(name)
        if cached is not None and cached.slice_no == self._slice_no:
            return cached
        ref, error = None, None
        try:
            ref = self._topics.find(name)
        except TopicsError as raised:
            error = raised.with_traceback(None)
        except Exception:  # one topic's fault must not stop the delivery of others
            log.exception("a topic could not be looked up", topic=name)
            error = TopicsError("internal", f"topic {name!r} cannot be read")
        if cached is None or not cached.lasting or error is not None or cached.ref != ref:
            cached = self._cached[name] = _CachedTopic(ref, error, lasting=error is None)
        cached.slice_no = self._slice_no
        return cached

    def _make(self, topic: _CachedTopic, state: StreamState, index: int) -> StreamStep:
        spec, from_seq = state.spec, state.positions[index]
        name, ref = spec.names[index], topic.ref
        try:
            if topic.error is not None:
                raise topic.error
            if ref is not None and ref.view.topic_id == spec.topic_ids[index]:
                return state.advance(index, self._page(topic, ref, from_seq, spec))
        except ColdMissError as miss:
            return StreamStep(state, b"", 0, 0, StepOutcome.COLD, miss)
        except TopicsError as error:
            if error.code != "topic_not_found":
                return state.fail(index, error.code, error.message)
        except Exception:  # one topic's fault must not stop the delivery of others
            log.exception("a topic could not be delivered", topic=name)
            return state.fail(index, "internal", f"topic {name!r} cannot be read")
        return state.topic_deleted(index, self._topics.final_head_seq(name, spec.topic_ids[index], from_seq))

    def _page(self, topic: _CachedTopic, ref: TopicRef, from_seq: int, spec: StreamSpec) -> FramedPage:
        key = (from_seq, spec.options, spec.strong, spec.wording)
        made = topic.pages.get(key)
        if made is None:
            made = topic.pages[key] = self._read(ref, from_seq, spec)
        if isinstance(made, TopicsError):
            raise made
        return made

    def _read(self, ref: TopicRef, from_seq: int, spec: StreamSpec) -> FramedPage | TopicsError:
        to_seq = ref.strong_seq if spec.strong else None
        try:
            if spec.strong:
                check_durable(ref)  # its configuration may have changed since the stream began
            page = self._topics.reader.read_page(ref, from_seq, spec.options, to_seq)
        except TopicsError as error:
            return error
        if page.count:
            self._topics.note_read(ref)
        made = frame_page(ref.name, from_seq, page, to_seq, spec.wording)
        self._made_bytes += len(made.record)
        return made
