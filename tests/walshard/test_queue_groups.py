"""Queue requests of one group: each finds what those before it left, though the log has none of it yet.

A model of dictionaries takes the requests in their order, one after the other. Whatever comes together, the answers,
the counts and what is left must be as if each had been a commit of its own; but what a removal takes may still be
handed out until the group is committed.
"""

from __future__ import annotations

import errno
import itertools
import shutil
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.job import JobView, Now, State
from topics.core.leases import CARRY_MS, PEEK_LOOK_MAX, Leases
from topics.core.topic import Topic
from topics.shm.append_messages import AppendReply
from topics.shm.asks import Message
from topics.shm.queue_messages import (
    Ack,
    Bury,
    Claim,
    Dealt,
    Extend,
    Nack,
    Release,
    Remove,
    Unclaim,
    WorkClose,
    WorkOpen,
)
from topics.shm.topic_messages import Hello, PutTopic

MINUTE_MS = 60_000
LATER_MS = 10**9
NODES = ("one", "two")


def queue(rig: Rig, jobs: int, **config: Any) -> None:
    rig.call(PutTopic("q", TopicConfig(type="queue", **config), True))
    if jobs:
        rig.append("q", *[b"%d" % n for n in range(1, jobs + 1)])


def claim(rig: Rig, most: int, node: str = "w") -> Dealt:
    dealt = rig.call(Claim("q", node, most, MINUTE_MS, 1))
    assert isinstance(dealt, Dealt)
    return dealt


def together(rig: Rig, *calls: Message) -> list[Any]:
    """The answers to requests that come as one group."""
    ids = [rig.post_call(call) for call in calls]
    rig.run()
    return [rig.replies.get(id) for id in ids]


def check_counts(rig: Rig) -> None:
    """The counts are those of what is there."""
    topic = rig.hosted("q").topic
    shown = rig.view("q")
    assert (shown.records, shown.live_bytes) == (topic.records, topic.live_bytes)
    there = topic.index.live_size(topic.earliest_seq, topic.head_seq) if topic.records else (0, 0)
    assert (topic.records, topic.live_bytes) == there


def check_machine(rig: Rig) -> Leases:
    """Each live job is in one state, and is handed out once when it is its turn."""
    topic = rig.hosted("q").topic
    leases = topic.queue
    assert leases is not None
    live = set(topic.live_from(topic.earliest_seq, topic.records + 1))
    done = {seq for first, last in leases.done.runs() for seq in range(first, last + 1)}
    assert done <= live
    assert leases.done.count == len(done)
    in_state: dict[State, list[int]] = {state: [] for state in get_args(State)}
    for job in jobs_of(leases):
        in_state[job.state].append(job.seq)
    assert sorted(itertools.chain(*in_state.values())) == sorted(live - done)
    assert (leases.ready, leases.in_flight) == (len(in_state["waiting"]), len(in_state["leased"]))
    # A job whose lease has run out stays with its stream until it is somebody else's.
    held = {holder: leases.leases_of(holder) for holder in leases.holders_at(0)}
    ever_held = list(itertools.chain(*held.values()))
    assert len(ever_held) == len(set(ever_held)), "two streams have it"
    assert live - done >= set(ever_held)
    for body in leases.bodies(in_state["leased"]):
        assert not body.stream or set(body.seqs) <= set(held[0, body.stream])
    assert held.get((0, 0), []) == in_state["dead"]
    check_turns(copy_of(leases, topic), in_state["waiting"], live - done, now_of(rig))
    return leases


def jobs_of(leases: Leases) -> list[JobView]:
    """Return all jobs that are not done."""
    return leases.peek(0, None, PEEK_LOOK_MAX)[0]


def copy_of(leases: Leases, topic: Topic) -> Leases:
    """Return a copy to play with; it has the records of this one."""
    return deepcopy(leases, {id(topic): topic})


def check_turns(mine: Leases, waiting: list[int], left: set[int], now: Now) -> None:
    """Take all jobs of a copy: those that wait now, and later the others, each once."""
    taken = mine.take(len(left) + 1, 0, 0, now)[0]
    assert taken == waiting
    while left:
        assert left.issuperset(taken), "handed out twice"
        left = left.difference(taken)
        mine.finish([(seq, seq) for seq in taken])
        now = Now(now.wall_ms + LATER_MS, now.mono_ms + LATER_MS)
        mine.advance(now)
        taken = mine.take(len(left) + 1, 0, 0, now)[0]
        assert taken or not left, f"never handed out: {left}"


