"""A shard through its rings: what is answered, what is in the log, what readers see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.walshard.rig import Rig
from topics.core.config import Durability, TopicConfig
from topics.core.errors import TopicsError
from topics.core.floors import EvictReason
from topics.shm import append_messages, messages
from topics.shm.topic_messages import (
    Checkpoint,
    DeleteRecords,
    DeleteTopic,
    Expire,
    Hello,
    PutTopic,
    SessionAbandon,
    SessionClose,
    SessionGet,
    SessionOpen,
    SessionOpenReply,
    SessionPut,
    Unwatch,
    Watch,
)
from topics.storage import layout
from topics.storage.frame import FrameType, lay_out, scan
from topics.storage.logfile import sync_mark_frame
from topics.walshard.commit.logs import MOVED_MAX


def refusal(rig: Rig, request_id: int) -> TopicsError:
    with pytest.raises(TopicsError) as error:
        rig.answer(request_id)
    return error.value


def test_seqs_are_contiguous_over_requests_of_one_group(rig: Rig) -> None:
    ids = [rig.post_append("t", [b"%d" % at] * (at + 1)) for at in range(4)]
    rig.run()
    replies = [rig.replies[id] for id in ids]
    assert [(reply.first_seq, reply.count, reply.created) for reply in replies] == [
        (1, 1, True),
        (2, 2, False),
        (4, 3, False),
        (7, 4, False),
    ]
    assert [data for _, data in rig.read("t")] == [b"0", b"1", b"1", b"2", b"2", b"2", b"3", b"3", b"3", b"3"]


def test_a_key_is_recognised_inside_a_group_after_it_and_after_a_restart(rig: Rig) -> None:
    first = rig.post_append("t", [b"1", b"2"], key=b"k")
    second = rig.post_append("t", [b"1", b"2"], key=b"k")
    rig.run()
    assert not rig.replies[first].deduped
    assert rig.replies[second].deduped
    assert rig.append("t", b"1", b"2", key=b"k").first_seq == 1
    rig.restart_service()
    again = rig.append("t", b"1", b"2", key=b"k")
    assert (again.deduped, again.first_seq, again.count, again.head_seq) == (True, 1, 2, 2)
    rig.clock.ms += 120_001
    assert rig.append("t", b"3", key=b"k").first_seq == 3


def test_if_head_seq_sees_the_group(rig: Rig) -> None:
    assert rig.append("t", b"1", if_head_seq=0).first_seq == 1
    good = rig.post_append("t", [b"2"], if_head_seq=1)
    late = rig.post_append("t", [b"x"], if_head_seq=1)
    error = refusal(rig, late)
    assert (error.code, error.detail) == ("head_mismatch", {"head_seq": 2})
    assert rig.replies[good].first_seq == 2
    assert len(rig.read("t")) == 2


def test_a_refused_first_write_creates_nothing(rig: Rig) -> None:
    assert refusal(rig, rig.post_append("t", [b"1"], if_head_seq=5)).code == "head_mismatch"
    assert refusal(rig, rig.post_append("t", [b"1"], create=False)).code == "topic_not_found"
    config = TopicConfig(cap_records=1, discard="reject")
    assert refusal(rig, rig.post_append("t", [b"1", b"2"], config=config)).code == "record_too_large"
    assert not rig.exists("t")
    assert rig.append("t", b"1").created


def test_a_reject_topic_counts_what_the_group_adds(rig: Rig) -> None:
    rig.call(PutTopic("t", TopicConfig(cap_records=2, discard="reject"), False))
    fits = rig.post_append("t", [b"1", b"2"])
    full = rig.post_append("t", [b"3"])
    assert refusal(rig, full).code == "topic_full"
    assert rig.replies[fits].count == 2


def test_put_replaces_the_configuration_and_keeps_the_type(rig: Rig) -> None:
    assert rig.call(PutTopic("t", TopicConfig(type="queue", ttl_ms=5), True)).created
    reply = rig.call(PutTopic("t", TopicConfig(cap_records=7), False))
    assert reply.config == TopicConfig(type="queue", cap_records=7)
    assert refusal(rig, rig.post_call(PutTopic("t", TopicConfig(), True))).code == "topic_exists_incompatible"
    rig.restart_service()
    assert rig.call(PutTopic("t", TopicConfig(cap_records=7), False)).config == reply.config


def test_a_deleted_name_is_a_new_topic(rig: Rig) -> None:
    rig.append("t", b"1")
    before = rig.view("t")
    assert refusal(rig, rig.post_call(DeleteTopic("t", True))).code == "topic_not_empty"
    assert rig.call(DeleteTopic("t", False)).deleted
    assert not rig.call(DeleteTopic("t", False)).deleted
    assert rig.append("t", b"new").first_seq == 1
    rig.restart_service()
    after = rig.view("t")
    assert before is not None
    assert after.topic_id > before.topic_id
    assert rig.read("t") == [(1, b"new")]


def test_caps_and_expiry_survive_a_restart(rig: Rig) -> None:
    rig.call(PutTopic("t", TopicConfig(cap_records=3, ttl_ms=100), False))
    for number in range(5):
        rig.append("t", b"%d" % number)
    rig.clock.ms += 50
    rig.append("t", b"5")
    rig.clock.ms += 51
    rig.call(Expire("t"))
    view = rig.view("t")
    assert (view.earliest_seq, view.evict_floor, view.records) == (6, 6, 1)
    rig.restart_service()
    again = rig.view("t")
    assert (again.earliest_seq, again.evict_floor, again.records, again.live_bytes) == (6, 6, 1, view.live_bytes)


@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
@pytest.mark.parametrize("cap", [{"cap_records": 2}, {"cap_bytes": 110}])
def test_a_full_topic_has_room_again_when_its_records_have_expired(
    rig: Rig, cap: dict[str, Any], durability: Durability
) -> None:
    """At the very write: no reader has asked, nothing has swept."""
    rig.call(PutTopic("t", TopicConfig(**cap, discard="reject", ttl_ms=100, durability=durability), False))
    rig.append("t", b"1", b"2")
    rig.clock.ms += 100
    assert refusal(rig, rig.post_append("t", [b"x"])).code == "topic_full"
    rig.clock.ms += 1
    assert rig.append("t", b"3").first_seq == 3
    rig.boot()
    assert rig.append("t", b"4").first_seq == 4
    assert refusal(rig, rig.post_append("t", [b"x"])).code == "topic_full"
    view = rig.view("t")
    assert (view.earliest_seq, view.evict_reason, view.records) == (3, EvictReason.TTL, 2)


def test_what_had_expired_is_not_what_a_cap_took(rig: Rig) -> None:
    config = TopicConfig(ttl_ms=100, cap_records=3)
    rig.call(PutTopic("t", config, False))
    rig.append("t", b"1", b"2")
    rig.clock.ms += 101
    before = rig.post_append("other", [b"1"])
    writes = [rig.post_append("t", [b"3"]), rig.post_append("t", [b"4"] * 4, key=b"k"), rig.post_append("t", [b"5"])]
    again = rig.post_append("t", [b"4"] * 4, key=b"k")
    rig.run()
    assert [rig.replies[id].first_seq for id in (before, *writes, again)] == [1, 3, 4, 8, 4]
    view = rig.view("t")
    assert (view.earliest_seq, view.evict_floor, view.evict_run_seq) == (6, 6, 3), "1..2 by the ttl, 3..5 by the cap"
    assert view.evict_reason == EvictReason.CAP
    rig.restart_service()
    again_view = rig.view("t")
    assert (again_view.evict_floor, again_view.evict_run_seq) == (6, 3)


def test_a_write_that_no_cap_minds_logs_no_expiry(rig: Rig) -> None:
    """A topic whose oldest records go all the time would have two commits for each write."""
    rig.call(PutTopic("t", TopicConfig(ttl_ms=100, cap_records=9), False))
    rig.append("t", b"1")
    rig.clock.ms += 101
    batches = rig.cell.get("wal_batches")
    rig.append("t", b"2")
    assert rig.cell.get("wal_batches") == batches + 1


def test_ephemeral_survives_the_shard_and_not_the_service(rig: Rig) -> None:
    rig.call(PutTopic("t", TopicConfig(durability="ephemeral"), False))
    rig.append("t", b"1", b"2", key=b"k")
    rig.boot()
    assert rig.read("t") == [(1, b"1"), (2, b"2")]
    assert rig.append("t", b"x", key=b"k").deduped
    assert rig.append("t", b"3").first_seq == 3
    rig.shard.close()
    rig.restart_service()
    view = rig.view("t")
    assert (view.head_seq, view.earliest_seq, view.evict_floor, view.records) == (3, 4, 4, 0)
    assert rig.append("t", b"4").first_seq == 4


def test_an_ephemeral_head_is_never_used_again_after_a_crash(rig: Rig) -> None:
    rig.append("t", b"1", config=TopicConfig(durability="ephemeral"))
    rig.restart_service()
    assert rig.append("t", b"2").first_seq > 1


def test_a_class_can_change_in_place_both_ways(rig: Rig) -> None:
    rig.append("t", b"1")
    rig.call(PutTopic("t", TopicConfig(durability="ephemeral"), False))
    rig.append("t", b"2", b"3")
    rig.call(PutTopic("t", TopicConfig(durability="fsync"), False))
    rig.append("t", b"4")
    whole = [(1, b"1"), (2, b"2"), (3, b"3"), (4, b"4")]
    assert rig.read("t") == whole
    rig.boot()
    assert rig.read("t") == whole
    rig.restart_service()
    assert rig.read("t") == whole
    assert rig.append("t", b"5").first_seq == 5


def test_durable_seq_follows_the_disk(rig: Rig) -> None:
    rig.append("t", b"1")
    view = rig.view("t")
    assert view.durable_seq == 0
    rig.append("f", b"1", config=TopicConfig(durability="fsync"))
    assert rig.view("f").durable_seq == 1
    rig.shard.sync_in_background()
    view = rig.view("t")
    assert view.durable_seq == 1, "one sync covers the whole log"
    rig.append("t", b"2")
    rig.clock.ms += 1000
    rig.shard.sync_in_background()
    rig.shard.sync_in_background()
    view = rig.view("t")
    assert view.durable_seq == 2


@pytest.mark.parametrize(
    "syncs",
    [lambda rig: rig.call(PutTopic("f", TopicConfig(durability="fsync"), False)), lambda rig: rig.call(Checkpoint([]))],
    ids=["a topic is made", "a checkpoint ends"],
)
def test_durable_seq_follows_a_sync_that_is_for_something_else(rig: Rig, syncs: Callable[[Rig], object]) -> None:
    rig.append("t", b"1")
    syncs(rig)
    rig.shard.sync_in_background()
    view = rig.view("t")
    assert view.durable_seq == 1


def test_topics_that_became_durable_at_once_are_shown_a_part_at_a_time(rig: Rig) -> None:
    """One sync of 5,000 topics held up the requests of a shard for 20 ms."""
    names = [f"t-{number}" for number in range(MOVED_MAX + 44)]
    for _ in range(2):
        for name in names:
            rig.append(name, b"1")
    rig.clock.ms += 1000
    assert not rig.shard.sync_in_background()  # it begins
    assert rig.shard.sync_in_background()
    assert sum(rig.view(name).durable_seq == 2 for name in names) == MOVED_MAX
    gone = names.pop()
    rig.call(DeleteTopic(gone, False))
    rig.append("in its slot", b"1", b"2", b"3")
    assert not rig.shard.sync_in_background()
    assert {rig.view(name).durable_seq for name in names} == {2}
    assert rig.view("in its slot").head_seq == 3


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_an_idle_log_says_once_that_all_of_it_is_synced(rig: Rig, durability: Durability) -> None:
    rig.append("t", b"1", config=TopicConfig(durability=durability))
    written = rig.cell.get("wal_bytes_written")
    sizes, syncs = [], []
    for _ in range(8):
        rig.clock.ms += 1000
        rig.shard.sync_in_background()
        rig.shard.sync_in_background()
        sizes.append(rig.cell.get("wal_bytes_written") - written)
        syncs.append(rig.cell.get("wal_fsyncs"))
    assert sizes[0] == 0, "it is not idle yet"
    assert sizes[-1] == sizes[-4] == len(sync_mark_frame(1, 0))
    assert syncs[-1] == syncs[-4]
    path = layout.log_path(layout.group_dir(rig.settings.data_dir, 0, 1), 1)
    content = Path(path).read_bytes()
    last = scan(content, 0, len(content)).frames[-1]
    assert (last[2], last[5]) == (FrameType.SYNC_MARK, last[0]), "and that mark is the last frame"


def test_watchers_hear_of_changes_once_they_have_seen_the_present(rig: Rig) -> None:
    rig.append("t", b"1")
    view = rig.view("t")
    rig.post_call(Watch(5, "t", view.topic_id, 1))
    rig.run()
    assert rig.notices == []
    rig.append("t", b"2")
    assert rig.notices == [5]
    rig.post_call(Watch(6, "t", view.topic_id, 1))
    rig.run()
    assert rig.notices == [5, 6], "what it has seen is old: it hears at once"
    rig.post_call(Unwatch(6, "t"))
    rig.append("t", b"3")
    rig.post_call(Watch(7, "t", view.topic_id, 3))
    rig.post_call(Hello(2))
    rig.append("t", b"4")
    assert rig.notices == [5, 6]
    rig.post_call(Watch(8, "t", view.topic_id, 4))
    rig.call(DeleteTopic("t", False))
    assert rig.notices == [5, 6, 8]


def test_sessions_know_whether_their_positions_are_exact(rig: Rig) -> None:
    rig.call(SessionPut("w", b"body"))
    assert rig.call(SessionGet("w")) == rig.call(SessionGet("w")) == SessionOpenReply(b"body", None, True)
    first = rig.call(SessionOpen("w", 1))
    assert (first.body, first.positions, first.exact) == (b"body", None, True)
    assert not rig.call(SessionGet("w")).exact
    rig.call(SessionClose("w", 1, {"t": 4}))
    assert rig.call(SessionGet("w")) == SessionOpenReply(b"body", {"t": 4}, True)
    assert rig.call(SessionOpen("w", 2)).exact
    rig.post_call(Hello(2))
    after_crash = rig.call(SessionOpen("w", 3))
    assert (after_crash.positions, after_crash.exact) == ({"t": 4}, False)
    rig.call(SessionClose("w", 2, {"t": 1}))
    rig.call(SessionClose("w", 3, {"t": 9}))
    rig.boot()
    recovered = rig.call(SessionOpen("w", 4))
    assert (recovered.body, recovered.positions, recovered.exact) == (b"body", {"t": 9}, False)
    rig.call(SessionClose("w", 4, {}))
    rig.clock.ms += 300_001
    rig.shard.sweep()
    assert refusal(rig, rig.post_call(SessionOpen("w", 5))).code == "not_found"
    assert refusal(rig, rig.post_call(SessionGet("w"))).code == "not_found"


def test_an_answer_too_long_for_the_ring_goes_by_reference(rig: Rig) -> None:
    replies = rig.shared.rings[0][0].replies
    rig.call(SessionPut("w", b"x" * replies.message_max_bytes))
    request_id = rig.post_call(SessionOpen("w", 1))
    while rig.step():
        pass
    ((message, position),) = replies.peek()
    assert messages.head(message)[:2] == (messages.MessageKind.CALL | messages.BY_REFERENCE, request_id)
    with open(messages.decode_reference(message), "rb") as file:
        reply = messages.decode(memoryview(file.read()))
    assert reply == SessionOpenReply(b"x" * replies.message_max_bytes, None, True)
    replies.consume(position)


def test_a_request_by_reference(rig: Rig, tmp_path: object) -> None:
    laid_out = lay_out([(b"", b"", b"1" * 500_000, b"")])
    options = append_messages.AppendOptions("t")
    parts = append_messages.encode_append(99, options, laid_out.offset_len, laid_out.flags, laid_out.buffer)
    spill = f"{tmp_path}/spill"
    with open(spill, "wb") as file:
        file.writelines(parts)
    ring = rig.shared.rings[0][0].requests
    assert ring.push(*messages.encode_reference(messages.MessageKind.APPEND, 99, spill))
    assert ring.push(*messages.encode_reference(messages.MessageKind.APPEND, 100, spill + "-gone"))
    assert rig.answer(99).first_seq == 1
    assert refusal(rig, 100).code == "shard_unavailable"
    assert rig.read("t") == [(1, b"1" * 500_000)]


def post_tagged(rig: Rig, name: str, *tags: bytes) -> None:
    laid_out = lay_out([(b"", tag, b"%d" % number, b"") for number, tag in enumerate(tags)])
    options = append_messages.AppendOptions(name)
    assert rig.shared.rings[0][0].requests.push(
        *append_messages.encode_append(10**6, options, laid_out.offset_len, laid_out.flags, laid_out.buffer)
    )
    rig.run()
    del rig.replies[10**6]


@pytest.mark.parametrize("durability", ["disk", "ephemeral", "fsync"])
def test_deletes_survive_as_their_records_do(rig: Rig, durability: Any) -> None:
    rig.call(PutTopic("t", TopicConfig(durability=durability), False))
    post_tagged(rig, "t", b"a", b"b", b"a", b"", b"ab")
    reply = rig.call(DeleteRecords("t", None, "eq", b"a"))
    assert (reply.deleted, reply.earliest_seq, reply.head_seq, reply.records) == (2, 2, 5, 3)
    post_tagged(rig, "t", b"a")
    assert [seq for seq, _ in rig.read("t")] == [2, 4, 5, 6]
    reply = rig.call(DeleteRecords("t", 6, "glob", b"a"))
    assert (reply.deleted, reply.records) == (1, 3)
    rig.boot()
    assert [seq for seq, _ in rig.read("t")] == [2, 4, 6]
    assert rig.call(DeleteRecords("t", 5, None, b"")).deleted == 2
    again = rig.call(DeleteRecords("t", 5, None, b""))
    assert (again.deleted, again.earliest_seq, again.live_bytes > 0) == (0, 6, True)
    if durability != "ephemeral":
        rig.restart_service()
        assert [seq for seq, _ in rig.read("t")] == [6]
        view = rig.view("t")
        assert (view.evict_floor, view.records) == (1, 1)


def test_a_delete_on_nothing(rig: Rig) -> None:
    assert refusal(rig, rig.post_call(DeleteRecords("t", 5, None, b""))).code == "topic_not_found"


def test_cap_evictions_are_logged_before_a_delete_changes_what_the_caps_see(rig: Rig) -> None:
    """Replayed without its logged floor, the delete would make room for a record that had been evicted."""
    rig.call(PutTopic("t", TopicConfig(cap_records=3), False))
    post_tagged(rig, "t", b"x", b"x", b"y", b"y")
    rig.call(DeleteRecords("t", None, "eq", b"y"))
    before = rig.view("t")
    rig.restart_service()
    after = rig.view("t")
    assert before is not None
    assert (after.earliest_seq, after.evict_floor, after.records) == (2, 2, 1)
    assert (before.earliest_seq, before.evict_floor, before.records) == (2, 2, 1)


def test_a_session_whose_stream_never_began_is_collected(rig: Rig) -> None:
    rig.call(SessionPut("w", b"body"))
    rig.call(SessionOpen("w", 1))
    rig.post_call(SessionAbandon("w", 7))
    rig.run()
    rig.clock.ms += 300_001
    rig.shard.sweep()
    assert rig.call(SessionOpen("w", 2)).body == b"body", "another stream's end is none of stream 1's"
    rig.post_call(SessionAbandon("w", 2))
    rig.run()
    rig.clock.ms += 300_001
    rig.shard.sweep()
    assert refusal(rig, rig.post_call(SessionOpen("w", 3))).code == "not_found"
