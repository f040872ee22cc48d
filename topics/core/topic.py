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
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Set
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from topics.core.config import TopicConfig
from topics.core.cursors import Cursors
from topics.core.errors import TopicsError
from topics.core.idempotency import IdempotencyWindow
from topics.core.leases import Leases
from topics.core.record_index import FindTagged, RecordIndex
from topics.core.shard_state import Floors
from topics.core.tags import Match, TagIndex

ENTRY_WORDS: Final = 4
"""An index entry is 4 words: seq, ts, offset | len_bytes << 32, file_no | flags << 32."""
_FLAGS_SHIFT: Final = 32
LOCATION_IN_RAM_LOG: Final = 1
LOCATION_DELETED: Final = 2
LOCATION_LOST: Final = 32
"""A seq whose record is gone for good though its neighbours live; `offset` is then an EvictReason."""
_GONE: Final = LOCATION_DELETED | LOCATION_LOST
_LOW_WORD: Final = 0xFFFF_FFFF
_NEAR: Final = 64
_SPAN_MAX: Final = 4096
"""Records that are no further apart are looked up in one go of at most so many entries."""


class EvictReason(IntEnum):
    """Why records below evict_floor are gone; the names are the tombstone's `reason`."""

    NONE = 0
    CAP = 1
    TTL = 2
    MIXED = 3
    RESTART = 4
    """Records of an `ephemeral` topic, after the service was restarted."""
    SOURCE_TRIM = 5
    """Records that a router's source lost before they were copied."""


class Front(NamedTuple):
    """Where the live records begin, and what was lost just before them: everything below `lost_below_seq` (0: nothing),
    for `lost_reason`.
    """

    earliest_seq: int
    lost_below_seq: int = 0
    lost_reason: EvictReason = EvictReason.NONE


