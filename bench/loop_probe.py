"""A probe inside a frontend or a shard: how long its loop came to nothing else. `bench.loop_holds` puts it there.

In a frontend a timer of the event loop ticks each millisecond. What the loop's thread did between two ticks is one hold
or a few short ones, so a hold is known to about a millisecond. A shard has no event loop: there a hold is one call of a
step of its pipeline. Both are noted in CPU time, and by the clock, which others on the machine change more.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import uvloop

from topics.walshard.shard import Shard
from topics.walshard.upkeep import Upkeep

TICK_S: Final = 0.001
NOTED_US: Final = 3_000
LOOK_S: Final = 0.002
FRAMES_SHOWN: Final = 3
Steps = tuple[tuple[type, Callable[..., Any]], ...]
SHARD_STEPS: Final[Steps] = (
    (Shard, Shard.serve),
    (Shard, Shard.copy),
    (Shard, Shard.sync_in_background),
    (Shard, Shard.sweep),
    (Upkeep, Upkeep.idle),
)
"""The main loop of a shard calls these, each of which is here with its class."""


class Holds:
    """Writes a line for each hold of a thread into a file: its end on the monotonic clock in ns, CPU time and clock
    time in µs, and where the thread was in the middle of it.
    """

    def __init__(self, directory: str, role: str) -> None:
        path = f"{directory}/{role}-{os.getpid()}"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._thread = threading.get_ident()
        self._where = ""
        self._began_ns = self._cpu_ns = self._collecting_ns = 0
        gc.callbacks.append(self._note_collection)
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self) -> None:
        self._began_ns, self._cpu_ns = time.monotonic_ns(), time.thread_time_ns()

    def end(self) -> None:
        now_ns, cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        cpu_us, clock_us = (cpu_ns - self._cpu_ns) // 1000, (now_ns - self._began_ns) // 1000
        self._began_ns = 0
        where, self._where = self._where, ""
        if cpu_us >= NOTED_US or clock_us >= 2 * NOTED_US:
            os.write(self._descriptor, b"%d %d %d %s\n" % (now_ns, cpu_us, clock_us, where.encode()))

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        """Put a full collection of the garbage collector down to itself: it happens wherever something is made."""
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting_ns = time.thread_time_ns()
        elif (took_us := (time.thread_time_ns() - self._collecting_ns) // 1000) > NOTED_US:
            self._where = f"the garbage collector, generation {info['generation']}, {took_us / 1000:.1f} ms"

    def _look(self) -> None:
        """Look every now and then where a thread is that has been at one thing for long."""
        while True:
            time.sleep(LOOK_S)
            began_ns = self._began_ns
            if began_ns and time.monotonic_ns() - began_ns > NOTED_US * 1000 and not self._where:
                self._where = place(frame_of(self._thread))


class Probe:
    """The ticks of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, directory: str) -> None:
        self._loop = loop
        self._directory = directory
        # The first turn sets everything up and holds nobody up: it is over when the second timer ticks.
        loop.call_later(TICK_S, lambda: loop.call_later(TICK_S, self._begin))

    def _begin(self) -> None:
        self._holds = Holds(self._directory, "frontend")
        self._holds.begin()
        self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._holds.end()
        self._holds.begin()
        self._loop.call_later(TICK_S, self._tick)


def frame_of(thread: int) -> FrameType | None:
    """Return where a thread is. No garbage is collected meanwhile: the interpreter holds a lock over all threads, and
    before 3.12 a callback of the collector that lets another thread run ends in a deadlock with it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()


def place(frame: FrameType | None) -> str:
    """Return the innermost functions of a stack, outermost first."""
    found: list[str] = []
    while frame is not None and len(found) < FRAMES_SHOWN:
        code = frame.f_code
        name = os.path.basename(code.co_filename).removesuffix(".py")
        found.append(f"{name}.{code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " > ".join(reversed(found))


def watch_shards(directory: str, steps: Steps = SHARD_STEPS) -> None:
    """Have the steps of each shard timed that runs in this process or in those that it forks."""
    holds: list[Holds] = []

    def timed(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any) -> Any:
            if not holds:  # the shard's own process, which has just been forked
                holds.append(Holds(directory, "shard"))
            holds[0].begin()
            try:
                return step(*args)
            finally:
                holds[0].end()

        return run

    for owner, step in steps:
        setattr(owner, step.__name__, timed(step))


def install(directory: str) -> None:
    """Probe each event loop that is made from now on, and each shard, of this process and of those that it forks."""
    module: Any = uvloop
    make = module.new_event_loop

    def probed() -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = make()
        Probe(loop, directory)
        return loop

    module.new_event_loop = probed
    watch_shards(directory)
