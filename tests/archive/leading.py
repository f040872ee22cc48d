"""A service that ships into the archive of a model, step by step: real shards, the real compactor and archiver. It also
says what the service has, so that others can be compared with it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tests.archive.follower_rig import URL
from tests.archive.simulated import Note, SimulatedBucket
from tests.executors import Hanging
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig, TestClock
from topics.archive.archiver import Archiver, ArchiverPlan
from topics.archive.shipping import Shipper
from topics.core.config import TopicConfig
from topics.core.names import owner_shard
from topics.frontend.txn.coordinator import Stages
from topics.settings import Settings
from topics.shm.topic_messages import (
    DeleteRecords,
    DeleteTopic,
    PutTopic,
    StagePublish,
    StagesOver,
    TxnBegin,
    TxnEnd,
    TxnGet,
    TxnPending,
)
from topics.storage import layout, service_id
from topics.storage.archive_objects import Archive, LogEnd, Piece, decode
from topics.storage.borrowed import read_borrowed
from topics.storage.filesystem import OsFileSystem, boot_id
from topics.storage.frame import lay_out
from topics.storage.logfile import WalPosition, note_committed
from topics.storage.origin import Origin, RunningEnds, read_tail
from topics.storage.reshard import finish_swap, needs_reshard, reshard
from topics.storage.snapshot import plan_move

NAMES: Final = ("a", "b", "d")
TOGETHER: Final = ("e", "g")
"""Topics that are written to by commits over both of them alone. They lose nothing, so they always have the same."""
SINK: Final = "sink"
TAGS: Final = 3
"""The tag of a record is its number modulo this."""
SCALE: Final = 8
"""Logs, and what goes by their size, are so many times smaller than the smallest that a service may have."""
LOG_BYTES: Final = (1 << 20) // SCALE
Records = dict[str, dict[int, bytes]]
"""Live records of all topics: data by seq."""


class KilledError(BaseException):
    """The process ends here; no handler keeps it alive."""


def copied(live: Records) -> Records:
    return {topic: dict(records) for topic, records in live.items()}


class SmallLogs(Rig):
    """A service with small logs."""

    def load(self, environ: dict[str, str]) -> Settings:
        return msgspec.structs.replace(super().load(environ), wal_file_bytes=LOG_BYTES)


class Small(SmallLogs):
    """The same on a machine with this clock."""

    def __init__(self, data_dir: str, shards: int, clock: TestClock, **settings: Any) -> None:
        self._given = clock
        super().__init__(data_dir, None, shards, segment_max_events="5", **settings)

    def make_clock(self) -> TestClock:
        return self._given


def shown(rig: Rig, names: Sequence[str] = (*NAMES, *TOGETHER)) -> Records:
    """Return what a service shows of these topics."""
    compaction, found = Compaction(rig), {}
    for name in names:
        if rig.reader_of(rig.owner(name)).look_up(name) is not None:
            found[name] = dict(compaction.read(name))
    return found


@dataclass
class World:
    """The part of a model that its services share. `note` hears of each object that one of them has created, with what
    that service had when it took the moment that the object belongs to.
    """

    directory: str
    bucket: SimulatedBucket
    clock: TestClock
    note: Callable[[str, Records], None]
    backlog_bytes: int
    is_cold: bool
    keep_ms: int = 0
    """The history that archivers leave; 0: all."""
    written: int = 0
    """A number above those of all records so far, a multiple of TAGS."""


class _NotingEnds(RunningEnds):
    """The ends of a leader's logs. They note what it has when they are read."""

    def __init__(self, leader: Leader) -> None:
        super().__init__(leader.rig.shared.control.moment_ends)
        self._leader = leader

    def read(self) -> list[WalPosition] | None:
        self._leader.at_moment = copied(self._leader.live)
        return super().read()