def carried_until(mine: Leases, now: Now) -> dict[int, int]:
    """Let time pass for a copy: return when each dead job is one of the others again."""
    until_ms: dict[int, int] = {}
    while dead := {job.seq for job in jobs_of(mine) if job.state == "dead"}:
        wait_ms = mine.due_in_ms(now)
        assert wait_ms is not None
        now = Now(now.wall_ms + wait_ms, now.mono_ms + wait_ms)
        mine.advance(now)
        for job in jobs_of(mine):
            if job.seq in dead and job.state != "dead":
                until_ms[job.seq] = now.mono_ms
    return until_ms


def now_of(rig: Rig) -> Now:
    return Now(rig.clock.now_ms(), rig.clock.monotonic_ms())


# -- one removal and another of the same record


@pytest.mark.parametrize("config", [{}, {"on_ack": "keep"}, {"leases_durable": True}])
@pytest.mark.parametrize("ack_first", [False, True])
def test_a_job_is_removed_or_acknowledged_and_counted_once(rig: Rig, config: dict[str, Any], ack_first: bool) -> None:
    queue(rig, 3, **config)
    claim(rig, 1)
    calls: list[Message] = [Ack("q", "w", [1], None), Remove("q", [1])]
    acked, removed = together(rig, *calls) if ack_first else reversed(together(rig, *reversed(calls)))
    keeps = config.get("on_ack") == "keep"
    assert (acked.count, acked.skipped) == ((1, []) if ack_first else (0, [1]))
    assert removed.count == (0 if ack_first and not keeps else 1)
    assert (rig.view("q").records, rig.view("q").jobs_ready, rig.view("q").jobs_in_flight) == (2, 2, 0)
    check_counts(rig)
    assert claim(rig, 5).seqs == [2, 3]
    rig.boot()
    assert rig.view("q").records == 2


def test_the_last_job_removed_and_acknowledged_leaves_an_empty_queue(rig: Rig) -> None:
    queue(rig, 1)
    claim(rig, 1)
    together(rig, Remove("q", [1]), Ack("q", "w", [1], None))
    assert (rig.view("q").records, rig.view("q").jobs_ready) == (0, 0)
    rig.append("q", b"2")
    assert claim(rig, 1).seqs == [2]


@pytest.mark.parametrize("call", [Nack("q", "w", [1], None, 0), Extend("q", "w", [1], None, 500)])
@pytest.mark.parametrize("durable", [False, True])
def test_what_is_being_removed_is_nobodys(rig: Rig, call: Nack | Extend, durable: bool) -> None:
    queue(rig, 2, leases_durable=durable)
    claim(rig, 1)
    assert together(rig, Remove("q", [1]), call)[1].skipped == [1]
    check_counts(rig)
    assert claim(rig, 5).seqs == [2]


@pytest.mark.parametrize("other", [Remove("q", [1]), Bury("q", [1])])
@pytest.mark.parametrize("bury_first", [False, True])
def test_a_dead_letter_is_buried_once(rig: Rig, other: Remove | Bury, bury_first: bool) -> None:
    queue(rig, 2, max_deliveries=1, dead_letter="dead")
    claim(rig, 1)
    rig.call(Nack("q", "w", [1], None, 0))
    assert claim(rig, 1).dead == [1]
    calls: list[Message] = [Bury("q", [1]), other]
    first, second = together(rig, *(calls if bury_first else reversed(calls)))
    assert (first.count, second.count) == (1, 0)
    assert rig.view("q").records == 1
    assert rig.view("q").jobs_dead_lettered == int(bury_first or isinstance(other, Bury))
    check_counts(rig)


# -- the end of a stream behind the end of its job


@pytest.mark.parametrize("config", [{}, {"on_ack": "keep"}, {"leases_durable": True}])
@pytest.mark.parametrize("end", [WorkClose("q", 7), Hello(2)])
def test_what_a_stream_acknowledged_as_it_ended_is_done(rig: Rig, config: dict[str, Any], end: Message) -> None:
    queue(rig, 2, **config)
    rig.call(WorkOpen("q", 7, "s", 2, MINUTE_MS))
    assert [dealt.seqs for dealt in rig.dealt] == [[1, 2]]
    acked, _, claimed = together(rig, Ack("q", "s", [1], None), end, Claim("q", "b", 5, MINUTE_MS, 1))
    assert acked.count == 1
    assert claimed.seqs == [2]
    assert (rig.view("q").jobs_ready, rig.view("q").jobs_in_flight) == (0, 1)
    check_counts(rig)


