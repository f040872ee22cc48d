"""Large frames that are sent, given what is kept already."""

from __future__ import annotations

from topics.frontend.entry.budget import Budget
from topics.frontend.entry.limits import KEPT_FRAMES
from topics.frontend.live.channels import LargeFrames
from topics.frontend.live.event_streams import HIGH_WATER_BYTES

LARGE = HIGH_WATER_BYTES + 1


class Kept:
    """A room into which three large frames fit, what is kept beside it, and who was admitted since one last asked."""

    def __init__(self) -> None:
        self._budget = Budget(KEPT_FRAMES._replace(most_bytes=3 * LARGE))
        self._admitted: list[str] = []
        self._kept_bytes = 0
        self.room: LargeFrames[str] = LargeFrames(self._budget, self._admitted.append)

    def _keep(self, held_bytes: int) -> None:
        self._budget.held_bytes += held_bytes - self._kept_bytes
        self._kept_bytes = held_bytes

    def admit(self, waiter: str, len_bytes: int, held_bytes: int) -> bool:
        self._keep(held_bytes)
        return self.room.admit(waiter, len_bytes)

    def shortfall_bytes(self, held_bytes: int) -> int:
        self._keep(held_bytes)
        return self.room.shortfall_bytes()

    def take_admitted(self, held_bytes: int) -> list[str]:
        self._keep(held_bytes)
        self._budget.admit_waiting()
        admitted = self._admitted[:]
        self._admitted.clear()
        return admitted

    def cancel(self, waiter: str) -> None:
        self.room.cancel(waiter)

    def __contains__(self, waiter: str) -> bool:
        return waiter in self.room


def test_small_frames_do_not_wait() -> None:
    room = Kept()
    assert room.admit("a", HIGH_WATER_BYTES, held_bytes=100 * LARGE)
    assert room.admit("a", LARGE, held_bytes=2 * LARGE)
    assert not room.admit("a", LARGE, held_bytes=2 * LARGE + 1)
    assert "a" in room
    assert room.admit("b", HIGH_WATER_BYTES, held_bytes=100 * LARGE)


def test_a_frame_larger_than_all_room_goes_when_nothing_is_kept() -> None:
    room = Kept()
    assert room.admit("a", 4 * LARGE, held_bytes=0)
    assert not room.admit("a", 4 * LARGE, held_bytes=1)
    assert room.shortfall_bytes(1) == 1, "nobody has to go for more than there is"
    assert room.take_admitted(0) == ["a"]


def test_first_come_first_served() -> None:
    room = Kept()
    assert room.shortfall_bytes(10 * LARGE) == 0, "nobody waits"
    for name, len_bytes in (("a", 2 * LARGE), ("left", LARGE), ("b", LARGE), ("c", LARGE)):
        assert not room.admit(name, len_bytes, held_bytes=3 * LARGE)
    room.cancel("left")
    room.cancel("left")
    assert room.shortfall_bytes(2 * LARGE) == LARGE
    assert room.take_admitted(2 * LARGE) == [], "and what is smaller does not overtake it"
    assert not room.admit("new", LARGE, held_bytes=2 * LARGE), "nor does who has not waited"
    assert room.take_admitted(0) == ["a", "b"], "each as if the former were kept"
    assert "c" in room
    assert "a" not in room


def test_room_is_given_once() -> None:
    room = Kept()
    for name in "abcdef":
        assert not room.admit(name, LARGE, held_bytes=3 * LARGE)
    assert room.take_admitted(LARGE) == ["a", "b"]
    assert room.take_admitted(LARGE) == [], "it is theirs before they have come"
    assert room.shortfall_bytes(LARGE) <= 0, "nobody is cut for what makes room by itself"
    assert room.admit("a", LARGE, held_bytes=LARGE)
    assert room.take_admitted(2 * LARGE) == [], "what was sent is kept now"
    room.cancel("b")
    assert room.take_admitted(2 * LARGE) == ["c"], "it has left, or sends nothing"
    assert room.admit("c", 10, held_bytes=2 * LARGE)
    assert room.take_admitted(2 * LARGE) == ["d"], "it sent something smaller"
    assert room.admit("d", LARGE, held_bytes=100 * LARGE), "small frames of others may have come between"
    assert room.take_admitted(0) == ["e", "f"]
    assert not room.admit("new", 2 * LARGE, held_bytes=0), "they have two thirds of it"
    assert room.admit("e", LARGE, held_bytes=0)
    assert room.admit("f", LARGE, held_bytes=0)
    assert room.take_admitted(0) == ["new"]


def test_a_frame_that_has_grown_has_the_first_place() -> None:
    room = Kept()
    for name in "abc":
        assert not room.admit(name, LARGE, held_bytes=3 * LARGE)
    assert room.take_admitted(LARGE) == ["a", "b"]
    assert not room.admit("a", 2 * LARGE, held_bytes=LARGE)
    assert room.take_admitted(LARGE) == [], "two thirds are kept, or promised"
    assert room.admit("b", LARGE, held_bytes=LARGE)
    assert room.take_admitted(LARGE) == ["a"]
    assert room.admit("a", 2 * LARGE, held_bytes=0)
    assert room.take_admitted(0) == ["c"]
    assert room.admit("c", 3 * LARGE, held_bytes=0), "it fits although it has grown"
