"""The index arena of one shard: its topics, and the location of each record that is in no segment yet.

The shard alone writes it; frontends and the compactor map it.

     0        header            magic · version · generation · slots_used · change_count          (u64 words)
     4 KiB    changes           the last CHANGES slot numbers that were made or deleted, a circle
     36 KiB   slots             SLOTS_MAX × SLOT_BYTES, backed by memory as they are used
     HEAP     blocks            descriptors, location rings and tables of segments (`arena_heap.py`)

A slot holds a publication count and two copies of the topic's state. Copy `count & 1` is the current one. The shard
writes the other copy and then stores count + 1. A reader reads the current copy and accepts it if the count is still
the same afterwards. So readers never wait, and a shard that is killed during a write damages nothing.

    slot   | published u64 | 7 spare | copy 0: 27 words | copy 1: 27 words |

A location ring holds the records base_seq..head_seq; seq s lies at index s & (capacity - 1):

    entry  | seq u64 | ts u64 | offset u32 | len_bytes u32 | file_no u32 | flags u32 |      flags: `core/location.py`

Records earliest_seq..base_seq - 1 are in segments. A table in the heap lists the segments: a row of 7 words for each,
in the order of the fields of `core.segment_list.SegmentInfo`. The shard never changes a table, but stores a new
version:

    row    | first_seq | last_seq | first_ts | last_ts | data_bytes | version | flags |               u64 each
    view   … | segments_word | segments: count | table version << 32 |

A ring or descriptor that outgrows its block moves to another one. Once the slot is published, the shard uses the old
block again. So a reader checks entry.seq against the seq that it wants, and the frame against topic, seq and length. If
they differ, it takes a new view; it never returns wrong data.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import IntEnum
from itertools import chain
from typing import Final, NamedTuple

import msgspec
from sortedcontainers import SortedDict

from topics.core.config import TopicConfig
from topics.core.location import ENTRY_WORDS
from topics.core.segment_list import SegmentInfo
from topics.shm.arena_heap import ArenaFullError, ArenaHeap, copy_entries
from topics.shm.memory import SharedObject, unlink
from topics.shm.shm_names import shm_name

MAGIC: Final = 0x31414E4552414F54
VERSION: Final = 5
ARENA_BYTES: Final = 8 * 2**30
"""Address space, not memory: only used parts are backed by memory."""
CHANGES: Final = 4096
_CHANGES_WORD: Final = 512
_SLOTS_WORD: Final = _CHANGES_WORD + CHANGES
SLOT_WORDS: Final = 62
SLOTS_MAX: Final = 2**20
_HEAP_BYTE: Final = (_SLOTS_WORD + SLOTS_MAX * SLOT_WORDS) * 8
_COPY_WORD: Final = 8
_COPY_WORDS: Final = 27
_ROW_WORDS: Final = 7
SEGMENT_ROW_BYTES: Final = _ROW_WORDS * 8
_ATTACH_TRIES: Final = 10
_TABLES_KEPT: Final = 1024
"""The number of topics whose tables of segments a reader keeps."""


class _Header(IntEnum):
    MAGIC = 0
    VERSION = 1
    GENERATION = 2
    SLOTS_USED = 3
    CHANGE_COUNT = 4


IS_QUEUE: Final = 1
HAS_CURSORS: Final = 2
"""Flags of a topic."""


class SlotState(IntEnum):
    FREE = 0
    LIVE = 1
    DELETED = 2


class Descriptor(msgspec.Struct, array_like=True, frozen=True):
    """A topic's name and configuration."""

    name: str
    config: TopicConfig


_encode_descriptor = msgspec.msgpack.Encoder().encode
_decode_descriptor = msgspec.msgpack.Decoder(Descriptor).decode


