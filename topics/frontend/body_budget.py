"""What the bodies of requests hold in the memory of one frontend, all together; short ones are not counted.

    read_body ──▶ hold(what is to come) ──▶ … unpacked, decoded ──▶ laid out, answered: the request's task ends ──▶ free
                     │ no room: it waits in line               └─▶ let_go: little of it is kept ──▶ free
                     └─▶ 429 throttled

A body waits for room before it is read on, so that TCP holds up its client. Of two that have a part each and wait for
the rest one is refused in the end: room for the other. Bodies of up to a MiB have a budget of their own: four clients
that send theirs slowly fill that of the long ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from topics.core.errors import TopicsError
from topics.frontend import limits
from topics.frontend.budget import Budget, Hold

COUNTED_FROM_BYTES: Final = 64 << 10
"""Shorter bodies are not counted: a connection, or stream of HTTP/2, has one of those at most."""
LONG_BYTES: Final = 1 << 20
"""Longer bodies have the second budget."""

medium_bodies: Final = Budget(limits.MEDIUM_BODIES)
long_bodies: Final = Budget(limits.LONG_BODIES)
"""Both are this process's: there is one event loop, and all routes share them."""
_holds: Final[dict[asyncio.Task[Any], dict[Budget, Hold]]] = {}
"""What each request holds."""


def allow_bodies_of(max_body_bytes: int) -> None:
    """Make room for four of the longest bodies there may be. To be called at the start."""
    long_bodies.most_bytes = max(long_bodies.most_bytes, 4 * max_body_bytes)


async def hold(budget: Budget, size_bytes: int) -> None:
    """Count so much more until the current task ends or lets go. Raises `throttled` when no room comes in time."""
    task = asyncio.current_task()
    assert task is not None
    if task not in _holds:
        task.add_done_callback(_free)
    mine = _holds.setdefault(task, {}).setdefault(budget, Hold(budget))
    try:
        await mine.wait_for(size_bytes, budget.limit.wait_s)
    except TimeoutError:
        raise no_room(budget) from None


def let_go() -> None:
    """The current task keeps next to nothing of what it read."""
    task = asyncio.current_task()
    assert task is not None
    _free(task)


def _free(task: asyncio.Task[Any]) -> None:
    for one in _holds.pop(task, {}).values():
        one.close()


class Share:
    """What a message of a WebSocket that comes in pieces holds of both budgets, until nobody has it any more, nor the
    message that it is kept with.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._medium = Hold(medium_bodies)
        self._long = Hold(long_bodies)

    def reach(self, size_bytes: int) -> bool:
        """It is so long now; False: there is no room for that."""
        while self._medium.held_bytes + self._long.held_bytes < size_bytes:
            if self._medium.held_bytes < LONG_BYTES:
                has_room = self._medium.grow(COUNTED_FROM_BYTES)
            else:
                has_room = self._long.grow(LONG_BYTES)
            if not has_room:
                return False
        return True

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            # Not here: this may be any moment of any thread.
            self._loop.call_soon_threadsafe(self._medium.close)
            self._loop.call_soon_threadsafe(self._long.close)


def no_room(budget: Budget) -> TopicsError:
    """429: the budget is used up."""
    return budget.refused(
        f"the bodies of requests hold all of the {budget.most_bytes} bytes that they may; send it again later"
    )
