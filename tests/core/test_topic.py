"""Retention and floors of one topic against a list of records (api §3.2, rules §1, §2)."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.list_index import ListIndex
from topics.core.config import TopicConfig, check_room
from topics.core.errors import TopicsError
from topics.core.floors import EvictReason
from topics.core.topic import Topic


def make(**config: Any) -> Topic:
    return Topic(1, "t", TopicConfig(**config), ListIndex(1))


def append(topic: Topic, count: int, ts: int = 0, size: int = 100) -> None:
    topic.appended(ts, array("Q", [size << 32] * count), array("Q", [1] * count), size * count)


def test_a_fresh_topic() -> None:
    topic = make()
    assert (topic.head_seq, topic.earliest_seq, topic.records, topic.live_bytes) == (0, 1, 0, 0)


def test_a_record_cap_of_three_and_five_writes() -> None:
    topic = make(cap_records=3)
    for _ in range(5):
        append(topic, 1)
    assert (topic.earliest_seq, topic.records, topic.evict_floor) == (3, 3, 3)
    assert topic.evict_reason == EvictReason.CAP


def test_a_batch_beyond_the_cap_loses_its_own_oldest() -> None:
    topic = make(cap_records=3)
    append(topic, 10)
    assert (topic.earliest_seq, topic.records, topic.head_seq) == (8, 3, 10)


def test_a_byte_cap_smaller_than_one_record_keeps_nothing() -> None:
    topic = make(cap_bytes=50)
    append(topic, 1)
    assert (topic.earliest_seq, topic.records, topic.head_seq) == (2, 0, 1)


def test_expiry_is_strict_to_the_millisecond() -> None:
    topic = make(ttl_ms=150)
    append(topic, 3, ts=1000)
    assert topic.expired_below(1150) == 1
    assert topic.expired_below(1151) == 4


def test_reasons_of_different_runs_are_told_apart() -> None:
    topic = make(cap_records=3)
    append(topic, 5, ts=1)
    assert (topic.evict_floor, topic.evict_run_seq, topic.evict_reason) == (3, 1, EvictReason.CAP)
    topic.evict_below(5, EvictReason.TTL)
    # A reader at 2 missed 3..4 by ttl alone; one at 0 missed 1..2 by cap as well.
    assert (topic.evict_floor, topic.evict_run_seq, topic.evict_reason) == (5, 3, EvictReason.TTL)


def test_reject_refuses_before_anything_is_assigned() -> None:
    topic = make(cap_records=3, discard="reject")
    append(topic, 2)

    def check(count: int, size_bytes: int, more_records: int = 0, more_bytes: int = 0) -> None:
        held = topic.records + more_records, topic.live_bytes + more_bytes
        check_room(topic.name, topic.config, count, size_bytes, *held)

    check(1, 100)
    with pytest.raises(TopicsError) as full:
        check(1, 100, more_records=1, more_bytes=100)
    assert full.value.code == "topic_full"
    with pytest.raises(TopicsError) as never:
        check(4, 400)
    assert never.value.code == "record_too_large"
    topic.configured(TopicConfig(cap_records=2, cap_bytes=300, discard="reject"))
    with pytest.raises(TopicsError) as never:  # full as well, but no room that comes will do
        check(1, 301)
    assert (never.value.code, never.value.detail) == ("record_too_large", {"cap_bytes": 300})


def test_the_commit_time_never_goes_back() -> None:
    topic = make()
    append(topic, 1, ts=500)
    assert topic.commit_ts(400) == 500
    assert topic.commit_ts(600) == 600


@settings(max_examples=300, deadline=None)
@given(
    cap_records=st.integers(0, 6),
    cap_bytes=st.integers(0, 900),
    ttl_ms=st.integers(0, 30),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.integers(1, 200)), max_size=30),
)
def test_floors_counts_and_bytes_equal_a_model(
    cap_records: int, cap_bytes: int, ttl_ms: int, steps: list[tuple[int, int, int]]
) -> None:
    topic = make(cap_records=cap_records, cap_bytes=cap_bytes, ttl_ms=ttl_ms)
    live: list[tuple[int, int, int]] = []
    now = head = earliest_before = 0
    for count, passed, size in steps:
        now += passed
        append(topic, count, ts=now, size=size)
        live += [(head + 1 + at, now, size) for at in range(count)]
        head += count
        while (cap_records and len(live) > cap_records) or (cap_bytes and sum(r[2] for r in live) > cap_bytes):
            live.pop(0)
        expired = topic.expired_below(now)
        topic.evict_below(expired, EvictReason.TTL)
        if ttl_ms:
            live = [record for record in live if now - record[1] <= ttl_ms]
        assert topic.head_seq == head
        assert topic.earliest_seq == (live[0][0] if live else head + 1)
        assert topic.records == len(live)
        assert topic.live_bytes == sum(record[2] for record in live)
        # Nothing is deleted here, so every loss is involuntary.
        assert topic.evict_floor == topic.earliest_seq
        assert topic.earliest_seq >= earliest_before
        earliest_before = topic.earliest_seq


def test_growth_is_what_a_write_leaves_after_the_caps_have_evicted_for_it() -> None:
    log, ring, full = make(), make(cap_records=3), make(cap_bytes=300)
    for topic in (log, ring, full):
        append(topic, 3)
        before = topic.live_bytes
        growth = topic.growth(2, 200)
        append(topic, 2)
        assert growth == topic.live_bytes - before
    assert make(cap_records=3, discard="reject").growth(9, 900) == 900


def test_a_gap_behind_records_that_live_takes_none_of_them_whatever_the_count_says() -> None:
    """An index that was an older copy has made the count too low (`walshard/test_lost_indexes.py`)."""
    topic = make()
    append(topic, 3)
    topic.logged(msgspec.structs.replace(topic.floors(), records=0, live_bytes=0))
    topic.skipped(6, EvictReason.SOURCE_TRIM)
    assert (topic.earliest_seq, topic.evict_floor, topic.head_seq) == (1, 1, 6)
    assert topic.live_from(1, 9) == [1, 2, 3]
    topic.evict_below(4, EvictReason.TTL)
    topic.skipped(9, EvictReason.SOURCE_TRIM)
    assert (topic.earliest_seq, topic.evict_floor, topic.head_seq) == (10, 10, 9)
