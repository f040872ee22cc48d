"""Tests of what lasts for a moment only. Any process may be stopped for seconds at any point of them, the test's own
as well: what came too late to prove anything is done again, with a topic of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from tests.harness import poll

ATTEMPTS_DEADLINE_S = 60.0


def now_ms() -> int:
    """Epoch, by the clock that the service's processes read."""
    return time.time_ns() // 1_000_000


def until_ms(epoch_ms: int) -> None:
    """Lets this moment pass: what a lease or a ttl is about is time."""
    while (left_ms := epoch_ms - now_ms()) >= 0:
        time.sleep(left_ms / 1000 + 0.001)


def undisturbed(what: str, topic: str, attempt: Callable[[str], bool]) -> None:
    """`attempt(name)`, with a name below `topic` that it alone has, until it returns True. False says that it was too
    late, or that somebody else came in between; what is wrong although it was in time, it asserts.
    """
    numbers = itertools.count(1)
    poll(what, lambda: attempt(f"{topic}.{next(numbers)}"), ATTEMPTS_DEADLINE_S)
