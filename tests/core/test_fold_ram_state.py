"""RAM_STATE: what only files of the RAM log said that are gone now. It is read before the topic's creation is."""

from __future__ import annotations

from tests.core.list_index import ListIndex
from tests.core.test_fold import T, entries, evicted, new, topic_of
from topics.core.config import TopicConfig
from topics.core.control_bodies import (
    CreateFrameBody,
    HeadFrameBody,
    RamStateFrameBody,
    encode_body,
    encode_idempotency,
)
from topics.core.floors import EvictReason
from topics.core.fold import Fold
from topics.core.topic import Topic


def folded(state: RamStateFrameBody, first: int, count: int, before_creation: bool = True) -> Fold:
    fold = Fold(lambda _topic_id: ListIndex(1))
    creation = encode_body(CreateFrameBody("t", TopicConfig(durability="ephemeral")))
    if not before_creation:
        fold.topic_create(T, creation)
    if count:
        fold.records(T, entries(first, count), in_ram=True)
    fold.ram_state(T, encode_body(state))
    fold.topic_create(T, creation)
    fold.head_watermark(fold.topics[T], 4096, encode_body(HeadFrameBody(exact=False)))
    return fold


def floors(topic: Topic) -> tuple[int, ...]:
    return (topic.head_seq, topic.earliest_seq, topic.evict_floor, topic.evict_reason, topic.evict_run_seq)


def test_the_log_may_begin_beyond_any_watermark() -> None:
    for before_creation in (True, False):
        state = RamStateFrameBody(9000, 8990, EvictReason.CAP, 7, 50, [])
        fold = folded(state, 8980, 40, before_creation)
        fold.evict_watermark(fold.topics[T], evicted(1, 100, EvictReason.TTL, 5))  # of long ago
        topic = topic_of(fold, ram_log_survived=True)
        assert floors(topic) == (9019, 9000, 8990, EvictReason.CAP, 7)
        assert (topic.records, topic.last_write_ts) == (20, 50)


def test_what_is_said_after_it_counts_on() -> None:
    fold = folded(RamStateFrameBody(9000, 9000, EvictReason.CAP, 7, 50, []), 9000, 10)
    fold.records(T, entries(9010, 5, ts=60), in_ram=True)
    fold.evict_watermark(fold.topics[T], evicted(1, 9012, EvictReason.CAP, 3))
    topic = topic_of(fold, ram_log_survived=True)
    assert floors(topic) == (9014, 9012, 9012, EvictReason.CAP, 1)
    assert topic.records == 3
    assert topic.last_write_ts == 60


def test_an_empty_topic_keeps_its_head() -> None:
    topic = topic_of(folded(RamStateFrameBody(501, 501, EvictReason.TTL, 1, 50, []), 0, 0), ram_log_survived=True)
    assert floors(topic) == (500, 501, 501, EvictReason.TTL, 1)
    assert topic.records == 0


def test_the_latest_state_counts() -> None:
    fold = Fold(lambda _topic_id: ListIndex(1))
    for earliest in (10, 20):
        fold.ram_state(T, encode_body(RamStateFrameBody(earliest, earliest, EvictReason.CAP, 1, 5, [])))
    fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig())))
    assert topic_of(fold, ram_log_survived=True).earliest_seq == 20


def test_keys_of_it_and_around_it_are_in_order_of_age() -> None:
    fold = Fold(lambda _topic_id: ListIndex(1))
    for ts, key in ((2, b"b"), (3, b"c")):
        fold.idempotency(T, ts, ts, encode_idempotency(1, key))
    keys = [(b"a", 1, 1, 1), (b"b", 2, 1, 2), (b"c", 3, 1, 3)]
    fold.ram_state(T, encode_body(RamStateFrameBody(1, 1, EvictReason.NONE, 1, 3, keys)))
    fold.idempotency(T, 4, 4, encode_idempotency(1, b"d"))
    fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig())))
    window = topic_of(fold, ram_log_survived=True).idempotency
    assert [key for key, *_ in window.unexpired(5, 100)] == [b"a", b"b", b"c", b"d"]
    assert window.find(b"a", 11, 10) is not None
    assert window.find(b"a", 12, 10) is None
    assert [key for key, *_ in window.unexpired(13, 10)] == [b"c", b"d"]


def test_durable_records_of_a_topic_that_left_them_behind_stay_gone() -> None:
    fold = Fold(lambda _topic_id: ListIndex(1))
    fold.records(T, entries(101, 20), in_ram=True)
    fold.ram_state(T, encode_body(RamStateFrameBody(50, 50, EvictReason.CAP, 1, 5, [])))
    fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig())))
    fold.records(T, entries(1, 100))
    fold.head_watermark(fold.topics[T], 4096, encode_body(HeadFrameBody(exact=False)))
    assert floors(topic_of(fold, ram_log_survived=True)) == (120, 50, 50, EvictReason.CAP, 1)


def test_the_state_of_a_deleted_topic_says_nothing() -> None:
    fold = new()
    fold.topic_delete(T)
    fold.ram_state(T, encode_body(RamStateFrameBody(50, 50, EvictReason.CAP, 1, 5, [])))
    fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig())))
    fold.finish(ram_log_survived=True)
    assert fold.topics == {}
