"""A frontend leaves the garbage collector nothing, whatever ends; and the probe would see it if it did."""

from __future__ import annotations

import gc
import time

import pytest

from bench import cycles
from bench.cycle_probe import look


class Front:
    def __init__(self) -> None:
        self.back = Back(self)
        self.text = str(time.monotonic_ns()) * 10


class Back:
    def __init__(self, front: Front) -> None:
        self.front = front


def test_a_look_says_what_refers_to_what() -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            Front()
        found = look()
        gc.collect()
    finally:
        gc.enable()
    ((circle, count),) = found["circles"]
    assert count == 3
    assert "Front .back → Back .front → Front" in circle or "Back .front → Front .back → Back" in circle
    assert found["objects"] == 6
    assert found["bytes"] > 3 * 100


@pytest.mark.long
def test_a_frontend_leaves_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "TIMES", 2)
    with cycles.running() as probed:
        for what, work in cycles.WORK.items():
            if what != cycles.UNREAD:
                work(probed)
        time.sleep(cycles.SETTLE_S)
        found = probed.look()
    assert not found["circles"]
    assert found["threshold"] > 1 << 30, "it looks at all when it is told to, and never by itself"
