"""Closing a generation: nothing that its archiver ships later can be there. Another service that takes over closes the
last one, and a service that begins the next one closes the one before.
"""

from __future__ import annotations

import secrets

from topics.archive.ownership import TakenOverError, taken_over
from topics.core.clock import Clock
from topics.storage.archive_objects import Archive, Piece, encode, piece_name


def take_over(archive: Archive, generation: int, clock: Clock, by: str, by_id: str = "", known: int = 0) -> Piece:
    """Close a generation with a piece that says who took over: `by`, for people; `by_id` is the id of the service that
    goes on in this archive. The service that ships into the generation finds the name of its next piece taken. What it
    has shipped before stays. `known` is a piece that is there: lists may be old. Return the piece that closes it, which
    may be another one's.

    Generations that are begun meanwhile have to be looked for after that (`Archive.has_generation`).
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
    """Close a generation, which may be pruned, behind which this service has begun the next one: another archiver of
    the same directory, a backup say, can ship nothing there any more. Raise TakenOverError if another service has
    closed it first, and OSError, ArchiveDamagedError. A service that takes over looks for the next generation after it
    has closed this one. So it finds that, or is found here.
    """
    if not archive.has_generation(generation):
        return
    closing = take_over(archive, generation, clock, f"service {service_id}", service_id)
    if closing.taken_over_id != service_id:
        raise taken_over(archive, closing.taken_over_by)


def close_archive(archive: Archive, clock: Clock, by: str) -> None:
    """Close an archive in which nobody is to go on. `by` may do so again. Raise TakenOverError if another one has taken
    over, ArchiveDamagedError, OSError.
    """
    generation = max(archive.generations(), default=0)
    # Who began a generation in which nothing is yet has perhaps not closed the one before, or has found it closed.
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
    """Return whether the service of this id began a generation behind this one."""
    number = generation + 1
    while archive.has_generation(number):
        if archive.generation(number).service_id == own_id:
            return True
        number += 1
    return False
