"""A cap over several processes: never exceeded, whatever happens at once (docs/decisions/0006-caps.md)."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable

import pytest

from topics.shm.control import Cell
from topics.shm.memory import SharedObject, fence
from topics.shm.quotas import Quota
from topics.shm.shm_names import shm_name

PROCESSES = 3
GRANTS = 1000


class Watched(Cell):
    """A word that lets a test act just before it is loaded."""

    before_get: Callable[[], None] | None = None

    def get(self, field: str) -> int:
        act, self.before_get = self.before_get, None
        if act is not None:
            act()
        return super().get(field)


def cells(count: int) -> list[Watched]:
    return [Watched(memoryview(array("Q", [0])), ("held",)) for _ in range(count)]


def caps(most: int, of: list[Watched]) -> list[Quota]:
    return [Quota("topics", most, "held", own, of) for own in of]


def words(of: list[Watched]) -> list[int]:
    return [cell.read()["held"] for cell in of]


def test_grants_up_to_the_cap_and_takes_back() -> None:
    own = cells(3)
    first, second, third = caps(5, own)
    assert first.claim(2)
    assert second.claim(3)
    assert not third.claim()
    assert not first.claim()
    assert words(own) == [2, 3, 0]
    second.release()
    assert not third.claim(2)
    assert third.claim()
    assert words(own) == [2, 2, 1]


def test_zero_is_no_cap_and_counts_nothing() -> None:
    own = cells(2)
    cap = caps(0, own)[0]
    assert all(cap.claim(10**12) for _ in range(10))
    cap.release(10**12)
    assert words(own) == [0, 0]


def test_the_refusal_names_limit_and_maximum() -> None:
    error = caps(7, cells(1))[0].reached()
    assert (error.code, error.detail) == ("throttled", {"limit": "max_topics", "max": 7})
    assert "TOPICS_MAX_TOPICS" in error.message


@pytest.mark.parametrize("at", [0, 1])
def test_two_claims_for_the_last_place(at: int) -> None:
    """The second comes as a whole while the first adds up, just before it loads word `at`: one of them gets it."""
    own = cells(2)
    first, second = caps(1, own)
    granted = []
    own[at].before_get = lambda: granted.append(second.claim())
    granted.append(first.claim())
    assert granted == [False, True]
    assert words(own) == [1, 0]


def test_two_claims_that_see_each_other_are_both_refused_and_leave_the_place_free() -> None:
    own = cells(2)
    first, second = caps(1, own)

    def claimed_and_not_taken_back_yet() -> None:
        own[1].add("held")

    own[0].before_get = claimed_and_not_taken_back_yet
    assert not first.claim()
    own[1].add("held", -1)
    assert words(own) == [0, 0]
    assert second.claim()


def test_more_than_the_cap_may_be_there_already() -> None:
    own = cells(2)
    cap = caps(5, own)[0]
    own[1].set("held", 9)
    assert not cap.claim()
    own[1].set("held", 4)
    assert cap.claim()


def test_processes_that_compete_never_exceed_it(identity: str) -> None:
    """A cap of one is a lock: a process with a grant says so in a word of its own and looks whether another has one."""
    shared = SharedObject.create(shm_name(identity, "compete"), 4096)
    own = [Cell(shared.words[8 * n : 8 * n + 3], ("held", "inside", "grants")) for n in range(PROCESSES)]
    pids = []
    for index in range(PROCESSES):
        pid = os.fork()
        if pid == 0:
            os._exit(_compete(own, index))
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * PROCESSES, "two processes had the only place at once"
    assert [cell.get("held") for cell in own] == [0] * PROCESSES
    assert [cell.get("grants") for cell in own] == [GRANTS] * PROCESSES


def _compete(every: list[Cell], index: int) -> int:
    own = every[index]
    cap = Quota("topics", 1, "held", own, every)
    while own.get("grants") < GRANTS:
        if cap.claim():
            own.set("inside", 1)
            fence()
            inside = sum([cell.get("inside") for cell in every])
            own.set("inside", 0)
            if inside != 1:
                return 1
            own.add("grants")
            fence()
            cap.release()
    return 0
