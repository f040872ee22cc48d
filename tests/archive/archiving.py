"""Archives against a model: real shards, the real compactor, archiver, follower and restore, and a simulated bucket.

The model holds it to this: a restore of any moment has exactly the records that the service had then: none is
missing, none that was deleted is back, and of a batch over topics there is all or nothing. So has a follower. One that
takes over has the last moment, with all that ever counted as archived, and from then on nobody else ships anything: it
is the leader in the same archive, until the next one takes over from it. Whatever fails, or is killed, the archive is
whole. With a damaged newest base an older one gives the very same moments, unless there is a hole between the two.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import tempfile
from base64 import urlsafe_b64encode
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, Final
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.archive.follower_rig import URL, FollowerRig
from tests.archive.leading import (
    NAMES,
    SCALE,
    TOGETHER,
    KilledError,
    Leader,
    Records,
    Small,
    SmallLogs,
    World,
    copied,
    finish_batches,
    shown,
)
from tests.archive.simulated import AT, FIRST_OBJECT, SimulatedBucket, Trouble
from tests.executors import Inline
from tests.storage.faults import Crash, Fault
from tests.walshard.rig import TestClock
from topics.archive import archiver, base_files, borrowing, directory_copy, follow_main, shipping
from topics.archive.inspection import check, prune
from topics.archive.restoring import Restore, WantedMoment, plan
from topics.compactor import loan
from topics.compactor.loan import AGREEING
from topics.core.names import owner_shard
from topics.shm import shm_names
from topics.shm.memory import SharedObject
from topics.storage import borrowed, origin
from topics.storage.archive_objects import (
    Archive,
    ArchiveDamagedError,
    Generation,
    LogEnd,
    Piece,
    base_name,
    decode,
    generation_name,
    piece_name,
)
from topics.storage.borrowed import BorrowedNote, read_borrowed
from topics.storage.filesystem import FileSystem, OsFileSystem
from topics.storage.follow_note import FollowNote, read_note
from topics.storage.verify import verify

SHARDS = 2
STEPS: Final = 30
"""Steps of a schedule."""
STAYS: Final = 3
"""Steps without a change, one of them with a look for a base: a follower that is at the end stays as it is then."""
BASE_PIECES = 4
BATCH_MS = 5000
"""The time between two objects that a follower fetches: so much happens while it borrows."""
LOST_SEQS_MAX = 200
"""The gap behind a restored topic. Each of its seqs takes an entry, which took most of the time of a schedule."""
TROUBLES: st.SearchStrategy[list[Trouble]] = st.lists(
    st.sampled_from(["refused", "denied", "lost_answer", "late", "cut_short", "old_list"]), min_size=1, max_size=3
)
PERHAPS: st.SearchStrategy[list[Trouble]] = st.just([]) | TROUBLES
REQUESTS: Final = st.integers(1, 16) | st.just(FIRST_OBJECT)
"""Places in a step of a process: before its n-th request to the bucket, half of the time before it makes an object."""
BESIDE_A_LEADER: Final = ("write", "cut", "die", "restart", "ship", "follow", "take over", "take over")
BESIDE_A_TAKEOVER: Final = ("", "", "write", "ship", "begin", "begin", "restart", "prune", "take over", "die")
HARMS: Final = ("cut", "changed")
TALLY: Counter[str] = Counter()
"""Counts of this process; "schedules" are those that ended as they should."""

assert {owner_shard(name, SHARDS) for name in NAMES} == set(range(SHARDS))
assert {owner_shard(name, SHARDS) for name in TOGETHER} == set(range(SHARDS))


class _SmallFollower(SmallLogs, FollowerRig): ...


CHANCE: Final = random.Random(0)
"""Makes up the names of a schedule, the same in each run: objects are listed, and so in trouble, in their order."""
THIS_PROCESS: Final = os.getpid().to_bytes(4)


class Archiving(RuleBasedStateMachine):
    """A service that leads, its archive in a simulated bucket, the one that led before, and up to two followers."""

    @initialize(
        backlog=st.sampled_from([0, 1 << 30]),
        answers=st.booleans(),
        is_cold=st.booleans(),
        grown=st.sampled_from(["", "shipped", "followed", "lent", "lent"]),
    )
    def begin(self, backlog: int, answers: bool, is_cold: bool = False, grown: str = "") -> None:
        CHANCE.seed(0)
        self.directory = tempfile.mkdtemp(prefix="topics-sim-", dir="/dev/shm")
        self.bucket = AT[URL] = SimulatedBucket()
        self.bucket.sent = lambda name: lambda: self._note_created(name, {})
        self.world = World(self.directory, self.bucket, TestClock(), self._note_created, backlog, is_cold)
        self.moments: dict[tuple[int, int], Records] = {}
        """Records of each moment in the archive, by generation and piece."""
        self.history: dict[tuple[int, int], Records] = {}
        """The same, with those that were pruned, and those of a former leader that count for nobody."""
        self.live_at: dict[tuple[int, int], Records] = {}
        """Records that the service had at the moment to which a piece belongs, by generation and piece."""
        self.archived_ends: dict[tuple[int, int], tuple[int, ...]] = {}
        self.leaders: dict[str, Leader] = {}
        """All that have led, by their addresses."""
        self.leader = self._lead(os.path.join(self.directory, "data"), {}, SHARDS)
        self.leader.answers = answers
        self.owner_id = self.leader.id
        """The service that may ship into the archive, "" for none."""
        self.former_owner_ids: set[str] = set()
        self.former: Leader | None = None
        self.heir: Leader | None = None
        """The service that took over from `former`."""
        self.archive = Archive(self.bucket)
        self.followers: list[FollowerRig | None] = [None, None]
        self._compared: dict[int, tuple[object, ...]] = {}
        """The states of followers that were compared."""
        self._prunings = 0
        self._made = 0
        self.restores = 0
        self.restored: dict[tuple[int, int], set[str]] = {}
        """Names of the objects that were there when a moment was restored."""
        if grown:
            self._grow(grown)

    def _grow(self, grown: str) -> None:
        """Have a base in the archive, and a follower of it, which borrows sealed segments if they are `lent`."""
        if grown == "lent":
            self._seal()
        self.append("a", 3, "disk")
        for _ in range(2):
            self.ship(0)
        for _ in range(0 if grown == "shipped" else 3):
            self.follow([])

    def _seal(self) -> None:
        """Have sealed segments in the archive, some with deletions that came after their data."""
        for name in ("a", "d"):
            for tag in (0, 1):
                self.append(name, 8, "disk", tag)
        self.cut()
        shipper = self.leader.shipper()
        shipper.begin()
        shipper.base()
        for name in ("a", "d"):
            self.delete(name, 0.55, 1)  # one record of a segment, which is not rewritten for that
        self.cut()
        shipper.base()

    def _lead(self, data_dir: str, live: Records, shards: int) -> Leader:
        leader = Leader(self.world, len(self.leaders), data_dir, live, shards)
        self.leaders[leader.url] = leader
        return leader

    # -- the service

    @rule(
        name=st.sampled_from(NAMES),
        count=st.integers(1, 8),
        durability=st.sampled_from(["disk", "fsync", "archived"]),
        tag=st.sampled_from([0, 1, 2]),
        cap=st.sampled_from([0, 0, 0, 6]),
    )
    def append(self, name: str, count: int, durability: Any, tag: int = 0, cap: int = 0) -> None:
        self.leader.append(name, count, durability, tag, cap)

    @rule(name=st.sampled_from(NAMES))
    def append_much(self, name: str) -> None:
        self.leader.append_much(name)

    @rule(name=st.sampled_from(NAMES), share=st.floats(0, 1), tag=st.sampled_from([None, 0, 1, 2]))
    def delete(self, name: str, share: float, tag: int | None = None) -> None:
        self.leader.delete(name, share, tag)

    @rule(name=st.sampled_from(NAMES))
    def delete_topic(self, name: str) -> None:
        self.leader.delete_topic(name)

    @rule(ships=st.booleans())
    def commit(self, ships: bool) -> None:
        """Commit a batch over topics. It may be shipped half done."""
        self.leader.commit((lambda: self.leader.step(0)) if ships else lambda: None)

    @rule(is_whole=st.sampled_from([True, True, False]))
    def cut(self, is_whole: bool = True) -> None:
        if is_whole:
            self.leader.cut()
        else:
            self.leader.snapshot()

    @rule(shard_dies=st.booleans())
    def crash(self, shard_dies: bool) -> None:
        self.leader.crash(shard_dies)

    @precondition(lambda self: self.follower is not None and self.follower.shown)
    @rule(
        name=st.sampled_from(NAMES), told=st.integers(1, 8), lost=st.sampled_from([0.0, 0.5]), more=st.integers(-2, 8)
    )
    def lose_what_was_told(self, name: str, told: int, lost: float, more: int) -> None:
        """The machine of the leader fails when a follower has what the leader's disk does not have yet. What the leader
        writes then is in the archive.
        """
        self.leader.answers = True
        self.leader.append(name, told)
        self.follow([])
        self.leader.lose_power(lost)
        if told + more > 0:
            self.leader.append(name, told + more)
        self.leader.step(0)
        for _ in range(2):
            self.follow([])

    @rule(share=st.sampled_from([None, None, 0.0, 0.5]))
    def restart(self, share: float | None = None) -> None:
        """The whole service is killed, or loses its power but for a share of what is not synced, and starts again."""
        if share is None:
            self.leader.restart()
        else:
            self.leader.lose_power(share)

    @rule(shards=st.sampled_from([1, 2, 2, 3]))
    def reshard(self, shards: int) -> None:
        self.leader.reshard(shards)

    @precondition(lambda self: self.leader.may_copy)
    @rule()
    def copy_directory(self) -> None:
        self.leader.copy_directory()

    @precondition(lambda self: self.leader.has_copy)
    @rule()
    def put_copy_in_its_place(self) -> None:
        self.leader.put_copy_in_its_place()

    # -- the archive

    @rule(which=st.sampled_from([0, 0, 0, 1]))
    def ship(self, which: int) -> None:
        self.leader.step(which)

    @rule(which=st.sampled_from([0, 1]))
    def archiver_dies(self, which: int) -> None:
        self.leader.archiver_dies(which)

    @rule(troubles=TROUBLES, which=st.sampled_from([0, 0, 1]))
    def ship_in_trouble(self, troubles: list[Trouble], which: int) -> None:
        self.leader.bucket.troubles = troubles
        self.leader.step(which)
        self.leader.bucket.troubles = []

    @rule(away=st.booleans(), follower=st.sampled_from([None, None, 0, 1]))
    def partition(self, away: bool, follower: int | None = None) -> None:
        """The leader, or a follower, cannot reach the bucket any more, or can again."""
        rig = None if follower is None else self.followers[follower]
        bucket = self.leader.bucket if rig is None else _bucket_of(rig)
        bucket.is_away = away

    @rule(hangs=st.booleans())
    def copying(self, hangs: bool) -> None:
        """Files of bases take long to copy, or all that wait are copied now."""
        self.leader.helpers.hangs = hangs
        if not hangs:
            self.leader.helpers.go_on()

    @rule(name=st.sampled_from(NAMES), cuts=st.integers(1, 3))
    def long_outage(self, name: str, cuts: int) -> None:
        """The bucket is away while log files fill up and are removed, as far as the archive lets them."""
        self.leader.bucket.is_away = True
        for _ in range(cuts):
            self.append_much(name)
            self.leader.step(0)
            self.cut()
        self.leader.bucket.is_away = False

    @rule(
        nth=REQUESTS,
        what=st.sampled_from(BESIDE_A_LEADER),
        which=st.sampled_from([0, 0, 1]),
        before=st.sampled_from(["", "go back", "reshard"]),
    )
    def ship_beside(self, nth: int, what: str, which: int, before: str = "") -> None:
        """Something happens between two requests of an archiver, which may be about to begin a generation."""
        leader = self.leader
        other = 0 if self.followers[0] is not None else 1
        if what == "take over" and self.followers[other] is not None:
            self._happens("reshard" if before and not leader.has_copy else before, other)
        leader.before(nth, lambda: self._happens(what, other, which, leader))
        leader.step(which)
        leader.before(0, lambda: None)

    def _happens(self, what: str, other: int, which: int = 1, during: Leader | None = None) -> None:
        """Something happens `during` a step of a leader's archiver, or of a follower; `other` is another follower, and
        `which` the archiver.
        """
        match what:
            case "write":
                self.leader.delete("a", 0.5)
                self.leader.append("a", 3, tag=which)
                self.leader.delete("d", 0.7, which)
            case "cut":
                self.leader.append("d", 3)
                self.leader.cut()
            case "ship":
                self.leader.step(1 - which)
            case "follow":
                self.follow([], other)
            case "take over":
                self.take_over([], other)
            case "go back" if self.leader.has_copy:
                self.leader.put_copy_in_its_place()
            case "reshard":
                self.leader.reshard(3 - self.leader.shards if self.leader.shards < 3 else 2)
            case "begin":
                self._happens("go back" if self.leader.has_copy else "reshard", other)
                self.leader.step(0)
            case "restart":
                self.leader.restart()
                if during is not None:
                    raise KilledError
            case "die":
                raise KilledError
            case "prune":
                self.prune(0.5, [])

    @precondition(lambda self: len(self.moments) > 3)
    @rule(share=st.floats(0, 1), troubles=PERHAPS)
    def prune(self, share: float, troubles: list[Trouble]) -> None:
        """Somebody removes what only moments before some time need; a share of 1 is all but the last moment."""
        if not self.moments:
            return
        for late in self.bucket.late:
            late.requests = 0
        self.bucket.exists("")
        times_ms = sorted(self._piece(*moment).taken_ms for moment in self.moments)
        before_ms = self.world.clock.ms + 1 if share == 1 else times_ms[int(share * (len(times_ms) - 1))]
        self._prunings += 1
        here = SimulatedBucket(self.bucket)
        here.troubles = list(troubles)
        try:
            assert prune(Archive(here), before_ms).damaged == []
        except OSError:
            assert troubles
        assert self._lent() <= self.bucket.objects.keys(), "what is lent stays"
        kept = {moment for moment in self.moments if piece_name(*moment) in self.bucket.objects}
        assert max(self.moments) in kept
        self.moments = {moment: records for moment, records in self.moments.items() if moment in kept}

    def _lent(self) -> set[str]:
        """Return the names of the objects that services still need."""
        notes = [_borrows(leader.data_dir) for leader in (self.leader, self.former) if leader is not None]
        lent = {ref.name for note in notes if note is not None for ref in note.files}
        for rig in self.followers:
            lent |= {ref.name for ref in rig.replica.homecoming.missing.values()} if rig is not None else set()
        return lent

    @precondition(lambda self: any(rig is not None and rig.replica.homecoming.missing for rig in self.followers))
    @rule(name=st.sampled_from(NAMES), share=st.floats(0, 1), tag=st.sampled_from([None, 0, 1]))
    def prune_beside_a_loan(self, name: str, share: float, tag: int | None) -> None:
        """The service drops or rewrites segments that a follower borrows. The base that has them is pruned."""
        self.delete(name, share, tag)
        self.cut()
        for _ in range(BASE_PIECES + 1):
            self.append("b", 1, "disk")
            self.ship(0)
        self.prune(1, [])

    def _note_created(self, name: str, live: Records) -> None:
        """Note what the service had at the moment of a piece that is put, or of a base."""
        folder, _, number = name.partition("/")
        if not folder.endswith((".pieces", ".bases")):
            return
        moment = int(folder[1:].partition(".")[0]), int(number)
        piece = self._piece(*moment)
        name_of = generation_name(moment[0])
        is_owner = decode(self.bucket.objects[name_of], Generation, name_of)[0].service_id == self.owner_id
        if folder.endswith(".pieces"):
            if piece.taken_over_by:
                assert piece.taken_over_id not in self.former_owner_ids, f"{name} is of one that was taken over from"
                if piece.taken_over_id != self.owner_id:
                    self.former_owner_ids.add(self.owner_id)
                self.owner_id = piece.taken_over_id
                return
            assert is_owner, f"{name} is of one that was taken over from"
            self.live_at[moment] = live
        if piece.is_moment or folder.endswith(".bases"):
            self.archived_ends[moment] = tuple([end.position.word for end in piece.ends])
            self.history[moment] = self.live_at[moment]
            if is_owner:  # else a base of a moment from before; its archiver counts on nothing new
                self.moments[moment] = self.history[moment]

    def _piece(self, generation: int, number: int) -> Piece:
        name = piece_name(generation, number)
        return decode(self.bucket.objects[name], Piece, name)[0]

    # -- services that follow

    @property
    def follower(self) -> FollowerRig | None:
        """The first follower."""
        return self.followers[0]

    @rule(
        troubles=PERHAPS,
        which=st.sampled_from([0, 0, 0, 1]),
        dies=st.none() | st.none() | st.integers(1, 40),
        nth=st.sampled_from([0, 0, 0]) | REQUESTS,
    )
    def follow(self, troubles: list[Trouble], which: int = 0, dies: int | None = None, nth: int = 0) -> None:
        """A follower takes a step. It may die at a call that changes its disk, or before its n-th request."""
        rig = self.followers[which]
        if rig is None or rig.is_refused:
            rig = self._new_follower(which)
        if nth:
            _bucket_of(rig).before(nth, _kill)
        if dies is not None:
            rig.process_fs.arm(Fault(dies, Fault.CRASH if dies % 2 else Fault.LATE_CRASH))
        self._advance(rig, troubles)
        _bucket_of(rig).before(0, lambda: None)
        rig.process_fs.arm(None)
        if rig.leads:  # it goes on with a takeover that it had begun
            self._leads(which, rig)
            return
        at, state = rig.shown, self._state_of(rig)
        if at is not None and state != self._compared.get(which):
            self._compared[which] = state
            TALLY["moments of a follower"] += 1
            TALLY["moments of one that borrows"] += bool(rig.replica.homecoming.missing)
            rig.assert_shown()
            compare(rig, self._expected(rig.replica.note.leader_url, at, rig.shown_words))

    def _state_of(self, rig: FollowerRig) -> tuple[object, ...]:
        """Another one once a follower may show something else: what it borrows, pruning may remove."""
        return *rig.state, self._prunings

    def _new_follower(self, which: int) -> FollowerRig:
        """Start a follower on an empty directory, or again with the number of shards that it needs."""
        former, shards = self.followers[which], self.leader.shards
        based = [number for number in self.archive.generations() if self.archive.bases(number)]
        if based:
            shards = self.archive.generation(based[-1]).shards
        if former is None:
            self._made += 1
            data_dir = os.path.join(self.directory, f"follower-{self._made}")
        else:
            data_dir = former.settings.data_dir
            former.close()
        rig = self.followers[which] = self.follower_in(data_dir, shards)
        return rig

    def follower_in(self, data_dir: str, shards: int = SHARDS, **settings: str) -> FollowerRig:
        bucket = SimulatedBucket(self.bucket)
        bucket.sent = lambda name: lambda: self._note_created(name, {})
        return _SmallFollower(data_dir, shards, Archive(bucket), self.world.clock, self._tell, **settings)

    def _tell(self, url: str, ends: Sequence[LogEnd]) -> bytes | None:
        leader = self.leaders[url]
        if leader not in (self.leader, self.former):
            raise OSError("is gone")
        return leader.tell(ends)

    def _expected(self, leader_url: str, at: tuple[int, int], words: tuple[int, ...]) -> Records:
        if self.archived_ends.get(at) == words:
            return self.history[at]
        return self.leaders[leader_url].told[words][0]

    @rule(answers=st.booleans())
    def partition_from_leader(self, answers: bool) -> None:
        self.leader.answers = answers

    @precondition(lambda self: any(self.followers))
    @rule(which=st.sampled_from([0, 0, 1]), shard=st.sampled_from([None, 0, 1]), power=st.booleans())
    def follower_dies(self, which: int, shard: int | None = None, power: bool = False) -> None:
        rig = self.followers[which]
        if rig is None:
            return
        if power:
            rig.lose_power()
        elif shard is None:
            rig.follower_dies()
        elif shard < rig.settings.wal_shards:
            rig.shard_dies(shard)

    @precondition(lambda self: any(rig is not None and rig.shown for rig in self.followers))
    @rule(troubles=PERHAPS, which=st.sampled_from([0, 1]), nth=REQUESTS, what=st.sampled_from(BESIDE_A_TAKEOVER))
    def take_over(self, troubles: list[Trouble], which: int = 0, nth: int = 0, what: str = "") -> None:
        """A follower is promoted. Whatever the former leader has written since its last moment is its own. Something
        may happen between two requests of the takeover.
        """
        rig, leader = self.followers[which], self.leader
        if rig is None or not rig.shown or _bucket_of(rig).is_away:
            return
        for _ in range(25):
            rig = self.followers[which]
            assert rig is not None
            if rig.is_refused:
                rig = self._new_follower(which)
            rig.follower.ask_promotion()
            if what:
                _bucket_of(rig).before(nth, partial(self._happens, what, 1 - which))
                what = ""
            self._advance(rig, troubles)
            troubles = troubles[1:]
            if self.leader is not leader:
                break  # another one was faster
            if rig.leads:
                self._leads(which, rig)
                return
        _bucket_of(rig).before(0, lambda: None)
        other = self.followers[1 - which]
        is_closed = other is not None and _note_of(other).fence_id == self.owner_id
        has_base = any(
            self.archive.generation(number).service_id == leader.id
            for number in self.archive.generations()
            if self.archive.bases(number)
        )  # else it has just taken over itself, and there is nothing of it to go on with
        assert is_closed or self.leader is not leader or not has_base, "it does not take over"

    def _advance(self, rig: FollowerRig, troubles: list[Trouble]) -> None:
        self.world.clock.ms += 1000
        bucket = _bucket_of(rig)
        bucket.troubles = list(troubles)
        try:
            rig.advance()
        except (Crash, KilledError):
            rig.follower_dies()
        bucket.troubles = []

    def _leads(self, which: int, rig: FollowerRig) -> None:
        """Have a promoted follower start as the leader, and compare what it has."""
        TALLY["takeovers"] += 1
        if self.former is not None:
            TALLY["takeovers in a chain"] += 1
        if _borrows(rig.settings.data_dir):
            TALLY["takeovers by one that borrows"] += 1
        note, last = _note_of(rig), max(self.moments)
        assert (note.generation, note.piece) >= last, f"it has {note.generation}, {note.piece} of {last}"
        at, words, data_dir = (note.generation, note.piece), rig.noted_words, rig.settings.data_dir
        expected = self._expected(note.leader_url, at, words)
        if expected is not self.history[at]:
            leader = self.leaders[note.leader_url]
            later = leader.lives[leader.told[words][1] :]
            for records in self.history[at].values() if later else ():
                for data in records.values():
                    assert not data.isdigit() or int(data) < later[0], "was archived after it had lost what it had told"
        self.followers[which] = None
        rig.end_promotion()
        heir = self._promoted(data_dir, expected, rig.settings.wal_shards)
        assert heir.id == self.owner_id
        if self.former is not None:
            self.former.close()
            self._gone(self.former)
        self.former, self.leader, self.heir = self.leader, heir, heir
        assert _is_within(self.former.archived(), heir.began_with)

    def _gone(self, leader: Leader) -> None:
        """A service is gone for good; somebody removes its loan."""
        note = _borrows(leader.data_dir)
        if note is not None:
            self.bucket.objects.pop(note.loan, None)

    def _promoted(self, data_dir: str, expected: Records, shards: int) -> Leader:
        assert verify(data_dir, lambda _done, _total: None).damage == []
        heads = {name: max(records, default=0) for name, records in expected.items()}
        heir = self._lead(data_dir, copied(expected), shards)
        compare(heir.rig, expected)
        heir.finish_batches()
        _check_batches(heir.live)
        for name in NAMES:
            if name in expected:
                heir.append(name, 1)
                assert max(heir.live[name]) > heads[name] + 100
        return heir

    @precondition(lambda self: self.former is not None)
    @rule(what=st.sampled_from(["write", "ship", "ship", "restart", "comes back"]))
    def former_leader(self, what: str) -> None:
        """The one that was taken over from goes on, or comes back as a follower on an empty directory."""
        former = self.former
        assert former is not None
        match what:
            case "write":
                former.append("a", 2)
                former.cut()
            case "ship":
                former.append("b", 1)
                former.step(0)
            case "restart":
                former.restart()
                former.step(0)
            case "comes back" if self.followers[1] is None:
                self.former = None
                former.close()
                self._gone(former)
                shutil.rmtree(former.data_dir)
                self.followers[1] = self.follower_in(former.data_dir, self.leader.shards)

    # -- what must hold

    @invariant()
    def archived_is_in_the_last_moment(self) -> None:
        if not hasattr(self, "leader"):
            return
        last = self.moments[max(self.moments)] if self.moments else {}
        assert _is_within(self.leader.archived(), last), "counts as archived"
        if self.former is not None:
            assert self.heir is not None
            assert _is_within(self.former.archived(), self.heir.began_with), "its heir lacks what counts as archived"

    @precondition(lambda self: self.moments and self.restores < 3)
    @rule(share=st.floats(0, 1), harm=st.sampled_from(["", "", *HARMS]))
    def restore(self, share: float, harm: str = "") -> None:
        moments = sorted(self.moments)
        self._restore(moments[int(share * (len(moments) - 1))], harm)

    @precondition(lambda self: self.moments and len(self.archive.bases(max(self.moments)[0])) > 1)
    @rule(harm=st.sampled_from(HARMS), what=st.sampled_from(["follow", "ship", "begin", "restore"]))
    def damage(self, harm: str, what: str) -> None:
        """The newest base is damaged while something happens. Then somebody puts it back from a copy."""
        generation, number = max(self.moments)
        name = base_name(generation, self.archive.bases(generation)[-1])
        whole = self.bucket.objects[name]
        self.bucket.objects[name] = harmed(whole, harm)
        match what:
            case "follow" if self.followers[1] is None:
                reached = self._is_reached(self.bucket, generation, number)
                for _ in range(4):
                    self.follow([], 1)
                rig = self.followers[1]
                assert rig is not None
                if reached and max(self.archive.generations()) == generation:
                    TALLY["followers that began beside damage"] += 1
                    assert rig.shown is not None or rig.is_refused, "an older base would do"
            case "begin":
                self.archiver_dies(0)
                self.ship(0)
            case "ship":
                self.ship(0)
        if what in ("begin", "restore"):
            self._restore(max(self.moments))
        self.bucket.objects[name] = whole

    def _is_reached(self, seen: SimulatedBucket, generation: int, number: int) -> bool:
        """True if a base before the newest one gives this moment for sure: where there is a hole behind it, the piece
        of a later base is no moment without that base.
        """
        bases = [base for base in Archive(seen).bases(generation) if base <= number]
        return len(bases) > 1 and all(self._piece(generation, base).is_moment for base in bases[1:])

    def _restore(self, moment: tuple[int, int], harm: str = "") -> None:
        """Restore the moment as if the archive ended there, its newest base being harmed, and compare."""
        generation, number = moment
        bases = [base for base in self.archive.bases(generation) if base <= number]
        if not bases:
            return  # its base was pruned
        seen = SimulatedBucket()
        seen.objects = {
            name: body for name, body in self.bucket.objects.items() if _is_before(name, generation, number)
        }
        archive, newest = Archive(seen), base_name(generation, bases[-1])
        if harm:
            seen.objects[newest] = harmed(seen.objects[newest], harm)
        damaged = _damaged(archive)
        if not damaged and self.restored.get(moment) == seen.objects.keys():
            return  # objects never change
        self.restored[moment] = set(seen.objects)
        self.restores += 1
        problems = check(archive, lambda _done, _total: None)
        assert all(any(name in problem for problem in problems) for name in damaged)
        assert damaged or not problems
        data_dir = os.path.join(self.directory, f"restored-{self.restores}")
        try:
            found = plan(archive, WantedMoment())
        except ArchiveDamagedError as error:
            if newest not in damaged or newest not in str(error):
                raise
            assert not self._is_reached(seen, *moment), "an older base would do"
            TALLY["refused for a damaged base"] += 1
            return
        TALLY["restores from an older base" if newest in damaged else "restores"] += 1
        assert (found.generation.number, found.moment.number) == moment
        assert base_name(generation, found.base.number) not in damaged
        Restore(archive, found, OsFileSystem(), data_dir, lambda _done, _total: None).run(self.world.clock)
        assert verify(data_dir, lambda _done, _total: None).damage == []
        other = Small(data_dir, found.generation.shards, self.world.clock)
        try:
            expected = self.moments[moment]
            compare(other, expected)
            for name, records in expected.items():
                if name in NAMES:
                    assert other.append(name, b'"new"').first_seq > max(records, default=0)
            if TOGETHER[0] in expected:
                finish_batches(other)
                _check_batches(shown(other, TOGETHER))
        finally:
            other.close()
            shutil.rmtree(data_dir)

    def teardown(self) -> None:
        if not hasattr(self, "leader"):
            return
        try:
            self._end()
            TALLY["schedules"] += 1
        finally:
            for service in {self.leader, *([self.former] if self.former else [])}:
                service.close()
            for rig in self.followers:
                if rig is not None:
                    rig.close()
            shutil.rmtree(self.directory)

    def _end(self) -> None:
        """Look at the end, when nothing fails any more."""
        for rig in self.followers:
            if rig is not None:
                _bucket_of(rig).is_away = False
        if self.former is not None:
            self._notices(self.former)
        for which, rig in enumerate(self.followers):
            if rig is not None and self.owner_id and self.owner_id == _note_of(rig).fence_id:
                self.take_over([], which)
                break
        if self.leader.id != self.owner_id:
            self._notices(self.leader)  # the archive was closed for good
            return
        self.ship_all()
        self._restore(max(self.moments))
        self._restore(min(self.moments))
        if len(self.archive.bases(max(self.moments)[0])) > 1:
            self._restore(max(self.moments), HARMS[self.world.written % len(HARMS)])
        between = sorted(self.moments)[1:-1]
        if between:  # a cut at random: what was written decides which one
            self._restore(between[self.world.written * 7919 % len(between)])
        followers = [which for which, rig in enumerate(self.followers) if rig is not None]
        for which in followers:
            self._gets_to_the_end(which)
            if which != followers[0] or self.world.written % 2:
                self._gets_home(which)
        self._no_loan_is_forgotten()
        if followers:
            self.take_over([], followers[0])
            self.brings_home()
            self._no_loan_is_forgotten()
            assert self.former is not None
            self._notices(self.former)
            self.ship_all()
            self._restore(max(self.moments))

    def _gets_to_the_end(self, which: int) -> None:
        """A follower gets to the last moment, and stays there: it has looked for a base at the end."""
        stays = 0
        before: tuple[object, ...] = ()
        for _ in range(14):
            self.follow([], which)
            rig = self.followers[which]
            if rig is None:
                continue  # it leads; the next one begins
            state, before = before, self._state_of(rig)
            stays = stays + 1 if rig.shown == max(self.moments) and state == before else 0
            if stays == STAYS:
                return
        rig = self.followers[which]
        assert rig is not None
        reached = rig.shown, rig.replica.note
        assert reached[0] == max(self.moments), f"a follower gets to {max(self.moments)}: {reached}"

    def _gets_home(self, which: int) -> None:
        """A follower has all data at last, and needs nothing of the archive for them."""
        for _ in range(200):
            rig = self.followers[which]
            assert rig is not None
            if _borrows(rig.settings.data_dir) is None:
                return
            self.world.clock.ms += BATCH_MS
            self.follow([], which)
        raise AssertionError("a follower does not get all data")

    def brings_home(self) -> None:
        """The compactor of a service that took over fetches what that has borrowed."""
        leader = self.leader
        for _ in range(AGREEING):
            leader.snapshot()
        compare(leader.rig, leader.live)
        for _ in range(30):
            if _borrows(leader.data_dir) is None:
                break
            self.world.clock.ms += 160_000  # later than any pause
            leader.cut()
        assert _borrows(leader.data_dir) is None, "all data come home"
        compare(leader.rig, leader.live)

    def _no_loan_is_forgotten(self) -> None:
        """Nothing keeps the archive for a service that has everything."""
        notes = [_borrows(os.path.join(self.directory, name)) for name in os.listdir(self.directory)]
        loans = {name for number in self.archive.generations() for name in self.archive.loans(number).values()}
        assert loans <= {note.loan for note in notes if note is not None}

    def ship_all(self) -> None:
        leader = self.leader
        leader.bucket.is_away = False
        leader.helpers.go_on()
        for _ in range(20):  # it may have failed often, and pause for 10 s
            leader.step(0)
            if self.moments and self.moments[max(self.moments)] == leader.live:
                break
        for _ in range(3):
            leader.step(0)
        assert self.moments
        assert self.moments[max(self.moments)] == leader.live, "all is shipped once the bucket is back"

    def _notices(self, former: Leader) -> None:
        former.bucket.is_away = False
        former.helpers.go_on()
        former.append("a", 1)  # else it need not notice
        for _ in range(20):
            former.step(0)
            if former.rig.shared.control.is_taken_over:
                return
        raise AssertionError("a former leader does not notice")


def harmed(whole: bytes, harm: str) -> bytes:
    """Return an object after damage: half of it is gone, or a byte of it is another one."""
    half = len(whole) // 2
    return whole[:half] if harm == "cut" else whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]


def _damaged(archive: Archive) -> list[str]:
    """Return the names of all bases that cannot be read."""
    found = []
    for generation in archive.generations():
        for number in archive.bases(generation):
            try:
                archive.base(generation, number)
            except ArchiveDamagedError:
                found.append(base_name(generation, number))
    return found


def _note_of(rig: FollowerRig) -> FollowNote:
    note = read_note(OsFileSystem(), rig.settings.data_dir)
    assert note is not None
    return note


def _borrows(data_dir: str) -> BorrowedNote | None:
    return read_borrowed(OsFileSystem(), data_dir)


def _kill() -> None:
    raise KilledError


def _bucket_of(rig: FollowerRig) -> SimulatedBucket:
    bucket = rig.archive.store
    assert isinstance(bucket, SimulatedBucket)
    return bucket


def _is_within(part: Records, whole: Records) -> bool:
    return all(records.items() <= whole.get(name, {}).items() for name, records in part.items())


def compare(rig: Any, expected: Records) -> None:
    """Compare what a service shows with what it should have."""
    found = shown(rig)
    for name in (*NAMES, *TOGETHER):
        assert found.get(name) == expected.get(name), name


def _check_batches(live: Records) -> None:
    """Check that of each batch over topics there is all or nothing."""
    first, second = [sorted(live.get(name, {}).values()) for name in TOGETHER]
    assert first == second, "a batch is half there"


def _is_before(name: str, generation: int, number: int) -> bool:
    """True for objects of an archive that ends with this piece."""
    folder, _, own = name.partition("/")
    if folder == "loans":
        return False
    if folder == "generations":
        return int(own) <= generation
    of = int(folder[1:].partition(".")[0])
    if of == generation and folder.endswith((".pieces", ".bases")):
        return int(own) <= number
    return of <= generation


@contextmanager
def small_world() -> Iterator[None]:
    """Have everything happen soon, and cheaply. Threads would only make the order of requests a matter of chance."""
    made: defaultdict[str, list[str]] = defaultdict(list)
    create = SharedObject.create

    def create_noted(name: str, size_bytes: int, reserve_bytes: int | None = None) -> SharedObject:
        made[name.split("-")[1]].append(name.removeprefix("/"))
        return create(name, size_bytes, reserve_bytes)

    def objects(identity: str) -> list[str]:
        """Do not list what all services of the machine have in shared memory."""
        found = [*made.pop(identity, ()), os.path.basename(shm_names.ram_dir(identity))]
        return [name for name in found if os.path.lexists(f"{shm_names.SHM_ROOT}/{name}")]

    with ExitStack() as patches:
        for module, name, value in (
            (archiver, "BASE_PIECES", BASE_PIECES),
            (archiver, "PIECE_BYTES", shipping.PIECE_BYTES // SCALE),
            (shipping, "PIECE_BYTES", shipping.PIECE_BYTES // SCALE),
            (origin, "TAIL_BYTES", origin.TAIL_BYTES // SCALE),
            (follow_main, "LOOK_MS", 2000),
            (directory_copy, "LOST_SEQS_MAX", LOST_SEQS_MAX),
            (base_files, "ThreadPoolExecutor", _inline),
            (base_files, "as_completed", iter),  # it gives those that are done in the order of their addresses
            (directory_copy, "ThreadPoolExecutor", _inline),
            (borrowing, "BATCH_BYTES", 1),
            (borrowing, "BATCH_MS", BATCH_MS),
            (borrowed, "open_archive", _found_at),
            (loan, "open_archive", _found_at),
            (SharedObject, "create", create_noted),
            (shm_names, "objects", objects),
            (os, "posix_fallocate", _grow),
            (os, "urandom", _random_bytes),
            (secrets, "token_hex", lambda count: _random_bytes(count).hex()),
            (secrets, "token_urlsafe", lambda count: urlsafe_b64encode(_random_bytes(count)).rstrip(b"=").decode()),
            (secrets, "randbits", CHANCE.getrandbits),
            (os.path, "join", lru_cache(1 << 14)(os.path.join)),  # two thousand a schedule, of the same few names
        ):
            patches.enter_context(patch.object(module, name, value))
        yield


def _random_bytes(count: int) -> bytes:
    """Return bytes whose order among others is that of every run. Their end is this process's: shared memory is named
    after them, and schedules run side by side.
    """
    return CHANCE.randbytes(count)[: -len(THIS_PROCESS)] + THIS_PROCESS


def _inline(_threads: int, _name: str) -> Inline:
    return Inline()


def _found_at(_fs: FileSystem, place: str, _timeout_ms: int = 0) -> SimulatedBucket:
    """Return the bucket of a place, by a way on which nothing fails."""
    return SimulatedBucket(AT[place])


def _grow(fd: int, offset: int, length: int) -> None:
    """Make a file that long without a page of memory for each part of it: nothing here runs out of room."""
    os.ftruncate(fd, max(os.fstat(fd).st_size, offset + length))
