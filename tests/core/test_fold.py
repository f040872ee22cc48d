"""The fold: what a log says, whatever its frames' order between topics and logs."""

from __future__ import annotations

from array import array

import pytest

from tests.core.list_index import ListIndex
from topics.core.config import TopicConfig
from topics.core.fold import (
    ConfigBody,
    CreateBody,
    DeleteBody,
    EvictBody,
    Fold,
    FoldError,
    HeadBody,
    SessionBody,
    encode_body,
    encode_idempotency,
)
from topics.core.tags import TagsOf
from topics.core.topic import LOCATION_LOST, EvictReason, Topic

T = 77


def no_tags(_topic: Topic) -> TagsOf:
    return lambda _first_seq, _last_seq: iter(())


def numbered_tags(_topic: Topic) -> TagsOf:
    """Every record is tagged with its parity."""
    return lambda first_seq, last_seq: ((seq, b"odd" if seq % 2 else b"even") for seq in range(first_seq, last_seq + 1))


def entries(first: int, count: int, ts: int = 5, file_no: int = 1) -> array[int]:
    return array("Q", [word for seq in range(first, first + count) for word in (seq, ts, 100 << 32, file_no)])


def new(config: TopicConfig | None = None) -> Fold:
    fold = Fold(lambda: ListIndex(1), no_tags)
    fold.topic_create(T, encode_body(CreateBody("t", config or TopicConfig())))
    return fold


def topic_of(fold: Fold, ram_log_survived: bool = False) -> Topic:
    fold.finish(ram_log_survived)
    return fold.topics[T]


def test_records_config_and_keys() -> None:
    fold = new()
    fold.idempotency(T, 1, 9, encode_idempotency(2, b"key"))
    fold.records(T, entries(1, 2))
    fold.config_update(T, encode_body(ConfigBody(TopicConfig(cap_records=1))))
    fold.records(T, entries(3, 1))
    topic = topic_of(fold)
    assert (topic.head_seq, topic.earliest_seq, topic.records) == (3, 3, 1)
    known = topic.idempotency.find(b"key", 10, 1000)
    assert known is not None
    assert (known.first_seq, known.records) == (1, 2)


def test_a_watermark_keeps_its_reason() -> None:
    fold = new(TopicConfig(ttl_ms=10))
    fold.records(T, entries(1, 5))
    fold.evict_watermark(T, 4, encode_body(EvictBody(EvictReason.TTL)))
    topic = topic_of(fold)
    assert (topic.evict_floor, topic.earliest_seq, topic.evict_reason) == (4, 4, EvictReason.TTL)


def test_frames_that_come_twice_change_nothing() -> None:
    fold = new()
    for _ in range(2):
        fold.topic_create(T, encode_body(CreateBody("t", TopicConfig())))
        fold.records(T, entries(1, 3))
    assert topic_of(fold).records == 3
    fold.topic_delete(T)
    fold.topic_delete(T)
    fold.topic_create(T, encode_body(CreateBody("t", TopicConfig())))
    fold.config_update(T, encode_body(ConfigBody(TopicConfig())))
    assert not fold.topics


def test_a_missing_record_is_refused() -> None:
    fold = new()
    fold.records(T, entries(1, 2))
    fold.records(T, entries(4, 1))
    with pytest.raises(FoldError, match="record 4 follows 2"):
        fold.finish(False)


def test_a_topic_nobody_created_is_refused() -> None:
    with pytest.raises(FoldError, match="never created"):
        new().config_update(T + 1, encode_body(ConfigBody(TopicConfig())))


def test_ram_records_are_read_first_and_fall_into_place() -> None:
    fold = Fold(lambda: ListIndex(1), no_tags)
    fold.records(T, entries(3, 2, file_no=9))  # the RAM log
    fold.idempotency(T, 3, 5, encode_idempotency(2, b"ram"))
    fold.topic_create(T, encode_body(CreateBody("t", TopicConfig())))
    fold.records(T, entries(1, 2))
    fold.head_watermark(T, 4096, encode_body(HeadBody(exact=False)))
    fold.head_watermark(T, 4, encode_body(HeadBody(exact=True)))
    fold.records(T, entries(5, 1))
    topic = topic_of(fold, ram_log_survived=True)
    assert (topic.head_seq, topic.records, topic.earliest_seq) == (5, 5, 1)
    assert topic.index.entries(1, 5)[3::4].tolist() == [1, 1, 9, 9, 1]
    assert topic.idempotency.find(b"ram", 6, 1000) is not None


