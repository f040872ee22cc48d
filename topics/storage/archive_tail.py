"""The tail of a service's logs, for those who follow it: all that is committed and not theirs yet, whether or not it is
in the archive. It is laid out as a piece of the archive that has no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from topics.storage.archive_objects import LogEnd, Piece, PieceDraft, TxnFile, encode
from topics.storage.origin import LogPlace, Origin, OriginGoneError

TAIL_BYTES: Final = 4 << 20
"""The most bytes of logs in one answer."""


def read_tail(origin: Origin, ends: Sequence[LogEnd], now_ms: int, leader_url: str) -> bytes | None:
    """Return what the logs have behind these ends, as an encoded piece; None if no moment can be told now. Without any
    ends, say where the logs end.

    The piece `is_moment` if it has all of it. Its `txn` are the files of transactions at that moment, without their
    bytes. Raise OriginGoneError if the logs do not go on from there (the archive does, or has another history), and
    OSError.
    """
    found = origin.moment()
    if found is None:
        return None
    logs, txn = found
    ends = ends or [LogEnd(log.shard, log.log_id, log.end, origin.bytes_before(log, log.end) or b"") for log in logs]
    _check(origin, logs, ends)
    draft, is_whole = PieceDraft(ends), True
    for log in logs:
        is_whole &= _add(origin, log, draft)
    files = [TxnFile(path, 0, 0, len(content), xxh3_64_intdigest(content)) for path, content in sorted(txn.items())]
    piece = Piece(0, now_ms, "", draft.parts, draft.ends, is_whole, True, files, leader_url=leader_url)
    return encode(piece, draft.payload)


def _check(origin: Origin, logs: Sequence[LogPlace], ends: Sequence[LogEnd]) -> None:
    if [(end.shard, end.log_id) for end in ends] != [(log.shard, log.log_id) for log in logs]:
        raise OriginGoneError("these are other logs: their ids differ")
    for log, end in zip(logs, ends, strict=True):
        last_bytes = origin.bytes_before(log, end.position)
        if log.end < end.position or last_bytes is None or not last_bytes.endswith(end.last_bytes):
            raise OriginGoneError(f"log {log.shard} has no end {end.position}, or had another record before it")


def _add(origin: Origin, log: LogPlace, draft: PieceDraft) -> bool:
    """Add the next bytes of a log; return False if there are more than fit."""
    for file_no, offset, content in origin.log_bytes(log, draft.ends[log.shard].position, TAIL_BYTES):
        if draft.size_bytes + len(content) > TAIL_BYTES:
            return False
        draft.add(log.shard, log.log_id, file_no, offset, content)
    return True
