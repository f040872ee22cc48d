"""The note of a data directory that follows another service: of which archive it is a copy, and up to where.

    <data dir>/meta/following.json

A directory without one is a service of its own. The note stays when the service is promoted, so that a unit file with
`--follow` goes on to be right.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics.storage.archive_objects import LogEnd
from topics.storage.filesystem import FileSystem
from topics.storage.notes import VERSION, read_note_file, write_note_file

NAME: Final = "following.json"


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


def read_note(fs: FileSystem, data_dir: str) -> FollowNote | None:
    """Return the note, None for a service of its own. Raise OSError, also for a damaged one."""
    return read_note_file(fs, data_dir, NAME, FollowNote, "empty the directory to follow from the beginning")


def write_note(fs: FileSystem, data_dir: str, note: FollowNote) -> None:
    """Write the note durably. Raise OSError."""
    write_note_file(fs, data_dir, NAME, msgspec.json.encode(note))
