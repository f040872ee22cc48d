"""Named cursors (api §10): readers in parallel, answers that get lost, crashes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from topics.core.cursors import UNDER_WAY_MAX, Consistency, CursorFrameBody, Cursors, NamedCursor
from topics.core.errors import TopicsError


@dataclass
class Reading:
    """A read whose answer is under way."""

    read: int
    revision: int
    frontend: int
    strict: bool
    first_seq: int
    last_seq: int

    @property
    def seqs(self) -> set[int]:
        return set(range(self.first_seq, self.last_seq + 1))


def unread(body: CursorFrameBody) -> set[int]:
    """Return the records that a cursor which begins like this reads again."""
    return {seq for begin, end in body.missing for seq in range(begin + 1, end + 1)}


class CursorMachine(RuleBasedStateMachine):
    """A shard's use of one cursor; `received` is what readers got."""

    @initialize(consistency=st.sampled_from(["strictly_at_once", "at_least_once"]), every=st.integers(1, 4))
    def begin(self, consistency: Consistency, every: int) -> None:
        self.cursors = Cursors()
        self.cursors.logged(CursorFrameBody("c", consistency, every, 0))
        self.readings: list[Reading] = []
        self.received: list[int] = []
        self.read_strictly: list[int] = []
        self.only_strict = consistency == "strictly_at_once"
        self.passed_on: list[set[int]] = []
        """Records of each answer that was passed on in this life of the shard."""
        self.log_fails = False
        self.reads = 0

    @property
    def cursor(self) -> NamedCursor:
        return self.cursors.get("t", "c")

    def persist(self, *, fails: bool = False) -> None:
        cursor = self.cursor
        if cursor.to_persist:
            cursor.persisting()
            self.log_fails = fails
            if fails:
                cursor.persist_failed()
            else:
                cursor.persisted(cursor.body())

    @rule(frontend=st.integers(0, 1), records=st.integers(1, 3), fails=st.booleans())
    def read(self, frontend: int, records: int, fails: bool) -> None:
        cursor = self.cursor
        first = cursor.seq
        last = min(first + records, cursor.up_to_seq or first + records)
        self.reads += 1
        read = self.reads
        assert not cursor.advance(cursor.revision + 1, first, last, frontend, read)
        if cursor.up_to_seq is not None:
            assert not cursor.advance(cursor.revision, first, cursor.up_to_seq + 1, frontend, read)
        assert cursor.advance(cursor.revision, first, last, frontend, read)
        if cursor.strict:
            if fails:  # the log does not have it: the reader gets an error
                cursor.persisting()
                cursor.mark_missing([(first, last)])
                return
            self.persist()
            assert cursor.logged_body == cursor.body()
            self.read_strictly += range(first + 1, last + 1)
        self.readings.append(Reading(read, cursor.revision, frontend, cursor.strict, first + 1, last))

    @precondition(lambda self: self.readings)
    @rule(at=st.integers(0, 20), log_fails=st.booleans())
    def answer_is_passed_on(self, at: int, log_fails: bool) -> None:
        reading = self.readings.pop(at % len(self.readings))
        self.received += sorted(reading.seqs)
        cursor = self.cursor
        if reading.revision == cursor.revision and not reading.strict:
            self.passed_on.append(reading.seqs)
        cursor.passed_on(reading.revision, 1 - reading.frontend, reading.read)  # another frontend's number
        cursor.passed_on(reading.revision, reading.frontend, reading.read)
        self.persist(fails=log_fails)

    @precondition(lambda self: self.readings)
    @rule(at=st.integers(0, 20))
    def answer_fails(self, at: int) -> None:
        reading = self.readings.pop(at % len(self.readings))
        before = self.cursor.body()
        self.cursor.failed(reading.revision, reading.frontend, reading.read)
        assert self.cursor.body() == before  # it was missing already, for the log

    @rule(frontend=st.integers(0, 1))
    def frontend_dies(self, frontend: int) -> None:
        self.readings = [reading for reading in self.readings if reading.frontend != frontend]
        self.cursor.frontend_died(frontend)

    @rule(consistency=st.sampled_from(["strictly_at_once", "at_least_once"]), every=st.integers(1, 4))
    def is_configured(self, consistency: Consistency, every: int) -> None:
        """`PUT` that moves nothing."""
        cursor = self.cursor
        before = (cursor.seq, cursor.up_to_seq, cursor.revision)
        cursor.configured(msgspec.structs.replace(cursor.body(), consistency=consistency, persist_every=every))
        assert (cursor.seq, cursor.up_to_seq, cursor.revision) == before
        assert (cursor.consistency, cursor.persist_every) == (consistency, every)
        self.only_strict &= consistency == "strictly_at_once"
        self.log_fails = False

    @rule()
    def shard_dies(self) -> None:
        """Answers that are under way may come through all the same."""
        every = self.cursor.persist_every
        bodies = self.cursors.bodies()
        first_revision = self.cursor.revision + 100
        self.cursors = Cursors()
        for body in bodies:
            self.cursors.logged(body)
        self.cursors.restart(first_revision)
        again = [seqs for seqs in self.passed_on if max(seqs) > bodies[0].seq or seqs & unread(bodies[0])]
        assert self.log_fails or len(again) < every
        self.passed_on = []

    @invariant()
    def as_promised(self) -> None:
        if not hasattr(self, "cursors"):
            return
        cursor = self.cursor
        body = cursor.body()
        assert cursor.persisted_seq <= body.next_seq <= cursor.seq
        ends = [end for stretch in body.missing for end in stretch] + [body.seq]
        assert ends == sorted(set(ends)), "apart, ascending, and before the front"
        assert len(set(self.read_strictly)) == len(self.read_strictly)
        if self.only_strict:
            assert len(set(self.received)) == len(self.received)
            assert (cursor.persisted_seq, cursor.up_to_seq) == (cursor.seq, None)
        got = {*self.received, *self.read_strictly}
        assert got >= set(range(1, body.seq + 1)) - unread(body), "nothing is left out"


