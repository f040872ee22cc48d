"""Heads and floors of topics that had records in RAM, when those are lost: neither ever goes back (api §2, §3.2)."""

from __future__ import annotations

import errno

import pytest

from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from tests.walshard.test_routing import route
from topics.core.config import Durability, TopicConfig
from topics.core.errors import TopicsError
from topics.core.floors import EvictReason
from topics.core.location import ENTRY_WORDS, LOCATION_IN_RAM_LOG, any_flagged
from topics.shm.topic_messages import DeleteRecords, PutTopic, Watch
from topics.walshard.handlers import relogging

EPHEMERAL = TopicConfig(durability="ephemeral")


pytestmark = pytest.mark.shard(segment_max_events="6")


def put(rig: Rig, name: str, config: TopicConfig) -> None:
    rig.call(PutTopic(name, config, True))


def floors(rig: Rig, name: str) -> tuple[int, int, int, int]:
    """(head_seq, earliest_seq, evict_floor, records)"""
    view = rig.view(name)
    return view.head_seq, view.earliest_seq, view.evict_floor, view.records


def restart(compaction: Compaction) -> None:
    """Restart the service, which was killed."""
    compaction.rig.restart_service()
    compaction.begin_again()


def test_what_a_record_in_ram_evicted_stays_evicted_without_it(compaction: Compaction) -> None:
    rig = compaction.rig
    rig.append("t", b"1", b"2", b"3")
    put(rig, "t", TopicConfig(cap_records=3, durability="ephemeral"))
    rig.append("t", b"4")
    assert floors(rig, "t") == (4, 2, 2, 3)
    restart(compaction)
    assert [seq for seq, _ in compaction.read("t")] == [2, 3]
    assert rig.view("t").evict_floor == 2
    assert rig.view("t").evict_reason == EvictReason.CAP


def test_so_does_what_a_tighter_cap_evicted(compaction: Compaction) -> None:
    rig = compaction.rig
    rig.append("t", b"1", b"2", b"3")
    put(rig, "t", EPHEMERAL)
    rig.append("t", b"4", b"5")
    put(rig, "t", TopicConfig(cap_records=3, durability="ephemeral"))
    restart(compaction)
    assert [seq for seq, _ in compaction.read("t")] == [3]


def test_also_when_the_topic_becomes_durable(compaction: Compaction) -> None:
    rig = compaction.rig
    rig.append("t", b"1", b"2", b"3")
    put(rig, "t", EPHEMERAL)
    rig.append("t", b"4")
    put(rig, "t", TopicConfig(cap_records=4))
    rig.append("t", b"5")
    assert floors(rig, "t") == (5, 2, 2, 4)
    restart(compaction)
    assert [seq for seq, _ in compaction.read("t")] == [2, 3, 4, 5]
    assert floors(rig, "t") == (5, 2, 2, 4)


def test_and_when_a_router_brought_it(compaction: Compaction) -> None:
    rig = compaction.rig
    put(rig, "s", TopicConfig())
    rig.append("d", b"1", b"2", b"3")
    put(rig, "d", TopicConfig(cap_records=3, durability="ephemeral"))
    route(rig, "r", "s", "d")
    rig.append("s", b"copied")
    assert floors(rig, "d") == (4, 2, 2, 3)
    restart(compaction)
    assert (1, b"1") not in compaction.read("d")
    assert rig.view("d").evict_floor >= 2


def test_evictions_among_records_in_ram_cost_the_durable_log_nothing(rig: Rig) -> None:
    put(rig, "t", TopicConfig(cap_records=3, durability="ephemeral"))
    rig.append("t", b"0")
    frames = rig.cell.get("wal_frames")
    for number in range(20):
        rig.append("t", b"%d" % number)
    assert rig.cell.get("wal_frames") == frames
    rig.boot()
    for number in range(20):
        rig.append("t", b"%d" % number)
    assert rig.cell.get("wal_frames") == frames, "nor after the shard was killed"
    assert floors(rig, "t") == (41, 39, 39, 3)


@pytest.mark.parametrize("cleanly", [False, True])
def test_a_head_that_was_lost_is_known_beside_a_new_ram_log(compaction: Compaction, cleanly: bool) -> None:
    rig = compaction.rig
    rig.append("t", b"1", b"2")
    put(rig, "t", EPHEMERAL)
    rig.append("t", b"3")
    if cleanly:
        rig.shard.close()
    restart(compaction)
    before = floors(rig, "t")
    assert before[0] >= 3
    rig.append("other", b"1", config=EPHEMERAL)
    rig.boot()
    assert floors(rig, "t") == before
    compaction.cut()
    rig.boot()
    assert floors(rig, "t") == before, "nor does a snapshot forget it"
    assert rig.append("t", b"4").first_seq == before[0] + 1
    rig.boot()
    assert floors(rig, "t") == (before[0] + 1, 1, 1, 3)


