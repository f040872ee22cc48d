"""A frontend's delivery and a real shard, both on the test's own event loop, joined by the real rings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.contract.stream import Frame
from tests.walshard.rig import Rig
from topics.compactor.segment_building import SealAt, SegmentAppender
from topics.core.config import TopicConfig
from topics.core.keys import KeyRing
from topics.core.segment_list import COLD, SegmentInfo
from topics.frontend.live.channels import StreamConnection
from topics.frontend.live.stream import StreamSpec
from topics.frontend.reads.reading import TopicRef
from topics.frontend.reads.records import PageOptions
from topics.frontend.wiring import Process, build_app
from topics.shm.append_messages import AppendOptions, AppendReply
from topics.shm.topic_messages import Checkpoint, CheckpointReply, DeleteTopic, PutTopic, TopicCheckpoint
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import lay_out
from topics.storage.segment_store import LocalStore

DEADLINE_S = 60.0
COLD_TIMEOUT_MS = 10_000
"""Half of the deadline: only a tier that hangs lets it pass."""
OPTIONS = PageOptions(limit=256, max_batch_bytes=1 << 20)


class Wire:
    """The client's end of a stream: keeps what is written, and stops being writable when the test says so."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.buffered_bytes = 0
        self.ended = False
        self.aborted = False
        self.on_writable: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None
        self.on_write: Callable[[], None] = lambda: None
        self._open = True

    @property
    def progress_bytes(self) -> int:
        return -self.buffered_bytes

    @property
    def writable(self) -> bool:
        return self._open and not self.ended

    def write(self, data: bytes) -> bool:
        assert not self.ended, "written to after its end"
        self.writes.append(data)
        if not self._open:
            self.buffered_bytes += len(data)
        self.on_write()
        return self._open

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = self.aborted = True

    def stop_reading(self, buffered_bytes: int = 0) -> None:
        self._open = False
        self.buffered_bytes = buffered_bytes

    def read_on(self) -> None:
        self._open = True
        self.buffered_bytes = 0
        if self.on_writable is not None:
            self.on_writable()

    def vanish(self) -> None:
        self.ended = True
        if self.on_close is not None:
            self.on_close()

    def frames(self) -> list[Frame]:
        """All that came, without the opening and the heartbeats."""
        data = b"".join(self.writes)
        assert data.startswith(b"retry: 2000\n\n")
        assert data.endswith(b"\n\n")
        frames = [Frame(raw) for raw in data.split(b"\n\n")[1:-1]]
        return [frame for frame in frames if not frame.raw.startswith(b": hb ")]

    def kinds(self) -> list[str]:
        return [frame.event for frame in self.frames()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The data of all frames of one kind."""
        return [frame.json for frame in self.frames() if frame.event == kind]

    def seqs(self, topic: str = "t") -> list[int]:
        """Return the seqs of all delivered records."""
        return [r["$seq"] for frame in self.of("record") if frame["topic"] == topic for r in frame["records"]]


class ColdStore(LocalStore):
    """A cold directory whose reads do first what the test says: wait, take long, fail."""

    def __init__(self, root: str) -> None:
        super().__init__(OsFileSystem(), root)
        self.reads = 0
        self.before_read: Callable[[], object] = lambda: None

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        self.reads += 1
        self.before_read()
        return super().read_range(name, offset, length)


class Live:
    """One shard, one frontend's delivery. The shard works whenever the loop turns, unless `shard_up` is false."""

    def __init__(self, data_dir: str, cold_timeout_ms: int = COLD_TIMEOUT_MS) -> None:
        self.rig = rig = Rig(data_dir)
        self.clock = rig.clock
        self.store = ColdStore(str(Path(data_dir, "cold")))
        settings = msgspec.structs.replace(rig.settings, cold_read_timeout_ms=cold_timeout_ms)
        process = Process(rig.shared, 0, 1, settings, rig.clock, rig.clock)
        self.frontend = frontend = build_app(process, KeyRing(()), self.store, lambda: 0)
        self.cell, self.arenas, self.gateway = process.cell, frontend.arenas, frontend.gateway
        self.reader, self.hub = frontend.reader, frontend.hub
        assert frontend.cold is not None
        self.tier = frontend.cold
        self.gateway.start()
        self.shard_up = True
        self._pump = asyncio.create_task(self._run_shard())

    async def _run_shard(self) -> None:
        while True:
            if self.shard_up:
                self.rig.step()
                self.rig.shard.sync_in_background()
            await asyncio.sleep(0)

    def close(self) -> None:
        self.hub.drain()
        self._pump.cancel()
        self.gateway.close()
        self.arenas.close()
        self.rig.close()

    def restart_shard(self) -> None:
        """Its next incarnation, with a new arena and no knowledge of watches."""
        self.rig.boot()

    async def put(self, name: str, **config: Any) -> None:
        await self.gateway.call(0, PutTopic(name, TopicConfig(**config), False))

    async def delete(self, name: str) -> None:
        await self.gateway.call(0, DeleteTopic(name, False))

    def submit(self, name: str, count: int = 1, node: bytes = b"", data: bytes = b'"x"') -> asyncio.Future[AppendReply]:
        records = lay_out([(node, b"", data, b"")] * count)
        return self.gateway.submit_append(0, AppendOptions(name), records)

    async def write(self, name: str, count: int = 1, node: bytes = b"", data: bytes = b'"x"') -> int:
        """The topic's head after it."""
        return (await self.submit(name, count, node, data)).head_seq

    async def checkpoint(self, name: str, records_max: int) -> None:
        """All of a new topic's records into sealed segments, as the compactor does it."""
        ref = self.reader.get(name)
        entries = ref.arena.entries(ref.view, 1, ref.view.head_seq)
        assert entries is not None
        data_dir, seal_at = self.rig.settings.data_dir, SealAt(records_max, 1 << 20, 0)
        appender = SegmentAppender(OsFileSystem(), data_dir, seal_at, set())
        segments = appender.append(ref.view.topic_id, None, entries, self._log_bytes, self.clock.now_ms())
        await self._mark(ref, segments)

    async def relocate(self, name: str) -> None:
        """The data of all its segments into the cold directory."""
        ref = self.reader.get(name)
        directory = layout.topic_dir(self.rig.settings.data_dir, ref.view.topic_id)
        segments = ref.arena.segments(ref.slot, ref.view)
        assert segments
        paths = [Path(layout.segment_data_path(directory, info.first_seq, info.version)) for info in segments]
        for info, path in zip(segments, paths, strict=True):
            self.store.put(layout.object_name(ref.view.topic_id, info.first_seq, info.version), [path.read_bytes()])
        await self._mark(ref, [msgspec.structs.replace(info, flags=info.flags | COLD) for info in segments])
        for path in paths:
            path.unlink()

    async def _mark(self, ref: TopicRef, segments: list[SegmentInfo]) -> None:
        checkpoint = TopicCheckpoint(ref.view.topic_id, segments[-1].last_seq, segments)
        reply = await self.gateway.call(0, Checkpoint([checkpoint]))
        assert reply == CheckpointReply([], [])

    def _log_bytes(self, file_no: int, end: int) -> bytes:
        content = Path(layout.log_path(layout.group_dir(self.rig.settings.data_dir, 0, 1), file_no)).read_bytes()
        assert len(content) >= end
        return content

    def follow(
        self,
        starts: Mapping[str, int],
        options: PageOptions = OPTIONS,
        strong: bool = False,
        heartbeat_ms: int = 15_000,
        pace_ms: int = 0,
    ) -> tuple[Wire, StreamConnection]:
        """Opens a stream on topics that exist."""
        ids = tuple(self.reader.get(name).view.topic_id for name in starts)
        spec = self.hub.share(StreamSpec(tuple(starts), ids, options, strong))
        wire = Wire()
        return wire, self.hub.open(wire, spec.start(dict(starts)), heartbeat_ms, pace_ms)


async def until(condition: Callable[[], object]) -> None:
    """Polls; the deadline is that of the whole test."""
    while not condition():
        await asyncio.sleep(0.0005)


async def delivered(wire: Wire, seqs: list[int], topic: str = "t") -> None:
    """Polls until the stream has brought exactly these."""
    await until(lambda: wire.seqs(topic) == seqs)


async def turns(count: int = 20) -> None:
    """Lets everything that is ready happen."""
    for _ in range(count):
        await asyncio.sleep(0)


def on_loop(tmp_path: Path, test: Callable[[Live], Awaitable[None]], *, cold_timeout_ms: int = COLD_TIMEOUT_MS) -> None:
    """Runs a test; an exception that reaches the event loop fails it."""
    errors: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        live = Live(str(tmp_path), cold_timeout_ms)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(live)
        finally:
            live.close()

    asyncio.run(main())
    assert not errors, errors
