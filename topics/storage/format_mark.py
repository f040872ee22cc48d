"""The format of a data directory as a whole, so that a release recognizes data that it must not use as they are.

    meta/format.json, made at the first start, before any shard runs:

    {"version": 2}

Version 2: the copies that routers make are in the log of their dest before a reader sees them. Data without the mark
are new, or of release 0.1.0 (`upgrade.py`).
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from topics.storage import layout
from topics.storage.filesystem import FileSystem, make_dirs, read_all, replace_file
from topics.storage.logfile import RefusedLog

VERSION: Final = 2


class _Mark(msgspec.Struct):
    version: int


def mark_path(data_dir: str) -> str:
    return os.path.join(layout.meta_dir(data_dir), layout.FORMAT_NAME)


def write_mark(fs: FileSystem, data_dir: str) -> None:
    """Make the mark of this release durably. Raise OSError."""
    make_dirs(fs, layout.meta_dir(data_dir))
    replace_file(fs, mark_path(data_dir), msgspec.json.encode(_Mark(VERSION)))


def has_mark(fs: FileSystem, data_dir: str) -> bool:
    """True if this release may use the data as they are; False if they have no mark yet. Raise RefusedLog if this
    release must never use them, OSError.
    """
    path = mark_path(data_dir)
    if not fs.exists(path):
        return False
    try:
        version = msgspec.json.decode(read_all(fs, path), type=_Mark).version
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedLog(path, f"{path}: cannot be decoded: {error}; restore it from a copy") from error
    if version != VERSION:
        raise RefusedLog(
            path,
            f"{path}: format version {version} is unknown (this release knows version {VERSION}); start the release "
            f"that wrote it, or point TOPICS_DATA_DIR elsewhere",
        )
    return True
