"""Bounds on the frames of one client: those that carry nothing, and those that this process handles in one turn.

A ping, a reset or an empty piece of a message takes 10 bytes and some 50 µs, so 1 MB/s of them would take all of the
process's time. A connection may send FRAMES_BURST and FRAMES_PER_S from then on, 5 % of that time, before it is cut.
Answers earn more. A turn is two frames or FRAMES_PER_TURN pieces of bodies; then other connections have theirs. Who is
cut may come back at once, so an address whose connections are cut again and again gets new ones more slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ipaddress import ip_network
from typing import Final

from h2.exceptions import DenialOfServiceError, FrameTooLargeError, ProtocolError
from h2.frame_buffer import FrameBuffer
from hyperframe.frame import ContinuationFrame, DataFrame, HeadersFrame, RstStreamFrame, SettingsFrame

FRAMES_PER_S: Final = 1000
FRAMES_BURST: Final = 500
CUT_S: Final = 1.0  # what an address owes for each cut
CUTS_FREE_S: Final = 3.0
NEXT_AFTER_S: Final = 0.1  # between two connections that wait
WAIT_MOST_S: Final = 10.0
FRAMES_PER_TURN: Final = 8
EARNED_BY_ANSWER: Final = 4
EARNED_PER_BYTES: Final = 1024
FIELDS_FREE: Final = 128
"""Header fields of a request. Each further one counts as a frame: a block of 3 KB may refer to 3,000 fields."""
SMALL_DATA_BYTES: Final = 256
_FRAMES_IN_TURN: Final = 2
_PIECES: Final = (DataFrame.type, ContinuationFrame.type)
"""Frames of which FRAMES_PER_TURN make a turn. Any other takes the time of several."""
_COSTS: Final = {HeadersFrame.type: 0, RstStreamFrame.type: 8}
"""A head is a request. A reset also undoes one, for which no answer is earned."""
_SETTINGS_BYTES: Final = 64  # settings that count as one frame more
_END_STREAM, _END_HEADERS, _PADDED = 0x1, 0x4, 0x8
_HEAD_BYTES: Final = 9


class FrameBudget:
    """The frames without content that one connection may still send. Refilled with time, and by what it is sent."""

    def __init__(self, time_s: Callable[[], float], on_refusal: Callable[[str], None] = lambda why: None) -> None:
        self._time_s = time_s
        self._on_refusal = on_refusal
        self._left: float = FRAMES_BURST
        self._refilled_s = time_s()
        self.refused = False  # true if the connection is cut for what it sent

    def try_spend(self, frames: int = 1) -> bool:
        """Count frames; False if they are too many, and not counted."""
        now_s = self._time_s()
        self._left = min(FRAMES_BURST, self._left + (now_s - self._refilled_s) * FRAMES_PER_S)
        self._refilled_s = now_s
        if self._left < frames:
            return False
        self._left -= frames
        return True

    def spend(self, frames: int = 1) -> None:
        """Count frames. Raise DenialOfServiceError (in h2 the cause of `ENHANCE_YOUR_CALM`) if they are too many."""
        if not self.try_spend(frames):
            self.refuse("too many frames without content")
            raise DenialOfServiceError("too many frames without content")

    def earn(self, frames: int) -> None:
        """Allow that many frames more: the client was sent something."""
        self._left = min(FRAMES_BURST, self._left + frames)

    def refuse(self, why: str) -> None:
        """Note that the connection is cut. Idempotent."""
        if not self.refused:
            self.refused = True
            self._on_refusal(why)


class CutAddresses:
    """Addresses whose connections were cut, and until when each owes for it. One that owes more than CUTS_FREE_S gets
    its next HTTP/2 connections and WebSockets one after the other. A /64 of IPv6 is one address.
    """

    def __init__(self, time_s: Callable[[], float]) -> None:
        self._time_s = time_s
        self._owes_until_s: dict[object, float] = {}

    def cut(self, peer: object) -> None:
        """Note that a connection of `peer`, a transport's `peername`, was cut."""
        now_s = self._time_s()
        self._owes_until_s = {other: until_s for other, until_s in self._owes_until_s.items() if until_s > now_s}
        address = _address_of(peer)
        self._owes_until_s[address] = self._owes_until_s.get(address, now_s) + CUT_S

    def claim_turn_s(self, peer: object) -> float:
        """Return the seconds that a new connection of `peer` waits, and take its turn. Infinity: too many wait."""
        address = _address_of(peer)
        wait_s = self._owes_until_s.get(address, 0.0) - self._time_s() - CUTS_FREE_S
        if 0 < wait_s <= WAIT_MOST_S:
            self._owes_until_s[address] += NEXT_AFTER_S
        return wait_s if wait_s <= WAIT_MOST_S else math.inf


def _address_of(peer: object) -> object:
    host = peer[0] if isinstance(peer, tuple) else ""
    return ip_network((host.partition("%")[0], 64), strict=False) if ":" in host else host


class CheckedFrames(FrameBuffer):
    """The incoming frames of one HTTP/2 connection. h2 takes them from here, FRAMES_PER_TURN after each `begin_turn`.
    Each is checked when its head is there: h2 itself gathers 16 MiB of a frame before it looks at the length.
    """

    def __init__(self, budget: FrameBudget, time_s: Callable[[], float], max_block_bytes: int) -> None:
        super().__init__(server=True)
        self._budget = budget
        self._small_data = FrameBudget(time_s)
        self._max_block_bytes = max_block_bytes
        self._block_bytes = 0  # of the header block that has no end yet
        self._turn_left = 0
        self.more = False  # true if whole frames are left for the next turn
        self.pause_s = 0.0  # the time to wait before it: the client's pieces of bodies are small and many

    @property
    def held_bytes(self) -> int:
        """Bytes of frames and header blocks that are not whole."""
        return len(self._data) + self._block_bytes

    def begin_turn(self) -> None:
        self._turn_left = FRAMES_PER_TURN
        self.more = False
        self.pause_s = 0.0

    def __next__(self) -> object:  # type: ignore[override]
        data = self._data
        if len(data) >= _HEAD_BYTES:
            length = int.from_bytes(data[:3], "big")
            if length > self.max_frame_size:
                self._budget.refuse("a frame is too long")
                raise FrameTooLargeError(f"a frame has {length} bytes, at most {self.max_frame_size}")
            if len(data) >= _HEAD_BYTES + length:
                if self._turn_left <= 0:
                    self.more = True
                    raise StopIteration
                self._count(data[3], data[4], length)
        try:
            return super().__next__()
        except ProtocolError as error:
            self._budget.refuse(str(error))
            raise

    def _count(self, kind: int, flags: int, length: int) -> None:
        self._turn_left -= 1 if kind in _PIECES else FRAMES_PER_TURN // _FRAMES_IN_TURN
        if kind == DataFrame.type:
            small = length < SMALL_DATA_BYTES or flags & _PADDED
            # Clients that send a body byte by byte are slowed, not cut.
            if small and not flags & _END_STREAM and not self._small_data.try_spend():
                self.pause_s += 1 / FRAMES_PER_S
            return
        if kind in (HeadersFrame.type, ContinuationFrame.type):
            self._block_bytes += length
            if self._block_bytes > self._max_block_bytes:
                self._budget.refuse("a header block is too long")
                raise DenialOfServiceError(f"a header block has more than {self._max_block_bytes} bytes")
            if flags & _END_HEADERS:
                self._block_bytes = 0
        self._budget.spend(_COSTS.get(kind, 1) + (length // _SETTINGS_BYTES if kind == SettingsFrame.type else 0))
