"""The fold: what a log says, whatever its frames' order between topics and logs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, cast

import msgspec
import pytest

from tests.core.list_index import ListIndex
from topics.core.config import TopicConfig
from topics.core.control_bodies import (
    ConfigFrameBody,
    CreateFrameBody,
    DeleteFrameBody,
    EvictFrameBody,
    HeadFrameBody,
    MarkFrameBody,
    SessionFrameBody,
    encode_body,
    encode_idempotency,
)
from topics.core.floors import EvictReason, Floors
from topics.core.fold import Fold, FoldError
from topics.core.location import LOCATION_LOST
from topics.core.record_index import UnlocatedIndex
from topics.core.segment_list import SEALED, SegmentInfo, SegmentList
from topics.core.seq_set import decode_runs, encode_runs
from topics.core.shard_state import ShardState
from topics.core.topic import Topic

T = 77


def floors(revision: int, earliest_seq: int, evict_floor: int, reason: EvictReason, records: int) -> Floors:
    return Floors(revision, earliest_seq, evict_floor, int(reason), 1, records, records * 100)


def evicted(revision: int, earliest_seq: int, reason: EvictReason, records: int) -> bytes:
    return encode_body(EvictFrameBody(floors(revision, earliest_seq, earliest_seq, reason, records)))


def deleted(revision: int, earliest_seq: int, seqs: list[int], records: int, below_seq: int = 0) -> bytes:
    after = floors(revision, earliest_seq, 1, EvictReason.NONE, records)
    return encode_body(DeleteFrameBody(below_seq, encode_runs(seqs), after))


def entries(first: int, count: int, ts: int = 5, file_no: int = 1) -> array[int]:
    return array("Q", [word for seq in range(first, first + count) for word in (seq, ts, 100 << 32, file_no)])


def new(config: TopicConfig | None = None) -> Fold:
    fold = Fold(lambda _topic_id: ListIndex(1))
    fold.topic_create(T, encode_body(CreateFrameBody("t", config or TopicConfig())))
    return fold


def topic_of(fold: Fold, ram_log_survived: bool = False) -> Topic:
    fold.finish(ram_log_survived)
    return fold.topics[T]


def test_records_config_and_keys() -> None:
    fold = new()
    fold.idempotency(T, 1, 9, encode_idempotency(2, b"key"))
    fold.records(T, entries(1, 2))
    fold.config_update(fold.topics[T], encode_body(ConfigFrameBody(TopicConfig(cap_records=1))))
    fold.records(T, entries(3, 1))
    topic = topic_of(fold)
    assert (topic.head_seq, topic.earliest_seq, topic.records) == (3, 3, 1)
    known = topic.idempotency.find(b"key", 10, 1000)
    assert known is not None
    assert (known.first_seq, known.records) == (1, 2)


def test_a_watermark_keeps_its_reason() -> None:
    fold = new(TopicConfig(ttl_ms=10))
    fold.records(T, entries(1, 5))
    fold.evict_watermark(fold.topics[T], evicted(1, 4, EvictReason.TTL, 2))
    topic = topic_of(fold)
    assert (topic.evict_floor, topic.earliest_seq, topic.evict_reason) == (4, 4, EvictReason.TTL)


def test_frames_that_come_twice_change_nothing() -> None:
    fold = new()
    for _ in range(2):
        fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig())))
        fold.records(T, entries(1, 3))
    assert topic_of(fold).records == 3
    fold.topic_delete(T)
    fold.topic_delete(T)
    fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig())))
    assert fold.topic(T) is None, "frames of a deleted topic change nothing"
    assert not fold.topics


def test_a_missing_record_is_refused() -> None:
    fold = new()
    fold.records(T, entries(1, 2))
    fold.records(T, entries(4, 1))
    with pytest.raises(FoldError, match="record 4 follows 2"):
        fold.finish(False)


def test_a_topic_nobody_created_is_refused() -> None:
    with pytest.raises(FoldError, match="never created"):
        new().topic(T + 1)


def test_ram_records_are_read_first_and_come_behind_the_durable_ones() -> None:
    fold = Fold(lambda _topic_id: ListIndex(1))
    fold.records(T, entries(2, 4, file_no=9), in_ram=True)  # some of them were logged again
    fold.idempotency(T, 3, 5, encode_idempotency(2, b"ram"))
    fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig(durability="ephemeral"))))
    fold.head_watermark(fold.topics[T], 4096, encode_body(HeadFrameBody(exact=False)))
    fold.records(T, entries(1, 3))
    topic = topic_of(fold, ram_log_survived=True)
    assert (topic.head_seq, topic.records, topic.earliest_seq) == (5, 5, 1)
    assert topic.index.entries(1, 5)[3::4].tolist() == [1, 1, 1, 9, 9]
    assert topic.idempotency.find(b"ram", 6, 1000) is not None


def test_without_the_ram_log_an_ephemeral_topic_keeps_its_head_and_says_what_is_lost() -> None:
    fold = new(TopicConfig(durability="ephemeral"))
    fold.head_watermark(fold.topics[T], 4096, encode_body(HeadFrameBody(exact=False)))
    topic = topic_of(fold)
    assert (topic.head_seq, topic.earliest_seq, topic.evict_floor) == (4096, 4097, 4097)
    assert topic.evict_reason == EvictReason.RESTART


def test_after_a_clean_stop_the_head_is_exact() -> None:
    fold = new(TopicConfig(durability="ephemeral"))
    fold.head_watermark(fold.topics[T], 4096, encode_body(HeadFrameBody(exact=False)))
    fold.head_watermark(fold.topics[T], 10, encode_body(HeadFrameBody(exact=True)))
    assert topic_of(fold).head_seq == 10


def test_with_the_ram_log_a_ceiling_is_only_a_ceiling() -> None:
    fold = Fold(lambda _topic_id: ListIndex(1))
    fold.records(T, entries(1, 3), in_ram=True)
    fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig(durability="ephemeral"))))
    fold.head_watermark(fold.topics[T], 4096, encode_body(HeadFrameBody(exact=False)))
    topic = topic_of(fold, ram_log_survived=True)
    assert (topic.head_seq, topic.ceilings.seq) == (3, 4096)


def test_durable_records_around_a_lost_ephemeral_period_survive() -> None:
    fold = new()
    fold.records(T, entries(1, 2))
    fold.config_update(fold.topics[T], encode_body(ConfigFrameBody(TopicConfig(durability="ephemeral"))))
    fold.head_watermark(fold.topics[T], 5, encode_body(HeadFrameBody(exact=True)))
    fold.records(T, entries(6, 1))
    topic = topic_of(fold)
    assert (topic.head_seq, topic.records, topic.earliest_seq) == (6, 3, 1)
    assert [word >> 32 & LOCATION_LOST for word in topic.index.entries(1, 6)[3::4]] == [0, 0, 32, 32, 32, 0]


def test_sessions_come_and_go() -> None:
    fold = new()
    fold.session(encode_body(SessionFrameBody("a", b"x")))
    fold.session(encode_body(SessionFrameBody("b", b"y")))
    fold.session(encode_body(SessionFrameBody("a", None)))
    assert set(fold.sessions) == {"b"}


def test_a_delete_takes_what_it_says_and_no_more() -> None:
    fold = new()
    fold.records(T, entries(1, 8))
    fold.delete(fold.topics[T], deleted(1, 2, [1, 3, 5], 5))
    fold.delete(fold.topics[T], deleted(2, 4, [], 4, below_seq=3))
    topic = topic_of(fold)
    assert (topic.earliest_seq, topic.evict_floor, topic.records, topic.live_bytes) == (4, 1, 4, 400)
    assert [seq for seq in range(4, 9) if not topic.index.entries(seq, seq)[3] >> 32 & 2] == [4, 6, 7, 8]


def test_floors_that_come_twice_change_nothing() -> None:
    fold = new()
    fold.records(T, entries(1, 8))
    for _ in range(2):
        fold.delete(fold.topics[T], deleted(1, 2, [1], 7))
        fold.evict_watermark(fold.topics[T], evicted(2, 5, EvictReason.TTL, 4))
        fold.records(T, entries(9, 3))
    topic = topic_of(fold)
    assert (topic.revision, topic.earliest_seq, topic.records) == (2, 5, 7)


def test_evictions_are_what_the_log_says_and_at_the_end_what_the_caps_say() -> None:
    fold = new(TopicConfig(cap_records=2))
    fold.records(T, entries(1, 3))
    fold.delete(fold.topics[T], deleted(1, 2, [], 2, below_seq=2))
    fold.records(T, entries(4, 1))
    fold.evict_watermark(fold.topics[T], evicted(2, 3, EvictReason.CAP, 2))
    fold.records(T, entries(5, 2))
    topic = topic_of(fold)
    assert (topic.earliest_seq, topic.evict_floor, topic.records) == (5, 5, 2)


def test_counts_of_a_topic_with_records_in_ram_are_counted_again() -> None:
    """The floors of the durable log know of the first two only."""
    fold = Fold(lambda _topic_id: ListIndex(1))
    in_ram = array("Q", [word for seq in range(1, 6) for word in (seq, 5, 100 << 32, 1 | 1 << 32)])
    fold.records(T, in_ram, in_ram=True)
    fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig(durability="ephemeral"))))
    fold.head_watermark(fold.topics[T], 4096, encode_body(HeadFrameBody(exact=False)))
    fold.delete(fold.topics[T], deleted(1, 2, [1], 1))
    topic = topic_of(fold, ram_log_survived=True)
    assert (topic.earliest_seq, topic.records, topic.live_bytes) == (2, 4, 400)


def test_floors_beyond_what_a_lost_ram_log_held() -> None:
    fold = new(TopicConfig(durability="ephemeral"))
    fold.head_watermark(fold.topics[T], 4096, encode_body(HeadFrameBody(exact=False)))
    fold.evict_watermark(fold.topics[T], evicted(1, 50, EvictReason.CAP, 20))
    topic = topic_of(fold)
    assert (topic.head_seq, topic.earliest_seq, topic.evict_floor, topic.records) == (4096, 4097, 4097, 0)


def test_runs_are_small_and_whole() -> None:
    for seqs in ([], [1], [7], [1, 2, 3], [5, 6, 9, 2**40, 2**40 + 1]):
        assert decode_runs(encode_runs(seqs)) == seqs
    assert len(encode_runs(list(range(10, 10_000)))) == 2


# -- segments and snapshots


def segment(first_seq: int, last_seq: int, flags: int = 0, version: int = 0) -> SegmentInfo:
    return SegmentInfo(first_seq, last_seq, 5, 5, 92 * (last_seq - first_seq + 1), version, flags)


def marked(revision: int, records: int, *segments: SegmentInfo, earliest_seq: int = 1) -> bytes:
    return encode_body(
        MarkFrameBody(list(segments), floors(revision, earliest_seq, earliest_seq, EvictReason.NONE, records))
    )


def unlocated(state: ShardState | None = None) -> Fold:
    """A fold as the compactor has it."""
    fold = Fold(lambda _topic_id: UnlocatedIndex())
    if state is not None:
        fold.restore(msgspec.msgpack.decode(encode_body(state), type=ShardState))
    return fold


def story(fold: Fold) -> Iterator[None]:
    """A log, frame by frame: between any two there may be a snapshot."""
    for topic_id, name in ((T, "t"), (T + 1, "gone"), (T + 2, "ram")):
        durability: Literal["disk", "ephemeral"] = "ephemeral" if name == "ram" else "disk"
        fold.topic_create(topic_id, encode_body(CreateFrameBody(name, TopicConfig(durability=durability))))
        yield
    fold.idempotency(T, 1, 5, encode_idempotency(4, b"key"))
    fold.records(T, entries(1, 4))
    yield
    fold.head_watermark(fold.topics[T + 2], 4096, encode_body(HeadFrameBody(exact=False)))
    yield
    fold.checkpoint_mark(fold.topics[T], 4, marked(1, 4, segment(1, 4)))
    yield
    fold.records(T, entries(5, 4))
    yield
    fold.topic_delete(T + 1)
    yield
    fold.delete(fold.topics[T], deleted(2, 2, [1, 6], 6))
    yield
    fold.checkpoint_mark(fold.topics[T], 8, marked(3, 6, segment(1, 8, SEALED), earliest_seq=2))
    yield
    fold.evict_watermark(fold.topics[T], evicted(4, 4, EvictReason.TTL, 4))
    yield
    fold.records(T, entries(9, 2))
    fold.evict_watermark(fold.topics[T + 2], evicted(1, 30, EvictReason.CAP, 5))
    yield
    fold.checkpoint_mark(fold.topics[T], 10, marked(5, 6, segment(1, 8, SEALED, 1), segment(9, 10), earliest_seq=4))
    yield


def test_a_snapshot_at_any_place_and_what_follows_are_the_whole_log() -> None:
    whole = unlocated()
    steps = sum(1 for _ in story(whole))
    expected = whole.state()
    assert expected.topics[0].floors == floors(5, 4, 4, EvictReason.NONE, 6)
    assert expected.topics[0].segments == [segment(1, 8, SEALED, 1), segment(9, 10)]
    checked = 0
    for cut in range(steps + 1):
        first = unlocated()
        telling = story(first)
        for _ in range(cut):
            next(telling)
        state = first.state()
        # As the compactor saves it: everything up to there is in segments.
        for topic in state.topics:
            if topic.head_seq and topic.id == T:
                known = SegmentList(topic.segments)
                for ahead in (segment(1, 4), segment(1, 8, SEALED), segment(9, 10)):
                    if ahead.first_seq <= topic.head_seq:
                        known.put(ahead)
                topic.segments = list(known)
        second = unlocated(state)
        _tell_from(second, cut)
        assert second.state() == expected, cut
        checked += 1
    assert checked == steps + 1


def _tell_from(fold: Fold, cut: int) -> None:
    """The part of the story behind the cut: what comes before is told to nobody."""

    class Deaf:
        topics: ClassVar = dict.fromkeys((T, T + 1, T + 2))

        def __getattr__(self, _name: str) -> Callable[..., None]:
            return lambda *_frame: None

    class Ears:
        told = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(fold if self.told >= cut else Deaf(), name)

    ears = Ears()
    for _ in story(cast(Fold, ears)):
        ears.told += 1


def test_a_snapshot_without_its_segments_is_refused() -> None:
    fold = unlocated()
    fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig())))
    fold.records(T, entries(1, 4))
    with pytest.raises(FoldError, match="up to record 4, but its segments end at 0"):
        unlocated(fold.state())


def test_names_and_ids_of_deleted_topics_outlive_a_snapshot() -> None:
    fold = unlocated()
    for topic_id in (T, 2**60, 2**60 + 5):
        fold.topic_create(topic_id, encode_body(CreateFrameBody(f"t{topic_id}", TopicConfig())))
        fold.topic_delete(topic_id)
    again = unlocated(fold.state())
    assert again.created_ids == {T, 2**60, 2**60 + 5}
    assert again.deleted_names == fold.deleted_names
    again.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig())))
    again.topic_delete(2**60)
    assert not again.topics


def test_records_that_were_in_ram_live_on_in_segments() -> None:
    """The topic was `ephemeral` for its first three; the service stopped, and the RAM log is gone."""
    fold = unlocated()
    fold.topic_create(T, encode_body(CreateFrameBody("t", TopicConfig(durability="ephemeral"))))
    fold.head_watermark(fold.topics[T], 3, encode_body(HeadFrameBody(exact=True)))
    fold.config_update(fold.topics[T], encode_body(ConfigFrameBody(TopicConfig())))
    fold.records(T, entries(4, 1))
    fold.checkpoint_mark(fold.topics[T], 4, marked(1, 4, segment(1, 4)))
    topic = fold.topics[T]
    assert (topic.head_seq, topic.earliest_seq, topic.evict_floor, topic.records) == (4, 1, 1, 4)
