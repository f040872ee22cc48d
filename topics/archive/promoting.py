"""The role of a service: whether it leads or follows, by its setting `follow` and its directory's note; and promotion.

A follower is promoted in three steps. While it runs it notes that it takes over (`begin_promotion`): until then a
promotion can be withdrawn. It closes the leader's history and copies all of it (`promote`). Then all its processes end,
`finish_promotion` lets the directory lead, and they start again. Each step can be repeated.
"""

from __future__ import annotations

import errno
import os
import secrets

import msgspec

from topics.archive.directory_copy import DirectoryCopy
from topics.archive.ownership import take_over
from topics.archive.replica import BeginAnewError, Replica, begin_anew
from topics.core.clock import Clock
from topics.settings import Settings
from topics.storage import layout, service_id
from topics.storage.archive_objects import Archive, ArchiveDamagedError
from topics.storage.filesystem import FileSystem
from topics.storage.follow_note import read_note, write_note


def role_problem(fs: FileSystem, settings: Settings) -> str | None:
    """Return why directory and settings disagree about whether the service follows; None if not. Raise OSError."""
    note, data_dir = read_note(fs, settings.data_dir), settings.data_dir
    if note is None:
        if settings.follow is None or not os.path.isdir(layout.wal_dir(data_dir)):
            return None
        return f"{data_dir} has a service of its own: give --follow an empty directory, or remove this one"
    if note.leads or note.url == settings.follow:
        return None
    way_out = f"start it with --follow {note.url}, and promote it if it is to lead"
    if settings.follow is not None:
        way_out = f"empty the directory to follow another one, {settings.follow}"
    return f"{data_dir} is a copy of the service in {note.url}: {way_out}"


def take_role(fs: FileSystem, settings: Settings, clock: Clock) -> Settings:
    """Return the settings with which to start. A promoted service does not follow. It ships into its own archive, or
    without one into the archive that it followed, and gets another id; its topics get other epochs. Raise OSError, also
    for a `role_problem`.
    """
    if problem := role_problem(fs, settings):
        raise OSError(errno.EINVAL, problem)
    note = read_note(fs, settings.data_dir)
    if note is not None and note.leads:
        if service_id.known_id(fs, settings.data_dir) != note.promoted_id:  # before frontends read the epochs
            former = service_id.epoch_masks(fs, settings.data_dir)
            service_id.make_restored(fs, settings.data_dir, former, clock.now_ms(), note.promoted_id)
        url = settings.archive_url or note.url
        return msgspec.structs.replace(settings, follow=None, archive_url=url)
    if note is None and settings.follow is not None:
        begin_anew(fs, settings.data_dir, settings.follow)
    return settings


def require_history(replica: Replica) -> None:
    """Raise OSError unless the archive is there, and BeginAnewError unless it still has what the follower follows. Then
    a promotion may begin.
    """
    generation = replica.note.generation
    replica.require_archive()
    if not replica.archive.has_generation(generation):
        raise _given_up(replica, f"generation {generation} of the archive is pruned: it goes on elsewhere")


def begin_promotion(replica: Replica) -> None:
    """Note that a promotion is under way: it goes on after each start, also with another copy."""
    if not replica.note.fence_id:
        replica.keep_note(fence_id=secrets.token_hex(8))


def promote(replica: Replica, clock: Clock, by: str) -> None:
    """Have a follower take over from its leader once it has begun to: close the leader's history, copy all that it has
    shipped, keep what it has told, and note that this service leads from now on. `by` is the follower's name for
    people.

    Raise BeginAnewError if another service has taken over already, or the directory cannot get to the end of the
    history. After OSError and ArchiveDamagedError, call it again.
    """
    generation = replica.note.generation
    _close(replica, generation, replica.laid_piece, clock, by)
    _close_later(replica, clock, by)
    _take_rest(replica)
    replica.end_at_base()
    replica.sync()
    replica.homecoming.narrow()
    replica.keep_note(promoted_id=replica.note.fence_id)


def _take_rest(replica: Replica) -> None:
    """Copy what the closed generation has. Raise BeginAnewError if only its newest base has the rest, OSError, and
    ArchiveDamagedError.
    """
    damage = None
    try:
        replica.step()
        if replica.is_over or (replica.has_hole and not _has_base_behind_hole(replica)):
            return
    except ArchiveDamagedError as error:
        damage = error
        bases = replica.archive.bases(replica.note.generation)
        if not replica.is_damaged or max(bases, default=0) <= replica.laid_piece:
            raise
    where = "the archive has a hole before its end, or is damaged or pruned there"
    raise replica.anew(f"{where}: the newest base is behind it") from damage


def _close(replica: Replica, generation: int, known: int, clock: Clock, by: str) -> None:
    archive, fence_id = replica.archive, replica.note.fence_id
    closing = take_over(archive, generation, clock, by, fence_id, known)
    if closing.taken_over_id == fence_id:
        return
    if closing.taken_over_id != archive.generation(generation).service_id:
        raise _given_up(replica, "another service has taken over already")
    # The leader has closed this generation, because it began the next one. `_close_later` closes that one, too.
    if not archive.has_generation(generation + 1):
        raise _given_up(replica, f"generation {generation + 1} of the archive is pruned: it goes on elsewhere")


def _given_up(replica: Replica, reason: str) -> BeginAnewError:
    """Give up the promotion, so that the directory only follows again. Return the error to raise."""
    replica.note = msgspec.structs.replace(replica.note, fence_id="")
    return BeginAnewError(reason)


def _close_later(replica: Replica, clock: Clock, by: str) -> None:
    """Close generations that the leader has begun meanwhile, for example because its directory went back."""
    archive, generation = replica.archive, replica.note.generation
    while archive.has_generation(generation + 1):
        generation += 1
        _close(replica, generation, 0, clock, by)
        pieces = range(1, archive.last_piece(generation, 0))
        if archive.bases(generation) or _has_base(archive, generation, pieces):
            raise replica.anew(f"the archive goes on with generation {generation}")


def _has_base_behind_hole(replica: Replica) -> bool:
    """Return whether the closed generation has a base or a moment behind the hole. If not, it ends before the hole."""
    archive, generation, first = replica.archive, replica.note.generation, replica.laid_piece + 1
    closing = archive.last_piece(generation, replica.laid_piece)
    # An archiver that puts a base after this look finds the generation closed, and gives the base up.
    return _has_base(archive, generation, range(first, closing)) or any(
        archive.piece(generation, number)[0].is_moment for number in range(first, closing)
    )


def _has_base(archive: Archive, generation: int, numbers: range) -> bool:
    return any(archive.has_base(generation, number) for number in reversed(numbers))  # a list may be old


def is_promotion_due(fs: FileSystem, data_dir: str) -> bool:
    note = read_note(fs, data_dir)
    return note is not None and note.leads and not note.is_promoted


def finish_promotion(fs: FileSystem, data_dir: str, clock: Clock) -> int:
    """Let a follower's directory lead: cut its logs at the last moment, and add a gap behind each topic's last record.
    Return the number of topics. Raise OSError, FoldError, RefusedLog.
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
