"""Budgets of frames: what counts, what earns, how many are handed out in a turn; and the input without a key."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct

import pytest
from h2.errors import ErrorCodes
from h2.exceptions import DenialOfServiceError, FrameTooLargeError

from topics.frontend.http.connections import UnadmittedInput
from topics.frontend.http.frame_budget import (
    ADDRESSES_MAX,
    CUT_S,
    CUTS_FREE_S,
    FRAMES_BURST,
    FRAMES_PER_S,
    FRAMES_PER_TURN,
    NEXT_AFTER_S,
    OVERDRAWN,
    WAIT_MOST_S,
    CheckedFrames,
    ClientAddresses,
    FrameAllowance,
    FrameBudget,
)

MAX_BLOCK_BYTES = 20_000
PEER = ("192.0.2.1", 40_000)
RESERVE = FRAMES_BURST // OVERDRAWN
DATA, HEADERS, RESET, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9


class Seconds:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def frame(kind: int, flags: int = 0, stream_id: int = 1, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + body


class Wire:
    """Checked frames as h2 takes them."""

    def __init__(self) -> None:
        self.time_s = Seconds()
        self.refusals: list[str] = []
        self.budget = FrameBudget(ClientAddresses(self.time_s, self.refusals.append).of(PEER), self.refusals.append)
        self.frames = CheckedFrames(self.budget, MAX_BLOCK_BYTES)
        self.frames.max_frame_size = 16_384
        self.frames.add_data(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

    def turns(self, data: bytes) -> int:
        """Turns that it takes to hand out all of it."""
        self.frames.add_data(data)
        turns = 0
        while True:
            self.frames.begin_turn()
            turns += 1
            handed_out = len(list(self.frames))
            assert handed_out <= FRAMES_PER_TURN
            if not self.frames.more:
                return turns


def test_an_address_is_refilled_with_time_and_by_what_is_sent() -> None:
    time_s = Seconds()
    allowance = FrameAllowance(time_s)
    assert allowance.try_take(FRAMES_BURST)
    assert not allowance.try_take(1)
    time_s.now_s += 10 / FRAMES_PER_S
    assert allowance.try_take(10)
    assert not allowance.try_take(1)
    allowance.earn(3)
    assert allowance.try_take(3)
    allowance.earn(5 * FRAMES_BURST)
    time_s.now_s += 3600
    assert allowance.try_take(FRAMES_BURST), "no more than a burst is saved up"
    assert not allowance.try_take(1)


def test_a_connection_has_a_reserve_beyond_its_address() -> None:
    budget = FrameBudget(ClientAddresses(Seconds(), lambda _why: None).of(PEER), lambda _why: None)
    budget.spend(FRAMES_BURST)
    for _ in range(RESERVE):
        budget.spend()
    with pytest.raises(DenialOfServiceError) as raised:
        budget.spend()
    assert raised.value.error_code == ErrorCodes.ENHANCE_YOUR_CALM
    assert budget.refused


def test_all_connections_of_an_address_send_as_much_as_one_and_others_go_on() -> None:
    time_s = Seconds()
    addresses = ClientAddresses(time_s, lambda _why: None)
    quiet, *flooders = [FrameBudget(addresses.of(PEER), lambda _why: None) for _ in range(61)]
    passed = 0
    for _ in range(200):
        time_s.now_s += 0.01
        for flooder in flooders:
            if not flooder.refused:  # each sends 100 frames/s
                with contextlib.suppress(DenialOfServiceError):
                    flooder.spend()
                    passed += 1
    left = sum(not flooder.refused for flooder in flooders)
    assert left * 100 <= FRAMES_PER_S, "those go on that send no more than is allowed"
    assert passed <= FRAMES_BURST + 2 * FRAMES_PER_S + 60 * RESERVE
    quiet.spend(RESERVE)
    other = FrameBudget(addresses.of(("192.0.2.2", 1)), lambda _why: None)
    other.spend(FRAMES_BURST)


def test_connections_that_come_and_go_find_the_budget_of_their_address() -> None:
    addresses = ClientAddresses(Seconds(), lambda _why: None)
    FrameBudget(addresses.of(PEER), lambda _why: None).spend(FRAMES_BURST)
    assert not addresses.of(("192.0.2.1", 40_001)).frames.try_take(1)
    for n in range(ADDRESSES_MAX):
        addresses.of((f"192.0.{n >> 8}.{n & 255}.x", 1))
    assert addresses.of(PEER).frames.try_take(1), "forgotten, as so many have come since"


@pytest.mark.parametrize(
    ("one", "burst"),
    [
        (frame(PING, 0, 0, b"12345678"), FRAMES_BURST + RESERVE),
        (frame(SETTINGS, 0, 0), FRAMES_BURST + RESERVE),
        (frame(SETTINGS, 0, 0, b"\0\3\0\0\0\1" * 2000), FRAMES_BURST // 188),
        (frame(RESET, 0, 1, b"\0\0\0\1"), FRAMES_BURST // 8 + RESERVE // 8),
        (frame(0x42), FRAMES_BURST + RESERVE),
    ],
    ids=["ping", "settings", "long settings", "reset", "unknown"],
)
def test_so_many_pass_at_the_start_and_one_more_is_refused(one: bytes, burst: int) -> None:
    wire = Wire()
    assert wire.turns(one * burst) == -(-burst // 2)
    with pytest.raises(DenialOfServiceError):
        wire.turns(one * 8)
    assert len(wire.refusals) == 1


def test_an_address_that_is_cut_again_and_again_waits_for_new_connections_one_after_the_other() -> None:
    time_s = Seconds()
    addresses = ClientAddresses(time_s, lambda _why: None)
    flooder, other = addresses.of(PEER), addresses.of(("192.0.2.2", 40_000))
    for _ in range(round(CUTS_FREE_S / CUT_S)):
        flooder.cut()
    assert flooder.claim_turn_s() <= 0
    flooder.cut()
    assert flooder.claim_turn_s() == pytest.approx(CUT_S)
    assert flooder.claim_turn_s() == pytest.approx(CUT_S + NEXT_AFTER_S)
    assert other.claim_turn_s() <= 0
    for _ in range(round(WAIT_MOST_S / CUT_S)):
        flooder.cut()
    assert flooder.claim_turn_s() == math.inf
    time_s.now_s += WAIT_MOST_S
    assert 0 < flooder.claim_turn_s() < WAIT_MOST_S
    time_s.now_s += WAIT_MOST_S + CUTS_FREE_S
    assert flooder.claim_turn_s() <= 0


def test_a_network_of_ipv6_is_one_address() -> None:
    addresses = ClientAddresses(Seconds(), lambda _why: None)
    address = addresses.of(("2001:db8::1", 40_000, 0, 0))
    assert addresses.of(("2001:db8::ffff", 40_000, 0, 0)) is address
    assert addresses.of(("2001:db8:0:1::1", 40_000, 0, 0)) is not address


def test_requests_are_free_and_take_half_a_turn() -> None:
    wire = Wire()
    assert wire.turns(frame(HEADERS, 0x5, 1, b"\x82") * 3 * FRAMES_BURST) == 3 * FRAMES_BURST / 2


def test_small_pieces_of_bodies_are_slowed_and_not_refused() -> None:
    wire = Wire()
    wire.turns(frame(DATA, 0, 1, b"x") * FRAMES_BURST)
    assert wire.frames.pause_s == 0
    wire.turns(frame(DATA, 0, 1, b"x") * FRAMES_PER_TURN)
    assert wire.frames.pause_s == pytest.approx(FRAMES_PER_TURN / FRAMES_PER_S)
    wire.turns(frame(DATA, 0, 1, b"x" * 300) * FRAMES_PER_TURN + frame(DATA, 1, 1, b"x"))
    assert wire.frames.pause_s == 0
    assert not wire.refusals


def test_a_long_frame_is_refused_at_its_head() -> None:
    wire = Wire()
    with pytest.raises(FrameTooLargeError):
        wire.turns(struct.pack(">I", 16_385)[1:] + bytes([DATA, 0]) + struct.pack(">I", 1))
    assert wire.frames.held_bytes == 9


def test_a_header_block_counts_until_its_end_and_is_bounded() -> None:
    wire = Wire()
    wire.turns(frame(HEADERS, 0, 1, b"x" * 10_000) + frame(CONTINUATION, 0, 1, b"x" * 5_000))
    assert wire.frames.held_bytes == 15_000
    wire.turns(frame(CONTINUATION, 4, 1, b"x" * 5_000))
    assert wire.frames.held_bytes == 0
    with pytest.raises(DenialOfServiceError):
        wire.turns(frame(HEADERS, 0, 3, b"x" * 10_000) + frame(CONTINUATION, 4, 3, b"x" * 10_001))


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_beyond_the_bound_those_are_cut_that_have_held_input_for_longest() -> None:
    inputs = UnadmittedInput()
    inputs.budget.most_bytes = 100
    first, second, third = (Transport() for _ in range(3))
    inputs.resize(first, 40)
    inputs.resize(second, 40)
    inputs.resize(first, 20)
    inputs.resize(third, 40)
    assert inputs.budget.held_bytes == 100
    inputs.resize(first, 0)
    inputs.resize(first, 20)  # from now on the last
    inputs.resize(first, 21)
    assert [one.aborted for one in (first, second, third)] == [False, True, False]
    inputs.resize(second, 0)
    assert inputs.budget.held_bytes == 61
