"""Queues and cursors at their shard: one commit for a group, what a restart brings back, what a failing disk undoes."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest

from tests.kept import items_kept
from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.shm.control import Role
from topics.shm.queue_messages import (
    Ack,
    AckReply,
    Bury,
    Claim,
    CursorAdvance,
    CursorGet,
    CursorPassedOn,
    CursorPut,
    Dealt,
    Extend,
    Nack,
    Peek,
    Release,
    Remove,
    Unclaim,
    Waiting,
    WorkClose,
    WorkOpen,
)
from topics.shm.ring import Ring
from topics.shm.shm_names import SHM_ROOT
from topics.shm.topic_messages import DeleteTopic, Hello, PutTopic
from topics.storage.layout import list_log_files, ram_group_dir
from topics.walshard.handlers import relogging

MINUTE_MS = 60_000


def queue(rig: Rig, jobs: int, name: str = "q", **config: Any) -> None:
    rig.call(PutTopic(name, TopicConfig(type="queue", **config), True))
    if jobs:
        rig.append(name, *[b"%d" % n for n in range(1, jobs + 1)])


def claim(rig: Rig, most: int = 1, name: str = "q", node: str = "w", lease_ms: int | None = MINUTE_MS) -> Dealt:
    dealt = rig.call(Claim(name, node, most, lease_ms, 1))
    assert isinstance(dealt, Dealt)
    return dealt


def ack(rig: Rig, *seqs: int, name: str = "q", node: str = "w") -> AckReply:
    reply = rig.call(Ack(name, node, list(seqs), None))
    assert isinstance(reply, AckReply)
    return reply


def counts(rig: Rig, name: str = "q") -> tuple[int, int, int]:
    now = rig.view(name)
    return now.jobs_ready, now.jobs_in_flight, now.jobs_dead_lettered


def lease_nos(dealt: Dealt) -> list[int]:
    return list(range(dealt.first_lease_no, dealt.first_lease_no + len(dealt.seqs)))


# -- group commit


class KilledError(BaseException):
    """The shard is killed here."""


@pytest.mark.parametrize("sent", range(4))
def test_a_claim_that_was_answered_is_not_carried_out_again_by_the_next_life(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """The shard is killed when it has sent so many of three answers. Its next life knows no lease: it gives jobs to the
    claims that were not answered, and to nobody else.
    """
    queue(rig, 10)
    claims = [rig.post_call(Claim("q", f"w{n}", 2, MINUTE_MS, n)) for n in range(3)]
    replies = rig.shared.rings[0][0].replies
    pushes = iter(range(4))

    def push(*parts: bytes | bytearray | memoryview) -> bool:
        if next(pushes) == sent:
            raise KilledError
        return Ring.push(replies, *parts)

    with monkeypatch.context() as patched:
        patched.setattr(replies, "push", push)
        with contextlib.suppress(KilledError):
            rig.step()
    rig.boot()
    rig.run()
    assert set(claims) <= set(rig.replies)
    assert counts(rig) == (10 - 2 * (3 - sent), 2 * (3 - sent), 0)


def test_claims_and_acks_of_many_consumers_are_one_commit(rig: Rig) -> None:
    queue(rig, 100)
    first = [rig.post_call(Claim("q", f"w{n}", 5, None, n)) for n in range(20)]
    rig.run()
    claimed = [rig.replies[id].seqs for id in first]
    assert sorted(seq for seqs in claimed for seq in seqs) == list(range(1, 101))
    batches = rig.cell.get("wal_batches")
    acks = [rig.post_call(Ack("q", f"w{n}", seqs, None)) for n, seqs in enumerate(claimed)]
    again = [rig.post_call(Ack("q", f"w{n}", seqs, None)) for n, seqs in enumerate(claimed)]
    rig.run()
    assert [rig.replies[id].count for id in acks] == [5] * 20
    assert [rig.replies[id].count for id in again] == [0] * 20
    assert rig.cell.get("wal_batches") == batches + 1
    assert (rig.view("q").records, rig.view("q").earliest_seq) == (0, 101)
    rig.boot()
    assert (rig.view("q").records, rig.view("q").earliest_seq, rig.view("q").head_seq) == (0, 101, 100)


def test_acks_and_appends_of_one_group_mix(rig: Rig) -> None:
    queue(rig, 3)
    claim(rig, 3)
    ids = [
        rig.post_call(Ack("q", "w", [2], None)),
        rig.post_append("q", [b"4"]),
        rig.post_call(Ack("q", "w", [1], None)),
    ]
    rig.run()
    assert [type(rig.replies[id]).__name__ for id in ids] == ["AckReply", "AppendReply", "AckReply"]
    assert [seq for seq, _ in rig.read("q")] == [3, 4]
    assert rig.view("q").earliest_seq == 3


def test_a_capped_queue_may_evict_what_is_acked_in_the_same_group(rig: Rig) -> None:
    queue(rig, 3, cap_records=3)
    claim(rig, 3)
    ids = [
        rig.post_append("q", [b"4", b"5"]),
        rig.post_call(Ack("q", "w", [1, 2, 3], None)),
        rig.post_append("q", [b"6"]),
    ]
    rig.run()
    assert rig.replies[ids[1]].skipped == [1, 2]
    assert [seq for seq, _ in rig.read("q")] == [4, 5, 6]
    assert counts(rig) == (3, 0, 0)
    rig.boot()
    assert [seq for seq, _ in rig.read("q")] == [4, 5, 6]


def test_a_long_answer_ends_the_group_before_the_journal_is_full(rig: Rig) -> None:
    queue(rig, 0)
    for _ in range(5):
        rig.append("q", *[b"1"] * 2000)
    claim(rig, 10_000)
    unknown = list(range(2**63, 2**63 + 1000))
    ids = [rig.post_call(Ack("q", "w", [seq, *unknown], None)) for seq in range(1, 61)]
    while ids[-1] not in rig.replies:  # the ring of answers is small
        rig.run()
        rig.outbox.flush()
        rig.take_replies()
    assert all(rig.replies[id].skipped == unknown for id in ids)
    assert rig.view("q").records == 10_000 - 60


# -- restarts


def test_without_durable_leases_everything_unacked_is_ready_after_a_crash(rig: Rig) -> None:
    queue(rig, 5)
    old = claim(rig, 4)
    ack(rig, 2)
    assert rig.cell.get("leases_in_flight") == 3
    rig.boot()
    assert rig.cell.get("leases_in_flight") == 0
    assert counts(rig) == (4, 0, 0)
    new = claim(rig, 10)
    assert (new.seqs, new.deliveries) == ([1, 3, 4, 5], [1, 1, 1, 1])
    assert not set(lease_nos(new)) & set(lease_nos(old))
    assert rig.call(Ack("q", "w", [1], lease_nos(old)[:1])).skipped == [1]


@pytest.mark.parametrize("durability", ["disk", "fsync", "memory"])
def test_durable_leases_outlive_a_restart(rig: Rig, durability: Any) -> None:
    queue(rig, 6, durability=durability, leases_durable=True)
    held = claim(rig, 4)
    rig.call(Nack("q", "w", [2], None, 0))
    rig.call(Nack("q", "w", [3], None, 5_000))
    extended = rig.call(Extend("q", "w", [4], None, 10 * MINUTE_MS))
    assert extended.seqs == [4]
    rig.restart_service()
    assert counts(rig) == (3, 2, 0)
    again = claim(rig, 10)
    assert (again.seqs, again.deliveries) == ([2, 5, 6], [2, 1, 1])
    assert rig.call(Ack("q", "w", [1], lease_nos(held)[:1])).count == 1
    rig.clock.ms += 5_001
    assert (claim(rig, 10).seqs, counts(rig)) == ([3], (0, 5, 0))
    rig.clock.ms += MINUTE_MS
    rig.restart_service()
    back = claim(rig, 10)
    assert (back.seqs, back.deliveries) == ([2, 3, 5, 6], [3, 3, 2, 2])
    rig.clock.ms += 10 * MINUTE_MS
    assert 4 in claim(rig, 10).seqs


@pytest.mark.parametrize("cut", [False, True])
def test_leases_of_a_time_in_which_they_were_durable_do_not_come_back(rig: Rig, cut: bool) -> None:
    queue(rig, 2, leases_durable=True)
    former = claim(rig, 2, lease_ms=10 * MINUTE_MS)
    rig.call(PutTopic("q", TopicConfig(type="queue"), True))
    rig.call(Nack("q", "w", [1, 2], None, 0))
    assert claim(rig, node="other").seqs == [1]
    assert rig.call(Ack("q", "other", [1], None)).count == 1
    if cut:
        assert Compaction(rig).cut()
    other = claim(rig, node="other")
    assert other.seqs == [2]
    rig.call(PutTopic("q", TopicConfig(type="queue", leases_durable=True), True))
    rig.boot()
    assert rig.call(Ack("q", "w", [2], lease_nos(former)[1:])).skipped == [2], "it was given to somebody else since"
    assert rig.call(Ack("q", "other", [2], lease_nos(other))).count == 1


@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
def test_leases_that_are_held_when_they_become_durable_outlive_a_crash(rig: Rig, durability: Any) -> None:
    queue(rig, 6, durability=durability)
    held = claim(rig, 4)
    rig.call(Nack("q", "w", [2], None, 0))
    rig.call(Nack("q", "w", [3], None, 5_000))
    rig.call(PutTopic("q", TopicConfig(type="queue", leases_durable=True), True))
    rig.boot()
    assert counts(rig) == (3, 2, 0)
    again = claim(rig, 10)
    assert (again.seqs, again.deliveries) == ([2, 5, 6], [2, 1, 1])
    rig.restart_service()
    assert rig.call(Ack("q", "w", [1, 4], [lease_nos(held)[0], lease_nos(held)[3]])).count == 2
    rig.clock.ms += 5_001
    assert claim(rig, 10).deliveries == [2]


DURABLE = PutTopic("q", TopicConfig(type="queue", leases_durable=True), True)


def test_many_leases_become_durable_in_turns_between_which_others_are_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relogging, "LEASES_PER_TURN", 3)
    queue(rig, 20)
    held = claim(rig, 10)
    reply = rig.answer(rig.post_call(DURABLE))
    turns = 0
    while reply.rest is not None:
        turns += 1
        assert claim(rig, 1).seqs == [10 + turns], "a lease that begins meanwhile is logged as it begins"
        rig.call(Ack("q", "w", [turns], [lease_nos(held)[turns - 1]]))
        reply = rig.answer(rig.post_call(reply.rest))
    assert turns >= 3
    rig.boot()
    assert counts(rig) == (20 - 10 - turns, 10, 0)
    left = held.seqs[turns:]
    assert rig.call(Ack("q", "w", left, lease_nos(held)[turns:])).count == len(left)


@pytest.mark.parametrize("by", ["the next try", "sweeps"])
def test_leases_that_could_not_be_logged_are_so_later(
    rig: Rig, fs: FaultyFileSystem, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The configuration is the same then, so `topics apply` does not try again. The answer to who does says that all
    leases are durable.
    """
    monkeypatch.setattr(relogging, "LEASES_PER_TURN", 2)
    queue(rig, 6)
    held = claim(rig, 5)
    reply = rig.answer(rig.post_call(rig.answer(rig.post_call(DURABLE)).rest))
    assert reply.rest is not None
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"pwritev"})))
    with pytest.raises(TopicsError):
        rig.call(reply.rest)
    fs.arm(None)
    if by == "sweeps":
        for _ in range(2):
            rig.shard.sweep()
    else:
        rig.call(DURABLE)
    rig.boot()
    assert counts(rig) == (1, 5, 0)
    assert rig.call(Ack("q", "w", held.seqs, lease_nos(held))).count == 5