class TopicView(NamedTuple):
    """One consistent state of a topic, in the order of the slot's words."""

    topic_id: int
    state: int
    head_seq: int
    base_seq: int
    earliest_seq: int
    evict_floor: int
    evict_reason: int
    records: int
    live_bytes: int
    durable_seq: int
    last_write_ts: int
    ring_word: int
    ring_capacity: int
    descriptor_byte: int
    descriptor_len: int
    descriptor_version: int
    evict_run_seq: int
    recreated: int
    segments_word: int
    segments: int
    """count | table version << 32"""
    jobs_ready: int
    jobs_in_flight: int
    jobs_scheduled: int
    jobs_dead_lettered: int
    """These four are figures of a queue, 0 for a log."""
    flags: int
    archived_seq: int
    restored_seq: int
    """The end of the gap `restored`; 0 if the topic was made since."""

    @property
    def is_queue(self) -> bool:
        return bool(self.flags & IS_QUEUE)

    @property
    def has_cursors(self) -> bool:
        return bool(self.flags & HAS_CURSORS)


class Locations(NamedTuple):
    """Columns of consecutive entries."""

    ts: list[int]
    offset_len: list[int]
    """offset | len_bytes << 32"""
    file_flags: list[int]
    """file_no | flags << 32"""


class ArenaWriter:
    """The shard's side of its arena, and its only writer. It owns slots and blocks, and publishes topics."""

    def __init__(self, identity: str, shard: int, generation: int) -> None:
        self._shared = SharedObject.create(shm_name(identity, "arena", shard, generation), ARENA_BYTES, _SLOTS_WORD * 8)
        self._words = self._shared.words
        self._slots_backed = 0
        self.heap = ArenaHeap(self._shared, _HEAP_BYTE, ARENA_BYTES)
        self._free_slots: list[int] = []
        self._published: list[int] = []
        self._words[_Header.VERSION] = VERSION
        self._words[_Header.GENERATION] = generation
        self._words[_Header.MAGIC] = MAGIC

    @property
    def used_bytes(self) -> int:
        """The memory that backs this arena."""
        return _SLOTS_WORD * 8 + self._slots_backed * SLOT_WORDS * 8 + self.heap.used_bytes

    def new_slot(self) -> int:
        """Return a slot that no reader sees until it is published."""
        if self._free_slots:
            return self._free_slots.pop()
        slot = len(self._published)
        if slot >= SLOTS_MAX:
            raise ArenaFullError(f"a shard holds at most {SLOTS_MAX} topics")
        if slot >= self._slots_backed:
            try:
                self._shared.reserve((_SLOTS_WORD + slot * SLOT_WORDS) * 8, 256 * SLOT_WORDS * 8)
            except OSError as error:
                raise ArenaFullError(f"/dev/shm has no room for more topics: {error.strerror}") from error
            self._slots_backed += 256
        self._published.append(0)
        return slot

    def return_slot(self, slot: int) -> None:
        """Free a slot whose topic was deleted, or never published."""
        self._free_slots.append(slot)

    def store_descriptor(self, descriptor: Descriptor) -> tuple[int, int]:
        """Store a descriptor in a new block; return (byte offset, length)."""
        body = _encode_descriptor(descriptor)
        offset = self.heap.allocate(len(body))
        self._shared.bytes[offset : offset + len(body)] = body
        return offset, len(body)

    def store_segments(self, rows: Iterable[SegmentInfo]) -> tuple[int, int]:
        """Store a new table of segments; return (byte offset, length), (0, 0) for an empty one."""
        table = array("Q", chain.from_iterable(map(msgspec.structs.astuple, rows)))
        if not table:
            return 0, 0
        size_bytes = len(table) * 8
        offset = self.heap.allocate(size_bytes)
        self._words[offset >> 3 : (offset >> 3) + len(table)] = table
        return offset, size_bytes

    def publish(self, slot: int, view: TopicView) -> None:
        """Publish `view` as the topic's state."""
        published = self._published[slot] + 1
        word = _SLOTS_WORD + slot * SLOT_WORDS
        copy = word + _COPY_WORD + (published & 1) * _COPY_WORDS
        self._words[copy : copy + _COPY_WORDS] = array("Q", view)
        self._words[word] = published
        self._published[slot] = published

    def announce(self, slot: int) -> None:
        """Tell readers that this slot's topic was created or deleted; called after `publish`."""
        count = self._words[_Header.CHANGE_COUNT]
        if slot >= self._words[_Header.SLOTS_USED]:
            self._words[_Header.SLOTS_USED] = slot + 1
        self._words[_CHANGES_WORD + count % CHANGES] = slot
        self._words[_Header.CHANGE_COUNT] = count + 1


