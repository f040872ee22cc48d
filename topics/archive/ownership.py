"""The rules by which one service ships into an archive, until another one takes over; and why a service may not ship.

A generation is closed by a last piece, behind which its archiver can ship nothing. A service that takes over from
another one closes the newest generation. A service that begins the next generation closes the one before.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Sequence
from contextlib import suppress
from itertools import count, takewhile

from topics.core.clock import Clock
from topics.storage.archive_objects import Archive, ArchiveDamagedError, Generation, Piece, encode, piece_name
from topics.storage.filesystem import FileSystem
from topics.storage.notes import note_path
from topics.storage.service_id import ARCHIVE_NAME, archive_note
from topics.terminal import plural


class OtherShipperError(Exception):
    """Somebody else ships into this archive; the message says who, and the way out."""


class TakenOverError(OtherShipperError):
    """Another service took over from this one, which can ship nothing into the archive any more. `leader_url` is the
    address of the one that leads now, "" if the archive does not have it.
    """

    def __init__(self, message: str, leader_url: str = "") -> None:
        super().__init__(message)
        self.leader_url = leader_url


def taken_over(archive: Archive, by: str) -> TakenOverError:
    """Return the error for the service from which `by` took over."""
    url = ""
    with suppress(OSError, ArchiveDamagedError):
        newest = max(archive.generations(), default=0)
        number = archive.last_piece(newest, max(archive.bases(newest), default=0))
        url = archive.piece(newest, number)[0].leader_url if number else ""
    return TakenOverError(
        f"{archive.store.place('')}: {by} took over from this service. Stop it and use the other one"
        f"{url and f', {url}'}; or give it an archive of its own (TOPICS_ARCHIVE_URL), if both are to go on",
        url,
    )


def require_own(archive: Archive, newest: Generation, last: Piece | None, service_id: str) -> None:
    """Raise OtherShipperError unless this service may ship into the newest generation, or begin the next one. `last` is
    the last piece of the newest one. Raise ArchiveDamagedError, OSError.
    """
    closed_by, heir_id = ("", "") if last is None else (last.taken_over_by, last.taken_over_id)
    if heir_id == service_id or (newest.service_id == service_id and not closed_by):
        return
    former = (archive.generation(number).service_id for number in archive.generations()[:-1])
    if service_id in (newest.service_id, *newest.former_ids) or service_id in former:
        raise taken_over(archive, closed_by or f"service {newest.service_id}")
    # Also if the archive is closed: this may be the service that was restored from it, and nobody took over from that.
    raise OtherShipperError(
        f"{archive.store.place('')} has the archive of service {newest.service_id}, this is service {service_id}: give"
        " each service a place of its own (a restored directory is a service of its own)"
    )


def require_there(archive: Archive, numbers: Sequence[int], fs: FileSystem, data_dir: str) -> None:
    """Raise OSError if the archive has no generations (`numbers`) though this service has shipped there."""
    place = archive.store.place("")
    if not numbers and (note := archive_note(fs, data_dir)) is not None and note.place == place:
        way_out = f"mount its disk, or, if that is lost for good, remove {note_path(data_dir, ARCHIVE_NAME)}"
        raise FileNotFoundError(errno.ENOENT, f"is empty, and this service had its archive there: {way_out}", place)


def newest_generation(archive: Archive, numbers: Sequence[int], service_id: str) -> Generation | None:
    """Return the newest of these generations. Skip those of other services that have no base and no piece: after a
    takeover nobody ships there. Raise ArchiveDamagedError, OSError.
    """
    found = None
    for number in reversed(numbers):
        found = archive.generation(number)
        if found.service_id == service_id or archive.bases(number) or archive.last_piece(number, 0):
            break
    return found


def shipping_problem(archive: Archive, service_id: str | None) -> str | None:
    """Return why the service with this id cannot ship; None if it can. A service that has not begun has the id None.
    Raise ArchiveDamagedError, OSError.
    """
    newest = newest_generation(archive, archive.generations(), service_id or "(new)")
    if newest is None:
        return None
    bases = archive.bases(newest.number)
    number = archive.last_piece(newest.number, bases[-1] if bases else 0)
    try:
        require_own(archive, newest, archive.piece(newest.number, number)[0] if number else None, service_id or "(new)")
    except OtherShipperError as error:
        return str(error)
    return None


def followed_generation(archive: Archive) -> int:
    """Return the newest generation that can be followed, 0 without a base. Raise ArchiveDamagedError, OSError."""
    return next((number for number in reversed(archive.generations()) if archive.bases(number)), 0)


def following_problem(archive: Archive, shards: int) -> str | None:
    """Return why a service with `shards` cannot follow; None if it can. Raise ArchiveDamagedError, OSError."""
    if not (number := followed_generation(archive)):
        place = archive.store.place("")
        return f"{place} has no base yet: start the service that is to be followed with TOPICS_ARCHIVE_URL set to it"
    has = archive.generation(number).shards
    return None if has == shards else f"the service there has {plural(has, 'shard')}: set TOPICS_WAL_SHARDS={has}"


def take_over(archive: Archive, generation: int, clock: Clock, by: str, by_id: str = "", known: int = 0) -> Piece:
    """Close a generation with a piece that says who took over: `by` is a name for people, `by_id` the id of the service
    that goes on in this archive. The service that ships into the generation then finds the name of its next piece
    taken. What it has shipped before stays. `known` is the number of a piece that is there, since a list may be old.
    Return the closing piece, which may be another service's.

    Look for generations that were begun meanwhile after that (`Archive.has_generation`).
    Raise ArchiveDamagedError, OSError.
    """
    while True:
        number = archive.last_piece(generation, max([known, *archive.bases(generation)]))
        last = archive.piece(generation, number)[0] if number else Piece(0, 0, "", [], [])
        if last.taken_over_by:
            return last
        closing = Piece(
            number + 1,
            max(last.taken_ms, clock.now_ms()),
            secrets.token_hex(8),
            [],
            last.ends,
            has_end=last.has_end,
            txn=last.txn,
            taken_over_by=by,
            taken_over_id=by_id,
        )
        if archive.store.create(piece_name(generation, closing.number), encode(closing)):
            return closing


def close_former(archive: Archive, generation: int, clock: Clock, service_id: str) -> None:
    """Close a generation (0: none) behind which this service has begun the next one. Then another archiver of the same
    directory, such as a backup, can ship nothing there any more. Raise TakenOverError if another service has closed it
    first, OtherShipperError if it is pruned, and OSError, ArchiveDamagedError. A service that takes over closes this
    generation before it looks for the next one. So it finds the next one, or this call finds its closing piece.
    """
    if not generation:
        return
    if not archive.has_generation(generation):  # pruned: then a later one has a base
        raise OtherShipperError(f"{archive.store.place('')}: somebody else has begun a later generation meanwhile")
    closing = take_over(archive, generation, clock, f"service {service_id}", service_id)
    if closing.taken_over_id != service_id:
        raise taken_over(archive, closing.taken_over_by)


def close_archive(archive: Archive, clock: Clock, by: str) -> None:
    """Close an archive in which no service is to go on. The same `by` may repeat it. Raise TakenOverError if another
    one has taken over, ArchiveDamagedError, OSError.
    """
    generation = max(archive.generations(), default=0)
    # A service that began a generation and put nothing there may not have closed the one before, or found it closed.
    while archive.has_generation(generation - 1) and not (
        archive.bases(generation) or archive.has_piece(generation, 1)
    ):
        generation -= 1
    while generation and archive.has_generation(generation):
        closing = take_over(archive, generation, clock, by)
        is_own = closing.taken_over_by == by and not closing.taken_over_id
        if not is_own and not _goes_on(archive, generation, closing.taken_over_id):
            raise TakenOverError(
                f"{archive.store.place('')}: {closing.taken_over_by} took over from this service already: use that one."
                " A restore without --take-over makes one more service, from the last moment here"
            )
        generation += 1


def _goes_on(archive: Archive, generation: int, own_id: str) -> bool:
    """Return whether the service with this id began a later generation."""
    numbers = takewhile(archive.has_generation, count(generation + 1))
    return any(archive.generation(number).service_id == own_id for number in numbers)
