"""All HTTP/1.1 connections of one process: counted, drained, waited for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from topics.core.clock import Clock, SystemClock
from topics.frontend.http.http1_wire import error_answer
from topics.frontend.http.kept_answers import KeptAnswers
from topics.shm.cap import Cap

if TYPE_CHECKING:
    from topics.frontend.http.http1 import Http1Protocol


TURNED_AWAY_MAX: Final = 1024
"""Connections of one process that are told that they are too many and may take their time to read it."""


class Connections:
    """Every HTTP/1.1 connection of this process: counts them, drains them, says when all are gone.

    `places` is how many connections the whole service may have, those of other protocols included; `kept` counts what
    the clients of all protocols have not taken.
    """

    def __init__(self, places: Cap | None = None, clock: Clock | None = None) -> None:
        self.places = places
        self.draining = False
        self.requests = 0
        self.open: set[Http1Protocol] = set()
        self.turned_away = 0
        self.kept = KeptAnswers(clock or SystemClock())
        self.tasks: set[asyncio.Task[None]] = set()
        """Running app calls; the loop itself keeps only weak references."""
        self._changed = asyncio.Event()

    def add(self, connection: Http1Protocol) -> bool:
        """A connection was accepted; False: it is one too many, and not kept."""
        if self.places is not None and not self.places.claim():
            return False
        self.open.add(connection)
        return True

    def turn_away(self) -> tuple[bytes, bool]:
        """(What one too many is told, whether it may stay until it has read that); if so, `turned_away` counts it."""
        assert self.places is not None
        reached = self.places.reached()
        self.turned_away += (stays := self.turned_away < TURNED_AWAY_MAX)
        return error_answer(reached.code, reached.message, reached.detail), stays

    def begin_drain(self) -> None:
        """Close what is idle; what is busy finishes its request with `connection: close`. Can be repeated."""
        self.draining = True
        for connection in list(self.open):
            connection.drain()

    async def wait_closed(self) -> None:
        """Until no connection and no request is left. Starts no drain by itself and has no time limit."""
        while self.open or self.tasks:
            self._changed.clear()
            await self._changed.wait()

    async def abort(self) -> None:
        """Cut all that is left. Requests that are not yet answered get `503 shutting_down`."""
        if tasks := list(self.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)
        for connection in list(self.open):
            connection.close_now()

    def forget(self, connection: Http1Protocol, handed_over: bool = False) -> None:
        """The connection is closed, or `handed_over`: no longer ours, and keeps its place. Can be repeated."""
        if connection in self.open:
            self.open.remove(connection)
            if self.places is not None and not handed_over:
                self.places.release()
        self._changed.set()

    def task_done(self) -> None:
        """The current task, an app call, is at its end."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.discard(task)
        if self.draining:
            self._changed.set()
