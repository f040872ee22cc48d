"""The cost of a call, told without a clock."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any


def lines_of(action: Any) -> int:
    """Lines of ours that an action executes: its cost, on any machine. Garbage of former tests, whose finalizers may be
    ours, too, is not collected meanwhile.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal lines
        # Not, for instance, those of a library.
        if not (frame.f_globals.get("__package__") or "").startswith("topics."):
            return None
        lines += event == "line"
        return trace

    before, collecting = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return lines
