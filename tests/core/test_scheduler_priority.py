"""Priorities (api §1, architecture "Scheduler and pressure")."""

from __future__ import annotations

import pytest

from topics.core.config import TopicConfig
from topics.core.scheduler import age, band_of, base_priority

READ_MS = 1_000_000


@pytest.mark.parametrize(
    ("idle_ms", "expected"),
    [(0, 500), (30_000, 250), (60_000, 125), (299_999, round(500 * 2 ** (-299_999 / 30_000))), (300_000, 0)],
)
def test_recency_halves_every_30_s_and_ends_after_5_min(idle_ms: int, expected: int) -> None:
    assert base_priority(TopicConfig(), READ_MS, READ_MS + idle_ms) == expected


def test_what_was_never_read_or_is_not_to_be_judged_by_that_has_none() -> None:
    assert base_priority(TopicConfig(), 0, READ_MS) == 0
    assert base_priority(TopicConfig(auto_priority=False), READ_MS, READ_MS) == 0


def test_a_manual_priority_stands_alone() -> None:
    assert base_priority(TopicConfig(priority=-300), READ_MS, READ_MS) == -300
    assert base_priority(TopicConfig(priority=0), READ_MS, READ_MS) == 0


def test_a_read_in_the_future_is_one_of_now() -> None:
    assert base_priority(TopicConfig(), READ_MS + 5_000, READ_MS) == 500


@pytest.mark.parametrize(("waited_ms", "expected"), [(-5, 0), (0, 0), (9, 0), (10, 1), (5_000, 500), (99_999, 1000)])
def test_age_is_100_a_second_and_at_most_1000(waited_ms: int, expected: int) -> None:
    assert age(waited_ms) == expected


@pytest.mark.parametrize(
    ("priority", "band"),
    [(2000, 0), (750, 0), (749, 1), (500, 1), (499, 2), (250, 2), (249, 3), (0, 3), (-1, 4), (-1000, 4)],
)
def test_bands(priority: int, band: int) -> None:
    assert band_of(priority) == band


def test_ten_seconds_lift_anything_into_the_first_band() -> None:
    assert band_of(-1000 + age(9_999), 9_999) == 4
    assert band_of(-1000 + age(10_000), 10_000) == 0
