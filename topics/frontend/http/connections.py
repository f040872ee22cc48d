"""The connections of one process: counted, drained at a stop, and cut at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from topics.core.clock import Clock, SystemClock
from topics.frontend.http.kept_answers import KeptAnswers
from topics.frontend.http.unadmitted_input import UnadmittedInput
from topics.frontend.http.vanished import TcpConnection
from topics.shm.quotas import Quota


class OpenConnection(TcpConnection, Protocol):
    """A connection of HTTP/1.1."""

    def drain(self) -> None:
        """Close if idle; else the running request is the last one."""

    def close_now(self) -> None:
        """Close without waiting for the client."""


class Connections:
    """Every HTTP/1.1 connection of this process. It counts them, drains them, and knows when all are closed.

    `places` caps the connections of the whole service, over all protocols. `kept` bounds what clients of all protocols
    have not read, `unadmitted` what they send before a key is known.
    """

    def __init__(self, places: Quota | None = None, clock: Clock | None = None) -> None:
        self.places = places
        self.draining = False
        self.requests = 0
        self.open: set[OpenConnection] = set()
        self.turned_away = 0
        self.kept = KeptAnswers(clock or SystemClock())
        self.unadmitted = UnadmittedInput()
        self.tasks: set[asyncio.Task[None]] = set()
        """App calls of HTTP/1.1, and connections that Hypercorn serves."""
        self._changed = asyncio.Event()

    def add(self, connection: OpenConnection) -> bool:
        """Count an accepted connection; False if it is one too many, and not counted."""
        if self.places is not None and not self.places.claim():
            return False
        self.open.add(connection)
        return True

    def release_place(self) -> None:
        """Count a closed connection no longer, whichever protocol it spoke."""
        if self.places is not None:
            self.places.release()

    def begin_drain(self) -> None:
        """Close idle connections. Busy ones finish their request with `connection: close`. Idempotent."""
        self.draining = True
        for connection in list(self.open):
            connection.drain()

    async def wait_closed(self) -> None:
        """Wait until no connection and no request is left. Does not begin a drain."""
        while self.open or self.tasks:
            self._changed.clear()
            await self._changed.wait()

    async def abort(self) -> None:
        """Cut what is left. Requests that are not answered yet get `503 shutting_down`."""
        if tasks := list(self.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)
        for connection in list(self.open):
            connection.close_now()

    def forget(self, connection: OpenConnection, handed_over: bool = False) -> None:
        """Forget a connection that is closed, or `handed_over`: then it keeps its place. Idempotent."""
        if connection in self.open:
            self.open.remove(connection)
            if not handed_over:
                self.release_place()
        self._changed.set()

    def start_task(self, run: Callable[[], Awaitable[None]]) -> None:
        """Run `run()` as one of `tasks`, until which a drain waits."""
        self.tasks.add(asyncio.get_running_loop().create_task(self._run(run)))

    async def _run(self, run: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await run()
        finally:
            self.tasks.discard(task)
            if self.draining:
                self._changed.set()
