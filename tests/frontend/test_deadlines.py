"""Deadlines of a connection, and what follows them: the clock is a number of the test's."""

from __future__ import annotations

import math

import pytest

from topics.frontend.http.deadlines import Awaited, Deadlines, HttpLimits, RunningClock, Verdict

LIMITS = HttpLimits(
    header_timeout_ms=10_000,
    body_idle_timeout_ms=30_000,
    body_timeout_ms=60_000,
    body_min_bytes_per_s=1000,
    keep_alive_timeout_ms=75_000,
    write_stall_timeout_ms=45_000,
    read_min_bytes_per_s=100,
    linger_ms=1000,
)


class Waiting:
    """Deadlines, and the time: attended as it passes, and not when the process is stopped."""

    def __init__(self) -> None:
        self._now_s = 100.0
        self._clock = RunningClock(lambda: self._now_s)
        self.deadlines = Deadlines(LIMITS, self._clock)

    @property
    def now_s(self) -> float:
        """Attended."""
        return self._now_s - self._clock.suspended_s

    @now_s.setter
    def now_s(self, until_s: float) -> None:
        until_s += self._clock.suspended_s
        while self._now_s + 1 < until_s:
            self._now_s += 1
            self._clock.now_s()
        self._now_s = until_s
        self._clock.now_s()

    def stop(self, time_s: float) -> None:
        self._now_s += time_s

    @property
    def left_s(self) -> float:
        return self.deadlines.at_s - self.now_s

    def verdict(self, buffered_bytes: int = 0) -> Verdict:
        """At the deadline, and not a moment before it."""
        at_s = self.deadlines.at_s
        assert self.now_s <= at_s < math.inf
        self.now_s = math.nextafter(at_s, 0)
        assert self.deadlines.verdict(buffered_bytes) is Verdict.NOT_YET
        self.now_s = at_s
        return self.deadlines.verdict(buffered_bytes)


def test_nothing_is_awaited() -> None:
    waiting = Waiting()
    assert waiting.deadlines.at_s == math.inf
    waiting.deadlines.wait(Awaited.REQUEST)
    waiting.deadlines.wait(Awaited.NOTHING)
    assert waiting.deadlines.at_s == math.inf
    waiting.now_s = 1000
    assert waiting.deadlines.verdict(0) is Verdict.NOT_YET


@pytest.mark.parametrize(
    ("awaited", "time_s", "verdict"),
    [
        (Awaited.FIRST_REQUEST, 10, Verdict.CUT),
        (Awaited.REQUEST, 75, Verdict.CUT),
        (Awaited.REST_OF_HEAD, 10, Verdict.REFUSE_HEAD),
        (Awaited.REST_OF_BODY, 30, Verdict.REFUSE_BODY),
        (Awaited.READER, 1, Verdict.CLOSE),
        (Awaited.END, 1, Verdict.CLOSE),
    ],
)
def test_each_has_its_time_and_its_end(awaited: Awaited, time_s: int, verdict: Verdict) -> None:
    waiting = Waiting()
    waiting.deadlines.wait(awaited)
    assert waiting.left_s == time_s
    assert waiting.verdict() is verdict


@pytest.mark.parametrize(
    ("awaited", "prolonged"),
    [
        (Awaited.FIRST_REQUEST, False),
        (Awaited.REQUEST, False),  # a blank line is none
        (Awaited.REST_OF_BODY, True),
        (Awaited.REST_OF_HEAD, False),
        (Awaited.READER, False),
        (Awaited.END, False),
    ],
)
def test_what_comes_prolongs_some_of_them(awaited: Awaited, prolonged: bool) -> None:
    waiting = Waiting()
    waiting.deadlines.wait(awaited)
    before_s = waiting.deadlines.at_s
    waiting.now_s += 0.5
    waiting.deadlines.wait(awaited, received_body_bytes=500)
    assert waiting.deadlines.at_s == before_s + 0.5 * prolonged
    waiting.deadlines.wait(Awaited.NOTHING)
    waiting.deadlines.wait(awaited, received_body_bytes=500)
    assert waiting.deadlines.at_s == before_s + 0.5, "it begins anew once something else was awaited"


def test_the_time_of_a_body_is_used_up_by_a_trickle_and_is_whole_for_the_next() -> None:
    waiting = Waiting()
    waiting.deadlines.begin_body()
    came_bytes = 0
    waiting.deadlines.wait(Awaited.REST_OF_BODY)
    while waiting.left_s == 30:
        waiting.now_s += 20
        came_bytes += 5000
        waiting.deadlines.wait(Awaited.REST_OF_BODY, came_bytes)
    assert waiting.left_s == 60 - 3 * 20 + 3 * 5
    assert waiting.verdict() is Verdict.REFUSE_BODY
    waiting.deadlines.wait(Awaited.REQUEST)
    waiting.deadlines.begin_body()
    waiting.deadlines.wait(Awaited.REST_OF_BODY)
    assert waiting.left_s == 30


def test_the_body_of_a_request_that_came_with_the_end_of_another_body_has_its_whole_time() -> None:
    waiting = Waiting()
    waiting.deadlines.begin_body()
    waiting.deadlines.wait(Awaited.REST_OF_BODY)
    waiting.now_s += 29
    waiting.deadlines.begin_body()
    waiting.deadlines.wait(Awaited.REST_OF_BODY)
    assert waiting.left_s == 30


def test_a_reader_that_stands_still_is_cut() -> None:
    waiting = Waiting()
    waiting.deadlines.begin_reader(1_000_000)
    began_s = waiting.now_s
    buffered_bytes = 1_000_000
    waiting.deadlines.wait(Awaited.READER)
    for _ in range(10):
        assert waiting.verdict(buffered_bytes) is Verdict.CHECK_AGAIN
        waiting.deadlines.wait(Awaited.READER)
    buffered_bytes -= 1  # any byte is progress
    progress_s = waiting.now_s + 1
    assert waiting.verdict(buffered_bytes) is Verdict.CHECK_AGAIN
    waiting.deadlines.wait(Awaited.READER)
    while (verdict := waiting.verdict(buffered_bytes)) is Verdict.CHECK_AGAIN:
        waiting.deadlines.wait(Awaited.READER)
    assert verdict is Verdict.CUT
    assert waiting.now_s == progress_s + 45
    assert progress_s == began_s + 11


def test_a_reader_may_not_take_for_ever() -> None:
    waiting = Waiting()
    waiting.deadlines.begin_reader(10_000)
    began_s, buffered_bytes = waiting.now_s, 10_000
    waiting.deadlines.wait(Awaited.READER)
    while (verdict := waiting.verdict(buffered_bytes)) is Verdict.CHECK_AGAIN:
        buffered_bytes -= 1
        waiting.deadlines.wait(Awaited.READER)
    assert verdict is Verdict.CUT
    assert waiting.now_s == began_s + 45 + 10_000 / 100


def test_who_has_taken_it_may_take_its_time_for_the_next() -> None:
    waiting = Waiting()
    waiting.deadlines.begin_reader(10_000)
    waiting.deadlines.end_reader()
    waiting.now_s += 1_000
    waiting.deadlines.note_progress(500)
    waiting.deadlines.wait(Awaited.END)
    assert waiting.verdict(500) is Verdict.CHECK_AGAIN
    waiting.deadlines.wait(Awaited.END)
    assert waiting.verdict(0) is Verdict.CLOSE


def test_blank_lines_are_no_first_request() -> None:
    """The rest of a request is awaited like anything else between two of them."""
    waiting = Waiting()
    waiting.deadlines.wait(Awaited.FIRST_REQUEST)
    waiting.now_s += 9
    waiting.deadlines.wait(Awaited.REQUEST)
    assert waiting.left_s == 1
    waiting.deadlines.wait(Awaited.NOTHING)
    waiting.deadlines.wait(Awaited.REQUEST)
    assert waiting.left_s == 75


def test_the_time_of_a_body_is_used_up_however_often_it_is_not_awaited() -> None:
    """More of the body is here than the app has taken: bytes give time back once, and the wait has cost some."""
    waiting = Waiting()
    waiting.deadlines.begin_body()
    waiting.deadlines.wait(Awaited.REST_OF_BODY)
    came_bytes, began_s = 0, waiting.now_s
    while waiting.left_s == 30:
        assert came_bytes < 1_000_000, "it has no end"
        waiting.now_s += 29
        came_bytes += 10_000
        waiting.deadlines.wait(Awaited.NOTHING, came_bytes)
        waiting.now_s += 100  # this is ours
        waiting.deadlines.wait(Awaited.REST_OF_BODY, came_bytes)
    assert waiting.left_s == 60 - 2 * 29 + 2 * 10
    assert waiting.now_s - began_s == 2 * 129


@pytest.mark.parametrize("awaited", list(Awaited)[1:])
def test_a_stop_is_nobodys_time(awaited: Awaited) -> None:
    """The timer is long overdue then; what came meanwhile is read before it is over."""
    waiting = Waiting()
    waiting.deadlines.begin_reader(1_000_000)
    waiting.deadlines.begin_body()
    waiting.deadlines.wait(awaited)
    waiting.now_s += 0.5
    left_s = waiting.left_s
    waiting.stop(3600)
    assert waiting.deadlines.verdict(1_000_000) is Verdict.NOT_YET
    assert waiting.left_s == left_s
    waiting.now_s += left_s + 0.001
    assert waiting.deadlines.verdict(1_000_000) is not Verdict.NOT_YET


def test_a_reader_that_took_everything_during_a_stop() -> None:
    waiting = Waiting()
    waiting.deadlines.begin_reader(1000)
    waiting.deadlines.wait(Awaited.READER)
    waiting.stop(3600)
    for buffered_bytes, verdict in ((1000, Verdict.CHECK_AGAIN), (0, Verdict.CLOSE)):
        waiting.deadlines.wait(Awaited.READER)
        assert waiting.deadlines.verdict(buffered_bytes) is Verdict.NOT_YET
        waiting.now_s += 1.001
        assert waiting.deadlines.verdict(buffered_bytes) is verdict


def test_a_stop_in_the_midst_of_a_body_costs_it_nothing() -> None:
    """The same holds when the next piece is read before any timer fires."""
    waiting = Waiting()
    waiting.deadlines.begin_body()
    waiting.deadlines.wait(Awaited.REST_OF_BODY)
    for n in range(10):
        waiting.stop(50)
        waiting.deadlines.wait(Awaited.REST_OF_BODY, n)
        assert waiting.left_s == 30
