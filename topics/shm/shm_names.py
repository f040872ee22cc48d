"""Names of the shared-memory objects of one service, derived from its data directory.

Names of two services never collide: they contain a hash of the data directory's device and inode. A killed service
leaves its objects behind; the next holder of the data directory's lock may unlink them all.
"""

from __future__ import annotations

import os
import shutil

import xxhash

SHM_ROOT = "/dev/shm"


def identity(data_dir: str) -> str:
    """Return 16 hex digits that identify this data directory on this machine."""
    status = os.stat(data_dir)
    return xxhash.xxh3_64_hexdigest(f"{status.st_dev}:{status.st_ino}".encode())


def shm_name(identity: str, kind: str, *parts: int) -> str:
    """Return the POSIX name of one object, for shm_open."""
    return "/" + "-".join(["topics", identity, kind, *map(str, parts)])


def ram_dir(identity: str) -> str:
    """Return the directory of the logs of `ephemeral` topics."""
    return f"{SHM_ROOT}/topics-{identity}-ram"


def objects(identity: str) -> list[str]:
    """Return the file names in SHM_ROOT that belong to this identity."""
    prefix = f"topics-{identity}-"
    return sorted(name for name in os.listdir(SHM_ROOT) if name.startswith(prefix))


def unlink_all(identity: str) -> list[str]:
    """Remove all objects of this identity and return their names. The caller holds the data directory's lock."""
    removed = objects(identity)
    for name in removed:
        path = f"{SHM_ROOT}/{name}"
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    return removed
