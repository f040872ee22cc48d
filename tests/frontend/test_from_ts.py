"""Reads that begin at a time (api §3.3): no loss that may be as late is silent, and what the shard has not tidied up
yet makes no difference.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.frontend.hosting import Hosting, Written, served
from topics.api.answers import TombstoneAnswer
from topics.core.config import TopicConfig
from topics.core.floors import EvictReason
from topics.frontend.reads.records import PageOptions
from topics.shm import shm_names

ALL = PageOptions(1000, 1 << 20)


class Told(NamedTuple):
    """All that a reader gets who begins at a time."""

    records: list[int]
    tombstones: list[tuple[int, int, str]]

    @property
    def gaps(self) -> set[int]:
        return {seq for first, last, _ in self.tombstones for seq in range(first, last + 1)}


def told(hosting: Hosting, ts: int) -> Told:
    reader = hosting.reader
    page = reader.read_page(reader.get("t"), 0, ALL, from_ts=ts)
    begun = reader.read_page(reader.get("t"), reader.seq_before(reader.get("t"), ts), ALL)
    assert (begun.body, begun.tombstone, begun.next_from_seq) == (page.body, page.tombstone, page.next_from_seq)
    found = Told([], [])
    while True:
        tombstone: TombstoneAnswer | None = page.tombstone
        if tombstone is not None:
            found.tombstones.append((tombstone.gap_from, tombstone.gap_to, tombstone.reason))
        found.records.extend(record.seq for record in served(page.body))
        if page.caught_up:
            return found
        page = reader.read_page(reader.get("t"), page.next_from_seq, ALL, from_ts=ts)


def write(hosting: Hosting, count: int = 1) -> int:
    """Write records, as the shard does: their caps make room. Return their time."""
    hosting.write("t", [Written(b"1")] * count)
    hosting.topics["t"].topic.evict_over_cap()
    hosting.topics["t"].publish()
    return hosting.clock.ms


def test_what_a_cap_took_at_or_behind_a_time_is_told(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(cap_records=2))
    times = []
    for _ in range(6):
        hosting.clock.ms += 5
        times.append(write(hosting))
    lost = Told([5, 6], [(1, 4, "cap")])
    assert [told(hosting, ts) for ts in (0, times[0], times[3], times[4])] == [lost] * 4
    assert told(hosting, times[4] + 1) == Told([6], []), "record 5 lives, and is earlier: so is all that was lost"
    assert told(hosting, times[5] + 1) == Told([], [])


def test_what_has_expired_is_told_before_and_after_the_shard_has_tidied_up(hosting: Hosting) -> None:
    hosting.make("t", TopicConfig(ttl_ms=300))
    first_ts = write(hosting, 2)
    hosting.clock.ms += 350
    for _ in range(2):
        assert [told(hosting, ts) for ts in (0, first_ts)] == [Told([], [(1, 2, "ttl")])] * 2
        assert told(hosting, first_ts + 1) == Told([], []), "nothing was written since"
        hosting.expire("t")
    write(hosting)
    assert told(hosting, first_ts) == Told([3], [(1, 2, "ttl")])


def test_what_was_deleted_is_not_told(hosting: Hosting) -> None:
    topic = hosting.make("t").topic
    write(hosting, 3)
    for before_seq in (3, 4):
        cut = topic.plan_cut(before_seq)
        topic.deleted(cut, topic.floors_without(cut))
        hosting.topics["t"].publish()
        assert told(hosting, 0) == Told([3] if before_seq == 3 else [], [])


def test_a_lost_end_is_of_any_time_up_to_the_next_write(hosting: Hosting) -> None:
    topic = hosting.make("t").topic
    first_ts = write(hosting)
    topic.skipped(4, EvictReason.LOST_TAIL)
    hosting.topics["t"].publish()
    hosting.clock.ms += 100
    lost = [(2, 4, "lost_tail")]
    assert told(hosting, first_ts) == Told([1], lost)
    assert [told(hosting, ts) for ts in (first_ts + 1, first_ts + 100)] == [Told([], lost)] * 2
    assert told(hosting, first_ts + 101) == Told([], []), "it is not of the future"
    next_ts = write(hosting)
    assert told(hosting, next_ts) == Told([5], lost)
    hosting.clock.ms += 1
    assert told(hosting, next_ts + 1) == Told([], [])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 4)),
        st.tuples(st.just("pause"), st.integers(1, 60)),
        st.tuples(st.just("lose"), st.integers(1, 3)),
        st.tuples(st.just("delete"), st.integers(0, 7)),
        st.tuples(st.just("cut"), st.integers(0, 7)),
        st.tuples(st.just("checkpoint"), st.just(0)),
        st.tuples(st.just("expire"), st.just(0)),
    ),
    max_size=25,
)


class Model:
    """The times of all seqs, which nothing keeps, and who of them was deleted by request."""

    def __init__(self) -> None:
        self.latest_ts: dict[int, int] = {}
        """The last ms in which each may have been committed."""
        self.deleted: set[int] = set()


def carry_out(hosting: Hosting, model: Model, step: str, count: int) -> None:
    hosted, now_ms = hosting.topics["t"], hosting.clock.ms
    topic = hosted.topic
    seqs = range(topic.head_seq + 1, topic.head_seq + count + 1)
    if step == "write":
        model.latest_ts = {seq: min(ts, now_ms) for seq, ts in model.latest_ts.items()}
        model.latest_ts |= dict.fromkeys(seqs, now_ms)
        write(hosting, count)
    elif step == "lose":
        model.latest_ts |= dict.fromkeys(seqs, 2**62)
        topic.skipped(seqs[-1], EvictReason.LOST_TAIL)
    elif step == "pause":
        hosting.clock.ms += count
    elif step == "checkpoint":
        hosting.checkpoint("t", records_max=5)
    else:
        hosting.expire("t")
        if step == "delete":
            plan = topic.plan_delete(topic.live_from(topic.earliest_seq + count, 1))
            model.deleted.update(plan.seqs)
        elif step == "cut":
            model.deleted.update(range(topic.earliest_seq, min(topic.earliest_seq + count, topic.head_seq + 1)))
            plan = topic.plan_cut(topic.earliest_seq + count)
        if step != "expire":
            topic.deleted(plan, topic.floors_without(plan))
    hosted.publish()


@settings(max_examples=150, deadline=None)
@example([("write", 1), ("pause", 51), ("lose", 1)], 0, 50)
@given(steps=steps, cap_records=st.sampled_from([0, 2, 5]), ttl_ms=st.sampled_from([0, 0, 50]))
def test_no_loss_that_may_be_as_late_is_silent(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], cap_records: int, ttl_ms: int
) -> None:
    identity = secrets.token_hex(8)
    hosting = Hosting(identity, str(tmp_path_factory.mktemp("log")))
    try:
        topic, model = hosting.make("t", TopicConfig(cap_records=cap_records, ttl_ms=ttl_ms)).topic, Model()
        for step, count in steps:
            carry_out(hosting, model, step, count)
        now_ms = hosting.clock.ms
        times = sorted({0, now_ms, now_ms + 1, *(ts + n for ts in model.latest_ts.values() for n in (0, 1))} - {2**62})
        answers = [told(hosting, ts) for ts in times]
        hosting.expire("t")
        assert [told(hosting, ts) for ts in times] == answers, "tidying up changes no answer"
        live = topic.live_from(1, 1000)
        lost = model.latest_ts.keys() - model.deleted - set(live)
        if not live and topic.evict_reason is EvictReason.TTL:  # a lost end has expired with the last write
            model.latest_ts = {seq: min(ts, topic.last_write_ts) for seq, ts in model.latest_ts.items()}
        for ts, answer in zip(times, answers, strict=True):
            assert answer.records == [seq for seq in live if model.latest_ts[seq] >= ts]
            if ts <= now_ms:
                assert {seq for seq in lost if model.latest_ts[seq] >= ts} <= answer.gaps
            earlier = [seq for seq in live if model.latest_ts[seq] < ts]
            assert not earlier or not answer.gaps or min(answer.gaps) > earlier[-1], "what is known to be earlier"
            assert not answer.gaps or lost
            assert not (answer.gaps and ts > now_ms), "nothing is lost in the future"
    finally:
        hosting.close()
        shm_names.unlink_all(identity)