@pytest.mark.parametrize("end", [WorkClose("q", 7), Hello(2)])
def test_what_a_stream_put_off_as_it_ended_is_nobodys_until_then(rig: Rig, end: Message) -> None:
    queue(rig, 1, leases_durable=True)
    rig.call(WorkOpen("q", 7, "s", 1, MINUTE_MS))
    nacked, _, claimed = together(rig, Nack("q", "s", [1], None, 5_000), end, Claim("q", "b", 5, MINUTE_MS, 1))
    assert (nacked.count, claimed.seqs) == (1, [])
    assert (rig.view("q").jobs_ready, rig.view("q").jobs_in_flight) == (0, 0)
    rig.clock.ms += 5_001
    mine = claim(rig, 5, "b")
    assert (mine.seqs, mine.deliveries) == ([1], [2])


def test_streams_that_end_together_are_one_commit(rig: Rig, fs: FaultyFileSystem) -> None:
    queue(rig, 5, leases_durable=True)
    for stream in range(1, 6):
        rig.call(WorkOpen("q", stream, f"s{stream}", 1, MINUTE_MS))
    assert sorted(seq for dealt in rig.dealt for seq in dealt.seqs) == [1, 2, 3, 4, 5]
    fs.log.clear()
    together(rig, *[WorkClose("q", stream) for stream in range(1, 6)])
    assert fs.log.count("pwritev") == 1
    assert (rig.view("q").jobs_ready, rig.view("q").jobs_in_flight) == (5, 0)
    rig.boot()
    assert (rig.view("q").jobs_ready, rig.view("q").jobs_in_flight) == (5, 0)


# -- a disk that fails


def test_a_group_that_the_log_refuses_is_undone_from_its_end(rig: Rig, fs: FaultyFileSystem) -> None:
    queue(rig, 2, leases_durable=True)
    claim(rig, 1)
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"pwritev"})))
    replies = together(
        rig,
        Extend("q", "w", [1], None, 10 * MINUTE_MS),
        Extend("q", "w", [1], None, 20 * MINUTE_MS),
        Ack("q", "w", [1], None),
        Claim("q", "w", 1, 30 * MINUTE_MS, 2),
        Ack("q", "w", [2], None),
    )
    assert all(isinstance(reply, TopicsError) for reply in replies)
    fs.arm(None)
    assert (rig.view("q").records, rig.view("q").jobs_ready, rig.view("q").jobs_in_flight) == (2, 1, 1)
    rig.clock.ms += MINUTE_MS
    again = claim(rig, 5)
    assert (again.seqs, again.deliveries) == ([1, 2], [2, 1])


# -- anything with anything


@dataclass
class ModelJob:
    node: str = ""
    lease_no: int = 0
    stream: int = 0
    until_ms: int = 0
    """End of its lease, its delay, or its way to the dead letters."""
    carried: bool = False
    done: bool = False
    deliveries: int = 0
    deliver_at_ms: int = 0
    order_key: str = ""

    def free(self) -> None:
        self.node, self.stream, self.until_ms, self.carried = "", 0, 0, False


@dataclass
class Model:
    jobs: dict[int, ModelJob] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)
    """Jobs removed in this group."""
    buried: int = 0

    def ready(self, seq: int, now_ms: int) -> bool:
        job = self.jobs[seq]
        if job.node or job.until_ms or job.carried or job.done:
            return False
        return job.deliver_at_ms <= now_ms and (not job.order_key or self.first_of(job.order_key) == seq)

    def first_of(self, order_key: str) -> int:
        return min(seq for seq, job in self.jobs.items() if job.order_key == order_key and not job.done)


