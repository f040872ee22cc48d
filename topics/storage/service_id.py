"""The id of a service. A bucket knows the data directory by it: it owns a prefix there (`bucket_store.py`).

The service takes the id of one of its logs when it first needs an id, and keeps it in `meta/service-id`. So a copy of
the directory on another machine is the same service, even after a change of the shard count made new logs.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from contextlib import suppress
from typing import Annotated, Final, NamedTuple

import msgspec

from topics.storage import layout
from topics.storage.filesystem import FileSystem, read_all
from topics.storage.notes import VERSION, note_path, read_note_file, write_note_file
from topics.storage.snapshot import present_log_ids

NAME: Final = "service-id"
RESTORED_NAME: Final = "restored.json"
ARCHIVE_NAME: Final = "archive.json"
_ID: Final = re.compile(rb"[0-9a-f]{16}")


def known_id(fs: FileSystem, data_dir: str) -> str | None:
    """Return the id, None for a directory without one and without a log. Raise OSError, also for a damaged file."""
    path = note_path(data_dir, NAME)
    if fs.exists(path):
        found = read_all(fs, path)
        if not _ID.fullmatch(found):
            raise OSError(errno.EIO, "is no id of a service: remove it, and the next start makes it again", path)
        return found.decode()
    ids = present_log_ids(fs, layout.wal_dir(data_dir))
    return f"{min(ids):016x}" if ids else None


def keep_id(fs: FileSystem, data_dir: str) -> str:
    """Return the id after it was written durably. Raise OSError."""
    found = known_id(fs, data_dir)
    if found is None:
        raise OSError(errno.ENOENT, "has no log that can be read", data_dir)
    if not fs.exists(note_path(data_dir, NAME)):
        write_note_file(fs, data_dir, NAME, found.encode())
    return found


class EpochMasks(NamedTuple):
    """Masks that turn topic ids into epochs (`epoch = id ^ mask`): that of a service, 0 unless it was restored or took
    over, and that of the service before. None: there was none, or it is not known.
    """

    own: int = 0
    former: int | None = None


NO_MASKS: Final = EpochMasks()
_Mask = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class _RestoredNote(msgspec.Struct):
    version: int
    restored_ms: int
    epoch_mask: _Mask
    former_mask: _Mask | None = None


def make_restored(fs: FileSystem, data_dir: str, former: EpochMasks, now_ms: int, new_id: str = "") -> None:
    """Make a directory that was restored from an archive a service of its own: it gets another id (`new_id`, or any),
    and its topics other epochs than in the `former` service. A call that was ended can be repeated. Raise OSError.
    """
    new_id = new_id or secrets.token_hex(8)
    if former.own != (mask := int(new_id, 16)):  # else `former` is what a call has noted that was ended then
        set_epoch_masks(fs, data_dir, EpochMasks(mask, former.own), now_ms)
    write_note_file(fs, data_dir, NAME, new_id.encode())


def set_epoch_masks(fs: FileSystem, data_dir: str, masks: EpochMasks, now_ms: int) -> None:
    """Note the masks of the directory. Raise OSError."""
    own, former = (None if mask is None else f"{mask:016x}" for mask in masks)
    assert own is not None
    write_note_file(fs, data_dir, RESTORED_NAME, msgspec.json.encode(_RestoredNote(VERSION, now_ms, own, former)))


def epoch_masks(fs: FileSystem, data_dir: str) -> EpochMasks:
    """Return the masks of the directory. Raise OSError, also for a damaged file: without the mask readers would take
    restored topics for those that they knew.
    """
    note = read_note_file(fs, data_dir, RESTORED_NAME, _RestoredNote, "restore the directory again")
    if note is None:
        return NO_MASKS
    return EpochMasks(int(note.epoch_mask, 16), None if note.former_mask is None else int(note.former_mask, 16))


class ArchiveNote(msgspec.Struct):
    """The note that says where the service ships its archive. Once another service took over from this one,
    `leader_url` is the address of the one that leads there, "" if it is not known.
    """

    place: str
    leader_url: str = ""
    version: int = VERSION


def archive_note(fs: FileSystem, data_dir: str) -> ArchiveNote | None:
    """Return the note, None if the service has shipped nowhere. Raise OSError, also for a damaged file."""
    return read_note_file(fs, data_dir, ARCHIVE_NAME, ArchiveNote, "remove it if the archive is there")


def keep_archive_note(fs: FileSystem, data_dir: str, note: ArchiveNote) -> None:
    """Write the note durably unless it is there; a damaged one is replaced. Raise OSError."""
    with suppress(OSError):
        if archive_note(fs, data_dir) == note:
            return
    write_note_file(fs, data_dir, ARCHIVE_NAME, msgspec.json.encode(note))


def describe(service_id: str, data_dir: str) -> str:
    """Return the id with the place of the directory, for messages."""
    return f"{service_id} ({os.uname().nodename}:{os.path.abspath(data_dir)})"
