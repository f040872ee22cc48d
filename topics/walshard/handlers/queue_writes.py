"""What queues and cursors have the group commit write: leases, ends of jobs, positions."""

from __future__ import annotations

from collections.abc import Callable, Set

from topics.core.control_bodies import encode_body
from topics.core.queue_log import AckFrameBody
from topics.storage import frame
from topics.storage.frame import FLAG_MORE, Bytes, FrameType
from topics.walshard.commit.draft import CommitFirst, Draft, LogWrite, nothing
from topics.walshard.handlers.deletes import Deletes
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.step_clock import StepClock


class QueueWrites:
    """Adds to a group what is logged of jobs and cursors. It owns which records the group so far is to remove."""

    def __init__(self, deletes: Deletes, time: StepClock) -> None:
        self._deletes = deletes
        self._time = time
        self._dying: dict[int, set[int]] = {}
        """By topic id: records whose end is prepared in this group."""
        self._earliest: dict[int, int] = {}
        """By topic id: where the live ones begin without those. So that none is looked at for every request."""
        self._revisions: dict[int, int] = {}
        """By topic id: that of the last removal in this group."""
        self._dead_lettered: dict[int, int] = {}
        """By topic id: as it will be when this group is committed."""

    def group_over(self) -> None:
        """The group is committed or refused."""
        if self._dying:
            self._dying.clear()
            self._earliest.clear()
            self._revisions.clear()
            self._dead_lettered.clear()

    def require_settled(self, hosted: Hosted, group: Draft) -> None:
        """Raises CommitFirst while the group so far, or the ttl, may evict records: plans are made of what stays."""
        topic = hosted.topic
        config = topic.config
        expires = config.ttl_ms and topic.expired_below(self._time.expiry_ms) > topic.earliest_seq
        if expires and not self._deletes.was_refused(hosted):
            raise CommitFirst(self._deletes.expire(hosted))
        capped = (config.cap_records or config.cap_bytes) and config.discard == "old"
        if capped and topic.id in group.touched:
            raise CommitFirst(nothing())

    def dying(self, hosted: Hosted) -> Set[int]:
        """Records whose deletion is prepared."""
        return self._dying.get(hosted.topic.id, frozenset())

    def removal(
        self,
        group: Draft,
        hosted: Hosted,
        seqs: list[int],
        *,
        dead_letters: int = 0,
        undo: Callable[[], None] | None = None,
    ) -> None:
        """Deletes these live records (ascending; `require_settled` was called). `dead_letters` of them went there."""
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

        body = AckFrameBody.removing(topic, deletion, revision, total)
        self.add(group, hosted, [(FrameType.ACK, encode_body(body))], apply, undo)
        group.touch(hosted)

    def leases(
        self,
        group: Draft,
        hosted: Hosted,
        seqs: list[int],
        undo: Callable[[], None] | None = None,
        *,
        carries_out: bool = False,
    ) -> None:
        """These jobs as they are now, if that is to outlive a restart."""
        topic = hosted.topic
        if seqs and topic.config.leases_durable:
            assert topic.queue is not None
            bodies = [(FrameType.LEASE, encode_body(body)) for body in topic.queue.bodies(seqs)]
            self.add(group, hosted, bodies, None, undo, carries_out=carries_out)

    def add(
        self,
        group: Draft,
        hosted: Hosted,
        bodies: list[tuple[FrameType, bytes]],
        apply: Callable[[], None] | None,
        undo: Callable[[], None] | None,
        *,
        sync: bool = False,
        carries_out: bool = True,
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
        group.add(LogWrite(buffers, applied, sync=sync, undo=undo), carries_out=carries_out)
