"""The id by which a data directory is known in a bucket: the owner of a prefix (`bucket_store.py`).

It is the id of one of its logs when it was first needed. `meta/service-id` keeps it: a copy of the directory on another
machine is the same service, also after another shard count made new logs.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Final

from topics.storage import layout
from topics.storage.filesystem import FileSystem, make_dirs, read_all, replace_file
from topics.storage.snapshot import present_log_ids

NAME: Final = "service-id"
_ID: Final = re.compile(rb"[0-9a-f]{16}")


def known_id(fs: FileSystem, data_dir: str) -> str | None:
    """Return the id, None for a directory without one and without a log. Raise OSError, also for a damaged file."""
    path = os.path.join(layout.meta_dir(data_dir), NAME)
    if fs.exists(path):
        found = read_all(fs, path)
        if not _ID.fullmatch(found):
            raise OSError(errno.EIO, "is no id of a service: remove it, and the next start makes it again", path)
        return found.decode()
    ids = present_log_ids(fs, data_dir)
    return f"{min(ids):016x}" if ids else None


def keep_id(fs: FileSystem, data_dir: str) -> str:
    """Return the id after it was written durably. Raise OSError."""
    found = known_id(fs, data_dir)
    if found is None:
        raise OSError(errno.ENOENT, "has no log that can be read", data_dir)
    path = os.path.join(layout.meta_dir(data_dir), NAME)
    if not fs.exists(path):
        make_dirs(fs, layout.meta_dir(data_dir))
        replace_file(fs, path, found.encode())
    return found


def describe(service_id: str, data_dir: str) -> str:
    """Return the id with the place of the directory, for messages."""
    return f"{service_id} ({os.uname().nodename}:{os.path.abspath(data_dir)})"
