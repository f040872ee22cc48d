"""The note of a data directory that follows another service: of which archive it is a copy, and up to where.

    <data dir>/meta/following.json

A directory without one is a service of its own. The note stays when the service is promoted, so that a unit file with
`--follow` goes on to be right.
"""

from __future__ import annotations

import errno
import os
from typing import Final

import msgspec

from topics.storage import layout
from topics.storage.archive_objects import LogEnd
from topics.storage.filesystem import FileSystem, make_dirs, read_all, replace_file

NAME: Final = "following.json"
VERSION: Final = 1


class FollowNote(msgspec.Struct, frozen=True):
    """`piece` is the last moment of the archive that the directory has, 0 before its first one. `ends` are those of its
    logs, by shard; the leader has `told` those of some shards, which the archive may not have yet. `base` is the base
    whose snapshot it has. `leader_url` is where the leader answers, "" if it does not say. `fence_id` is the id with
    which this service closes, or has closed, the leader's generation. With `promoted_id`, the same id, it has
    everything from there; once it `is_promoted` the directory is a service of its own, of that id.
    """

    url: str
    generation: int = 0
    base: int = 0
    piece: int = 0
    ends: list[LogEnd] = []
    told: list[int] = []
    taken_ms: int = 0
    has_end: bool = True
    leader_url: str = ""
    fence_id: str = ""
    promoted_id: str = ""
    is_promoted: bool = False
    version: int = VERSION

    @property
    def leads(self) -> bool:
        """True if the service is promoted, or about to be."""
        return bool(self.promoted_id)


def _path(data_dir: str) -> str:
    return os.path.join(layout.meta_dir(data_dir), NAME)


def read_note(fs: FileSystem, data_dir: str) -> FollowNote | None:
    """Return the note, None for a service of its own. Raise OSError, also for a damaged one."""
    path = _path(data_dir)
    if not fs.exists(path):
        return None
    try:
        note = msgspec.json.decode(read_all(fs, path), type=FollowNote)
        if note.version != VERSION:
            raise ValueError(f"version {note.version} is unknown")
    except (msgspec.DecodeError, ValueError) as error:
        way_out = "empty the directory to follow from the beginning"
        raise OSError(errno.EIO, f"is damaged ({error}): {way_out}", path) from error
    return note


def write_note(fs: FileSystem, data_dir: str, note: FollowNote) -> None:
    """Write the note durably. Raise OSError."""
    make_dirs(fs, layout.meta_dir(data_dir))
    replace_file(fs, _path(data_dir), msgspec.json.encode(note))