@pytest.mark.parametrize("is_deleted", [True, False])
def test_what_others_do_between_two_turns_of_leases_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """The next turn set the former configuration, or made the topic again."""
    monkeypatch.setattr(relogging, "LEASES_PER_TURN", 2)
    queue(rig, 6)
    claim(rig, 5)
    reply = rig.answer(rig.post_call(PutTopic("q", TopicConfig(leases_durable=True), False)))
    reply = rig.answer(rig.post_call(reply.rest))
    assert reply.rest is not None
    other = TopicConfig(type="queue", leases_durable=True, lease_ms=1)
    rig.call(DeleteTopic("q", False) if is_deleted else PutTopic("q", other, True))
    while reply.rest is not None:
        reply = rig.answer(rig.post_call(reply.rest))
    hosted = rig.parts.catalog.find("q")
    assert hosted is None if is_deleted else hosted is not None and hosted.topic.config == other
    rig.boot()
    assert is_deleted or counts(rig) == (1, 5, 0)


def test_leases_that_are_not_durable_any_more_are_not_logged(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relogging, "LEASES_PER_TURN", 2)
    queue(rig, 6)
    claim(rig, 5)
    rig.answer(rig.post_call(rig.answer(rig.post_call(DURABLE)).rest))
    for _ in range(2):
        rig.call(PutTopic("q", TopicConfig(type="queue"), True))
    rig.boot()
    assert counts(rig) == (6, 0, 0)


