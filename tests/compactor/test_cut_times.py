"""Times of the next cut, after one that was complete and after one that was not."""

from __future__ import annotations

from topics.compactor.compactor import RETRY_MS, SHORT_OF_ROOM_MS, TIDY_MIN_MS, CutTimes

INTERVAL_MS = 60_000
WAL_BYTES = 1000


def first_due(times: CutTimes, now_ms: int, new_bytes: int = 0, left_bytes: int = 1 << 40) -> int:
    """Return the time from `now_ms` until a cut is due, to the half second."""
    waited_ms = 0
    while not times.is_due(new_bytes, now_ms + waited_ms, left_bytes):
        waited_ms += 500
    return waited_ms


def test_at_the_interval_or_when_much_was_written() -> None:
    times = CutTimes(INTERVAL_MS, WAL_BYTES, 0)
    assert first_due(times, 0) == INTERVAL_MS
    assert first_due(times, 0, WAL_BYTES - 1) == INTERVAL_MS
    assert first_due(times, 0, WAL_BYTES) == 0
    times.done(True, 100_000)
    assert first_due(times, 100_000) == INTERVAL_MS


def test_soon_when_the_disk_has_little_room() -> None:
    times = CutTimes(INTERVAL_MS, 64 << 20, 0)
    assert first_due(times, 0, 1000, left_bytes=2001) == INTERVAL_MS
    assert first_due(times, 0, 1000, left_bytes=2000) == SHORT_OF_ROOM_MS
    assert first_due(times, 0, 0, left_bytes=-1) == SHORT_OF_ROOM_MS
    assert first_due(times, 0, 3 << 20, left_bytes=6 << 20) == 0
    for _ in range(8):
        times.done(False, 0)
        assert first_due(times, 0, left_bytes=-1) == SHORT_OF_ROOM_MS


def test_what_failed_is_tried_again_soon_and_then_less_and_less_often() -> None:
    times = CutTimes(INTERVAL_MS, WAL_BYTES, 0)
    now_ms, waits = 0, []
    for _ in range(8):
        times.done(False, now_ms)
        waits.append(first_due(times, now_ms))
        now_ms += waits[-1]
    assert waits == [*(RETRY_MS << n for n in range(5)), *[INTERVAL_MS] * 3]
    times.done(True, now_ms)
    assert first_due(times, now_ms) == INTERVAL_MS
    times.done(False, now_ms)
    assert first_due(times, now_ms) == RETRY_MS
    assert first_due(times, now_ms, WAL_BYTES) == 0, "other shards may have written much"


def test_a_long_interval_puts_off_no_retry_and_no_tidying() -> None:
    day_ms = 86_400_000
    times = CutTimes(day_ms, WAL_BYTES, 0)
    assert first_due(times, 0) == day_ms
    assert not times.may_keep_up(59_999)
    assert times.may_keep_up(60_000)
    assert not times.is_tidying_due(59_999)
    assert times.is_tidying_due(60_000)
    times.tidied(60_000)
    assert not times.is_tidying_due(119_999)
    assert times.is_tidying_due(120_000)
    for _ in range(8):
        times.done(False, 120_000)
    assert first_due(times, 120_000) == 60_000
    assert times.is_tidying_due(120_000), "a cut that failed may not have come to it"
    times.done(True, 120_000, was_made=False)
    assert times.is_tidying_due(120_000)
    times.done(True, 120_000)
    assert not times.is_tidying_due(120_000)


def test_a_short_interval_makes_tidying_no_more_frequent_than_once_a_second() -> None:
    times = CutTimes(20, WAL_BYTES, 0)
    assert not times.is_tidying_due(TIDY_MIN_MS - 1)
    assert times.is_tidying_due(TIDY_MIN_MS)
    times.tidied(TIDY_MIN_MS)
    assert not times.is_tidying_due(2 * TIDY_MIN_MS - 1)


def test_upkeep_may_begin_behind_the_first_try_of_a_cut() -> None:
    times = CutTimes(INTERVAL_MS, WAL_BYTES, 0)
    times.done(False, 1)
    assert times.may_keep_up(1)
