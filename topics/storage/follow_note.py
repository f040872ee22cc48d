"""The note of a data directory that follows another service: it names the archive that it copies, and how far it got.

    <data dir>/meta/following.json

A directory without the note belongs to a service of its own. The note stays when the service is promoted, so that a
unit file with `--follow` stays valid.
"""

from __future__ import annotations

from typing import Final

import msgspec

from topics.storage.archive_objects import LogEnd
from topics.storage.filesystem import FileSystem
from topics.storage.notes import VERSION, read_note_file, write_note_file

NAME: Final = "following.json"


class FollowNote(msgspec.Struct, frozen=True):
    """The state of a follower's directory.

    `piece` is the last moment of the archive that the directory has, 0 before its first one. `ends` are the ends of its
    logs, by shard. The shards in `told` got their last bytes from the leader, so the archive may lack them; `archived`
    are the ends in `piece`. `base` is the base whose snapshot the directory has. `leader_url` is the leader's address,
    "" if it tells none.

    With `fence_id` this service closes the leader's generation. `promoted_id` is the same id, noted once the directory
    has everything of that generation. Once it `is_promoted`, the directory is a service of its own with that id.
    """

    url: str
    generation: int = 0
    base: int = 0
    piece: int = 0
    ends: list[LogEnd] = []
    archived: list[LogEnd] = []
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
