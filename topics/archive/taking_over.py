"""Taking over from a service that may still run, by its archive: nothing that it ships later can be there."""

from __future__ import annotations

import secrets

from topics.archive.ownership import TakenOverError
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


def close_archive(archive: Archive, clock: Clock, by: str) -> None:
    """Close an archive in which nobody is to go on. `by` may do so again. Raise TakenOverError if another one has taken
    over, ArchiveDamagedError, OSError.
    """
    generation = max(archive.generations(), default=0)
    while generation and archive.has_generation(generation):
        closing = take_over(archive, generation, clock, by)
        if closing.taken_over_id or closing.taken_over_by != by:
            raise TakenOverError(
                f"{archive.store.place('')}: {closing.taken_over_by} took over from this service already: use that one."
                " A restore without --take-over makes one more service, from the last moment here"
            )
        generation += 1