def test_kept_jobs_give_way_to_a_group_and_stay_away(rig: Rig, fs: FaultyFileSystem) -> None:
    queue(rig, 4, on_ack="keep", discard="reject", cap_records=4)
    claim(rig, 4)
    ack(rig, 1, 2, 4)
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"pwritev"})))
    refused = rig.post_append("q", [b"5"])
    rig.run()
    assert isinstance(rig.replies[refused], TopicsError)
    assert [seq for seq, _ in rig.read("q")] == [1, 2, 3, 4]
    fs.arm(None)
    ids = [rig.post_append("q", [b"5"]), rig.post_append("q", [b"6"]), rig.post_append("q", [b"7", b"8"])]
    rig.run()
    assert [rig.replies[id].first_seq for id in ids[:2]] == [5, 6]
    assert rig.replies[ids[2]].code == "topic_full", "one is left that could go, and two are wanted"
    for life in range(2):
        assert [seq for seq, _ in rig.read("q")] == [3, 4, 5, 6]
        assert (rig.view("q").records, rig.view("q").earliest_seq, rig.view("q").evict_floor) == (4, 3, 1)
        if not life:
            assert counts(rig) == (2, 1, 0)
            rig.restart_service()
    assert counts(rig) == (3, 0, 0)
    assert claim(rig, 9).seqs == [3, 5, 6]


@pytest.mark.parametrize("write", [{"key": b"k"}, {"if_head_seq": 1}], ids=["a repeat", "head_mismatch"])
def test_kept_jobs_give_way_to_no_write_that_needs_no_room(rig: Rig, write: dict[str, Any]) -> None:
    queue(rig, 0, on_ack="keep", discard="reject", cap_records=2)
    rig.append("q", b"1", b"2", key=b"k")
    claim(rig, 2)
    ack(rig, 1, 2)
    rig.outcome(rig.post_append("q", [b"1", b"2"], **write))
    assert [seq for seq, _ in rig.read("q")] == [1, 2]
    assert rig.append("q", b"3").first_seq == 3


def test_kept_jobs_stay_done_over_a_restart(rig: Rig) -> None:
    queue(rig, 6, on_ack="keep")
    claim(rig, 4)
    ack(rig, 1, 2, 4)
    for restart in (rig.boot, rig.restart_service):
        restart()
        assert counts(rig) == (3, 0, 0)
        assert [seq for seq, _ in rig.read("q")] == [1, 2, 3, 4, 5, 6]
    assert claim(rig, 10).seqs == [3, 5, 6]


