"""What queues and cursors have the group commit write: leases, ends of jobs, positions."""

from __future__ import annotations

from collections.abc import Callable, Set

from topics.core.control_bodies import encode_body
from topics.core.queue_log import AckBody, giving_way
from topics.storage import frame
from topics.storage.frame import FLAG_MORE, Bytes, FrameType
from topics.walshard.appends import Appends
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Answer, Operation
from topics.walshard.step_clock import StepClock


class QueueWrites:
    """`commit` ends the group so far; `expire` moves a topic's floors over its ttl, in a commit of its own;
    `before_log` has what the caps of a topic evicted logged first.
    """

    def __init__(
        self,
        group: Appends,
        commit: Callable[[], None],
        expire: Callable[[Hosted], object],
        before_log: Callable[[Hosted], None],
        time: StepClock,
    ) -> None:
        self._group = group
        self.commit = commit
        self._expire = expire
        self._before_log = before_log
        self._time = time
        self._dying: dict[int, set[int]] = {}
        """By topic id: records whose end is prepared in this group."""
        self._earliest: dict[int, int] = {}
        """By topic id: where the live ones begin without those. So that none is looked at for every request."""
        self._revisions: dict[int, int] = {}
        """By topic id: that of the last removal in this group."""
        self._dead_lettered: dict[int, int] = {}
        """By topic id: as it will be when this group is committed."""

    def committed(self) -> None:
        """The group is over, whichever way."""
        self._dying.clear()
        self._earliest.clear()
        self._revisions.clear()
        self._dead_lettered.clear()

    def settle(self, hosted: Hosted) -> None:
        """What the group so far, or the ttl, may evict is evicted: what is planned now is of what stays."""
        self._before_log(hosted)
        topic = hosted.topic
        config = topic.config
        capped = (config.cap_records or config.cap_bytes) and config.discard == "old"
        if capped and topic.id in self._group.touched:
            self.commit()
        if config.ttl_ms and topic.expired_below(self._time.expiry_ms) > topic.earliest_seq:
            self.commit()
            self._expire(hosted)

    def dying(self, hosted: Hosted) -> Set[int]:
        """Records whose deletion is prepared."""
        return self._dying.get(hosted.topic.id, frozenset())

    def removal(
        self,
        hosted: Hosted,
        seqs: list[int],
        answer: Answer | None,
        *,
        dead_letters: int = 0,
        undo: Callable[[], None] | None = None,
    ) -> None:
        """Has these live records deleted (ascending; `settle` was called), `dead_letters` of them for that reason."""
        if not seqs:
            return
        topic = hosted.topic
        dying = self._dying.setdefault(topic.id, set())
        dying.update(seqs)
        deletion = topic.plan_removal(seqs, dying, self._earliest.get(topic.id, 0))
        self._earliest[topic.id] = deletion.earliest_seq
        # What caps evicted is said before this group, by the revision that comes next.
        revision = max(topic.revision + 1, self._revisions.get(topic.id, 0)) + 1
        self._revisions[topic.id] = revision
        total = 0
        if dead_letters:
            assert topic.queue is not None
            total = self._dead_lettered.get(topic.id, topic.queue.dead_lettered) + dead_letters
            self._dead_lettered[topic.id] = total

        def apply() -> None:
            topic.removed(deletion, revision)
            if topic.queue is not None and total:
                topic.queue.dead_lettered = total

        body = AckBody.removing(topic, deletion, revision, total)
        self.add(hosted, [(FrameType.ACK, encode_body(body))], apply, undo, answer)
        self._group.touched[topic.id] = hosted

    def give_way(self, hosted: Hosted, records: int, size_bytes: int) -> bool:
        """Has acknowledged jobs that stayed deleted for so many more (`core/queue_log.py`). True if there were any: the
        group so far is committed.
        """
        seqs = giving_way(hosted.topic, records, size_bytes, self.dying(hosted))
        if not seqs:
            return False
        self._before_log(hosted)
        self.removal(hosted, seqs, None)
        self.commit()
        return not hosted.topic.live_of(seqs[:1])

    def leases(
        self,
        hosted: Hosted,
        seqs: list[int],
        answer: Answer | None = None,
        undo: Callable[[], None] | None = None,
    ) -> None:
        """These jobs as they are now, if that is to outlive a restart."""
        topic = hosted.topic
        if seqs and topic.config.leases_durable:
            assert topic.queue is not None
            bodies = [(FrameType.LEASE, encode_body(body)) for body in topic.queue.bodies(seqs)]
            self.add(hosted, bodies, None, undo, answer)

    def add(
        self,
        hosted: Hosted,
        bodies: list[tuple[FrameType, bytes]],
        apply: Callable[[], None] | None,
        undo: Callable[[], None] | None,
        answer: Answer | None,
        *,
        sync: bool = False,
    ) -> None:
        """One atomic write of control frames; on the disk before it counts, if `sync` or the topic's class says so."""
        topic = hosted.topic
        last = len(bodies) - 1
        buffers: list[Bytes] = [
            frame.encode(type_, FLAG_MORE if at < last else 0, topic.id, 0, self._time.now.wall_ms, b"", b"", body)
            for at, (type_, body) in enumerate(bodies)
        ]

        def applied(_file_no: int, _offset: int) -> None:
            if apply is not None:
                apply()

        sync |= topic.config.durability == "fsync"
        self._group.durable.append(Operation(buffers, applied, sync=sync, answer=answer, undo=undo))
