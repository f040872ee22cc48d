"""Other processes, asked by pid."""

from __future__ import annotations

import psutil


def is_running(pid: int) -> bool:
    """False for a pid that is gone, and for a zombie, which only waits for its parent to take notice."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
