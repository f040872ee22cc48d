"""One topic as its log says it is: head, floors, counts, retention, idempotency. Pure.

Two floors (api §3.2). `earliest_seq` is the first live record; eviction, expiry and deletion move it.
`evict_floor` moves only when live records are lost that nobody asked to lose: it alone decides about
tombstones. Always evict_floor <= earliest_seq <= head_seq + 1.

Where records lie is the index's affair (`RecordIndex`): in a running shard that is the topic's location ring
in shared memory (`shm/arena.py`), in tests a list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Set
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from topics.core.config import TopicConfig
from topics.core.cursors import Cursors
from topics.core.errors import TopicsError
from topics.core.idempotency import IdempotencyWindow
from topics.core.leases import Leases
from topics.core.seq_set import runs_of
from topics.core.tags import Match, TagIndex, TagsOf

ENTRY_WORDS: Final = 4
"""An index entry is 4 words: seq, ts, offset | len_bytes << 32, file_no | flags << 32."""
_FLAGS_SHIFT: Final = 32
LOCATION_IN_RAM_LOG: Final = 1
LOCATION_DELETED: Final = 2
LOCATION_LOST: Final = 32
"""A seq whose record is gone for good though its neighbours live; `offset` is then an EvictReason."""
_GONE: Final = LOCATION_DELETED | LOCATION_LOST


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


class Deletion(NamedTuple):
    """What one delete takes: everything below `below_seq`, and `seqs`; so many records and bytes that were live, and
    where the live ones begin afterwards.
    """

    below_seq: int
    seqs: tuple[int, ...]
    records: int
    size_bytes: int
    earliest_seq: int


class RecordIndex(Protocol):
    """Entries base_seq..next_seq-1, dense."""

    base_seq: int
    next_seq: int

    def reserve(self, count: int) -> None: ...
    def append(self, ts: int, offset_len: array[int], file_flags: array[int]) -> None: ...
    def append_entries(self, entries: array[int]) -> None: ...
    def entries(self, first_seq: int, last_seq: int) -> array[int]: ...
    def drop_before(self, seq: int) -> None: ...
    def skip_to(self, seq: int) -> None: ...
    def ts_at(self, seq: int) -> int: ...
    def hold(self, seq: int) -> None: ...
    def replace(self, seq: int, word: int, value: int) -> None: ...


class Topic:
    """State and rules of one topic. Every method that changes it is called after the log says so."""

    __slots__ = (
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
        "name",
        "queue",
        "records",
        "recreated",
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

    # -- deletion (api §5): permanent, at once, silent

    def plan_delete(self, up_to_seq: int, before_seq: int | None, match: Match | None, tags_of: TagsOf) -> Deletion:
        """What is live up to `up_to_seq` (the head when it was asked for) and below `before_seq` and matches."""
        last_seq = min(up_to_seq, self.head_seq)
        if before_seq is not None:
            last_seq = min(last_seq, before_seq - 1)
        if last_seq < self.earliest_seq:
            return Deletion(0, (), 0, 0, self.earliest_seq)
        if match is None:
            live = self._live_lengths(self.earliest_seq, last_seq)
            return Deletion(last_seq + 1, (), len(live), sum(live), self._first_live(last_seq + 1, frozenset()))
        if self.tags is None:
            self.tags = TagIndex(self.index.base_seq)
        self.tags.catch_up(self.index.base_seq, self.head_seq, self.records, tags_of)
        seqs = []
        size_bytes = 0
        for seq in self.tags.find(match):
            if self.earliest_seq <= seq <= last_seq:
                _, _, offset_len, file_flags = self.index.entries(seq, seq)
                if not file_flags >> _FLAGS_SHIFT & LOCATION_DELETED:
                    seqs.append(seq)
                    size_bytes += offset_len >> 32
        earliest_seq = self._first_live(self.earliest_seq, frozenset(seqs))
        return Deletion(0, tuple(seqs), len(seqs), size_bytes, earliest_seq)

    def plan_removal(self, seqs: Iterable[int], dying: Set[int], earliest_seq: int = 0) -> Deletion:
        """Of exactly these live ones, ascending, when all of `dying`, these among them, are on their way out;
        `earliest_seq` is what the plan before this one came to.
        """
        live: list[int] = []
        size_bytes = 0
        for first_seq, last_seq in runs_of(seqs):
            entries = self.index.entries(first_seq, last_seq)
            for seq, offset_len, file_flags in zip(entries[0::4], entries[2::4], entries[3::4], strict=True):
                if not file_flags >> _FLAGS_SHIFT & _GONE:
                    live.append(seq)
                    size_bytes += offset_len >> 32
        earliest_seq = max(earliest_seq, self.earliest_seq)
        if earliest_seq in dying:
            earliest_seq = self._first_live(earliest_seq, dying)
        return Deletion(0, tuple(live), len(live), size_bytes, earliest_seq)

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

    def deleted(self, deletion: Deletion) -> None:
        """It is logged. evict_floor does not move: nobody lost what was not given up."""
        for seq in deletion.seqs:
            file_flags = self.index.entries(seq, seq)[3]
            self.index.replace(seq, 3, file_flags | LOCATION_DELETED << _FLAGS_SHIFT)
        self.records -= deletion.records
        self.live_bytes -= deletion.size_bytes
        if self.queue is not None:
            self.queue.gone(deletion.seqs)
        if deletion.earliest_seq > self.earliest_seq:
            self._settle(deletion.earliest_seq)

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
        while (surplus_records > 0 or surplus_bytes > 0) and seq <= self.head_seq:
            entries = self.index.entries(seq, min(self.head_seq, seq + max(surplus_records, 64) - 1))
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
        while low < high:
            middle = (low + high) // 2
            if now_ms - self.index.ts_at(middle) > ttl_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def evict_below(self, seq: int, reason: EvictReason) -> bool:
        """Involuntary loss of everything live below `seq`. True if the floors moved."""
        seq = min(seq, self.head_seq + 1)
        if seq <= self.earliest_seq:
            return False
        live = self._live_lengths(self.earliest_seq, seq - 1)
        if live:
            if self.evict_reason != reason:
                self.evict_run_seq = self.evict_floor if self.evict_reason != EvictReason.NONE else 1
                self.evict_reason = reason
            self.evict_floor = seq
        self.records -= len(live)
        self.live_bytes -= sum(live)
        self._settle(self._first_live(seq, frozenset()))
        return True

    def _live_lengths(self, first_seq: int, last_seq: int) -> list[int]:
        entries = self.index.entries(first_seq, last_seq)
        return [
            offset_len >> 32
            for offset_len, file_flags in zip(entries[2::4], entries[3::4], strict=True)
            if not file_flags >> _FLAGS_SHIFT & _GONE
        ]

    def lost_below(self, seq: int, reason: EvictReason) -> None:
        """Recovery: everything up to `seq` - 1 is gone, and with it the seqs up to there."""
        assert seq > self.head_seq
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
            if self.evict_reason != reason:
                self.evict_run_seq = self.evict_floor if self.evict_reason != EvictReason.NONE else 1
                self.evict_reason = reason
            self.evict_floor = last_seq + 1
            self._settle(last_seq + 1)

    def _first_live(self, seq: int, dying: Set[int]) -> int:
        """The first seq from `seq` on that is neither deleted nor about to be."""
        while seq <= self.head_seq:
            for file_flags in self.index.entries(seq, min(self.head_seq, seq + 63))[3::4]:
                if not file_flags >> _FLAGS_SHIFT & LOCATION_DELETED and seq not in dying:
                    return seq
                seq += 1
        return seq

    def _settle(self, seq: int) -> None:
        self.earliest_seq = seq
        self.index.drop_before(seq)
        if self.queue is not None:
            self.queue.gone_below(seq)
        assert self.evict_floor <= self.earliest_seq <= self.head_seq + 1
