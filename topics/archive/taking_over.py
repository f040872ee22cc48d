"""Taking over from a service that may still run, by its archive: nothing that it ships later can be there."""

from __future__ import annotations

import secrets

from topics.core.clock import Clock
from topics.storage.archive_objects import Archive, Piece, encode, piece_name


def take_over(archive: Archive, generation: int, clock: Clock, by: str, by_id: str = "") -> bool:
    """Close a generation with a piece that says who took over: `by`, for people; `by_id` is the id of the service that
    goes on in this archive. The service that ships into the generation finds the name of its next piece taken. What it
    has shipped before stays. False if another one has closed it already.

    Raise ArchiveDamagedError, OSError.
    """
    while True:
        bases = archive.bases(generation)
        number = archive.last_piece(generation, bases[-1] if bases else 0)
        closing = Piece(number + 1, clock.now_ms(), secrets.token_hex(8), [], [], taken_over_by=by, taken_over_id=by_id)
        if number:
            last, _ = archive.piece(generation, number)
            if last.taken_over_by:
                return last.taken_over_id == by_id
            closing = Piece(
                number + 1,
                max(last.taken_ms, closing.taken_ms),
                closing.nonce,
                [],
                last.ends,
                has_end=last.has_end,
                txn=last.txn,
                taken_over_by=by,
                taken_over_id=by_id,
            )
        if archive.store.create(piece_name(generation, closing.number), encode(closing)):
            return True