class LongCursorMachine(CursorMachine):
    """The same, many times."""


CursorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestCursorMachine = CursorMachine.TestCase
LongCursorMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30)
TestLongCursorMachine = pytest.mark.long(LongCursorMachine.TestCase)


def at_least_once(every: int) -> tuple[Cursors, NamedCursor]:
    cursors = Cursors()
    cursors.logged(CursorFrameBody("c", "at_least_once", every, 0))
    return cursors, cursors.get("t", "c")


def pass_on(cursor: NamedCursor, read: int) -> None:
    cursor.passed_on(cursor.revision, 0, read)
    if cursor.to_persist:
        cursor.persisting()
        cursor.persisted(cursor.body())


def restarted(cursors: Cursors) -> NamedCursor:
    after = Cursors()
    for body in cursors.bodies():
        after.logged(msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=CursorFrameBody))
    return after.get("t", "c")


def test_who_takes_long_takes_back_nobody_else() -> None:
    """A slow reader takes back no record of others, neither by a crash nor when it fails."""
    cursors, cursor = at_least_once(1)
    assert cursor.advance(cursor.revision, 0, 500, 0, 1)
    for read in range(2, 32):
        assert cursor.advance(cursor.revision, cursor.seq, cursor.seq + 10, 0, read)
        pass_on(cursor, read)
    assert cursor.body() == CursorFrameBody("c", "at_least_once", 1, 800, ((0, 500),))
    assert cursor.behind(0) == (800, None), "nobody is to read again what is under way"
    after = restarted(cursors)
    cursor.failed(cursor.revision, 0, 1)
    for one in (cursor, after):
        assert (one.seq, one.up_to_seq, one.persisted_seq) == (0, 500, 0)
        assert [one.behind(seq) for seq in (0, 499, 500, 900)] == [(0, 500), (499, 500), (800, None), (900, None)]
        assert not one.advance(one.revision, 0, 501, 0, 40)
        assert one.advance(one.revision, 0, 200, 0, 41)
        assert one.advance(one.revision, 200, 500, 0, 42)
        assert (one.seq, one.up_to_seq) == (800, None)
        pass_on(one, 42)
        assert one.body().missing == ((0, 200),)
        pass_on(one, 41)
        assert one.logged_body == CursorFrameBody("c", "at_least_once", 1, 800)


def test_a_reader_that_looked_before_others_failed_may_go_on_behind_them() -> None:
    _, cursor = at_least_once(1)
    assert cursor.advance(cursor.revision, 0, 10, 0, 1)
    assert cursor.advance(cursor.revision, 10, 20, 0, 2)
    cursor.failed(cursor.revision, 0, 1)
    assert cursor.seq == 0
    assert cursor.advance(cursor.revision, 20, 30, 0, 3)
    cursor.failed(cursor.revision, 0, 3)
    cursor.failed(cursor.revision, 0, 2)
    assert cursor.body() == CursorFrameBody("c", "at_least_once", 1, 0)


def test_answers_that_nobody_takes_are_bounded() -> None:
    _, cursor = at_least_once(1)
    for read in range(UNDER_WAY_MAX):
        assert cursor.advance(cursor.revision, read, read + 1, 0, read)
    with pytest.raises(TopicsError) as refused:
        cursor.advance(cursor.revision, UNDER_WAY_MAX, UNDER_WAY_MAX + 1, 0, UNDER_WAY_MAX)
    assert (refused.value.code, refused.value.detail) == ("throttled", {"limit": "cursor_reads", "max": UNDER_WAY_MAX})
    cursor.failed(cursor.revision, 0, 5)
    assert cursor.advance(cursor.revision, 5, 6, 0, UNDER_WAY_MAX)


@given(st.integers(1, 5), st.integers(0, 30), st.booleans())
def test_a_crash_takes_back_at_most_n_reads_of_one_reader_after_the_other(every: int, reads: int, lost: bool) -> None:
    cursors = Cursors()
    cursors.logged(CursorFrameBody("c", "at_least_once", every, 0))
    cursor = cursors.get("t", "c")
    for at in range(reads):
        assert cursor.advance(cursor.revision, at, at + 1, 0, at)
        if lost and at == reads - 1:
            break
        cursor.passed_on(cursor.revision, 0, at)
        if cursor.to_persist:
            cursor.persisting()
            cursor.persisted(cursor.body())
    assert reads - cursor.persisted_seq <= every
    assert reads - cursor.persisted_seq >= (1 if lost and reads else 0)
    cursor.frontend_died(1)
    assert cursor.seq == reads
    cursor.frontend_died(0)
    assert cursor.seq == reads - (1 if lost and reads else 0)
