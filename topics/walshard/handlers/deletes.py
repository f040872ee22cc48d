"""Deletion of records: on request (api §5), by expiry (api §1, `ttl_ms`), at the end of jobs, and to make room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Final

import msgspec

from topics.core.control_bodies import encode_body
from topics.core.errors import TopicsError, topic_not_found
from topics.core.floors import Deletion, EvictReason
from topics.core.pending import done_jobs_to_drop
from topics.core.tags import Match
from topics.log import get_logger
from topics.shm.asks import Done
from topics.shm.topic_messages import DeleteRecords, DeleteRecordsReply, Expire
from topics.storage.frame import FrameType
from topics.storage.postings import CorruptPostings
from topics.storage.segment import CorruptSegment
from topics.storage.topic_frames import delete_frame, floor_frame
from topics.walshard.commit.draft import CommitFirst, Draft, LogWrite, Steps, Then, control_write
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.tag_search import TagSearch
from topics.walshard.step_clock import StepClock

log = get_logger()

BY_TAG_MAX: Final = 64
"""Topics whose tags are indexed in idle turns."""
SWEEP_STEP: Final = 1024
"""A sweep goes on in the next turn after so much cost: 1 for a topic, about 2 µs, and more where records may expire."""
SWEPT_COST: Final = 8
EXPIRED_COST: Final = 128


class Deletes:
    """Deletes and expires records of one shard's topics. Everything prepared is committed before, but for removals that
    join a group: what a group removes is kept in it.
    """

    def __init__(self, catalog: Catalog, tags: TagSearch, time: StepClock) -> None:
        self._catalog = catalog
        self._tags = tags
        self._time = time
        self._by_tag: OrderedDict[int, None] = OrderedDict()
        """Ids of topics with a delete by tag, the latest last: only these have `Topic.tags`."""
        self._unswept: Iterator[Hosted] | None = None
        """Topics at which the sweep has yet to look; None between two sweeps."""
        self._kept: set[int] = set()
        """Ids of topics whose expiry the log refused in the last sweep, which is logged once."""
        self._keeping: set[int] = set()
        """The same of this sweep."""

    def expire_one(self, call: Expire, _frontend: int) -> Steps[Done]:
        """Move the floors of a topic over its expired records."""
        hosted = self._catalog.find(call.name)
        if hosted is not None:
            yield from self.expire(hosted)
        return Done()

    def expire(self, hosted: Hosted) -> Steps[bool]:
        """Move the floors over records that have outlived their ttl, and log that. False if the log refused it."""
        topic = hosted.topic
        floors = topic.plan_eviction(topic.expired_below(self._time.expiry_ms), EvictReason.TTL)
        if floors is None:
            return True
        entry = floor_frame(topic, floors, self._time.now.wall_ms)
        draft = Draft([LogWrite([entry], partial(topic.logged, floors))], touched=[hosted], floors_of=[topic.id])
        yield draft
        if not draft.committed:
            self._time.keep_expired(topic.id)
        return draft.committed

    def index_some(self) -> bool:
        """Index tags of new records, in an idle turn, in topics with a late delete by tag. False if there are none."""
        for topic_id in list(self._by_tag):
            hosted = self._catalog.find_id(topic_id)
            try:
                if hosted is not None and self._tags.index_some(hosted.topic, hosted.index, hosted.topic.head_seq):
                    self._by_tag.move_to_end(topic_id)  # the others' turn
                    return True
            except (OSError, CorruptSegment):
                self._drop_tags(topic_id)  # the next delete finds out, and its client is told
            if hosted is None:
                self._drop_tags(topic_id)
        return False

    def _drop_tags(self, topic_id: int) -> None:
        """Drop the tag index of a topic, which nobody would shrink any more."""
        del self._by_tag[topic_id]
        hosted = self._catalog.find_id(topic_id)
        if hosted is not None:
            hosted.topic.tags = None

    def sweep(self) -> Steps[None]:
        """Begin to expire records of topics that nobody touches, and to free their memory, unless that is under way;
        `sweep_some` goes on.
        """
        self._tags.drop_unused()
        if self._unswept is None:
            self._unswept, self._keeping = iter(list(self._catalog)), set()
        yield from self.sweep_some()

    @property
    def is_sweeping(self) -> bool:
        """Return whether `sweep_some` has something to do."""
        return self._unswept is not None

    def sweep_some(self) -> Steps[None]:
        """Look at some topics. Expired records stay for now if the log cannot be written."""
        cost = 0
        while self._unswept is not None and cost < SWEEP_STEP:
            hosted = next(self._unswept, None)
            if hosted is None:
                self._unswept, self._kept = None, self._keeping
                return
            topic = hosted.topic
            cost += 1
            if self._catalog.find_id(topic.id) is not hosted:
                continue  # deleted meanwhile
            if topic.config.ttl_ms:
                earliest_seq = topic.earliest_seq
                has_expired = yield from self.expire(hosted)
                cost += SWEPT_COST if topic.earliest_seq == earliest_seq and has_expired else EXPIRED_COST
                if not has_expired:
                    self._keeping.add(topic.id)
                    if topic.id not in self._kept:
                        log.error("records that have outlived ttl_ms stay: the log cannot be written", topic=topic.name)
            self._catalog.shrink_ring(hosted)

    def delete(self, call: DeleteRecords, _frontend: int) -> Steps[DeleteRecordsReply]:
        """Delete as much as one turn takes. The reply has the rest of the request."""
        hosted = self._catalog.require(call.name)
        yield from self.expire(hosted)
        topic = hosted.topic
        if call.topic_id not in (0, topic.id):
            raise topic_not_found(call.name)  # the topic of the first turn
        last_seq = topic.head_seq if call.last_seq is None else min(call.last_seq, topic.head_seq)
        if call.before_seq is not None:
            last_seq = min(last_seq, call.before_seq - 1)
        try:
            deletion, rest = self._plan(hosted, call, last_seq)
        except (OSError, CorruptSegment, CorruptPostings) as error:
            log.error("a delete could not find its records", topic=call.name, reason=str(error))
            raise TopicsError(
                "storage_unavailable",
                f"the records of topic {call.name!r} cannot be read to delete them; see the service's log",
                {"topic": call.name},
            ) from error
        floors = topic.floors_without(deletion)
        deleted = max(0, deletion.records)
        reply = DeleteRecordsReply(
            deleted, deletion.earliest_seq, topic.head_seq, floors.records, floors.live_bytes, rest
        )
        if not deletion.records and deletion.earliest_seq == topic.earliest_seq:
            return reply
        entry = delete_frame(topic, deletion.below_seq, deletion.seqs, floors, self._time.now.wall_ms)
        sync = topic.config.is_synced
        write = LogWrite([entry], partial(topic.deleted, deletion, floors), sync=sync)
        yield Draft([write], touched=[hosted], floors_of=[topic.id], reply=reply)
        return reply

    def _plan(self, hosted: Hosted, call: DeleteRecords, last_seq: int) -> tuple[Deletion, DeleteRecords | None]:
        """Return what this turn deletes, and the rest of the request. All turns end at the head of the first one."""
        topic = hosted.topic
        if call.op is None:
            return topic.plan_cut(last_seq + 1), None
        self._by_tag[topic.id] = None
        self._by_tag.move_to_end(topic.id)
        if len(self._by_tag) > BY_TAG_MAX:
            self._drop_tags(next(iter(self._by_tag)))
        first_seq = max(call.from_seq, topic.earliest_seq)
        seqs, next_seq = self._tags.find(topic, hosted.index, Match(call.op, call.pattern), first_seq, last_seq)
        rest = None
        if next_seq <= last_seq:
            rest = msgspec.structs.replace(call, from_seq=next_seq, last_seq=last_seq, topic_id=topic.id)
        return topic.plan_delete(seqs), rest

    # -- removals that join a group

    def require_settled(self, hosted: Hosted, group: Draft) -> None:
        """Raise CommitFirst while the group so far, or the ttl, may evict records: plans are made of what stays."""
        topic = hosted.topic
        config = topic.config
        if config.ttl_ms and topic.expired_below(self._time.expiry_ms_of(topic.id)) > topic.earliest_seq:
            raise CommitFirst(self.expire(hosted))
        capped = (config.cap_records or config.cap_bytes) and config.discard == "old"
        if capped and topic.id in group.touched:
            raise CommitFirst

    def remove(
        self, group: Draft, hosted: Hosted, seqs: list[int], *, dead_letters: int = 0, undo: Then = None
    ) -> None:
        """Delete live records (ascending) after `require_settled`; so many of them went to the dead letters."""
        if seqs:
            now = self._time.now
            body, logged = group.pending_of(hosted.topic, now).remove(seqs, dead_letters)
            bodies = [(FrameType.ACK, encode_body(body))]
            group.add(control_write(hosted.topic, now.wall_ms, bodies, logged, undo))
            group.touch(hosted)

    # -- room that the caps of a topic would not give

    def make_room(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[None]:
        """Remove what can go for so many more records and bytes: what has expired, if the log takes that, then
        acknowledged jobs. Nothing else may be prepared. Raise TopicsError when the log refuses to remove jobs.
        """
        yield from self.expire_for(hosted, records, size_bytes)
        if not (yield from self.drop_done_jobs(hosted, records, size_bytes)):
            raise TopicsError(
                "storage_unavailable",
                f"topic {hosted.topic.name!r} is full of acknowledged jobs, and the log cannot take their removal; see"
                " the service's log",
            )

    def expire_for(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[None]:
        """Expire what a cap would find in the way of so many more, if the log takes it."""
        if hosted.topic.must_expire_first(records, size_bytes, self._time.expiry_ms):
            yield from self.expire(hosted)

    def drop_done_jobs(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[bool]:
        """Remove acknowledged jobs for so many more. Comes to False when the log refuses that."""
        draft = Draft()
        self.remove(draft, hosted, done_jobs_to_drop(hosted.topic, records, size_bytes, frozenset()))
        if draft:
            yield draft
        return draft.committed or not draft
