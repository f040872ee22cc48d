"""Named cursors (api §10): readers in parallel, answers that get lost, crashes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from topics.core.cursors import Consistency, Cursor, CursorBody, Cursors


@dataclass
class Reading:
    """A read whose answer is under way."""

    read: int
    revision: int
    frontend: int
    first_seq: int
    last_seq: int


class CursorMachine(RuleBasedStateMachine):
    """What a shard does with one cursor; `received` is what readers got."""

    @initialize(consistency=st.sampled_from(["strictly_at_once", "at_least_once"]), every=st.integers(1, 4))
    def begin(self, consistency: Consistency, every: int) -> None:
        self.cursors = Cursors()
        self.cursors.logged(CursorBody("c", consistency, every, 0))
        self.readings: list[Reading] = []
        self.received: list[int] = []
        self.strict = consistency == "strictly_at_once"
        self.reads = 0

    @property
    def cursor(self) -> Cursor:
        return self.cursors.get("t", "c")

    def persist(self, *, fails: bool = False) -> None:
        cursor = self.cursor
        if cursor.to_persist:
            cursor.persisting()
            if fails:
                cursor.not_persisted()
            else:
                cursor.persisted(cursor.body().seq)

    @rule(frontend=st.integers(0, 1), records=st.integers(1, 3), fails=st.booleans())
    def read(self, frontend: int, records: int, fails: bool) -> None:
        cursor = self.cursor
        first = cursor.seq
        self.reads += 1
        read = self.reads
        assert not cursor.advance(cursor.revision, first + 1, first + records, frontend, read)
        assert not cursor.advance(cursor.revision + 1, first, first + records, frontend, read)
        assert cursor.advance(cursor.revision, first, first + records, frontend, read)
        if self.strict:
            if fails:  # the log does not have it: the reader gets an error
                cursor.persisting()
                cursor.take_back(first)
                return
            self.persist()
            assert cursor.persisted_seq == first + records
        self.readings.append(Reading(read, cursor.revision, frontend, first + 1, first + records))

    @precondition(lambda self: self.readings)
    @rule(at=st.integers(0, 20), log_fails=st.booleans())
    def answer_is_passed_on(self, at: int, log_fails: bool) -> None:
        reading = self.readings.pop(at % len(self.readings))
        self.received += range(reading.first_seq, reading.last_seq + 1)
        self.cursor.passed_on(reading.revision, 1 - reading.frontend, reading.read)  # another frontend's number
        self.cursor.passed_on(reading.revision, reading.frontend, reading.read)
        if not self.strict:
            self.persist(fails=log_fails)

    @precondition(lambda self: self.readings)
    @rule(at=st.integers(0, 20))
    def answer_fails(self, at: int) -> None:
        reading = self.readings.pop(at % len(self.readings))
        self.cursor.failed(reading.revision, reading.frontend, reading.read)

    @rule(frontend=st.integers(0, 1))
    def frontend_dies(self, frontend: int) -> None:
        self.readings = [reading for reading in self.readings if reading.frontend != frontend]
        self.cursor.frontend_died(frontend)

    @rule()
    def shard_dies(self) -> None:
        """Answers that are under way may come through all the same."""
        bodies = self.cursors.bodies()
        first_revision = self.cursor.revision + 100
        self.cursors = Cursors()
        for body in bodies:
            self.cursors.logged(body)
        self.cursors.restart(first_revision)

    @invariant()
    def as_promised(self) -> None:
        if not hasattr(self, "cursors"):
            return
        cursor = self.cursor
        assert cursor.persisted_seq <= cursor.settled_seq <= cursor.seq
        if self.strict:
            assert len(set(self.received)) == len(self.received)
            assert cursor.persisted_seq == cursor.seq
        else:
            assert set(self.received) >= set(range(1, cursor.settled_seq + 1))


CursorMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestCursorMachine = CursorMachine.TestCase


@given(st.integers(1, 5), st.integers(0, 30), st.booleans())
def test_a_crash_takes_back_at_most_n_reads_of_one_reader_after_the_other(every: int, reads: int, lost: bool) -> None:
    cursors = Cursors()
    cursors.logged(CursorBody("c", "at_least_once", every, 0))
    cursor = cursors.get("t", "c")
    for at in range(reads):
        assert cursor.advance(cursor.revision, at, at + 1, 0, at)
        if lost and at == reads - 1:
            break
        cursor.passed_on(cursor.revision, 0, at)
        if cursor.to_persist:
            cursor.persisting()
            cursor.persisted(cursor.settled_seq)
    assert reads - cursor.persisted_seq <= every
    assert reads - cursor.persisted_seq >= (1 if lost and reads else 0)
    cursor.frontend_died(1)
    assert cursor.seq == reads
    cursor.frontend_died(0)
    assert cursor.seq == reads - (1 if lost and reads else 0)
