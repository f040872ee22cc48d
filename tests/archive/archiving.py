"""Archives against a model: real shards, the real compactor, archiver and restore, and a simulated bucket.

The model holds it to this: a restore of any moment has exactly the records that the service had then: none is
missing, none that was deleted is back. No record that counts as archived is missing from the last moment. Whatever
fails, or is killed, the archive is whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.archive.follower_rig import LEADER_URL, FollowerRig
from tests.archive.simulated import SimulatedBucket, Trouble
from tests.executors import Hanging, Inline
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.archive import archiver, base_files, directory_copy, follow_main, restoring, shipping
from topics.archive.archiver import Archiver, ArchiverPlan
from topics.archive.inspection import check, prune
from topics.archive.restoring import Restore, WantedMoment, plan
from topics.archive.shipping import Shipper
from topics.core.config import TopicConfig
from topics.settings import Settings
from topics.shm.topic_messages import DeleteRecords, DeleteTopic
from topics.storage import archive_tail, service_id
from topics.storage.archive_objects import Archive, LogEnd, Piece, decode, piece_name
from topics.storage.archive_tail import read_tail
from topics.storage.filesystem import OsFileSystem
from topics.storage.origin import Origin, RunningEnds
from topics.storage.verify import verify

NAMES = ("a", "b", "d")
"""Topics of both shards."""
SHARDS = 2
SCALE: Final = 8
"""Logs, and what goes by their size, are so many times smaller than the smallest that a service may have."""
STEPS: Final = 30
"""Steps of a schedule."""
LOG_BYTES = (1 << 20) // SCALE
BASE_PIECES = 4
LOST_SEQS_MAX = 200
"""The gap behind a restored topic. Each of its seqs takes an entry, which took most of the time of a schedule."""
TROUBLES: st.SearchStrategy[list[Trouble]] = st.lists(
    st.sampled_from(["refused", "lost_answer", "cut_short", "old_list"]), min_size=1, max_size=3
)
TALLY: Counter[str] = Counter()
"""Counts of this process; "schedules" are those that ended as they should."""
Records = dict[str, dict[int, bytes]]
"""Live records of all topics: data by seq."""


class _Small(Rig):
    """A service with small logs."""

    def load(self, environ: dict[str, str]) -> Settings:
        return msgspec.structs.replace(super().load(environ), wal_file_bytes=LOG_BYTES)


class _SmallFollower(_Small, FollowerRig): ...


class Archiving(RuleBasedStateMachine):
    """A service of two shards whose archive is a simulated bucket."""

    keep_ms = 0
    """The history that its archivers leave; 0: all."""

    @initialize(backlog=st.sampled_from([0, 1 << 30]), answers=st.booleans())
    def begin(self, backlog: int, answers: bool) -> None:
        self.directory = tempfile.mkdtemp(prefix="topics-sim-", dir="/dev/shm")
        self.rig = _Small(
            os.path.join(self.directory, "data"),
            shards=SHARDS,
            archive_url="file:///nowhere",
            archive_backlog_bytes=str(backlog),
            segment_max_events="5",
            segment_rewrite_dead_ratio="0.3",
        )
        self.compaction = Compaction(self.rig)
        self.helpers = Hanging()
        self.bucket = SimulatedBucket()
        self.bucket.created = self._note_created
        self.archive = Archive(self.bucket)
        self.live: Records = {}
        self.copied: Records | None = None
        self.written = 0
        self.moments: dict[tuple[int, int], Records] = {}
        """Records of each moment in the archive, by generation and piece."""
        self.history: dict[tuple[int, int], Records] = {}
        """The same, with those that were pruned."""
        self.live_at: dict[tuple[int, int], Records] = {}
        """Records that the service had when a piece was put, by generation and piece."""
        self.follower: FollowerRig | None = None
        self.archived_ends: dict[tuple[int, int], tuple[int, ...]] = {}
        self.leader_answers = answers
        self.told: dict[tuple[int, ...], Records] = {}
        """Records that the leader had when it told a follower these ends of its logs."""
        self.told_in: dict[tuple[int, ...], int] = {}
        """The number of the life in which it did so."""
        self.lives: list[int] = [0]
        """Counts of records at the times when the directory went back, each the beginning of a life."""
        self.is_taken_over = False
        self.restores = 0
        self.restored: dict[tuple[int, int], set[str]] = {}
        """Names of the objects that were there when a moment was restored."""
        self.archivers = [self._archiver(), self._archiver()]
        """The second one belongs to a life that nobody knows is still there."""

    def _origin(self) -> Origin:
        ends = RunningEnds(self.rig.shared.control.settled_ends)
        return Origin(self.rig.fs, self.rig.settings.data_dir, ends, _no_cold_tier)

    def shipper(self) -> Shipper:
        fs, data_dir = self.rig.fs, self.rig.settings.data_dir
        origin = self._origin()
        own_id = service_id.keep_id(fs, data_dir)
        return Shipper(self.archive, origin, own_id, self.rig.clock, leader_url=LEADER_URL)

    def _archiver(self) -> Archiver:
        page, wakes = self.rig.shared.control, self.rig.shared.shard_wakes
        times = ArchiverPlan(1000, self.keep_ms)
        return Archiver(self.archive, self.shipper, page, wakes, times, self.rig.clock, self.helpers)

    # -- the service

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 8), durability=st.sampled_from(["disk", "fsync"]))
    def append(self, name: str, count: int, durability: Any) -> None:
        data = [b"%d" % (self.written + at) for at in range(count)]
        self.written += count
        reply = self.rig.append(name, *data, config=TopicConfig(durability=durability))
        self.live.setdefault(name, {}).update(enumerate(data, reply.first_seq))

    @rule(name=st.sampled_from(NAMES))
    def append_much(self, name: str) -> None:
        """Fill log files, so that some are removed after a cut."""
        padding = b'"' + b"x" * (LOG_BYTES // 5) + b'"'
        for _ in range(6):
            reply = self.rig.append(name, padding)
            self.live.setdefault(name, {})[reply.first_seq] = padding

    @rule(name=st.sampled_from(NAMES), share=st.floats(0, 1))
    def delete(self, name: str, share: float) -> None:
        records = self.live.get(name)
        if not records:
            return
        before_seq = sorted(records)[int(share * (len(records) - 1))] + 1
        self.rig.delete(DeleteRecords(name, before_seq, None, b""))
        self.live[name] = {seq: data for seq, data in records.items() if seq >= before_seq}

    @rule(name=st.sampled_from(NAMES))
    def delete_topic(self, name: str) -> None:
        if name in self.live:
            self.rig.call(DeleteTopic(name, False), self.rig.owner(name))
            del self.live[name]

    @rule()
    def cut(self) -> None:
        self.compaction.cut()
        self.compaction.upkeep()

    @rule(shard_dies=st.booleans())
    def crash(self, shard_dies: bool) -> None:
        if shard_dies:
            self.rig.boot()
        else:
            self.compaction.begin_again()

    @rule()
    def restart(self) -> None:
        """The whole service is killed and starts again."""
        self._restart(lambda: None)

    @rule()
    def copy_directory(self) -> None:
        """Somebody copies the data directory of the service while it is stopped."""

        def copy() -> None:
            shutil.rmtree(self._copy, ignore_errors=True)
            shutil.copytree(self.rig.settings.data_dir, self._copy)

        self._restart(copy)
        self.copied = _copied(self.live)

    @precondition(lambda self: self.copied is not None)
    @rule()
    def put_copy_in_its_place(self) -> None:
        """Somebody puts that copy back, so that the service goes on from there."""

        def put() -> None:
            shutil.rmtree(self.rig.settings.data_dir)
            shutil.copytree(self._copy, self.rig.settings.data_dir)

        self._restart(put)
        self.live = _copied(self.copied or {})
        self.lives.append(self.written)

    def _restart(self, meanwhile: Callable[[], None]) -> None:
        self.rig.restart_service(meanwhile)
        self.compaction = Compaction(self.rig)
        self.archivers = [self._archiver(), self._archiver()]

    @property
    def _copy(self) -> str:
        return os.path.join(self.directory, "copy")

    # -- the archive

    @rule(which=st.sampled_from([0, 0, 0, 1]))
    def ship(self, which: int) -> None:
        self._step(which)

    @rule(which=st.sampled_from([0, 1]))
    def archiver_dies(self, which: int) -> None:
        self.archivers[which] = self._archiver()

    @rule(troubles=TROUBLES, which=st.sampled_from([0, 0, 1]))
    def ship_in_trouble(self, troubles: list[Trouble], which: int) -> None:
        self.bucket.troubles = troubles
        self._step(which)
        self.bucket.troubles = []

    @rule(away=st.booleans())
    def partition(self, away: bool) -> None:
        self.bucket.is_away = away

    @rule(hangs=st.booleans())
    def copying(self, hangs: bool) -> None:
        """Files of bases take long to copy, or all that wait are copied now."""
        self.helpers.hangs = hangs
        if not hangs:
            self.helpers.go_on()

    @rule(name=st.sampled_from(NAMES), cuts=st.integers(1, 3))
    def long_outage(self, name: str, cuts: int) -> None:
        """The bucket is away while log files fill up and are removed, as far as the archive lets them."""
        self.bucket.is_away = True
        for _ in range(cuts):
            self.append_much(name)
            self._step(0)
            self.cut()
        self.bucket.is_away = False

    @rule(name=st.sampled_from(NAMES), cuts=st.booleans())
    def ship_beside_writers(self, name: str, cuts: bool) -> None:
        """Records are deleted and written while the files of a base are copied."""

        def meanwhile() -> None:
            self.bucket.before_file = None
            self.delete(name, 0.5)
            self.append(name, 3, "disk")
            if cuts:
                self.cut()

        self.bucket.before_file = meanwhile
        self._step(0)
        self.bucket.before_file = None

    @precondition(lambda self: len(self.moments) > 3)
    @rule(share=st.floats(0, 1), troubles=st.just([]) | TROUBLES)
    def prune(self, share: float, troubles: list[Trouble]) -> None:
        if self.bucket.is_away:
            return
        times_ms = sorted(self._piece(*moment).taken_ms for moment in self.moments)
        self.bucket.troubles = list(troubles)
        try:
            prune(self.archive, times_ms[int(share * (len(times_ms) - 1))])
        except OSError:
            assert troubles
        self.bucket.troubles = []
        kept = {moment for moment in self.moments if piece_name(*moment) in self.bucket.objects}
        assert max(self.moments) in kept
        self.moments = {moment: records for moment, records in self.moments.items() if moment in kept}

    def _step(self, which: int) -> None:
        """Have an archiver take a step. The service stands still, but for what `before_file` does before that."""
        self.rig.clock.ms += 1000
        self.archivers[which].step()
        for shard in self.rig.shards:
            shard.sync_in_background()

    def _note_created(self, name: str) -> None:
        """Note what the service has when a piece is put: it stands still from the moment to the put."""
        folder, _, number = name.partition("/")
        if not folder.endswith((".pieces", ".bases")):
            return
        moment = int(folder[1:].partition(".")[0]), int(number)
        piece = self._piece(*moment)
        if folder.endswith(".pieces"):
            self.live_at[moment] = _copied(self.live)
        if self.is_taken_over and folder.endswith(".bases"):
            return  # of a moment from before; its archiver counts on nothing new
        if piece.is_moment or folder.endswith(".bases"):
            assert not self.is_taken_over
            self.archived_ends[moment] = tuple([end.position.word for end in piece.ends])
            self.moments[moment] = self.history[moment] = self.live_at[moment]

    def _piece(self, generation: int, number: int) -> Piece:
        name = piece_name(generation, number)
        return decode(self.bucket.objects[name], Piece, name)[0]

    # -- a service that follows

    @precondition(lambda self: not self.is_taken_over)
    @rule(troubles=st.just([]) | TROUBLES)
    def follow(self, troubles: list[Trouble]) -> None:
        if self.follower is None:
            self.follower = self.follower_in(os.path.join(self.directory, "follower"))
        self.rig.clock.ms += 1000
        self.bucket.troubles = list(troubles)
        self.follower.advance()
        self.bucket.troubles = []
        shown = self.follower.shown
        if shown is not None:
            TALLY["moments of a follower"] += 1
            self.follower.assert_shown()
            _compare(self.follower, self._expected(shown, self.follower.shown_words))

    def follower_in(self, data_dir: str) -> FollowerRig:
        return _SmallFollower(data_dir, SHARDS, self.archive, self.rig.clock, self._tell)

    def _tell(self, ends: Sequence[LogEnd]) -> bytes | None:
        """Tell a follower what the archive may not have yet."""
        if not self.leader_answers:
            raise OSError("the leader cannot be reached")
        found = read_tail(self._origin(), ends, self.rig.clock.ms, LEADER_URL)
        if found is not None:
            piece, _ = decode(found, Piece, "tail")
            if piece.is_moment:
                words = tuple([end.position.word for end in piece.ends])
                self.told[words], self.told_in[words] = _copied(self.live), len(self.lives)
        return found

    def _expected(self, shown: tuple[int, int], words: tuple[int, ...]) -> Records:
        archived = self.archived_ends.get(shown)
        return self.history[shown] if archived == words else self.told[words]

    @rule(answers=st.booleans())
    def partition_from_leader(self, answers: bool) -> None:
        self.leader_answers = answers

    @precondition(lambda self: self.follower is not None and not self.is_taken_over)
    @rule(shard=st.sampled_from([None, 0, 1]))
    def follower_dies(self, shard: int | None) -> None:
        assert self.follower is not None
        if shard is None:
            self.follower.follower_dies()
        else:
            self.follower.shard_dies(shard)

    @precondition(lambda self: self.follower is not None and self.follower.shown and not self.bucket.is_away)
    @rule(troubles=st.just([]) | TROUBLES)
    def take_over(self, troubles: list[Trouble]) -> None:
        """The follower is promoted. Whatever the former leader has written since its last moment is its own."""
        if self.is_taken_over:
            return
        assert self.follower is not None
        for _ in range(20):
            self.follower.follower.promote.set()
            self.bucket.troubles = troubles = troubles[1:]
            self.follow(troubles)
            if self.follower.leads:
                break
        else:
            raise AssertionError("it does not take over")
        self.is_taken_over = True
        TALLY["takeovers"] += 1
        expected = self._expected(max(self.history), self.follower.noted_words)
        if expected is not self.history[max(self.history)]:
            later = self.lives[self.told_in[self.follower.noted_words] :]
            last = [data for records in self.history[max(self.history)].values() for data in records.values()]
            for data in last if later else ():
                assert not data.isdigit() or int(data) < later[0], "was archived after the leader lost what it had told"
        self.follower.end_promotion()
        self.compare_promoted(self.follower.settings.data_dir, expected)

    def compare_promoted(self, data_dir: str, expected: Records) -> None:
        assert verify(data_dir, lambda _done, _total: None).damage == []
        promoted = _Small(data_dir, shards=SHARDS, segment_max_events="5")
        try:
            _compare(promoted, expected)
            for name, records in expected.items():
                assert promoted.append(name, b'"new"').first_seq > max(records, default=0) + 100
        finally:
            promoted.close()

    # -- what must hold

    @invariant()
    def archived_is_in_the_last_moment(self) -> None:
        last = self.moments[max(self.moments)] if getattr(self, "moments", None) else {}
        for name in getattr(self, "live", ()):
            found = self.rig.reader_of(self.rig.owner(name)).look_up(name)
            archived_seq = 0 if found is None else found[1].archived_seq
            for seq in self.live[name]:
                if seq <= archived_seq:
                    assert seq in last[name], f"{name} {seq} counts as archived"

    @precondition(lambda self: self.moments and self.restores < 3 and not self.bucket.is_away)
    @rule(share=st.floats(0, 1))
    def restore(self, share: float) -> None:
        moments = sorted(self.moments)
        self._restore(moments[int(share * (len(moments) - 1))])

    def _restore(self, moment: tuple[int, int]) -> None:
        """Restore the moment as if the archive ended there, and compare."""
        generation, number = moment
        bases = [base for base in self.archive.bases(generation) if base <= number]
        if not bases:
            return  # its base was pruned
        seen = SimulatedBucket()
        seen.objects = {
            name: body for name, body in self.bucket.objects.items() if _is_before(name, generation, number)
        }
        if self.restored.get(moment) == seen.objects.keys():
            return  # objects never change
        self.restored[moment] = set(seen.objects)
        self.restores += 1
        TALLY["restores"] += 1
        archive = Archive(seen)
        assert check(archive, lambda _done, _total: None) == []
        data_dir = os.path.join(self.directory, f"restored-{self.restores}")
        found = plan(archive, WantedMoment())
        assert (found.generation.number, found.moment.number) == moment
        Restore(archive, found, OsFileSystem(), data_dir, lambda _done, _total: None).run(self.rig.clock)
        assert verify(data_dir, lambda _done, _total: None).damage == []
        other = _Small(data_dir, shards=SHARDS, segment_max_events="5")
        try:
            expected = self.moments[moment]
            _compare(other, expected)
            for name, records in expected.items():
                assert other.append(name, b'"new"').first_seq > max(records, default=0)
        finally:
            other.close()
            shutil.rmtree(data_dir)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.bucket.is_away = False
            self.helpers.go_on()
            if self.is_taken_over:
                self.append("a", 1, "disk")  # else the former leader need not notice
            for _ in range(20):  # it may have failed often, and pause for 10 s
                self._step(0)
                if self.is_taken_over or (self.moments and self.moments[max(self.moments)] == self.live):
                    break
            for _ in range(3):
                self._step(0)
            assert self.moments
            if self.is_taken_over:
                assert self.rig.shared.control.is_taken_over
                TALLY["schedules"] += 1
                return
            assert self.moments[max(self.moments)] == self.live, "all is shipped once the bucket is back"
            self._restore(max(self.moments))
            self._restore(min(self.moments))
            between = sorted(self.moments)[1:-1]
            if between:  # a cut at random: what was written decides which one
                self._restore(between[self.written * 7919 % len(between)])
            if self.follower is not None:
                for _ in range(12):
                    self.follow([])
                reached = self.follower.shown, self.follower.replica.note
                assert reached[0] == max(self.moments), f"a follower gets to {max(self.moments)}: {reached}"
                self.take_over([])
            TALLY["schedules"] += 1
        finally:
            self.rig.close()
            if self.follower is not None and not self.is_taken_over:
                self.follower.close()
            shutil.rmtree(self.directory)


def _compare(rig: Rig, expected: Records) -> None:
    """Compare what a service shows with what it should have."""
    compaction = Compaction(rig)
    for name in NAMES:
        exists = rig.reader_of(rig.owner(name)).look_up(name) is not None
        assert exists == (name in expected), name
        if exists:
            assert dict(compaction.read(name)) == expected[name], name


def _copied(live: Records) -> Records:
    return {topic: dict(records) for topic, records in live.items()}


def _no_cold_tier() -> Any:
    raise AssertionError("nothing is cold")


def _is_before(name: str, generation: int, number: int) -> bool:
    """True for objects of an archive that ends with this piece."""
    folder, _, own = name.partition("/")
    if folder == "generations":
        return int(own) <= generation
    of = int(folder[1:].partition(".")[0])
    if of == generation and folder.endswith((".pieces", ".bases")):
        return int(own) <= number
    return of <= generation


@contextmanager
def small_world() -> Iterator[None]:
    """Have everything happen soon, and cheaply. Threads would only make the order of requests a matter of chance."""
    with ExitStack() as patches:
        for module, name, value in (
            (archiver, "BASE_PIECES", BASE_PIECES),
            (archiver, "PIECE_BYTES", shipping.PIECE_BYTES // SCALE),
            (shipping, "PIECE_BYTES", shipping.PIECE_BYTES // SCALE),
            (archive_tail, "TAIL_BYTES", archive_tail.TAIL_BYTES // SCALE),
            (follow_main, "LOOK_MS", 2000),
            (directory_copy, "LOST_SEQS_MAX", LOST_SEQS_MAX),
            (base_files, "ThreadPoolExecutor", _inline),
            (restoring, "ThreadPoolExecutor", _inline),
            (os, "posix_fallocate", _grow),
        ):
            patches.enter_context(patch.object(module, name, value))
        yield


def _inline(_threads: int, _name: str) -> Inline:
    return Inline()


def _grow(fd: int, offset: int, length: int) -> None:
    """Make a file that long without a page of memory for each part of it: nothing here runs out of room."""
    os.ftruncate(fd, max(os.fstat(fd).st_size, offset + length))
