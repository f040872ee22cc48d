"""A shard in this process, driven step by step through its real rings, on real files."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.executors import Inline
from tests.storage.faults import FaultyFileSystem
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.location import FILE_BITS
from topics.core.names import owner_shard
from topics.settings import Settings
from topics.settings import load as load_settings
from topics.shm import append_messages, messages, shm_names
from topics.shm.append_messages import AppendReply, JobAttributes
from topics.shm.arena import ArenaReader, TopicView
from topics.shm.asks import Message
from topics.shm.control import Role
from topics.shm.instance import SharedMemory
from topics.shm.messages import MessageKind
from topics.shm.queue_messages import Dealt
from topics.shm.ring import Ring
from topics.shm.router_memory import RouterBoard
from topics.shm.topic_messages import DeleteRecords, PutTopicReply
from topics.storage.filesystem import FileSystem, OsFileSystem
from topics.storage.frame import HEADER, HEADER_LEN, lay_out
from topics.storage.layout import group_dir, log_path, ram_group_dir
from topics.supervisor.main import keep_ends
from topics.walshard.commit.shard_rings import ShardRings
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.place import Place
from topics.walshard.setup import Parts, set_up
from topics.walshard.shard import Shard

_SHOWN = (
    "head_seq",
    "earliest_seq",
    "evict_floor",
    "evict_reason",
    "evict_run_seq",
    "records",
    "live_bytes",
    "durable_seq",
    "last_write_ts",
)


def _assert_topic_shown(reader: ArenaReader, hosted: Hosted) -> None:
    topic, ring = hosted.topic, hosted.ring
    found = reader.look_up(topic.name)
    assert found is not None, f"{topic.name} is hosted and not shown"
    slot, view = found
    for field in _SHOWN:
        assert getattr(view, field) == getattr(topic, field), f"{field} of {topic.name} is not what the shard knows"
    assert (view.base_seq, view.ring_word, view.ring_capacity) == (ring.base_seq, ring.word, ring.capacity)
    assert (
        view.jobs_ready,
        view.jobs_in_flight,
        view.jobs_scheduled,
        view.jobs_dead_lettered,
    ) == hosted.job_counts(), topic.name
    assert reader.config(slot, view) == topic.config
    segments = reader.segments(slot, view)
    assert segments is not None
    assert list(segments) == list(hosted.index.segments)


class TestClock:
    __test__ = False

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000
        self.skew_ms = 0
        """Milliseconds that the wall clock is ahead."""

    def now_ms(self) -> int:
        return self.ms + self.skew_ms

    def monotonic_ms(self) -> int:
        return self.ms


def step(shard: Shard) -> bool:
    """Take one turn of everything, as the process does. False when there was nothing to do."""
    served = shard.serve()
    return shard.copy() or served


class Rig:
    """One shard, one frontend's ends of the rings. With more `shards`, `shard`, `cell` and `reader` are the first's."""

    def __init__(self, data_dir: str, fs: FileSystem | None = None, shards: int = 1, **settings: str) -> None:
        environ = {f"TOPICS_{name.upper()}": value for name, value in settings.items()}
        environ |= {"TOPICS_DATA_DIR": data_dir, "TOPICS_WAL_SHARDS": str(shards), "TOPICS_FRONTENDS": "1"}
        environ.setdefault("TOPICS_WAL_FILE_BYTES", str(1 << 20))
        self.settings: Settings = self.load(environ)
        self.identity = secrets.token_hex(8)
        self.clock = self.make_clock()
        self.fs = fs or FaultyFileSystem()
        self.replies: dict[int, Any] = {}
        self.notices: list[int] = []
        self.dealt: list[Dealt] = []
        self.next_id = 0
        self._shard_count = shards
        self._archivers = int(self.settings.archive_url is not None or self.settings.follow is not None)
        self.shared = SharedMemory.create(self.identity, shards, 1, 1 << 20, self._archivers)
        self._readers: dict[int, ArenaReader] = {}
        self.boot()

    def make_clock(self) -> TestClock:
        return TestClock()

    def load(self, environ: dict[str, str]) -> Settings:
        return load_settings(environ)

    def boot(self) -> None:
        """A (new) incarnation of the shard; the former one, if any, is simply never heard of again."""
        self.every = [self.recover(shard) for shard in reversed(range(self._shard_count))][::-1]

    def recover(self, number: int) -> Parts:
        """A (new) incarnation of one shard, to be put into `every`."""
        self.cell = self.shared.control.cell(Role.WALSHARD, number)
        self.outbox = ShardRings(self.shared, number)
        inline = Inline()
        place = Place(self.settings, self.shared, number, self.outbox, self.cell, self.clock, self.fs, inline, inline)
        parts = set_up(place)
        self.outbox.announce_generation()
        self.outbox.flush()
        return parts

    @property
    def parts(self) -> Parts:
        """The parts of the first shard."""
        return self.every[0]

    @property
    def shard(self) -> Shard:
        return self.every[0].shard

    @property
    def shards(self) -> list[Shard]:
        return [parts.shard for parts in self.every]

    def restart_service(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """All processes gone, new shared memory, RAM logs lost; the files stay, but for what `meanwhile` does."""
        keep_ends(self.fs, self.settings.data_dir, self.identity)
        self.shared.destroy()
        self._close_readers()
        meanwhile()
        self.shared = SharedMemory.create(self.identity, self._shard_count, 1, 1 << 20, self._archivers)
        self.boot()

    def close(self) -> None:
        self._close_readers()
        if isinstance(self.fs, FaultyFileSystem):
            # Lives that were killed have closed nothing; a process takes its descriptors with it.
            self.fs.bury()
        keep_ends(OsFileSystem(), self.settings.data_dir, self.identity)
        shm_names.unlink_all(self.identity)

    # -- the frontend's side

    def post_append(
        self,
        name: str,
        data: list[bytes],
        *,
        key: bytes = b"",
        create: bool = True,
        config: TopicConfig | None = None,
        if_head_seq: int | None = None,
        tag: bytes = b"",
        jobs: JobAttributes | None = None,
    ) -> int:
        self.next_id += 1
        laid_out = lay_out([(b"", tag, piece, b"") for piece in data])
        options = append_messages.AppendOptions(name, create, if_head_seq, key, config, jobs or [])
        records = laid_out.offset_len, laid_out.flags, laid_out.buffer
        message = append_messages.encode_append(self.next_id, options, *records)
        assert self.shared.rings[0][self.owner(name)].requests.push(*message)
        return self.next_id

    def post_call(self, call: Message, shard: int = 0) -> int:
        self.next_id += 1
        assert self.shared.rings[0][shard].requests.push(*messages.encode_call(self.next_id, call))
        return self.next_id

    def owner(self, name: str) -> int:
        """Return the shard that has this topic."""
        return owner_shard(name, self._shard_count)

    def take_replies(self) -> None:
        for pair in self.shared.rings[0]:
            self._take_replies(pair.replies)

    def _take_replies(self, ring: Ring) -> None:
        for message, position in ring.peek():
            kind, request_id, _ = messages.head(message)
            if request_id in self.replies:
                # As a frontend does: a second answer (the shard died before it freed the request) is dropped.
                # It must say the same.
                if kind == MessageKind.APPEND:
                    again = append_messages.decode_append_reply(message)
                    assert again.first_seq == self.replies[request_id].first_seq
                ring.consume(position)
                continue
            match kind:
                case MessageKind.APPEND:
                    self.replies[request_id] = append_messages.decode_append_reply(message)
                case MessageKind.CALL:
                    self.replies[request_id] = messages.decode(message)
                case MessageKind.ERROR:
                    self.replies[request_id] = messages.decode_error(message)
                case MessageKind.NOTIFY:
                    self.notices += messages.decode_notify(message)
                case MessageKind.DEALT:
                    self.dealt.append(messages.decode_dealt(message))
            ring.consume(position)

    def run(self) -> None:
        """Run until nothing is left to do."""
        while self.step():
            self.take_replies()
        self.take_replies()
        self.assert_shown()

    def assert_shown(self) -> None:
        """Check that all others see what a shard knows: nothing waits to be shown by chance."""
        for number, parts in enumerate(self.every):
            shard = parts.shard
            reader, every = self.reader_of(number), list(parts.catalog)
            for hosted in every:
                _assert_topic_shown(reader, hosted)
            board = RouterBoard(self.shared.router_boards[number])
            for feed in shard.routing.feeds.by_dest.values():
                for one in feed.routers:
                    known = (
                        one.router.id,
                        one.router.version,
                        feed.source_topic_id,
                        feed.source_seq,
                        one.forwarded_total,
                    )
                    assert board.find(one.router.id) == known, f"router {one.router.name} is not shown as it is"
            self._assert_counted(number, parts, every)

    def _assert_counted(self, number: int, parts: Parts, every: list[Hosted]) -> None:
        wal = parts.logs.wal
        known = {
            "topics": len(every),
            "records_live": sum(hosted.topic.records for hosted in every),
            "bytes_live": sum(hosted.topic.live_bytes for hosted in every),
            "sessions": len(parts.sessions.by_wid),
            "wal_file": wal.file_no,
            "wal_offset": wal.offset,
            "committed": wal.file_no << 32 | wal.offset,
            "wal_read_only": int(wal.read_only is not None),
        }
        cell = self.shared.control.cell(Role.WALSHARD, number)
        assert {field: cell.get(field) for field in known} == known

    def step(self) -> bool:
        """A turn of each shard; False: none had anything to do."""
        busy = [step(shard) for shard in self.shards]
        return any(busy)

    def append(self, name: str, *data: bytes, **options: Any) -> AppendReply:
        reply = self.answer(self.post_append(name, list(data), **options))
        assert isinstance(reply, AppendReply)
        return reply

    def call(self, call: Message, shard: int = 0) -> Any:
        """The last answer, when a change of class takes several turns."""
        reply = self.answer(self.post_call(call, shard))
        while isinstance(reply, PutTopicReply) and reply.rest is not None:
            reply = self.answer(self.post_call(reply.rest, shard))
        return reply

    def delete(self, call: DeleteRecords) -> int:
        """All of it, turn after turn, as a frontend has it done: how many there were."""
        deleted = 0
        rest: DeleteRecords | None = call
        while rest is not None:
            reply = self.call(rest, self.owner(call.name))
            deleted += reply.deleted
            rest = reply.rest
        return deleted

    def outcome(self, request_id: int) -> Any:
        """The answer, or the error."""
        self.run()
        return self.replies[request_id]

    def answer(self, request_id: int) -> Any:
        reply = self.outcome(request_id)
        if isinstance(reply, TopicsError):
            raise reply
        return reply

    # -- a reader's side

    @property
    def reader(self) -> ArenaReader:
        """The reader of the current arena."""
        return self.reader_of(0)

    def reader_of(self, shard: int) -> ArenaReader:
        """The same of another shard."""
        generation = self.shared.control.cell(Role.WALSHARD, shard).get("generation")
        reader = self._readers.get(shard)
        if reader is None or reader.generation != generation:
            if reader is not None:
                reader.close()
            reader = self._readers[shard] = ArenaReader(self.identity, shard, generation)
        return reader

    def _close_readers(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def exists(self, name: str) -> bool:
        return self.reader.look_up(name) is not None

    def view(self, name: str) -> TopicView:
        found = self.reader.look_up(name)
        assert found is not None, f"{name} does not exist"
        return found[1]

    def hosted(self, name: str) -> Hosted:
        """Return the first shard's view of a topic."""
        hosted = self.parts.catalog.find(name)
        assert hosted is not None, f"{name} does not exist"
        return hosted

    def read(self, name: str) -> list[tuple[int, bytes]]:
        """(seq, data) of all live records, through the arena and the files."""
        found = self.reader_of(self.owner(name)).look_up(name)
        assert found is not None, f"{name} does not exist"
        return self.read_ring(name, found[1])

    def read_ring(self, name: str, view: TopicView) -> list[tuple[int, bytes]]:
        """The same of those that no segment has."""
        first_seq = max(view.earliest_seq, view.base_seq)
        if first_seq > view.head_seq:
            return []
        shard = self.owner(name)
        locations = self.reader_of(shard).locations(view, first_seq, view.head_seq)
        assert locations is not None, name
        ram_directory = ram_group_dir(self.shared.ram_dir, shard)
        directory = group_dir(self.settings.data_dir, shard, self._shard_count)
        records, files = [], dict[int, bytes]()
        for at, (offset_len, file_flags) in enumerate(zip(locations.offset_len, locations.file_flags, strict=True)):
            if file_flags >> 32 & 34:
                continue
            file_key, offset = file_flags & FILE_BITS, offset_len & 0xFFFF_FFFF
            if file_key not in files:
                path = log_path(ram_directory if file_flags >> 32 & 1 else directory, file_flags & 0xFFFF_FFFF)
                files[file_key] = Path(path).read_bytes()
            frame = files[file_key][offset : offset + (offset_len >> 32)]
            _, _, _, topic_id, seq, _, node_len, tag_len, data_len = HEADER.unpack_from(frame)
            assert (topic_id, seq) == (view.topic_id, first_seq + at)
            start = HEADER_LEN + node_len + tag_len
            records.append((seq, frame[start : start + data_len].removeprefix(b'"data":')))
        return records
