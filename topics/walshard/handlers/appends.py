"""Appends: how a request becomes writes of a group (api §2).

    find or make the topic ──▶ admit ──▶ claim memory and bytes ──▶ give seqs ──▶ lay out ──▶ draft

`core/pending.py` has the rules: a request sees the effects of earlier requests of its group.
"""

from __future__ import annotations

from functools import partial

from topics.core.ceilings import Ceilings
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError, not_a_queue, topic_not_found
from topics.core.idempotency import is_stage_key
from topics.core.pending import RecordFrames, RoomNeeded
from topics.shm.append_messages import AppendReply, AppendRequest
from topics.storage.topic_frames import append_frames
from topics.walshard.commit.draft import CommitFirst, Draft
from topics.walshard.commit.logs import Logs
from topics.walshard.handlers.deletes import Deletes
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.step_clock import StepClock


class Appends:
    """Turns append requests into writes of a group. It keeps no state: the group has what it will add to topics."""

    def __init__(self, catalog: Catalog, holdings: Holdings, logs: Logs, deletes: Deletes, time: StepClock) -> None:
        self._catalog = catalog
        self._holdings = holdings
        self._logs = logs
        self._deletes = deletes
        self._time = time

    def prepare(self, request: AppendRequest, _frontend: int, group: Draft) -> AppendReply:
        """Add a write to a group, or find that it repeats one. After TopicsError or ArenaFullError nothing is added."""
        options, count, now = request.options, request.count, self._time.now
        name, key = options.name, options.key
        # Records of a decided batch must be published. Quotas were asked when its stages were made.
        is_decided = bool(key) and is_stage_key(key)
        records = RecordFrames(request.offset_len, request.record_flags, len(request.frames))
        hosted, created = group.made.get(name) or self._catalog.find(name), False
        if hosted is None:
            config = options.config or TopicConfig()
            if not (options.create and config.auto_create):
                raise topic_not_found(name)
            if options.jobs and config.type != "queue":
                raise not_a_queue(name, is_new=True)
            hosted, created = self._catalog.make(name, config, now.wall_ms, is_decided), True
            hosted.topic.ceilings = Ceilings.of_new(config, count)
        durability = hosted.topic.config.durability
        pending = group.pending_of(hosted.topic, now)
        try:
            expiry_ms = self._time.expiry_ms_of(hosted.topic.id)
            conditions = options.if_head_seq, bool(options.jobs), expiry_ms, options.has_begun
            known = pending.admit(key, records, *conditions)
            if known is not None:
                if key in pending.keys:
                    raise CommitFirst  # the log may refuse the write that this one repeats
                return AppendReply(known.first_seq, known.records, pending.head_seq, False, True, durability, 0, 0)
            in_ram = durability == "ephemeral"
            if created or (self._logs.lacks_room and not in_ram):
                self._logs.require_room()
            if created and in_ram:  # the durable log takes the creation, the RAM log the records
                self._logs.require_room(in_ram=True)
            hosted.ring.reserve(pending.records + count)
            if not is_decided:
                growth = partial(pending.growth, count, records.size_bytes)
                pending.claimed_bytes += self._holdings.claim_bytes(records.size_bytes, growth)
        except RoomNeeded:
            raise CommitFirst(self._deletes.make_room(hosted, count, records.size_bytes)) from None
        except Exception as error:
            if created:
                self._catalog.abandon(hosted)
            if isinstance(error, TopicsError) and pending.has_writes:
                raise CommitFirst from None  # pending writes may cause this error, and the log may yet refuse them
            raise
        write = pending.write(key, records, options.jobs)
        group.add_append(hosted, write, append_frames(write, request.frames, created=created))
        if created:
            group.made[name] = hosted
        return AppendReply(write.outcome.first_seq, count, pending.head_seq, created, False, durability, 0, 0)
