"""Taking records away: because somebody asks (api §5), or because their time is over (api §1, `ttl_ms`)."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Final

import msgspec

from topics.core.control_bodies import DeleteFrameBody, encode_body
from topics.core.errors import TopicsError, topic_not_found
from topics.core.floors import Deletion, EvictReason
from topics.core.seq_set import encode_runs
from topics.core.tags import Match
from topics.log import get_logger
from topics.shm.asks import Done
from topics.shm.topic_messages import DeleteRecords, DeleteRecordsReply, Expire
from topics.storage.frame import FrameType
from topics.storage.postings import CorruptPostings
from topics.storage.segment import CorruptSegment
from topics.storage.topic_frames import control_frame, floor_frame
from topics.walshard.commit.draft import AloneHandler, Draft, LogWrite, Steps
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.tag_search import TagSearch
from topics.walshard.step_clock import StepClock

log = get_logger()

BY_TAG_MAX: Final = 64
"""So many topics are looked at in an idle turn."""


class Deletes:
    """Deletes and expires records of one shard's topics. Everything prepared is committed before."""

    def __init__(self, catalog: Catalog, tags: TagSearch, time: StepClock) -> None:
        self._catalog = catalog
        self._tags = tags
        self._time = time
        self._by_tag: OrderedDict[int, None] = OrderedDict()
        """Ids of the topics that were deleted from by tag, the latest last: only these have `Topic.tags`."""
        self._kept: set[int] = set()
        """Topics whose log could not be written when they were to expire: said once."""

    @property
    def alone_routes(self) -> dict[type, AloneHandler]:
        """The requests that are handled here by themselves."""
        return {DeleteRecords: self.delete, Expire: self.expire_one}

    def expire_one(self, call: Expire, _frontend: int) -> Steps[Done]:
        """Moves the floors of a topic over what has expired."""
        hosted = self._catalog.find(call.name)
        if hosted is not None:
            yield from self.expire(hosted)
        return Done()

    def expire(self, hosted: Hosted) -> Steps[bool]:
        """Moves the floors over what has outlived its ttl; logged, so that they never move back. False if the log could
        not take it.
        """
        topic, expiry_ms = hosted.topic, self._time.expiry_ms
        if topic.expired_below(expiry_ms) <= topic.earliest_seq:
            return True
        floors = topic.plan_eviction(topic.expired_below(expiry_ms), EvictReason.TTL)
        if floors is None:
            return True
        entry = floor_frame(topic, floors, self._time.now.wall_ms)
        draft = Draft([LogWrite([entry], partial(topic.logged, floors))], touched=[hosted], floors_of=[topic.id])
        yield draft
        if not draft.committed:
            self._time.keep_expired(topic.id)
        return draft.committed

    def index_some(self) -> bool:
        """In an idle turn: tags of what came into topics that were deleted from by tag lately. False: nothing came."""
        for topic_id in list(self._by_tag):
            hosted = self._catalog.find_id(topic_id)
            try:
                if hosted is not None and self._tags.index_some(hosted.topic, hosted.index, hosted.topic.head_seq):
                    self._by_tag.move_to_end(topic_id)  # the others' turn
                    return True
            except (OSError, CorruptSegment):
                self._let_go(topic_id)  # the next delete finds out, and is told
            if hosted is None:
                self._let_go(topic_id)
        return False

    def _let_go(self, topic_id: int) -> None:
        """Nobody would make its index smaller any more."""
        del self._by_tag[topic_id]
        hosted = self._catalog.find_id(topic_id)
        if hosted is not None:
            hosted.topic.tags = None

    def sweep(self) -> Steps[None]:
        """Expires records of topics that nobody touches. If the log cannot be written they stay for now."""
        self._tags.let_go()
        kept = set()
        for hosted in list(self._catalog):
            topic = hosted.topic
            if not topic.config.ttl_ms:
                continue
            if not (yield from self.expire(hosted)):
                kept.add(topic.id)
                if topic.id not in self._kept:
                    log.error("records that have outlived ttl_ms stay: the log cannot be written", topic=topic.name)
        self._kept = kept

    def delete(self, call: DeleteRecords, _frontend: int) -> Steps[DeleteRecordsReply]:
        """Deletes what one turn takes of what is asked for; the reply says what is left to do."""
        hosted = self._catalog.require(call.name)
        yield from self.expire(hosted)
        topic = hosted.topic
        if call.topic_id not in (0, topic.id):
            raise topic_not_found(call.name)  # the one that this is the rest for
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
        body = encode_body(DeleteFrameBody(deletion.below_seq, encode_runs(deletion.seqs), floors))
        entry = control_frame(FrameType.DELETE, topic.id, self._time.now.wall_ms, body, seq=topic.head_seq)
        sync = topic.config.durability == "fsync"
        write = LogWrite([entry], partial(topic.deleted, deletion, floors), sync=sync)
        yield Draft([write], touched=[hosted], floors_of=[topic.id], reply=reply)
        return reply

    def _plan(self, hosted: Hosted, call: DeleteRecords, last_seq: int) -> tuple[Deletion, DeleteRecords | None]:
        """What one turn takes of it, and what is left to do then. Each is a delete of its own, complete when it is
        answered; all of them together end at one head.
        """
        topic = hosted.topic
        if call.op is None:
            return topic.plan_cut(last_seq + 1), None
        self._by_tag[topic.id] = None
        self._by_tag.move_to_end(topic.id)
        if len(self._by_tag) > BY_TAG_MAX:
            self._let_go(next(iter(self._by_tag)))
        first_seq = max(call.from_seq, topic.earliest_seq)
        found = self._tags.find(topic, hosted.index, Match(call.op, call.pattern), first_seq, last_seq)
        rest = None
        if found.next_seq <= last_seq:
            rest = msgspec.structs.replace(call, from_seq=found.next_seq, last_seq=last_seq, topic_id=topic.id)
        return topic.plan_delete(found.seqs), rest