def unlink_arena(identity: str, shard: int, generation: int) -> None:
    """Remove an arena's name, if there is one; readers keep their mappings."""
    unlink(shm_name(identity, "arena", shard, generation))


def announced_arena(identity: str, shard: int, generation: Callable[[], int]) -> ArenaReader:
    """Map the arena that the shard announces by its generation. If the shard announces a new one meanwhile, map that.
    Raise RuntimeError if there is none.
    """
    for _ in range(_ATTACH_TRIES):
        announced = generation()
        try:
            return ArenaReader(identity, shard, announced)
        except FileNotFoundError:
            continue
    raise RuntimeError(f"index arena {announced} of shard {shard} is announced but not there")


class ArenaReader:
    """A reader's side of one generation of one shard's arena."""

    def __init__(self, identity: str, shard: int, generation: int) -> None:
        self._shared = SharedObject.attach(shm_name(identity, "arena", shard, generation))
        self._words = self._shared.words
        if self._words[_Header.MAGIC] != MAGIC or self._words[_Header.VERSION] != VERSION:
            raise ValueError(f"{self._shared.name} is not an index arena of this version")
        self.generation = generation
        self._seen_changes = 0
        self._unlearned: set[int] = set()
        """Slots with changes up to number `_listed_changes` that this reader has not looked at yet."""
        self._listed_changes = 0
        self._names: SortedDict[str, int] = SortedDict()
        self._name_of: dict[int, str] = {}
        self._configs: dict[int, tuple[int, int, TopicConfig]] = {}
        """(topic id, descriptor version, configuration) by slot. The topic id tells whether the slot was used again."""
        self._tables: OrderedDict[int, tuple[int, tuple[SegmentInfo, ...]]] = OrderedDict()

    def find(self, name: str) -> int | None:
        """Return the slot of a live topic."""
        slot: int | None = self.names.get(name)
        return slot

    def look_up(self, name: str) -> tuple[int, TopicView] | None:
        """Return slot and state of a live topic, None if there is none. It checks that no other topic got the slot."""
        while True:
            slot = self.find(name)
            if slot is None:
                return None
            view = self.view(slot)
            if self._words[_Header.CHANGE_COUNT] == self._seen_changes:
                return (slot, view) if view.state == SlotState.LIVE else None

    @property
    def names(self) -> SortedDict[str, int]:
        """The slots of live topics by their names, sorted."""
        while self._words[_Header.CHANGE_COUNT] != self._seen_changes:
            self.learn(SLOTS_MAX)
        return self._names

    def view(self, slot: int) -> TopicView:
        """Return a consistent state. It rarely has to repeat: a copy changes only when its slot is published twice."""
        words = self._words
        word = _SLOTS_WORD + slot * SLOT_WORDS
        while True:
            published = words[word]
            copy = word + _COPY_WORD + (published & 1) * _COPY_WORDS
            view = TopicView._make(words[copy : copy + _COPY_WORDS].tolist())
            if words[word] == published:
                return view

    def config(self, slot: int, view: TopicView) -> TopicConfig:
        """Return the topic's configuration as of `view` or later."""
        known = self._configs.get(slot)
        if known is not None and known[0] == view.topic_id and known[1] == view.descriptor_version:
            return known[2]
        descriptor, view = self._descriptor(slot)
        self._configs[slot] = (view.topic_id, view.descriptor_version, descriptor.config)
        return descriptor.config

    def segments(self, slot: int, view: TopicView) -> tuple[SegmentInfo, ...] | None:
        """Return the topic's segments as of `view`, ascending; None when they have changed (take a new view)."""
        known = self._tables.get(view.topic_id)
        if known is not None and known[0] == view.segments:
            return known[1]
        count = view.segments & 0xFFFF_FFFF
        words = self._words[view.segments_word : view.segments_word + count * _ROW_WORDS].tolist()
        # The shard uses the block again only after it has published the slot with another table.
        now = self.view(slot)
        if (now.topic_id, now.segments) != (view.topic_id, view.segments):
            return None
        rows = tuple(SegmentInfo(*words[at : at + _ROW_WORDS]) for at in range(0, len(words), _ROW_WORDS))
        self._tables[view.topic_id] = (view.segments, rows)
        self._tables.move_to_end(view.topic_id)
        if len(self._tables) > _TABLES_KEPT:
            self._tables.popitem(last=False)
        return rows

    def entries(self, view: TopicView, first_seq: int, last_seq: int) -> array[int] | None:
        """Return the entries (`core.location`) first_seq..last_seq; None when the ring has moved (take a new view)."""
        entries = array("Q", copy_entries(self._words, view.ring_word, view.ring_capacity, first_seq, last_seq))
        return entries if entries[0::ENTRY_WORDS] == array("Q", range(first_seq, last_seq + 1)) else None

    def entry(self, view: TopicView, seq: int) -> tuple[int, int, int] | None:
        """Return (ts, offset | len_bytes << 32, file_no | flags << 32) of one record; None when the ring has moved."""
        word = view.ring_word + (seq & (view.ring_capacity - 1)) * ENTRY_WORDS
        found_seq, ts, offset_len, file_flags = self._words[word : word + ENTRY_WORDS].tolist()
        return (ts, offset_len, file_flags) if found_seq == seq else None

    def locations(self, view: TopicView, first_seq: int, last_seq: int) -> Locations | None:
        """Return the columns of first_seq..last_seq; None when the ring has moved (take a new view)."""
        entries = self.entries(view, first_seq, last_seq)
        if entries is None:
            return None
        return Locations(*(entries[column::ENTRY_WORDS].tolist() for column in (1, 2, 3)))

    def ts_at(self, view: TopicView, seq: int) -> int | None:
        """Return the commit time of one record in the ring, None when the ring has moved."""
        word = view.ring_word + (seq & (view.ring_capacity - 1)) * ENTRY_WORDS
        ts: int = self._words[word + 1]
        return ts if self._words[word] == seq else None

    def first_seq_at(self, view: TopicView, ts: int) -> int | None:
        """Return the first seq in the ring with commit time >= ts, else head_seq + 1; None when the ring has moved."""
        low, high = view.base_seq, view.head_seq + 1
        while low < high:
            middle = (low + high) // 2
            at = self.ts_at(view, middle)
            if at is None:
                return None
            if at < ts:
                low = middle + 1
            else:
                high = middle
        return low

    def close(self) -> None:
        self._shared.close()

    def _descriptor(self, slot: int) -> tuple[Descriptor, TopicView]:
        word = _SLOTS_WORD + slot * SLOT_WORDS
        while True:
            published = self._words[word]
            view = self.view(slot)
            body = bytes(self._shared.bytes[view.descriptor_byte : view.descriptor_byte + view.descriptor_len])
            # If the shard used the block again meanwhile, it has published the slot in between.
            if self._words[word] == published:
                return _decode_descriptor(body), view

    @property
    def unlearned(self) -> int:
        """The most changed topics that the next search for a name has to read."""
        return len(self._unlearned) + self._words[_Header.CHANGE_COUNT] - self._listed_changes

    def learn(self, slots_max: int) -> bool:
        """Read at most `slots_max` changed topics, because ten thousand would hold up the process. True if none is
        left.
        """
        self._list_changes()
        for _ in range(min(slots_max, len(self._unlearned))):
            self._learn_slot(self._unlearned.pop())
        if not self._unlearned:
            self._seen_changes = self._listed_changes
        return self._seen_changes == self._words[_Header.CHANGE_COUNT]

    def _list_changes(self) -> None:
        count = self._words[_Header.CHANGE_COUNT]
        if count - self._listed_changes > CHANGES // 2:
            self._unlearned.update(range(self._words[_Header.SLOTS_USED]))
        else:
            changes = range(self._listed_changes, count)
            self._unlearned.update(self._words[_CHANGES_WORD + at % CHANGES] for at in changes)
        self._listed_changes = count

    def _learn_slot(self, slot: int) -> None:
        name = self._name_of.pop(slot, None)
        if name is not None and self._names.get(name) == slot:
            del self._names[name]
        view = self.view(slot)
        self._configs.pop(slot, None)
        if view.state == SlotState.LIVE:
            descriptor, view = self._descriptor(slot)
            self._name_of[slot] = descriptor.name
            self._names[descriptor.name] = slot
