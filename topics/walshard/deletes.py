"""Taking records away: because somebody asks (api §5), or because their time is over (api §1, `ttl_ms`)."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Final

import msgspec

from topics.core.control_bodies import DeleteBody, encode_body
from topics.core.errors import TopicsError, topic_not_found
from topics.core.floors import Deletion, EvictReason, Floors
from topics.core.seq_set import encode_runs
from topics.core.tags import Match
from topics.log import get_logger
from topics.shm import messages
from topics.shm.messages import Done
from topics.shm.topic_messages import DeleteRecords, DeleteRecordsReply, Expire
from topics.storage import frame
from topics.storage.frame import FrameType
from topics.storage.postings import CorruptPostings
from topics.storage.segment import CorruptSegment
from topics.walshard.catalog import Catalog
from topics.walshard.floor_marks import floor_frame
from topics.walshard.group_commit import GroupCommit
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Answer, Operation
from topics.walshard.step_clock import StepClock
from topics.walshard.tag_search import TagSearch

log = get_logger()

_BY_TAG_MAX: Final = 64
"""So many topics are looked at in an idle turn."""


class Deletes:
    """Of one shard's topics, each a commit of its own: everything prepared is committed before."""

    def __init__(self, catalog: Catalog, tags: TagSearch, commits: GroupCommit, time: StepClock) -> None:
        self._catalog = catalog
        self._tags = tags
        self._commits = commits
        self._time = time
        self._by_tag: OrderedDict[int, None] = OrderedDict()
        """Ids of the topics that were deleted from by tag, the latest last: only these have `Topic.tags`."""
        self._kept: set[int] = set()
        """Topics whose log could not be written when they were to expire: said once."""

    def take(self, call: DeleteRecords | Expire, answer: Answer) -> None:
        """Answers, or raises TopicsError."""
        hosted = self._catalog.find(call.name)
        if isinstance(call, DeleteRecords):
            if hosted is None:
                raise topic_not_found(call.name)
            self._delete(hosted, call, answer)
        else:
            if hosted is not None:
                self.expire(hosted)
            answer.reply = messages.encode_reply(answer.request_id, Done())

    def expire(self, hosted: Hosted) -> bool:
        """Moves the floors over what has outlived its ttl; logged, so that they never move back. False if the log could
        not take it; raises TopicsError.
        """
        topic, expiry_ms = hosted.topic, self._time.expiry_ms
        if topic.expired_below(expiry_ms) <= topic.earliest_seq:
            return True
        floors = topic.plan_eviction(topic.expired_below(expiry_ms), EvictReason.TTL)
        if floors is None:
            return True
        entry = floor_frame(hosted, floors, self._time.now.wall_ms)
        return self._commits.commit_one(Operation([entry], partial(self._expired, hosted, floors)), {topic.id})

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

    def sweep(self) -> None:
        """Expiry of topics that nobody touches. One whose log cannot be written now has to wait for the next sweep."""
        self._tags.let_go()
        kept = set()
        for hosted in list(self._catalog):
            topic = hosted.topic
            if not topic.config.ttl_ms:
                continue
            try:
                self.expire(hosted)
            except TopicsError as error:
                kept.add(topic.id)
                if topic.id not in self._kept:
                    log.error("what has outlived its ttl_ms stays for now", topic=topic.name, reason=error.message)
        self._kept = kept

    def _expired(self, hosted: Hosted, floors: Floors, _file_no: int, _offset: int) -> None:
        hosted.topic.logged(floors)
        self._commits.show(hosted)

    def _delete(self, hosted: Hosted, call: DeleteRecords, answer: Answer) -> None:
        self.expire(hosted)
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
        answer.reply = messages.encode_reply(
            answer.request_id,
            DeleteRecordsReply(
                max(0, deletion.records),
                deletion.earliest_seq,
                topic.head_seq,
                floors.records,
                floors.live_bytes,
                rest,
            ),
        )
        if not deletion.records and deletion.earliest_seq == topic.earliest_seq:
            return
        body = encode_body(DeleteBody(deletion.below_seq, encode_runs(deletion.seqs), floors))
        now_ms = self._time.now.wall_ms
        entry = frame.encode(FrameType.DELETE, 0, topic.id, topic.head_seq, now_ms, b"", b"", body)

        def apply(_file_no: int, _offset: int) -> None:
            topic.deleted(deletion, floors)
            self._commits.show(hosted)

        sync = topic.config.durability == "fsync"
        self._commits.commit_one(Operation([entry], apply, sync=sync, answer=answer), {topic.id})

    def _plan(self, hosted: Hosted, call: DeleteRecords, last_seq: int) -> tuple[Deletion, DeleteRecords | None]:
        """What one turn takes of it, and what is left to do then. Each is a delete of its own, complete when it is
        answered; all of them together end at one head.
        """
        topic = hosted.topic
        if call.op is None:
            return topic.plan_cut(last_seq + 1), None
        self._by_tag[topic.id] = None
        self._by_tag.move_to_end(topic.id)
        if len(self._by_tag) > _BY_TAG_MAX:
            self._let_go(next(iter(self._by_tag)))
        first_seq = max(call.from_seq, topic.earliest_seq)
        found = self._tags.find(topic, hosted.index, Match(call.op, call.pattern), first_seq, last_seq)
        rest = None
        if found.next_seq <= last_seq:
            rest = msgspec.structs.replace(call, from_seq=found.next_seq, last_seq=last_seq, topic_id=topic.id)
        return topic.plan_delete(found.seqs), rest
