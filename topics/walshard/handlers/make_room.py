"""Room that the caps of a topic would not give: what has expired goes first, then acknowledged jobs that stayed."""

from __future__ import annotations

from topics.core.errors import TopicsError
from topics.core.queue_log import done_jobs_to_drop
from topics.walshard.commit.draft import Draft, Steps
from topics.walshard.handlers.deletes import Deletes
from topics.walshard.handlers.queue_writes import QueueWrites
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.step_clock import StepClock


class MakeRoom:
    """Makes room in topics of one shard for records that are about to be written. Nothing else may be prepared."""

    def __init__(self, deletes: Deletes, writes: QueueWrites, time: StepClock) -> None:
        self._deletes = deletes
        self._writes = writes
        self._time = time

    def is_needed(self, hosted: Hosted, records: int, size_bytes: int) -> bool:
        """Whether something would have to go for so many more records and bytes that `make` can have gone."""
        topic = hosted.topic
        config = topic.config
        if not config.ttl_ms and (config.discard == "old" or topic.queue is None):
            return False
        if topic.must_expire_first(records, size_bytes, self._time.expiry_ms) and not self._deletes.was_refused(hosted):
            return True
        return bool(done_jobs_to_drop(topic, records, size_bytes, self._writes.dying(hosted)))

    def make(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[None]:
        """Has go what can, for so many records and bytes more. What has expired stays if the log cannot take that it
        goes. Raises TopicsError when the log cannot take that jobs go.
        """
        yield from self.expire(hosted, records, size_bytes)
        if not (yield from self.give_way(hosted, records, size_bytes)):
            raise TopicsError(
                "storage_unavailable",
                f"topic {hosted.topic.name!r} is full of acknowledged jobs, but the log cannot take that they go; see"
                " the service's log",
            )

    def expire(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[None]:
        """Expires what a cap would find in the way of so many more, if that can be logged."""
        if hosted.topic.must_expire_first(records, size_bytes, self._time.expiry_ms):
            yield from self._deletes.expire(hosted)

    def give_way(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[bool]:
        """Lets acknowledged jobs go for so many more. False when that cannot be logged."""
        seqs = done_jobs_to_drop(hosted.topic, records, size_bytes, self._writes.dying(hosted))
        draft = Draft()
        self._writes.removal(draft, hosted, seqs)
        if draft:
            yield draft
        return draft.committed or not seqs
