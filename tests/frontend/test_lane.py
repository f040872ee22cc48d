"""Who waits for room in a ring: in order, bounded, and not longer than said."""

from __future__ import annotations

from typing import Any

import pytest

from topics.frontend.entry import limits
from topics.frontend.shards.pending_calls import PRESSED_WAIT_S, ROOM_WAIT_S, Fate, Lane, Waiter
from topics.shm.ring import HEADER_BYTES, Ring


class Road:
    """A lane whose ring holds four messages, and its other end."""

    def __init__(self) -> None:
        self.ring = Ring(memoryview(bytearray(HEADER_BYTES + 1024)))
        self.lane = Lane(self.ring)
        self.last_id = 0

    def offer(self, expires_s: float | None = 10.0, patient: bool = False, since_s: float = 0.0) -> tuple[int, Fate]:
        self.last_id += 1
        parts: list[bytes | bytearray | memoryview] = [bytes([self.last_id]) * 240]
        return self.last_id, self.lane.offer(Waiter(parts, 240, self.last_id, since_s, expires_s, patient))

    def fill(self) -> None:
        while self.ring.pending_bytes + 248 <= self.ring.capacity_bytes:
            assert self.offer()[1] is Fate.SENT

    def empty(self) -> list[int]:
        arrived = [(message[0], position) for message, position in self.ring.peek()]
        self.ring.consume(arrived[-1][1] if arrived else 0)
        return [request_id for request_id, _position in arrived]


def ids(waiters: list[Waiter]) -> list[int]:
    return [waiter.request_id for waiter in waiters]


def test_first_come_first_sent_whoever_is_patient() -> None:
    road = Road()
    road.fill()
    assert road.empty() == [1, 2, 3, 4]
    road.fill()
    for patient in (False, True, False, True):
        assert road.offer(patient=patient)[1] is Fate.WAITS
    assert road.empty() == [5, 6, 7, 8]
    sent, given_up = road.lane.retry(1.0, pressed=False)
    assert (ids(sent), given_up) == ([9, 10, 11, 12], [])
    assert road.empty() == [9, 10, 11, 12]


def test_who_comes_later_does_not_overtake() -> None:
    road = Road()
    road.fill()
    road.offer()
    road.empty()
    assert road.offer()[1] is Fate.WAITS
    assert ids(road.lane.retry(1.0, pressed=False)[0]) == [5, 6]


def test_time_ends_also_behind_somebody_who_has_more_of_it() -> None:
    road = Road()
    road.fill()
    kept, _ = road.offer(expires_s=None)
    patient, _ = road.offer(expires_s=5.0, patient=True)
    hasty, _ = road.offer(expires_s=0.25)
    assert [ids(waiters) for waiters in road.lane.retry(0.25, pressed=False)] == [[], [hasty]]
    road.empty()
    assert [ids(waiters) for waiters in road.lane.retry(4.9, pressed=False)] == [[kept, patient], []]


def test_under_the_greatest_pressure_who_is_not_patient_is_given_up_soon() -> None:
    road = Road()
    road.fill()
    hasty, _ = road.offer(expires_s=ROOM_WAIT_S)
    road.offer(expires_s=5.0, patient=True)
    road.offer(expires_s=None)
    younger, _ = road.offer(expires_s=0.01 + ROOM_WAIT_S, since_s=0.01)
    assert [ids(waiters) for waiters in road.lane.retry(PRESSED_WAIT_S, pressed=False)] == [[], []]
    assert [ids(waiters) for waiters in road.lane.retry(PRESSED_WAIT_S, pressed=True)] == [[], [hasty]]
    assert [ids(waiters) for waiters in road.lane.retry(1.0, pressed=True)] == [[], [younger]]
    assert road.lane.waiting == 2


