"""Deletion against a dictionary of records (api §5, rules §5)."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.list_index import ListIndex
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.floors import EvictReason
from topics.core.tags import Match, TagIndex, parse_match
from topics.core.topic import Topic

TAGS = [b"", b"chat-4", b"chat-42:a", b"chat-42:b", b"chat-420:a", b"z"]


class Log:
    """A topic whose records have tags, and what it must look like."""

    def __init__(self, **config: Any) -> None:
        self.topic = Topic(1, "t", TopicConfig(**config), ListIndex(1))
        self.tags: dict[int, bytes] = {}
        self.live: dict[int, int] = {}
        self.evict_floor = 1

    def tags_of(self, first_seq: int, last_seq: int) -> tuple[list[tuple[int, bytes]], int]:
        """Five at most in one go."""
        last_seq = min(last_seq, first_seq + 4)
        return [(seq, self.tags[seq]) for seq in range(first_seq, last_seq + 1) if self.tags[seq]], last_seq

    def find(self, match: Match, first_seq: int, last_seq: int) -> list[int]:
        if self.topic.tags is None:
            self.topic.tags = TagIndex(self.topic.index.base_seq)
        self.topic.tags.forget_below(self.topic.index.base_seq)
        while max(self.topic.tags.next_seq, self.topic.index.base_seq) <= self.topic.head_seq:
            self.topic.tags.catch_up(self.topic.index.base_seq, self.topic.head_seq, self.tags_of)
        tags = self.topic.tags.matching(match)
        found: list[int] = []
        at = 0
        while at < len(tags):
            some, at = self.topic.tags.seqs_of(tags, at, 3)
            assert some == sorted(some)
            found += some
        return [seq for seq in sorted(found) if first_seq <= seq <= last_seq]

    def append(self, tags: list[bytes]) -> None:
        sizes = [100 + len(tag) for tag in tags]
        for tag, size in zip(tags, sizes, strict=True):
            seq = len(self.tags) + 1
            self.tags[seq], self.live[seq] = tag, size
        entries = array("Q", [size << 32 for size in sizes])
        self.topic.appended(0, entries, array("Q", [1] * len(tags)), sum(sizes))
        cap_records = self.topic.config.cap_records
        while cap_records and len(self.live) > cap_records:
            oldest = min(self.live)
            del self.live[oldest]
            self.evict_floor = oldest + 1

    def delete(self, before_seq: int | None, match: Match | None) -> int:
        topic = self.topic
        if match is None:
            plan = topic.plan_cut(topic.head_seq + 1 if before_seq is None else before_seq)
        else:
            last_seq = topic.head_seq if before_seq is None else min(topic.head_seq, before_seq - 1)
            plan = topic.plan_delete(self.find(match, topic.earliest_seq, last_seq))
        revision = self.topic.revision
        self.topic.deleted(plan, self.topic.floors_without(plan))
        assert self.topic.revision == revision + 1
        gone = [seq for seq in self.live if (before_seq is None or seq < before_seq) and self._matches(seq, match)]
        for seq in gone:
            del self.live[seq]
        assert plan.records == len(gone)
        return len(gone)

    def evict_below(self, seq: int) -> None:
        lost = [live for live in self.live if live < seq]
        self.topic.evict_below(seq, EvictReason.TTL)
        for live in lost:
            del self.live[live]
            self.evict_floor = live + 1

    def _matches(self, seq: int, match: Match | None) -> bool:
        if match is None:
            return True
        tag = self.tags[seq]
        return bool(tag) and (tag == match.tag if match.op == "eq" else tag.startswith(match.tag))

    def check(self) -> None:
        topic = self.topic
        head_seq = len(self.tags)
        assert (topic.head_seq, topic.records, topic.live_bytes) == (head_seq, len(self.live), sum(self.live.values()))
        assert topic.earliest_seq == (min(self.live) if self.live else head_seq + 1)
        assert topic.evict_floor == self.evict_floor
        for seq in range(topic.earliest_seq, head_seq + 1):
            assert (topic.index.entries(seq, seq)[3] >> 32 & 2 == 0) == (seq in self.live)


steps = st.one_of(
    st.lists(st.sampled_from(TAGS), min_size=1, max_size=6),
    st.tuples(
        st.none() | st.integers(0, 40), st.none() | st.tuples(st.sampled_from(["eq", "glob"]), st.sampled_from(TAGS))
    ),
    st.integers(1, 40),
)


@settings(max_examples=300, deadline=None)
@given(cap_records=st.sampled_from([0, 0, 5]), script=st.lists(steps, max_size=25))
def test_deletes_evictions_and_appends_equal_a_model(cap_records: int, script: list[Any]) -> None:
    log = Log(cap_records=cap_records)
    for step in script:
        if isinstance(step, list):
            log.append(step)
        elif isinstance(step, int):
            log.evict_below(step)
        else:
            before_seq, match = step
            log.delete(before_seq, None if match is None else Match(*match))
        log.check()


def test_what_was_deleted_behind_the_last_that_expires_is_not_lost() -> None:
    """A reader between the two would otherwise be told of a gap that is only a deletion (api §3.2)."""
    log = Log(ttl_ms=10)
    log.append([b"", b"x", b"x"])
    assert log.delete(None, parse_match("x")) == 2
    log.evict_below(log.topic.expired_below(11))
    assert (log.topic.evict_floor, log.topic.earliest_seq) == (2, 4)
    log.check()


def test_a_glob_is_a_prefix_and_not_a_word() -> None:
    log = Log()
    log.append([b"chat-42:a", b"chat-420:a", b"chat-42:b", b""])
    assert log.delete(None, parse_match("chat-42:*")) == 2
    assert sorted(log.live) == [2, 4]


def test_later_records_with_the_tag_stay() -> None:
    log = Log()
    log.append([b"x"])
    assert log.delete(None, parse_match("x")) == 1
    log.append([b"x"])
    assert log.live.keys() == {2}
    log.check()


def test_a_star_alone_matches_every_tagged_record() -> None:
    log = Log()
    log.append([b"x", b"", b"y"])
    assert log.delete(None, parse_match("*")) == 2
    assert log.live.keys() == {2}


@pytest.mark.parametrize(
    "given",
    [
        ["tag", "Eq"],
        ["node", "Eq", "x"],
        ["tag", "Like", "x"],
        ["tag", "Glob", "x"],
        ["tag", "Glob", "a*b*"],
        5,
        {},
        ["tag", "Eq", 1],
    ],
)
def test_what_is_no_match_is_refused(given: object) -> None:
    with pytest.raises(TopicsError) as error:
        parse_match(given)
    assert error.value.code == "invalid_request"


def test_the_forms_of_a_match() -> None:
    assert parse_match("x") == parse_match(["tag", "Eq", "x"]) == Match("eq", b"x")
    assert parse_match("x*") == parse_match(["tag", "Glob", "x*"]) == Match("glob", b"x")
    assert parse_match(["tag", "Eq", "x*"]) == Match("eq", b"x*")