picks = st.lists(st.integers(0, 7), min_size=1, max_size=3)
nodes = st.sampled_from(NODES)
commands = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 3)),
    st.tuples(st.just("append with"), st.sampled_from([0, 60]), st.sampled_from(["", "a", "b"])),
    st.tuples(st.just("claim"), nodes, st.integers(1, 4)),
    st.tuples(st.just("ack"), picks, st.booleans()),
    st.tuples(st.just("ack"), picks, st.booleans()),
    st.tuples(st.just("nack"), picks, st.sampled_from([0, 0, 40])),
    st.tuples(st.just("extend"), picks),
    st.tuples(st.just("unclaim"), picks),
    st.tuples(st.just("remove"), picks),
    st.tuples(st.just("open"), st.integers(1, 3)),
    st.tuples(st.just("close"), st.integers(0, 3)),
    st.tuples(st.just("bury"), picks),
    st.tuples(st.just("exhume"), picks),
    st.tuples(st.just("frontend dies")),
)


class Append(NamedTuple):
    records: int
    delay_ms: int = 0
    order_key: str = ""


Posted = Message | Append


class Groups(RuleBasedStateMachine):
    """Requests name what was known before the group, so requests of a group often name the same jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="topics-groups-")
        self.fs = FaultyFileSystem()
        self.rig = Rig(self.directory, self.fs)
        self.model = Model()
        self.streams: list[int] = []
        self.last_stream = 100
        self.lives = 1
        self.was_refused = False

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.directory)

    @initialize(keep=st.booleans(), durable=st.booleans(), deliveries_max=st.sampled_from([0, 2]))
    def begin(self, keep: bool, durable: bool, deliveries_max: int) -> None:
        self.keep, self.deliveries_max = keep, deliveries_max
        self.durable = durable
        queue(
            self.rig,
            0,
            on_ack="keep" if keep else "delete",
            leases_durable=durable,
            max_deliveries=deliveries_max,
            dead_letter="dead" if deliveries_max else None,
        )

    @rule(group=st.lists(commands, min_size=1, max_size=7))
    def group(self, group: list[tuple[Any, ...]]) -> None:
        self.settle()
        self.model.removed.clear()
        posted = self.post_all(group)
        self.rig.run()
        for call, request_id in posted:
            self.take(call, self.rig.replies.get(request_id))
        for dealt in self.rig.dealt:
            self.handed_out(dealt, self.node_of(dealt.stream), dealt.stream)
        self.rig.dealt.clear()

    @rule(group=st.lists(commands, min_size=1, max_size=7))
    def group_is_refused(self, group: list[tuple[Any, ...]]) -> None:
        """The log refuses the group. Each job is in one place then, whatever was undone; the model goes on from
        there.
        """
        self.settle()
        self.post_all(group)
        self.fs.arm(Fault(1, errno.EIO, calls=frozenset({"pwritev"})))
        self.rig.run()
        self.fs.arm(None)
        self.rig.run()
        self.rig.dealt.clear()
        self.was_refused = True
        self.begin_from(check_machine(self.rig))

    def begin_from(self, leases: Leases) -> None:
        topic = self.rig.hosted("q").topic
        there = topic.live_from(topic.earliest_seq, topic.records + 1)
        self.model.jobs = {seq: ModelJob(done=seq in leases.done) for seq in there}
        dead_until_ms = carried_until(copy_of(leases, topic), now_of(self.rig))
        for view in jobs_of(leases):
            job = self.model.jobs[view.seq]
            job.order_key, job.deliveries, job.node, job.until_ms = (
                view.order_key,
                view.deliveries,
                view.node,
                view.at_ms,
            )
            if view.state == "dead":
                job.carried, job.until_ms = True, dead_until_ms[view.seq]
            elif view.state == "leased":
                (body,) = leases.bodies([view.seq])
                (job.lease_no,), job.stream = body.lease_nos, body.stream
        for seq, deliver_at_ms, _order_key in leases.attributes().attributes:
            self.model.jobs[seq].deliver_at_ms = deliver_at_ms
        self.model.buried = leases.dead_lettered

    def post_all(self, group: list[tuple[Any, ...]]) -> list[tuple[Posted, int]]:
        return [(call, self.post(call)) for command in group if (call := self.call_of(command)) is not None]

    @rule(ms=st.sampled_from([1, 39, 200, CARRY_MS]))
    def pass_time(self, ms: int) -> None:
        self.rig.clock.ms += ms
        self.rig.run()
        self.settle()
        for dealt in self.rig.dealt:
            self.handed_out(dealt, self.node_of(dealt.stream), dealt.stream)
        self.rig.dealt.clear()

    @rule()
    def shard_dies(self) -> None:
        """The shard dies: leases that are not logged are lost, streams are opened again. After a refusal the log may
        have a lease that was given back since: the model goes on from there.
        """
        self.rig.boot()
        self.settle()
        if self.durable and self.was_refused:
            self.begin_from(check_machine(self.rig))
            self.was_refused = False
        self.streams.clear()
        for job in self.model.jobs.values():
            if not self.durable:
                job.free()
                job.deliveries = 0
            elif job.carried:
                job.free()
        if self.durable:  # a frontend would open its streams again: this one is gone as well
            self.lives += 1
            self.rig.post_call(Hello(self.lives))
            self.rig.run()
            self.frontend_died()

    # -- from a command to a request

    def call_of(self, command: tuple[Any, ...]) -> Posted | None:
        match command:
            case ("append", count):
                return Append(count)
            case ("append with", delay_ms, order_key):
                return Append(1, delay_ms, order_key)
            case ("claim", node, most):
                return Claim("q", node, most, 100, 1)
            case ("ack" | "nack" | "extend" | "unclaim" as what, picked, *more):
                leased = sorted(seq for seq, job in self.model.jobs.items() if job.node)
                if not leased:
                    return None
                seqs = [leased[pick % len(leased)] for pick in picked]
                node = self.model.jobs[seqs[0]].node
                lease_nos = [self.model.jobs[seq].lease_no for seq in seqs]
                if what == "ack":
                    return Ack("q", node, seqs, lease_nos if more[0] else None)
                if what == "nack":
                    return Nack("q", node, seqs, None, more[0])
                return Extend("q", node, seqs, None, 150) if what == "extend" else Unclaim("q", node, seqs, lease_nos)
            case ("remove", picked):
                live = sorted(self.model.jobs)
                return Remove("q", [live[pick % len(live)] for pick in picked]) if live else None
            case ("open", most):
                self.last_stream += 1
                self.streams.append(self.last_stream)
                return WorkOpen("q", self.last_stream, self.node_of(self.last_stream), most, 100)
            case ("close", at):
                return WorkClose("q", self.streams.pop(at % len(self.streams))) if self.streams else None
            case ("bury" | "exhume" as what, picked):
                carried = sorted(seq for seq, job in self.model.jobs.items() if job.carried)
                if not carried:
                    return None
                seqs = [carried[pick % len(carried)] for pick in picked]
                return Bury("q", seqs) if what == "bury" else Release("q", seqs, delay_ms=30)
        self.lives += 1
        self.streams.clear()
        return Hello(self.lives)

    def node_of(self, stream: int) -> str:
        return f"stream {stream}"

    def post(self, call: Posted) -> int:
        if not isinstance(call, Append):
            return self.rig.post_call(call)
        with_ = [(0, 0, call.delay_ms, call.order_key)] if call.delay_ms or call.order_key else None
        return self.rig.post_append("q", [b"x"] * call.records, jobs=with_)

    # -- what it does to the model

    def settle(self) -> None:
        for job in self.model.jobs.values():
            if job.until_ms and job.until_ms <= self.rig.clock.ms:
                job.free()

    def take(self, call: Posted, reply: Any) -> None:
        jobs, now_ms = self.model.jobs, self.rig.clock.ms
        assert not isinstance(reply, TopicsError), reply
        match call:
            case Append():
                assert isinstance(reply, AppendReply)
                deliver_at_ms = now_ms + call.delay_ms if call.delay_ms else 0
                for seq in range(reply.first_seq, reply.first_seq + reply.count):
                    jobs[seq] = ModelJob(deliver_at_ms=deliver_at_ms, order_key=call.order_key)
            case Claim():
                self.handed_out(reply, call.node, 0)
            case Ack():
                for seq in self.owned(call, reply):
                    if self.keep:
                        jobs[seq].free()
                        jobs[seq].done = True
                    else:
                        del jobs[seq]
            case Nack():
                for seq in self.owned(call, reply):
                    jobs[seq].free()
                    jobs[seq].until_ms = now_ms + call.delay_ms if call.delay_ms else 0
            case Extend():
                owned = self.owned(call, reply)
                assert reply.seqs == owned
                for seq in owned:
                    jobs[seq].until_ms = now_ms + call.lease_ms
            case Unclaim():
                for seq in self.owned(call, None):
                    jobs[seq].free()
                    jobs[seq].deliveries -= 1
            case Remove():
                there = {seq for seq in call.seqs if seq in jobs}
                assert reply.count == len(there)
                self.remove(there)
            case Bury():
                there = {seq for seq in call.seqs if seq in jobs and jobs[seq].carried}
                assert reply.count == len(there)
                self.remove(there)
                self.model.buried += len(there)
            case Release():
                for seq in set(call.seqs):
                    if seq in jobs and jobs[seq].carried:
                        jobs[seq].free()
                        jobs[seq].until_ms = now_ms + call.delay_ms
            case WorkClose():
                for job in jobs.values():
                    if job.stream == call.stream:
                        job.free()
            case Hello():
                self.frontend_died()

    def remove(self, seqs: set[int]) -> None:
        for seq in seqs:
            del self.model.jobs[seq]
        self.model.removed |= seqs

    def frontend_died(self) -> None:
        for job in self.model.jobs.values():
            if job.stream or job.carried:
                job.free()

    def handed_out(self, dealt: Dealt, node: str, stream: int) -> None:
        for at, seq in enumerate(dealt.seqs):
            if seq in self.model.removed:
                continue
            job = self.model.jobs[seq]
            assert self.model.ready(seq, self.rig.clock.ms), f"{seq} is not to be had: {job}"
            job.node, job.stream, job.lease_no = node, stream, dealt.first_lease_no + at
            job.until_ms = self.rig.clock.ms + 100
            job.deliveries += 1
            assert dealt.deliveries[at] == job.deliveries
            assert not self.deliveries_max or job.deliveries <= self.deliveries_max
        for seq in dealt.dead:
            if seq in self.model.removed:
                continue
            job = self.model.jobs[seq]
            assert self.model.ready(seq, self.rig.clock.ms)
            job.carried, job.until_ms = True, self.rig.clock.ms + CARRY_MS

    def owned(self, call: Ack | Nack | Extend | Unclaim, reply: Any) -> list[int]:
        """Return those of the named jobs that are its consumer's; check them against the answer."""
        jobs = self.model.jobs
        lease_nos = call.lease_nos or [0] * len(call.seqs)
        owned = [
            seq
            for seq, lease_no in dict(zip(call.seqs, lease_nos, strict=True)).items()
            if seq in jobs and jobs[seq].node == call.node and lease_no in (0, jobs[seq].lease_no)
        ]
        if reply is not None:
            skipped = list(call.seqs)
            for seq in owned:
                skipped.remove(seq)
            assert sorted(reply.skipped) == sorted(skipped)
        return owned

    # -- what must hold

    @invariant()
    def as_the_model_says(self) -> None:
        if not hasattr(self, "keep"):
            return
        jobs = self.model.jobs
        assert [seq for seq, _ in self.rig.read("q")] == sorted(jobs)
        check_counts(self.rig)
        check_machine(self.rig)
        shown = self.rig.view("q")
        assert shown.jobs_ready == sum(self.model.ready(seq, self.rig.clock.ms) for seq in jobs)
        assert shown.jobs_in_flight == sum(bool(job.node) for job in jobs.values())
        assert shown.jobs_dead_lettered == self.model.buried


class ManyGroups(Groups):
    """The same, many times."""


def test_a_lease_whose_return_the_log_refused_stands_after_a_crash_until_it_runs_out() -> None:
    """The job was free in the meantime: its client has gone. The model did not know that the log has the lease."""
    groups = Groups()
    try:
        groups.begin(keep=False, durable=True, deliveries_max=0)
        groups.group([("append", 1)])
        groups.group([("claim", "one", 1)])
        groups.group_is_refused([("unclaim", [0])])
        assert groups.rig.view("q").jobs_ready == 1
        groups.shard_dies()
        groups.as_the_model_says()
        assert groups.rig.view("q").jobs_in_flight == 1
        groups.pass_time(200)
        groups.as_the_model_says()
        assert groups.rig.view("q").jobs_ready == 1
    finally:
        groups.teardown()


Groups.TestCase.settings = settings(max_examples=15, stateful_step_count=15)
TestGroups = Groups.TestCase
ManyGroups.TestCase.settings = settings(max_examples=60, stateful_step_count=15)
TestManyGroups = pytest.mark.long(ManyGroups.TestCase)