def test_without_the_ram_log_an_ephemeral_topic_keeps_its_head_and_says_what_is_lost() -> None:
    fold = new(TopicConfig(durability="ephemeral"))
    fold.head_watermark(T, 4096, encode_body(HeadBody(exact=False)))
    topic = topic_of(fold)
    assert (topic.head_seq, topic.earliest_seq, topic.evict_floor) == (4096, 4097, 4097)
    assert topic.evict_reason == EvictReason.RESTART


def test_after_a_clean_stop_the_head_is_exact() -> None:
    fold = new(TopicConfig(durability="ephemeral"))
    fold.head_watermark(T, 4096, encode_body(HeadBody(exact=False)))
    fold.head_watermark(T, 10, encode_body(HeadBody(exact=True)))
    assert topic_of(fold).head_seq == 10


def test_with_the_ram_log_a_ceiling_is_only_a_ceiling() -> None:
    fold = Fold(lambda: ListIndex(1), no_tags)
    fold.records(T, entries(1, 3))
    fold.topic_create(T, encode_body(CreateBody("t", TopicConfig(durability="ephemeral"))))
    fold.head_watermark(T, 4096, encode_body(HeadBody(exact=False)))
    topic = topic_of(fold, ram_log_survived=True)
    assert (topic.head_seq, topic.head_ceiling) == (3, 4096)


def test_durable_records_around_a_lost_ephemeral_period_survive() -> None:
    fold = new()
    fold.records(T, entries(1, 2))
    fold.config_update(T, encode_body(ConfigBody(TopicConfig(durability="ephemeral"))))
    fold.head_watermark(T, 5, encode_body(HeadBody(exact=True)))
    fold.records(T, entries(6, 1))
    topic = topic_of(fold)
    assert (topic.head_seq, topic.records, topic.earliest_seq) == (6, 3, 1)
    assert [word >> 32 & LOCATION_LOST for word in topic.index.entries(1, 6)[3::4]] == [0, 0, 32, 32, 32, 0]


def test_sessions_come_and_go() -> None:
    fold = new()
    fold.session(encode_body(SessionBody("a", b"x")))
    fold.session(encode_body(SessionBody("b", b"y")))
    fold.session(encode_body(SessionBody("a", None)))
    assert set(fold.sessions) == {"b"}


def test_a_delete_is_bounded_by_the_head_it_was_asked_at() -> None:
    fold = Fold(lambda: ListIndex(1), numbered_tags)
    fold.topic_create(T, encode_body(CreateBody("t", TopicConfig())))
    fold.records(T, entries(1, 8))  # as from a RAM log: all of them before any control frame
    fold.delete(T, 5, encode_body(DeleteBody(None, "eq", b"odd")))
    fold.delete(T, 8, encode_body(DeleteBody(3, None)))
    topic = topic_of(fold)
    assert (topic.earliest_seq, topic.evict_floor, topic.records) == (4, 1, 4)
    assert [seq for seq in range(4, 9) if not topic.index.entries(seq, seq)[3] >> 32 & 2] == [4, 6, 7, 8]


def test_evictions_are_what_the_log_says_and_at_the_end_what_the_caps_say() -> None:
    fold = new(TopicConfig(cap_records=2))
    fold.records(T, entries(1, 3))
    fold.delete(T, 3, encode_body(DeleteBody(2, None)))
    fold.records(T, entries(4, 1))
    fold.evict_watermark(T, 3, encode_body(EvictBody(EvictReason.CAP)))
    fold.records(T, entries(5, 2))
    topic = topic_of(fold)
    assert (topic.earliest_seq, topic.evict_floor, topic.records) == (5, 5, 2)
