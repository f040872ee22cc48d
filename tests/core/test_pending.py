"""Writes of one group see each other: it is as if each had been a group of its own."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.list_index import ListIndex
from topics.core.ceilings import RAM_STEP, Ceiling
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.idempotency import KeyMark, ProducerTurn, producer_key, stage_key
from topics.core.job import Now
from topics.core.pending import PendingTopic, PendingWrite, RecordFrames, RoomNeeded
from topics.core.topic import Topic

NOW = Now(5_000, 70)
RECORD_BYTES = 100


def topic_of(**config: object) -> Topic:
    return Topic(1, "t", TopicConfig(**config), ListIndex(1))  # type: ignore[arg-type]


def frames_of(count: int) -> RecordFrames:
    places = [at * RECORD_BYTES | RECORD_BYTES << 32 for at in range(count)]
    return RecordFrames(array("Q", places), bytes(count), count * RECORD_BYTES)


def outcome(pending: PendingTopic, key: bytes, count: int, if_head_seq: int | None) -> PendingWrite | object:
    """Return the write, or what its client is told instead."""
    frames = frames_of(count)
    try:
        known = pending.admit(key, frames, if_head_seq, False, NOW.wall_ms, False)
    except TopicsError as error:
        return error.code, error.message
    return pending.write(key, frames, []) if known is None else known


def logged(write: object) -> None:
    if isinstance(write, PendingWrite):
        write.logged(0, 1, 0)


def said(write: object) -> object:
    return write.outcome if isinstance(write, PendingWrite) else write


def state(topic: Topic) -> tuple[object, ...]:
    return topic.head_seq, topic.records, topic.live_bytes, topic.earliest_seq, topic.last_write_ts, topic.evict_floor


Write = tuple[bytes, int, int | None]
KEYS = [b"", b"a", b"b"] + [producer_key(b"p", ProducerTurn(epoch, n)) for epoch in (1, 2) for n in (1, 2, 3)]
WRITES = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(1, 3), st.one_of(st.none(), st.integers(0, 8))), max_size=8
)
CONFIGS = st.fixed_dictionaries(
    {
        "discard": st.sampled_from(["old", "reject"]),
        "cap_records": st.sampled_from([0, 4]),
        "cap_bytes": st.sampled_from([0, 5 * RECORD_BYTES]),
    }
)


@settings(max_examples=300)
@given(CONFIGS, WRITES, WRITES)
def test_a_group_of_many_is_as_many_groups_of_one(
    config: dict[str, object], before: list[Write], group: list[Write]
) -> None:
    together, apart = topic_of(**config), topic_of(**config)
    for topic in (together, apart):
        for write in before:
            logged(outcome(PendingTopic(topic, NOW), *write))
    pending = PendingTopic(together, NOW)
    prepared = [outcome(pending, *write) for write in group]
    for written in prepared:
        logged(written)
    alone = []
    for write in group:
        alone.append(outcome(PendingTopic(apart, NOW), *write))
        logged(alone[-1])
    assert list(map(said, prepared)) == list(map(said, alone))
    assert state(together) == state(apart)


def test_a_group_that_is_dropped_changes_nothing() -> None:
    topic = topic_of()
    logged(outcome(PendingTopic(topic, NOW), b"k", 2, None))
    former = state(topic)
    pending = PendingTopic(topic, NOW)
    assert said(outcome(pending, b"other", 3, 2)) == (3, 3, NOW.wall_ms)
    assert pending.head_seq == 5
    assert state(topic) == former
    assert said(outcome(PendingTopic(topic, NOW), b"other", 1, 2)) == (3, 1, NOW.wall_ms)


def test_records_that_have_expired_have_to_go_before_a_cap_evicts_them() -> None:
    topic = topic_of(ttl_ms=10, cap_records=2)
    logged(outcome(PendingTopic(topic, Now(4_000, 0)), b"", 2, None))
    with pytest.raises(RoomNeeded):
        outcome(PendingTopic(topic, NOW), b"", 1, None)
    pending = PendingTopic(topic, NOW)
    assert pending.admit(b"", frames_of(1), None, False, 0, False) is None, "the log cannot take it: they stay"


def test_jobs_are_for_queues() -> None:
    with pytest.raises(TopicsError, match="log"):
        PendingTopic(topic_of(), NOW).admit(b"", frames_of(1), None, True, NOW.wall_ms, False)


def test_a_delay_counts_from_now_and_not_from_a_commit_time_ahead_of_it() -> None:
    topic = topic_of(type="queue")
    logged(outcome(PendingTopic(topic, Now(9_000, 0)), b"", 1, None))
    write = PendingTopic(topic, NOW).write(b"", frames_of(3), [(0, 0, 0, "k"), (1, 0, 30, ""), (2, 8_888, 0, "")])
    assert write.outcome.ts == 9_000
    assert write.jobs == [(2, 0, "k"), (3, 5_030, ""), (4, 8_888, "")]
    assert write.due_ms == [0, 100, 0]


def test_a_ceiling_is_logged_before_seqs_above_it_are_in_ram() -> None:
    topic = topic_of(durability="ephemeral")
    pending = PendingTopic(topic, NOW)
    first = pending.write(b"", frames_of(1), [])
    assert (first.ceiling, first.in_ram) == (Ceiling(RAM_STEP, True), True)
    assert pending.write(b"", frames_of(2), []).ceiling is None
    first.ceiling_logged()
    logged(first)
    assert PendingTopic(topic, NOW).write(b"", frames_of(1), []).ceiling is None
    assert PendingTopic(topic, NOW).write(b"", frames_of(RAM_STEP), []).ceiling == Ceiling(1 + RAM_STEP, True)


@pytest.mark.parametrize(
    ("durability", "key", "sync"),
    [
        ("fsync", b"", True),
        ("disk", b"", False),
        ("disk", b"k", False),
        ("disk", stage_key("s", 1, "x"), True),
        ("ephemeral", stage_key("s", 1, "x"), False),
        ("disk", KeyMark.CARRIED + b"1:2", True),
        ("memory", KeyMark.CARRIED + b"1:2", True),
        ("ephemeral", KeyMark.CARRIED + b"1:2", False),
        ("disk", producer_key(b"p", ProducerTurn(1, 1)), False),
    ],
)
def test_what_is_moved_is_on_the_disk_before_it_counts(durability: str, key: bytes, sync: bool) -> None:
    assert PendingTopic(topic_of(durability=durability), NOW).write(key, frames_of(1), []).sync is sync


def test_a_stage_that_is_gone_is_found_only_if_it_was_published() -> None:
    topic, key = topic_of(cap_records=1, discard="reject"), stage_key("s", 1, "x")
    logged(outcome(PendingTopic(topic, NOW), b"", 1, None))
    with pytest.raises(TopicsError, match="holds 1 of at most 1"):
        PendingTopic(topic, NOW).admit(b"", frames_of(1), None, False, 0, False)
    with pytest.raises(TopicsError, match="gone"):
        PendingTopic(topic, NOW).admit(key, frames_of(0), None, False, 0, False)
    published = outcome(PendingTopic(topic, NOW), key, 2, if_head_seq=77)  # it was decided when it was staged
    logged(published)
    assert (
        PendingTopic(topic, NOW).admit(key, frames_of(0), None, False, 0, False)
        == said(published)
        == (2, 2, NOW.wall_ms)
    )


def test_removals_of_a_group_know_each_other() -> None:
    topic = topic_of(type="queue")
    logged(outcome(PendingTopic(topic, NOW), b"", 5, None))
    pending = PendingTopic(topic, NOW)
    assert not pending.dying
    first, apply_first = pending.remove([1, 2], dead_letters=2)
    second, apply_second = pending.remove([3], dead_letters=1)
    assert pending.dying == {1, 2, 3}
    assert (first.earliest_seq, second.earliest_seq) == (3, 4)
    assert (first.dead_lettered, second.dead_lettered) == (2, 3)
    assert second.revision == first.revision + 1
    assert topic.records == 5
    apply_first()
    apply_second()
    assert topic.queue is not None
    assert (topic.records, topic.earliest_seq, topic.revision, topic.queue.dead_lettered) == (2, 4, second.revision, 3)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({}, "out_of_order"),  # another service has led, and this one has never had the topic
        ({"restored_seq": 9, "lost_tail_seq": 9}, "out_of_order"),
        ({"lost_tail_seq": 9}, None),
        ({"restored_seq": 5, "lost_tail_seq": 9}, None),
        ({"recreated": True}, None),
        ({"recreated": True, "restored_seq": 9, "lost_tail_seq": 9}, "out_of_order"),
        ({"had_ram_records": True}, None),
    ],
)
def test_a_producer_that_has_begun_and_is_unknown_is_told_after_a_takeover(
    state: dict[str, Any], code: str | None
) -> None:
    """After a power loss it goes on, as all do, and so does one whose topic somebody has deleted."""
    topic = topic_of()
    for name, value in state.items():
        setattr(topic, name, value)
    for n in (0, 1, 2, 7):
        key = producer_key(b"p", ProducerTurn(1, n))
        arguments = key, frames_of(1), None, False, NOW.wall_ms
        assert PendingTopic(topic, NOW).admit(*arguments, False) is None, "it may begin with any number"
        if code is None:
            assert PendingTopic(topic, NOW).admit(*arguments, True) is None
            continue
        with pytest.raises(TopicsError, match="no write is known here: its writes were lost") as refused:
            PendingTopic(topic, NOW).admit(*arguments, True)
        assert (refused.value.code, refused.value.detail) == (code, {"producer": "p", "epoch": 1, "n": 0})


def test_a_producer_in_a_later_life_is_told_that_a_takeover_lost_all_of_it() -> None:
    """The service knows it, by the writes of a life before."""
    cases: list[tuple[dict[str, Any], int, str | None]] = [
        (state, n, code)
        for state, code in (
            ({"lost_tail_seq": 9, "restored_seq": 9}, "out_of_order"),
            ({}, "out_of_order"),
            ({"lost_tail_seq": 9}, None),
            ({"recreated": True}, None),
            ({"had_ram_records": True}, None),
        )
        for n in (0, 1, 2, 7)
    ]
    for state, n, code in cases:
        topic = topic_of()
        logged(outcome(PendingTopic(topic, NOW), producer_key(b"p", ProducerTurn(1, 3)), 1, None))
        for name, value in state.items():
            setattr(topic, name, value)
        arguments = producer_key(b"p", ProducerTurn(2, n)), frames_of(1), None, False, NOW.wall_ms
        assert PendingTopic(topic, NOW).admit(*arguments, False) is None, "a new life may begin with any number"
        if code is None:
            assert PendingTopic(topic, NOW).admit(*arguments, True) is None
            continue
        with pytest.raises(TopicsError) as refused:
            PendingTopic(topic, NOW).admit(*arguments, True)
        assert (refused.value.code, refused.value.detail) == (code, {"producer": "p", "epoch": 2, "n": 0})


def test_a_producer_whose_last_writes_a_takeover_lost_is_told_and_after_a_power_loss_goes_on() -> None:
    for restored_seq, goes_on in ((9, False), (0, True), (2, True)):
        topic = topic_of()
        for n in (1, 2, 3):
            pending = PendingTopic(topic, NOW)
            logged(outcome(pending, producer_key(b"p", ProducerTurn(1, n)), 1, None))
        topic.lost_tail_seq, topic.restored_seq = 9, restored_seq
        found = outcome(PendingTopic(topic, NOW), producer_key(b"p", ProducerTurn(1, 7)), 1, None)
        assert isinstance(found, PendingWrite) == goes_on, restored_seq
        assert isinstance(
            outcome(PendingTopic(topic, NOW), producer_key(b"p", ProducerTurn(1, 4)), 1, None), PendingWrite
        )
