"""Fenced writers (api §2): one instance of a producer writes at a time, and nothing it wrote is missing or there twice.

A producer numbers its writes, and each of its instances has an epoch above that of the one before. Epoch and number are
the key under which a write's outcome is known (`idempotency.py`), so they are logged with it and go where keys go:

    | 0xFD | id | epoch u64 big-endian | n u64 big-endian |
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from topics.core.errors import TopicsError
from topics.core.key_marks import KeyMark

FORGOTTEN_AFTER_MS: Final = 7 * 24 * 3_600_000
"""A producer that has written nothing for so long is one that never wrote."""
_TURN: Final = Struct(">QQ")


class Turn(NamedTuple):
    """Where a producer is: its highest epoch, and the number of the last write in it."""

    epoch: int
    n: int


def producer_key(id: bytes, turn: Turn) -> bytes:
    return KeyMark.PRODUCER + id + _TURN.pack(*turn)


def is_producer_key(key: bytes) -> bool:
    return key.startswith(KeyMark.PRODUCER)


def parse_key(key: bytes) -> tuple[bytes, Turn]:
    """(id, turn)."""
    return key[1 : -_TURN.size], Turn(*_TURN.unpack_from(key, len(key) - _TURN.size))


def check_fence(id: bytes, last: Turn, given: Turn) -> None:
    """`409 fenced` for an instance that has been replaced by one of a higher epoch."""
    if given.epoch < last.epoch:
        raise TopicsError(
            "fenced",
            f"producer {id.decode()!r} goes on in epoch {last.epoch}, so epoch {given.epoch} may not write any more",
            _detail(id, last),
        )


def check_order(id: bytes, last: Turn, given: Turn) -> None:
    """`409 out_of_order` unless this write, whose outcome is not known, comes next. The first of an epoch may have any
    number.
    """
    if given.epoch == last.epoch and given.n != last.n + 1:
        missing = given.n > last.n
        raise TopicsError(
            "out_of_order",
            f"producer {id.decode()!r} has written up to {last.n}, so {last.n + 1} is next and not {given.n}"
            + ("" if missing else "; it was committed, and its seqs are not known any more"),
            _detail(id, last),
        )


def _detail(id: bytes, last: Turn) -> dict[str, object]:
    return {"producer": id.decode(), "epoch": last.epoch, "n": last.n}