def test_there_is_no_ram_log_until_lost_heads_are_in_the_durable_one(compaction: Compaction) -> None:
    rig = compaction.rig
    rig.append("t", b"1", config=EPHEMERAL)
    rig.append("other", b"1", config=EPHEMERAL)
    restart(compaction)
    before = floors(rig, "t")
    fs = rig.fs
    assert isinstance(fs, FaultyFileSystem)
    fs.arm(Fault(1, errno.ENOSPC, always=True, calls=frozenset({"pwritev"})))
    with pytest.raises(TopicsError, match="the log cannot be written"):
        rig.append("other", b"2")
    fs.arm(None)
    rig.boot()
    assert floors(rig, "t") == before
    rig.append("other", b"2")
    rig.boot()
    assert floors(rig, "t") == before


def test_the_gap_that_a_router_leaves_in_an_ephemeral_dest_is_not_given_out_again(compaction: Compaction) -> None:
    rig = compaction.rig
    put(rig, "s", EPHEMERAL)
    put(rig, "d", EPHEMERAL)
    rig.append("s", b"1")
    route(rig, "r", "s", "d")
    rig.append("s", b"2")
    restart(compaction)
    rig.run()
    rig.append("other", b"1", config=EPHEMERAL)
    head_seq = rig.view("d").head_seq
    rig.boot()
    rig.run()
    assert rig.view("d").head_seq == head_seq


def test_a_delete_that_leaves_only_what_was_lost_leaves_nothing(compaction: Compaction) -> None:
    """rules, Delete: when nothing is left, earliest = head + 1."""
    rig = compaction.rig
    rig.append("t", b"1", b"2", b"3")
    put(rig, "t", EPHEMERAL)
    rig.append("t", b"4")
    restart(compaction)
    head_seq, _, evict_floor, _ = floors(rig, "t")
    assert evict_floor == 1
    reply = rig.call(DeleteRecords("t", 50, None, b""))
    assert (reply.deleted, reply.earliest_seq) == (3, head_seq + 1)
    left = (head_seq, head_seq + 1, head_seq + 1, 0)
    assert floors(rig, "t") == left
    assert rig.view("t").evict_reason == EvictReason.RESTART
    for _ in range(2):
        rig.boot()
        assert floors(rig, "t") == left
        compaction.cut()


@pytest.mark.parametrize("how", ["cap", "tag", "ttl"])
def test_whatever_takes_the_last_before_a_gap_lays_it_open(compaction: Compaction, how: str) -> None:
    rig = compaction.rig
    rig.append("t", b"1", b"2", tag=b"x")
    put(rig, "t", EPHEMERAL)
    rig.append("t", b"3", b"4")
    rig.shard.close()
    restart(compaction)
    put(rig, "t", TopicConfig())
    rig.clock.ms += 100
    rig.append("t", b"5", b"6")
    restart(compaction)
    assert floors(rig, "t") == (6, 1, 1, 4)
    if how == "tag":
        assert rig.call(DeleteRecords("t", None, "eq", b"x")).earliest_seq == 5
    elif how == "cap":
        put(rig, "t", TopicConfig(cap_records=2))
    else:
        put(rig, "t", TopicConfig(ttl_ms=50))
        rig.shard.sweep()
    assert floors(rig, "t") == (6, 5, 5, 2)
    rig.boot()
    assert floors(rig, "t") == (6, 5, 5, 2)


def test_what_was_deleted_in_ram_is_not_lost(compaction: Compaction) -> None:
    rig = compaction.rig
    rig.append("t", b"1")
    put(rig, "t", EPHEMERAL)
    rig.append("t", b"2", tag=b"x")
    rig.call(DeleteRecords("t", None, "eq", b"x"))
    put(rig, "t", TopicConfig())
    rig.append("t", b"3")
    restart(compaction)
    rig.call(DeleteRecords("t", 2, None, b""))
    assert floors(rig, "t") == (3, 3, 1, 1), "a gap made only of deletions is silent (api §3.3)"


def test_what_recovery_evicted_is_logged_before_the_cap_is_another(rig: Rig) -> None:
    put(rig, "t", TopicConfig(cap_records=3))
    rig.append("t", b"1", b"2", b"3", b"4", b"5")
    rig.boot()
    put(rig, "t", TopicConfig(cap_records=12))
    rig.boot()
    assert floors(rig, "t") == (5, 3, 3, 3)


def synced(rig: Rig) -> None:
    """Wait for a sync in the background."""
    rig.clock.ms += 1000
    for _ in range(2):
        rig.shard.sync_in_background()