def test_who_finds_room_before_its_time_is_over_is_sent_under_any_pressure() -> None:
    road = Road()
    road.fill()
    hasty, _ = road.offer(expires_s=ROOM_WAIT_S)
    road.empty()
    assert [ids(waiters) for waiters in road.lane.retry(0.9 * PRESSED_WAIT_S, pressed=True)] == [[hasty], []]


def test_how_many_of_a_kind_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RING_WAITERS", limits.RING_WAITERS._replace(most_count=2))
    road = Road()
    road.fill()
    assert [road.offer()[1] for _ in range(3)] == [Fate.WAITS, Fate.WAITS, Fate.REFUSED]
    # A crowd of the hasty takes no place of the patient.
    assert [road.offer(patient=True)[1] for _ in range(3)] == [Fate.WAITS, Fate.WAITS, Fate.REFUSED]
    for _ in range(3):
        assert road.offer(expires_s=None)[1] is Fate.WAITS, "what nobody awaits must not be lost"
    assert road.lane.waiting == 7


@pytest.mark.parametrize("bound", [{"most_count": 3}, {"most_bytes": 3 * 240}], ids=str)
def test_beyond_so_many_posts_nothing_is_let_in_that_leaves_one(
    monkeypatch: pytest.MonkeyPatch, bound: dict[str, Any]
) -> None:
    monkeypatch.setattr(limits, "RING_POSTS", limits.RING_POSTS._replace(**bound))
    road = Road()
    road.fill()
    assert [road.offer(expires_s=None)[1] for _ in range(2)] == [Fate.WAITS] * 2
    assert (road.lane.crowded, road.offer()[1], road.offer(patient=True)[1]) == (False, Fate.WAITS, Fate.WAITS)
    # The third, and one of those who were let in before.
    assert [road.offer(expires_s=None)[1] for _ in range(2)] == [Fate.WAITS] * 2
    assert (road.lane.crowded, road.offer()[1], road.offer(patient=True)[1]) == (True, Fate.REFUSED, Fate.REFUSED)
    road.empty()
    assert len(road.lane.retry(1.0, pressed=False)[0]) == 4
    assert (road.lane.crowded, road.offer()[1]) == (False, Fate.WAITS)


def test_what_those_of_a_kind_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RING_WAITERS", limits.RING_WAITERS._replace(most_bytes=240 * 2))
    road = Road()
    road.fill()
    for patient in (False, True):
        assert [road.offer(patient=patient)[1] for _ in range(3)] == [Fate.WAITS, Fate.WAITS, Fate.REFUSED]
    road.empty()
    assert len(road.lane.retry(0.0, pressed=False)[0]) == 4
    road.empty()
    assert (road.lane.waiting, road.offer()[1]) == (0, Fate.SENT)
    road.fill()
    assert [road.offer()[1] for _ in range(3)] == [Fate.WAITS, Fate.WAITS, Fate.REFUSED], "what was sent holds nothing"


def test_a_post_in_front_keeps_nobody_whose_time_is_over() -> None:
    road = Road()
    road.fill()
    post, _ = road.offer(expires_s=None)
    patient, _ = road.offer(expires_s=5.0, patient=True)
    assert [ids(waiters) for waiters in road.lane.retry(5.0, pressed=False)] == [[], [patient]]
    assert road.lane.waiting == 1
    road.empty()
    assert ids(road.lane.retry(99.0, pressed=False)[0]) == [post]


def test_a_post_keeps_its_place_between_the_requests_around_it() -> None:
    road = Road()
    road.fill()
    road.offer()
    road.offer(expires_s=None)
    road.offer(patient=True)
    road.offer(expires_s=None)
    road.empty()
    assert ids(road.lane.retry(1.0, pressed=False)[0]) == [5, 6, 7, 8]
    assert road.empty() == [5, 6, 7, 8]


def test_fullness() -> None:
    road = Road()
    assert road.lane.fullness == 0
    road.offer()
    assert road.lane.fullness == pytest.approx(248 / road.ring.capacity_bytes)
    road.fill()
    road.offer()
    assert road.lane.fullness == 1
