"""Names of the shared-memory objects of one service, derived from its data directory.

Two services never meet: the name holds device and inode of the data dir. A service that was killed
leaves objects behind; whoever holds the data-dir lock next may unlink them all.
"""

from __future__ import annotations

import os
import shutil

import xxhash

SHM_ROOT = "/dev/shm"


def identity(data_dir: str) -> str:
    """16 hex digits that stand for this data directory on this machine."""
    status = os.stat(data_dir)
    return xxhash.xxh3_64_hexdigest(f"{status.st_dev}:{status.st_ino}".encode())


def shm_name(identity: str, kind: str, *parts: int) -> str:
    """POSIX name of one object, as shm_open takes it."""
    return "/" + "-".join(["topics", identity, kind, *map(str, parts)])


def ram_dir(identity: str) -> str:
    """The directory that holds the logs of `ephemeral` topics."""
    return f"{SHM_ROOT}/topics-{identity}-ram"


def objects(identity: str) -> list[str]:
    """File names below SHM_ROOT that belong to this identity."""
    prefix = f"topics-{identity}-"
    return sorted(name for name in os.listdir(SHM_ROOT) if name.startswith(prefix))


def unlink_all(identity: str) -> list[str]:
    """Removes everything of this identity; the caller holds the data-dir lock. Returns what was removed."""
    removed = objects(identity)
    for name in removed:
        path = f"{SHM_ROOT}/{name}"
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    return removed