def durable_seq(rig: Rig) -> int:
    return rig.view("t").durable_seq


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
@pytest.mark.parametrize("cut", [False, True])
def test_what_was_in_ram_is_durable_with_the_change_of_class(
    compaction: Compaction, durability: Durability, cut: bool
) -> None:
    rig = compaction.rig
    rig.append("t", b"1")
    put(rig, "t", EPHEMERAL)
    assert durable_seq(rig) == 1, "the change of class is synced, and all before it"
    rig.append("t", b"2", b"3", key=b"k")
    synced(rig)
    assert durable_seq(rig) == 1
    rig.post_call(Watch(7, "t", rig.view("t").topic_id, 3))
    rig.run()
    rig.notices.clear()
    put(rig, "t", TopicConfig(durability=durability))
    assert durable_seq(rig) == 3
    assert rig.notices, "streams that wait for it hear of that"
    if cut:
        compaction.cut()
    restart(compaction)
    assert compaction.read("t") == [(1, b"1"), (2, b"2"), (3, b"3")]
    assert durable_seq(rig) == 3
    assert rig.append("t", b"2", b"3", key=b"k").deduped, "and so is the key"
    assert rig.append("t", b"4").first_seq == 4


def test_no_location_is_in_the_ram_log_afterwards(rig: Rig) -> None:
    put(rig, "t", EPHEMERAL)
    rig.append("t", b"1", b"2", b"3", tag=b"x")
    put(rig, "t", TopicConfig())
    rig.append("t", b"4")
    for _ in range(2):
        hosted = rig.hosted("t")
        assert not any_flagged(hosted.ring.entries(1, 4), LOCATION_IN_RAM_LOG)
        assert [data for _, data in rig.read("t")] == [b"1", b"2", b"3", b"4"]
        rig.boot()


def test_a_sync_does_not_count_what_came_into_ram_since_it_was_due(rig: Rig) -> None:
    rig.append("t", b"1")
    put(rig, "t", EPHEMERAL)
    rig.append("t", b"2")
    synced(rig)
    assert durable_seq(rig) == 1
    put(rig, "t", TopicConfig())
    put(rig, "t", EPHEMERAL)
    rig.append("t", b"3")
    rig.append("other", b"1")
    synced(rig)
    assert durable_seq(rig) == 2


@pytest.mark.parametrize("ends", ["shard", "service"])
def test_a_change_of_class_that_stops_half_way(
    compaction: Compaction, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(relogging, "TURN_BYTES", 1)
    rig = compaction.rig
    put(rig, "t", TopicConfig(durability="ephemeral", type="queue"))
    delayed = [(0, 0, 60_000, "")]
    for number in range(1, 5):
        rig.append("t", b"%d" % number, jobs=delayed)
    call = PutTopic("t", TopicConfig(type="queue"), True)
    for turns in (1, 2):
        reply = rig.answer(rig.post_call(call))
        assert reply.rest is not None
        assert reply.rest.turns == turns
        call = reply.rest
    assert rig.view("t").durable_seq == 0
    if ends == "shard":
        rig.boot()
        assert rig.read("t") == [(1, b"1"), (2, b"2"), (3, b"3"), (4, b"4")]
        return
    restart(compaction)
    view = rig.view("t")
    assert compaction.read("t") == [(1, b"1"), (2, b"2")]
    assert (view.head_seq, view.earliest_seq, view.evict_floor, view.records) == (4096, 1, 1, 2)
    assert view.jobs_ready == 0, "they are still delayed"
    put(rig, "t", TopicConfig(type="queue"))
    assert rig.append("t", b"5").first_seq == 4097
    restart(compaction)
    assert floors(rig, "t") == (4097, 1, 1, 3)


def test_a_gap_of_lost_records_is_not_later_than_the_records_behind_it(rig: Rig) -> None:
    rig.append("e", b"1")
    put(rig, "e", EPHEMERAL)
    rig.append("e", b"2")
    rig.restart_service()
    for data in (b"3", b"4"):
        rig.clock.ms += 1_000
        rig.append("e", data)
    rig.boot()
    topic = rig.hosted("e").topic
    times = list(rig.hosted("e").ring.entries(1, topic.head_seq)[1::ENTRY_WORDS])
    assert times == sorted(times)
    assert len(set(times)) == 3


def test_one_seq_of_a_full_dest_stands_for_all_that_its_source_lost(compaction: Compaction) -> None:
    """api §3.3: after a restart nobody knows how many records an ephemeral source had, so the gap is no estimate."""
    rig = compaction.rig
    put(rig, "s", EPHEMERAL)
    put(rig, "d", TopicConfig(cap_records=2, discard="reject"))
    route(rig, "r", "s", "d")
    rig.append("s", *[b"%d" % at for at in range(50)])
    rig.run()
    assert rig.view("d").head_seq == 2
    restart(compaction)
    assert floors(rig, "s")[0] > 50
    put(rig, "d", TopicConfig(cap_records=9, discard="reject"))
    rig.append("s", b"new")
    rig.run()
    assert [seq for seq, _ in compaction.read("d")] == [1, 2, 4]
