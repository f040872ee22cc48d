"""Waiting for room in a ring: in order, bounded, and not longer than said."""

from __future__ import annotations

from typing import Any

import pytest

from topics.frontend.entry import limits
from topics.frontend.shards.pending_requests import PRESSED_WAIT_S, ROOM_WAIT_S, QueuedMessage, SendOutcome, SendQueue
from topics.shm.ring import HEADER_BYTES, Ring

SENT, WAITS, REFUSED = SendOutcome


class Road:
    """A queue whose ring holds four messages, and its other end."""

    def __init__(self) -> None:
        self.ring = Ring(memoryview(bytearray(HEADER_BYTES + 1024)))
        self.queue = SendQueue(self.ring)
        self.last_id = 0

    def offer(
        self, expires_s: float | None = 10.0, unthrottled: bool = False, since_s: float = 0.0
    ) -> tuple[int, SendOutcome]:
        self.last_id += 1
        parts: list[bytes | bytearray | memoryview] = [bytes([self.last_id]) * 240]
        return self.last_id, self.queue.offer(QueuedMessage(parts, 240, self.last_id, since_s, expires_s, unthrottled))

    def fill(self) -> None:
        while self.ring.pending_bytes + 248 <= self.ring.capacity_bytes:
            assert self.offer()[1] is SENT

    def empty(self) -> list[int]:
        arrived = [(message[0], position) for message, position in self.ring.peek()]
        self.ring.consume(arrived[-1][1] if arrived else 0)
        return [request_id for request_id, _position in arrived]


def ids(queued: list[QueuedMessage]) -> list[int]:
    return [message.request_id for message in queued]


def test_first_come_first_sent_throttled_or_not() -> None:
    road = Road()
    road.fill()
    assert road.empty() == [1, 2, 3, 4]
    road.fill()
    for unthrottled in (False, True, False, True):
        assert road.offer(unthrottled=unthrottled)[1] is WAITS
    assert road.empty() == [5, 6, 7, 8]
    sent, given_up = road.queue.retry(1.0, pressed=False)
    assert (ids(sent), given_up) == ([9, 10, 11, 12], [])
    assert road.empty() == [9, 10, 11, 12]


def test_who_comes_later_does_not_overtake() -> None:
    road = Road()
    road.fill()
    road.offer()
    road.empty()
    assert road.offer()[1] is WAITS
    assert ids(road.queue.retry(1.0, pressed=False)[0]) == [5, 6]


def test_time_ends_also_behind_somebody_who_has_more_of_it() -> None:
    road = Road()
    road.fill()
    kept, _ = road.offer(expires_s=None)
    unthrottled, _ = road.offer(expires_s=5.0, unthrottled=True)
    throttled, _ = road.offer(expires_s=0.25)
    assert [ids(queued) for queued in road.queue.retry(0.25, pressed=False)] == [[], [throttled]]
    road.empty()
    assert [ids(queued) for queued in road.queue.retry(4.9, pressed=False)] == [[kept, unthrottled], []]


def test_under_the_greatest_pressure_a_throttled_request_is_given_up_soon() -> None:
    road = Road()
    road.fill()
    throttled, _ = road.offer(expires_s=ROOM_WAIT_S)
    road.offer(expires_s=5.0, unthrottled=True)
    road.offer(expires_s=None)
    younger, _ = road.offer(expires_s=0.01 + ROOM_WAIT_S, since_s=0.01)
    assert [ids(queued) for queued in road.queue.retry(PRESSED_WAIT_S, pressed=False)] == [[], []]
    assert [ids(queued) for queued in road.queue.retry(PRESSED_WAIT_S, pressed=True)] == [[], [throttled]]
    assert [ids(queued) for queued in road.queue.retry(1.0, pressed=True)] == [[], [younger]]
    assert road.queue.waiting == 2


