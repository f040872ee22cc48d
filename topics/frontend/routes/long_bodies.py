"""Decodes long bodies of writes in pieces. A call into C holds up every other thread. If it decoded 60 MB at once, no
request would be served and no heartbeat sent for 30 to 200 ms.

    {"node":"n","records":[ {…},{…} , {…},{…},{…} , {…} ],"if_head_seq":7}
    └─────── frame ────────┘└ piece ┘ └── piece ──┘ └ p ┘└──── frame ────┘

The body is cut between its records, about every PIECE_BYTES. The place of a cut is guessed from the text between the
first two records, and the result proves it: a piece in brackets must be a JSON array of records, and the frame, with
one made-up record in place of all, must be a write with that record. After a wrong guess msgspec says where each value
ends. A body that cannot be cut is put in order: its records come first, unknown and repeated members are dropped. If it
still cannot be cut it is invalid. Decoding it as a whole then makes the usual error, before many records are made.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from topics.api.requests import AppendBody, RecordBody, StageBody
from topics.core.errors import TopicsError
from topics.frontend.entry import wire

BodyT = TypeVar("BodyT", AppendBody, StageBody)

WHOLE_BYTES_MAX: Final = 2 << 20
"""Longest body that is decoded at once."""
PIECE_BYTES: Final = 256 << 10
REST_S: Final = 50e-6
"""Pause between two pieces. Without it the event loop gets the interpreter only after milliseconds."""
_FRAME_BYTES_MAX: Final = 64 << 10  # most bytes before the first record, and behind the last one
_JOINT_BYTES_MAX: Final = 256
_RECORDS: Final = re.compile(rb'"records"[ \t\r\n]*:[ \t\r\n]*\[')
_JOINT: Final = re.compile(rb'\}[ \t\r\n]*,[ \t\r\n]*\{[ \t\r\n]*"[a-z_]+"[ \t\r\n]*:')
_ENDED: Final = re.compile(r"trailing characters \(byte (\d+)\)$")
"""msgspec's message when a value ends before its input does, with the position of the next byte, from 1."""

_skip: Final = msgspec.json.Decoder(msgspec.Raw).decode
_records: Final = msgspec.json.Decoder(list[RecordBody])


class UncutError(Exception):
    """The body has to be decoded as a whole."""


def decode(decoder: msgspec.json.Decoder[BodyT], body: bytes, records_max: int, record_max_bytes: int) -> BodyT:
    """Decode as `wire.decode` does; `batch_too_large` from `records_max` on. It sleeps, so call it in a thread."""
    if len(body) > WHOLE_BYTES_MAX:
        with suppress(UncutError):
            return Cutter(body, records_max, record_max_bytes).decode(decoder)
        names = sorted(decoder.type.__struct_fields__, key="records".__ne__)
        texts = msgspec.defstruct("Texts", [(name, msgspec.Raw, msgspec.UNSET) for name in names])
        ordered = msgspec.json.encode(wire.decode(msgspec.json.Decoder(texts), body))
        with suppress(UncutError):
            return Cutter(ordered, records_max, len(ordered)).decode(decoder)
        body = body if len(body) - len(ordered) < WHOLE_BYTES_MAX else ordered  # as it was sent, errors name the place
    return wire.decode(decoder, body)


class Cutter:
    """One long body, decoded piece by piece."""

    def __init__(self, body: bytes, records_max: int, record_max_bytes: int) -> None:
        self._body = body
        self._view = memoryview(body)
        self._records_max = records_max
        self._value_max_bytes = record_max_bytes + PIECE_BYTES

    def decode(self, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
        body = self._body
        found = _RECORDS.search(body, 0, _FRAME_BYTES_MAX)
        if found is None:
            raise UncutError
        start = at = found.end()
        end = self.end_of_value(at)
        joint = _JOINT.match(body, body.rfind(b"}", at, end + 1), end + _JOINT_BYTES_MAX)
        records: list[RecordBody] = []
        while True:
            piece = None
            if joint is not None:
                end = self._guess(at, joint)
                piece = None if end < 0 else self._piece(at, end)
            if piece is None:
                end = self._walk(at, self._records_max + 1 - len(records))
                piece = self._piece(at, end)
                if piece is None:
                    raise UncutError
            records += piece
            if len(records) > self._records_max:
                raise TopicsError(
                    "batch_too_large",
                    f"a write has at most {self._records_max} records, this one has more",
                    {"max_batch_records": self._records_max},
                )
            if body[end] != ord(","):
                break
            at = end + 1
            time.sleep(REST_S)
        request = self._frame(decoder, start, end)
        request.records = records
        return request

    def _frame(self, decoder: msgspec.json.Decoder[BodyT], start: int, end: int) -> BodyT:
        """Decode the body without the text between `start` and `end`, which must be its records."""
        if len(self._body) - end > _FRAME_BYTES_MAX:
            raise UncutError
        stand_in = os.urandom(16).hex().encode()  # no client can have sent it
        try:
            request = wire.decode(decoder, b'%b{"data":"%b"}%b' % (self._body[:start], stand_in, self._body[end:]))
        except TopicsError:
            raise UncutError from None
        if [bytes(record.data).strip(b'"') for record in request.records] != [stand_in]:
            raise UncutError
        return request

    def _piece(self, at: int, end: int) -> list[RecordBody] | None:
        """Decode the text between as records; None if it is anything else."""
        try:
            return wire.decode(_records, b"".join((b"[", self._view[at:end], b"]"))) or None
        except TopicsError:
            return None

    def _guess(self, at: int, joint: re.Match[bytes]) -> int:
        """Guess the end of a piece from `at` on: a comma, or the bracket behind the last record; -1: unknown."""
        if len(self._body) - at <= 2 * PIECE_BYTES:
            return self._body.rfind(b"]", at)
        found = self._body.find(joint[0], at + PIECE_BYTES, at + 2 * PIECE_BYTES)
        return -1 if found < 0 else found + joint[0].index(b",")

    def _walk(self, at: int, records: int) -> int:
        """Find the end of a piece from `at` on with at most so many records, value by value."""
        start = at
        while True:
            end = self.end_of_value(at)
            records -= 1
            if self._body[end] != ord(",") or end - start >= PIECE_BYTES or not records:
                return end
            at = end + 1

    def end_of_value(self, at: int) -> int:
        """Return the position of the first byte other than space behind the value at `at`."""
        try:
            _skip(self._view[at : at + self._value_max_bytes])
        except msgspec.DecodeError as error:
            ended = _ENDED.search(str(error))
            if ended is not None:
                return at + int(ended[1]) - 1
        except RecursionError:
            pass
        raise UncutError
