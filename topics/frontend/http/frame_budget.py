"""Bounds on the frames of one client: those that carry nothing, and those that this process handles in one turn.

A ping, a reset or an empty piece of a message takes 10 bytes and some 50 µs, so 1 MB/s of them would take all of the
process's time. An address may send FRAMES_BURST of them, and then FRAMES_PER_S, which take 5 % of that time. Answers
earn more. Beyond that each connection has a reserve, and is cut when the reserve is used up. A turn is two frames or
FRAMES_PER_TURN pieces of bodies; then other connections have their turns. A client may come back at once after a cut,
so an address whose connections are cut again and again gets new ones more slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ipaddress import ip_network
from typing import Final

from h2.exceptions import DenialOfServiceError, FrameTooLargeError, ProtocolError
from h2.frame_buffer import FrameBuffer
from hyperframe.frame import ContinuationFrame, DataFrame, GoAwayFrame, HeadersFrame, RstStreamFrame, SettingsFrame

FRAMES_PER_S: Final = 1000
FRAMES_BURST: Final = 500
OVERDRAWN: Final = 8  # frames of the connection's reserve that one frame beyond its address's allowance takes
ADDRESSES_MAX: Final = 4096  # addresses that are remembered; open connections also remember their own
CUT_S: Final = 1.0  # what an address owes for each cut
CUTS_FREE_S: Final = 3.0
NEXT_AFTER_S: Final = 0.1  # the time between two connections of an address that wait
WAIT_MOST_S: Final = 10.0
FRAMES_PER_TURN: Final = 8
EARNED_BY_ANSWER: Final = 4
EARNED_PER_BYTES: Final = 1024
FIELDS_FREE: Final = 128
"""Header fields of a block. Each further one counts as a frame: a block of 3 KB may refer to 3,000 fields."""
SMALL_DATA_BYTES: Final = 256
_FRAMES_IN_TURN: Final = 2
_PIECES: Final = (DataFrame.type, ContinuationFrame.type)
"""Kinds of frames of which FRAMES_PER_TURN make a turn. A frame of another kind takes the time of several."""
RESET_COST: Final = 8
"""A reset costs more than other frames, because it undoes a request without an answer, whichever side resets."""
_COSTS: Final = {HeadersFrame.type: 0, RstStreamFrame.type: RESET_COST}  # `http2_buffer` counts others
_SETTINGS_BYTES: Final = 64  # settings that count as one frame more
_END_STREAM, _END_HEADERS, _PADDED = 0x1, 0x4, 0x8
_HEAD_BYTES: Final = 9


class FrameAllowance:
    """The number of frames that an address may still send, below 0 if it sent more. Time and answers raise it."""

    def __init__(self, time_s: Callable[[], float]) -> None:
        self._time_s = time_s
        self._left: float = FRAMES_BURST
        self._refilled_s = time_s()

    def try_take(self, frames: int) -> bool:
        """Take frames; False if they are too many, and not taken."""
        now_s = self._time_s()
        self.earn((now_s - self._refilled_s) * FRAMES_PER_S)
        self._refilled_s = now_s
        if self._left < frames:
            return False
        self._left -= frames
        return True

    def take_s(self) -> float:
        """Take a frame in any case, and return the seconds to wait until it is allowed."""
        if not self.try_take(1):
            self._left -= 1
        return max(0.0, -self._left / FRAMES_PER_S)

    def earn(self, frames: float) -> None:
        self._left = min(FRAMES_BURST, self._left + frames)


class ClientAddress:
    """The address of clients. All its connections together may send `frames` without content, and small `pieces` of
    bodies. It owes CUT_S for each connection that was cut. Beyond CUTS_FREE_S its next connections wait in turn.
    """

    def __init__(self, time_s: Callable[[], float]) -> None:
        self._time_s = time_s
        self._owes_until_s = 0.0
        self.frames, self.pieces = FrameAllowance(time_s), FrameAllowance(time_s)

    def cut(self) -> None:
        """Note that a connection was cut."""
        self._owes_until_s = max(self._owes_until_s, self._time_s()) + CUT_S

    def claim_turn_s(self) -> float:
        """Return the seconds that a new connection has to wait for its turn; infinity if too many wait."""
        wait_s = self._owes_until_s - self._time_s() - CUTS_FREE_S
        if 0 < wait_s <= WAIT_MOST_S:
            self._owes_until_s += NEXT_AFTER_S
        return wait_s if wait_s <= WAIT_MOST_S else math.inf


class FrameBudget:
    """The frames without content that one connection may still send: those of its address, then its own reserve."""

    def __init__(self, address: ClientAddress, on_refusal: Callable[[str], None]) -> None:
        self.address = address
        self._on_refusal = on_refusal
        self._reserve = FRAMES_BURST
        self.refused = False  # true if the connection is cut for what it sent

    def spend(self, frames: int = 1) -> None:
        """Count frames. Raise DenialOfServiceError (in h2 the cause of `ENHANCE_YOUR_CALM`) if they are too many."""
        if self.address.frames.try_take(frames):
            self._reserve = min(FRAMES_BURST, self._reserve + frames)
            return
        self._reserve -= frames * OVERDRAWN
        if self._reserve < 0:
            self.refuse("too many frames without content")
            raise DenialOfServiceError("too many frames without content")

    def earn(self, frames: int) -> None:
        """Allow so many frames more, because the client was sent something."""
        self.address.frames.earn(frames)
        self._reserve = min(FRAMES_BURST, self._reserve + frames)

    def refuse(self, why: str) -> None:
        """Note that the connection is cut. Idempotent."""
        if not self.refused:
            self.refused = True
            self.address.cut()
            self._on_refusal(why)


class ClientAddresses:
    """The addresses of clients: the last ADDRESSES_MAX that came. A /64 of IPv6 is one address."""

    def __init__(self, time_s: Callable[[], float], on_refusal: Callable[[str], None]) -> None:
        """`on_refusal` is told why a connection is cut."""
        self._time_s = time_s
        self._on_refusal = on_refusal
        self._addresses: dict[object, ClientAddress] = {}

    def budget(self, peer: object) -> FrameBudget:
        """Return the budget of a new connection of `peer`, a transport's `peername`."""
        return FrameBudget(self.of(peer), self._on_refusal)

    def of(self, peer: object) -> ClientAddress:
        """Return the address of `peer`, a transport's `peername`."""
        host = peer[0] if isinstance(peer, tuple) else ""
        key = ip_network((host.partition("%")[0], 64), strict=False) if ":" in host else host
        self._addresses[key] = address = self._addresses.pop(key, None) or ClientAddress(self._time_s)
        if len(self._addresses) > ADDRESSES_MAX:
            del self._addresses[next(iter(self._addresses))]
        return address


