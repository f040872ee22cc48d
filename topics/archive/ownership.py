"""One service ships into an archive, until another one takes over from it: the rules, and what is wrong otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from topics.storage.archive_objects import Archive, Generation, Piece


class OtherShipperError(Exception):
    """Somebody else ships into this archive; the message says who, and the way out."""


class TakenOverError(OtherShipperError):
    """Another service took over from this one: nothing of it gets into the archive any more."""


def taken_over(archive: Archive, by: str) -> TakenOverError:
    """Return the error of a service that `by` took over from."""
    return TakenOverError(
        f"{archive.store.place('')}: {by} took over from this service. Stop it and use the other one; or give it an"
        " archive of its own (TOPICS_ARCHIVE_URL), if both are to go on"
    )


def require_own(archive: Archive, newest: Generation, last: Piece | None, service_id: str) -> None:
    """Raise OtherShipperError unless this service may ship behind the newest generation, whose `last` piece that is.
    Raise ArchiveDamagedError, OSError.
    """
    if last is not None and last.taken_over_by:
        if last.taken_over_id != service_id:
            raise taken_over(archive, last.taken_over_by)
        return
    if newest.service_id == service_id:
        return
    former = (archive.generation(number).service_id for number in archive.generations()[:-1])
    if service_id in newest.former_ids or service_id in former:
        raise taken_over(archive, f"service {newest.service_id}")
    raise OtherShipperError(
        f"{archive.store.place('')} has the archive of service {newest.service_id}, this is service {service_id}: give"
        " each service a place of its own (a restored directory is a service of its own)"
    )


def newest_generation(archive: Archive, numbers: Sequence[int], service_id: str) -> Generation | None:
    """Return the newest one of these generations, but for those without a piece that others began: after a takeover
    nobody ships there. Raise ArchiveDamagedError, OSError.
    """
    found = None
    for number in reversed(numbers):
        found = archive.generation(number)
        if found.service_id == service_id or archive.bases(number) or archive.last_piece(number, 0):
            break
    return found


def shipping_problem(archive: Archive, service_id: str | None) -> str | None:
    """Return why the service with this id, None for one that has not begun, cannot ship; None if it can. Raise
    ArchiveDamagedError, OSError.
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


def following_problem(archive: Archive, shards: int) -> str | None:
    """Return why a service with so many shards cannot follow; None if it can. Raise ArchiveDamagedError, OSError."""
    place = archive.store.place("")
    for number in reversed(archive.generations()):
        if archive.bases(number):
            has = archive.generation(number).shards
            return None if has == shards else f"the service there has {has} shards: set TOPICS_WAL_SHARDS={has}"
    return f"{place} has no base yet: start the service that is to be followed with TOPICS_ARCHIVE_URL set to it"
