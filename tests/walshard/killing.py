"""SIGKILL at the n-th line that a shard's modules execute: what it leaves behind is its files and the shared memory."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.walshard.rig import Rig

MODULES = (
    "/topics/walshard/",
    "/topics/shm/",
    "/topics/storage/wal.py",
    "/topics/storage/topic_frames.py",
    "/topics/core/pending.py",
    "/topics/core/topic.py",
)
NOT_REACHED = 3
"""Exit code of a check whose work had fewer lines."""


def at_every_line(tmp_path: Path, stride: int, lines_min: int, check: Callable[[int, str], bool]) -> None:
    """Run `check(n, data_dir)` in a process of its own for every `stride`th line (TOPICS_KILL_STRIDE), from a random
    one on, until it returns False: its work ended before line n.
    """
    stride = int(os.environ.get("TOPICS_KILL_STRIDE", stride))
    n, ending = 1 + random.Random(stride).randrange(stride), 0
    while ending == 0:
        data_dir = str(tmp_path / str(n))
        ending = in_a_process(lambda: None if check(n, data_dir) else os._exit(NOT_REACHED))
        assert ending in (0, NOT_REACHED), f"killed at line event {n}"
        shutil.rmtree(data_dir)
        n += stride
    assert n > lines_min, f"only {n} line events: has the work shrunk?"


def is_killed_at_line(n: int, work: Callable[[], None], modules: tuple[str, ...] = MODULES) -> bool:
    """Do the work in a process that is killed at the n-th line of these modules. False: it had fewer."""
    ending = in_a_process(lambda: kill_at_line(n, work, modules))
    assert ending in (0, -signal.SIGKILL)
    return ending != 0


def kill_at_line(n: int, work: Callable[[], None], modules: tuple[str, ...]) -> None:
    """Run `work`, which ends this process with SIGKILL at the n-th line of these modules, if it gets that far."""
    left = n

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal left
        if event == "call" and not any(module in frame.f_code.co_filename for module in modules):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work()
    sys.settrace(None)


def in_a_process(work: Callable[[], None]) -> int:
    """Return how the process that did the work ended: 0, 1 if it raised, or minus the signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve(rig: Rig) -> None:
    while rig.step():
        pass
