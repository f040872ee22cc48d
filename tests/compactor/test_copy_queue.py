"""The order of copies, and the times at which failed ones come again."""

from __future__ import annotations

from topics.compactor.relocation import PAUSE_MS, CopyQueue, RelocationCopy
from topics.compactor.work_queue import RETRY_MAX_MS, RETRY_MS
from topics.core.segment_list import SEALED, SegmentInfo


def copy(number: int) -> RelocationCopy:
    return RelocationCopy(0, 7, SegmentInfo(number * 10 + 1, number * 10 + 10, 0, 0, 100, 0, SEALED))


def test_each_is_there_once_and_the_oldest_is_first() -> None:
    queue = CopyQueue()
    for number in (1, 2, 1, 3, 2):
        queue.add(copy(number))
    first = queue.take(0)
    assert first == copy(1)
    queue.add(copy(1))  # while it is being copied
    assert [queue.take(0), queue.take(0), queue.take(0)] == [copy(2), copy(3), None]
    queue.done(first)
    queue.add(first)
    assert queue.take(0) == first


def test_one_that_fails_holds_up_no_other_and_comes_later_each_time() -> None:
    queue = CopyQueue()
    for number in range(4):
        queue.add(copy(number))
    assert queue.take(0) == copy(0)
    queue.failed(copy(0), 0)
    assert queue.take(PAUSE_MS - 1) is None
    for number in range(1, 4):
        assert queue.in_doubt == (number == 1)
        assert queue.take(PAUSE_MS) == copy(number)
        queue.done(copy(number))
    now_ms, waits = 0, []
    for _ in range(7):
        due_ms = now_ms
        while queue.take(due_ms) is None:
            due_ms += 100
        waits.append(due_ms - now_ms)
        now_ms = due_ms
        queue.failed(copy(0), now_ms)
    assert waits == [RETRY_MS, 2 * RETRY_MS, 4 * RETRY_MS, 8 * RETRY_MS, *[RETRY_MAX_MS] * 3]


def test_many_that_fail_leave_every_other_turn_to_those_that_do_not() -> None:
    """Enough of them that one is due whenever anything may begin."""
    queue = CopyQueue()
    for number in range(100):
        queue.add(copy(number))
    bad = {copy(number) for number in range(30)}
    done = now_ms = 0
    while done < 70 and now_ms < 20 * RETRY_MAX_MS:
        now_ms += PAUSE_MS
        taken = queue.take(now_ms)
        if taken in bad:
            queue.failed(taken, now_ms)
        elif taken is not None:
            queue.done(taken)
            done += 1
    assert done == 70
    # And the other way round: those that failed have their turn however many others come.
    tries = 0
    for number in range(100, 200):
        queue.add(copy(number))
        now_ms += RETRY_MAX_MS
        taken = queue.take(now_ms)
        assert taken is not None
        tries += taken in bad
        queue.failed(taken, now_ms) if taken in bad else queue.done(taken)
    assert tries >= 40


def test_those_that_are_gone_take_no_room_however_long_they_wait() -> None:
    queue = CopyQueue()
    for number in range(10):
        queue.add(copy(number))
    for number in range(3):
        assert queue.take(number * RETRY_MS) == copy(number)
        if number:
            queue.failed(copy(number), number * RETRY_MS)
    queue.keep_only(lambda one: one == copy(9))
    assert len(queue) == 2, "one waits, and one is being copied"
    assert queue.take(10 * RETRY_MS) == copy(9)
    assert queue.take(100 * RETRY_MS) is None
    queue.done(copy(0))
    queue.done(copy(9))
    assert len(queue) == 0


def test_when_all_fail_less_and_less_is_tried_until_one_succeeds() -> None:
    queue = CopyQueue()
    for number in range(100):
        queue.add(copy(number))
    tries = now_ms = 0
    while now_ms < 20 * RETRY_MS:
        taken = queue.take(now_ms)
        if taken is not None:
            tries += 1
            queue.failed(taken, now_ms)
        now_ms += 50
    assert tries < 30
    now_ms += RETRY_MAX_MS
    copied = set()
    while (one := queue.take(now_ms)) is not None:
        queue.done(one)
        copied.add(one)
    assert copied == {copy(number) for number in range(100)}
