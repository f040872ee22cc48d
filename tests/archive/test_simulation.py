"""Archives against a model: real shards, the real compactor, archiver and restore, and a simulated bucket.

What must hold: a restore of any moment in the archive has exactly the records that the service had then: none is
missing, none that was deleted is back. No record that counts as archived is missing from the last moment. Whatever
fails, or is killed, the archive is whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.archive.follower_rig import LEADER_URL, FollowerRig
from tests.archive.simulated import SimulatedBucket, Trouble
from tests.executors import Hanging
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.archive import archiver, base_files, follow_main
from topics.archive.archiver import Archiver, ArchiverPlan
from topics.archive.inspection import check, prune
from topics.archive.restoring import Restore, WantedMoment, plan
from topics.archive.shipping import Shipper
from topics.archive.taking_over import take_over
from topics.core.config import TopicConfig
from topics.shm.topic_messages import DeleteRecords, DeleteTopic
from topics.storage import service_id
from topics.storage.archive_objects import Archive, LogEnd, Piece, decode, piece_name
from topics.storage.archive_tail import read_tail
from topics.storage.filesystem import OsFileSystem
from topics.storage.origin import Origin, RunningEnds
from topics.storage.verify import verify

NAMES = ("a", "b", "c")
LOG_BYTES = 1 << 20
SHARDS = 2
BASE_PIECES = 4
STEPS = int(os.environ.get("TOPICS_ARCHIVE_STEPS", "30"))
EXAMPLES = int(os.environ.get("TOPICS_ARCHIVE_EXAMPLES", "10"))
TROUBLES: st.SearchStrategy[list[Trouble]] = st.lists(
    st.sampled_from(["refused", "lost_answer", "cut_short", "old_list"]), min_size=1, max_size=3
)
Records = dict[str, dict[int, bytes]]
"""Live records of all topics: data by seq."""


class Archiving(RuleBasedStateMachine):
    """A service of two shards whose archive is a simulated bucket."""

    keep_ms = 0
    """The history that its archivers leave; 0: all."""

    @initialize(backlog=st.sampled_from([0, 1 << 30]), answers=st.booleans())
    def begin(self, backlog: int, answers: bool) -> None:
        self.directory = tempfile.mkdtemp(prefix="topics-sim-", dir="/dev/shm")
        self.rig = Rig(
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
        self.is_taken_over = False
        self.compared = 0
        self.restores = 0
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
            data_dir = os.path.join(self.directory, "follower")
            self.follower = FollowerRig(data_dir, SHARDS, self.archive, self.rig.clock, self._tell)
        self.rig.clock.ms += 1000
        self.bucket.troubles = list(troubles)
        self.follower.advance()
        self.bucket.troubles = []
        shown = self.follower.shown
        if shown is not None:
            self.compared += 1
            self.follower.assert_shown()
            _compare(self.follower, self._expected(shown, self.follower.shown_words))

    def _tell(self, ends: Sequence[LogEnd]) -> bytes | None:
        """Tell a follower what the archive may not have yet."""
        if not self.leader_answers:
            raise OSError("the leader cannot be reached")
        found = read_tail(self._origin(), ends, self.rig.clock.ms, LEADER_URL)
        if found is not None:
            piece, _ = decode(found, Piece, "tail")
            if piece.is_moment:
                self.told[tuple([end.position.word for end in piece.ends])] = _copied(self.live)
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
        expected = self._expected(max(self.history), self.follower.noted_words)
        self.follower.end_promotion()
        data_dir = self.follower.settings.data_dir
        assert verify(data_dir, lambda _done, _total: None).damage == []
        promoted = Rig(data_dir, shards=SHARDS, segment_max_events="5")
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
        self.restores += 1
        seen = SimulatedBucket()
        seen.objects = {
            name: body for name, body in self.bucket.objects.items() if _is_before(name, generation, number)
        }
        archive = Archive(seen)
        assert check(archive, lambda _done, _total: None) == []
        data_dir = os.path.join(self.directory, f"restored-{self.restores}")
        found = plan(archive, WantedMoment())
        assert (found.generation.number, found.moment.number) == moment
        Restore(archive, found, OsFileSystem(), data_dir, lambda _done, _total: None).run(self.rig.clock)
        assert verify(data_dir, lambda _done, _total: None).damage == []
        other = Rig(data_dir, shards=SHARDS, segment_max_events="5")
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
                return
            assert self.moments[max(self.moments)] == self.live, "all is shipped once the bucket is back"
            self._restore(max(self.moments))
            self._restore(min(self.moments))
            if self.follower is not None:
                for _ in range(12):
                    self.follow([])
                reached = self.follower.shown, self.follower.replica.note
                assert reached[0] == max(self.moments), f"a follower gets to {max(self.moments)}: {reached}"
                self.take_over([])
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


@pytest.fixture(autouse=True)
def _soon() -> Any:
    with (
        patch.object(archiver, "BASE_PIECES", BASE_PIECES),
        patch.object(base_files, "COPIERS", 1),
        patch.object(follow_main, "LOOK_MS", 2000),
    ):
        yield


TestArchiving = pytest.mark.long(Archiving.TestCase)
TestArchiving.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)


def test_behind_a_hole_there_is_no_moment_until_the_next_base(service: Archiving) -> None:
    service.append("a", 3, "disk")
    service.ship(0)
    service.ship(0)
    service.helpers.hangs = True
    service.long_outage("a", 3)
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    assert len(service.moments) == 1
    service.archived_is_in_the_last_moment()
    service.archiver_dies(0)
    service.ship(0)
    assert len(service.moments) == 1, "nor does the next archiver take them for moments"
    service.helpers.go_on()
    service.ship(0)
    assert len(service.moments) == 2
    service.archived_is_in_the_last_moment()


def test_a_moment_behind_a_hole_is_none_without_its_base(service: Archiving) -> None:
    """An archiver that died between the piece and its base took the hole for closed."""
    service.append("a", 3, "disk")
    service.ship(0)
    service.ship(0)
    service.long_outage("a", 3)
    shipper = service.shipper()
    shipper.begin()
    files = shipper.begin_base()
    files.copy()
    service.bucket.troubles = ["lost_answer"]
    with pytest.raises(OSError, match="lost_answer"):
        shipper.end_base(files)
    assert len(service.moments) == 1
    service.restore(1.0)
    shipper.begin()
    assert not shipper.is_based
    service.archiver_dies(0)
    for _ in range(3):
        service.ship(0)
    assert len(service.moments) > 1


def test_a_follower_takes_over_at_the_last_moment_before_a_hole(service: Archiving) -> None:
    """It copied everything again for ever: the leader was lost before the base behind the hole was whole."""
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    for _ in range(4):
        service.follow([])
    service.helpers.hangs = True
    service.long_outage("a", 3)
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    service.take_over([])
    assert service.is_taken_over
    service.live = {}  # what it has written since is its own


def test_a_takeover_goes_on_when_everything_has_to_be_copied_again(service: Archiving) -> None:
    """It forgot that the fence was its own, and nobody could take over any more."""
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    for _ in range(4):
        service.follow([])
    service.long_outage("a", 3)
    for _ in range(3):
        service.append("a", 1, "disk")
        service.ship(0)
    assert len(service.moments) > 2
    assert service.follower is not None
    service.follower.follower.promote.set()  # once: a command is given once
    for _ in range(8):
        service.follow([])
        if service.follower.leads:
            break
    assert service.follower.leads
    service.take_over([])
    service.live = {}


def test_logs_that_go_just_before_a_base_leave_a_hole(service: Archiving) -> None:
    service.append("a", 3, "disk")
    shipper = service.shipper()
    shipper.begin()
    shipper.base()
    assert shipper.is_based
    for _ in range(3):
        service.append_much("a")
        service.cut()
    files = shipper.begin_base()
    service.append("a", 1, "disk")
    shipper.ship()
    assert not shipper.is_based, "nobody could restore that from the base before"
    files.copy()
    shipper.end_base(files)
    assert shipper.is_based


def test_an_archiver_goes_on_behind_a_piece_that_ends_with_a_log_file(service: Archiving) -> None:
    """It stood still for ever: behind the end of a file there is no frame."""
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    for _ in range(6):
        service.append_much("a")
    service.bucket.troubles = ["lost_answer"]
    service.ship(0)
    assert _last_piece(service) not in service.moments
    for _ in range(4):  # the rest, and a base
        service.ship(0)
    assert _last_piece(service) in service.moments


def _last_piece(service: Archiving) -> tuple[int, int]:
    generation = service.archive.generations()[-1]
    return generation, service.archive.last_piece(generation, 1)


def test_a_directory_that_went_back_begins_a_generation(service: Archiving) -> None:
    service.append("a", 3, "disk")
    service.copy_directory()
    service.append("a", 3, "disk")
    service.ship(0)
    service.ship(0)
    service.put_copy_in_its_place()
    service.append("b", 1, "disk")
    service.ship(0)
    service.ship(0)
    assert [generation for generation, _ in sorted(service.moments)] == [1, 2]


@pytest.fixture
def service() -> Iterator[Archiving]:
    """A service without a backlog. At the end its first and last moments are restored."""
    found = Archiving.__new__(Archiving)
    Archiving.begin(found, backlog=0, answers=False)
    yield found
    found.teardown()


def test_nothing_counts_as_archived_after_somebody_took_over(service: Archiving) -> None:
    service.append("a", 3, "disk")
    for _ in range(3):
        service.ship(0)
    take_over(service.archive, service.archive.generations()[-1], service.rig.clock, "another machine")
    moments, words = len(service.moments), _shipped(service)
    for which in (0, 1, 0):
        service.append("a", 1, "disk")
        service.ship(which)
        service.archiver_dies(which)
        service.ship(which)
    assert (len(service.moments), _shipped(service)) == (moments, words)
    assert service.rig.shared.control.is_taken_over
    take_over(service.archive, service.archive.generations()[-1], service.rig.clock, "a third one")
    service.live = service.moments[max(service.moments)]  # what it has written since is its own


def test_what_was_deleted_leaves_the_archive_with_the_history_that_is_kept(service: Archiving) -> None:
    service.keep_ms = 7 * archiver.BASE_MS
    service.archiver_dies(0)
    service.append("a", 3, "disk")
    secret = b'"a secret"'
    service.live["a"][service.rig.append("a", secret).first_seq] = secret
    for _ in range(3):
        service.ship(0)
    service.cut()
    service.delete("a", 1.0)
    service.cut()
    assert any(secret in body for body in service.bucket.objects.values())
    for _ in range(9):  # days, with a record each
        service.rig.clock.ms += archiver.BASE_MS
        service.append("b", 1, "disk")
        service.cut()
        for _ in range(3):
            service.ship(0)
    assert not any(secret in body for body in service.bucket.objects.values())
    service.moments = {at: found for at, found in service.moments.items() if piece_name(*at) in service.bucket.objects}


def _shipped(service: Archiving) -> list[int]:
    return [service.rig.shared.control.shipped(shard) for shard in range(SHARDS)]
