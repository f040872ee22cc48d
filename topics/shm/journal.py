"""The journal of a shard keeps the group that the shard is about to commit, for its next incarnation.

A shard that is killed between write and answer must not append the same request again. So before it writes a group, it
stores in the journal the answer of each request, and where the request's bytes will end in the log. After a crash it
looks at the log: a request whose bytes are all there gets that answer, any other runs as new (`walshard/setup.py`).

     0          8          16         64
    +----------+----------+----------+----------------------+----------------------+
    | stored   | length 0 | length 1 | body 0               | body 1               |
    +----------+----------+----------+----------------------+----------------------+
      body = msgpack: list of JournalEntry

`stored` counts the journals; body `stored & 1` is the current one. A new journal is written to the other body before
`stored` grows, so a shard that is killed in between still has the former journal, whose requests are not answered yet.
"""

from __future__ import annotations

import msgspec

_HEADER_BYTES = 64


class JournalEntry(msgspec.Struct, array_like=True, frozen=True):
    """One request of a group: the ring position behind it, the end of its frames in the log, its encoded answer."""

    frontend: int
    ring_position: int
    ram_log: bool
    file_no: int
    end_offset: int
    reply: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[JournalEntry])


class Journal:
    """The journal of one shard in its shared `region`."""

    def __init__(self, region: memoryview) -> None:
        self._words = region[:_HEADER_BYTES].cast("Q")
        self.capacity_bytes = (len(region) - _HEADER_BYTES) // 2
        middle = _HEADER_BYTES + self.capacity_bytes
        self._bodies = (region[_HEADER_BYTES:middle], region[middle : middle + self.capacity_bytes])

    def store(self, entries: list[JournalEntry]) -> None:
        """Replace the journal; the caller keeps groups small enough to fit."""
        body = _encoder.encode(entries)
        assert len(body) <= self.capacity_bytes
        stored = self._words[0] + 1
        self._words[1 + (stored & 1)] = len(body)
        self._bodies[stored & 1][: len(body)] = body
        self._words[0] = stored

    def load(self) -> list[JournalEntry]:
        """Return the group that the previous incarnation was about to commit, oldest request first."""
        stored = self._words[0]
        if not stored:
            return []
        return _decoder.decode(self._bodies[stored & 1][: self._words[1 + (stored & 1)]])
