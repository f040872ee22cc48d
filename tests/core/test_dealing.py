from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topics.core.job import deal


def test_twenty_jobs_and_four_claimers_of_ten_are_five_each() -> None:
    hands = deal(range(20), [10] * 4)
    assert [len(hand) for hand in hands] == [5] * 4
    assert hands[1] == [1, 5, 9, 13, 17]


@given(st.integers(0, 50), st.lists(st.integers(0, 12), max_size=8))
def test_nothing_is_lost_and_nobody_gets_more_than_one_beyond_who_wanted_more(count: int, wanted: list[int]) -> None:
    hands = deal(range(count), wanted)
    dealt = [item for hand in hands for item in hand]
    assert sorted(dealt) == list(range(min(count, sum(wanted))))
    for hand, most in zip(hands, wanted, strict=True):
        assert hand == sorted(hand)
        assert len(hand) <= most
        if len(hand) < most:
            assert all(len(other) <= len(hand) + 1 for other in hands)
