"""The state of one topic, as its log gives it: head, floors, counts, retention, idempotency. Pure.

There are two floors (api §3.2). `earliest_seq` is the first live record; eviction, expiry and deletion move it.
`evict_floor` moves only when live records are lost without a request to delete them: it alone decides about tombstones.
Always evict_floor <= earliest_seq <= head_seq + 1.

Records may be lost behind live ones (LOCATION_LOST). As soon as no live record is before them, evict_floor moves behind
them, whatever removed the live ones. So `earliest_seq` is never the seq of a lost record.

The index (`RecordIndex`) knows where records lie. In a running shard, the topic's location ring in shared memory
(`shm/arena.py`) has the entries of records that are in no segment yet. The indexes of its segments have the others.

An eviction, a deletion or a checkpoint logs the resulting state as `Floors`, in the frame that says why. A reader of
the log takes over these floors and computes nothing from records.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import compress

import msgspec

from topics.core import record_index
from topics.core.ceilings import Ceilings
from topics.core.config import U64_MAX, TopicConfig
from topics.core.cursors import Cursors
from topics.core.errors import TopicsError
from topics.core.floors import Deletion, EvictReason, Floors, Front
from topics.core.idempotency import IdempotencyWindow
from topics.core.leases import Leases
from topics.core.location import ENTRY_WORDS, LOCATION_LOST, any_flagged, flags_of, lengths_of, lost_entries
from topics.core.record_index import RecordIndex
from topics.core.seq_set import seqs_of
from topics.core.tags import TagIndex


@dataclass(eq=False, slots=True)
class Topic:
    """State and rules of one topic. Its shard calls a method that changes it once the change is in the log."""

    id: int
    name: str
    config: TopicConfig
    index: RecordIndex
    recreated: bool = False
    """True if an earlier topic had its name: a cursor beyond the head belongs to that earlier topic."""
    head_seq: int = 0
    earliest_seq: int = 1
    evict_floor: int = 1
    evict_reason: EvictReason = EvictReason.NONE
    evict_run_seq: int = 1
    """First seq of the latest run of evictions for one reason: a gap that begins below it is MIXED."""
    records: int = 0
    live_bytes: int = 0
    durable_seq: int = 0
    archived_seq: int = 0
    last_write_ts: int = 0
    ceilings: Ceilings = field(default_factory=Ceilings)
    """Ceilings of its head. While the topic is `ephemeral` they cover records in RAM, otherwise those in the log."""
    had_ram_records: bool = False
    """True if it was `ephemeral` before."""
    lost_tail_seq: int = 0
    """Last seq that may have been given out before the log lost its end, 0 if it never did."""
    restored_seq: int = 0
    """Last seq that may have been given out before a restore or a takeover lost the end, 0 if none did."""
    revision: int = 0
    """Revision of the last `Floors` in the log."""
    logged_floor: int = 1
    """The evict_floor that a reader of the log computes; it may be lower, because caps evict before the log says so."""
    _front_ts: tuple[int, int] = (0, 0)
    """(seq, commit time) of the earliest record when expiry last looked at it."""
    idempotency: IdempotencyWindow = field(default_factory=IdempotencyWindow)
    tags: TagIndex | None = None
    """Tag index, made by the first delete by tag."""
    queue: Leases | None = field(init=False)
    cursors: Cursors = field(default_factory=Cursors)

    def __post_init__(self) -> None:
        self.queue = Leases(self) if self.config.type == "queue" else None

    # -- before a write

    def room(self) -> tuple[int, int]:
        """Return the (records, bytes) that a `reject` topic can still take. Any other topic makes room: no bound."""
        if self.config.discard != "reject":
            return U64_MAX, U64_MAX
        over_records, over_bytes = self.config.over_caps(self.records, self.live_bytes)
        return -over_records, -over_bytes

    def growth(self, count: int, size_bytes: int) -> int:
        """Return how much a write of `count` records adds to `live_bytes`: its size less the bytes that caps evict."""
        return size_bytes - self._over_cap(count, size_bytes)[1]

    def must_expire_first(self, count: int, size_bytes: int, now_ms: int) -> bool:
        """True if a cap would refuse this write, or evict records for it, while it still counts expired records."""
        if not self.config.ttl_ms or self.config.can_hold(self.records + count, self.live_bytes + size_bytes):
            return False
        return self.expired_below(now_ms) > self.earliest_seq

    def check_head(self, if_head_seq: int | None, pending_head_seq: int) -> None:
        """Raise `409 head_mismatch` for a write whose writer has seen another head (api §2)."""
        if if_head_seq is not None and if_head_seq != pending_head_seq:
            raise TopicsError(
                "head_mismatch",
                f"head_seq of topic {self.name!r} is {pending_head_seq}, not {if_head_seq}",
                {"head_seq": pending_head_seq},
            )

    def may_skip(self, producer: bytes, is_new: bool) -> bool:
        """Return whether a producer may go on behind lost writes. It may not if a restore or a takeover lost them.
        `is_new`: no write of its epoch is known.
        """
        seq = self.idempotency.last_seq_of(producer)
        if self.restored_seq <= (seq or self.restored_seq) < self.lost_tail_seq:
            return True
        is_recreated = self.recreated and not self.restored_seq
        return is_new and (is_recreated or self.had_ram_records or self.config.durability == "ephemeral")

    def commit_ts(self, now_ms: int) -> int:
        """Return the commit time of the next write: `$ts` never decreases in a topic, whatever the clock does."""
        return max(now_ms, self.last_write_ts)

    # -- after a write is logged

    def appended(self, ts: int, offset_len: array[int], file_flags: array[int], size_bytes: int) -> None:
        """Add the records of a committed write: entries in file order; `size_bytes` is the size of all its frames."""
        count = len(offset_len)
        self.index.append(ts, offset_len, file_flags)
        self.head_seq += count
        self.records += count
        self.live_bytes += size_bytes
        self.last_write_ts = ts
        assert self.index.next_seq == self.head_seq + 1
        self.evict_over_cap()

    def restored(self, entries: array[int]) -> None:
        """Add entries in recovery: consecutive seqs behind the head, LOST ones included."""
        if not entries:
            return
        self._add(entries)
        lengths = lengths_of(entries)
        if any_flagged(entries, LOCATION_LOST):
            lengths = array("I", compress(lengths, [not flags & LOCATION_LOST for flags in flags_of(entries)]))
        self.records += len(lengths)
        self.live_bytes += sum(lengths)
        self.last_write_ts = max(self.last_write_ts, entries[-3])

    def _add(self, entries: array[int]) -> None:
        assert entries[0] == self.head_seq + 1
        count = len(entries) // ENTRY_WORDS
        self.index.reserve(count)
        self.index.append_entries(entries)
        self.head_seq += count

    def extended(self, last_seq: int, ts: int, size_bytes: int) -> None:
        """Add live records up to `last_seq` in a fold whose index keeps no entries."""
        self.records += last_seq - self.head_seq
        self.live_bytes += size_bytes
        self.index.skip_to(last_seq + 1)
        self.head_seq = last_seq
        if ts > self.last_write_ts:
            self.last_write_ts = ts

    def configured(self, config: TopicConfig) -> None:
        """Take a new configuration; a tightened cap takes effect at once."""
        if config.durability != self.config.durability:
            self.had_ram_records |= self.config.durability == "ephemeral"
            # All records are on the disk now. A ceiling of the durable log does not cover records in RAM.
            self.ceilings = Ceilings(0 if config.durability == "ephemeral" else self.head_seq)
        if self.queue is not None and config.leases_durable != self.config.leases_durable:
            self.queue.begin_logging(config.leases_durable)
        self.config = config
        self.evict_over_cap()

    # -- floors in the log

    def floors(self) -> Floors:
        """Return the floors to log with the next frame that has any: one revision above the last logged ones."""
        evicted = self.evict_floor, int(self.evict_reason), self.evict_run_seq
        return Floors(self.revision + 1, self.earliest_seq, *evicted, self.records, self.live_bytes)

    def logged(self, floors: Floors) -> None:
        """Take the floors of a frame that is in the log."""
        self.revision = floors.revision
        self.logged_floor = floors.evict_floor
        self._apply(floors)

    def _apply(self, floors: Floors) -> None:
        """Take over floors in memory. The log has them already (`logged`), or gets them with the next commit."""
        self.evict_floor = floors.evict_floor
        self.evict_reason = EvictReason(floors.evict_reason)
        self.evict_run_seq = floors.evict_run_seq
        # Earlier versions, which trusted older copies of indexes, may have logged counts below 0.
        self.records = max(0, floors.records)
        self.live_bytes = max(0, floors.live_bytes)
        if floors.earliest_seq > self.earliest_seq:
            self.earliest_seq = floors.earliest_seq
            self.index.drop_before(floors.earliest_seq)
            if self.queue is not None:
                self.queue.floor_moved(floors.earliest_seq)
            assert self.evict_floor <= self.earliest_seq <= self.head_seq + 1
        else:
            # Lower only in a fold of the durable log alone: it counted records as lost in RAM that segments have.
            self.earliest_seq = floors.earliest_seq

    # -- deletion (api §5): permanent, at once, silent

    def plan_cut(self, before_seq: int) -> Deletion:
        """Plan to delete everything live below `before_seq`."""
        before_seq = min(before_seq, self.head_seq + 1)
        if before_seq <= self.earliest_seq:
            return Deletion(0, (), 0, 0, Front(self.earliest_seq))
        # Lost records below are deleted like live ones.
        left, left_bytes = self._left_from(before_seq)
        taken = self.records - left, self.live_bytes - left_bytes
        return Deletion(before_seq, (), *taken, self._front_from(before_seq))

    def plan_delete(self, seqs: Sequence[int]) -> Deletion:
        """Plan to delete those of these seqs (ascending, none below `earliest_seq`) that are live."""
        seqs, size_bytes = self.index.pick_live(seqs)
        front = self._front_from(self.earliest_seq, frozenset(seqs))
        return Deletion(0, tuple(seqs), len(seqs), size_bytes, front)

    def plan_removal(self, seqs: Sequence[int], dying: Set[int], earliest_seq: int = 0) -> Deletion:
        """Plan to delete exactly these live seqs (ascending) while other deletions are being logged. `dying` has the
        seqs of all these deletions, `earliest_seq` comes from the plan before this one.
        """
        live = list(record_index.live_entries(self.index, seqs, self.earliest_seq, self.head_seq))
        earliest_seq = max(earliest_seq, self.earliest_seq)
        front = self._front_from(earliest_seq, dying) if earliest_seq in dying else Front(earliest_seq)
        size_bytes = sum(offset_len >> 32 for _, offset_len in live)
        return Deletion(0, tuple(seq for seq, _ in live), len(live), size_bytes, front)

    def live_from(self, seq: int, most: int) -> list[int]:
        """Return the first `most` live seqs from `seq` on, ascending; fewer if there are no more."""
        return self.live_within(seq, most, self.head_seq)[0]

    def live_within(self, seq: int, most: int, looks: int) -> tuple[list[int], int]:
        """Read `looks` entries at most; return (the seqs of `live_from`, the seq up to which none is missing)."""
        return record_index.first_live(self.index, max(seq, self.earliest_seq), self.head_seq, most, looks)

    def live_of(self, seqs: Sequence[int]) -> list[int]:
        """Return those of these seqs (ascending) that are live."""
        return [seq for seq, _ in record_index.live_entries(self.index, seqs, self.earliest_seq, self.head_seq)]

    def floors_without(self, deletion: Deletion) -> Floors:
        """Return `floors` after a deletion. Deleting is no loss: evict_floor moves only over records lost before."""
        floors = msgspec.structs.replace(
            self.floors(),
            earliest_seq=max(self.earliest_seq, deletion.earliest_seq),
            # The index may be an older copy and find more records than are still live.
            records=max(0, self.records - deletion.records),
            live_bytes=max(0, self.live_bytes - deletion.size_bytes),
        )
        return floors.evicted(deletion.front.lost_below_seq, deletion.front.lost_reason)

    def deleted(self, deletion: Deletion, floors: Floors) -> None:
        """Carry out a deletion that is logged with these floors."""
        self.index.flag_deleted(deletion.seqs)
        if self.queue is not None:
            self.queue.deleted(deletion.seqs)
        self.logged(floors)

    def removed(self, deletion: Deletion, revision: int) -> None:
        """Carry out a deletion that is logged without floors; changes to other records since its plan stay."""
        logged_floor = max(self.logged_floor, deletion.front.lost_below_seq)
        self.deleted(deletion, msgspec.structs.replace(self.floors_without(deletion), revision=revision))
        self.logged_floor = logged_floor

    # -- retention (api §3.2)

    def evict_over_cap(self) -> None:
        """Evict the oldest records until the topic is within its caps (`discard: "old"`)."""
        # Usually once. Again if an unreadable index gave an estimate, and fewer records went than it said.
        while (seq := self._over_cap(0, 0)[0]) > self.earliest_seq:
            self.evict_below(seq, EvictReason.CAP)

    def _over_cap(self, more_records: int, more_bytes: int) -> tuple[int, int]:
        """Return (first seq that the caps keep, live bytes below it) once the topic has this many more of each."""
        records, size_bytes = self.config.over_caps(self.records + more_records, self.live_bytes + more_bytes)
        if self.config.discard == "reject" or (records <= 0 and size_bytes <= 0):
            return self.earliest_seq, 0
        return record_index.first_kept(self.index, self.earliest_seq, self.head_seq, records, size_bytes)

    def expired_below(self, now_ms: int) -> int:
        """Return the first seq that has not outlived `ttl_ms`; earliest_seq if nothing has."""
        ttl_ms = self.config.ttl_ms
        if not ttl_ms:
            return self.earliest_seq
        low, high = self.earliest_seq, self.head_seq + 1
        if low == high:
            return low
        if now_ms - self._earliest_ts() <= ttl_ms:
            return low  # the usual case: the sweep of an idle topic reads no file
        return record_index.first_not_older(self.index, now_ms - ttl_ms, low + 1, high)

    def next_expiry_ms(self) -> int | None:
        """Return the wall time at which the first live record will have outlived `ttl_ms`; None if none will."""
        if not self.config.ttl_ms or self.earliest_seq > self.head_seq:
            return None
        return self._earliest_ts() + self.config.ttl_ms + 1

    def _earliest_ts(self) -> int:
        if self._front_ts[0] != self.earliest_seq:
            self._front_ts = self.earliest_seq, self.index.ts_at(self.earliest_seq)
        return self._front_ts[1]

    def evict_below(self, seq: int, reason: EvictReason) -> None:
        """Evict everything live below `seq` before the log says so."""
        floors = self.plan_eviction(seq, reason)
        if floors is not None:
            self._apply(floors)

    def plan_eviction(self, seq: int, reason: EvictReason) -> Floors | None:
        """Return the floors after the eviction of everything live below `seq`; None if nothing is."""
        seq = min(seq, self.head_seq + 1)
        if seq <= self.earliest_seq:
            return None
        records, size_bytes = self._left_from(seq)
        front = self._front_from(seq)
        floors = msgspec.structs.replace(
            self.floors(), earliest_seq=front.earliest_seq, records=records, live_bytes=size_bytes
        )
        if records != self.records:
            # Records behind the last evicted one were deleted, not lost: evict_floor does not pass them.
            floors = floors.evicted(record_index.last_undeleted(self.index, self.earliest_seq, seq - 1) + 1, reason)
        return floors.evicted(front.lost_below_seq, front.lost_reason)

    def _left_from(self, seq: int) -> tuple[int, int]:
        return record_index.left_from(self.index, self.earliest_seq, seq, self.head_seq, self.records, self.live_bytes)

    def _front_from(self, seq: int, dying: Set[int] = frozenset()) -> Front:
        return record_index.front_from(self.index, seq, self.head_seq, dying, self.index.behind_deleted)

    # -- recovery

    def recount(self) -> None:
        """Count records by the index, because the log cannot know (records in RAM were lost). Then move the floors over
        lost records in front.
        """
        self.records = self.live_bytes = 0
        if self.earliest_seq <= self.head_seq:
            self.records, self.live_bytes = self.index.live_size(self.earliest_seq, self.head_seq)
        front = self._front_from(self.earliest_seq)
        if front.earliest_seq > self.earliest_seq:
            floors = msgspec.structs.replace(self.floors(), earliest_seq=front.earliest_seq)
            self._apply(floors.evicted(front.lost_below_seq, front.lost_reason))

    def recount_marked(self) -> bool:
        """Count again if segments mark records deleted whose DELETE frame was lost with the end of the log. Return True
        if they do, or if a segment cannot be read and so may.
        """
        live = record_index.exact_live_size(self.index, self.earliest_seq, self.head_seq)
        if live is None or live[0] >= self.records:
            return live is None
        self.recount()
        if self.queue is not None:
            done = list(seqs_of(self.queue.done.runs()))
            self.queue.deleted(sorted({*done}.difference(self.live_of(done))))
        return True

    def extend_head(self, head_seq: int) -> None:
        """Raise the head over seqs that were assigned but are not in the log: they are in a segment, or lost."""
        if head_seq > self.head_seq:
            self.index.skip_to(head_seq + 1)
            self.head_seq = head_seq

    def lost_below(self, seq: int, reason: EvictReason) -> None:
        """Give up all records and go on at `seq`: every seq below it was assigned."""
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
        """Count everything below `seq` as lost: no segment has it, and the log does not say why."""
        self._apply(msgspec.structs.replace(self.floors(), earliest_seq=seq).evicted(seq, EvictReason.MIXED))

    def skipped(self, last_seq: int, reason: EvictReason) -> None:
        """Assign the seqs up to `last_seq` to lost records. A running shard does so if a router's source lost them."""
        if last_seq <= self.head_seq:
            return
        # `records` cannot say this: it may be wrong if the index is an older copy.
        has_none = self.earliest_seq > self.head_seq
        self._add(lost_entries(self.head_seq + 1, last_seq, self.last_write_ts, reason))
        if has_none:
            floors = msgspec.structs.replace(self.floors(), earliest_seq=last_seq + 1)
            self._apply(floors.evicted(last_seq + 1, reason))
