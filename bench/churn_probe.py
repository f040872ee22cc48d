"""A probe inside a frontend: how much it has, and of what. `bench.churn` puts it there and asks it.

Unlike `bench.cycle_probe` it leaves the collector as it is, and counts what is in use.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import uvloop


class Count(NamedTuple):
    """The things that a process has: bytes that it shares with nobody, blocks that Python's allocator has handed out,
    and objects by kind, but those that refer to nothing.
    """

    own_bytes: int
    blocks: int
    kinds: dict[str, int]

    @classmethod
    def now(cls) -> Count:
        gc.collect()
        used = psutil.Process().memory_info()
        blocks = sys.getallocatedblocks()
        kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
        return cls(used.rss - used.shared, blocks, kinds)

    def since(self, before: Count, most: int = 12) -> dict[str, int]:
        """Return the kinds of which there are more than before, most first."""
        more = Counter(self.kinds) - Counter(before.kinds)
        return dict(more.most_common(most))


def install(directory: str) -> None:
    """Have each process with an event loop of uvloop, in this process or those that it forks, answer SIGUSR1 with a
    file in `directory`, whose name is its pid.
    """
    module: Any = uvloop
    make = module.new_event_loop

    def answer() -> None:
        path = Path(directory) / str(os.getpid())
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(Count.now()))
        partial.rename(path)

    def probed() -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = make()
        loop.call_soon(loop.add_signal_handler, signal.SIGUSR1, answer)
        return loop

    module.new_event_loop = probed
