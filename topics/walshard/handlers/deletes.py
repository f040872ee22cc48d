"""Deletion of records: on request (api §5), by expiry (api §1, `ttl_ms`), at the end of jobs, and to make room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Final

import msgspec

from topics.core.control_bodies import encode_body
from topics.core.errors import storage_unavailable, topic_not_found
from topics.core.floors import Deletion, EvictReason
from topics.core.pending import done_jobs_to_drop
from topics.core.tags import Match
from topics.log import LASTING_EVERY_S, SparseLines
from topics.shm.asks import Done
from topics.shm.topic_messages import DeleteRecords, DeleteRecordsReply, Expire
from topics.storage.frame import FrameType
from topics.storage.postings import CorruptPostings
from topics.storage.segment import CorruptSegment
from topics.storage.topic_frames import delete_frame, floor_frame
from topics.walshard.commit.draft import CommitFirst, Draft, LogWrite, Steps, Then, control_write
from topics.walshard.handlers.relogging import lease_turn
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.tag_search import TagSearch
from topics.walshard.step_clock import StepClock

_EXPIRED_STAY: Final = "records that have outlived ttl_ms stay: the log cannot be written"
BY_TAG_MAX: Final = 64
"""Topics at most that have a tag index, which idle turns keep up to date."""
SWEEP_STEP: Final = 1024
"""Cost after which a sweep goes on in the next turn: 1 (about 2 µs) for a topic, more if its records may expire."""
SWEPT_COST: Final = 8
EXPIRED_COST: Final = 128


class Deletes:
    """Deletes and expires records of one shard's topics. It owns the sweep over all topics, and decides which of them
    have a tag index. `remove` joins a group; the other methods need everything prepared to be committed before.
    """

    def __init__(self, catalog: Catalog, tags: TagSearch, time: StepClock) -> None:
        self._catalog = catalog
        self._tags = tags
        self._time = time
        self._failures = SparseLines(LASTING_EVERY_S, lambda: time.now.mono_ms / 1000)
        self._by_tag: OrderedDict[int, None] = OrderedDict()
        """Ids of the topics with the latest deletes by tag, the latest last. Only these have `Topic.tags`."""
        self._unswept: Iterator[Hosted] | None = None
        """Topics that this sweep has yet to look at; None between two sweeps."""

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
        """Index the tags of some new records of one topic, in an idle turn. False if there are none."""
        for topic_id in list(self._by_tag):
            hosted = self._catalog.find_id(topic_id)
            try:
                if hosted is not None and self._tags.index_some(hosted):
                    self._by_tag.move_to_end(topic_id)  # other topics have the next turn
                    return True
            except (OSError, CorruptSegment):
                self._drop_tags(topic_id)  # the next delete finds the same error and tells its client
            if hosted is None:
                self._drop_tags(topic_id)
        return False

    def _drop_tags(self, topic_id: int) -> None:
        """Drop the tag index of a topic: idle turns would not shrink it any more."""
        del self._by_tag[topic_id]
        hosted = self._catalog.find_id(topic_id)
        if hosted is not None:
            hosted.topic.tags = None

    def sweep(self) -> Steps[None]:
        """Begin a sweep, which expires records of topics that nobody touches and frees memory, unless one is under way.
        `sweep_some` goes on with it.
        """
        self._tags.drop_unused()
        if self._unswept is None:
            self._unswept = iter(list(self._catalog))
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
                self._unswept = None
                return
            topic = hosted.topic
            cost += 1
            if self._catalog.find_id(topic.id) is not hosted:
                continue  # deleted meanwhile
            if topic.config.ttl_ms:
                earliest_seq = topic.earliest_seq
                has_expired = yield from self.expire(hosted)
                cost += SWEPT_COST if topic.earliest_seq == earliest_seq and has_expired else EXPIRED_COST
                if not has_expired:  # of any topic: a full disk keeps those of all
                    self._failures.error(_EXPIRED_STAY, one_topic=topic.name)
            if (turn := lease_turn(hosted, self._time.now.wall_ms)) is not None:  # whose PUT did not end
                yield turn
                cost += EXPIRED_COST
            self._catalog.shrink_ring(hosted)

    def delete(self, call: DeleteRecords, _frontend: int) -> Steps[DeleteRecordsReply]:
        """Delete as much as one turn takes. The reply has the rest of the request."""
        hosted = self._catalog.require(call.name)
        yield from self.expire(hosted)
        topic = hosted.topic
        if call.topic_id not in (0, topic.id):
            raise topic_not_found(call.name)  # the topic of the first turn was deleted
        last_seq = topic.head_seq if call.last_seq is None else min(call.last_seq, topic.head_seq)
        if call.before_seq is not None:
            last_seq = min(last_seq, call.before_seq - 1)
        try:
            deletion, rest = self._plan(hosted, call, last_seq)
        except (OSError, CorruptSegment, CorruptPostings) as error:
            self._failures.error("a delete could not find its records", topic=call.name, reason=str(error))
            raise storage_unavailable(
                f"the records of topic {call.name!r} cannot be read to delete them; see the service's log",
                topic=call.name,
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
        """Return what this turn deletes, and the request for the next turn or None. No turn deletes records that came
        after the first one began.
        """
        topic = hosted.topic
        if call.op is None:
            return topic.plan_cut(last_seq + 1), None
        self._by_tag[topic.id] = None
        self._by_tag.move_to_end(topic.id)
        if len(self._by_tag) > BY_TAG_MAX:
            self._drop_tags(next(iter(self._by_tag)))
        first_seq = max(call.from_seq, topic.earliest_seq)
        seqs, next_seq = self._tags.find(hosted, Match(call.op, call.pattern), first_seq, last_seq)
        rest = None
        if next_seq <= last_seq:
            rest = msgspec.structs.replace(call, from_seq=next_seq, last_seq=last_seq, topic_id=topic.id)
        return topic.plan_delete(seqs), rest

    # -- removals that join a group

    def evict_first(self, hosted: Hosted, group: Draft) -> None:
        """Raise CommitFirst if the group so far or the ttl may evict records of the topic. `remove` needs live ones."""
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
        """Add the removal of live records (ascending seqs) to a group. The caller has called `evict_first`.
        `dead_letters` is how many of them went to the dead letters; `undo` runs if the log refuses the removal.
        """
        if seqs:
            now = self._time.now
            body, logged = group.pending_of(hosted.topic, now).remove(seqs, dead_letters)
            bodies = [(FrameType.ACK, encode_body(body))]
            group.add(control_write(hosted.topic, now.wall_ms, bodies, logged, undo))
            group.touch(hosted)

    # -- room that the caps of a topic would not give

    def make_room(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[None]:
        """Make room for so many more records and bytes: expire records, if the log takes that, then remove acknowledged
        jobs. Nothing else may be prepared. Raise TopicsError when the log refuses to remove jobs.
        """
        yield from self.expire_for(hosted, records, size_bytes)
        if not (yield from self.drop_done_jobs(hosted, records, size_bytes)):
            raise storage_unavailable(
                f"topic {hosted.topic.name!r} is full of acknowledged jobs, and the log cannot take their removal; see"
                " the service's log"
            )

    def expire_for(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[None]:
        """Expire records if a cap would otherwise refuse or evict for so many more records and bytes."""
        if hosted.topic.must_expire_first(records, size_bytes, self._time.expiry_ms):
            yield from self.expire(hosted)

    def drop_done_jobs(self, hosted: Hosted, records: int, size_bytes: int) -> Steps[bool]:
        """Remove acknowledged jobs to make room for so many more records and bytes. False if the log refuses that."""
        draft = Draft()
        self.remove(draft, hosted, done_jobs_to_drop(hosted.topic, records, size_bytes, frozenset()))
        if draft:
            yield draft
        return draft.committed or not draft
