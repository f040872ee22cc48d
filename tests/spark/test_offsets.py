"""Offsets, admission control and partitions: properties over all states of topics, and the cases that have a name."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.spark.offsets import (
    NO_EPOCH,
    Gap,
    Mark,
    Offset,
    Range,
    advance,
    check_history,
    from_json,
    ranges,
    split,
    to_json,
)
from topics.spark.options import DataLossError

names = st.sampled_from(["a", "b", "c", "d"])
marks = st.builds(Mark, st.integers(0, 50), st.sampled_from(["e1", "e2"]))
offsets = st.dictionaries(names, marks)


def grown(start: Offset, growth: dict[str, int]) -> Offset:
    """Heads at or above `start`, in the same instances."""
    return {topic: Mark(mark.seq + growth.get(topic, 0), mark.epoch) for topic, mark in start.items()}


@given(offsets)
def test_an_offset_survives_its_json_and_equal_ones_have_equal_text(offset: Offset) -> None:
    text = json.dumps(to_json(offset))
    assert from_json(json.loads(text)) == offset
    assert json.dumps(to_json(dict(reversed(offset.items())))) == text


@given(offsets, st.dictionaries(names, st.integers(0, 500)), st.integers(1, 200))
def test_batches_read_everything_once_whatever_the_limit(start: Offset, growth: dict[str, int], limit: int) -> None:
    heads = grown(start, growth)
    read: dict[str, list[int]] = {topic: [] for topic in start}
    now = start
    for _ in range(3000):
        end = advance(now, heads, limit)
        if end == now:
            break
        batch = ranges(now, end)
        assert 0 < sum(one.to_seq - one.from_seq for one in batch) <= limit
        for one in batch:
            assert one.gap is None
            read[one.topic] += range(one.from_seq + 1, one.to_seq + 1)
        now = end
    assert now == heads
    assert read == {topic: list(range(mark.seq + 1, heads[topic].seq + 1)) for topic, mark in start.items()}


@given(offsets, offsets, st.one_of(st.none(), st.integers(1, 100)))
def test_whatever_happened_to_topics_the_next_batch_is_sound(start: Offset, heads: Offset, limit: int | None) -> None:
    end = advance(start, heads, limit)
    assert set(end) == {*start, *heads}
    for one in ranges(start, end):
        assert one.from_seq <= one.to_seq or one.to_seq == 0
        assert one.to_seq <= heads[one.topic].seq if one.topic in heads else one.gap is not None
    assert advance(end, heads, None).keys() == end.keys()


def test_a_small_topic_is_not_starved_by_a_large_one() -> None:
    start = {"large": Mark(0, "e"), "small": Mark(0, "e")}
    heads = {"large": Mark(10**9, "e"), "small": Mark(3, "e")}
    end = advance(start, heads, 100)
    assert end["small"].seq >= 1
    one_at_a_time = start
    for _ in range(6):
        one_at_a_time = advance(one_at_a_time, heads, 1)
    assert one_at_a_time["small"].seq == 3


def test_a_new_topic_is_read_from_its_start() -> None:
    end = advance({}, {"new": Mark(7, "e")}, None)
    assert ranges({}, end) == [Range("new", "e", 0, 7)]


def test_a_topic_made_again_is_a_gap_and_then_the_new_one() -> None:
    start, heads = {"t": Mark(10, "old")}, {"t": Mark(4, "new")}
    end = advance(start, heads, None)
    assert ranges(start, end) == [Range("t", "new", 0, 4, Gap(11, None, "recreated"))]
    with pytest.raises(DataLossError, match=r"'t' was deleted and made again while the query stood at record 10"):
        check_history(ranges(start, end), "fail")
    check_history(ranges(start, end), "rows")


def test_a_topic_that_is_gone_is_said_once_and_its_successor_is_new() -> None:
    start = {"t": Mark(10, "old")}
    gone = advance(start, {}, None)
    assert gone == {"t": Mark(10, NO_EPOCH)}
    assert ranges(start, gone) == [Range("t", NO_EPOCH, 0, 0, Gap(11, None, "deleted"))]
    assert ranges(gone, advance(gone, {}, None)) == []
    assert ranges(gone, advance(gone, {"t": Mark(2, "new")}, None)) == [Range("t", "new", 0, 2)]


def test_a_head_that_went_back_is_a_gap_and_its_seqs_are_read_again() -> None:
    """A topic of class `memory` after a crash, or any after a power loss: the seqs will be given out again."""
    start = {"t": Mark(1200, "e")}
    shorter = advance(start, {"t": Mark(1000, "e")}, 50)
    assert shorter == {"t": Mark(1000, "e")}
    assert ranges(start, shorter) == [Range("t", "e", 1000, 1000, Gap(1001, 1200, "lost_tail"))]
    with pytest.raises(DataLossError, match=r"records 1001 to 1200 are gone \(reason: lost_tail\)"):
        check_history(ranges(start, shorter), "fail")
    assert ranges(shorter, advance(shorter, {"t": Mark(1003, "e")}, 50)) == [Range("t", "e", 1000, 1003)]


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5000)), max_size=4),
    st.integers(1, 3000),
    st.integers(1, 12),
)
def test_partitions_cover_the_ranges_exactly(
    lengths: list[tuple[int, int]], max_records: int, min_partitions: int
) -> None:
    whole = [Range(f"t{at}", "e", start, start + length) for at, (start, length) in enumerate(lengths)]
    parts = split(whole, max_records, min_partitions)
    assert all(part.to_seq - part.from_seq <= max_records for part in parts)
    for one in whole:
        mine = [part for part in parts if part.topic == one.topic]
        assert mine[0].from_seq == one.from_seq
        assert mine[-1].to_seq == one.to_seq
        assert all(left.to_seq == right.from_seq for left, right in itertools.pairwise(mine))
    if sum(length for _, length in lengths) >= min_partitions * 2:
        assert len(parts) >= min_partitions


@pytest.mark.parametrize(
    ("records", "parts"), [(0, 0), (1, 1), (50_000, 1), (100_000, 2), (1_000_000, 8), (10_000_000, 25)]
)
def test_tasks_are_neither_tiny_nor_endless_unless_told_otherwise(records: int, parts: int) -> None:
    assert len(split([Range("t", "e", 0, records)] if records else [], None, 1)) == parts
    assert len(split([Range("t", "e", 0, 1000)], None, 4)) == 4


def test_a_gap_stays_with_the_first_part() -> None:
    gap = Gap(3, None, "recreated")
    parts = split([Range("t", "e", 0, 10, gap)], 4, 1)
    assert [part.gap for part in parts] == [gap, None, None]