@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
def test_schedules_and_order_keys_outlive_a_crash(rig: Rig, durability: Any) -> None:
    queue(rig, 0, durability=durability)
    jobs = [(0, rig.clock.ms + 500, 0, ""), (1, 0, 900, ""), (2, 0, 0, "k"), (3, 0, 0, "k")]
    rig.answer(rig.post_append("q", [b"at", b"in", b"k1", b"k2", b"now"], jobs=jobs))
    assert claim(rig, 10).seqs == [3, 5]
    rig.boot()
    assert claim(rig, 10).seqs == [3, 5]
    rig.clock.ms += 501
    assert claim(rig, 10).seqs == [1]
    rig.clock.ms += 400
    assert claim(rig, 10).seqs == [2]
    assert ack(rig, 3).count == 1
    assert claim(rig, 10).seqs == [4]


def test_schedules_of_an_ephemeral_queue_outlive_the_trimming_of_its_log(rig: Rig) -> None:
    queue(rig, 0, durability="ephemeral", cap_records=40)
    block = b"x" * 200_000
    rig.answer(rig.post_append("q", [b"later"], jobs=[(0, rig.clock.ms + MINUTE_MS, 0, "")]))
    for n in range(200):
        rig.answer(rig.post_append("q", [block], jobs=[(0, rig.clock.ms + MINUTE_MS, 0, "")] if n % 2 else None))
    directory = ram_group_dir(rig.shared.ram_dir, 0)
    assert list_log_files(rig.fs, directory)[0] > 1, "nothing was trimmed"
    rig.boot()
    assert counts(rig) == (20, 0, 0)
    rig.clock.ms += MINUTE_MS + 1
    assert len(claim(rig, 100).seqs) == 40


def test_an_ephemeral_queue_starts_empty_after_a_restart_of_the_service(rig: Rig) -> None:
    queue(rig, 5, durability="ephemeral", leases_durable=True)
    claim(rig, 3)
    ack(rig, 2)
    rig.boot()
    assert counts(rig) == (2, 2, 0)
    rig.restart_service()
    assert counts(rig) == (0, 0, 0)
    rig.append("q", b"new")
    assert counts(rig) == (1, 0, 0)


def test_dead_letters_are_counted_over_restarts(rig: Rig) -> None:
    queue(rig, 3, max_deliveries=1, dead_letter="dead")
    claim(rig, 2)
    rig.call(Nack("q", "w", [1, 2], None, 0))
    dealt = claim(rig, 5)
    assert (dealt.seqs, dealt.dead, dealt.dead_deliveries, dealt.dead_letter) == ([3], [1, 2], [1, 1], "dead")
    assert counts(rig) == (0, 1, 0)
    assert rig.call(Bury("q", [1, 3])).count == 1
    rig.call(Release("q", [2, 3], delay_ms=1_000))
    assert counts(rig) == (0, 1, 1)
    assert claim(rig, 5).dead == []
    rig.clock.ms += 1_001
    assert claim(rig, 5).dead == [2]
    rig.call(Bury("q", [2]))
    rig.restart_service()
    assert counts(rig) == (1, 0, 2)


def test_a_late_end_of_a_move_is_that_of_a_queue_and_not_of_a_name(rig: Rig) -> None:
    """The dead letters of a deleted queue came late, and a job of the queue that had its name by then was removed."""
    ids = []
    for _ in range(2):
        queue(rig, 1, max_deliveries=1, dead_letter="dead")
        claim(rig)
        rig.call(Nack("q", "w", [1], None, 0))
        dealt = claim(rig)
        assert dealt.dead == [1]
        ids.append(dealt.topic_id)
        if len(ids) == 1:
            rig.call(DeleteTopic("q", False))
    for late in (Bury("q", [1], ids[0]), Release("q", [1], ids[0])):
        with pytest.raises(TopicsError) as refused:
            rig.call(late)
        assert refused.value.code == "topic_not_found"
    assert (rig.view("q").records, claim(rig).dead) == (1, [])
    assert rig.call(Bury("q", [1], ids[1])).count == 1


def test_who_does_not_bring_its_dead_letters_away_loses_them(rig: Rig) -> None:
    queue(rig, 1, max_deliveries=1, dead_letter="dead")
    claim(rig)
    rig.call(Nack("q", "w", [1], None, 0))
    assert claim(rig).dead == [1]
    assert claim(rig).dead == []
    rig.clock.ms += 30_001
    assert claim(rig).dead == [1]
    rig.post_call(Hello(2))  # the frontend was killed
    rig.run()
    assert claim(rig).dead == [1]


# -- frontends that die


def dies(rig: Rig, incarnation: int = 1) -> None:
    """Tell of the death of the rig's frontend, as the supervisor does."""
    rig.shared.control.cell(Role.FRONTEND, 0).supervisor.set("ended", incarnation)


@pytest.mark.parametrize("durable", [False, True])
def test_what_a_dead_frontend_had_is_over_before_a_successor_says_hello(rig: Rig, durable: bool) -> None:
    queue(rig, 4, max_deliveries=1, dead_letter="dead", leases_durable=durable)
    assert claim(rig).seqs == [1]
    rig.call(Nack("q", "w", [1], None, 0))
    dealt = claim(rig)
    assert (dealt.seqs, dealt.dead) == ([2], [1])
    rig.call(WorkOpen("q", 7, "stream", 2, MINUTE_MS))
    assert [dealt.seqs for dealt in rig.dealt] == [[3, 4]]
    rig.run()
    assert counts(rig) == (0, 3, 0)
    dies(rig)
    rig.run()
    assert counts(rig) == (3, 1, 0), "the claim's lease stays"
    rig.dealt.clear()
    rig.append("q", b"5")
    assert rig.dealt == [], "nobody is there any more"
    rig.call(WorkOpen("q", 8, "stream", 1, MINUTE_MS))
    rig.post_call(Hello(2))
    rig.run()
    assert counts(rig) == (4, 1, 0)
    rig.boot()
    assert counts(rig) == ((4, 1, 0) if durable else (5, 0, 0))


