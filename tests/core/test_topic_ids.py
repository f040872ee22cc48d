from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topics.core.names import TopicIds


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200), st.integers(0, 255))
def test_ids_grow_whatever_the_clock_does(times: list[int], shard: int) -> None:
    ids = TopicIds(shard)
    given_out = [ids.next(1_700_000_000_000 + time) for time in times]
    assert given_out == sorted(set(given_out))
    again = TopicIds(shard)
    for topic_id in given_out:
        again.used(topic_id)
    assert again.next(0) > given_out[-1]


def test_more_than_the_counter_holds_in_one_millisecond() -> None:
    ids = TopicIds(3)
    given_out = [ids.next(1) for _ in range(10_000)]
    assert given_out == sorted(set(given_out))


def test_shards_never_share_an_id() -> None:
    one, other = TopicIds(1), TopicIds(2)
    assert not {one.next(5) for _ in range(100)} & {other.next(5) for _ in range(100)}
