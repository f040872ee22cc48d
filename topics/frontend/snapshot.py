"""Topics as delivery sees them: each looked at once in a slice of work, each page read once and put into words once.

However many connections a slice serves, what is made here depends only on where they stand.
"""

from __future__ import annotations

from topics.core.errors import TopicsError
from topics.core.priority import base_priority
from topics.frontend.arenas import Arenas
from topics.frontend.reading import TopicReader, TopicRef
from topics.frontend.records import PageOptions
from topics.frontend.stream import Batch, Plan, Step, Stream, batch
from topics.frontend.wording import Wording
from topics.log import get_logger
from topics.shm.recency import Recency, RecencyWriter

_log = get_logger()


class TopicSight:
    """Finds topics and remembers them, so that one that is gone can still be said where it ended."""

    def __init__(self, reader: TopicReader, arenas: Arenas, recency_writer: RecencyWriter, recency: Recency) -> None:
        self._arenas = arenas
        self._recency = recency
        self._seen: dict[str, TopicRef] = {}
        self.reader = reader
        self.recency_writer = recency_writer

    def see(self, name: str) -> TopicRef | None:
        """The topic as it is now."""
        ref = self.reader.find(name)
        if ref is not None:
            self._seen[name] = ref
        return ref

    def base_priority(self, name: str) -> int:
        """Of a topic as it was seen last, without age; 0 for one that was never seen."""
        ref = self._seen.get(name)
        if ref is None:
            return 0
        last_read_ms = self._recency.last_read_ms(ref.shard, ref.slot, ref.view.topic_id)
        return base_priority(ref.config, last_read_ms, self.reader.now_ms())

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


class Snapshot:
    """One consistent sight of each topic it is asked about; to be thrown away before the event loop goes on."""

    def __init__(self, topics: TopicSight) -> None:
        self._topics = topics
        self._now_ms = topics.reader.now_ms()
        self._refs: dict[str, TopicRef | None] = {}
        self._steps: dict[str, dict[Stream, Step]] = {}
        self._batches: dict[tuple[str, int, PageOptions, bool, Wording], Batch | TopicsError] = {}

    def steps(self, name: str) -> dict[Stream, Step]:
        """The steps made so far in a topic."""
        steps = self._steps.get(name)
        if steps is None:
            steps = self._steps[name] = {}
        return steps

    def step(self, stream: Stream, index: int) -> Step:
        """What follows for every connection that stands at `stream`, in the topic at `index` of its plan."""
        name = stream.plan.names[index]
        steps = self.steps(name)
        step = steps.get(stream)
        if step is None:
            step = steps[stream] = self._make(stream, index, name)
        return step

    def _make(self, stream: Stream, index: int, name: str) -> Step:
        plan, from_seq = stream.plan, stream.positions[index]
        try:
            ref = self._ref(name)
            if ref is not None and ref.view.topic_id == plan.topic_ids[index]:
                return stream.take(index, self._batch(ref, from_seq, plan))
        except TopicsError as error:
            if error.code != "topic_not_found":
                return stream.fail(index, error.code, error.message)
        except Exception:  # noqa: BLE001 — one topic's fault is not that of all that are delivered
            _log.exception("a topic could not be delivered", topic=name)
            return stream.fail(index, "internal", f"topic {name!r} cannot be read")
        return stream.end(index, self._topics.final_head_seq(name, plan.topic_ids[index], from_seq))

    def _ref(self, name: str) -> TopicRef | None:
        if name not in self._refs:
            self._refs[name] = self._topics.see(name)
        return self._refs[name]

    def _batch(self, ref: TopicRef, from_seq: int, plan: Plan) -> Batch:
        key = (ref.name, from_seq, plan.options, plan.strong, plan.wording)
        made = self._batches.get(key)
        if made is None:
            made = self._batches[key] = self._read(ref, from_seq, plan)
        if isinstance(made, TopicsError):
            raise made
        return made

    def _read(self, ref: TopicRef, from_seq: int, plan: Plan) -> Batch | TopicsError:
        up_to_seq = ref.view.durable_seq if plan.strong else None
        try:
            page = self._topics.reader.read_page(ref, from_seq, plan.options, self._now_ms, up_to_seq)
        except TopicsError as error:
            return error
        if page.count:
            self._topics.recency_writer.touch(ref.shard, ref.slot, ref.view.topic_id, self._now_ms)
        return batch(ref.name, from_seq, page, plan.strong, plan.wording)
