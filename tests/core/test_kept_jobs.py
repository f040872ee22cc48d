"""Acknowledged jobs that go so that a queue that rejects has room."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from tests.core.list_index import ListIndex
from topics.core.config import TopicConfig
from topics.core.pending import done_jobs_to_drop
from topics.core.seq_set import runs_of
from topics.core.topic import Topic

JOB_BYTES = 100


def queue_of(jobs: int, acked: Iterable[int], **config: Any) -> Topic:
    """Full unless its caps are larger than that; no job is smaller than another."""
    topic = Topic(1, "q", TopicConfig(type="queue", on_ack="keep", **config), ListIndex(1))
    topic.appended(1, array("Q", [JOB_BYTES << 32] * jobs), array("Q", [0] * jobs), JOB_BYTES * jobs)
    assert topic.queue is not None
    topic.queue.finish(runs_of(list(acked)))
    return topic


def test_the_oldest_go_as_many_as_are_missing() -> None:
    topic = queue_of(10, [2, 3, 5, 9], discard="reject", cap_records=11)
    assert done_jobs_to_drop(topic, 1, JOB_BYTES, set()) == []
    assert done_jobs_to_drop(topic, 2, JOB_BYTES, set()) == [2]
    assert done_jobs_to_drop(topic, 4, JOB_BYTES, set()) == [2, 3, 5]
    assert done_jobs_to_drop(topic, 5, JOB_BYTES, set()) == [2, 3, 5, 9]
    assert done_jobs_to_drop(topic, 6, JOB_BYTES, set()) == [], "it would not be enough"


def test_what_is_on_its_way_out_makes_no_room() -> None:
    topic = queue_of(4, [1, 2, 3], discard="reject", cap_records=4)
    assert done_jobs_to_drop(topic, 2, JOB_BYTES, {1}) == [2, 3]
    assert done_jobs_to_drop(topic, 3, JOB_BYTES, {1}) == []


def test_bytes_are_room_too() -> None:
    topic = queue_of(4, [1, 2, 3], discard="reject", cap_records=100, cap_bytes=450)
    assert done_jobs_to_drop(topic, 1, 50, set()) == []
    assert done_jobs_to_drop(topic, 1, 51, set()) == [1]
    assert done_jobs_to_drop(topic, 1, 250, set()) == [1, 2, 3]
    assert done_jobs_to_drop(topic, 1, 351, set()) == []


def test_a_large_queue_gives_up_a_hundredth_at_a_time() -> None:
    topic = queue_of(5000, range(1, 4001), discard="reject", cap_records=5000)
    assert done_jobs_to_drop(topic, 1, JOB_BYTES, set()) == list(range(1, 52))
    assert done_jobs_to_drop(topic, 3990, JOB_BYTES, set()) == list(range(1, 4001)), "as far as there are any"


def test_a_queue_that_discards_old_ones_needs_none() -> None:
    assert done_jobs_to_drop(queue_of(4, [1, 2], cap_records=4), 1, JOB_BYTES, set()) == []
