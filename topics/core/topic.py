"""One topic as its log says it is: head, floors, counts, retention, idempotency. Pure.

Two floors (api §3.2). `earliest_seq` is the first live record; eviction, expiry and deletion move it.
`evict_floor` moves only when live records are lost that nobody asked to lose: it alone decides about
tombstones. Always evict_floor <= earliest_seq <= head_seq + 1.

Records may be lost behind live ones (LOCATION_LOST). Once no live one is before them, evict_floor is behind them,
whatever took those: `earliest_seq` is never that of a lost record.

Where records lie is the index's affair (`RecordIndex`): in a running shard those not yet in a segment are in the
topic's location ring in shared memory (`shm/arena.py`), the others in the indexes of its segments.

What eviction, deletion and checkpoints leave is logged as `Floors`, with the frame that says why: whoever reads the log
back takes it as it is, and need not know any record.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from itertools import compress

import msgspec

from topics.core.config import TopicConfig
from topics.core.cursors import Cursors
from topics.core.errors import TopicsError
from topics.core.floors import Deletion, EvictReason, Floors, Front
from topics.core.idempotency import IdempotencyWindow
from topics.core.leases import Leases
from topics.core.live_scan import (
    first_live,
    first_live_within,
    first_not_older,
    freeing,
    front_from,
    last_undeleted,
    left_from,
    living,
)
from topics.core.location import ENTRY_WORDS, LOCATION_LOST, any_flagged, flags_of, lengths_of, lost_entries
from topics.core.record_index import RecordIndex
from topics.core.tags import TagIndex


class Topic:
    """State and rules of one topic. Every method that changes it is called after the log says so."""

    __slots__ = (
        "_front_ts",
        "config",
        "cursors",
        "durable_seq",
        "earliest_seq",
        "evict_floor",
        "evict_reason",
        "evict_run_seq",
        "head_ceiling",
        "head_seq",
        "id",
        "idempotency",
        "index",
        "last_write_ts",
        "live_bytes",
        "logged_floor",
        "name",
        "queue",
        "records",
        "recreated",
        "revision",
        "tags",
    )

    def __init__(self, id: int, name: str, config: TopicConfig, index: RecordIndex, recreated: bool = False) -> None:
        self.id = id
        self.name = name
        self.config = config
        self.index = index
        self.recreated = recreated
        """Its name had another topic before: a cursor beyond the head is that one's."""
        self.head_seq = 0
        self.earliest_seq = 1
        self.evict_floor = 1
        self.evict_reason = EvictReason.NONE
        self.evict_run_seq = 1
        """First seq of the latest run of evictions with one reason: a gap that begins below it is MIXED."""
        self.records = 0
        self.live_bytes = 0
        self.durable_seq = 0
        self.last_write_ts = 0
        self.head_ceiling = 0
        """No seq above it was ever assigned by an `ephemeral` period (HEAD_WATERMARK)."""
        self.revision = 0
        """Of the last `Floors` in the log."""
        self.logged_floor = 1
        """evict_floor as whoever reads the log will have it: caps evict before the log says so."""
        self._front_ts = (0, 0)
        """(seq, its commit time) of the earliest record when expiry looked at it last."""
        self.idempotency = IdempotencyWindow()
        self.tags: TagIndex | None = None
        """Made by the first delete by tag."""
        self.queue = Leases(self) if config.type == "queue" else None
        """A type never changes."""
        self.cursors = Cursors()

    # -- before a write

    def check_room(self, count: int, size_bytes: int, pending_records: int, pending_bytes: int) -> None:
        """Refuses what a `reject` topic cannot take; `pending_*` is what this group already adds."""
        config = self.config
        if config.discard != "reject":
            return
        caps = (
            (config.cap_records, count, self.records + pending_records, "records"),
            (config.cap_bytes, size_bytes, self.live_bytes + pending_bytes, "bytes"),
        )
        # What can never fit comes first: there is no use in waiting for room.
        for cap, write, _held, unit in caps:
            if cap and write > cap:
                raise TopicsError(
                    "record_too_large",
                    f"a write of {write} {unit} can never fit topic {self.name!r}, whose cap_{unit} is {cap}",
                    {f"cap_{unit}": cap},
                )
        for cap, write, held, unit in caps:
            if cap and held + write > cap:
                raise TopicsError(
                    "topic_full",
                    f"topic {self.name!r} holds {held} of at most {cap} {unit} and discards nothing",
                    {f"cap_{unit}": cap},
                )

    def growth(self, count: int, size_bytes: int) -> int:
        """By how much `live_bytes` would grow by so many records and bytes more, after the caps have taken their part
        of what is there now; negative when they take more.
        """
        return size_bytes - self._over_cap(count, size_bytes)[1]

    def caps_see_expired(self, count: int, size_bytes: int, now_ms: int) -> bool:
        """Whether records that have outlived `ttl_ms` would make a cap refuse so many more, or be what it evicts for
        them: neither is the cap's affair once their time is over.
        """
        config = self.config
        if not config.ttl_ms:
            return False
        full = config.cap_records and self.records + count > config.cap_records
        full = full or (config.cap_bytes and self.live_bytes + size_bytes > config.cap_bytes)
        return bool(full) and self.expired_below(now_ms) > self.earliest_seq

    def check_head(self, if_head_seq: int | None, pending_head_seq: int) -> None:
        """The writer's condition on the head it has seen (api §2)."""
        if if_head_seq is not None and if_head_seq != pending_head_seq:
            raise TopicsError(
                "head_mismatch",
                f"head_seq of topic {self.name!r} is {pending_head_seq}, not {if_head_seq}",
                {"head_seq": pending_head_seq},
            )

    def commit_ts(self, now_ms: int) -> int:
        """The commit time of the next write: `$ts` never decreases in a topic, whatever the clock does."""
        return max(now_ms, self.last_write_ts)

    # -- after it is logged

    def appended(self, ts: int, offset_len: array[int], file_flags: array[int], size_bytes: int) -> None:
        """A write was committed: its entries in file order, `size_bytes` all its frames together."""
        count = len(offset_len)
        self.index.append(ts, offset_len, file_flags)
        self.head_seq += count
        self.records += count
        self.live_bytes += size_bytes
        self.last_write_ts = ts
        assert self.index.next_seq == self.head_seq + 1
        self.evict_over_cap()

    def restored(self, entries: array[int]) -> None:
        """Recovery's `appended`: entries of consecutive seqs behind the head, LOST ones included."""
        count = len(entries) // ENTRY_WORDS
        if not count:
            return
        assert entries[0] == self.head_seq + 1
        self.index.reserve(count)
        self.index.append_entries(entries)
        self.head_seq += count
        lengths = lengths_of(entries)
        if any_flagged(entries, LOCATION_LOST):
            is_live = [not flags & LOCATION_LOST for flags in flags_of(entries)]
            live = list(compress(lengths, is_live))
            self.records += len(live)
            self.live_bytes += sum(live)
        else:
            self.records += count
            self.live_bytes += sum(lengths)
        self.last_write_ts = max(self.last_write_ts, entries[-3])

    def configured(self, config: TopicConfig) -> None:
        """A new configuration: a tightened cap takes effect at once."""
        self.config = config
        self.evict_over_cap()

    # -- what the log is told

    def floors(self) -> Floors:
        """What the topic is now, for the next frame that says so."""
        return Floors(
            self.revision + 1,
            self.earliest_seq,
            self.evict_floor,
            int(self.evict_reason),
            self.evict_run_seq,
            self.records,
            self.live_bytes,
        )

    def logged(self, floors: Floors) -> None:
        """A frame with these floors is in the log, or was read back from it."""
        self.revision = floors.revision
        self.logged_floor = floors.evict_floor
        self._move(floors)

    def _move(self, floors: Floors) -> None:
        self.evict_floor = floors.evict_floor
        self.evict_reason = EvictReason(floors.evict_reason)
        self.evict_run_seq = floors.evict_run_seq
        # Logs of versions that did not know of older indexes may have counts below 0.
        self.records = max(0, floors.records)
        self.live_bytes = max(0, floors.live_bytes)
        if floors.earliest_seq > self.earliest_seq:
            self._settle(floors.earliest_seq)
        else:
            # Lower only for who reads the durable log alone: what it took for lost with the RAM log is in segments.
            self.earliest_seq = floors.earliest_seq

    # -- deletion (api §5): permanent, at once, silent

    def plan_cut(self, before_seq: int) -> Deletion:
        """What is live below `before_seq`."""
        before_seq = min(before_seq, self.head_seq + 1)
        if before_seq <= self.earliest_seq:
            return Deletion(0, (), 0, 0, Front(self.earliest_seq))
        # Lost ones below are given up like those that live.
        left, left_bytes = self._left_from(before_seq)
        taken = self.records - left, self.live_bytes - left_bytes
        return Deletion(before_seq, (), *taken, self._front_from(before_seq))

    def plan_delete(self, seqs: Sequence[int]) -> Deletion:
        """What is live of these, which ascend and are none below `earliest_seq`."""
        seqs, size_bytes = self.index.pick_live(seqs)
        return Deletion(
            0,
            tuple(seqs),
            len(seqs),
            size_bytes,
            self._front_from(self.earliest_seq, frozenset(seqs)),
        )

    def plan_removal(self, seqs: Sequence[int], dying: Set[int], earliest_seq: int = 0) -> Deletion:
        """Of exactly these live ones, ascending, when all of `dying`, these among them, are on their way out;
        `earliest_seq` is what the plan before this one came to.
        """
        live: list[int] = []
        size_bytes = 0
        for seq, offset_len in living(self.index, seqs, self.earliest_seq, self.head_seq):
            live.append(seq)
            size_bytes += offset_len >> 32
        earliest_seq = max(earliest_seq, self.earliest_seq)
        front = self._front_from(earliest_seq, dying) if earliest_seq in dying else Front(earliest_seq)
        return Deletion(0, tuple(live), len(live), size_bytes, front)

    def live_from(self, seq: int, most: int) -> list[int]:
        """The first live seqs from `seq` on, ascending, at most so many; fewer: there are no more."""
        return first_live(self.index, max(seq, self.earliest_seq), self.head_seq, most)

    def live_within(self, seq: int, most: int, looks: int) -> tuple[list[int], int]:
        """As `live_from`, and up to which seq these are all: so many entries are looked at, however few are live."""
        return first_live_within(self.index, max(seq, self.earliest_seq), self.head_seq, most, looks)

    def live_of(self, seqs: Sequence[int]) -> list[int]:
        """Those of them (ascending) that are live."""
        return [seq for seq, _ in living(self.index, seqs, self.earliest_seq, self.head_seq)]

    def floors_without(self, deletion: Deletion) -> Floors:
        """`floors` once it is carried out. Nobody loses what was given up: evict_floor moves only over what had been
        lost before.
        """
        floors = msgspec.structs.replace(
            self.floors(),
            earliest_seq=max(self.earliest_seq, deletion.earliest_seq),
            # An index that is an older copy finds more than there are.
            records=max(0, self.records - deletion.records),
            live_bytes=max(0, self.live_bytes - deletion.size_bytes),
        )
        return floors.evicted(deletion.front.lost_below_seq, deletion.front.lost_reason)

    def deleted(self, deletion: Deletion, floors: Floors) -> None:
        """It is logged, with these floors."""
        self.index.flag_deleted(deletion.seqs)
        if self.queue is not None:
            self.queue.deleted(deletion.seqs)
        self.logged(floors)

    def removed(self, deletion: Deletion, revision: int) -> None:
        """It is logged by what it takes: what happened to other records since it was planned stays as it is."""
        logged_floor = max(self.logged_floor, deletion.front.lost_below_seq)
        self.deleted(deletion, msgspec.structs.replace(self.floors_without(deletion), revision=revision))
        self.logged_floor = logged_floor

    # -- retention (api §3.2)

    def evict_over_cap(self) -> bool:
        """Evicts the oldest records until the topic is within its caps (`discard: "old"`)."""
        moved = False
        # Once most often; again where an unreadable index made it look as if more had gone than did.
        while self.evict_below(self._over_cap(0, 0)[0], EvictReason.CAP):
            moved = True
        return moved

    def _over_cap(self, more_records: int, more_bytes: int) -> tuple[int, int]:
        """(first seq that stays, live bytes below it) if there were so many more."""
        config = self.config
        if config.discard == "reject":
            return self.earliest_seq, 0
        records = self.records + more_records - config.cap_records if config.cap_records else 0
        size_bytes = self.live_bytes + more_bytes - config.cap_bytes if config.cap_bytes else 0
        if records <= 0 and size_bytes <= 0:
            return self.earliest_seq, 0
        return freeing(self.index, self.earliest_seq, self.head_seq, records, size_bytes)

    def expired_below(self, now_ms: int) -> int:
        """The first seq that has not outlived `ttl_ms`; earliest_seq when nothing has."""
        ttl_ms = self.config.ttl_ms
        if not ttl_ms:
            return self.earliest_seq
        low, high = self.earliest_seq, self.head_seq + 1
        if low == high:
            return low
        if now_ms - self._earliest_ts() <= ttl_ms:
            return low  # most often: the sweep of an idle topic looks into no file
        return first_not_older(self.index, now_ms - ttl_ms, low + 1, high)

    def next_expiry_ms(self) -> int | None:
        """Wall time at which the first live record has outlived `ttl_ms`; None: none will."""
        if not self.config.ttl_ms or self.earliest_seq > self.head_seq:
            return None
        return self._earliest_ts() + self.config.ttl_ms + 1

    def _earliest_ts(self) -> int:
        if self._front_ts[0] != self.earliest_seq:
            self._front_ts = self.earliest_seq, self.index.ts_at(self.earliest_seq)
        return self._front_ts[1]

    def evict_below(self, seq: int, reason: EvictReason) -> bool:
        """Involuntary loss of everything live below `seq`, which the log does not say yet. True if the floors moved."""
        floors = self.plan_eviction(seq, reason)
        if floors is not None:
            self._move(floors)
        return floors is not None

    def plan_eviction(self, seq: int, reason: EvictReason) -> Floors | None:
        """What is left after the loss of everything live below `seq`; None if that is nothing."""
        seq = min(seq, self.head_seq + 1)
        if seq <= self.earliest_seq:
            return None
        records, size_bytes = self._left_from(seq)
        front = self._front_from(seq)
        floors = msgspec.structs.replace(
            self.floors(),
            earliest_seq=front.earliest_seq,
            records=records,
            live_bytes=size_bytes,
        )
        if records != self.records:
            # What was deleted behind the last of them was not lost.
            floors = floors.evicted(last_undeleted(self.index, self.earliest_seq, seq - 1) + 1, reason)
        return floors.evicted(front.lost_below_seq, front.lost_reason)

    def lay_open_lost(self) -> None:
        """Recovery: the first records may turn out to be lost."""
        front = self._front_from(self.earliest_seq)
        if front.earliest_seq > self.earliest_seq:
            floors = msgspec.structs.replace(self.floors(), earliest_seq=front.earliest_seq)
            self._move(floors.evicted(front.lost_below_seq, front.lost_reason))

    def _left_from(self, seq: int) -> tuple[int, int]:
        return left_from(self.index, self.earliest_seq, seq, self.head_seq, self.records, self.live_bytes)

    def recount(self) -> None:
        """Recovery: records and bytes as the index says, where the log cannot know (records in RAM were lost)."""
        self.records = self.live_bytes = 0
        if self.earliest_seq <= self.head_seq:
            self.records, self.live_bytes = self.index.live_size(self.earliest_seq, self.head_seq)

    def reaches(self, head_seq: int) -> None:
        """Recovery: seqs up to there were given out, though the log has no record of the last of them: they are in a
        segment, or they are gone.
        """
        if head_seq > self.head_seq:
            self.index.skip_to(head_seq + 1)
            self.head_seq = head_seq

    def lost_below(self, seq: int, reason: EvictReason) -> None:
        """Recovery: everything up to `seq` - 1 is gone, and with it the seqs up to there."""
        assert seq > self.head_seq
        self.index.drop_before(seq)
        self.index.skip_to(seq)
        self.head_seq = seq - 1
        self.earliest_seq = self.evict_floor = seq
        self.evict_reason = reason
        self.evict_run_seq = 1
        self.records = self.live_bytes = 0
        if self.queue is not None:
            self.queue.floor_moved(seq)

    def missing_below(self, seq: int) -> None:
        """Recovery: no segment has what was there, and the log does not say why."""
        self._move(msgspec.structs.replace(self.floors(), earliest_seq=seq).evicted(seq, EvictReason.MIXED))

    def skipped(self, last_seq: int, reason: EvictReason) -> None:
        """The seqs up to `last_seq` are given to records that are lost; without live ones before, a gap in front."""
        if last_seq <= self.head_seq:
            return
        # Not the count, which may be wrong where an index is an older copy.
        has_none = self.earliest_seq > self.head_seq
        self.restored(lost_entries(self.head_seq + 1, last_seq, self.last_write_ts, reason))
        if has_none:
            floors = msgspec.structs.replace(self.floors(), earliest_seq=last_seq + 1)
            self._move(floors.evicted(last_seq + 1, reason))

    def _front_from(self, seq: int, dying: Set[int] = frozenset()) -> Front:
        return front_from(self.index, seq, self.head_seq, dying, self.index.behind_deleted)

    def _settle(self, seq: int) -> None:
        self.earliest_seq = seq
        self.index.drop_before(seq)
        if self.queue is not None:
            self.queue.floor_moved(seq)
        assert self.evict_floor <= self.earliest_seq <= self.head_seq + 1
