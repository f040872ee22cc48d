"""Arena, log files and segments for readers, made in the test's own process by the code of shard and compactor.

Only commit and group logic and the log of marks are left out: a write goes straight to the log file and is published.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import NamedTuple

import msgspec

from topics.compactor.rewriting import rewrite
from topics.compactor.segment_building import SealAt, SegmentAppender
from topics.core.clock import ExpiryClock
from topics.core.config import TopicConfig
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_IN_RAM_LOG, LOCATION_LOST
from topics.core.segment_list import COLD, SegmentInfo, SegmentList
from topics.core.topic import Topic
from topics.frontend.reads.cold import ColdTier
from topics.frontend.reads.files import LogFiles
from topics.frontend.reads.reading import TopicReader
from topics.frontend.shards.arenas import Arenas
from topics.settings import load
from topics.shm.arena import ArenaWriter, SlotState
from topics.shm.arena_heap import LocationRing
from topics.shm.control import Role
from topics.shm.instance import SharedMemory
from topics.shm.router_memory import RouterTableWriter
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import lay_out, stamp
from topics.storage.segment_store import LocalStore, SegmentStore
from topics.walshard.hosted.holdings import Holdings
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.segment_files import SegmentFiles
from topics.walshard.hosted.topic_index import TopicIndex

RING_BYTES = 64 * 1024
COLD_TIMEOUT_MS = 10_000


class Written(NamedTuple):
    """One record as a client wrote it."""

    data: bytes
    node: bytes = b""
    tag: bytes = b""
    meta: bytes = b""


class TestClock:
    """Time that stands still until a test moves it."""

    __test__ = False

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.ms = now_ms
        self.skew_ms = 0
        """Milliseconds that the wall clock is ahead."""
        self.warnings: list[str] = []

    def now_ms(self) -> int:
        return self.ms + self.skew_ms

    def warn(self, event: str, **_values: object) -> None:
        self.warnings.append(event)

    def monotonic_ms(self) -> int:
        return self.ms


class Hosting:
    """One shard's arena and logs; `reader` is what a frontend reads them with."""

    def __init__(self, identity: str, data_dir: str) -> None:
        self.data_dir = data_dir
        self.fs = OsFileSystem()
        self.store: SegmentStore = LocalStore(self.fs, os.path.join(data_dir, "cold"))
        self.segment_files = SegmentFiles(self.fs, data_dir, 64)
        self.shared = SharedMemory.create(identity, 1, 1, RING_BYTES)
        self.clock = TestClock()
        self.cold = ColdTier(self.store, self.clock, COLD_TIMEOUT_MS)
        self.arena = ArenaWriter(identity, 0, 1)
        settings = load({}, {"data_dir": data_dir, "wal_shards": 1, "frontends": 1})
        self.holdings = Holdings(self.shared.control, 0, settings)
        self.topics: dict[str, Hosted] = {}
        self.file_no = 1
        self.in_ram = False
        self._next_id = 1
        self._directories = (layout.group_dir(data_dir, 0, 1), layout.ram_group_dir(self.shared.ram_dir, 0))
        for directory in self._directories:
            os.makedirs(directory, exist_ok=True)
        self.shared.control.cell(Role.WALSHARD, 0).set("generation", 1)
        RouterTableWriter(self.shared.router_table).store_all([])
        self.arenas = Arenas(self.shared)
        log_files = LogFiles(data_dir, self.shared.ram_dir, 1, maps_max=2)
        expiry = ExpiryClock(self.clock, self.clock.warn)
        self.reader = TopicReader(self.arenas, log_files, 1, expiry, self.cold)

    def close(self) -> None:
        self.arenas.close()

    def make(self, name: str, config: TopicConfig | None = None, recreated: bool = False) -> Hosted:
        index = TopicIndex(self._next_id, LocationRing(self.arena.heap, 1), self.segment_files)
        topic = Topic(self._next_id, name, config or TopicConfig(), index, recreated)
        self._next_id += 1
        self.topics[name] = hosted = Hosted(self.arena, topic, index, self.holdings)
        hosted.announce()
        return hosted

    def write(self, name: str, records: list[Written]) -> None:
        """Appends to the current log file and publishes."""
        hosted = self.topics[name]
        topic = hosted.topic
        laid_out = lay_out([(record.node, record.tag, record.data, record.meta) for record in records])
        ts = topic.commit_ts(self.clock.now_ms())
        stamp(laid_out.buffer, laid_out.offset_len, topic.id, topic.head_seq + 1, ts, 0)
        with open(self._path(), "ab") as file:
            start = file.tell()
            file.write(laid_out.buffer)
        location = LOCATION_IN_RAM_LOG if self.in_ram else 0
        hosted.ring.reserve(laid_out.count)
        topic.appended(
            ts,
            array("Q", [start + entry for entry in laid_out.offset_len]),
            array("Q", [self.file_no | (flags | location) << 32 for flags in laid_out.flags]),
            len(laid_out.buffer),
        )
        hosted.publish()

    def flag(self, name: str, seq: int, flag: int) -> None:
        """Sets a location flag of one record."""
        hosted = self.topics[name]
        word = hosted.ring.entries(seq, seq)[3]
        hosted.ring.replace(seq, 3, word | flag << 32)
        if flag == LOCATION_LOST:
            hosted.ring.replace(seq, 2, EvictReason.RESTART)
        hosted.publish()

    def delete_record(self, name: str, seq: int) -> None:
        """Flags one record; floors and counts stay."""
        hosted = self.topics[name]
        hosted.index.flag_deleted([seq])
        hosted.publish()

    # -- what the compactor does

    def checkpoint(self, name: str, up_to_seq: int | None = None, records_max: int = 10_000) -> None:
        """Takes records out of the log into segments, sealed when they have `records_max`."""
        hosted = self.topics[name]
        index, ring = hosted.index, hosted.ring
        last_seq = ring.next_seq - 1 if up_to_seq is None else up_to_seq
        if last_seq < ring.base_seq:
            return
        appender = SegmentAppender(self.fs, self.data_dir, SealAt(records_max, 64 << 20, 0), set())
        last = list(index.segments)[-1] if len(index.segments) else None
        entries = ring.entries(ring.base_seq, last_seq)
        self._checkpointed(
            hosted, appender.append(hosted.topic.id, last, entries, self._log_bytes, self.clock.now_ms())
        )

    def rewrite(self, name: str, seq: int) -> None:
        """The segment of `seq` without its deleted records, in the place of the one there was."""
        hosted = self.topics[name]
        info = hosted.index.segments.at(seq)
        assert info is not None
        self._checkpointed(hosted, [rewrite(self.fs, self._topic_dir(hosted), info)])
        self.remove_files(name, info)

    def relocate(self, name: str, seq: int, keep: bool = False) -> str:
        """The data of the segment of `seq` into the store; what it is called there. `keep`: not yet gone from here."""
        hosted = self.topics[name]
        info = hosted.index.segments.at(seq)
        assert info is not None
        object_name = f"{hosted.topic.id:016x}/{os.path.basename(layout.segment_data_path('', *_name(info)))}"
        path = layout.segment_data_path(self._topic_dir(hosted), *_name(info))
        self.store.put(object_name, [Path(path).read_bytes()])
        self._checkpointed(hosted, [msgspec.structs.replace(info, flags=info.flags | COLD)])
        if not keep:
            os.unlink(path)
        return object_name

    def remove_files(self, name: str, info: SegmentInfo) -> None:
        """Remove the files of a segment that is no longer one."""
        directory = self._topic_dir(self.topics[name])
        for path in (layout.segment_data_path, layout.segment_idx_path, layout.segment_tags_path):
            Path(path(directory, *_name(info))).unlink(missing_ok=True)

    def segments(self, name: str) -> list[SegmentInfo]:
        return list(self.topics[name].index.segments)

    def data_path(self, name: str, seq: int) -> Path:
        """The `.data` of the segment of a record."""
        hosted = self.topics[name]
        info = hosted.index.segments.at(seq)
        assert info is not None
        return Path(layout.segment_data_path(self._topic_dir(hosted), *_name(info)))

    def _checkpointed(self, hosted: Hosted, changed: list[SegmentInfo]) -> None:
        segments = SegmentList(hosted.index.segments)
        for info in changed:
            segments.put(info)
        hosted.checkpointed(changed, hosted.prepare_segments(segments))
        hosted.publish()

    def _log_bytes(self, file_no: int, end: int) -> bytes:
        content = Path(layout.log_path(self._directories[False], file_no)).read_bytes()
        assert len(content) >= end
        return content

    def _topic_dir(self, hosted: Hosted) -> str:
        return layout.topic_dir(self.data_dir, hosted.topic.id)

    def retire(self, name: str) -> None:
        """Deletes the topic."""
        self.topics.pop(name).retire()

    def expire(self, name: str) -> None:
        """Expire records, as the shard does when it gets round to it."""
        hosted = self.topics[name]
        hosted.topic.evict_below(hosted.topic.expired_below(self.clock.now_ms()), EvictReason.TTL)
        hosted.publish(SlotState.LIVE)

    def _path(self) -> str:
        return layout.log_path(self._directories[self.in_ram], self.file_no)


def _name(info: SegmentInfo) -> tuple[int, int]:
    return info.first_seq, info.version


class ServedRecord(msgspec.Struct, frozen=True):
    """A record of an answer; `data` and `meta` are the bytes that came."""

    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    data: msgspec.Raw = msgspec.Raw()
    meta: msgspec.Raw = msgspec.Raw()


def served(body: bytes) -> list[ServedRecord]:
    return msgspec.json.decode(b"[" + body + b"]", type=list[ServedRecord])