class Leader:
    """A service with an archive, and a second archiver of a life that nobody knows is still there."""

    def __init__(self, world: World, number: int, data_dir: str, live: Records, shards: int) -> None:
        """`live` is what the directory has."""
        self.world = world
        self.url = f"http://leader-{number}:4000"
        self.answers = False
        """True if it can be asked by those who follow it."""
        self._cold_dir = f"{data_dir}-cold"
        self.rig = self._rig(data_dir, shards)
        self.id = service_id.keep_id(self.rig.fs, data_dir)
        self.fetches = Hanging()
        self.compaction = Compaction(self.rig, self.fetches)
        self.helpers = Hanging()
        self.bucket = SimulatedBucket(world.bucket)
        self.bucket.sent = self._sent
        self.archive = Archive(self.bucket)
        self.live = live
        self.began_with = copied(live)
        self.at_moment: Records = {}
        """Records that it had when its ends were read last."""
        self._copy = f"{data_dir}-copy"
        self._copied: tuple[Records, int] | None = None
        self._copied_at = -1
        """The number above those of all records when the directory was copied."""
        self.lives: list[int] = [0]
        """Numbers of records at the times when the directory went back, each the beginning of a life."""
        self.told: dict[tuple[int, ...], tuple[Records, int]] = {}
        """Records that it had when it told a follower these ends of its logs, and the number of the life."""
        self.archivers = [self._archiver(), self._archiver()]

    def _rig(self, data_dir: str, shards: int) -> Small:
        self.world.clock.ms += 1  # a start takes time, and ids of topics carry it
        cold = {"cold_dir": self._cold_dir, "hot_retain_segments": "1"} if self.world.is_cold else {}
        if cold:
            os.makedirs(self._cold_dir, exist_ok=True)
        return Small(
            data_dir,
            shards,
            self.world.clock,
            archive_url=URL,
            archive_backlog_bytes=str(self.world.backlog_bytes),
            segment_rewrite_dead_ratio="0.3",
            **cold,
        )

    @property
    def data_dir(self) -> str:
        return self.rig.settings.data_dir

    @property
    def shards(self) -> int:
        return self.rig.settings.wal_shards

    def close(self) -> None:
        self.rig.close()

    # -- writes

    def append(self, name: str, count: int, durability: Any = "disk", tag: int = 0, cap: int = 0) -> None:
        """Append records with consecutive numbers of this tag. Durability and cap are those of a topic that is new."""
        data = [b"%d" % (self.world.written + tag + TAGS * at) for at in range(count)]
        self.world.written += TAGS * count
        config = TopicConfig(durability=durability, cap_records=cap)
        reply = self.rig.append(name, *data, config=config, tag=b"t%d" % tag)
        self._has(name, reply.first_seq, data)

    def append_much(self, name: str) -> None:
        """Fill log files, so that some are removed after a cut."""
        padding = b'"' + b"x" * (LOG_BYTES // 5) + b'"'
        for _ in range(6):
            self._has(name, self.rig.append(name, padding).first_seq, [padding])

    def _has(self, name: str, first_seq: int, data: list[bytes]) -> None:
        records = self.live.setdefault(name, {})
        records.update(enumerate(data, first_seq))
        found = self.rig.reader_of(self.rig.owner(name)).look_up(name)
        assert found is not None, name
        earliest_seq = found[1].earliest_seq  # a cap takes the oldest
        for seq in [seq for seq in records if seq < earliest_seq]:
            del records[seq]

    def delete(self, name: str, share: float, tag: int | None = None) -> None:
        """Delete the first records of a topic, or those of them with a tag."""
        records = self.live.get(name)
        if not records:
            return
        before_seq = sorted(records)[int(share * (len(records) - 1))] + 1
        pattern = b"" if tag is None else b"t%d" % tag
        self.rig.delete(DeleteRecords(name, before_seq, None if tag is None else "eq", pattern))
        self.live[name] = {
            seq: data
            for seq, data in records.items()
            if seq >= before_seq or (tag is not None and not (data.isdigit() and int(data) % TAGS == tag))
        }

    def delete_topic(self, name: str) -> None:
        if name in self.live:
            self.rig.call(DeleteTopic(name, False), self.rig.owner(name))
            del self.live[name]

    def commit(self, meanwhile: Callable[[], None]) -> None:
        """Commit a batch over topics; `meanwhile` is called between any two steps of it."""
        self.finish_batches()
        for name in TOGETHER:
            if name not in self.live:
                self.rig.call(PutTopic(name, TopicConfig(durability="fsync"), False), self.rig.owner(name))
                self.live[name] = {}
        told = self.rig.call(TxnGet(SINK), self.rig.owner(SINK))
        batch = 0 if told.outcome == "none" else told.batch + 1
        number, self.world.written = self.world.written, self.world.written + TAGS
        files, records = _stages(self.rig), lay_out([(b"", b"", b"%d" % number, b"")])
        stages = [(files.make(name, f"txn-{number}", records), name) for name in TOGETHER]
        meanwhile()
        self.rig.call(TxnBegin(SINK, batch, stages), self.rig.owner(SINK))
        _publish(self.rig, batch, stages, self._published, meanwhile)

    def finish_batches(self) -> None:
        finish_batches(self.rig, self._published)

    def _published(self, name: str, first_seq: int) -> None:
        found = shown(self.rig, [name])[name]
        self.live[name] |= {seq: data for seq, data in found.items() if seq >= first_seq}

    # -- its processes and its machine

    def cut(self) -> None:
        self.compaction.cut()
        self.compaction.upkeep()

    def snapshot(self) -> None:
        """A cut, and little of the work that can wait: what is borrowed comes one by one."""
        self.compaction.cut()
        self.fetches.hangs = True
        self.compaction.compactor.upkeep()
        self.fetches.go_on()

    def crash(self, shard_dies: bool) -> None:
        if shard_dies:
            self.rig.boot()
        else:
            self.compaction.begin_again()

    def restart(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """The whole service is killed and starts again."""
        self.rig.restart_service(meanwhile)
        self._begin_again()

    def _begin_again(self) -> None:
        self.compaction = Compaction(self.rig, self.fetches)
        self.archivers = [self._archiver(), self._archiver()]

    def lose_power(self, share: float) -> None:
        """The machine fails. A share of what is not synced comes through."""
        wals = [parts.logs.wal for parts in self.rig.every]
        ends = [(wal.file_no, wal.synced, wal.offset) for wal in wals]

        def cut() -> None:
            for shard, (file_no, synced, end) in enumerate(ends):
                directory = layout.group_dir(self.data_dir, shard, self.shards)
                note_committed(self.rig.fs, directory, None)
                path = layout.log_path(directory, file_no)
                start = synced.offset if synced.file_no == file_no else end
                size_bytes = os.path.getsize(path)
                os.truncate(path, start + int((end - start) * share))
                os.truncate(path, size_bytes)

        self.restart(cut)
        self.live = shown(self.rig)
        self.lives.append(self.world.written)

    def reshard(self, shards: int) -> None:
        """The service starts again with another number of shards."""

        def owner(name: str) -> int:
            return owner_shard(name, shards)

        if shards == self.shards:
            return
        data_dir, fs = self.data_dir, OsFileSystem()
        self.rig.close()
        if needs_reshard(fs, data_dir, shards):
            finish_swap(fs, data_dir)
            plan = plan_move(fs, data_dir, owner)
            reshard(fs, data_dir, shards, boot_id(), owner, lambda _share: None, file_bytes=LOG_BYTES, move=plan)
        self.rig = self._rig(data_dir, shards)
        self._begin_again()

    def copy_directory(self) -> None:
        """Somebody copies the data directory while the service is stopped."""

        def copy() -> None:
            shutil.rmtree(self._copy, ignore_errors=True)
            shutil.copytree(self.data_dir, self._copy)

        self.restart(copy)
        self._copied, self._copied_at = (copied(self.live), self.shards), self.world.written

    @property
    def may_copy(self) -> bool:
        """True if a copy of the directory would be another one, and could be put back."""
        return not self.world.is_cold and self._copied_at < self.world.written

    @property
    def has_copy(self) -> bool:
        if self._copied is None or self.world.is_cold:
            return False  # the cold tier does not go back with it
        return read_borrowed(self.rig.fs, self._copy) is None  # what it borrows may be pruned by now

    def put_copy_in_its_place(self) -> None:
        """Somebody puts that copy back, so that the service goes on from there."""
        assert self._copied is not None
        data_dir, (live, shards) = self.data_dir, self._copied
        self.rig.close()
        shutil.rmtree(data_dir)
        shutil.copytree(self._copy, data_dir)
        self.rig = self._rig(data_dir, shards)
        self._begin_again()
        self.live = copied(live)
        self.lives.append(self.world.written)

    # -- the archive

    def _origin(self) -> Origin:
        return Origin(self.rig.fs, self.data_dir, _NotingEnds(self), self._cold_dir if self.world.is_cold else None)

    def shipper(self) -> Shipper:
        masks = service_id.epoch_masks(self.rig.fs, self.data_dir)
        return Shipper(self.archive, self._origin(), self.id, self.world.clock, epoch_masks=masks, leader_url=self.url)

    def _archiver(self) -> Archiver:
        page, wakes = self.rig.shared.control, self.rig.shared.shard_wakes
        times = ArchiverPlan(1000, self.world.keep_ms)
        return Archiver(self.archive, self.shipper, page, wakes, times, self.world.clock, self.helpers)

    def archiver_dies(self, which: int) -> None:
        self.archivers[which] = self._archiver()

    def step(self, which: int) -> None:
        """Have an archiver take a step. The service stands still, but for what `before` has been told."""
        self.world.clock.ms += 1000
        try:
            self.archivers[which].step()
        except KilledError:
            self.archiver_dies(which)
        for shard in self.rig.shards:
            shard.sync_in_background()

    def before(self, nth: int, meanwhile: Note) -> None:
        """Have something happen before the `nth` request of the archiver that is at work."""

        def happens() -> None:
            at_moment = self.at_moment
            meanwhile()
            self.at_moment = at_moment

        self.bucket.before(nth, happens)

    def _sent(self, name: str) -> Note:
        at_moment = self.at_moment
        return lambda: self.world.note(name, at_moment)

    @property
    def shipped(self) -> list[int]:
        return [self.rig.shared.control.shipped(shard) for shard in range(self.shards)]

    def archived(self) -> Records:
        """Return the live records that count as archived."""
        found: Records = {}
        for name, records in self.live.items():
            view = self.rig.reader_of(self.rig.owner(name)).look_up(name)
            archived_seq = 0 if view is None else view[1].archived_seq
            found[name] = {seq: data for seq, data in records.items() if seq <= archived_seq}
        return found

    def tell(self, ends: Sequence[LogEnd]) -> bytes | None:
        """Tell a follower what the archive may not have yet."""
        if not self.answers:
            raise OSError("the leader cannot be reached")
        found = read_tail(self._origin(), ends, self.world.clock.ms, self.url)
        if found is not None:
            piece, _ = decode(found, Piece, "tail")
            if piece.is_moment:
                words = tuple([end.position.word for end in piece.ends])
                self.told[words] = copied(self.live), len(self.lives)
        return found


def _stages(rig: Rig) -> Stages:
    return Stages(rig.settings.data_dir, rig.settings.stage_ttl_ms, lambda: 1 << 40)


def _publish(
    rig: Rig,
    batch: int,
    stages: Sequence[tuple[str, str]],
    published: Callable[[str, int], None],
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Drive a decided batch to its end, as `frontend/txn/coordinator.py` does."""
    for stage, name in stages:
        meanwhile()
        reply = rig.call(StagePublish(name, stage, SINK, batch), rig.owner(name))
        published(name, reply.first_seq)
    meanwhile()
    rig.call(TxnEnd(SINK, batch), rig.owner(SINK))
    meanwhile()
    _stages(rig).drop([stage for stage, _ in stages])
    for _, name in stages:
        rig.post_call(StagesOver(name, SINK, batch), rig.owner(name))
    rig.run()


def finish_batches(rig: Rig, published: Callable[[str, int], None] = lambda _name, _first_seq: None) -> None:
    """Finish the batches that are decided and not over, as frontends do when they start."""
    for shard in range(rig.settings.wal_shards):
        for _sink, batch, stages in rig.call(TxnPending(), shard).batches:
            _publish(rig, batch, stages, published)
