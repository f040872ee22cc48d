"""What lies behind a place where the log cannot be read on: the difference between a torn tail and corruption."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from topics.storage.frame import CHECKSUM_LEN, FrameType, scan

# Type and flags of a frame, four bytes in; only an Append may have been around a cycle. Rare in JSON and absent in
# zeros, so few places need a closer look.
_TYPE_AND_FLAGS: Final = re.compile(rb"(?=[\x01-\x0b\x20-\x28\x30-\x32][\x00-\x1f]|\x01[\x20-\xff])", re.DOTALL)
_TYPE_AT: Final = 4


class Survey(NamedTuple):
    """The valid frames found behind a defect."""

    frames: int
    records: int
    first_offset: int | None
    synced_offset: int
    """The furthest that a SYNC_MARK among them vouches for; 0 without one."""


def survey(buffer: bytes, start: int, file_no: int) -> Survey:
    """Looks for valid frames at any offset in buffer[start:], the content of file `file_no`."""
    frames = records = synced_offset = 0
    first_offset: int | None = None
    end = min(len(buffer), start + used_bytes(buffer, start) + CHECKSUM_LEN)  # a checksum may end in zeros
    offset = start
    while (candidate := _TYPE_AND_FLAGS.search(buffer, offset + _TYPE_AT, end)) is not None:
        offset = candidate.start() - _TYPE_AT
        found = scan(buffer, offset, end)
        if not found.frames:
            offset += 1
            continue
        if first_offset is None:
            first_offset = offset
        for _, _, type_, _, topic_id, seq, *_ in found.frames:
            if type_ == FrameType.APPEND:
                records += 1
            elif type_ == FrameType.SYNC_MARK and topic_id == file_no:
                synced_offset = max(synced_offset, seq)
        frames += len(found.frames)
        offset = found.end
    return Survey(frames, records, first_offset, synced_offset)


def used_bytes(buffer: bytes, start: int) -> int:
    """How many bytes from `start` on lie before the zeros that end the buffer."""
    if buffer.count(0, start) == len(buffer) - start:
        return 0
    return len(buffer[start:].rstrip(b"\0"))
