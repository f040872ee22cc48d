"""Counts what an object keeps in memory, for tests that something leaves nothing behind."""

from __future__ import annotations

import gc
from collections import deque
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType

_CONTAINERS = (list, dict, set, deque)
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, FrameType)


def items_kept(owner: object, *besides: object) -> int:
    """Count the items of all containers that can be reached from `owner`, except through the objects `besides`."""
    seen = {id(one) for one in besides}
    waiting, count = [owner], 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        seen.add(id(one))
        count += len(one) if isinstance(one, _CONTAINERS) else 0
        waiting += gc.get_referents(one)
    return count
