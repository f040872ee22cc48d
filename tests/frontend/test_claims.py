"""Claims whose answer cannot hold, or cannot be, what was leased for them: the jobs are free again, and said once."""

from __future__ import annotations

import asyncio
import os
import threading
from itertools import pairwise
from typing import Any, TypeVar, cast

import pytest

from tests.frontend.hosting import Hosting, Written
from tests.frontend.live import ColdStore, until
from tests.frontend.test_app import DEADLINE_S, Frontend, on_loop
from tests.frontend.test_reading_segments import damage
from topics.core.config import TopicConfig
from topics.core.job import JobView
from topics.frontend.entry import limits
from topics.frontend.entry.budget import Budget, Reservation
from topics.frontend.queues.dealt_jobs import ANSWER_BYTES_MAX, ASIDE_MS, PAGE_JOBS, ReadJobs
from topics.frontend.reads.reading import RecordPage, TopicReader
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards import arenas
from topics.shm import messages
from topics.shm.arena import ArenaWriter
from topics.shm.asks import Message
from topics.shm.control import Role
from topics.shm.messages import MessageKind
from topics.shm.queue_messages import (
    Claim,
    CursorGet,
    CursorList,
    Dealt,
    Peek,
    Peeked,
    Release,
    Unclaim,
    Waiting,
    WorkClose,
)
from topics.shm.topic_messages import CatchUp, CaughtUp, Expire, PutTopic, PutTopicReply

LEASE_NO = 700
DEADLINE_MS = 2_000_000

CallT = TypeVar("CallT", Claim, Peek, Unclaim, WorkClose, CatchUp, CursorGet, PutTopic)


class Shard:
    """The other end of the ring: it takes what comes, and what is taken makes room when the test says so."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._rings = frontend.hosting.shared.rings[0][0]
        self._read = 0

    def calls(self) -> list[tuple[int, Message]]:
        """New ones, with their request ids."""
        found = []
        for message, position in self._rings.requests.peek(self._read):
            self._read = position
            kind, request_id, _ = messages.head(message)
            if kind == MessageKind.CALL:
                found.append((request_id, messages.decode(message)))
        return found

    def free(self) -> None:
        self._rings.requests.consume(self._read)

    def answer(self, request_id: int, reply: Dealt | Peeked | Waiting | CaughtUp | CursorList | PutTopicReply) -> None:
        self._send(messages.encode_reply(request_id, reply))

    def deal(self, dealt: Dealt) -> None:
        """Deal jobs that nobody asked for at that moment."""
        self._send(messages.encode_dealt(0, dealt))

    def _send(self, message: bytearray) -> None:
        assert self._rings.replies.push(message)
        self._frontend.hosting.shared.frontend_wakes[0].signal_always()

    async def told(self, kind: type[CallT]) -> tuple[int, CallT]:
        """The next call of this kind, with its request id."""
        found: list[tuple[int, CallT]] = []

        def look() -> bool:
            found.extend((request_id, call) for request_id, call in self.calls() if isinstance(call, kind))
            return bool(found)

        await until(look)
        return found[0]

    async def claimed(self) -> int:
        """The id of the claim that comes next."""
        return (await self.told(Claim))[0]


def queue(hosting: Hosting, records: list[Written]) -> None:
    hosting.make("q", TopicConfig(type="queue"))
    hosting.write("q", records)


def restart(hosting: Hosting, frontend: Frontend, records: list[Written]) -> None:
    """The next life of the shard, with an arena of its own, `records` in its `queue`; the frontend hears of it."""
    hosting.arena = ArenaWriter(hosting.shared.identity, 0, 2)
    queue(hosting, records)
    hosting.shared.control.cell(Role.WALSHARD, 0).set("generation", 2)
    assert hosting.shared.rings[0][0].replies.push(messages.encode_generation())
    hosting.shared.frontend_wakes[0].signal_always()


class SlowCold(ColdStore):
    """The jobs of `queue` are in it; it answers once `gate` is set."""

    def __init__(self, hosting: Hosting) -> None:
        super().__init__(os.path.join(hosting.data_dir, "cold"))
        self.gate = threading.Event()
        self.before_read = lambda: self.gate.wait(DEADLINE_S)
        hosting.checkpoint("q", records_max=1)
        hosting.relocate("q", 1)
        hosting.store = self


def test_a_claim_is_answered_also_when_the_ring_has_no_room_for_what_did_not_fit(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", {"node": "w", "max": 3}))
        claim_id = await shard.claimed()
        while frontend.gateway.fullness < 1:
            frontend.gateway.post(0, Expire("x" * 200))
        shard.answer(claim_id, Dealt(1, [1, 2, 3], LEASE_NO, DEADLINE_MS, [1, 1, 1], 5))
        status, _, answer = await asked
        assert (status, [job["$seq"] for job in answer["claimed"]], answer["ready"]) == (200, [1, 2], 6)
        given_back: list[Message] = []

        def unclaimed() -> bool:
            shard.free()
            given_back.extend(call for _, call in shard.calls() if isinstance(call, Unclaim))
            return bool(given_back)

        await until(unclaimed)
        assert given_back == [Unclaim("q", "w", [3], [LEASE_NO + 2])]

    queue(hosting, [Written(b'"' + b"x" * (ANSWER_BYTES_MAX // 2) + b'"')] * 3)
    on_loop(hosting, test)


def test_jobs_whose_answer_finds_no_room_go_back_before_their_lease_is_over(hosting: Hosting) -> None:
    """Room on a connection of HTTP/2 comes when its client takes other answers, which may be never."""

    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        room = Budget(limits.CONNECTION_ANSWERS._replace(most_bytes=ANSWER_BYTES_MAX))
        other = Reservation(room)
        await other.replace(ANSWER_BYTES_MAX)
        claim = {"node": "w", "max": 2, "lease_ms": 100}
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", claim, Reservation(room)))
        claim_id = await shard.claimed()
        shard.answer(claim_id, Dealt(1, [1, 2], LEASE_NO, DEADLINE_MS, [1, 1], 5))
        status, _, answer = await asked
        assert (status, answer["error"]["code"]) == (429, "throttled")
        assert answer["error"]["detail"]["limit"] == "answer_bytes"
        assert (await shard.told(Unclaim))[1] == Unclaim("q", "w", [1, 2], [LEASE_NO, LEASE_NO + 1])
        assert not room.waiting
        other.close()
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", claim, Reservation(room)))
        claim_id = await shard.claimed()
        shard.answer(claim_id, Dealt(1, [1, 2], LEASE_NO, DEADLINE_MS, [1, 1], 5))
        status, _, answer = await asked
        assert (status, answer["count"]) == (200, 2)

    queue(hosting, [Written(b"1"), Written(b"2")])
    on_loop(hosting, test)


def test_a_peek_reads_no_records_before_there_is_room_for_them(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        room = Budget(limits.CONNECTION_ANSWERS._replace(most_bytes=ANSWER_BYTES_MAX))
        other, place = Reservation(room), Reservation(room)
        await other.replace(1)
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/peek", {}, place))
        peek_id, _ = await shard.told(Peek)
        shard.answer(peek_id, Peeked([JobView(1, "waiting", 0, 0, "", "")], 1, False))
        await until(lambda: place in room.waiting or asked.done())
        assert not asked.done()
        other.close()
        status, _, answer = await asked
        assert (status, [job["$seq"] for job in answer["jobs"]]) == (200, [1])

    queue(hosting, [Written(b"1")])
    on_loop(hosting, test)


@pytest.mark.parametrize("fault", ["the shard is started again", "the job is damaged"])
def test_a_claim_that_fails_puts_a_job_aside_only_for_a_fault_of_its_own(hosting: Hosting, fault: str) -> None:
    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", {"node": "w", "max": 2}))
        claim_id = await shard.claimed()
        if fault == "the shard is started again":
            hosting.shared.control.cell(Role.WALSHARD, 0).set("generation", 0)
        shard.answer(claim_id, Dealt(1, [1, 2], LEASE_NO, DEADLINE_MS, [1, 1], 5))
        _, _, answer = await asked
        first, second = LEASE_NO, LEASE_NO + 1
        given_back = [call for _, call in shard.calls() if isinstance(call, Unclaim)]
        if fault == "the job is damaged":
            assert answer["error"]["code"] == "storage_unavailable"
            assert given_back == [Unclaim("q", "w", [1], [first], ASIDE_MS), Unclaim("q", "w", [2], [second])]
        else:
            assert answer["error"]["code"] == "not_ready"
            assert given_back == [Unclaim("q", "w", [1, 2], [first, second])]

    queue(hosting, [Written(b"1"), Written(b"2")])
    if fault == "the job is damaged":
        hosting.checkpoint("q")
        damage(hosting.data_path("q", 1), 40)
    on_loop(hosting, test)


@pytest.mark.parametrize("after", ["the time of a shard is over", "the request was cancelled"])
@pytest.mark.parametrize("in_a_window", [False, True])
def test_what_a_claim_is_dealt_too_late_is_given_back(hosting: Hosting, after: str, in_a_window: bool) -> None:
    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", {"node": "w", "max": 2}))
        claim_id, claim = await shard.told(Claim)
        if after == "the request was cancelled":
            asked.cancel()
            await asyncio.wait({asked})
        else:
            status, _, answer = await asked
            assert (status, answer["error"]["code"]) == (503, "shard_unavailable")
        dealt = Dealt(claim.stream, [1, 2], LEASE_NO, DEADLINE_MS, [1, 1], 5)
        if in_a_window:
            shard.answer(claim_id, Waiting(0))
            assert (await shard.told(WorkClose))[1] == WorkClose("q", claim.stream)
            shard.deal(dealt)
        else:
            shard.answer(claim_id, dealt)
        assert (await shard.told(Unclaim))[1] == Unclaim("q", "w", [1, 2], [LEASE_NO, LEASE_NO + 1])

    queue(hosting, [Written(b"1"), Written(b"2")])
    on_loop(hosting, test, shard_wait_ms=300)


def test_a_claim_whose_window_brings_nothing_leaves_it(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", {"node": "w", "max": 2}))
        claim_id, claim = await shard.told(Claim)
        shard.answer(claim_id, Waiting(0))
        status, _, answer = await asked
        assert (status, answer["error"]["code"]) == (503, "shard_unavailable")
        assert (await shard.told(WorkClose))[1] == WorkClose("q", claim.stream)
        shard.deal(Dealt(claim.stream, [1, 2], LEASE_NO, DEADLINE_MS, [1, 1], 5))
        assert (await shard.told(Unclaim))[1] == Unclaim("q", "w", [1, 2], [LEASE_NO, LEASE_NO + 1])

    queue(hosting, [Written(b"1"), Written(b"2")])
    on_loop(hosting, test, shard_wait_ms=300)


def test_jobs_that_cannot_be_read_are_one_line_a_minute_whoever_meets_them(
    hosting: Hosting, capfd: pytest.CaptureFixture[str]
) -> None:
    """A damaged segment may have thousands."""

    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)

        async def claim(dealt: Dealt, put_aside: type[Unclaim | Release]) -> None:
            asking = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", {"node": "w"}))
            shard.answer(await shard.claimed(), dealt)
            await until(lambda: any(isinstance(call, put_aside) for _, call in shard.calls()))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        for seq in (1, 2):
            await claim(Dealt(1, [seq], LEASE_NO, DEADLINE_MS, [1], 0), Unclaim)
            await claim(Dealt(1, [], 0, 0, [], 0, [seq], [3], [""], "dead"), Release)

    queue(hosting, [Written(b"1"), Written(b"2")])
    hosting.checkpoint("q")
    path = hosting.data_path("q", 1)
    damage(path, 40, path.stat().st_size - 40)
    on_loop(hosting, test)
    said = capfd.readouterr()
    assert (said.out + said.err).count("a job cannot be read and is put aside") == 1


@pytest.mark.parametrize("during", ["a read of the cold tier", "a carry of dead letters", "the sending"])
def test_a_claim_that_is_cancelled_gives_its_jobs_back(hosting: Hosting, during: str) -> None:
    """A client of HTTP/2 that has closed its connection cancels claims like this."""
    queue(hosting, [Written(b"1"), Written(b"2")])
    cold = SlowCold(hosting) if during == "a read of the cold tier" else None
    requests = hosting.shared.rings[0][0].requests

    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"node":"w","max":2}', "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)
            await asyncio.Event().wait()  # nobody takes it

        def is_there() -> bool:
            if cold is not None:
                return cold.reads > 0
            if during == "the sending":
                return bool(sent)
            return any(messages.head(message)[0] == MessageKind.APPEND for message, _ in requests.peek())

        scope = {"type": "http", "method": "POST", "path": "/v0/topics/q/claim", "query_string": b"", "extensions": {}}
        scope["headers"] = [(b"content-type", b"application/json")]
        asked = asyncio.create_task(frontend.app(scope, receive, send))
        claim_id = await shard.claimed()
        if during == "a carry of dead letters":
            shard.answer(claim_id, Dealt(1, [2], LEASE_NO, DEADLINE_MS, [1], 0, [1], [3], [""], "dead"))
        else:
            shard.answer(claim_id, Dealt(1, [1, 2], LEASE_NO, DEADLINE_MS, [1, 1], 0))
        await until(is_there)
        asked.cancel()
        await asyncio.wait({asked})
        given_back = [2] if during == "a carry of dead letters" else [1, 2]
        leases = [LEASE_NO + at for at in range(len(given_back))]
        assert [call for _, call in shard.calls() if isinstance(call, Unclaim)] == [
            Unclaim("q", "w", given_back, leases)
        ]

    try:
        on_loop(hosting, test)
    finally:
        if cold is not None:
            cold.gate.set()


def test_a_claim_whose_stream_was_reset_before_its_answer_gives_its_jobs_back(hosting: Hosting) -> None:
    """Over HTTP/2, as by a client whose own time is over: what is sent on such a stream goes nowhere, silently."""
    queue(hosting, [Written(b"1"), Written(b"2")])
    cold = SlowCold(hosting)

    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        place = Reservation(Budget(limits.CONNECTION_ANSWERS))
        claim = {"node": "w", "max": 2}
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", claim, place))
        shard.answer(await shard.claimed(), Dealt(1, [1, 2], LEASE_NO, DEADLINE_MS, [1, 1], 0))
        await until(lambda: cold.reads)
        place.close()
        cold.gate.set()
        await asyncio.wait({asked})
        given_back = [call for _, call in shard.calls() if isinstance(call, Unclaim)]
        assert given_back == [Unclaim("q", "w", [1, 2], [LEASE_NO, LEASE_NO + 1])]

    try:
        on_loop(hosting, test)
    finally:
        cold.gate.set()


def test_a_claim_that_waits_for_its_first_answer_is_not_asked_twice_when_its_shard_restarts(hosting: Hosting) -> None:
    """It is in the ring, which the restarted shard reads: twice it might be dealt to twice."""

    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", {"node": "w"}))
        claim_id, claim = await shard.told(Claim)
        restart(hosting, frontend, records)
        shard.answer(claim_id, Waiting(5))
        shard.deal(Dealt(claim.stream, [1], LEASE_NO, DEADLINE_MS, [1], 1))
        status, _, answer = await asked
        assert (status, [job["$seq"] for job in answer["claimed"]]) == (200, [1])
        assert [call for _, call in shard.calls() if isinstance(call, Claim)] == []

    records = [Written(b"1"), Written(b"2")]
    queue(hosting, records)
    on_loop(hosting, test)


def test_what_a_claim_that_was_asked_twice_is_dealt_the_second_time_is_given_back(hosting: Hosting) -> None:
    """Here the restarted shard knew of it, its window being over before it came again."""

    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", {"node": "w"}))
        claim_id, claim = await shard.told(Claim)
        shard.answer(claim_id, Waiting(5))
        await until(lambda: hosting.shared.rings[0][0].replies.empty)
        restart(hosting, frontend, records)
        again_id, again = await shard.told(Claim)
        assert again == claim
        shard.deal(Dealt(claim.stream, [1], LEASE_NO, DEADLINE_MS, [1], 1))
        shard.answer(again_id, Waiting(5))
        status, _, answer = await asked
        assert (status, [job["$seq"] for job in answer["claimed"]]) == (200, [1])
        shard.deal(Dealt(claim.stream, [2], LEASE_NO + 1, DEADLINE_MS, [1], 0))
        calls: list[Message] = []

        def given_back() -> bool:
            calls.extend(call for _, call in shard.calls())
            return any(isinstance(call, Unclaim) for call in calls)

        await until(given_back)
        assert calls == [WorkClose("q", claim.stream), Unclaim("q", "w", [2], [LEASE_NO + 1])]

    records = [Written(b"1"), Written(b"2")]
    queue(hosting, records)
    on_loop(hosting, test)


def test_a_claim_whose_jobs_cannot_be_logged_when_its_window_ends_is_told_so(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/q/claim", {"node": "w"}))
        claim_id, claim = await shard.told(Claim)
        shard.answer(claim_id, Waiting(5))
        shard.deal(Dealt(claim.stream, [], 0, 0, [], 1, refused=True))
        status, _, answer = await asked
        assert (status, answer["error"]["code"]) == (503, "storage_unavailable")

    queue(hosting, [Written(b"1")])
    on_loop(hosting, test)


class OfJobs:
    """A reader of a queue each of whose records is there."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def get(self, name: str) -> object:
        return name

    async def fetch_page(self, _ref: object, from_seq: int, options: PageOptions, to_seq: int) -> RecordPage:
        self.asked.append(options.limit)
        last_seq = min(from_seq + options.limit, to_seq)
        body = b",".join(b"%d" % seq for seq in range(from_seq + 1, last_seq + 1))
        return RecordPage(body, last_seq - from_seq, last_seq, to_seq, 1, to_seq, None, last_seq - from_seq, 1)


def test_a_thousand_jobs_are_read_while_others_have_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SLICE_S", 0)  # however fast this machine is
    reader, jobs, seen = OfJobs(), ReadJobs(), list[int]()

    async def test() -> None:
        reading = asyncio.create_task(jobs.read(cast(TopicReader, reader), "q", dict.fromkeys(range(1, 1001), b"")))
        while not reading.done():
            await asyncio.sleep(0)
            seen.append(len(reader.asked))
        reading.result()

    asyncio.run(test())
    assert jobs.body == b",".join(b"%d" % seq for seq in range(1, 1001))
    assert max(reader.asked) == PAGE_JOBS
    assert max(after - before for before, after in pairwise(seen)) <= 1
