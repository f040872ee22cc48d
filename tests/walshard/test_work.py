"""Turns in which workers are dealt jobs, and what that costs."""

from __future__ import annotations

from array import array
from functools import partial

import pytest

from tests.core.cost import lines_of
from tests.core.list_index import ListIndex
from topics.core.config import TopicConfig
from topics.core.job import Now
from topics.core.leases import Leases
from topics.core.topic import Topic
from topics.walshard.handlers.workers import Worker, Workers

NOW = Now(1_700_000_000_000, 5_000)


def leases_with(jobs: int) -> Leases:
    topic = Topic(1, "q", TopicConfig(type="queue"), ListIndex(1))
    assert topic.queue is not None
    topic.queue.start(NOW, 1, keep_leases=True)
    topic.appended(1, array("Q", [100 << 32] * jobs), array("Q", [0] * jobs), 100 * jobs)
    return topic.queue


def streams(count: int, most: int = 1) -> Workers:
    workers = Workers()
    for number in range(1, count + 1):
        workers.put(Worker((0, number), f"w{number}", most, 1_000, once=False))
    return workers


def dealt(workers: Workers, leases: Leases) -> dict[int, list[int]]:
    """By stream: its seqs."""
    workers.have_room(leases.take_freed())
    if not workers.may_deal(leases.ready, 0, NOW):
        return {}
    hands = workers.deal(leases, 1_000, 0, NOW)
    return {worker.where[1]: leased.seqs for worker, leased, _dead in hands}


def done(leases: Leases, *seqs: int) -> None:
    leases.hold(seqs)
    leases.finish([(seq, seq) for seq in seqs])


def test_who_waits_longest_is_next() -> None:
    workers, leases = streams(3), leases_with(5)
    assert dealt(workers, leases) == {1: [1], 2: [2], 3: [3]}
    assert dealt(workers, leases) == {}
    done(leases, 2)
    assert dealt(workers, leases) == {2: [4]}
    done(leases, 3, 1)
    assert dealt(workers, leases) == {3: [5]}
    workers.put(Worker((0, 4), "w4", 1, 1_000, once=False))
    leases.release([5], 0, NOW)
    assert dealt(workers, leases) == {1: [5]}, "it has been without a job for longest"


def test_what_is_left_over_goes_to_the_next_ones_the_next_time() -> None:
    workers, leases = streams(3, most=2), leases_with(4)
    assert dealt(workers, leases) == {1: [1, 4], 2: [2], 3: [3]}
    leases.release([1, 4], 0, NOW)
    assert dealt(workers, leases) == {2: [1], 3: [4]}


def test_claims_are_answered_though_there_are_fewer_jobs_than_streams() -> None:
    workers, leases = streams(2), leases_with(1)
    workers.put(Worker((0, 9), "claims", 5, 1_000, once=True))
    assert dealt(workers, leases) == {1: [1], 9: []}
    assert len(workers) == 2
    workers.put(Worker((0, 10), "claims", 5, 1_000, once=True))
    assert dealt(workers, leases) == {10: []}
    assert dealt(workers, leases) == {}


def test_a_stream_that_asks_for_nothing_gets_nothing_until_it_does() -> None:
    workers, leases = streams(1), leases_with(2)
    workers.put(Worker((0, 1), "w1", 0, 1_000, once=False))
    assert dealt(workers, leases) == {}
    workers.put(Worker((0, 1), "w1", 2, 1_000, once=False))
    assert dealt(workers, leases) == {1: [1, 2]}


def test_who_is_gone_is_dealt_nothing() -> None:
    workers, leases = streams(3), leases_with(3)
    workers.remove((0, 2))
    assert dealt(workers, leases) == {1: [1], 3: [2]}
    done(leases, 1, 2)
    workers.remove_frontend(0)
    assert dealt(workers, leases) == {}
    assert not workers


@pytest.mark.parametrize("busy", [True, False], ids=["streams that have their job", "streams that wait"])
def test_a_job_costs_the_same_among_10_and_among_5000_streams(busy: bool) -> None:
    most = []
    for count in (10, 5_000):
        leases = leases_with(count + 50 if busy else 0)
        workers = streams(count)
        if busy:
            assert len(dealt(workers, leases)) == count
        costs = []
        for number in range(1, 9):
            if busy:
                done(leases, number)
            else:
                leases = leases_with(1)
            costs.append(lines_of(partial(dealt, workers, leases)))
        most.append(max(costs))
    assert most[0] > 0
    assert most[1] <= most[0] * 1.2, most
