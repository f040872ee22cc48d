"""Which large frames are sent, given what is kept already."""

from __future__ import annotations

import pytest

from topics.frontend import room
from topics.frontend.push import HIGH_WATER_BYTES
from topics.frontend.room import Room

LARGE = HIGH_WATER_BYTES + 1


@pytest.fixture(autouse=True)
def _three_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "KEPT_BYTES_MAX", 3 * LARGE)


def test_small_frames_do_not_wait() -> None:
    waiting: Room[str] = Room()
    assert waiting.admits(HIGH_WATER_BYTES, held_bytes=100 * LARGE)
    assert waiting.admits(LARGE, held_bytes=2 * LARGE)
    assert not waiting.admits(LARGE, held_bytes=2 * LARGE + 1)


def test_a_frame_larger_than_all_room_goes_when_nothing_is_kept() -> None:
    waiting: Room[str] = Room()
    assert waiting.admits(4 * LARGE, held_bytes=0)
    assert not waiting.admits(4 * LARGE, held_bytes=1)
    waiting.wait("a", 4 * LARGE)
    assert waiting.first_missing(1) == 1, "nobody has to go for more than there is"
    assert waiting.take_admitted(0) == ["a"]


def test_first_come_first_served() -> None:
    waiting: Room[str] = Room()
    assert waiting.first_missing(10 * LARGE) == 0, "nobody waits"
    for name, len_bytes in (("a", 2 * LARGE), ("left", LARGE), ("b", LARGE), ("c", LARGE)):
        waiting.wait(name, len_bytes)
    waiting.end("left")
    waiting.end("left")
    assert waiting.first_missing(2 * LARGE) == LARGE
    assert waiting.take_admitted(2 * LARGE) == [], "and what is smaller does not overtake it"
    assert waiting.take_admitted(0) == ["a", "b"], "each as if the former were kept"
    assert "c" in waiting
    assert "a" not in waiting
    assert len(waiting) == 1
