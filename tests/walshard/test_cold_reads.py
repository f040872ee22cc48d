"""The cold tier as routers read it: what fails, and who asks no more, keeps no place of those who ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from threading import Event
from typing import Any

import pytest

from topics.walshard.routers import cold_reads
from topics.walshard.routers.cold_reads import FAILURE_KEPT_MS, FRESH_MS, IN_FLIGHT_MAX, ColdReads, UnknownError

DEADLINE_S = 20.0
CONTENT = bytes(range(256)) * 16


class Store:
    """Objects are what `outcome` says, once the gate is open."""

    def __init__(self) -> None:
        self.gate = Event()
        self.gate.set()
        self.outcome: Callable[[str], bytes] = lambda name: CONTENT
        self.reads = 0

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        self.reads += 1
        assert self.gate.wait(DEADLINE_S)
        return self.outcome(name)[offset : offset + length]

    def unused(self, *_: object) -> Any:
        raise AssertionError("routers only read ranges")

    put = delete = list = exists = len = place = unused


def failing(name: str) -> bytes:
    raise OSError(5, f"Input/output error of {name}")


class Asking:
    """`reads` of a store, at a time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.store = Store()
        self.now_ms = 1
        self.reads = ColdReads(self.store, lambda: self.now_ms)

    def get(self, name: str, start: int = 10) -> bytes | None:
        try:
            return bytes(self.reads.get(name, start, start + 10, len(CONTENT)))
        except UnknownError:
            return None

    def awaited(self, name: str, start: int = 10) -> bytes:
        """Asked until it is there."""
        until_s = time.monotonic() + DEADLINE_S
        while (found := self.get(name, start)) is None:
            assert time.monotonic() < until_s
            time.sleep(0.0005)
        return found


def test_what_failed_is_told_to_who_asks_again_and_then_tried_again() -> None:
    asking = Asking()
    asking.store.outcome = failing
    with pytest.raises(OSError, match="Input/output error of a"):
        asking.awaited("a")
    asking.store.outcome = lambda _name: CONTENT
    assert asking.awaited("a") == CONTENT[10:20]


def test_what_was_damaged_is_read_again() -> None:
    asking = Asking()
    asking.store.outcome = lambda _name: bytes(len(CONTENT))
    for name in ("a", "b"):
        assert asking.awaited(name) == bytes(10)
    asking.store.outcome = lambda _name: CONTENT
    asking.now_ms += FRESH_MS
    asking.reads.forget("a", 15)
    assert [asking.awaited(name) for name in ("a", "b")] == [CONTENT[10:20], bytes(10)]


def test_what_has_just_come_is_not_read_again_however_often_its_damage_is_met() -> None:
    asking = Asking()
    asking.store.outcome = lambda _name: bytes(len(CONTENT))
    for passed_ms, reads in [(0, 1), (0, 1), (FRESH_MS - 1, 1), (1, 1), (0, 2), (0, 2)]:
        asking.now_ms += passed_ms
        assert asking.awaited("a") == bytes(10)
        asking.reads.forget("a", 15)
        assert asking.store.reads == reads


def test_what_is_sound_of_a_damaged_object_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_reads, "READ_BYTES", 100)
    asking = Asking()
    starts = (10, 500)
    for start in starts:
        assert asking.awaited("a", start) == CONTENT[start : start + 10]
    asking.now_ms += FRESH_MS
    asking.reads.forget("a", 500 + 99)
    assert asking.awaited("a", 10) == CONTENT[10:20]
    assert asking.store.reads == 2
    assert asking.awaited("a", 500) == CONTENT[500:510]
    assert asking.store.reads == 3


def test_failures_that_nobody_asks_for_again_keep_no_place() -> None:
    asking = Asking()
    asking.store.outcome = failing
    until_s = time.monotonic() + DEADLINE_S
    for number in count():
        # Each of another object, whose router ends before it asks again.
        assert asking.get(f"gone-{number}") is None
        if asking.store.reads >= 3 * IN_FLIGHT_MAX:
            break
        assert time.monotonic() < until_s, f"only {asking.store.reads} reads ever began"
        time.sleep(0.0005)
    asking.store.outcome = lambda _name: CONTENT
    assert asking.awaited("mine") == CONTENT[10:20]


def test_an_old_failure_is_forgotten() -> None:
    asking = Asking()
    asking.store.outcome = failing
    assert asking.get("a") is None
    for thread in threading.enumerate():
        if thread.name == "cold-read":
            thread.join(DEADLINE_S)
    assert asking.get("b") is None, "the failure is known now"
    asking.now_ms += FAILURE_KEPT_MS
    asking.store.outcome = lambda _name: CONTENT
    assert asking.awaited("a") == CONTENT[10:20], "it is read, and nothing said of what failed long ago"


def test_reads_that_hang_keep_theirs() -> None:
    asking = Asking()
    asking.store.gate.clear()
    for number in range(IN_FLIGHT_MAX + 3):
        assert asking.get(f"slow-{number}") is None
    asking.now_ms += FAILURE_KEPT_MS
    assert asking.get("mine") is None
    assert asking.store.reads <= IN_FLIGHT_MAX
    asking.store.gate.set()
    assert asking.awaited("mine") == CONTENT[10:20]