class Deletion(NamedTuple):
    """What one delete takes: everything below `below_seq`, and `seqs`; so many records and bytes that were live, and
    where the live ones begin afterwards.
    """

    below_seq: int
    seqs: tuple[int, ...]
    records: int
    size_bytes: int
    front: Front

    @property
    def earliest_seq(self) -> int:
        return self.front.earliest_seq


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
        for cap, write, held, unit in (
            (config.cap_records, count, self.records + pending_records, "records"),
            (config.cap_bytes, size_bytes, self.live_bytes + pending_bytes, "bytes"),
        ):
            if not cap:
                continue
            if write > cap:
                raise TopicsError(
                    "record_too_large",
                    f"a write of {write} {unit} can never fit topic {self.name!r}, whose cap_{unit} is {cap}",
                    {f"cap_{unit}": cap},
                )
            if held + write > cap:
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
        flags = entries[3::4]
        if any(word >> _FLAGS_SHIFT & LOCATION_LOST for word in flags):
            live = [at for at, word in enumerate(flags) if not word >> _FLAGS_SHIFT & LOCATION_LOST]
            self.records += len(live)
            self.live_bytes += sum(entries[at * 4 + 2] >> 32 for at in live)
        else:
            self.records += count
            self.live_bytes += sum([word >> 32 for word in entries[2::4]])
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
        self.records = floors.records
        self.live_bytes = floors.live_bytes
        if floors.earliest_seq > self.earliest_seq:
            self._settle(floors.earliest_seq)
        else:
            # Lower only for who reads the durable log alone: what it took for lost with the RAM log is in segments.
            self.earliest_seq = floors.earliest_seq

    # -- deletion (api §5): permanent, at once, silent

    def plan_delete(self, before_seq: int | None, match: Match | None, find: FindTagged) -> Deletion:
        """What is live below `before_seq` and matches."""
        last_seq = self.head_seq if before_seq is None else min(self.head_seq, before_seq - 1)
        if last_seq < self.earliest_seq:
            return Deletion(0, (), 0, 0, Front(self.earliest_seq))
        if match is None:
            # Lost ones below are given up like those that live.
            records, size_bytes = self._live_below(last_seq + 1)
            return Deletion(last_seq + 1, (), records, size_bytes, self._front(last_seq + 1, frozenset()))
        seqs, size_bytes = self.index.pick_live(find(match, self.earliest_seq, last_seq))
        return Deletion(0, tuple(seqs), len(seqs), size_bytes, self._front(self.earliest_seq, frozenset(seqs)))

    def plan_removal(self, seqs: Sequence[int], dying: Set[int], earliest_seq: int = 0) -> Deletion:
        """Of exactly these live ones, ascending, when all of `dying`, these among them, are on their way out;
        `earliest_seq` is what the plan before this one came to.
        """
        live: list[int] = []
        size_bytes = 0
        for seq, offset_len in self._living(seqs):
            live.append(seq)
            size_bytes += offset_len >> 32
        earliest_seq = max(earliest_seq, self.earliest_seq)
        front = self._front(earliest_seq, dying) if earliest_seq in dying else Front(earliest_seq)
        return Deletion(0, tuple(live), len(live), size_bytes, front)

    def live_from(self, seq: int, most: int) -> list[int]:
        """The first live seqs from `seq` on, ascending, at most so many; fewer: there are no more."""
        seq = max(seq, self.earliest_seq)
        found: list[int] = []
        step = most
        while len(found) < most and seq <= self.head_seq:
            last_seq = min(self.head_seq, seq + step - 1)
            step = max(64, min(4 * step, 4096))  # dead ones are in the way
            entries = self.index.entries(seq, last_seq)
            found += [
                at
                for at, file_flags in zip(entries[0::4], entries[3::4], strict=True)
                if not file_flags >> _FLAGS_SHIFT & _GONE
            ]
            seq = last_seq + 1
        return found[:most]

    def live_of(self, seqs: Sequence[int]) -> list[int]:
        """Those of them (ascending) that are live."""
        return [seq for seq, _ in self._living(seqs)]

    def _living(self, seqs: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(seq, offset_len) of the live ones of them. Neighbours are looked up together: a look may be into a file."""
        at = bisect_left(seqs, self.earliest_seq)
        stop = bisect_right(seqs, self.head_seq)
        while at < stop:
            end = at + 1
            while end < stop and seqs[end] - seqs[end - 1] <= _NEAR and seqs[end] - seqs[at] < _SPAN_MAX:
                end += 1
            first_seq = seqs[at]
            entries = self.index.entries(first_seq, seqs[end - 1])
            for seq in seqs[at:end]:
                word = (seq - first_seq) * ENTRY_WORDS
                if not entries[word + 3] >> _FLAGS_SHIFT & _GONE:
                    yield seq, entries[word + 2]
            at = end

    def floors_without(self, deletion: Deletion) -> Floors:
        """`floors` once it is carried out. Nobody loses what was given up: evict_floor moves only over what had been
        lost before.
        """
        floors = msgspec.structs.replace(
            self.floors(),
            earliest_seq=max(self.earliest_seq, deletion.earliest_seq),
            records=self.records - deletion.records,
            live_bytes=self.live_bytes - deletion.size_bytes,
        )
        return _evicted(floors, deletion.front.lost_below_seq, deletion.front.lost_reason)

    def deleted(self, deletion: Deletion, floors: Floors) -> None:
        """It is logged, with these floors."""
        self.index.flag_deleted(deletion.seqs)
        if self.queue is not None:
            self.queue.gone(deletion.seqs)
        self.logged(floors)

    def removed(self, deletion: Deletion, revision: int) -> None:
        """It is logged by what it takes: what happened to other records since it was planned stays as it is."""
        logged_floor = max(self.logged_floor, deletion.front.lost_below_seq)
        self.deleted(deletion, msgspec.structs.replace(self.floors_without(deletion), revision=revision))
        self.logged_floor = logged_floor

    # -- retention (api §3.2)

    def evict_over_cap(self) -> bool:
        """Evicts the oldest records until the topic is within its caps (`discard: "old"`)."""
        return self.evict_below(self._over_cap(0, 0)[0], EvictReason.CAP)

    def _over_cap(self, more_records: int, more_bytes: int) -> tuple[int, int]:
        """(first seq that stays, live bytes below it) if there were so many more."""
        config = self.config
        seq, freed_bytes = self.earliest_seq, 0
        if config.discard == "reject":
            return seq, freed_bytes
        surplus_records = self.records + more_records - config.cap_records if config.cap_records else 0
        surplus_bytes = self.live_bytes + more_bytes - config.cap_bytes if config.cap_bytes else 0
        count = 4
        while (surplus_records > 0 or surplus_bytes > 0) and seq <= self.head_seq:
            count = min(max(2 * count, surplus_records), 8192)
            entries = self.index.entries(seq, min(self.head_seq, seq + count - 1))
            for offset_len, file_flags in zip(entries[2::4], entries[3::4], strict=True):
                if surplus_records <= 0 and surplus_bytes <= 0:
                    break
                seq += 1
                if file_flags >> _FLAGS_SHIFT & _GONE:
                    continue
                surplus_records -= 1
                surplus_bytes -= offset_len >> 32
                freed_bytes += offset_len >> 32
        return seq, freed_bytes

    def expired_below(self, now_ms: int) -> int:
        """The first seq that has not outlived `ttl_ms`; earliest_seq when nothing has."""
        ttl_ms = self.config.ttl_ms
        if not ttl_ms:
            return self.earliest_seq
        low, high = self.earliest_seq, self.head_seq + 1
        if low == high:
            return low
        if self._front_ts[0] != low:
            self._front_ts = low, self.index.ts_at(low)
        if now_ms - self._front_ts[1] <= ttl_ms:
            return low  # most often: the sweep of an idle topic looks into no file
        low, high = self._narrowed(now_ms - ttl_ms, low + 1, high)
        while low < high:
            middle = (low + high) // 2
            if now_ms - self.index.ts_at(middle) > ttl_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def _narrowed(self, oldest_ts: int, low: int, high: int) -> tuple[int, int]:
        """Where the first seq of low..high - 1 lies that is not older, as far as the list of segments tells."""
        for segment in self.index.segments:
            if segment.last_ts < oldest_ts:
                low = max(low, segment.last_seq + 1)
            elif segment.first_ts >= oldest_ts:
                return low, max(low, min(high, segment.first_seq))
            else:
                return low, max(low, min(high, segment.last_seq))
        return low, high

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
        records, size_bytes = self._live_below(seq)
        front = self._front(seq, frozenset())
        floors = msgspec.structs.replace(
            self.floors(),
            earliest_seq=front.earliest_seq,
            records=self.records - records,
            live_bytes=self.live_bytes - size_bytes,
        )
        if records:
            floors = _evicted(floors, seq, reason)
        return _evicted(floors, front.lost_below_seq, front.lost_reason)

    def lay_open_lost(self) -> None:
        """Recovery: the first records may turn out to be lost."""
        front = self._front(self.earliest_seq, frozenset())
        if front.earliest_seq > self.earliest_seq:
            floors = msgspec.structs.replace(self.floors(), earliest_seq=front.earliest_seq)
            self._move(_evicted(floors, front.lost_below_seq, front.lost_reason))

    def _live_below(self, seq: int) -> tuple[int, int]:
        """(records, bytes) that live below `seq`: by looking at these, or at all others if they are fewer."""
        if seq - self.earliest_seq <= self.head_seq + 1 - seq:
            return self.index.live_size(self.earliest_seq, seq - 1)
        records, size_bytes = self.index.live_size(seq, self.head_seq) if seq <= self.head_seq else (0, 0)
        return self.records - records, self.live_bytes - size_bytes

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
            self.queue.gone_below(seq)

    def skipped(self, last_seq: int, reason: EvictReason) -> None:
        """The seqs up to `last_seq` are given to records that are lost; without live ones before, a gap in front."""
        count = last_seq - self.head_seq
        if count <= 0:
            return
        entries = array("Q", bytes(count * ENTRY_WORDS * 8))
        entries[0::4] = array("Q", range(self.head_seq + 1, last_seq + 1))
        entries[1::4] = array("Q", [self.last_write_ts]) * count
        entries[2::4] = array("Q", [reason]) * count
        entries[3::4] = array("Q", [LOCATION_LOST << _FLAGS_SHIFT]) * count
        self.restored(entries)
        if not self.records:
            floors = msgspec.structs.replace(self.floors(), earliest_seq=last_seq + 1)
            self._move(_evicted(floors, last_seq + 1, reason))

    def _front(self, seq: int, dying: Set[int]) -> Front:
        """The first seq from `seq` on whose record is neither gone nor about to be deleted."""
        lost_below_seq, reason = 0, EvictReason.NONE
        count = 8
        while seq <= self.head_seq:
            entries = self.index.entries(seq, min(self.head_seq, seq + count - 1))
            for at, file_flags in enumerate(entries[3::4]):
                flags = file_flags >> _FLAGS_SHIFT
                if not flags & _GONE and seq not in dying:
                    return Front(seq, lost_below_seq, reason)
                seq += 1
                if flags & _GONE == LOCATION_LOST:
                    lost_below_seq, reason = seq, EvictReason(entries[at * ENTRY_WORDS + 2] & _LOW_WORD)
            count = min(2 * count, 8192)
        return Front(seq, lost_below_seq, reason)

    def _settle(self, seq: int) -> None:
        self.earliest_seq = seq
        self.index.drop_before(seq)
        if self.queue is not None:
            self.queue.gone_below(seq)
        assert self.evict_floor <= self.earliest_seq <= self.head_seq + 1


def _evicted(floors: Floors, seq: int, reason: EvictReason) -> Floors:
    """With evict_floor at `seq`, if it is not yet."""
    if seq <= floors.evict_floor:
        return floors
    run_seq = floors.evict_run_seq
    if floors.evict_reason != reason:
        run_seq = floors.evict_floor if floors.evict_reason != EvictReason.NONE else 1
    return msgspec.structs.replace(floors, evict_floor=seq, evict_reason=int(reason), evict_run_seq=run_seq)