def test_what_a_dead_frontend_has_still_asked_for_is_over_as_well(rig: Rig) -> None:
    queue(rig, 2)
    rig.post_call(WorkOpen("q", 7, "stream", 2, MINUTE_MS))
    dies(rig)
    rig.run()
    assert counts(rig) == (2, 0, 0)


def test_one_that_took_no_answers_before_it_died_has_all_taken_that_it_asked_for(rig: Rig) -> None:
    queue(rig, 1000)
    node = "n" * 255
    rig.call(WorkOpen("q", 7, node, 1000, MINUTE_MS))
    assert counts(rig) == (0, 1000, 0)
    replies = rig.shared.rings[0][0].replies
    for length_bytes in (10_000, 1000, 100, 10, 1):
        while replies.push(b"x" * length_bytes):
            pass
    for _ in range(2):
        rig.post_call(Peek("q", 0, "leased", 1000))
    rig.post_call(WorkOpen("q", 8, node, 1000, MINUTE_MS))

    def long_replies() -> list[Path]:
        return list(Path(SHM_ROOT).glob(f"topics-{rig.identity}-reply-*"))

    for _ in range(10):
        rig.step()
    assert rig.outbox.stuck
    assert rig.outbox.idle, "nothing to do until somebody makes room"
    assert len(long_replies()) == 1, "the second was not read any more"
    dies(rig)
    for _ in range(10):
        rig.step()
    assert counts(rig) == (1000, 0, 0)
    assert rig.outbox.idle
    assert rig.shared.rings[0][0].requests.empty
    assert not long_replies()
    replies.consume(replies.written)  # the successor
    rig.post_call(Hello(2))
    rig.call(WorkOpen("q", 9, "w", 3, MINUTE_MS))
    assert counts(rig) == (997, 3, 0)


@pytest.mark.parametrize("taken", [False, True])
def test_one_that_died_together_with_the_shard_is_taken_notice_of(rig: Rig, taken: bool) -> None:
    """The dead frontend is noticed whether the former incarnation of the shard had noticed it or not."""
    queue(rig, 3, leases_durable=True)
    rig.call(WorkOpen("q", 7, "stream", 2, MINUTE_MS))
    assert counts(rig) == (1, 2, 0)
    dies(rig)
    if taken:
        rig.run()
    rig.boot()
    rig.run()
    assert counts(rig) == (3, 0, 0)


def test_a_successor_of_one_that_died_together_with_the_shard_keeps_what_it_has(rig: Rig) -> None:
    queue(rig, 3, leases_durable=True)
    rig.call(WorkOpen("q", 7, "stream", 2, MINUTE_MS))
    dies(rig)
    rig.post_call(Hello(2))
    rig.post_call(WorkOpen("q", 8, "stream", 3, MINUTE_MS))
    rig.boot()
    rig.run()
    assert counts(rig) == (0, 3, 0)


def test_a_successor_that_was_faster_keeps_what_it_has(rig: Rig) -> None:
    queue(rig, 2)
    rig.post_call(Hello(2))
    rig.post_call(WorkOpen("q", 7, "stream", 2, MINUTE_MS))
    dies(rig)
    rig.run()
    assert counts(rig) == (0, 2, 0)
    dies(rig, 2)
    rig.run()
    assert counts(rig) == (2, 0, 0)


def test_a_shard_that_is_started_again_takes_no_former_death_for_one_of_now(rig: Rig) -> None:
    queue(rig, 2, leases_durable=True)
    dies(rig)
    rig.shared.control.cell(Role.FRONTEND, 0).supervisor.set("pid", 1)  # a successor
    rig.post_call(Hello(2))
    rig.call(WorkOpen("q", 7, "stream", 2, MINUTE_MS))
    rig.boot()
    rig.run()
    assert counts(rig) == (0, 2, 0)


# -- streams and windows


def test_streams_are_dealt_to_in_turn_and_refilled_on_ack(rig: Rig) -> None:
    queue(rig, 0)
    for stream in (7, 8):
        rig.call(WorkOpen("q", stream, f"s{stream}", 2, MINUTE_MS))
    rig.append("q", b"1", b"2", b"3", b"4", b"5")
    assert sorted((dealt.stream, dealt.seqs) for dealt in rig.dealt) == [(7, [1, 3]), (8, [2, 4])]
    rig.dealt.clear()
    ack(rig, 2, node="s8")
    assert [(dealt.stream, dealt.seqs) for dealt in rig.dealt] == [(8, [5])]
    rig.call(WorkOpen("q", 8, "s8", 0, MINUTE_MS))
    rig.dealt.clear()
    rig.call(Nack("q", "s8", [4], None, 0))
    assert rig.dealt == []
    rig.call(WorkClose("q", 7))
    assert counts(rig) == (3, 1, 0)
    rig.call(WorkOpen("q", 8, "s8", 9, MINUTE_MS))
    assert [(dealt.seqs, dealt.deliveries) for dealt in rig.dealt] == [([1, 3, 4], [2, 2, 2])]


