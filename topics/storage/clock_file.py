"""The time that a service trusted last, so that the next one can tell a clock that was put forward from passed time.

The compactor replaces `meta/clock.json` as a whole (docs/storage-format.md, "Clock"). The file is no part of the data:
a start without it only has nothing to compare the clock with.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from topics.core.clock import TrustedTime
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.notes import VERSION, note_path, read_note_file, write_note_file

_Ms = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _Note(msgspec.Struct):
    version: int
    boot_id: str
    wall_ms: _Ms
    monotonic_ms: _Ms


def clock_path(data_dir: str) -> str:
    return note_path(data_dir, layout.CLOCK_NAME)


def write_clock(fs: FileSystem, data_dir: str, trusted: TrustedTime) -> None:
    """Replace the file durably. Raise OSError; the former one is as it was then."""
    write_note_file(fs, data_dir, layout.CLOCK_NAME, msgspec.json.encode(_Note(VERSION, *trusted)))


def read_clock(fs: FileSystem, data_dir: str) -> TrustedTime | None:
    """Return the time in the file, None without a file. Raise OSError, also if it is damaged."""
    note = read_note_file(fs, data_dir, layout.CLOCK_NAME, _Note, "nothing can be compared with it")
    return None if note is None else TrustedTime(note.boot_id, note.wall_ms, note.monotonic_ms)