def test_who_finds_room_before_its_time_is_over_is_sent_under_any_pressure() -> None:
    road = Road()
    road.fill()
    throttled, _ = road.offer(expires_s=ROOM_WAIT_S)
    road.empty()
    assert [ids(queued) for queued in road.queue.retry(0.9 * PRESSED_WAIT_S, pressed=True)] == [[throttled], []]


def test_how_many_of_a_kind_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RING_WAITERS", limits.RING_WAITERS._replace(most_count=2))
    road = Road()
    road.fill()
    assert [road.offer()[1] for _ in range(3)] == [WAITS, WAITS, REFUSED]
    # Throttled requests take no place of the unthrottled ones.
    assert [road.offer(unthrottled=True)[1] for _ in range(3)] == [WAITS, WAITS, REFUSED]
    for _ in range(3):
        assert road.offer(expires_s=None)[1] is WAITS, "what nobody awaits must not be lost"
    assert road.queue.waiting == 7


@pytest.mark.parametrize("bound", [{"most_count": 3}, {"most_bytes": 3 * 240}], ids=str)
def test_beyond_so_many_posts_nothing_is_let_in_that_leaves_one(
    monkeypatch: pytest.MonkeyPatch, bound: dict[str, Any]
) -> None:
    monkeypatch.setattr(limits, "RING_POSTS", limits.RING_POSTS._replace(**bound))
    road = Road()
    road.fill()
    assert [road.offer(expires_s=None)[1] for _ in range(2)] == [WAITS] * 2
    assert (road.queue.posts_full, road.offer()[1], road.offer(unthrottled=True)[1]) == (False, WAITS, WAITS)
    # The third, and one of those who were let in before.
    assert [road.offer(expires_s=None)[1] for _ in range(2)] == [WAITS] * 2
    assert (road.queue.posts_full, road.offer()[1], road.offer(unthrottled=True)[1]) == (True, REFUSED, REFUSED)
    road.empty()
    assert len(road.queue.retry(1.0, pressed=False)[0]) == 4
    assert (road.queue.posts_full, road.offer()[1]) == (False, WAITS)


def test_what_those_of_a_kind_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RING_WAITERS", limits.RING_WAITERS._replace(most_bytes=240 * 2))
    road = Road()
    road.fill()
    for unthrottled in (False, True):
        assert [road.offer(unthrottled=unthrottled)[1] for _ in range(3)] == [WAITS, WAITS, REFUSED]
    road.empty()
    assert len(road.queue.retry(0.0, pressed=False)[0]) == 4
    road.empty()
    assert (road.queue.waiting, road.offer()[1]) == (0, SENT)
    road.fill()
    assert [road.offer()[1] for _ in range(3)] == [WAITS, WAITS, REFUSED], "what was sent holds nothing"


def test_a_post_in_front_keeps_nobody_whose_time_is_over() -> None:
    road = Road()
    road.fill()
    post, _ = road.offer(expires_s=None)
    unthrottled, _ = road.offer(expires_s=5.0, unthrottled=True)
    assert [ids(queued) for queued in road.queue.retry(5.0, pressed=False)] == [[], [unthrottled]]
    assert road.queue.waiting == 1
    road.empty()
    assert ids(road.queue.retry(99.0, pressed=False)[0]) == [post]


def test_a_post_keeps_its_place_between_the_requests_around_it() -> None:
    road = Road()
    road.fill()
    road.offer()
    road.offer(expires_s=None)
    road.offer(unthrottled=True)
    road.offer(expires_s=None)
    road.empty()
    assert ids(road.queue.retry(1.0, pressed=False)[0]) == [5, 6, 7, 8]
    assert road.empty() == [5, 6, 7, 8]


def test_fullness() -> None:
    road = Road()
    assert road.queue.fullness == 0
    road.offer()
    assert road.queue.fullness == pytest.approx(248 / road.ring.capacity_bytes)
    road.fill()
    road.offer()
    assert road.queue.fullness == 1
