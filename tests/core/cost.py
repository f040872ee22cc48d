"""What something costs, told without a clock."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


def lines_of(action: Any) -> int:
    """Lines of ours that an action executes: its cost, on any machine."""
    lines = 0

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal lines
        # Not, for instance, those of a callback of the garbage collector.
        if not (frame.f_globals.get("__package__") or "").startswith("topics."):
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines
