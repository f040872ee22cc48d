"""What a shard leaves for readers, made in the test's own process: arena and log files, by the shard's own code.

Only commit and group logic are left out: a write goes straight to the log file and is published.
"""

from __future__ import annotations

import os
from array import array
from typing import NamedTuple

import msgspec

from topics.core.config import TopicConfig
from topics.core.topic import LOCATION_DELETED, LOCATION_IN_RAM_LOG, LOCATION_LOST, EvictReason, Topic
from topics.frontend.arenas import Arenas
from topics.frontend.log_files import LogFiles
from topics.frontend.reading import TopicReader
from topics.settings import load
from topics.shm.arena import ArenaWriter, SlotState
from topics.shm.control import Role
from topics.shm.instance import SharedMemory
from topics.shm.location_ring import LocationRing
from topics.shm.router_table import RouterTableWriter
from topics.storage import layout
from topics.storage.frame import lay_out, stamp
from topics.walshard.holdings import Holdings
from topics.walshard.hosted import Hosted

RING_BYTES = 64 * 1024


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

    def now_ms(self) -> int:
        return self.ms

    def monotonic_ms(self) -> int:
        return self.ms


class Hosting:
    """One shard's arena and logs; `reader` is what a frontend reads them with."""

    def __init__(self, identity: str, data_dir: str) -> None:
        self.shared = SharedMemory.create(identity, 1, 1, RING_BYTES)
        self.clock = TestClock()
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
        self.reader = TopicReader(self.arenas, LogFiles(data_dir, self.shared.ram_dir, 1, maps_max=2), 1, self.clock)

    def close(self) -> None:
        self.arenas.close()

    def make(self, name: str, config: TopicConfig | None = None, recreated: bool = False) -> Hosted:
        ring = LocationRing(self.arena, 1)
        topic = Topic(self._next_id, name, config or TopicConfig(), ring, recreated)
        self._next_id += 1
        self.topics[name] = hosted = Hosted(self.arena, topic, ring, self.holdings)
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
        self.flag(name, seq, LOCATION_DELETED)

    def retire(self, name: str) -> None:
        """Deletes the topic."""
        self.topics.pop(name).retire()

    def expire(self, name: str) -> None:
        """What the shard does when it gets round to it."""
        hosted = self.topics[name]
        hosted.topic.evict_below(hosted.topic.expired_below(self.clock.now_ms()), EvictReason.TTL)
        hosted.publish(SlotState.LIVE)

    def _path(self) -> str:
        return layout.log_path(self._directories[self.in_ram], self.file_no)


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