def seqs_by(rig: Rig, at_ms: int) -> list[int]:
    """Return the seqs that streams have been dealt when the clock has come to this, a tick at a time as the shard
    sleeps.
    """
    while (tick_ms := rig.shard.next_tick_ms) is not None and tick_ms <= at_ms:
        rig.clock.ms = max(rig.clock.ms, tick_ms)
        rig.run()
        rig.outbox.flush()
        rig.take_replies()
    rig.clock.ms = at_ms
    return [seq for dealt in rig.dealt for seq in dealt.seqs]


def deferring(rig: Rig, **config: Any) -> int:
    """A queue with two streams under great pressure; when that was."""
    queue(rig, 0, **config)
    for stream in (7, 8):
        rig.call(WorkOpen("q", stream, f"s{stream}", 1, MINUTE_MS))
    rig.cell.set("deferring", 1)
    return rig.clock.ms


def test_under_pressure_streams_of_a_queue_of_negative_priority_wait_until_it_has_aged_above_zero(rig: Rig) -> None:
    began_ms = deferring(rig, priority=-300)
    rig.append("q", b"1", b"2", b"3")
    assert seqs_by(rig, began_ms + 2_999) == []
    assert counts(rig) == (3, 0, 0)
    assert seqs_by(rig, began_ms + 3_100) == [1, 2]
    ack(rig, 1, node="s7")
    again_ms = rig.clock.ms
    assert seqs_by(rig, again_ms + 2_999) == [1, 2]
    assert seqs_by(rig, again_ms + 3_100) == [1, 2, 3]


def test_none_waits_longer_for_that_than_10_s(rig: Rig) -> None:
    began_ms = deferring(rig, priority=-1000)
    rig.append("q", b"1")
    assert seqs_by(rig, began_ms + 9_999) == []
    assert seqs_by(rig, began_ms + 10_100) == [1]


@pytest.mark.parametrize("how", ["the pressure", "the priority"])
def test_when_what_holds_jobs_back_is_over_streams_have_them_soon(rig: Rig, how: str) -> None:
    began_ms = deferring(rig, priority=-1000)
    rig.append("q", b"1")
    assert seqs_by(rig, began_ms + 500) == []
    if how == "the pressure":
        rig.cell.set("deferring", 0)
    else:
        rig.call(PutTopic("q", TopicConfig(type="queue", priority=0), True))
    assert seqs_by(rig, began_ms + 700) == [1]
    assert rig.shard.next_tick_ms is not None
    assert rig.shard.next_tick_ms > began_ms + 1_000, "it is not looked at any more"


@pytest.mark.parametrize("priority", [None, 0, 500])
def test_no_other_queue_waits_under_pressure(rig: Rig, priority: int | None) -> None:
    deferring(rig, priority=priority)
    rig.append("q", b"1")
    assert [dealt.seqs for dealt in rig.dealt] == [[1]]


def test_claims_go_on_under_any_pressure(rig: Rig) -> None:
    deferring(rig, priority=-1000)
    rig.append("q", b"1", b"2")
    assert claim(rig).seqs == [1]
    assert rig.dealt == []


def test_claims_that_gather_go_on_under_any_pressure(rig: Rig) -> None:
    began_ms = deferring(rig, priority=-1000, claim_jitter_ms=50)
    rig.append("q", b"1", b"2")
    assert isinstance(rig.call(Claim("q", "w", 5, None, 9)), Waiting)
    assert seqs_by(rig, began_ms + 200) == [1, 2]
    assert [dealt.stream for dealt in rig.dealt] == [9]


def test_a_stream_gets_what_time_brings(rig: Rig) -> None:
    queue(rig, 1)
    claim(rig, lease_ms=500)
    rig.call(WorkOpen("q", 7, "s", 5, MINUTE_MS))
    rig.answer(rig.post_append("q", [b"later"], jobs=[(0, 0, 700, "")]))
    assert rig.dealt == []
    for _ in range(2):
        due_ms = rig.shard.next_tick_ms
        assert due_ms is not None
        assert due_ms <= rig.clock.ms + 700
        while not rig.dealt:
            due_ms = rig.shard.next_tick_ms
            assert due_ms is not None
            rig.clock.ms = max(rig.clock.ms + 1, due_ms)
            rig.run()
            rig.outbox.flush()
            rig.take_replies()
        rig.dealt.clear()
    assert counts(rig) == (0, 2, 0)


def test_a_stream_has_room_when_what_it_has_expires(rig: Rig) -> None:
    queue(rig, 1, ttl_ms=400)
    rig.call(WorkOpen("q", 7, "s", 1, MINUTE_MS))
    rig.outbox.flush()
    rig.take_replies()
    assert [dealt.seqs for dealt in rig.dealt] == [[1]]
    written_ms = rig.clock.ms
    rig.clock.ms += 300
    rig.answer(rig.post_append("q", [b"2"]))
    while len(rig.dealt) == 1:
        due_ms = rig.shard.next_tick_ms
        assert due_ms is not None
        assert rig.clock.ms < due_ms <= written_ms + 401
        rig.clock.ms = due_ms
        rig.run()
        rig.outbox.flush()
        rig.take_replies()
    assert rig.dealt[1].seqs == [2]
    assert counts(rig) == (0, 1, 0)


