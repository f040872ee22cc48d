"""The lease machine against a model that looks at every job each time, under a clock that the test owns (api §9)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.core.cost import lines_of
from tests.core.list_index import ListIndex
from tests.kept import items_kept
from topics.core import jobs
from topics.core import leases as lease_machine
from topics.core.config import TopicConfig
from topics.core.floors import EvictReason
from topics.core.job import JobView, Now, QueueState, State
from topics.core.leases import CARRY_MS, Leases
from topics.core.topic import Topic

START = Now(1_700_000_000_000, 5_000)
RECORD_BYTES = 100


def queue_topic() -> Topic:
    return Topic(1, "q", TopicConfig(type="queue"), ListIndex(1))


def leases_of(topic: Topic) -> Leases:
    assert topic.queue is not None
    return topic.queue


def append(topic: Topic, count: int) -> range:
    first = topic.head_seq + 1
    topic.appended(1, array("Q", [RECORD_BYTES << 32] * count), array("Q", [0] * count), RECORD_BYTES * count)
    return range(first, first + count)


@dataclass
class ModelJob:
    """The model's knowledge of one live, unacknowledged job."""

    seq: int
    deliver_at_ms: int = 0
    order_key: str = ""
    due_ms: int = 0
    """Monotonic: end of the delay it was written with, in the life that saw it written."""
    deliveries: int = 0
    node: str = ""
    lease_no: int = 0
    until_ms: int = 0
    """Monotonic: end of the lease (with a node) or of the delay (without)."""
    deadline_ms: int = 0
    """The same on the wall clock as it was then: all that outlives a restart."""
    held: bool = False
    returned: bool = False

    def until(self, now: Now, wait_ms: int) -> None:
        self.until_ms, self.deadline_ms = now.mono_ms + wait_ms, now.wall_ms + wait_ms

    def its_time_has_come(self, now: Now) -> bool:
        return self.due_ms <= now.mono_ms if self.due_ms else self.deliver_at_ms <= now.wall_ms


@dataclass
class Model:
    jobs: dict[int, ModelJob] = field(default_factory=dict)

    def first_of_its_key(self, job: ModelJob) -> bool:
        return not job.order_key or min(j.seq for j in self.jobs.values() if j.order_key == job.order_key) == job.seq

    def settle(self, now: Now) -> None:
        for job in self.jobs.values():
            if job.until_ms and job.until_ms <= now.mono_ms:
                job.node, job.until_ms, job.returned, job.held = "", 0, True, False

    def ready(self, now: Now) -> list[int]:
        """In the order in which they are handed out."""
        free = [job for job in self.jobs.values() if not job.held and not job.node and not job.until_ms]
        again = sorted(job.seq for job in free if job.returned)
        rest = [
            job.seq for job in free if not job.returned and job.its_time_has_come(now) and self.first_of_its_key(job)
        ]
        return again + sorted(rest)

    def scheduled(self, now: Now) -> int:
        free = [job for job in self.jobs.values() if not job.held and not job.node]
        later = [job for job in free if not job.until_ms and not job.returned and not job.its_time_has_come(now)]
        return sum(bool(job.until_ms) for job in free) + sum(map(self.first_of_its_key, later))

    def leased(self) -> list[int]:
        return sorted(job.seq for job in self.jobs.values() if job.node and not job.held)


