"""Notes in `<data dir>/meta`: small JSON files, each replaced as a whole, that say what the directory is."""

from __future__ import annotations

import errno
import os
from typing import Annotated, Final, Protocol, TypeVar

import msgspec

from topics.core.clock import TrustedTime
from topics.storage import layout
from topics.storage.filesystem import FileSystem, make_dirs, read_all, replace_file

VERSION: Final = 1
"""The version of all notes that `read_note_file` reads."""


class _VersionedNote(Protocol):
    @property
    def version(self) -> int: ...


_Note = TypeVar("_Note", bound=_VersionedNote)


def note_path(data_dir: str, name: str) -> str:
    return os.path.join(layout.meta_dir(data_dir), name)


def write_note_file(fs: FileSystem, data_dir: str, name: str, content: bytes) -> None:
    """Replace a note durably. Raise OSError; the former one is as it was then."""
    make_dirs(fs, layout.meta_dir(data_dir))
    replace_file(fs, note_path(data_dir, name), content)


def read_note_file(fs: FileSystem, data_dir: str, name: str, kind: type[_Note], way_out: str) -> _Note | None:
    """Return a note, None if there is none. Raise OSError, also for a damaged note: it must never count as none."""
    path = note_path(data_dir, name)
    try:
        note = msgspec.json.decode(read_all(fs, path), type=kind)
        if note.version != VERSION:
            raise ValueError(f"version {note.version} is unknown")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, ValueError) as error:
        raise OSError(errno.EIO, f"is damaged ({error}): {way_out}", path) from error
    return note


_Ms = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _ClockNote(msgspec.Struct):
    version: int
    boot_id: str
    wall_ms: _Ms
    monotonic_ms: _Ms


def write_clock(fs: FileSystem, data_dir: str, trusted: TrustedTime) -> None:
    """Note durably the time that the service trusts. By it the next start can tell a clock that somebody put forward
    from time that has passed. If this raises OSError, the former note stays.
    """
    write_note_file(fs, data_dir, layout.CLOCK_NAME, msgspec.json.encode(_ClockNote(VERSION, *trusted)))


def read_clock(fs: FileSystem, data_dir: str) -> TrustedTime | None:
    """Return the time that was noted, None without a note. Raise OSError, also if it is damaged."""
    note = read_note_file(fs, data_dir, layout.CLOCK_NAME, _ClockNote, "nothing can be compared with it")
    return None if note is None else TrustedTime(note.boot_id, note.wall_ms, note.monotonic_ms)
