"""What the machine must give the service, and what is said when it does not."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from typing import Final

from topics.setting_values import MIB
from topics.settings import Settings
from topics.shm.instance import SharedMemory
from topics.shm.names import SHM_ROOT

OPEN_FILES_MIN: Final = 1024
"""Below that a frontend could not even hold its rings, logs and a few hundred connections."""

StatVfs = Callable[[str], os.statvfs_result]


def shared_memory_shortage(settings: Settings, statvfs: StatVfs = os.statvfs) -> str | None:
    """Why /dev/shm is too small for these settings, None when it is not."""
    needed = SharedMemory.needed_bytes(settings.wal_shards, settings.frontends, settings.ring_bytes)
    figures = statvfs(SHM_ROOT)
    free = figures.f_bavail * figures.f_frsize
    if free >= needed:
        return None
    return (
        f"{SHM_ROOT} has {free / MIB:.1f} MiB free and {needed / MIB:.1f} MiB are needed with"
        f" TOPICS_WAL_SHARDS={settings.wal_shards}, TOPICS_FRONTENDS={settings.frontends} and"
        f" TOPICS_RING_BYTES={settings.ring_bytes}; lower one of them or make it larger (mount -o remount,size=…"
        f" {SHM_ROOT}, or --shm-size for a container)"
    )


def raise_open_files() -> int:
    """Takes all open files this process may have, for itself and its children; returns their number."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def open_files_shortage(most: int) -> str | None:
    """Why `most` open files are too few, None when they are not."""
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES_MIN:
        return None
    return (
        f"this process may open {most} files and {OPEN_FILES_MIN} are needed; raise the limit (ulimit -n, LimitNOFILE=)"
    )