def test_a_stream_waits_for_what_expired_until_the_disk_is_back(rig: Rig, fs: FaultyFileSystem) -> None:
    queue(rig, 1, ttl_ms=400)
    rig.call(WorkOpen("q", 7, "s", 1, 120 * MINUTE_MS))
    rig.clock.ms += 300
    rig.answer(rig.post_append("q", [b"2"]))
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"pwritev"})))
    rig.clock.ms += 101
    rig.run()
    due_ms = rig.shard.next_tick_ms
    assert due_ms is not None
    assert due_ms > rig.clock.ms, "it is asked for over and over"
    fs.arm(None)
    rig.shard.sweep()
    rig.run()
    rig.outbox.flush()
    rig.take_replies()
    assert [dealt.seqs for dealt in rig.dealt] == [[1], [2]]


def test_a_far_moment_is_kept_once_however_many_near_ones_come_before_it(rig: Rig) -> None:
    queue(rig, 2)
    claim(rig, lease_ms=10**8)
    far_ms = rig.clock.ms + 10**8
    rig.call(WorkOpen("q", 7, "s", 5, 2 * 10**8))
    kept = items_kept(rig.parts.queues)
    for _ in range(300):
        rig.call(Nack("q", "s", [2], None, 10))
        rig.clock.ms += 10
        rig.run()
        assert counts(rig) == (0, 2, 0)
    assert items_kept(rig.parts.queues) - kept <= 140
    rig.dealt.clear()
    rig.clock.ms = far_ms
    rig.run()
    assert [dealt.seqs for dealt in rig.dealt] == [[1]]


@pytest.mark.parametrize("durable", [False, True])
def test_a_frontend_that_was_killed_has_no_leases_left(rig: Rig, durable: bool) -> None:
    queue(rig, 3, leases_durable=durable)
    rig.call(WorkOpen("q", 7, "s", 2, MINUTE_MS))
    held = claim(rig, node="over http")
    assert counts(rig) == (0, 3, 0)
    if durable:
        rig.boot()  # the shard as well
        assert counts(rig) == (0, 3, 0)
    rig.dealt.clear()
    rig.post_call(Hello(2))
    rig.run()
    assert counts(rig) == (2, 1, 0)
    assert rig.dealt == []
    assert rig.call(Ack("q", "over http", held.seqs, lease_nos(held))).count == 1
    rig.restart_service()
    assert counts(rig) == (2, 0, 0)


def test_a_stream_that_is_opened_again_after_a_crash_keeps_durable_leases(rig: Rig) -> None:
    queue(rig, 5, leases_durable=True)
    rig.call(WorkOpen("q", 7, "s", 2, MINUTE_MS))
    rig.boot()
    rig.dealt.clear()
    rig.call(WorkOpen("q", 7, "s", 2, MINUTE_MS))
    assert rig.dealt == []
    assert counts(rig) == (3, 2, 0)
    rig.call(WorkClose("q", 7))
    assert counts(rig) == (5, 0, 0)


def test_a_window_gathers_claims_and_deals_evenly(rig: Rig) -> None:
    queue(rig, 20, claim_jitter_ms=50)
    waits = [rig.call(Claim("q", f"w{n}", 10, None, 100 + n)) for n in range(3)]
    assert waits == [Waiting(50)] * 3
    rig.clock.ms += 30
    rig.call(Claim("q", "w3", 10, None, 103))
    assert rig.dealt == []
    rig.clock.ms += 20
    rig.run()
    assert [(dealt.stream, len(dealt.seqs)) for dealt in rig.dealt] == [(100, 5), (101, 5), (102, 5), (103, 5)]
    rig.dealt.clear()
    rig.call(Claim("q", "late", 10, None, 104))
    rig.clock.ms += 50
    rig.run()
    assert [(dealt.stream, dealt.seqs) for dealt in rig.dealt] == [(104, [])]


def test_who_waits_is_told_when_the_queue_is_deleted(rig: Rig) -> None:
    queue(rig, 0, claim_jitter_ms=50)
    rig.call(WorkOpen("q", 7, "s", 1, None))
    rig.call(Claim("q", "w", 1, None, 8))
    rig.call(DeleteTopic("q", False))
    assert sorted((dealt.stream, dealt.ended) for dealt in rig.dealt) == [(7, True), (8, True)]


def test_jobs_that_never_reached_anybody_count_no_delivery(rig: Rig) -> None:
    queue(rig, 2)
    dealt = claim(rig, 2)
    rig.call(Unclaim("q", "w", dealt.seqs, lease_nos(dealt)))
    assert counts(rig) == (2, 0, 0)
    assert claim(rig, 2).deliveries == [1, 1]


@pytest.mark.parametrize("durable", [False, True])
def test_jobs_that_could_not_be_sent_wait_and_count_no_delivery(rig: Rig, durable: bool) -> None:
    queue(rig, 3, leases_durable=durable, max_deliveries=1, dead_letter="dead")
    rig.call(WorkOpen("q", 7, "s", 1, MINUTE_MS))
    (dealt,) = rig.dealt
    rig.call(Unclaim("q", "s", dealt.seqs, lease_nos(dealt), 5_000))
    assert [dealt.seqs for dealt in rig.dealt] == [[1], [2]], "it makes room"
    assert counts(rig) == (1, 1, 0)
    rig.clock.ms += 5_001
    again = claim(rig, 5)
    assert (again.seqs, again.deliveries, again.dead) == ([1, 3], [1, 1], [])


def test_remove_takes_exactly_what_it_names(rig: Rig) -> None:
    rig.append("log", b"1", b"2", b"3", b"4")
    assert rig.call(Remove("log", [3, 1, 9, 3])).count == 2
    assert [seq for seq, _ in rig.read("log")] == [2, 4]
    rig.boot()
    assert [seq for seq, _ in rig.read("log")] == [2, 4]


# -- a disk that fails


@pytest.mark.parametrize("config", [{}, {"on_ack": "keep"}, {"leases_durable": True}, {"durability": "fsync"}])
def test_what_the_log_refuses_never_was(rig: Rig, fs: FaultyFileSystem, config: dict[str, Any]) -> None:
    queue(rig, 6, **config)
    dealt = claim(rig, 3)
    before = counts(rig)
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"pwritev"})))
    ids = [rig.post_call(Ack("q", "w", [1, 3], None)), rig.post_call(Ack("q", "w", [2], None))]
    rig.run()
    for id in ids:
        assert isinstance(rig.replies[id], TopicsError)
        assert rig.replies[id].code == "storage_unavailable"
    assert counts(rig) == before
    assert len(rig.read("q")) == 6
    fs.arm(None)
    assert rig.call(Ack("q", "w", [1, 3, 2], [lease_nos(dealt)[at] for at in (0, 2, 1)])).count == 3
    rig.boot()
    assert counts(rig) == (3, 0, 0)


def test_durable_claims_nacks_and_extends_are_undone(rig: Rig, fs: FaultyFileSystem) -> None:
    queue(rig, 4, leases_durable=True)
    held = claim(rig, 1)
    for call in (
        Claim("q", "w", 2, None, 1),
        Nack("q", "w", [1], None, 0),
        Nack("q", "w", [1], None, 500),
        Extend("q", "w", [1], None, 100),
    ):
        fs.arm(Fault(1, errno.EIO, calls=frozenset({"pwritev"})))
        with pytest.raises(TopicsError, match="cannot be written"):
            rig.call(call)
        fs.arm(None)
        assert counts(rig) == (3, 1, 0)
    rig.clock.ms += 1_000
    assert counts(rig) == (3, 1, 0)
    assert claim(rig, 4).deliveries == [1, 1, 1]
    assert rig.call(Ack("q", "w", [1], lease_nos(held))).count == 1


def test_a_stream_is_dealt_to_again_when_the_disk_is_back(rig: Rig, fs: FaultyFileSystem) -> None:
    queue(rig, 1, leases_durable=True)
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"pwritev"})))
    rig.call(WorkOpen("q", 7, "s", 1, MINUTE_MS))
    fs.arm(None)
    rig.append("q", b"2")
    assert [dealt.seqs for dealt in rig.dealt if dealt.seqs] == [[1]]


# -- cursors


def test_of_two_readers_one_moves_a_cursor(rig: Rig, fs: FaultyFileSystem) -> None:
    rig.append("t", b"1", b"2", b"3", b"4")
    rig.call(CursorPut("t", "c", "strictly_at_once", 1, None, False))
    (cursor,) = rig.call(CursorGet("t", "c")).cursors
    ids = [rig.post_call(CursorAdvance("t", "c", cursor.revision, 0, to, 1)) for to in (2, 3)]
    ids.append(rig.post_call(CursorAdvance("t", "c", cursor.revision, 2, 4, 1)))
    rig.run()
    assert [(rig.replies[id].moved, rig.replies[id].seq) for id in ids] == [(True, 2), (False, 2), (True, 4)]
    rig.call(CursorPut("t", "c", "strictly_at_once", 1, 0, False))
    stale = rig.call(CursorAdvance("t", "c", cursor.revision, 0, 1, 1))
    assert not stale.moved
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"pwritev"})))
    failing = [rig.post_call(CursorAdvance("t", "c", stale.revision, at, at + 1, 1)) for at in (0, 1)]
    rig.run()
    assert all(isinstance(rig.replies[id], TopicsError) for id in failing)
    fs.arm(None)
    (cursor,) = rig.call(CursorGet("t", None)).cursors
    assert (cursor.seq, cursor.persisted_seq) == (0, 0)
    rig.restart_service()
    (after,) = rig.call(CursorGet("t", "c")).cursors
    assert (after.seq, after.consistency) == (0, "strictly_at_once")
    assert not rig.call(CursorAdvance("t", "c", cursor.revision, 0, 1, 1)).moved


def test_a_clean_end_logs_a_cursor_up_to_the_first_answer_that_was_not_passed_on(rig: Rig) -> None:
    rig.append("t", b"1", b"2", b"3", b"4")
    rig.call(CursorPut("t", "c", "at_least_once", 10, None, False))
    (cursor,) = rig.call(CursorGet("t", "c")).cursors
    for read, seq in enumerate((1, 2, 3)):
        assert rig.call(CursorAdvance("t", "c", cursor.revision, seq - 1, seq, read)).moved
    for read in (0, 2):
        rig.call(CursorPassedOn("t", "c", cursor.revision, read, True))
    (cursor,) = rig.call(CursorGet("t", "c")).cursors
    assert (cursor.seq, cursor.persisted_seq) == (3, 0)
    rig.shard.close()
    rig.restart_service()
    (after,) = rig.call(CursorGet("t", "c")).cursors
    assert (after.seq, after.persisted_seq) == (1, 1)
