"""Leading or following: what a service is, by its setting `follow` and the note of its directory, and its promotion.

A follower is promoted in two steps. While it runs it closes the leader's history and takes all of it (`replica.py`).
Then all its processes end, the directory becomes one of its own, and they start again. Each step can be repeated.
"""

from __future__ import annotations

import os

import msgspec

from topics.archive.directory_copy import DirectoryCopy
from topics.archive.replica import begin_anew
from topics.core.clock import Clock
from topics.settings import Settings
from topics.storage import layout, service_id
from topics.storage.filesystem import FileSystem
from topics.storage.follow_note import read_note, write_note


class FollowRefusedError(Exception):
    """The directory and the settings do not agree about whether the service follows; the message has the way out."""


def settle_role(fs: FileSystem, settings: Settings, clock: Clock) -> Settings:
    """Return the settings with which to start: a service that was promoted does not follow, and ships into the archive
    that it followed unless it has one. It gets another id, and its topics other epochs. Raise FollowRefusedError,
    OSError.
    """
    note = read_note(fs, settings.data_dir)
    if note is not None and note.leads:
        if service_id.known_id(fs, settings.data_dir) != note.promoted_id:  # frontends need the epochs as they start
            service_id.make_restored(fs, settings.data_dir, clock.now_ms(), note.promoted_id)
        url = settings.archive_url or note.url
        return msgspec.structs.replace(settings, follow=None, archive_url=url)
    if settings.follow is None:
        if note is not None:
            raise FollowRefusedError(
                f"{settings.data_dir} is a copy of the service in {note.url}: start it with --follow {note.url}, and"
                " promote it if it is to lead"
            )
        return settings
    if note is None:
        if os.path.isdir(layout.wal_dir(settings.data_dir)):
            raise FollowRefusedError(
                f"{settings.data_dir} has a service of its own: give --follow an empty directory, or remove this one"
            )
        begin_anew(fs, settings.data_dir, settings.follow)
    elif note.url != settings.follow:
        raise FollowRefusedError(
            f"{settings.data_dir} is a copy of the service in {note.url}, not {settings.follow}: empty the directory to"
            " follow another one"
        )
    return settings


def is_promotion_due(fs: FileSystem, data_dir: str) -> bool:
    note = read_note(fs, data_dir)
    return note is not None and note.leads and not note.is_promoted


def finish_promotion(fs: FileSystem, data_dir: str, clock: Clock) -> int:
    """Make the logs of a directory that followed its own: its topics have a gap behind their last records. Return how
    many topics there are. Raise OSError, FoldError, RefusedLog.
    """
    note = read_note(fs, data_dir)
    assert note is not None, "the caller has seen it"
    copy = DirectoryCopy(fs, data_dir, len(note.ends), note.url)
    for end in note.ends:
        copy.cut_behind(end.shard, end.position)
    topics = copy.end_history(note.has_end, clock.now_ms())
    fs.sync_all(data_dir)
    write_note(fs, data_dir, msgspec.structs.replace(note, is_promoted=True))
    return topics