class LeaseMachine(RuleBasedStateMachine):
    """Real `Topic` and `Leases`; the steps are what a shard does with them."""

    @initialize(keep=st.booleans(), deliveries_max=st.sampled_from([0, 0, 2]), tidy=st.booleans())
    def begin(self, keep: bool, deliveries_max: int, tidy: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        if tidy:  # nothing that is over is kept
            self.patch.setattr(jobs, "_entries_max", lambda current: current)
        self.keep = keep
        self.deliveries_max = deliveries_max
        self.now = START
        self.topic = queue_topic()
        self.leases = leases_of(self.topic)
        self.leases.start(START, 100, keep_leases=True)
        self.model = Model()
        self.done: set[int] = set()

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    # -- records

    @rule(count=st.integers(1, 6))
    def produce(self, count: int) -> None:
        for seq in append(self.topic, count):
            self.model.jobs[seq] = ModelJob(seq)

    @rule(
        delays=st.lists(st.tuples(st.sampled_from([0, 0, 30, 200]), st.sampled_from(["", "a", "b"])), max_size=5),
        at_a_time=st.booleans(),
    )
    def produce_with_attributes(self, delays: list[tuple[int, str]], at_a_time: bool) -> None:
        if not delays:
            return
        for seq, (delay_ms, order_key) in zip(append(self.topic, len(delays)), delays, strict=True):
            deliver_at_ms = self.now.wall_ms + delay_ms if delay_ms else 0
            due_ms = self.now.mono_ms + delay_ms if delay_ms and not at_a_time else 0
            self.model.jobs[seq] = ModelJob(seq, deliver_at_ms, order_key, due_ms)
            if deliver_at_ms or order_key:
                self.leases.add(seq, deliver_at_ms, order_key, due_ms)

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        floor = self.topic.earliest_seq + int(share * (self.topic.head_seq + 1 - self.topic.earliest_seq))
        self.topic.evict_below(floor, EvictReason.CAP)
        self.model.jobs = {seq: job for seq, job in self.model.jobs.items() if seq >= floor}
        self.done = {seq for seq in self.done if seq >= floor}

    @rule(picks=st.sets(st.integers(0, 30), max_size=5))
    def delete_some(self, picks: set[int]) -> None:
        live = sorted(self.model.jobs.keys() | self.done)
        seqs = sorted({live[pick % len(live)] for pick in picks}) if live else []
        self.topic.removed(self.topic.plan_removal(seqs, set(seqs)), self.topic.revision + 1)
        for seq in seqs:
            self.model.jobs.pop(seq, None)
            self.done.discard(seq)

    # -- consumers

    @rule(node=st.sampled_from(["one", "two"]), most=st.integers(1, 6), lease_ms=st.sampled_from([10, 50, 500]))
    def claim(self, node: str, most: int, lease_ms: int) -> None:
        self.advance()
        expected: list[int] = []
        dead: list[int] = []
        for seq in self.model.ready(self.now):
            if len(expected) == most:
                break
            job = self.model.jobs[seq]
            (dead if self.deliveries_max and job.deliveries >= self.deliveries_max else expected).append(seq)
        taken, got_dead = self.leases.take(most, self.deliveries_max, 3, self.now)
        got = self.leases.lease(taken, node, lease_ms, self.now, None)
        assert got.seqs == sorted(expected)
        assert sorted(got_dead) == sorted(dead)
        assert got.deadline_ms == self.now.wall_ms + lease_ms
        for at, seq in enumerate(got.seqs):
            job = self.model.jobs[seq]
            job.node, job.lease_no = node, got.first_lease_no + at
            job.until(self.now, lease_ms)
            job.deliveries += 1
            job.returned = False
            assert got.deliveries[at] == job.deliveries
        for seq in got_dead:
            self.model.jobs[seq].held = True
            self.model.jobs[seq].returned = False
            self.model.jobs[seq].until_ms = self.now.mono_ms + CARRY_MS

    def chosen(self, picks: list[int]) -> list[int]:
        """Some seqs, leased or not, some of them unknown."""
        known = [*sorted(self.model.jobs), self.topic.head_seq + 7]
        return [known[pick % len(known)] for pick in picks]

    def owned(self, node: str, seqs: list[int], fence: bool) -> list[int]:
        """Checked against the model: those that count."""
        jobs = self.model.jobs
        expected = [s for s in dict.fromkeys(seqs) if s in jobs and jobs[s].node == node and not jobs[s].held]
        lease_nos = [jobs[s].lease_no if s in jobs else 1 for s in seqs] if fence else None
        marked, skipped = self.leases.leased_to(node, seqs, lease_nos)
        assert marked == expected
        rest = list(seqs)
        for seq in expected:
            rest.remove(seq)
        assert sorted(skipped) == sorted(rest)
        if lease_nos is not None:
            wrong = [lease_no + 1 for lease_no in lease_nos]
            assert self.leases.leased_to(node, seqs, wrong)[0] == []
        return marked

    @rule(
        node=st.sampled_from(["one", "two"]),
        picks=st.lists(st.integers(0, 30), min_size=1, max_size=6),
        fence=st.booleans(),
        fails=st.booleans(),
    )
    def ack(self, node: str, picks: list[int], fence: bool, fails: bool) -> None:
        self.advance()
        seqs = self.owned(node, self.chosen(picks), fence)
        self.leases.hold(seqs)
        if fails:
            self.leases.unhold(seqs)
            return
        if self.keep:
            self.leases.finish([(seq, seq) for seq in seqs])
            self.done |= set(seqs)
        else:
            self.topic.removed(self.topic.plan_removal(sorted(seqs), set(seqs)), self.topic.revision + 1)
        for seq in seqs:
            del self.model.jobs[seq]

    @rule(
        node=st.sampled_from(["one", "two"]),
        picks=st.lists(st.integers(0, 30), min_size=1, max_size=6),
        delay_ms=st.sampled_from([0, 0, 25]),
    )
    def nack(self, node: str, picks: list[int], delay_ms: int) -> None:
        self.advance()
        seqs = self.owned(node, self.chosen(picks), False)
        self.leases.release(seqs, delay_ms, self.now)
        for seq in seqs:
            job = self.model.jobs[seq]
            job.node, job.returned = "", True
            job.until_ms = 0
            if delay_ms:
                job.until(self.now, delay_ms)

    @rule(
        node=st.sampled_from(["one", "two"]),
        picks=st.lists(st.integers(0, 30), min_size=1, max_size=6),
        lease_ms=st.sampled_from([10, 400]),
        fails=st.booleans(),
    )
    def extend(self, node: str, picks: list[int], lease_ms: int, fails: bool) -> None:
        self.advance()
        seqs = self.owned(node, self.chosen(picks), False)
        former = self.leases.extend(seqs, lease_ms, self.now)
        if fails:
            self.leases.unextend(former)
            return
        for seq in seqs:
            self.model.jobs[seq].until(self.now, lease_ms)

    @rule(picks=st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
    def carry(self, picks: list[int]) -> None:
        """A redrive takes what nobody has."""
        self.advance()
        live = sorted(self.model.jobs.keys() | self.done)
        seqs = sorted({live[pick % len(live)] for pick in picks}) if live else []
        free = set(self.model.ready(self.now))
        free |= {seq for seq, job in self.model.jobs.items() if job.until_ms and not job.node and not job.held}
        carried = self.leases.carry(seqs, 3, self.now)
        assert carried == [seq for seq in seqs if seq in free]
        for seq in carried:
            job = self.model.jobs[seq]
            job.held, job.returned, job.until_ms = True, False, self.now.mono_ms + CARRY_MS

    @rule(
        state=st.sampled_from([None, *get_args(State)]),
        share=st.floats(0, 1),
        most=st.integers(1, 20),
        looks=st.integers(1, 9),
        passes=st.integers(1, 30),
    )
    def peek(self, state: State | None, share: float, most: int, looks: int, passes: int) -> None:
        """All pages together are what the model says."""
        self.advance()
        from_seq = int(share * self.topic.head_seq)
        ready = set(self.model.ready(self.now))

        def view(seq: int) -> JobView:
            job = self.model.jobs.get(seq)
            if job is None:
                return JobView(seq, "done", 0, 0, "", "")
            said: tuple[State, int] = ("waiting", 0)
            if job.held:
                said = "dead", 0
            elif job.node:
                said = "leased", job.deadline_ms
            elif job.until_ms:
                said = "scheduled", job.deadline_ms
            elif seq not in ready:
                said = ("scheduled", job.deliver_at_ms) if self.model.first_of_its_key(job) else ("behind", 0)
            return JobView(seq, *said, job.deliveries, "" if job.held else job.node, job.order_key)

        live = [view(seq) for seq in sorted(self.model.jobs.keys() | self.done) if seq > from_seq]
        expected = [one for one in live if one.state == state or (state is None and one.state != "done")]
        found: list[JobView] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lease_machine, "PEEK_LOOK_MAX", looks)
            patch.setattr(lease_machine, "PEEK_PASS_MAX", passes)
            while from_seq < self.topic.head_seq:
                page, up_to_seq = self.leases.peek(from_seq, state, most)
                assert len(page) <= min(most, looks, passes)
                assert from_seq < up_to_seq
                assert all(from_seq < one.seq <= up_to_seq for one in page)
                found += page
                from_seq = up_to_seq
        assert found == expected

    @rule(back=st.booleans())
    def dead_letters_arrive_or_not(self, back: bool) -> None:
        seqs = sorted(seq for seq, job in self.model.jobs.items() if job.held)
        assert self.leases.carried_by(3, self.model.jobs) == seqs
        assert self.leases.carried_by(4, self.model.jobs) == []
        if back:
            self.leases.release(seqs, 0, self.now)
            for seq in seqs:
                job = self.model.jobs[seq]
                job.held, job.returned, job.node, job.until_ms = False, True, "", 0
        else:
            self.topic.removed(self.topic.plan_removal(seqs, set(seqs)), self.topic.revision + 1)
            for seq in seqs:
                del self.model.jobs[seq]

    # -- time and restarts

    @rule(ms=st.sampled_from([1, 9, 60, 600, CARRY_MS]), wall_step_ms=st.sampled_from([0, 0, 0, 500]))
    def pass_time(self, ms: int, wall_step_ms: int) -> None:
        self.now = Now(self.now.wall_ms + ms + wall_step_ms, self.now.mono_ms + ms)

    @rule(keep_leases=st.booleans())
    def restart(self, keep_leases: bool) -> None:
        """The state goes through a snapshot into a machine over the same records."""
        self.advance()
        for job in self.model.jobs.values():
            if job.held:  # nobody knows of dead letters on their way any more
                job.held, job.returned, job.node, job.until_ms = False, True, "", 0
        self.leases.release(
            [
                seq
                for seq in sorted(self.model.jobs)
                if self.model.jobs[seq].deliveries
                and self.model.jobs[seq].returned
                and not self.model.jobs[seq].until_ms
            ],
            0,
            self.now,
        )
        state = self.leases.state()
        rebuilt = queue_topic()
        rebuilt.index, rebuilt.head_seq, rebuilt.records = self.topic.index, self.topic.head_seq, self.topic.records
        rebuilt.earliest_seq, rebuilt.evict_floor = self.topic.earliest_seq, self.topic.evict_floor
        rebuilt.live_bytes = self.topic.live_bytes
        self.topic, self.leases = rebuilt, leases_of(rebuilt)
        assert isinstance(state, QueueState)
        self.leases.restore(state)
        assert leases_of(rebuilt).state() == state
        # Wall and monotonic clock of the next life have nothing to do with each other.
        former = self.now
        self.now = Now(self.now.wall_ms, 17)
        self.leases.start(self.now, 10_000, keep_leases)
        for job in self.model.jobs.values():
            job.due_ms = 0  # by the wall clock from now on
            if not keep_leases:
                job.deliveries, job.node, job.until_ms, job.returned = 0, "", 0, False
            elif job.until_ms:
                left_ms = job.until_ms - former.mono_ms
                assert job.deadline_ms <= former.wall_ms + left_ms  # the wall clock only ever jumps forward here
                job.until_ms = 17 + max(0, job.deadline_ms - self.now.wall_ms)
            if not job.deliveries:
                job.returned = False

    def advance(self) -> None:
        self.model.settle(self.now)
        self.leases.advance(self.now)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        self.advance()
        assert self.leases.ready == len(self.model.ready(self.now))
        assert self.leases.in_flight == len(self.model.leased())
        assert self.leases.scheduled == self.model.scheduled(self.now)
        assert self.topic.records == len(self.model.jobs) + len(self.done)
        assert self.leases.done.count == len(self.done)

    @invariant()
    def wakes_in_time(self) -> None:
        """Nothing becomes ready by itself before `due_in_ms` says so."""
        if not hasattr(self, "model"):
            return
        due_ms = self.leases.due_in_ms(self.now)
        ends = [job.until_ms - self.now.mono_ms for job in self.model.jobs.values() if job.until_ms]
        ends += [
            job.due_ms - self.now.mono_ms
            for job in self.model.jobs.values()
            if job.due_ms > self.now.mono_ms and self.model.first_of_its_key(job) and not job.held and not job.node
        ]
        if ends:
            assert due_ms is not None
            assert due_ms <= min(ends)


class LongLeaseMachine(LeaseMachine):
    """The same, many times."""


LeaseMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestLeaseMachine = LeaseMachine.TestCase
LongLeaseMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestLongLeaseMachine = pytest.mark.long(LongLeaseMachine.TestCase)


class CountedRecords:
    """A million live records, and how many of them were looked at."""

    records = head_seq = 1_000_000
    earliest_seq = 1

    def __init__(self) -> None:
        self.looked_at = 0

    def live_from(self, seq: int, most: int) -> list[int]:
        found = list(range(seq, min(seq + most, self.head_seq + 1)))
        self.looked_at += len(found)
        return found

    def live_within(self, seq: int, most: int, looks: int) -> tuple[list[int], int]:
        found = self.live_from(seq, min(most, looks))
        return found, found[-1] if found else self.head_seq

    def live_of(self, seqs: Sequence[int]) -> list[int]:
        self.looked_at += len(seqs)
        return list(seqs)


def test_a_claim_costs_the_jobs_it_hands_out_and_waiting_jobs_cost_nothing() -> None:
    records = CountedRecords()
    leases = Leases(records)
    leases.start(START, 1, keep_leases=False)
    for _ in range(100):
        assert len(leases.lease(leases.take(1000, 0, 0, START)[0], "n", 60_000, START, None).seqs) == 1000
    assert records.looked_at == 100_000
    assert (leases.ready, leases.in_flight) == (900_000, 100_000)
    records.looked_at = 0
    leases.release([7, 99_999, 50_000], 0, START)
    assert leases.lease(leases.take(16, 0, 0, START)[0], "n", 60_000, START, None).seqs == [
        7,
        50_000,
        99_999,
        *range(100_001, 100_014),
    ]
    assert records.looked_at == 13
    assert items_kept(leases, records) < 500_000, "nothing for those that wait"


def test_a_peek_passes_over_so_many_dead_records_at_most_and_says_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One job for much later, dead ones, and one that waits. Where segments tell of the dead, they cost nothing."""
    topic, dead = queue_topic(), 5 * lease_machine.PEEK_PASS_MAX
    leases = leases_of(topic)
    leases.start(START, 1, keep_leases=True)
    leases.add(append(topic, 1)[0], START.wall_ms + 10**9, "")
    gone = list(append(topic, dead))
    topic.removed(topic.plan_removal(gone, set(gone)), topic.revision + 1)
    last_seq = append(topic, 1)[0]
    looked_at: list[int] = []
    entries = topic.index.entries

    def counted(first_seq: int, last_seq: int) -> array[int]:
        looked_at.append(last_seq - first_seq + 1)
        return entries(first_seq, last_seq)

    monkeypatch.setattr(topic.index, "entries", counted)
    found: list[int] = []
    from_seq = looks = 0
    while from_seq < topic.head_seq:
        page, from_seq = leases.peek(from_seq, None, 10)
        assert sum(looked_at) <= lease_machine.PEEK_PASS_MAX
        looked_at.clear()
        found += [one.seq for one in page]
        looks += 1
    assert found == [1, last_seq]
    assert looks == 6
    monkeypatch.setattr(topic.index, "behind_deleted", lambda seq: last_seq if 100 < seq < last_seq else seq)
    page, from_seq = leases.peek(0, None, 10)
    assert ([one.seq for one in page], from_seq) == ([1, last_seq], last_seq)
    assert sum(looked_at) < 500


def started(jobs: int, scheduled: int = 0) -> Leases:
    """A queue of so many fresh jobs behind so many that are scheduled for much later."""
    topic = queue_topic()
    leases = leases_of(topic)
    leases.start(START, 1, keep_leases=True)
    for seq in append(topic, scheduled) if scheduled else ():
        leases.add(seq, START.wall_ms + 10**9, "")
    append(topic, jobs)
    return leases


def test_a_claim_does_not_cost_the_jobs_that_are_scheduled() -> None:
    most: list[int] = []
    for scheduled in (10, 20_000):
        leases = started(1_000, scheduled)

        def claim_and_nack(leases: Leases = leases) -> None:
            got = leases.lease(leases.take(1, 0, 0, START)[0], "n", 1_000, START, None)
            leases.release(got.seqs, 0, START)

        claim_and_nack()
        most.append(max(lines_of(claim_and_nack) for _ in range(200)))
    assert most[1] <= most[0] * 1.2, most


def test_a_claim_does_not_cost_the_jobs_of_other_kinds_behind_a_plain_one() -> None:
    """Many that can be handed out, a plain one, and as many again: that one is looked for only as far as it matters."""
    most: list[int] = []
    for waiting in (200, 20_000):
        topic = queue_topic()
        leases = leases_of(topic)
        leases.start(START, 1, keep_leases=True)
        attributed = list(append(topic, waiting))
        plain = append(topic, 1)[0]
        attributed += append(topic, waiting)
        for seq in attributed:
            leases.add(seq, 0, f"key{seq}")
        got: list[int] = []

        def claim(leases: Leases = leases, got: list[int] = got) -> None:
            got += leases.lease(leases.take(10, 0, 0, START)[0], "n", 60_000, START, None).seqs

        most.append(max(lines_of(claim) for _ in range(18)))
        assert got == list(range(1, 181))
        for _ in range((waiting - 180) // 10):
            claim()
        most.append(max(lines_of(claim) for _ in range(4)))  # the plain one, and those behind it
        assert got == list(range(1, waiting + 41))
        assert plain in got
    few, few_behind, many, many_behind = most
    assert many <= few * 1.3, most
    assert many_behind <= few_behind * 1.3, most


def test_jobs_that_cannot_be_handed_out_are_passed_over_once() -> None:
    """Plain ones far apart, and between them only jobs for much later."""
    topic = queue_topic()
    leases = leases_of(topic)
    leases.start(START, 1, keep_leases=True)
    plain: list[int] = []
    for _ in range(5):
        plain += append(topic, 1)
        for seq in append(topic, 10_000):
            leases.add(seq, START.wall_ms + 10**9, "")
    got: list[int] = []

    def claim(most: int) -> None:
        got.extend(leases.lease(leases.take(most, 0, 0, START)[0], "n", 60_000, START, None).seqs)

    cost = [lines_of(lambda: claim(1)) for _ in range(5)]
    assert got == plain
    cost.append(lines_of(lambda: claim(1)))
    assert sum(cost) < 50_000 * 10, cost
    assert lines_of(lambda: claim(10)) < 100
    assert got == plain


@pytest.mark.parametrize("kind", ["ready", "returned", "scheduled", "behind", "leased"])
@pytest.mark.parametrize("end", ["evicted", "deleted", "acknowledged"])
def test_jobs_that_are_gone_cost_nothing_though_nobody_claims(kind: str, end: str) -> None:
    """Always 50 there, 5,000 come and go."""
    topic = queue_topic()
    leases = leases_of(topic)
    leases.start(START, 1, keep_leases=True)
    if kind == "behind":  # one is first for ever
        leases.add(append(topic, 1)[0], 0, "k")
    most = 0
    for _ in range(100):
        seqs = list(append(topic, 50))
        for seq in seqs:
            if kind == "scheduled":
                leases.add(seq, START.wall_ms + 10**9, "")
            elif kind != "leased":
                leases.add(seq, 0, "k" if kind == "behind" else f"k{seq}")
        if kind in ("leased", "returned"):
            leases.lease(leases.take(50, 0, 0, START)[0], "n", 10**6, START, None)
        if kind == "returned":
            leases.release(seqs, 0, START)
        if end == "evicted" and kind != "behind":
            topic.evict_below(seqs[-1] + 1, EvictReason.CAP)
        elif end == "acknowledged":
            leases.finish([(seqs[0], seqs[-1])])
        else:
            topic.removed(topic.plan_removal(seqs, set(seqs)), topic.revision + 1)
        most = max(most, items_kept(leases, topic))
    assert most < 500
    assert leases.ready == (kind == "behind")


def test_who_does_not_bring_a_dead_letter_away_loses_it_whatever_else_happened_meanwhile() -> None:
    leases = started(2)
    leases.release(leases.lease(leases.take(1, 1, 0, START)[0], "n", 1_000, START, None).seqs, 0, START)
    seqs, dead = leases.take(1, 1, 0, START)
    assert (seqs, dead) == ([2], [1])
    other = leases.lease(seqs, "n", 10 * CARRY_MS, START, None)
    for _ in range(200):  # each leaves behind when the lease would have ended before
        leases.extend(other.seqs, 10 * CARRY_MS, START)
    assert leases.advance(Now(START.wall_ms + CARRY_MS, START.mono_ms + CARRY_MS))
    assert leases.ready == 1


def test_a_queue_that_is_started_and_reads_on_in_a_log_has_its_leases() -> None:
    """A service that follows another one takes the jobs of each part of the log as its own."""
    leases, reader = started(3), started(3)
    leases.lease(leases.take(3, 0, 0, START)[0], "n", 1_000, START, None)
    for body in leases.bodies([1, 2]):
        reader.logged(body)
    assert reader.state().leases == leases.bodies([1, 2])
    leases.release([1], 0, START)
    leases.release([2], 500, START)
    for body in leases.bodies([1, 2]):
        reader.logged(body)
    assert {body.node for body in reader.state().leases} == {""}
    assert reader.state().leases == leases.bodies([1, 2])
