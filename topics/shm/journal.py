"""What a shard is about to commit, kept where its next incarnation finds it.

A shard that is killed between the write and the answer must not append the same request again. So before
each group write it stores here, for every request of the group, where its bytes will end in the log and the
answer it would give; after a crash, a request whose bytes are all in the log gets that answer, any other runs
as new (`walshard/recovery.py`).

     0         8         16
    +---------+---------+---------------------------------------------+
    | sealed  | length  | msgpack: list of JournalEntry               |
    +---------+---------+---------------------------------------------+

`sealed` is 0 while the body is being replaced, then 1: a shard killed while it writes the journal has not
touched the log yet.
"""

from __future__ import annotations

import msgspec

_HEADER_BYTES = 16


class JournalEntry(msgspec.Struct, array_like=True, frozen=True):
    """One request of a group: ring position behind it, the end of its frames, its answer as a ring message."""

    frontend: int
    ring_position: int
    ram_log: bool
    file_no: int
    end_offset: int
    reply: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[JournalEntry])


class Journal:
    """`region` belongs to one shard."""

    def __init__(self, region: memoryview) -> None:
        self._region = region
        self._words = region[:_HEADER_BYTES].cast("Q")
        self.capacity_bytes = len(region) - _HEADER_BYTES

    def store(self, entries: list[JournalEntry]) -> None:
        """Replaces the journal; the caller keeps a group small enough to fit (`capacity_bytes`)."""
        body = _encoder.encode(entries)
        assert len(body) <= self.capacity_bytes
        self._words[0] = 0
        self._words[1] = len(body)
        self._region[_HEADER_BYTES : _HEADER_BYTES + len(body)] = body
        self._words[0] = 1

    def clear(self) -> None:
        self._words[0] = 0

    def load(self) -> list[JournalEntry]:
        """What the previous incarnation was about to commit, oldest first."""
        if not self._words[0]:
            return []
        return _decoder.decode(self._region[_HEADER_BYTES : _HEADER_BYTES + self._words[1]])