class CheckedFrames(FrameBuffer):
    """The incoming frames of one HTTP/2 connection. h2 takes them from here, FRAMES_PER_TURN after each `begin_turn`.
    Each is checked when its head is there: h2 itself gathers 16 MiB of a frame before it looks at the length.
    """

    def __init__(self, budget: FrameBudget, max_block_bytes: int) -> None:
        super().__init__(server=True)
        self._budget = budget
        self._max_block_bytes = max_block_bytes
        self._block_bytes = 0  # of the header block that has no end yet
        self._turn_left = 0
        self.more = False  # true if whole frames are left for the next turn
        self.pause_s = 0.0  # the time to wait before the next turn, if the client sends many small pieces of bodies

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
            frame = super().__next__()
        except ProtocolError as error:
            self._budget.refuse(str(error))
            raise
        if isinstance(frame, GoAwayFrame) and not frame.error_code:
            return next(self)  # the client only begins nothing more; h2 would send it no answers any more
        return frame

    def _count(self, kind: int, flags: int, length: int) -> None:
        self._turn_left -= 1 if kind in _PIECES else FRAMES_PER_TURN // _FRAMES_IN_TURN
        if kind == DataFrame.type:
            small = length < SMALL_DATA_BYTES or flags & _PADDED
            # Clients that send a body byte by byte are slowed, not cut.
            if small and not flags & _END_STREAM:
                self.pause_s = self._budget.address.pieces.take_s()
            return
        if kind in (HeadersFrame.type, ContinuationFrame.type):
            self._block_bytes += length
            if self._block_bytes > self._max_block_bytes:
                self._budget.refuse("a header block is too long")
                raise DenialOfServiceError(f"a header block has more than {self._max_block_bytes} bytes")
            if flags & _END_HEADERS:
                self._block_bytes = 0
        self._budget.spend(_COSTS.get(kind, 1) + (length // _SETTINGS_BYTES if kind == SettingsFrame.type else 0))
